//! `medusa.sha256`: the SHA-256 of a folder's files, in the format of `sha256sum`, which can check it too. A list names only files of its own
//! folder; the list of a folder below is one of them. Where several processes write to one folder, each has a list `medusa-….sha256`.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{FileError, failed, parent, sha256, write_atomic};

/// The list of a folder that one process writes.
pub const CHECKSUMS: &str = "medusa.sha256";
/// How the names of all lists begin and end.
const NAME: [&str; 2] = ["medusa", ".sha256"];
/// Hexadecimal digits of a SHA-256.
const DIGITS: usize = 64;

/// Why a folder is not as it was written.
#[derive(Debug, thiserror::Error)]
pub enum ChecksumError {
    #[error(transparent)]
    File(#[from] FileError),
    /// The list itself.
    #[error("{}, line {line}: expected a SHA-256, two blanks and the name of a file beside it: the list is damaged; put back a copy, or remove the list to go on unchecked", path.display())]
    Line { path: PathBuf, line: usize },
    #[error(
        "{} was changed after it was written: expected sha256 {expected}, got {got}; put back a copy (if you changed it on purpose, remove its line \
         from {})", path.display(), list.display()
    )]
    Changed {
        path: PathBuf,
        expected: String,
        got: String,
        /// The file that says what is expected.
        list: PathBuf,
    },
    #[error("{} is missing, and {} lists it; put back a copy (if you removed it on purpose, remove its line)", path.display(), list.display())]
    Missing { path: PathBuf, list: PathBuf },
}

/// The lists of a folder.
#[derive(Debug)]
pub struct Checksums {
    folder: PathBuf,
    /// SHA-256 of a file by its name, and the list that says so.
    listed: BTreeMap<String, (String, PathBuf)>,
}

impl Checksums {
    /// Reads the lists of a folder; `None` if it has none, as folders of other programs and of earlier versions.
    ///
    /// # Errors
    /// [`ChecksumError`] for a list that is damaged or cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>, ChecksumError> {
        let mut all = Self { folder: folder.to_owned(), listed: BTreeMap::new() };
        let mut lists: Vec<PathBuf> = paths(folder)?.into_iter().filter(|path| is_list(path)).collect();
        lists.sort();
        for list in &lists {
            all.listed.append(&mut Self::of(folder, list, &read_list(list)?).listed);
        }
        Ok((!lists.is_empty()).then_some(all))
    }

    /// What one list of a folder says.
    pub fn of(folder: &Path, list: &Path, sums: &BTreeMap<String, String>) -> Self {
        let entry = |(name, sha256): (&String, &String)| (name.clone(), (sha256.clone(), list.to_owned()));
        Self { folder: folder.to_owned(), listed: sums.iter().map(entry).collect() }
    }

    /// The names of the listed files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.listed.keys().map(String::as_str)
    }

    /// The hash that a file must have, if it is listed.
    pub fn expected(&self, name: &str) -> Option<&str> {
        self.listed.get(name).map(|(sha256, _)| sha256.as_str())
    }

    /// Compares the hash of a file with the list; one that is not listed is as it may be.
    ///
    /// # Errors
    /// [`ChecksumError::Changed`].
    pub fn compare(&self, name: &str, got: &str) -> Result<(), ChecksumError> {
        match self.listed.get(name) {
            Some((expected, list)) if expected != got => Err(ChecksumError::Changed {
                path: self.folder.join(name),
                expected: expected.clone(),
                got: got.to_owned(),
                list: list.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Hashes a listed file, and compares. A list of a folder below is followed.
    ///
    /// # Errors
    /// [`ChecksumError`].
    pub fn verify_file(&self, name: &str) -> Result<(), ChecksumError> {
        let path = self.folder.join(name);
        let got = match sha256(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let list = self.listed.get(name).map_or_else(|| self.folder.join(CHECKSUMS), |(_, list)| list.clone());
                return Err(ChecksumError::Missing { path, list });
            }
            hashed => hashed.map_err(failed("read", &path))?,
        };
        self.compare(name, &got)?;
        match path.strip_prefix(&self.folder).ok().and_then(Path::parent) {
            Some(below) if below != Path::new("") && is_list(&path) => verify(&self.folder.join(below)).map(drop),
            _ => Ok(()),
        }
    }
}

/// Files of any folders, with the lists beside them.
#[derive(Debug)]
pub struct ListedFiles(HashMap<PathBuf, Option<Checksums>>);

impl ListedFiles {
    /// Reads the lists in the folders of files, each once.
    ///
    /// # Errors
    /// [`ChecksumError`] for a list that is damaged or cannot be read.
    pub fn of(files: &[PathBuf]) -> Result<Self, ChecksumError> {
        let mut lists = HashMap::new();
        for folder in files.iter().map(|file| parent(file)) {
            if !lists.contains_key(folder) {
                lists.insert(folder.to_owned(), Checksums::read(folder)?);
            }
        }
        Ok(Self(lists))
    }

    /// Compares the hash of one of the files with the list beside it, if there is one.
    ///
    /// # Errors
    /// [`ChecksumError::Changed`].
    pub fn compare(&self, file: &Path, got: &str) -> Result<(), ChecksumError> {
        self.beside(file).map_or(Ok(()), |(list, name)| list.compare(name, got))
    }

    /// Hashes one of the files, if a list beside it names it, and compares.
    ///
    /// # Errors
    /// [`ChecksumError`].
    pub fn verify(&self, file: &Path) -> Result<(), ChecksumError> {
        let listed = self.beside(file).filter(|(list, name)| list.expected(name).is_some());
        listed.map_or(Ok(()), |(list, name)| list.verify_file(name))
    }

    fn beside<'f>(&self, file: &'f Path) -> Option<(&Checksums, &'f str)> {
        Some((self.0.get(parent(file))?.as_ref()?, file.file_name()?.to_str()?))
    }
}

/// Hashes all files that the lists of a folder name, several at a time, and compares. Says whether there is a list.
///
/// # Errors
/// [`ChecksumError`] about the first file that differs.
pub fn verify(folder: &Path) -> Result<bool, ChecksumError> {
    let Some(checksums) = Checksums::read(folder)? else { return Ok(false) };
    let names: Vec<&str> = checksums.names().collect();
    let first = names.par_iter().map(|name| checksums.verify_file(name)).find_first(Result::is_err);
    first.map_or(Ok(true), |error| error.map(|()| true))
}

/// Writes the list of a folder that is complete but for it, and those of the folders in it; `left_out` are files that people may edit.
///
/// # Errors
/// [`FileError`].
pub fn seal(folder: &Path, left_out: &[&str]) -> Result<(), FileError> {
    let mut names = vec![];
    for path in paths(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            seal(&path, left_out)?;
            names.push(format!("{name}/{CHECKSUMS}"));
        } else if !left_out.contains(&name.as_str()) && name != CHECKSUMS {
            names.push(name);
        }
    }
    let sum = |name: String| {
        let path = folder.join(&name);
        Ok((name, sha256(&path).map_err(failed("read", &path))?))
    };
    let sums = names.into_par_iter().map(sum).collect::<Result<BTreeMap<_, _>, FileError>>()?;
    write_list(&folder.join(CHECKSUMS), &sums)
}

/// The hashes of one list by the names of the files.
///
/// # Errors
/// [`ChecksumError::Line`], or an error of reading.
pub fn read_list(path: &Path) -> Result<BTreeMap<String, String>, ChecksumError> {
    let damaged = |line: usize| ChecksumError::Line { path: path.to_owned(), line };
    let bytes = super::read(path).map_err(failed("read", path))?;
    let text = String::from_utf8(bytes).map_err(|_| damaged(1))?;
    if !text.ends_with('\n') {
        return Err(damaged(text.lines().count().max(1)));
    }
    let lines = text.lines().enumerate();
    lines.map(|(at, line)| entry(line).ok_or_else(|| damaged(at + 1))).collect()
}

/// Writes a list atomically.
///
/// # Errors
/// [`FileError`].
pub fn write_list(path: &Path, sums: &BTreeMap<String, String>) -> Result<(), FileError> {
    let written =
        write_atomic(path, |out| sums.iter().try_for_each(|(name, sha256)| writeln!(out, "{sha256}  {name}")));
    written.map_err(failed("write", path))
}

/// Name and hash of a line.
fn entry(line: &str) -> Option<(String, String)> {
    let (sha256, name) = line.split_once("  ")?;
    let is_hash = sha256.len() == DIGITS && sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_below = !name.is_empty() && name.split('/').all(|part| !["", ".", ".."].contains(&part));
    (is_hash && is_below).then(|| (name.to_owned(), sha256.to_owned()))
}

/// Whether a file is a list.
pub fn is_list(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(NAME[0]).is_some_and(|rest| rest.ends_with(NAME[1]))
}

fn paths(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(failed("read", folder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::write_synced;

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        for (name, text) in [("a.bin", "first"), ("README.md", "words"), ("below/b.bin", "second")] {
            write_synced(&dir.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
        }
        seal(dir.path(), &["README.md"]).unwrap();
        dir
    }

    fn change(path: &Path, at: usize, by: u8) {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= by;
        write_synced(path, |out| out.write_all(&bytes)).unwrap();
    }

    #[test]
    fn every_changed_bit_of_every_listed_file_and_of_the_lists_is_noticed() {
        let dir = folder();
        assert!(verify(dir.path()).unwrap() && verify(&dir.path().join("below")).unwrap());
        for name in ["a.bin", "below/b.bin", CHECKSUMS, "below/medusa.sha256"] {
            let path = dir.path().join(name);
            for at in 0..fs::metadata(&path).unwrap().len() as usize {
                for bit in 0..8 {
                    change(&path, at, 1 << bit);
                    assert!(verify(dir.path()).is_err(), "{name}, byte {at}, bit {bit}");
                    change(&path, at, 1 << bit);
                }
            }
        }
        change(&dir.path().join("README.md"), 0, 1);
        assert!(verify(dir.path()).unwrap(), "people may edit it");
    }

    #[test]
    fn an_error_names_the_file_what_was_expected_and_what_to_do() {
        let dir = folder();
        change(&dir.path().join("below/b.bin"), 1, 1);
        let error = verify(dir.path()).unwrap_err().to_string();
        let [expected, got] =
            ["second", "sdcond"].map(|text| crate::files::hex(&<sha2::Sha256 as sha2::Digest>::digest(text)));
        assert!(
            error.contains("below/b.bin was changed after it was written") && error.contains("remove its line"),
            "{error}"
        );
        assert!(error.contains(&format!("expected sha256 {expected}, got {got}")), "{error}");
        fs::remove_file(dir.path().join("below/b.bin")).unwrap();
        let error = verify(dir.path()).unwrap_err().to_string();
        assert!(error.contains("below/b.bin is missing"), "{error}");
    }

    #[test]
    fn a_folder_without_a_list_is_as_it_may_be_and_lists_of_several_writers_all_count() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!verify(dir.path()).unwrap());
        for (name, text) in [("1", "a"), ("2", "b")] {
            write_synced(&dir.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
            let sums = [(name.to_owned(), sha256(&dir.path().join(name)).unwrap())].into();
            write_list(&dir.path().join(format!("medusa-{name}-of-2.sha256")), &sums).unwrap();
        }
        assert!(verify(dir.path()).unwrap());
        change(&dir.path().join("2"), 0, 1);
        assert!(verify(dir.path()).unwrap_err().to_string().contains("medusa-2-of-2.sha256"));
    }

    #[test]
    fn a_list_names_nothing_outside_its_folder() {
        let hash = "0".repeat(64);
        assert!(entry(&format!("{hash}  a/b.bin")).is_some());
        for name in ["../a", "/a", "a/../b", "", "a//b"] {
            assert!(entry(&format!("{hash}  {name}")).is_none(), "{name}");
        }
        assert!(entry(&format!("{hash} *a")).is_none() && entry(&format!("{}  a", "A".repeat(64))).is_none());
    }
}
