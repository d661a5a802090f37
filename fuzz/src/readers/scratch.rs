//! Files that readers are given, and what their errors must say.

use std::cell::OnceCell;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static SCRATCH: OnceCell<TempDir> = const { OnceCell::new() };
}

/// A folder of this thread alone, below the temporary folder.
pub(super) fn folder(name: &str) -> PathBuf {
    let root = SCRATCH
        .with(|scratch| scratch.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path().to_owned());
    let folder = root.join(name);
    fs::create_dir_all(&folder).expect("a folder in the temporary folder");
    folder
}

/// Writes a file in place: no reader waits for it to be whole.
pub(super) fn write(path: &Path, bytes: &[u8]) {
    let written = File::create(path).and_then(|mut file| file.write_all(bytes));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// A file in the folder of a reader.
pub(super) fn file(reader: &str, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder(reader).join(name);
    write(&path, bytes);
    path
}

/// What a reader says of a file.
///
/// # Panics
/// If an error does not name the file, or the folder where a folder is read.
pub(super) fn checked<T, E: Error>(path: &Path, result: Result<T, E>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            let words = words(&error);
            let name = path.display().to_string();
            assert!(words.contains(&name), "an error does not name {name}: {words}");
            None
        }
    }
}

/// An error and its causes.
pub(super) fn words(error: &dyn Error) -> String {
    let (mut words, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        words += &format!(": {error}");
        cause = error.source();
    }
    words
}

/// The first byte, and the others.
pub(super) fn choice(input: &[u8]) -> (u8, &[u8]) {
    input.split_first().map_or((0, input), |(first, rest)| (*first, rest))
}
