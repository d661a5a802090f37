//! Files and folders that are whole or absent, and their hashes. No tensors here.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

/// Where things are kept that can be made again: `$MEDUSA_CACHE`, else `$XDG_CACHE_HOME/medusa-train`, else `~/.cache/medusa-train`; `None`
/// for a user without a home.
pub fn user_cache() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let xdg = || set("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")));
    set("MEDUSA_CACHE").or_else(|| Some(xdg()?.join("medusa-train")))
}

/// Writes a file so that `path` holds either its old content or all of the new one: temporary name beside it, fsync, rename.
///
/// # Errors
/// Whatever the disk says; the temporary file is removed then.
pub fn write_atomic(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let partial = partial_name(path);
    let written = write_synced(&partial, fill).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial); // the first error is the one to report
    }
    written?;
    sync_folder(parent(path))
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
}

impl NewFolder {
    /// Starts writing what shall become `path`. Leftovers of an interrupted try are removed.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn create(path: &Path) -> io::Result<Self> {
        let partial = partial_name(path);
        match fs::remove_dir_all(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(&partial)?,
        }
        Ok(Self { partial, path: path.to_owned(), committed: false })
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
    let leaving = partial_name(&path.with_extension("old"));
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

fn partial_name(path: &Path) -> PathBuf {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.partial"))
}

fn parent(path: &Path) -> &Path {
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
}
