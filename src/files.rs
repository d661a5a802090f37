//! Files and folders that are whole or absent, and their hashes. No tensors here.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

/// What could not be done to a file or a folder.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}: {source}", path.display())]
pub struct FileError {
    doing: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// An [`io::Error`] as [`FileError`]: `map_err(failed("read", &path))`.
pub fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError { doing, path, source }
}

/// Where things are kept that can be made again: `$MEDUSA_CACHE`, else `$XDG_CACHE_HOME/medusa-train`, else `~/.cache/medusa-train`; `None`
/// for a user without a home.
pub fn user_cache() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let xdg = || set("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")));
    set("MEDUSA_CACHE").or_else(|| Some(xdg()?.join("medusa-train")))
}

/// Writes a file so that `path` holds either its old content or all of the new one: temporary name beside it, fsync, rename.
/// Two processes that write the same file do so under two names.
///
/// # Errors
/// Whatever the disk says; the temporary file is removed then.
pub fn write_atomic(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let (partial, lock) = own_partial(path, open_file)?;
    let written = write_synced(&partial, fill).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial); // the first error is the one to report
    }
    drop(lock); // after the name is gone: nobody else may have it before
    written?;
    sync_folder(parent(path))
}

/// Whether [`write_atomic`] could write there: its temporary file is made, and removed.
///
/// # Errors
/// Whatever the disk says.
pub fn check_writable(path: &Path) -> io::Result<()> {
    let (partial, _lock) = own_partial(path, open_file)?;
    fs::remove_file(&partial)
}

/// Writes a file and waits until the disk has it.
///
/// # Errors
/// Whatever the disk says.
pub fn write_synced(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    fill(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// A folder being written under a temporary name. It appears under its own name, complete, at [`NewFolder::commit`];
/// dropped before that, it is removed.
#[derive(Debug)]
pub struct NewFolder {
    partial: PathBuf,
    path: PathBuf,
    committed: bool,
    /// Of `partial`, as long as this lives.
    _lock: Option<File>,
}

impl NewFolder {
    /// Starts writing what shall become `path`. Leftovers of an interrupted try are removed.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn create(path: &Path) -> io::Result<Self> {
        let (partial, lock) = own_partial(path, make_folder)?;
        for left in fs::read_dir(&partial)? {
            let left = left?.path();
            if left.is_dir() { fs::remove_dir_all(left)? } else { fs::remove_file(left)? }
        }
        Ok(Self { partial, path: path.to_owned(), committed: false, _lock: lock })
    }

    /// Where to write now. Every file in it must be fsynced (see [`write_synced`]).
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// The rename that makes it real; a folder that has the name already is replaced.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn commit(mut self) -> io::Result<()> {
        sync_folder(&self.partial)?;
        if self.path.exists() {
            remove_folder(&self.path)?;
        }
        fs::rename(&self.partial, &self.path)?;
        self.committed = true;
        sync_folder(parent(&self.path))
    }

    /// As [`NewFolder::commit`], of a name that nothing has: what took it meanwhile stays, and this goes. An empty folder that was made
    /// between the look and the rename is replaced (on Unix, where a rename does that).
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if the name is taken, or whatever the disk says.
    pub fn commit_as_new(mut self) -> io::Result<()> {
        let is_taken = || fs::symlink_metadata(&self.path).is_ok();
        sync_folder(&self.partial)?;
        if is_taken() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // Taken between the look and the rename: a folder with files in it, or a file, makes that fail.
        let taken = |error| if is_taken() { io::ErrorKind::AlreadyExists.into() } else { error };
        fs::rename(&self.partial, &self.path).map_err(taken)?;
        self.committed = true;
        sync_folder(parent(&self.path))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.partial); // best effort: the error that led here is the one to report
        }
    }
}

/// Removes a folder so that `path` holds all of it or nothing, whenever the process ends: it loses its name first.
///
/// # Errors
/// Whatever the disk says.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    let leaving = partial_name(&path.with_extension("old"), 1);
    match fs::remove_dir_all(&leaving) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::rename(path, &leaving)?,
    }
    fs::remove_dir_all(&leaving)
}

/// SHA-256 of a file's bytes, in hexadecimal.
///
/// # Errors
/// Whatever the disk says.
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// SHA-256 of several files by their own, in hexadecimal.
pub fn sha256_of_all(sums: &[String]) -> String {
    hex(&Sha256::digest(sums.join("\n").as_bytes()))
}

/// What tells a file from its earlier self without reading it: path, size, time of change, place on the disk. `None` for a file
/// changed within the last two seconds: it may change again without the clock telling.
///
/// # Errors
/// Whatever the disk says.
pub fn stamp(path: &Path) -> io::Result<Option<String>> {
    const SETTLED: Duration = Duration::from_secs(2);
    let metadata = fs::metadata(path)?;
    let modified = metadata.modified()?;
    if SystemTime::now().duration_since(modified).is_ok_and(|age| age < SETTLED) {
        return Ok(None);
    }
    let since = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let (whole, size, inode) = (fs::canonicalize(path)?, metadata.len(), inode(&metadata));
    Ok(Some(format!("{}\n{size} bytes\n{since} ns\ninode {inode}", whole.display())))
}

#[cfg(unix)]
fn inode(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn inode(_: &fs::Metadata) -> u64 {
    0
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a name in a folder is a leftover of an interrupted write.
pub fn is_partial(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".partial")
}

fn partial_name(path: &Path, number: usize) -> PathBuf {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let number = if number > 1 { format!(".{number}") } else { String::new() };
    path.with_file_name(format!(".{name}{number}.partial"))
}

/// The first temporary name beside `path` that nobody else writes under, and its lock; what an ended process left there is taken over.
fn own_partial(path: &Path, open: impl Fn(&Path) -> io::Result<Option<File>>) -> io::Result<(PathBuf, Option<File>)> {
    let mut number = 1;
    loop {
        let partial = partial_name(path, number);
        let lock = open(&partial)?;
        // Between the two calls its former owner may have given it its real name.
        if lock.as_ref().is_none_or(|file| lock_file(file) && is_at(file, &partial)) {
            return Ok((partial, lock));
        }
        number += 1;
    }
}

/// Locks an open file for as long as it stays open; the system lets go of it however the process ends. `false`: it is another's.
/// On a disk without locks nothing is another's.
pub fn lock_file(file: &File) -> bool {
    !matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Locks a folder for as long as what comes back lives. `None`: it is another process's. Folders can be locked on disks of this machine
/// alone: NFS locks what is open for writing, which no folder is, and Windows opens none; there nothing is another's.
///
/// # Errors
/// Whatever the disk says.
pub fn lock_folder(folder: &Path) -> io::Result<Option<FolderLock>> {
    let file = open_folder(folder)?;
    Ok(file.as_ref().is_none_or(lock_file).then_some(FolderLock { _file: file }))
}

/// A folder that no other process may lock.
#[derive(Debug)]
pub struct FolderLock {
    _file: Option<File>,
}

/// Makes it where it is not there.
fn open_file(path: &Path) -> io::Result<Option<File>> {
    OpenOptions::new().write(true).create(true).truncate(false).open(path).map(Some)
}

/// Makes it where it is not there. Between the calls its former owner may give it its real name, or remove it: then once more.
fn make_folder(folder: &Path) -> io::Result<Option<File>> {
    const TRIES: usize = 100; // what is no folder, such as a link to nothing, stays so
    let make = || fs::create_dir_all(folder).and_then(|()| open_folder(folder));
    let is_gone = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists);
    let mut tries = (1..TRIES).map(|_| make());
    tries.find(|made| !made.as_ref().is_err_and(is_gone)).unwrap_or_else(make)
}

/// Windows cannot open folders: `None`.
fn open_folder(folder: &Path) -> io::Result<Option<File>> {
    if cfg!(windows) { Ok(None) } else { File::open(folder).map(Some) }
}

/// Whether a path leads to this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let same = |one: &fs::Metadata, other: &fs::Metadata| inode(one) == inode(other) && one.len() == other.len();
    match (file.metadata(), fs::metadata(path)) {
        (Ok(of_file), Ok(at_path)) => same(&of_file, &at_path),
        _ => false,
    }
}

/// The folder that a path lies in; "." where it names none.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Writes JSON for people to read, and waits until the disk has it.
///
/// # Errors
/// Whatever the disk says.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<()> {
    write_synced(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

/// A rename, or a new file, is durable once its folder is synced. Windows cannot open folders, and needs no such call.
///
/// # Errors
/// Whatever the disk says.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(windows) { Ok(()) } else { File::open(folder)?.sync_all() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let failed = write_atomic(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_writers_of_one_path_never_share_a_temporary_name() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder) = (dir.path().join("a.json"), dir.path().join("step-000001"));
        write_atomic(&file, |out| {
            out.write_all(b"first")?;
            write_atomic(&file, |other| other.write_all(b"second, and whole"))?;
            assert_eq!(fs::read(&file)?, b"second, and whole");
            out.write_all(b" one")
        })
        .unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"first one");
        fs::create_dir(dir.path().join(".step-000001.partial")).unwrap();
        write_synced(&dir.path().join(".step-000001.partial/left"), |_| Ok(())).unwrap();
        let (one, other) = (NewFolder::create(&folder).unwrap(), NewFolder::create(&folder).unwrap());
        assert_ne!(one.partial(), other.partial());
        for (folder, text) in [(&one, b"1"), (&other, b"2")] {
            write_synced(&folder.partial().join("x"), |out| out.write_all(text)).unwrap();
        }
        one.commit().unwrap();
        assert_eq!(fs::read(folder.join("x")).unwrap(), b"1");
        assert!(!folder.join("left").exists(), "what a killed process left is taken over, emptied");
        other.commit().unwrap();
        assert_eq!(fs::read(folder.join("x")).unwrap(), b"2");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_has_one_holder() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock_folder(dir.path()).unwrap();
        assert!(held.is_some() && lock_folder(dir.path()).unwrap().is_none());
        drop(held);
        assert!(lock_folder(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_folder_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-000001");
        drop(NewFolder::create(&path).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let folder = NewFolder::create(&path).unwrap();
        write_synced(&folder.partial().join("x"), |out| out.write_all(b"x")).unwrap();
        assert!(!path.exists());
        folder.commit().unwrap();
        assert_eq!(fs::read(path.join("x")).unwrap(), b"x");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        NewFolder::create(&path).unwrap().commit().unwrap();
        assert!(!path.join("x").exists() && path.exists());
        remove_folder(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_goes_while_it_is_made_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..2000).for_each(|_| drop(NewFolder::create(&path).unwrap())));
            }
        });
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn of_two_new_folders_of_one_name_the_first_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let [first, second] = ["a", "b"].map(|text| {
            let folder = NewFolder::create(&path).unwrap();
            write_synced(&folder.partial().join("x"), |out| out.write_all(text.as_bytes())).unwrap();
            folder
        });
        first.commit_as_new().unwrap();
        assert_eq!(second.commit_as_new().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(path.join("x")).unwrap(), b"a");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
