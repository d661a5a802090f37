//! A backbone in GGUF: one file, or the shards of one.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::header::{Header, HeaderError, TensorEntry};
use super::metadata::Metadata;
use super::names::{self, Conversion};
use crate::bounds::{BACKBONE_HEADS, GGUF_SHARDS};
use crate::files::{self, FileError, WrongContent, failed};

/// Why a GGUF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: {source}", path.display())]
    Header { path: PathBuf, source: HeaderError },
    #[error("{} has several GGUF files ({}); give the one that is meant", folder.display(), names.join(", "))]
    Several { folder: PathBuf, names: Vec<String> },
    #[error("{}: shard {number} of {count}; expected the first, {}", path.display(), first.display())]
    NotFirst { path: PathBuf, number: u64, count: u64, first: PathBuf },
    #[error("{}: expected the shards {expected}, got {got}", path.display())]
    Shards { path: PathBuf, expected: String, got: String },
}

/// A file whose header was read, with its shards.
#[derive(Debug)]
pub struct GgufFile {
    /// The first holds the metadata.
    shards: Vec<(PathBuf, Header)>,
}

impl GgufFile {
    /// Reads the headers of a file and of the shards beside it.
    ///
    /// # Errors
    /// [`GgufError`] names the file and what is wrong in it.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let first = read_header(path)?;
        let wrong = |source| GgufError::Header { path: path.into(), source };
        let [number, count] = ["split.no", "split.count"].map(|key| whole(&first.metadata, key));
        let (number, count) = (number.map_err(wrong)?.unwrap_or(0), count.map_err(wrong)?.unwrap_or(1));
        if number > 0 {
            return Err(GgufError::NotFirst {
                path: path.into(),
                number: number + 1,
                count,
                first: shard(path, 1, count),
            });
        }
        if count > GGUF_SHARDS {
            let source = HeaderError::Bound { what: "split.count".into(), most: GGUF_SHARDS, got: count };
            return Err(wrong(source));
        }
        let mut shards = vec![(path.to_owned(), first)];
        for number in 2..=count {
            let path = shard(path, number, count);
            let header = read_header(&path)?;
            shards.push((path, header));
        }
        let file = Self { shards };
        file.check_shards(path, count)?;
        Ok(file)
    }

    /// Each shard says which one it is, and no tensor is in two.
    fn check_shards(&self, path: &Path, count: u64) -> Result<(), GgufError> {
        let mut names = std::collections::HashSet::new();
        for (number, (path, header)) in (0..).zip(&self.shards) {
            let wrong = |source| GgufError::Header { path: path.clone(), source };
            let [its_number, its_count] = ["split.no", "split.count"].map(|key| whole(&header.metadata, key));
            let its = (its_number.map_err(wrong)?.unwrap_or(0), its_count.map_err(wrong)?.unwrap_or(1));
            if its != (number, count) {
                let [expected, got] =
                    [(number, count), its].map(|(number, count)| format!("{} of {count}", number + 1));
                return Err(GgufError::Shards { path: path.clone(), expected, got });
            }
            if let Some(name) = header.tensors.keys().find(|name| !names.insert(name.as_str())) {
                return Err(wrong(HeaderError::Twice { what: "tensor", name: name.clone() }));
            }
        }
        let all = self.shards[0].1.metadata.get("split.tensors.count").and_then(super::metadata::MetaValue::integer);
        match all.filter(|all| *all != names.len() as i64) {
            Some(all) => Err(GgufError::Shards {
                path: path.into(),
                expected: format!("with {all} tensors (split.tensors.count)"),
                got: names.len().to_string(),
            }),
            None => Ok(()),
        }
    }

    /// The files, the first one first.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|(path, _)| path.as_path())
    }

    /// The files with their tensors, by the names in the file.
    pub fn shards(&self) -> &[(PathBuf, Header)] {
        &self.shards
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.shards[0].1.metadata
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// It is missing, or no text.
    pub fn architecture(&self) -> Result<&str, HeaderError> {
        const KEY: &str = "general.architecture";
        let value = self.metadata().get(KEY);
        value.and_then(|value| value.text()).ok_or_else(|| HeaderError::Value {
            key: KEY.into(),
            expected: "the name of an architecture".into(),
            got: value.map_or_else(|| "no such key".into(), ToString::to_string),
        })
    }

    /// A tensor by its name in the file.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.shards.iter().find_map(|(_, header)| header.tensors.get(name))
    }

    /// The name of a tensor in transformers, and how its numbers differ; `None` for one that the config holds.
    ///
    /// # Errors
    /// As [`GgufFile::architecture`].
    pub fn in_transformers(&self, name: &str) -> Result<Option<(String, Conversion)>, HeaderError> {
        let architecture = self.architecture()?;
        let heads = |key: &str| self.metadata().get(&format!("{architecture}.{key}")).and_then(|value| value.integer());
        let query = heads("attention.head_count").unwrap_or(1);
        let key = heads("attention.head_count_kv").unwrap_or(query);
        let conversion =
            names::conversion(name, architecture, [query, key].map(|heads| heads.clamp(1, BACKBONE_HEADS)));
        Ok(names::in_transformers(name, architecture).map(|name| (name, conversion)))
    }

    /// Reads a short tensor of plain numbers, by its name in the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>, HeaderError> {
        const MOST: u64 = 1 << 16;
        let Some((path, entry)) = self.shards.iter().find_map(|(path, header)| Some((path, header.tensors.get(name)?)))
        else {
            return Ok(None);
        };
        if !entry.kind.is_dense() || entry.bytes > MOST {
            let (expected, got) =
                (format!("at most {MOST} bytes of F32, F16 or BF16"), format!("{} of {:?}", entry.bytes, entry.kind));
            return Err(HeaderError::Tensor { name: name.into(), expected, got });
        }
        let mut file = files::open_regular(path)?;
        file.seek(SeekFrom::Start(entry.start))?;
        let mut bytes = vec![0; entry.bytes as usize];
        file.read_exact(&mut bytes)?;
        let mut numbers = vec![0.0; bytes.len() / entry.kind.bytes];
        entry.kind.dequantize(&bytes, &mut numbers);
        Ok(Some(numbers.into_iter().map(f64::from).collect()))
    }
}

fn whole(metadata: &Metadata, key: &str) -> Result<Option<u64>, HeaderError> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    let number = value.integer().and_then(|number| u64::try_from(number).ok());
    let wrong =
        || HeaderError::Value { key: key.into(), expected: "a number of shards".into(), got: value.to_string() };
    number.map(Some).ok_or_else(wrong)
}

fn read_header(path: &Path) -> Result<Header, GgufError> {
    let file = files::open_regular(path).map_err(failed("read", path))?;
    let length = file.metadata().map_err(failed("read", path))?.len();
    header_of(file, length).map_err(|source| GgufError::Header { path: path.into(), source })
}

fn header_of(mut file: File, length: u64) -> Result<Header, HeaderError> {
    let mut start = vec![];
    Read::by_ref(&mut file).take(512).read_to_end(&mut start)?;
    if let Some(wrong) = WrongContent::in_binary(&start) {
        return Err(std::io::Error::from(wrong).into());
    }
    Header::read(BufReader::with_capacity(1 << 20, start.chain(file)), length)
}

/// A shard's path, `NAME-00002-of-00003.gguf`, beside another one's.
fn shard(path: &Path, number: u64, count: u64) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (begin, _) = name.rsplit_once("-of-").unwrap_or((&name, ""));
    let begin = begin.rsplit_once('-').map_or(begin, |(begin, _)| begin);
    files::parent(path).join(format!("{begin}-{number:05}-of-{count:05}.gguf"))
}

/// The only GGUF file, or the first shard of the only one, in a folder without config.json.
///
/// # Errors
/// [`GgufError::Several`], or a folder that cannot be read.
pub fn in_folder(path: &Path) -> Result<Option<PathBuf>, GgufError> {
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(None);
    }
    let entries = std::fs::read_dir(path).map_err(failed("read", path))?;
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<String> =
        names.filter(|name| is_model(name) && model_and_shard(name).is_some_and(|(_, shard)| shard == 1)).collect();
    names.sort_unstable();
    match names.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(path.join(one))),
        _ => Err(GgufError::Several { folder: path.into(), names }),
    }
}

/// Whether a path ends in `.gguf`.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The name of the model in a GGUF file's name, and which shard it is: of `NAME-00002-of-00003.gguf`, NAME and 2.
pub fn model_and_shard(name: &str) -> Option<(&str, u64)> {
    let is_end = |end: &&str| end.eq_ignore_ascii_case(".gguf");
    let stem = name.get(name.len().saturating_sub(5)..).filter(is_end).map(|end| &name[..name.len() - end.len()])?;
    let shard = stem.rsplit_once("-of-").and_then(|(begin, _)| begin.rsplit_once('-'));
    let number = shard.and_then(|(model, number)| Some((model, number.parse().ok()?)));
    Some(number.unwrap_or((stem, 1)))
}

/// Whether a file holds a model, and is not the vision encoder beside one.
pub fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    model_and_shard(file).is_some() && !file.starts_with("mmproj")
}
