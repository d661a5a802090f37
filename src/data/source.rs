//! Expands a recipe's paths, folders and patterns into data files. Knows nothing of rows.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use super::described_folder::{self, DescribedFolder, DescriptionError, LeftOutSplits};
use crate::files::{FileError, check_regular, failed};

/// Why a list of data files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A plain path without a file.
    #[error("data file {} does not exist", path.display())]
    Missing {
        /// The path as the recipe has it.
        path: PathBuf,
    },
    /// A folder without a data file.
    #[error(
        "the folder {} holds no data file ({}; text formats also with .gz or .zst){}", path.display(),
        EXTENSIONS.map(|end| format!(".{end}")).join(", "), in_folders(path)
    )]
    EmptyFolder {
        /// The path as the recipe has it.
        path: PathBuf,
    },
    /// A folder with the files of several splits.
    #[error(
        "the folder {} holds files of several splits ({train}, {held_out}); name the files of one, such as {:?} or {:?}",
        path.display(), path.join(train), path.join(held_out)
    )]
    SeveralSplits {
        path: PathBuf,
        /// A file that is not named as held out, and one that is.
        train: String,
        held_out: String,
    },
    /// A folder that says in a file which of its files are data.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// A pattern without a file.
    #[error("the pattern {pattern:?} matches no file")]
    NoMatch { pattern: String },
    /// A name that is no text.
    #[error("the name of {} ({path:?}) is not UTF-8, as the files about a run are; rename it", path.display())]
    Name { path: PathBuf },
    /// An invalid pattern.
    #[error("{pattern:?} is no valid pattern: {source}")]
    BadPattern {
        pattern: String,
        /// What is wrong with it.
        source: glob::PatternError,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file that another program writes.
    #[error("{} changed while it was read; wait until it is written, then start again", path.display())]
    Changed { path: PathBuf },
    /// A compressed file that is cut off or damaged.
    #[error("cannot unpack {} as {format}: {source}; it may be cut off: copy or download it again", path.display())]
    Unpack {
        path: PathBuf,
        /// `gzip` or `zstd`.
        format: &'static str,
        source: io::Error,
    },
    /// A format that is known, and not read.
    #[error(
        "{} is {format}; rows are read from JSONL (one object a line), JSON arrays, CSV, text, Parquet and Arrow, all but the last two \
         also in gzip or zstd",
        path.display()
    )]
    Format { path: PathBuf, format: &'static str },
}

/// Extensions of data files.
pub const EXTENSIONS: [&str; 9] = ["jsonl", "json", "ndjson", "parquet", "arrow", "feather", "csv", "tsv", "txt"];
const TEXT: &str = "txt";
const COMPRESSED: [&str; 2] = [".gz", ".zst"];
/// Names of texts that lie beside data.
const NOTES: [&str; 6] = ["license", "licence", "readme", "requirements", "notice", "changelog"];
/// Words in the names of files to evaluate on, and of those to test on.
pub const VALIDATION: [&str; 5] = ["validation", "valid", "val", "dev", "eval"];
pub const TEST: [&str; 1] = ["test"];

/// The files that a list of paths, folders and globs stands for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FoundFiles {
    pub files: Vec<PathBuf>,
    /// Texts of the folders that hold other data files, too.
    pub texts_left_out: Vec<PathBuf>,
    /// Of folders that name their splits.
    pub splits_left_out: Vec<LeftOutSplits>,
}

/// The extension of a name in small letters, that of compression left out.
pub(super) fn extension(name: &str) -> String {
    let name = name.to_lowercase();
    let plain = COMPRESSED.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    plain.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map_or_else(String::new, |(_, end)| end.to_owned())
}

/// Whether a file of this name holds rows.
pub fn is_data(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    let is_about_data = last.starts_with('.')
        || ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"].contains(&last)
        || is_text(last) && NOTES.contains(&last.to_lowercase().split('.').next().unwrap_or_default());
    !is_about_data && EXTENSIONS.contains(&extension(name).as_str())
}

/// Whether a file of this name is plain text.
pub fn is_text(name: &str) -> bool {
    extension(name) == TEXT
}

/// Whether a file of this name is a table of comma- or tab-separated values.
pub fn is_csv(name: &str) -> bool {
    ["csv", "tsv"].contains(&extension(name).as_str())
}

/// Whether a file of this name is held out from training.
pub fn is_held_out(name: &str) -> bool {
    has_word(name, &VALIDATION) || has_word(name, &TEST)
}

/// Whether a word of the name is one of `words`.
pub fn has_word(name: &str, words: &[&str]) -> bool {
    name.split(|c: char| !c.is_ascii_alphabetic()).any(|word| words.contains(&word.to_ascii_lowercase().as_str()))
}

/// The files of a list of paths, folders and globs: in the order of the list, those of a folder and of a glob by name.
///
/// # Errors
/// A path or pattern without a file.
pub fn find(patterns: &[String]) -> Result<FoundFiles, SourceError> {
    let mut found = FoundFiles::default();
    for pattern in patterns {
        let path = Path::new(pattern);
        if path.is_dir() {
            let inner = match described_folder::describe(path)? {
                Some(described) => described_files(described)?,
                None => files_of(path)?,
            };
            found.files.extend(inner.files);
            found.texts_left_out.extend(inner.texts_left_out);
            found.splits_left_out.extend(inner.splits_left_out);
        } else if path.exists() {
            check_regular(path).map_err(failed("read", path))?;
            found.files.push(path.to_owned()); // also a name that looks like a pattern
        } else if pattern.contains(['*', '?', '[']) {
            found.files.extend(matches(pattern)?);
        } else {
            return Err(SourceError::Missing { path: path.to_owned() });
        }
    }
    found.files.iter().try_for_each(|path| check_name(path))?;
    Ok(found)
}

/// The files of a folder that names them.
fn described_files(described: DescribedFolder) -> Result<FoundFiles, SourceError> {
    let text = |path: &PathBuf| {
        check_name(path)?;
        Ok(path.to_string_lossy().into_owned())
    };
    let mut found = find(&described.train.iter().map(text).collect::<Result<Vec<_>, SourceError>>()?)?;
    found.splits_left_out.extend(described.left_out);
    Ok(found)
}

/// Refuses a name that the files about a run could not hold.
pub(super) fn check_name(path: &Path) -> Result<(), SourceError> {
    if path.to_str().is_some() { Ok(()) } else { Err(SourceError::Name { path: path.to_owned() }) }
}

/// The data files of a folder, without those of its folders. Texts count where there is nothing else: beside rows they are notes.
fn files_of(folder: &Path) -> Result<FoundFiles, SourceError> {
    let names = names_in(folder)?;
    let is_distilled = names.iter().any(|name| is_of_distillation(&name.to_string_lossy()));
    let is_row_file = |name: &str| is_data(name) && (!is_distilled || name.starts_with("shard"));
    let names = names.into_iter().filter(|name| is_row_file(&name.to_string_lossy()));
    let files = names.map(|name| folder.join(name)).filter(|path| path.is_file());
    let (texts, others): (Vec<PathBuf>, _) = files.partition(|path| is_text(&path.to_string_lossy()));
    let (files, texts_left_out) = if others.is_empty() { (texts, vec![]) } else { (others, texts) };
    let names = || files.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let (train, held_out) = (names().find(|name| !is_held_out(name)), names().find(|name| is_held_out(name)));
    match (train, held_out) {
        (None, None) => Err(SourceError::EmptyFolder { path: folder.to_owned() }),
        (Some(train), Some(held_out)) => Err(SourceError::SeveralSplits { path: folder.to_owned(), train, held_out }),
        _ => Ok(FoundFiles { files, texts_left_out, ..FoundFiles::default() }),
    }
}

/// The `distill.json`s of a folder, which say what wrote its rows; none of a folder that `medusa distill` did not make.
///
/// # Errors
/// The folder cannot be read.
pub fn distillations(folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let names = names_in(folder)?.into_iter().filter(|name| is_of_distillation(&name.to_string_lossy()));
    Ok(names.map(|name| folder.join(name)).collect())
}

/// `distill.json`, or that of a share: beside it are shards, which hold rows, a journal, and refused questions.
fn is_of_distillation(name: &str) -> bool {
    let share = name.strip_prefix("distill").and_then(|name| name.strip_suffix(".json"));
    share.is_some_and(|share| share.is_empty() || share.starts_with('-') && share.contains("-of-"))
}

/// The names of what lies in a folder, sorted.
fn names_in(folder: &Path) -> Result<Vec<OsString>, SourceError> {
    let unread = |source| SourceError::from(failed("read", folder)(source));
    let entries = std::fs::read_dir(folder).map_err(unread)?;
    let name = |entry: io::Result<std::fs::DirEntry>| Ok(entry.map_err(unread)?.file_name());
    let mut names: Vec<OsString> = entries.map(name).collect::<Result<_, SourceError>>()?;
    names.sort_unstable();
    Ok(names)
}

/// Where else the files may be, as the end of a sentence.
fn in_folders(folder: &Path) -> String {
    let names = names_in(folder).unwrap_or_default().into_iter();
    let inner: Vec<String> = names
        .map(|name| folder.join(name))
        .filter(|path| path.is_dir())
        .map(|path| path.display().to_string())
        .collect();
    if inner.is_empty() { String::new() } else { format!("; it has folders: {}", inner.join(", ")) }
}

/// The files that match a pattern.
pub(super) fn matches(pattern: &str) -> Result<Vec<PathBuf>, SourceError> {
    let bad = |source| SourceError::BadPattern { pattern: pattern.to_owned(), source };
    let mut found = Vec::new();
    for entry in glob::glob(pattern).map_err(bad)? {
        let path = entry.map_err(|error| failed("read", error.path())(error.into()))?;
        if path.is_file() {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(SourceError::NoMatch { pattern: pattern.to_owned() });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn files_come_in_the_order_of_the_list_and_globs_by_name() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.jsonl", "a.jsonl", "c[1].txt"] {
            fs::write(dir.path().join(name), "{}").unwrap();
        }
        let at = |name: &str| dir.path().join(name).display().to_string();
        let found = find(&[at("c[1].txt"), at("*.jsonl")]).unwrap();
        let names: Vec<_> = found.files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c[1].txt", "a.jsonl", "b.jsonl"]);
        assert!(matches!(find(&[at("x.jsonl")]), Err(SourceError::Missing { .. })));
        assert!(matches!(find(&[at("*.parquet")]), Err(SourceError::NoMatch { .. })));
        assert!(matches!(find(&[at("[.parquet")]), Err(SourceError::BadPattern { .. })));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_distilled_folder_is_its_shards() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["shard-00000.parquet", "shard-2-of-3-00000.parquet", "journal.jsonl", "refused.jsonl"] {
            fs::write(dir.path().join(name), "{}").unwrap();
        }
        let found = || find(&[dir.path().display().to_string()]).unwrap().files.len();
        assert_eq!(found(), 4);
        for name in ["distill-2-of-3.json", "distill.json"] {
            fs::write(dir.path().join(name), "{}").unwrap();
            assert_eq!(found(), 2);
        }
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_folder_is_its_data_files_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().display().to_string();
        let add = |name: &str| fs::write(dir.path().join(name), "{}").unwrap();
        let found = || {
            let found = find(std::slice::from_ref(&folder)).map_err(|error| error.to_string().replace(&folder, "DIR"));
            let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
            let FoundFiles { files, texts_left_out, .. } = found?;
            let both = [files, texts_left_out].map(|paths| paths.iter().map(name).collect::<Vec<_>>().join(" "));
            Ok::<_, String>(both)
        };
        fs::create_dir(dir.path().join("train")).unwrap();
        fs::create_dir(dir.path().join("x.json")).unwrap();
        let empty = found().unwrap_err();
        assert!(
            empty.starts_with("the folder DIR holds no data file (.jsonl, ")
                && empty.ends_with("it has folders: DIR/train, DIR/x.json"),
            "{empty}"
        );
        ["b.txt", "a.txt.gz", "notes.md", "LICENSE.txt", "requirements.txt"].into_iter().for_each(add);
        assert_eq!(found().unwrap(), ["a.txt.gz b.txt", ""]);
        ["2.jsonl", "1.parquet", "dataset_info.json", ".hidden.json"].into_iter().for_each(add);
        assert_eq!(found().unwrap(), ["1.parquet 2.jsonl", "a.txt.gz b.txt"]);
        add("test-00000.parquet");
        assert_eq!(
            found().unwrap_err(),
            "the folder DIR holds files of several splits (1.parquet, test-00000.parquet); name the files of one, such as \"DIR/1.parquet\" or \"DIR/test-00000.parquet\""
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_name_that_is_not_utf_8_is_reported() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.jsonl"));
        fs::write(&path, "{}").unwrap();
        let refused = find(&[dir.path().display().to_string()]).unwrap_err().to_string();
        assert!(refused.contains("caf\\xE9.jsonl\") is not UTF-8"), "{refused}");
    }
}
