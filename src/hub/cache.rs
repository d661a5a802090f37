//! The cache shared by all Hugging Face programs: `models--OWNER--NAME/` with `blobs/` named by hash,
//! `snapshots/COMMIT/` with links to blobs, and `refs/` mapping branches to commits. Programs with this layout find
//! each other's files. Only `.medusa/COMMIT.json` is our own: the names of all files in a data set's commit, including
//! those not downloaded.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::HubError;
use super::id::{Repo, RepoKind, is_safe};
use crate::files::{self, write_atomic};

#[derive(Debug, Clone)]
pub(super) struct Cache {
    pub(super) root: PathBuf,
}

/// `HF_HOME`, or its default.
pub(super) fn home(setting: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let cache = || setting("XDG_CACHE_HOME").unwrap_or_else(|| "~/.cache".into());
    expanded(&setting("HF_HOME").unwrap_or_else(|| format!("{}/huggingface", cache())))
}

/// Expands `~`, which the shell leaves alone when another program sets these variables.
pub(super) fn expanded(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

impl Cache {
    pub(super) fn of(setting: &dyn Fn(&str) -> Option<String>, home: &Path) -> Self {
        let named = setting("HF_HUB_CACHE").or_else(|| setting("HUGGINGFACE_HUB_CACHE"));
        Self { root: named.map_or_else(|| home.join("hub"), |path| expanded(&path)) }
    }

    fn folder_name(repo: &Repo) -> String {
        let kind = match repo.kind {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        };
        format!("{kind}--{}--{}", repo.owner, repo.name)
    }

    fn repo(&self, repo: &Repo) -> PathBuf {
        self.root.join(Self::folder_name(repo))
    }

    pub(super) fn snapshot(&self, repo: &Repo, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, repo: &Repo, hash: &str) -> PathBuf {
        self.repo(repo).join("blobs").join(hash)
    }

    /// The commit of a revision when it was last looked up.
    pub(super) fn commit(&self, repo: &Repo, revision: &str) -> Option<String> {
        let in_ref = || Some(files::read_text(&self.repo(repo).join("refs").join(revision)).ok()?.trim().to_owned());
        let known =
            if is_commit(revision) { Some(revision.to_owned()) } else { in_ref().filter(|commit| is_commit(commit)) };
        known.filter(|commit| self.snapshot(repo, commit).is_dir())
    }

    pub(super) fn remember(&self, repo: &Repo, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || self.commit(repo, revision).is_some_and(|known| known == commit) {
            return Ok(()); // a complete cache may be read-only
        }
        let path = self.repo(repo).join("refs").join(revision);
        make_parent(&path)?;
        write_atomic(&path, |out| out.write_all(commit.as_bytes())).map_err(HubError::io("write", &path))
    }

    fn list_path(&self, repo: &Repo, commit: &str) -> PathBuf {
        self.repo(repo).join(".medusa").join(format!("{commit}.json"))
    }

    /// Saves the names of all files of a data set's commit.
    pub(super) fn list(&self, repo: &Repo, commit: &str, names: &[String]) -> Result<(), HubError> {
        if self.listed(repo, commit).is_some() {
            return Ok(()); // a commit does not change
        }
        let path = self.list_path(repo, commit);
        make_parent(&path)?;
        write_atomic(&path, |out| Ok(serde_json::to_writer(out, names)?)).map_err(HubError::io("write", &path))
    }

    /// The names of all files of a commit, if they were saved. An unreadable list counts as missing.
    pub(super) fn listed(&self, repo: &Repo, commit: &str) -> Option<Vec<String>> {
        let names: Vec<String> = serde_json::from_slice(&files::read(&self.list_path(repo, commit)).ok()?).ok()?;
        names.iter().all(|name| is_safe(name)).then_some(names)
    }

    /// Sorted paths of the files in a snapshot whose blobs exist.
    pub(super) fn names(&self, snapshot: &Path) -> Vec<String> {
        let mut names = Vec::new();
        let mut folders = vec![snapshot.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Some(name) = path.strip_prefix(snapshot).ok().and_then(Path::to_str)
                    && path.is_file()
                {
                    names.push(name.replace('\\', "/"));
                }
            }
        }
        names.sort();
        names
    }

    /// Locks a blob for writing, with the file name and method (`flock`) of Python's library. Calls `on_wait` if another
    /// process holds the lock. On a filesystem without locks it always succeeds.
    pub(super) fn lock(&self, repo: &Repo, hash: &str, on_wait: impl FnOnce()) -> Result<File, HubError> {
        let path = self.root.join(".locks").join(Self::folder_name(repo)).join(format!("{hash}.lock"));
        make_parent(&path)?;
        let file = File::options().create(true).append(true).open(&path).map_err(HubError::io("open", &path))?;
        let locked = match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                on_wait();
                file.lock()
            }
            Err(TryLockError::Error(error)) => Err(error),
            Ok(()) => Ok(()),
        };
        match locked {
            Err(error) if error.kind() != ErrorKind::Unsupported => Err(HubError::io("lock", &path)(error)),
            _ => Ok(file),
        }
    }

    /// Links a name in a snapshot to a blob.
    pub(super) fn link(&self, repo: &Repo, commit: &str, name: &str, hash: &str) -> Result<(), HubError> {
        let path = self.snapshot(repo, commit).join(name);
        make_parent(&path)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{hash}"));
        let is_linked = || fs::read_link(&path).is_ok_and(|old| old == target);
        let link = || symlink(&target, &self.blob(repo, hash), &path);
        match link() {
            // A link to another blob is damage: a commit does not change.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !is_linked() => {
                fs::remove_file(&path).and_then(|()| link()).map_err(HubError::io("link", &path))
            }
            Err(error) if !is_linked() => Err(HubError::io("link", &path)(error)),
            _ => Ok(()), // a complete cache may be read-only
        }
    }
}

#[cfg(unix)]
fn symlink(target: &Path, _blob: &Path, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Symbolic links need a privilege on Windows, so a hard link replaces them.
#[cfg(not(unix))]
fn symlink(_target: &Path, blob: &Path, path: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, path)
}

pub(super) fn make_parent(path: &Path) -> Result<(), HubError> {
    let folder = path.parent().expect("a path in the cache has a parent");
    fs::create_dir_all(folder).map_err(HubError::io("make", folder))
}

/// Snapshot folders are named by the commit's hash, so nothing else may become a path there.
pub(super) fn is_commit(text: &str) -> bool {
    is_hash(text, 40)
}

pub(super) fn is_hash(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::write_atomic;

    #[test]
    fn the_environment_says_where_it_is() {
        let root = |pairs: &'static [(&str, &str)]| {
            let setting = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            Cache::of(&setting, &home(&setting)).root
        };
        assert_eq!(root(&[("HF_HOME", "/h")]), Path::new("/h/hub"));
        assert_eq!(root(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert_eq!(root(&[("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
    }

    #[test]
    fn a_snapshot_is_links_to_blobs() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { root: folder.path().to_owned() };
        let repo = Repo::parse(RepoKind::Model, "a/b").unwrap();
        let (commit, hash) = ("c".repeat(40), "d".repeat(64));
        let blob = cache.blob(&repo, &hash);
        make_parent(&blob).unwrap();
        write_atomic(&blob, |out| out.write_all(b"x")).unwrap();
        cache.link(&repo, &commit, "x.json", &"e".repeat(64)).unwrap();
        for _ in 0..2 {
            cache.link(&repo, &commit, "x.json", &hash).unwrap();
        }
        cache.link(&repo, &commit, "deep/er/x.json", &hash).unwrap();
        cache.link(&repo, &commit, "gone.json", &"e".repeat(64)).unwrap();
        let snapshot = cache.snapshot(&repo, &commit);
        assert_eq!(cache.names(&snapshot), ["deep/er/x.json", "x.json"]);
        assert_eq!(fs::read(snapshot.join("deep/er/x.json")).unwrap(), b"x");
        cache.remember(&repo, "refs/pr/1", &commit).unwrap();
        assert_eq!(cache.commit(&repo, "refs/pr/1"), Some(commit));
        assert_eq!(cache.commit(&repo, "main"), None);
    }

    #[test]
    fn a_damaged_list_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { root: folder.path().to_owned() };
        let (repo, commit) = (Repo::parse(RepoKind::Dataset, "a/b").unwrap(), "c".repeat(40));
        let path = cache.list_path(&repo, &commit);
        make_parent(&path).unwrap();
        write_atomic(&path, |out| out.write_all(b"[\"x.js")).unwrap();
        assert_eq!(cache.listed(&repo, &commit), None);
        cache.list(&repo, &commit, &["x.jsonl".into()]).unwrap();
        assert_eq!(cache.listed(&repo, &commit), Some(vec!["x.jsonl".into()]));
    }
}
