//! Tokenised files on disk, so that a second run starts at once, and hashes of data files, so that it need not read them.
//!
//! A file's name is `<key>-<sha256 of its footer>.arrow` (`token_file.rs` says what is in it). It is written under a
//! temporary name that its writer keeps locked. Two runs may therefore write the same file at the same time, and a leftover of a killed run
//! is recognised by its free lock.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use super::token_file::{Fault, OpenedTokenFile, Storage, TokenFile, footer_sha256};
use crate::files;

const PARTIAL: &str = "partial";

/// A cache that cannot be used. A damaged file is rebuilt, and the report says so.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cannot use the token cache {}; set MEDUSA_CACHE to a folder that can be written", path.display())]
    Disk {
        /// The cache's folder, or the file in it.
        path: PathBuf,
        source: io::Error,
    },
    /// A file that is there and that the disk does not give.
    #[error("cannot read the token cache {}, which stays: look at its disk and at who may read it", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// A file that was whole when it was opened, by its footer, and of which a batch is not.
    #[error("the token cache {} is damaged ({how}); it was removed: start again (a run with --resume), and it is made anew", path.display())]
    Damaged { path: PathBuf, how: String },
}

/// The result of a cache lookup.
#[derive(Debug)]
pub(super) enum CacheEntry {
    Rows(Box<OpenedTokenFile>),
    Nothing,
    /// A file that is damaged, and how it shows.
    Damaged(String),
}

/// A folder of tokenised files.
#[derive(Debug, Clone)]
pub struct TokenCache {
    folder: PathBuf,
}

/// A file being written. Dropped before it is committed, it is removed.
#[derive(Debug)]
pub(super) struct NewFile {
    partial: PathBuf,
    file: File,
}

impl TokenCache {
    /// A cache in this folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// In [`files::user_cache`]; `None` for a user without a home.
    pub fn for_user() -> Option<Self> {
        files::user_cache().map(Self::new)
    }

    /// The rows kept under a key.
    ///
    /// # Errors
    /// The disk's own.
    pub(super) fn read(&self, key: &str) -> Result<CacheEntry, CacheError> {
        let Some(path) = self.files_of(key)?.pop() else {
            return Ok(CacheEntry::Nothing);
        };
        let file = match files::open_regular(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(CacheEntry::Nothing), // replaced by another process
            opened => opened.map_err(|source| CacheError::Unreadable { path: path.clone(), source })?,
        };
        let name = path.file_stem().map(OsStr::to_string_lossy).unwrap_or_default();
        let sha256 = name.rsplit('-').next().filter(|sha256| sha256.len() == 32);
        Ok(match TokenFile::open(Storage::new(file), &path, Some(sha256.unwrap_or("no hash"))) {
            Ok(opened) => CacheEntry::Rows(Box::new(opened)),
            Err(Fault::Damage(how)) => CacheEntry::Damaged(format!("{}: {how}", path.display())),
            Err(Fault::Io(source)) => return Err(CacheError::Unreadable { path, source }),
        })
    }

    /// Begins a file. What others left half-written is removed.
    ///
    /// # Errors
    /// The disk's own.
    pub(super) fn create(&self, key: &str) -> Result<NewFile, CacheError> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        fs::create_dir_all(&self.folder).map_err(|source| self.error(source))?;
        self.sweep()?;
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let partial = self.folder.join(format!(".{key}.{}.{count}.{PARTIAL}", std::process::id()));
            let open = OpenOptions::new().read(true).write(true).create_new(true).open(&partial);
            let file = match open {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                opened => opened.map_err(|source| CacheError::Disk { path: partial.clone(), source })?,
            };
            let _ = file.lock(); // a disk without locks sweeps nothing either
            if partial.exists() {
                return Ok(NewFile { partial, file });
            } // else swept between the two calls
        }
    }

    /// Gives a file its name, in place of whatever was there under its key, and opens it.
    ///
    /// # Errors
    /// The disk's own.
    pub(super) fn commit(&self, key: &str, new: NewFile) -> Result<OpenedTokenFile, CacheError> {
        let at_partial = |source| CacheError::Disk { path: new.partial.clone(), source };
        let medium = Storage::new(new.file.try_clone().map_err(at_partial)?);
        new.file.sync_all().map_err(at_partial)?;
        let sha256 = footer_sha256(&medium).map_err(|fault| at_partial(io::Error::other(fault)))?;
        let path = self.folder.join(format!("{key}-{}.arrow", &sha256[..32]));
        fs::rename(&new.partial, &path).map_err(at_partial)?;
        files::sync_folder(&self.folder).map_err(|source| self.error(source))?;
        for old in self.files_of(key)?.into_iter().filter(|old| *old != path) {
            remove(&old)?;
        }
        TokenFile::open(medium, &path, None).map_err(|fault| self.error(io::Error::other(fault)))
    }

    /// The SHA-256 of a data file. One whose size, time of change and place on the disk are those of an earlier start is not
    /// read again.
    ///
    /// # Errors
    /// What reading the file says; a hash that cannot be remembered is no error.
    pub fn sha256_of(&self, path: &Path) -> io::Result<String> {
        let Some(stamp) = files::stamp(path)? else { return files::sha256(path) };
        let (name, memo) = self.memo(&stamp);
        if let Some(sha256) = files::read_text(&memo).ok().and_then(|text| remembered(&text)) {
            return Ok(sha256);
        }
        let sha256 = files::sha256(path)?;
        // A file that changes while it is read is another one afterwards.
        if files::stamp(path)?.is_some_and(|after| after == stamp)
            && let Ok(mut new) = self.create(&name)
        {
            let written = io::Write::write_all(&mut new.file, to_remember(&sha256).as_bytes());
            let _ = written.and_then(|()| new.file.sync_all()).and_then(|()| fs::rename(&new.partial, &memo));
        }
        Ok(sha256)
    }

    /// Whether [`TokenCache::sha256_of`] need not read this file.
    pub fn knows(&self, path: &Path) -> bool {
        matches!(files::stamp(path), Ok(Some(stamp)) if self.memo(&stamp).1.is_file())
    }

    /// Where the hash of a file of this stamp is remembered: name and path.
    fn memo(&self, stamp: &str) -> (String, PathBuf) {
        let name = files::hex(&Sha256::digest(stamp))[..32].to_owned();
        let path = self.folder.join(format!("{name}.sha256"));
        (name, path)
    }

    /// Removes temporary files whose writers are gone.
    fn sweep(&self) -> Result<(), CacheError> {
        let partial = |path: &PathBuf| path.extension().is_some_and(|extension| extension == PARTIAL);
        for path in self.paths()?.into_iter().filter(partial) {
            // One that is gone, or that the disk cannot lock, is left to its owner; so is one of another user. The lock is held until the
            // name is gone: whoever waits for it in `create` must not find the file there.
            let Ok(file) = files::open_regular(&path) else { continue };
            if file.try_lock().is_ok() {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(())
    }

    fn files_of(&self, key: &str) -> Result<Vec<PathBuf>, CacheError> {
        let mut paths = self.paths()?;
        paths.retain(|path| {
            let name = path.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
            name.starts_with(key) && name.ends_with(".arrow")
        });
        Ok(paths)
    }

    fn paths(&self) -> Result<Vec<PathBuf>, CacheError> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(error) => return Err(self.error(error)),
        };
        entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>().map_err(|source| self.error(source))
    }

    /// The disk's words about the folder.
    pub(super) fn error(&self, source: io::Error) -> CacheError {
        CacheError::Disk { path: self.folder.clone(), source }
    }
}

impl NewFile {
    /// What is written here must be flushed before the file is committed.
    pub(super) fn writer(&self) -> io::Result<BufWriter<File>> {
        Ok(BufWriter::with_capacity(1 << 20, self.file.try_clone()?))
    }

    pub(super) fn error(&self, source: io::Error) -> CacheError {
        CacheError::Disk { path: self.partial.clone(), source }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.partial); // committed, it has another name already
    }
}

/// Compares a file of the cache with its checksums; `None` for a file of another kind.
pub fn check_file(path: &Path) -> Option<Result<(), CacheDamage>> {
    let stem = path.file_stem()?.to_str()?;
    if path.extension()? == "sha256" {
        let text = files::read_text(path).unwrap_or_default();
        let is_right =
            || remembered(&text).map(drop).ok_or(CacheDamage("no remembered hash, or a damaged one".to_owned()));
        return (stem.len() == 32).then(is_right);
    }
    let (_, footer) = stem.rsplit_once('-').filter(|(_, footer)| footer.len() == 32)?;
    let opened = files::open_regular(path).map_err(Fault::Io);
    let opened = opened.and_then(|file| TokenFile::open(Storage::new(file), path, Some(footer)));
    Some(opened.and_then(|whole| whole.file.check()).map_err(|fault| CacheDamage(fault.to_string())))
}

/// How a file of the cache is damaged.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CacheDamage(String);

/// A hash and its own checksum.
fn to_remember(sha256: &str) -> String {
    format!("{sha256} {:08x}", crc32fast::hash(sha256.as_bytes()))
}

/// The hash, if it is the one that was written.
fn remembered(text: &str) -> Option<String> {
    let sha256 = text.get(..64)?;
    (to_remember(sha256) == text).then(|| sha256.to_owned())
}

/// Removes a file that another run may have removed already.
fn remove(path: &Path) -> Result<(), CacheError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(CacheError::Disk { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Why a row could not be read. A file of which a batch is damaged is out of the way of the next start; one that the disk did not give
/// stays.
pub(super) fn unread(path: &Path, fault: Fault) -> CacheError {
    let path = path.to_owned();
    match fault {
        Fault::Io(source) => CacheError::Unreadable { path, source },
        Fault::Damage(how) => {
            let _ = fs::remove_file(&path); // best effort: the damage is what there is to report
            CacheError::Damaged { path, how }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::data::report::FileSummary;
    use crate::data::rows::TokenRow;
    use crate::data::token_file::TokenFileWriter;

    fn write(cache: &TokenCache, key: &str, token: i32) {
        let new = cache.create(key).unwrap();
        let mut writer = TokenFileWriter::new(new.writer().unwrap()).unwrap();
        writer.push(TokenRow { input_ids: vec![token; 3], labels: vec![token; 3] }).unwrap();
        writer.finish(FileSummary::default()).unwrap().flush().unwrap();
        let opened = cache.commit(key, new).unwrap();
        assert_eq!(opened.file.row(opened.rows[0]).unwrap().input_ids, [token; 3]);
    }

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn what_is_written_is_found_and_replaces_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path().join("new/cache"));
        assert!(matches!(cache.read("key").unwrap(), CacheEntry::Nothing));
        for token in [1, 1, 2] {
            write(&cache, "key", token);
            let CacheEntry::Rows(whole) = cache.read("key").unwrap() else { panic!("no rows") };
            assert_eq!(whole.file.row(whole.rows[0]).unwrap().input_ids, [token; 3]);
            assert_eq!(names(&dir.path().join("new/cache")).len(), 1);
        }
        assert!(matches!(cache.read("other").unwrap(), CacheEntry::Nothing));
    }

    #[test]
    fn what_a_killed_run_left_is_removed_and_what_another_writes_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path());
        files::write_atomic(&dir.path().join(".key.1.0.partial"), |out| out.write_all(b"half")).unwrap();
        let other = cache.create("key").unwrap();
        assert_eq!(names(dir.path()).len(), 1, "the leftover is gone");
        let mine = cache.create("key").unwrap();
        assert_eq!(names(dir.path()).len(), 2, "the other's is locked");
        drop((other, mine));
        assert_eq!(names(dir.path()).len(), 0);
    }

    #[test]
    fn a_remembered_hash_that_is_damaged_is_forgotten() {
        let text = to_remember(&"0f".repeat(32));
        assert_eq!(remembered(&text), Some("0f".repeat(32)));
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            assert_eq!(remembered(&String::from_utf8(bytes).unwrap()), None, "byte {at}");
        }
        assert_eq!(remembered(&text[..64]), None, "of an earlier version, without a checksum");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "changes a file of a test")]
    fn a_file_as_it_was_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, path) = (TokenCache::new(dir.path().join("cache")), dir.path().join("rows"));
        let write = |text: &str, age: u64| {
            fs::write(&path, text).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + age)).unwrap();
            cache.sha256_of(&path).unwrap()
        };
        let first = write("one", 0);
        assert_eq!(first, files::sha256(&path).unwrap());
        assert_eq!(write("two", 0), first, "nothing shows that it changed, so it was not read");
        let second = write("two", 1);
        assert_ne!(second, first);
        assert!(cache.knows(&path));
        fs::write(&path, "six").unwrap();
        assert!(!cache.knows(&path));
        assert_eq!(cache.sha256_of(&path).unwrap(), files::sha256(&path).unwrap());
        fs::write(&path, "ten").unwrap();
        assert_eq!(cache.sha256_of(&path).unwrap(), files::sha256(&path).unwrap(), "just written: not remembered");
    }
}
