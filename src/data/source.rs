//! Which files a recipe means, and what they are. Knows nothing of rows.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What can be wrong with a list of data files.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A plain path without a file.
    #[error("data file {} does not exist", path.display())]
    Missing {
        /// The path as the recipe has it.
        path: PathBuf,
    },
    /// A pattern without a file.
    #[error("the pattern {pattern:?} matches no file")]
    NoMatch {
        /// The pattern.
        pattern: String,
    },
    /// A pattern that is none.
    #[error("{pattern:?} is no valid pattern: {source}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        source: glob::PatternError,
    },
    /// The disk's own words.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A format that is known, and not read.
    #[error("{} is {format}; this version reads JSONL (one object a line), JSON arrays and Parquet", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What it is.
        format: &'static str,
    },
}

/// What a data file is, told by its first bytes: names lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Jsonl,
    JsonArray,
    Parquet,
}

/// The files of a list of paths and globs: in the order of the list, the matches of a glob by name.
///
/// # Errors
/// A path or pattern without a file.
pub fn find(patterns: &[String]) -> Result<Vec<PathBuf>, SourceError> {
    let mut found = Vec::new();
    for pattern in patterns {
        let path = Path::new(pattern);
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
        let path = entry.map_err(|error| SourceError::Read { path: error.path().to_owned(), source: error.into() })?;
        if path.is_file() {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(SourceError::NoMatch { pattern: pattern.to_owned() });
    }
    Ok(found)
}

impl Format {
    pub(super) fn of(path: &Path) -> Result<Self, SourceError> {
        let mut start = Vec::new();
        File::open(path)
            .and_then(|file| file.take(4096).read_to_end(&mut start))
            .map_err(|source| SourceError::Read { path: path.to_owned(), source })?;
        let refused = |format| Err(SourceError::Format { path: path.to_owned(), format });
        match start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start).trim_ascii_start() {
            [b'P', b'A', b'R', b'1', ..] => Ok(Self::Parquet),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => refused("an Arrow file"),
            [0x1f, 0x8b, ..] => refused("compressed with gzip"),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => refused("compressed with zstd"),
            [b'[', ..] => Ok(Self::JsonArray),
            _ => Ok(Self::Jsonl),
        }
    }
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
    fn a_format_is_told_by_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.parquet");
        fs::write(&path, "{\"text\": \"a\"}").unwrap();
        assert_eq!(Format::of(&path).unwrap(), Format::Jsonl);
        fs::write(&path, "\n [{\"text\": \"a\"}]").unwrap();
        assert_eq!(Format::of(&path).unwrap(), Format::JsonArray);
        fs::write(&path, "ARROW1\0\0").unwrap();
        assert!(Format::of(&path).unwrap_err().to_string().contains("an Arrow file"));
    }
}
