//! Atomic writes of files and folders, locks, and hashes. No tensors here.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

pub mod checksums;
mod wrong_content;

pub use wrong_content::WrongContent;

/// An I/O error with the action and the path.
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

/// The cache folder: `$MEDUSA_CACHE`, else `$XDG_CACHE_HOME/medusa-train`, else `~/.cache/medusa-train`; `None`
/// for a user without a home.
pub fn user_cache() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let xdg = || set("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")));
    set("MEDUSA_CACHE").or_else(|| Some(xdg()?.join("medusa-train")))
}

/// Writes a file so that `path` holds either its old content or all of the new one: temporary name beside it, fsync, rename. Missing
/// folders are made. Behind a symbolic link, the file that it names is written.
/// Two processes that write the same file do so under two names.
///
/// # Errors
/// The I/O error; the temporary file is removed. A pipe, a socket, a device or a folder stands there.
pub fn write_atomic(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let path = &file_to_write(path)?;
    let (partial, lock) = own_partial(path, open_file)?;
    let written = write_synced(&partial, fill).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial); // the first error is the one to report
    }
    drop(lock); // after the name is gone: nobody else may have it before
    written?;
    sync_folder(parent(path))
}

/// The file that a path names: behind a symbolic link, what the link names, which need not be there.
///
/// # Errors
/// The I/O error; that it is no regular file.
fn file_to_write(path: &Path) -> io::Result<PathBuf> {
    let is_there = match check_regular(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    match (path.is_symlink(), is_there) {
        (false, _) => Ok(path.to_owned()),
        (true, true) => path.canonicalize(),
        (true, false) => file_to_write(&parent(path).join(fs::read_link(path)?)),
    }
}

/// The right to write a file, or the files of a share of a folder: until it is dropped, no other process has it. Where the disk has no locks,
/// every process gets it. What a killed process leaves is taken over.
#[derive(Debug)]
pub struct Claim {
    partial: PathBuf,
    /// The folder was made for it, and goes with it if nothing else is in it then.
    made_folder: bool,
    _lock: Option<File>,
}

/// Why a file cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another process writes it now.
    #[error("is in use by another process{}", in_words(*_0))]
    Held(Option<u32>),
}

impl Claim {
    /// Claims a file that will be written. Missing folders are made; [`write_atomic`] may write the file meanwhile.
    ///
    /// # Errors
    /// [`ClaimError`]; as [`write_atomic`], no regular file stands there.
    pub fn of(path: &Path) -> Result<Self, ClaimError> {
        let path = &file_to_write(path)?;
        let made_folder = !parent(path).exists();
        let (partial, lock) = first_partial(path, open_file)?;
        Ok(Self { partial, made_folder, _lock: lock })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.partial); // while the lock is held: nobody else has the name
        if self.made_folder {
            let _ = fs::remove_dir(parent(&self.partial)); // fails if there is anything in it
        }
    }
}

/// Which process holds a lock, behind words that say that one does; nothing where the system does not say.
pub fn in_words(holder: Option<u32>) -> String {
    holder.map_or_else(String::new, |id| format!(" (process {id})"))
}

/// Writes a file and fsyncs it.
///
/// # Errors
/// The I/O error.
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
    lock: Option<File>,
}

impl NewFolder {
    /// Starts a folder that will become `path`. Leftovers of an interrupted attempt are removed.
    ///
    /// # Errors
    /// The I/O error.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::emptied(path, own_partial(path, make_folder)?)
    }

    /// As [`NewFolder::create`], for the only process that writes this folder.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub fn claim(path: &Path) -> Result<Self, ClaimError> {
        Ok(Self::emptied(path, first_partial(path, make_folder)?)?)
    }

    fn emptied(path: &Path, (partial, lock): (PathBuf, Option<File>)) -> io::Result<Self> {
        for left in fs::read_dir(&partial)? {
            let left = left?.path();
            if left.is_dir() { fs::remove_dir_all(left)? } else { fs::remove_file(left)? }
        }
        Ok(Self { partial, path: path.to_owned(), committed: false, lock })
    }

    /// Where to write now. Every file in it must be fsynced (see [`write_synced`]).
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Renames it to its final name, replacing a folder of that name.
    ///
    /// # Errors
    /// The I/O error.
    pub fn commit(mut self) -> io::Result<()> {
        self.check_whole()?;
        sync_folder(&self.partial)?;
        let replaced = if self.path.exists() { Some(move_away(&self.path)?) } else { None };
        fs::rename(&self.partial, &self.path).inspect_err(|_| {
            let _ = replaced.as_ref().map(|old| fs::rename(old, &self.path)); // best effort: the first error is the one to report
        })?;
        self.committed = true;
        sync_folder(parent(&self.path))?;
        replaced.map_or(Ok(()), fs::remove_dir_all)
    }

    /// As [`NewFolder::commit`], but fails if the name is taken, and then removes the new folder. An empty folder is replaced.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if the name is taken, or the I/O error.
    pub fn commit_as_new(mut self) -> io::Result<()> {
        let is_taken = || is_taken(&self.path);
        self.check_whole()?;
        sync_folder(&self.partial)?;
        if is_taken() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // If the name was taken after the check, by a file or a folder with files, the rename fails.
        let taken = |error| if is_taken() { io::ErrorKind::AlreadyExists.into() } else { error };
        fs::rename(&self.partial, &self.path).map_err(taken)?;
        self.committed = true;
        sync_folder(parent(&self.path))
    }

    /// A folder that was moved away meanwhile may be there again, with the files that were written since.
    fn check_whole(&self) -> io::Result<()> {
        if self.lock.as_ref().map_or(Ok(true), |folder| is_at(folder, &self.partial))? {
            return Ok(());
        }
        let name = self.partial.display();
        Err(io::Error::new(io::ErrorKind::NotFound, format!("{name} was removed, moved or replaced meanwhile")))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.partial); // best effort: the error that led here is the one to report
        }
    }
}

/// Whether something is there that a new folder would replace: anything but an empty folder.
pub fn is_taken(path: &Path) -> bool {
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    fs::symlink_metadata(path).is_ok_and(|found| !found.is_dir() || !is_empty())
}

/// Removes a folder atomically: it is renamed first, so a crash leaves all of it or nothing at `path`.
///
/// # Errors
/// The I/O error.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    fs::remove_dir_all(move_away(path)?)
}

/// Renames a folder to a temporary name beside it, which it returns.
fn move_away(path: &Path) -> io::Result<PathBuf> {
    let leaving = moved_away(path);
    match fs::remove_dir_all(&leaving) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::rename(path, &leaving)?,
    }
    Ok(leaving)
}

/// Where a folder is while another one takes its name.
fn moved_away(path: &Path) -> PathBuf {
    partial_name(&path.with_extension("old"), 1)
}

/// Gives a folder its name back that a process moved away and did not replace, because it was killed between the two.
///
/// # Errors
/// The I/O error.
pub fn put_back(path: &Path) -> io::Result<()> {
    let moved = moved_away(path);
    if path.exists() || !moved.is_dir() {
        return Ok(());
    }
    fs::rename(moved, path)?;
    sync_folder(parent(path))
}

/// Whether there is a file. Unlike with [`Path::is_file`], an error of the disk, a pipe and a device are errors, and no absence.
///
/// # Errors
/// The disk's own, or as [`open_regular`].
pub fn is_file(path: &Path) -> Result<bool, FileError> {
    match found(path)? {
        Some(found) if !found.is_file() && !found.is_dir() => {
            Err(failed("read", path)(io::Error::new(io::ErrorKind::InvalidInput, NotRegular(kind(&found)))))
        }
        found => Ok(found.is_some_and(|found| found.is_file())),
    }
}

/// Whether there is a folder, as [`is_file`].
///
/// # Errors
/// The disk's own.
pub fn is_folder(path: &Path) -> Result<bool, FileError> {
    Ok(found(path)?.is_some_and(|found| found.is_dir()))
}

fn found(path: &Path) -> Result<Option<fs::Metadata>, FileError> {
    match fs::metadata(path) {
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) => Ok(None),
        found => found.map(Some).map_err(failed("look for", path)),
    }
}

/// What is no file to read from: it could wait for ever, or never end.
#[derive(Debug, thiserror::Error)]
#[error("it is a {_0}; expected a regular file")]
struct NotRegular(&'static str);

/// Opens a file for reading. A pipe, a socket or a device is refused at once.
///
/// # Errors
/// The I/O error; that it is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    check_regular(path)?; // before opening it: opening a pipe waits for its writer
    File::open(path)
}

/// Checks that there is a regular file.
///
/// # Errors
/// As [`open_regular`].
pub fn check_regular(path: &Path) -> io::Result<()> {
    let found = fs::metadata(path)?;
    match () {
        () if found.is_file() => Ok(()),
        () if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        () => Err(io::Error::new(io::ErrorKind::InvalidInput, NotRegular(kind(&found)))),
    }
}

/// Whether a binary file holds something else: a Git LFS pointer or an HTML page. Rewinds the file.
///
/// # Errors
/// The I/O error.
pub fn wrong_content(file: &mut File) -> io::Result<Option<WrongContent>> {
    let mut start = Vec::new();
    (&*file).take(64).read_to_end(&mut start)?;
    file.rewind()?;
    Ok(WrongContent::in_binary(&start))
}

/// As [`fs::read`], of a regular file; refuses a Git LFS pointer, an HTML page and UTF-16.
///
/// # Errors
/// As [`open_regular`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = read_any(path)?;
    WrongContent::in_text(&bytes).map_or(Ok(bytes), |wrong| Err(wrong.into()))
}

/// As [`fs::read`], of a regular file.
///
/// # Errors
/// As [`open_regular`].
pub fn read_any(path: &Path) -> io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (open_regular(path)?, Vec::new());
    file.read_to_end(&mut bytes)?; // reserves the file's size first
    Ok(bytes)
}

/// As [`read`], of a file of at most `most` bytes.
///
/// # Errors
/// As [`read`]; that it is longer.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let why = format!("it has more than {most} bytes, which no such file has");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    WrongContent::in_text(&bytes).map_or(Ok(bytes), |wrong| Err(wrong.into()))
}

/// As [`read`], of a text.
///
/// # Errors
/// As [`read`]; that it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

#[cfg(unix)]
fn kind(found: &fs::Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let kind = found.file_type();
    match () {
        () if kind.is_fifo() => "pipe",
        () if kind.is_socket() => "socket",
        () => "device",
    }
}

#[cfg(not(unix))]
fn kind(_: &fs::Metadata) -> &'static str {
    "device"
}

/// Makes a folder and those above it. Also the names of those that were not there are on the disk when this returns.
///
/// # Errors
/// The I/O error.
pub fn make_folders(folder: &Path) -> io::Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    fs::create_dir_all(folder)?;
    missing.into_iter().try_for_each(|made| sync_folder(parent(made)))
}

/// SHA-256 of a file's bytes, in hexadecimal.
///
/// # Errors
/// The I/O error.
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = open_regular(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// One SHA-256 for several files: that of their hashes, in hexadecimal.
pub fn sha256_of_all(sums: &[String]) -> String {
    hex(&Sha256::digest(sums.join("\n").as_bytes()))
}

/// Identifies a version of a file without reading it: path, size, modification time, inode. `None` for a file modified within the last two
/// seconds: a further change might not move the clock.
///
/// # Errors
/// The I/O error.
pub fn stamp(path: &Path) -> io::Result<Option<String>> {
    const SETTLED: Duration = Duration::from_secs(2);
    let metadata = fs::metadata(path)?;
    let modified = metadata.modified()?;
    if SystemTime::now().duration_since(modified).is_ok_and(|age| age < SETTLED) {
        return Ok(None);
    }
    let since = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let (canonical, size, inode) = (fs::canonicalize(path)?, metadata.len(), inode(&metadata));
    Ok(Some(format!("{}\n{size} bytes\n{since} ns\ninode {inode}", canonical.display())))
}

#[cfg(unix)]
fn inode(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn inode(_: &fs::Metadata) -> u64 {
    0
}

/// What distinguishes files of one machine.
#[cfg(unix)]
fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (0, metadata.len())
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

/// The first temporary name beside `path` that no other process holds, and its lock. Leftovers of ended processes are reused.
fn own_partial(path: &Path, open: impl Fn(&Path) -> io::Result<Option<File>>) -> io::Result<(PathBuf, Option<File>)> {
    let mut number = 1;
    loop {
        let partial = partial_name(path, number);
        let lock = open(&partial)?;
        // Between the two calls its former owner may have given it its real name.
        let is_own = |file: &File| Ok(lock_file(file) && is_at(file, &partial)?);
        if lock.as_ref().map_or(io::Result::Ok(true), is_own)? {
            return Ok((partial, lock));
        }
        number += 1;
    }
}

/// The first temporary name beside `path` and its lock, which no other process may hold.
fn first_partial(
    path: &Path,
    open: impl Fn(&Path) -> io::Result<Option<File>>,
) -> Result<(PathBuf, Option<File>), ClaimError> {
    let partial = partial_name(path, 1);
    loop {
        let lock = open(&partial)?;
        match &lock {
            Some(file) if !lock_file(file) => return Err(ClaimError::Held(holder_of(file))),
            Some(file) if !is_at(file, &partial)? => {} // its former owner has just removed it
            _ => return Ok((partial, lock)),
        }
    }
}

/// The process that holds the lock of a file or folder, where `/proc/locks` has it.
pub fn holder(path: &Path) -> Option<u32> {
    holder_of(&File::open(path).ok()?)
}

#[cfg(target_os = "linux")]
fn holder_of(file: &File) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata().ok()?;
    let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    let place = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let lock_holder = |line: &str| {
        let mut words = line.split_whitespace().skip(1).filter(|word| *word != "->"); // "->": waits for it
        let (kind, holder) = (words.next()?, words.nth(2)?);
        (kind == "FLOCK" && words.next() == Some(&place)).then(|| holder.parse().ok()).flatten()
    };
    locks.lines().find_map(lock_holder).filter(|id| *id > 0)
}

#[cfg(not(target_os = "linux"))]
fn holder_of(_: &File) -> Option<u32> {
    None
}

/// Locks an open file until it is closed or the process ends. `false` if another process holds the lock. Always succeeds on filesystems
/// without locking.
pub fn lock_file(file: &File) -> bool {
    !matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Locks a folder until the returned value is dropped. `None` if another process holds the lock. Always succeeds where folders cannot be
/// locked: on NFS, which locks only files open for writing, and on Windows, which cannot open folders.
///
/// # Errors
/// The I/O error.
pub fn lock_folder(folder: &Path) -> io::Result<Option<FolderLock>> {
    let file = open_folder(folder)?;
    Ok(file.as_ref().is_none_or(lock_file).then_some(FolderLock { _file: file }))
}

/// An open file or folder: checks whether its path still names it.
#[derive(Debug)]
pub struct OpenPath {
    path: PathBuf,
    file: Option<File>,
}

impl OpenPath {
    /// # Errors
    /// The I/O error.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: open_folder(path)? })
    }

    /// The path under which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is still there under its name: neither removed nor moved away, and no other one in its place.
    ///
    /// # Errors
    /// The I/O error.
    pub fn is_there(&self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(true) };
        is_at(file, &self.path)
    }
}

/// The lock of a folder.
#[derive(Debug)]
pub struct FolderLock {
    _file: Option<File>,
}

/// Creates it if missing, with its folders.
fn open_file(path: &Path) -> io::Result<Option<File>> {
    let open = || OpenOptions::new().write(true).create(true).truncate(false).open(path).map(Some);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => make_folders(parent(path)).and_then(|()| open()),
        opened => opened,
    }
}

/// Creates it if missing. Its former owner may rename or remove it between the calls; then it tries again.
fn make_folder(folder: &Path) -> io::Result<Option<File>> {
    const TRIES: usize = 100; // a dangling link never becomes a folder
    let make = || make_folders(folder).and_then(|()| open_folder(folder));
    let is_gone = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists);
    let mut tries = (1..TRIES).map(|_| make());
    tries.find(|made| !made.as_ref().is_err_and(is_gone)).unwrap_or_else(make)
}

/// Windows cannot open folders: `None`.
fn open_folder(folder: &Path) -> io::Result<Option<File>> {
    if cfg!(windows) { Ok(None) } else { File::open(folder).map(Some) }
}

/// Whether the path still names this open file or folder. An error of the disk is no answer.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::metadata(path) {
        Ok(now) => Ok(identity(&now) == identity(&open)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Bytes that an unprivileged process may still write to the disk of an existing file or folder.
///
/// # Errors
/// The I/O error.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(path)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// The folder that a path lies in; "." where it names none.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Writes indented JSON and fsyncs it.
///
/// # Errors
/// The I/O error.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<()> {
    write_synced(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

/// A rename, or a new file, is durable once its folder is synced. Windows cannot open folders, and needs no such call.
///
/// # Errors
/// The I/O error.
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
    fn a_file_that_is_too_long_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        write_atomic(&path, |out| out.write_all(b"{}")).unwrap();
        assert_eq!(read_at_most(&path, 2).unwrap(), b"{}");
        let why = read_at_most(&path, 1).unwrap_err();
        assert_eq!((why.kind(), why.to_string().contains("more than 1 bytes")), (io::ErrorKind::FileTooLarge, true));
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
    #[cfg(unix)]
    fn what_the_disk_cannot_say_is_no_absence() {
        let dir = tempfile::tempdir().unwrap();
        let (file, endless) = (dir.path().join("file"), dir.path().join("endless"));
        write_synced(&file, |_| Ok(())).unwrap();
        std::os::unix::fs::symlink(&endless, &endless).unwrap();
        let found = [&file, &dir.path().join("missing"), &file.join("below"), &dir.path().to_owned()]
            .map(|path| (is_file(path).unwrap(), is_folder(path).unwrap()));
        assert_eq!(found, [(true, false), (false, false), (false, false), (false, true)]);
        let error = is_file(&endless).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot look for {}", endless.display())), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_that_is_removed_moved_or_replaced_is_no_longer_there() {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("run"), dir.path().join("away"));
        make_folders(&path).unwrap();
        let open = OpenPath::open(&path).unwrap();
        assert!(open.is_there().unwrap());
        fs::rename(&path, &away).unwrap();
        assert!(!open.is_there().unwrap());
        make_folders(&path).unwrap();
        assert!(!open.is_there().unwrap(), "another one has its name");
        fs::remove_dir(&path).unwrap();
        fs::rename(&away, &path).unwrap();
        assert!(open.is_there().unwrap());
    }

    #[test]
    #[cfg(unix)]
    fn what_a_link_names_is_written_and_what_is_no_regular_file_stays() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| write_atomic(&dir.path().join(name), |out| out.write_all(b"new"));
        fs::create_dir(dir.path().join("elsewhere")).unwrap();
        for (link, target) in [("to_new", "elsewhere/new"), ("to_link", "to_new"), ("to_old", "elsewhere/old")] {
            symlink(target, dir.path().join(link)).unwrap();
        }
        write_synced(&dir.path().join("elsewhere/old"), |out| out.write_all(b"old")).unwrap();
        for (link, target) in [("to_link", "elsewhere/new"), ("to_old", "elsewhere/old")] {
            drop(Claim::of(&dir.path().join(link)).unwrap());
            write(link).unwrap();
            assert!(dir.path().join(link).is_symlink());
            assert_eq!(fs::read(dir.path().join(target)).unwrap(), b"new");
        }
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for error in [write("pipe").unwrap_err().to_string(), Claim::of(&pipe).unwrap_err().to_string()] {
            assert!(error.contains("it is a pipe; expected a regular file"), "{error}");
        }
        assert!(fs::metadata(pipe).unwrap().file_type().is_fifo());
        symlink("loop", dir.path().join("loop")).unwrap();
        write("loop").unwrap_err();
        assert_eq!(fs::read_dir(dir.path().join("elsewhere")).unwrap().count(), 2);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn only_a_regular_file_is_opened_for_reading() {
        let dir = tempfile::tempdir().unwrap();
        let (file, pipe) = (dir.path().join("file"), dir.path().join("pipe"));
        write_synced(&file, |out| out.write_all(b"text")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!((read(&file).unwrap().as_slice(), read_text(&file).unwrap().as_str()), (&b"text"[..], "text"));
        let refused = |path: &Path| open_regular(path).unwrap_err().to_string();
        assert_eq!(refused(&pipe), "it is a pipe; expected a regular file");
        assert_eq!(refused(Path::new("/dev/zero")), "it is a device; expected a regular file");
        assert_eq!(sha256(&pipe).unwrap_err().to_string(), refused(&pipe));
        assert_eq!(open_regular(dir.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(open_regular(&file.join("below")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_folder_that_was_moved_away_and_not_replaced_gets_its_name_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/best");
        make_folders(&path).unwrap();
        write_synced(&path.join("x"), |out| out.write_all(b"old")).unwrap();
        let moved = move_away(&path).unwrap(); // as a process does that is killed then
        put_back(&path).unwrap();
        assert_eq!((fs::read(path.join("x")).unwrap().as_slice(), moved.exists()), (&b"old"[..], false));
        move_away(&path).unwrap();
        make_folders(&path).unwrap();
        put_back(&path).unwrap();
        assert!(!path.join("x").exists(), "a new one stays");
        put_back(&dir.path().join("never")).unwrap();
    }

    #[test]
    fn a_claimed_file_has_one_writer_whose_process_is_named_and_a_dead_one_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/a.json");
        let claim = Claim::of(&path).unwrap();
        let refused = Claim::of(&path).unwrap_err();
        assert!(
            matches!(refused, ClaimError::Held(None)) || refused.to_string().contains(&std::process::id().to_string())
        );
        write_atomic(&path, |out| out.write_all(b"written meanwhile")).unwrap();
        drop(claim);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        write_synced(&dir.path().join("new/.a.json.partial"), |out| out.write_all(b"left by a killed process"))
            .unwrap();
        drop(Claim::of(&path).unwrap());
        let folder = dir.path().join("out");
        let mine = NewFolder::claim(&folder).unwrap();
        assert!(matches!(NewFolder::claim(&folder), Err(ClaimError::Held(_))));
        mine.commit().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_holder_of_a_folder_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let _lock = lock_folder(dir.path()).unwrap();
        assert_eq!(holder(dir.path()), Some(std::process::id()));
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
    #[cfg(unix)]
    fn a_new_folder_that_was_replaced_gets_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        for commit in [NewFolder::commit, NewFolder::commit_as_new] {
            let folder = NewFolder::create(&path).unwrap();
            write_synced(&folder.partial().join("first"), |out| out.write_all(b"x")).unwrap();
            fs::rename(folder.partial(), dir.path().join("away")).unwrap();
            make_folders(folder.partial()).unwrap();
            let error = commit(folder).unwrap_err().to_string();
            assert!(error.ends_with(".out.partial was removed, moved or replaced meanwhile"), "{error}");
            assert!(!path.exists());
            fs::remove_dir_all(dir.path().join("away")).unwrap();
        }
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
    fn the_first_of_two_new_folders_of_one_name_stays() {
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
