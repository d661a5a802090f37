//! Downloads files into the cache: several in parallel, resumed after an interruption, and verified before they get
//! their final name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::Digest;

use super::cache::make_parent;
use super::client::{Ask, RequestContext};
use super::id::{Id, Repo};
use super::listing::{self, Entry};
use super::{Hub, HubError, TransferEvent, Wanted};
use crate::files;
use crate::http::connection::{HttpAnswer, header};

/// Parallel downloads. One connection seldom uses the whole bandwidth; many make the Hub ask to wait.
const TOGETHER: usize = 4;
/// Consecutive transfers that break without a byte before the download fails.
const BREAKS: u64 = 4;

/// A repository at a commit.
#[derive(Clone, Copy)]
struct SnapshotOf<'a> {
    repo: &'a Repo,
    commit: &'a str,
}

impl Hub<'_> {
    /// Downloads the wanted files into the cache. Returns the commit and the file names.
    pub(super) fn download(&self, id: &Id, wanted: Wanted) -> Result<(String, Vec<String>), HubError> {
        let doing = format!("looking up {id} (no path here)");
        let head = listing::head(&self.client, &id.repo, id.revision(), &doing)?;
        let tree = listing::tree(&self.client, &id.repo, &head.commit)?;
        let names: Vec<String> = tree.iter().map(|entry| entry.path.clone()).collect();
        let entries = |names: &[String]| tree.iter().filter(|entry| names.contains(&entry.path)).collect::<Vec<_>>();
        let from = SnapshotOf { repo: &id.repo, commit: &head.commit };
        let mut chosen = wanted.choose(id, &names)?;
        if let Some(index) = wanted.index(&names) {
            self.bring(from, &entries(&[index.to_owned()]))?;
        }
        chosen.extend(wanted.weights(id, &self.cache.snapshot(&id.repo, &head.commit), &names)?);
        self.bring(from, &entries(&chosen))?;
        if let Wanted::Data(_) = wanted {
            self.cache.list(&id.repo, &head.commit, &names)?; // backbones and heads are found without it
        }
        self.cache.remember(&id.repo, id.revision(), &head.commit)?;
        Ok((head.commit, chosen))
    }

    fn bring(&self, from: SnapshotOf<'_>, files: &[&Entry]) -> Result<(), HubError> {
        let is_here = |file: &&&Entry| self.has(from.repo, file);
        let missing: Vec<&Entry> = files.iter().filter(|file| !is_here(file)).copied().collect();
        if !missing.is_empty() {
            let bytes = missing.iter().map(|file| file.size).sum();
            (self.observer)(TransferEvent::Began { what: from.repo.to_string(), files: missing.len(), bytes });
            let brought = self.all(from, &missing);
            (self.observer)(TransferEvent::Ended);
            brought?;
        }
        files.iter().try_for_each(|file| self.cache.link(from.repo, from.commit, &file.path, &file.hash))
    }

    fn has(&self, repo: &Repo, file: &Entry) -> bool {
        fs::metadata(self.cache.blob(repo, &file.hash)).is_ok_and(|blob| blob.len() == file.size)
    }

    /// Downloads several files at once; the first error stops the others.
    fn all(&self, from: SnapshotOf<'_>, files: &[&Entry]) -> Result<(), HubError> {
        let (next, stop, failed) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            while let Some(file) =
                files.get(next.fetch_add(1, Ordering::Relaxed)).filter(|_| !stop.load(Ordering::Relaxed))
            {
                if let Err(error) = self.one(from, file, &stop) {
                    stop.store(true, Ordering::Relaxed);
                    failed.lock().expect("no thread panics with it").get_or_insert(error);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..TOGETHER.min(files.len()) {
                scope.spawn(work);
            }
        });
        failed.into_inner().expect("no thread panicked").map_or(Ok(()), Err)
    }

    /// Downloads one blob. `HASH.incomplete` keeps the partial download for this process or a later one.
    fn one(&self, from: SnapshotOf<'_>, file: &Entry, stop: &AtomicBool) -> Result<(), HubError> {
        let hash = &file.hash;
        let blob = self.cache.blob(from.repo, hash);
        make_parent(&blob)?;
        let _lock =
            self.cache.lock(from.repo, hash, || (self.observer)(TransferEvent::Locked { file: file.path.clone() }))?;
        if self.has(from.repo, file) {
            (self.observer)(TransferEvent::Moved(file.size)); // by another process, or under another name
            return Ok(());
        }
        let partial = blob.with_file_name(format!("{hash}.incomplete"));
        let mut transfer = FileTransfer { hub: self, from, file, out: append(&partial)?, partial: &partial, stop };
        let goes_on = transfer.have()? > 0;
        let mut whole = transfer.whole();
        if goes_on && matches!(whole, Err(HubError::Damaged { .. })) {
            transfer.clear()?; // what an earlier download left was damaged
            whole = transfer.whole();
        }
        let is_whole = whole.inspect_err(|error| {
            if matches!(error, HubError::Damaged { .. }) {
                let _ = fs::remove_file(&partial); // the damage is the error to report
            }
        })?;
        if !is_whole {
            return Ok(()); // another file failed and reports the error
        }
        fs::rename(&partial, &blob).map_err(HubError::io("write", &blob))?;
        files::sync_folder(blob.parent().expect("blobs/")).map_err(HubError::io("write", &blob))
    }
}

fn append(path: &Path) -> Result<File, HubError> {
    OpenOptions::new().create(true).append(true).open(path).map_err(HubError::io("write", path))
}

/// A download in progress.
struct FileTransfer<'a> {
    hub: &'a Hub<'a>,
    from: SnapshotOf<'a>,
    file: &'a Entry,
    /// Opened for appending.
    out: File,
    /// Path of `out`.
    partial: &'a Path,
    /// Set when another file fails.
    stop: &'a AtomicBool,
}

impl FileTransfer<'_> {
    fn have(&self) -> Result<u64, HubError> {
        self.out.metadata().map(|out| out.len()).map_err(HubError::io("read", self.partial))
    }

    fn clear(&self) -> Result<(), HubError> {
        self.out.set_len(0).map_err(HubError::io("write", self.partial))
    }

    /// Downloads what is missing and compares it with the Hub's hash; `false` if another file failed meanwhile.
    fn whole(&mut self) -> Result<bool, HubError> {
        self.fill()?;
        if self.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.out.sync_all().map_err(HubError::io("write", self.partial))?;
        check(self.file, self.partial).map(|()| true)
    }

    /// Appends the missing bytes. Reconnects as often as needed, as long as each connection brings something.
    fn fill(&mut self) -> Result<(), HubError> {
        if self.have()? > self.file.size {
            self.clear()?;
        }
        let (mut have, mut breaks) = (self.have()?, 0);
        (self.hub.observer)(TransferEvent::Moved(have));
        while have < self.file.size && !self.stop.load(Ordering::Relaxed) {
            if breaks > 0 {
                let why = format!("the download of {} broke", self.file.path);
                (self.hub.observer)(TransferEvent::Waiting { seconds: breaks, why });
                thread::sleep(Duration::from_secs(breaks));
            }
            self.stream(have)?;
            let now = self.have()?;
            breaks = if now > have { 0 } else { breaks + 1 };
            have = now;
            if breaks == BREAKS {
                return Err(HubError::Broken { file: self.file.path.clone(), have, size: self.file.size });
            }
        }
        Ok(())
    }

    /// Reads one response until it ends or breaks. A broken connection is no error.
    fn stream(&mut self, have: u64) -> Result<(), HubError> {
        let response = self.ask(have)?;
        let begin = format!("bytes {have}-");
        let goes_on = response.status() == 206
            && header(&response, "content-range").is_some_and(|range| range.starts_with(&begin));
        if have > 0 && !goes_on {
            self.clear()?;
            (self.hub.observer)(TransferEvent::Lost(have));
        }
        if response.status() == 206 && !goes_on {
            return Ok(()); // the server sent another range: start again
        }
        self.take(response.into_body().into_reader())
    }

    fn ask(&self, have: u64) -> Result<HttpAnswer, HubError> {
        let (SnapshotOf { repo, commit }, path) = (self.from, &self.file.path);
        let parts: Vec<&str> = ["resolve", commit].into_iter().chain(path.split('/')).collect();
        let doing = format!("downloading {path} of {repo}");
        let about = RequestContext { repo, revision: commit, file: Some(path), doing: &doing };
        let mut ask = Ask::get(self.hub.client.page(repo, &parts), about);
        if have > 0 {
            ask.headers.push(("Range", format!("bytes={have}-")));
        }
        self.hub.client.send(&ask)
    }

    fn take(&mut self, mut body: impl Read) -> Result<(), HubError> {
        let (mut have, mut buffer) = (self.have()?, vec![0; 1 << 16]);
        while !self.stop.load(Ordering::Relaxed) {
            let Ok(count @ 1..) = body.read(&mut buffer) else { return Ok(()) };
            have += count as u64;
            if have > self.file.size {
                self.clear()?;
                let (file, expected) = (self.file.path.clone(), format!("{} bytes", self.file.size));
                return Err(HubError::Damaged { file, expected, got: "more".into() });
            }
            self.out.write_all(&buffer[..count]).map_err(HubError::io("write", self.partial))?;
            (self.hub.observer)(TransferEvent::Moved(count as u64));
        }
        Ok(())
    }
}

/// Compares a downloaded file with the Hub's hash.
fn check(file: &Entry, path: &Path) -> Result<(), HubError> {
    let got = hash_like(&file.hash, path).map_err(HubError::io("read", path))?;
    if got == file.hash {
        return Ok(());
    }
    let in_words = |hash: &str| format!("{} {hash}", if is_sha256(hash) { "SHA-256" } else { "git's hash" });
    Err(HubError::Damaged { file: file.path.clone(), expected: in_words(&file.hash), got: in_words(&got) })
}

fn is_sha256(hash: &str) -> bool {
    hash.len() == 64
}

/// A file's hash, of the same kind as `hash` (see [`Entry`]).
pub(super) fn hash_like(hash: &str, path: &Path) -> io::Result<String> {
    if is_sha256(hash) {
        return files::sha256(path);
    }
    let file = files::open_regular(path)?;
    git_hash(file.metadata()?.len(), file)
}

/// The hash by which a blob of the cache is named, and that of its bytes; `None` for a file that is no link to a blob.
///
/// # Errors
/// An error of reading.
pub fn hashes_of_blob(link: &Path) -> io::Result<Option<(String, String)>> {
    let Ok(blob) = fs::read_link(link) else { return Ok(None) };
    let is_blob = blob.parent().is_some_and(|folder| folder.ends_with("blobs"));
    let hash = blob.file_name().and_then(|name| name.to_str()).filter(|hash| is_blob && [40, 64].contains(&hash.len()));
    hash.map(|hash| Ok((hash.to_owned(), hash_like(hash, link)?))).transpose()
}

/// The git blob hash of `size` bytes.
pub(super) fn git_hash(size: u64, mut bytes: impl Read) -> io::Result<String> {
    let mut hasher = Sha1::new();
    hasher.update(format!("blob {size}\0"));
    let mut buffer = vec![0; 1 << 16];
    loop {
        match bytes.read(&mut buffer)? {
            0 => return Ok(files::hex(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_small_file_is_gits() {
        assert_eq!(git_hash(6, &b"hello\n"[..]).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a"); // echo hello | git hash-object --stdin
    }
}
