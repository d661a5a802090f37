//! Expands a recipe's paths and patterns into data files. Knows nothing of rows.

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
    /// A folder, of which nobody knows which files are meant.
    #[error("{} is a folder; name its files by a pattern: {:?}", path.display(), path.join("*.jsonl"))]
    Folder {
        /// The path as the recipe has it.
        path: PathBuf,
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
        "{} is {format}; rows are read from JSONL (one object a line), JSON arrays, Parquet and Arrow, JSON also in gzip or zstd",
        path.display()
    )]
    Format { path: PathBuf, format: &'static str },
}

/// The files of a list of paths and globs: in the order of the list, the matches of a glob by name.
///
/// # Errors
/// A path or pattern without a file.
pub fn find(patterns: &[String]) -> Result<Vec<PathBuf>, SourceError> {
    let mut found = Vec::new();
    for pattern in patterns {
        let path = Path::new(pattern);
        if path.is_dir() {
            return Err(SourceError::Folder { path: path.to_owned() });
        }
        if path.exists() {
            found.push(path.to_owned()); // also a name that looks like a pattern
        } else if pattern.contains(['*', '?', '[']) {
            found.extend(matches(pattern)?);
        } else {
            return Err(SourceError::Missing { path: path.to_owned() });
        }
    }
    Ok(found)
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
        let folder = dir.path().display().to_string();
        let error = find(&[at("a.jsonl"), folder.clone()]).unwrap_err().to_string();
        assert_eq!(error, format!("{folder} is a folder; name its files by a pattern: \"{folder}/*.jsonl\""));
        assert!(matches!(find(&[at("x.jsonl")]), Err(SourceError::Missing { .. })));
        assert!(matches!(find(&[at("*.parquet")]), Err(SourceError::NoMatch { .. })));
        assert!(matches!(find(&[at("[.parquet")]), Err(SourceError::BadPattern { .. })));
    }
}
