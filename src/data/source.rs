//! Expands a recipe's paths, folders and patterns into data files. Knows nothing of rows.

use std::io;
use std::path::{Path, PathBuf};

use crate::files::{FileError, failed};

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
        "the folder {} holds no data file ({}){}", path.display(), EXTENSIONS.map(|end| format!(".{end}")).join(", "), in_folders(path)
    )]
    EmptyFolder {
        /// The path as the recipe has it.
        path: PathBuf,
    },
    /// A folder with the files of several splits.
    #[error("the folder {} holds rows to train on and rows to test on ({train}, {held_out}); name the files: {:?}", path.display(), path.join("train*"))]
    SeveralSplits {
        path: PathBuf,
        /// A file that is not named as held out, and one that is.
        train: String,
        held_out: String,
    },
    /// A pattern without a file.
    #[error("the pattern {pattern:?} matches no file")]
    NoMatch { pattern: String },
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
/// Words in the names of files that are held out from training.
const HELD_OUT: [&str; 6] = ["validation", "valid", "val", "dev", "eval", "test"];

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
        || ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"].contains(&last);
    !is_about_data && EXTENSIONS.contains(&extension(name).as_str())
}

/// Whether a word of the name is one of `words`.
pub fn has_word(name: &str, words: &[&str]) -> bool {
    name.split(|c: char| !c.is_ascii_alphabetic()).any(|word| words.contains(&word.to_ascii_lowercase().as_str()))
}

/// The files of a list of paths, folders and globs: in the order of the list, those of a folder and of a glob by name.
///
/// # Errors
/// A path or pattern without a file.
pub fn find(patterns: &[String]) -> Result<Vec<PathBuf>, SourceError> {
    let mut found = Vec::new();
    for pattern in patterns {
        let path = Path::new(pattern);
        if path.is_dir() {
            found.extend(files_of(path)?);
        } else if path.exists() {
            found.push(path.to_owned()); // also a name that looks like a pattern
        } else if pattern.contains(['*', '?', '[']) {
            found.extend(matches(pattern)?);
        } else {
            return Err(SourceError::Missing { path: path.to_owned() });
        }
    }
    Ok(found)
}

/// The data files of a folder, without those of its folders. Texts count where there is nothing else: beside rows they are notes.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let names = names_in(folder)?;
    let (texts, others): (Vec<&String>, _) =
        names.iter().filter(|name| is_data(name)).partition(|name| extension(name) == TEXT);
    let chosen = if others.is_empty() { texts } else { others };
    let (held_out, train): (Vec<&String>, _) = chosen.iter().copied().partition(|name| has_word(name, &HELD_OUT));
    match (train.first(), held_out.first()) {
        (None, None) => Err(SourceError::EmptyFolder { path: folder.to_owned() }),
        (Some(&train), Some(&held_out)) => {
            let path = folder.to_owned();
            Err(SourceError::SeveralSplits { path, train: train.clone(), held_out: held_out.clone() })
        }
        _ => Ok(chosen.into_iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect()),
    }
}

/// The names of what lies in a folder, sorted.
fn names_in(folder: &Path) -> Result<Vec<String>, SourceError> {
    let unread = |source| SourceError::from(failed("read", folder)(source));
    let entries = std::fs::read_dir(folder).map_err(unread)?;
    let name = |entry: io::Result<std::fs::DirEntry>| Ok(entry.map_err(unread)?.file_name().into_string().ok());
    let names: Result<Vec<Option<String>>, SourceError> = entries.map(name).collect();
    let mut names: Vec<String> = names?.into_iter().flatten().collect();
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

fn matches(pattern: &str) -> Result<Vec<PathBuf>, SourceError> {
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
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c[1].txt", "a.jsonl", "b.jsonl"]);
        assert!(matches!(find(&[at("x.jsonl")]), Err(SourceError::Missing { .. })));
        assert!(matches!(find(&[at("*.parquet")]), Err(SourceError::NoMatch { .. })));
        assert!(matches!(find(&[at("[.parquet")]), Err(SourceError::BadPattern { .. })));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_folder_is_its_data_files_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().display().to_string();
        let add = |name: &str| fs::write(dir.path().join(name), "{}").unwrap();
        let found = || {
            let found = find(std::slice::from_ref(&folder)).map_err(|error| error.to_string().replace(&folder, "DIR"));
            Ok::<_, String>(
                found?.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect::<Vec<_>>(),
            )
        };
        fs::create_dir(dir.path().join("train")).unwrap();
        let empty = found().unwrap_err();
        assert!(
            empty.starts_with("the folder DIR holds no data file (.jsonl, ")
                && empty.ends_with("it has folders: DIR/train"),
            "{empty}"
        );
        ["b.txt", "a.txt.gz", "notes.md"].into_iter().for_each(add);
        assert_eq!(found().unwrap(), ["a.txt.gz", "b.txt"]);
        ["2.jsonl", "1.parquet", "dataset_info.json", ".hidden.json"].into_iter().for_each(add);
        assert_eq!(found().unwrap(), ["1.parquet", "2.jsonl"]);
        add("test-00000.parquet");
        assert_eq!(
            found().unwrap_err(),
            "the folder DIR holds rows to train on and rows to test on (1.parquet, test-00000.parquet); name the files: \"DIR/train*\""
        );
    }
}
