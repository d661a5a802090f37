//! Pushes the changed files of a folder to a repository in one commit. Large files are uploaded first, by Git LFS, and
//! stay on the Hub, so that repeating an interrupted push uploads only the rest.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;

use super::client::{Ask, Body, RequestContext};
use super::download::{git_hash, hash_like};
use super::error::BranchState;
use super::id::Repo;
use super::listing::{self, BranchHead, Entry};
use super::{Hub, HubError};
use crate::files;

mod lfs;

/// Files per request, as in Python's library.
const BATCH: usize = 256;
/// Bytes from the start of a file, by which the Hub distinguishes text from weights.
const SAMPLE: u64 = 512;

/// An upload of a folder as one commit.
#[derive(Debug, Clone)]
pub struct Push<'p> {
    pub folder: &'p Path,
    /// Created if missing.
    pub repo: &'p Repo,
    /// Creates a new repository as private.
    pub private: bool,
    /// The commit's first line.
    pub message: &'p str,
    /// The branch, created if missing.
    pub revision: &'p str,
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// URL of the commit; `None` if the Hub had everything.
    pub commit: Option<String>,
    /// Names of the files in the commit.
    pub files: Vec<String>,
    /// Files that the Hub already had.
    pub unchanged: usize,
    /// Names of files that are never pushed or that `.gitignore` names.
    pub left_out: Vec<String>,
}

/// A file of the folder.
#[derive(Debug, Clone)]
struct Local {
    /// Relative path with `/`, as on the Hub.
    name: String,
    path: PathBuf,
    size: u64,
}

/// How the Hub accepts a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// In the commit itself.
    Inline,
    Lfs,
    /// Listed in the repository's `.gitignore`.
    Ignored,
}

#[derive(Deserialize)]
struct Modes {
    files: Vec<FileMode>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileMode {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Committed {
    commit_oid: String,
}

/// A file of the commit, after its upload or with its content.
struct Addition<'l> {
    file: &'l Local,
    /// The file's hash on the Hub.
    hash: String,
    /// The file's line in the commit's body.
    line: String,
}

impl<'l> Addition<'l> {
    /// A file in LFS.
    fn large(file: &'l Local) -> Result<Self, HubError> {
        let oid = files::sha256(&file.path).map_err(HubError::io("read", &file.path))?;
        let value = json!({"path": file.name, "algo": "sha256", "oid": oid, "size": file.size});
        Ok(Self { file, hash: oid, line: json!({"key": "lfsFile", "value": value}).to_string() })
    }

    /// A file in the commit itself.
    fn inline(file: &'l Local) -> Result<Self, HubError> {
        let bytes = files::read_any(&file.path).map_err(HubError::io("read", &file.path))?;
        let hash = git_hash(bytes.len() as u64, &bytes[..]).map_err(HubError::io("read", &file.path))?;
        let value = json!({"content": STANDARD.encode(bytes), "path": file.name, "encoding": "base64"});
        Ok(Self { file, hash, line: json!({"key": "file", "value": value}).to_string() })
    }

    fn is_in(&self, tree: &[Entry]) -> bool {
        tree.iter().any(|entry| entry.path == self.file.name && entry.hash == self.hash)
    }
}

impl Hub<'_> {
    /// Pushes the files that the repository lacks or has in another version. Files that only the repository has stay
    /// there.
    ///
    /// # Errors
    /// [`HubError`]. Nothing was committed then, except perhaps after [`HubError::Commit`], which reports the state of
    /// the branch.
    pub fn push(&self, push: &Push<'_>) -> Result<Pushed, HubError> {
        let (local, mut left_out) = scan(push.folder)?;
        if local.is_empty() {
            return Err(HubError::NothingToPush { folder: push.folder.into(), left_out });
        }
        if self.offline {
            return Err(HubError::setting("HF_HUB_OFFLINE", "not to be set, since pushing needs the Hub"));
        }
        if self.client.token.is_none() {
            return Err(HubError::NeedsToken { endpoint: self.client.name() });
        }
        let head = self.head_to_push_on(push)?;
        let there = listing::tree(&self.client, push.repo, &head.commit)?;
        let changed = changed(&local, &there)?;
        let modes = self.modes(push, &changed)?;
        left_out.extend(changed.iter().filter(|file| modes[&file.name] == Mode::Ignored).map(|file| file.name.clone()));
        let with_mode = |mode| changed.iter().filter(|file| modes[&file.name] == mode).copied().collect::<Vec<_>>();
        let (inline, large) = (with_mode(Mode::Inline), with_mode(Mode::Lfs));
        let unchanged = local.len() - changed.len();
        if inline.is_empty() && large.is_empty() {
            return Ok(Pushed { commit: None, files: Vec::new(), unchanged, left_out });
        }
        let mut additions = self.upload(push, &large)?;
        additions.extend(inline.into_iter().map(Addition::inline).collect::<Result<Vec<_>, _>>()?);
        let commit = self.commit(push, &head, &additions)?;
        let files = additions.iter().map(|addition| addition.file.name.clone()).collect();
        Ok(Pushed { commit: Some(commit), files, unchanged, left_out })
    }

    fn about<'a>(push: &'a Push<'_>, doing: &'a str) -> RequestContext<'a> {
        RequestContext { repo: push.repo, revision: push.revision, file: None, doing }
    }

    /// The branch's head; creates the repository and the branch if they are missing.
    fn head_to_push_on(&self, push: &Push<'_>) -> Result<BranchHead, HubError> {
        match self.head(push) {
            Ok(head) if push.private && !head.private => Err(HubError::IsPublic { repo: push.repo.to_string() }),
            Err(HubError::NoRepo { .. }) => {
                self.make_repo(push)?;
                let head = self.head_or_branch(push)?;
                let is_as_asked = head.private || !push.private; // checked before anything is uploaded
                if is_as_asked { Ok(head) } else { Err(HubError::IsPublic { repo: push.repo.to_string() }) }
            }
            Err(HubError::NoRevision { .. }) => self.head_or_branch(push),
            other => other,
        }
    }

    fn head(&self, push: &Push<'_>) -> Result<BranchHead, HubError> {
        listing::head(&self.client, push.repo, push.revision, &format!("looking up {}", push.repo))
    }

    fn make_repo(&self, push: &Push<'_>) -> Result<(), HubError> {
        let doing = format!("making {}", push.repo);
        let Repo { owner, name, .. } = push.repo;
        let mut body = json!({"name": name, "organization": owner, "type": "model", "private": push.private});
        if push.private {
            body["visibility"] = "private".into(); // the newer key
        }
        let url = self.client.url(&["api", "repos", "create"]);
        self.make(&Ask::post(url, Body::Json(&body), Self::about(push, &doing)))
    }

    /// Status 409 means that it exists by now: another program made it, or a first try whose response was lost.
    fn make(&self, ask: &Ask<'_>) -> Result<(), HubError> {
        match self.client.send(ask) {
            Err(HubError::Refused { status: 409, .. }) => Ok(()),
            answer => answer.map(drop),
        }
    }

    fn head_or_branch(&self, push: &Push<'_>) -> Result<BranchHead, HubError> {
        match self.head(push) {
            Err(HubError::NoRevision { .. }) => {
                let doing = format!("making the branch {} of {}", push.revision, push.repo);
                let url = self.client.api(push.repo, &["branch", push.revision]);
                self.make(&Ask::post(url, Body::Json(&json!({})), Self::about(push, &doing)))?;
                self.head(push)
            }
            head => head,
        }
    }

    /// Asks the Hub how it accepts each file.
    fn modes(&self, push: &Push<'_>, files: &[&Local]) -> Result<HashMap<String, Mode>, HubError> {
        let doing = format!("asking how {} takes the files", push.repo);
        let mut modes = HashMap::new();
        for some in files.chunks(BATCH) {
            let asked = some.iter().map(|file| {
                let sample = STANDARD.encode(start(&file.path)?);
                Ok(json!({"path": file.name, "size": file.size, "sample": sample}))
            });
            let body = json!({"files": asked.collect::<Result<Vec<_>, HubError>>()?});
            let url = self.client.api(push.repo, &["preupload", push.revision]);
            let answer: Modes = self.client.json(&Ask::post(url, Body::Json(&body), Self::about(push, &doing)))?;
            for file in some {
                let found = answer.files.iter().find(|mode| mode.path == file.name);
                let found =
                    found.ok_or_else(|| self.client.bad_answer(&doing, format!("nothing about {}", file.name)))?;
                let mode = match found.upload_mode.as_str() {
                    _ if found.should_ignore => Mode::Ignored,
                    "lfs" if file.size > 0 => Mode::Lfs, // object stores refuse empty files
                    _ => Mode::Inline,
                };
                modes.insert(file.name.clone(), mode);
            }
        }
        Ok(modes)
    }

    /// Commits all additions on top of `head` and returns the commit's URL. The Hub accepts the commit only if `head`
    /// is still the branch's newest (`parentCommit`), so a retry cannot commit twice.
    fn commit(&self, push: &Push<'_>, head: &BranchHead, additions: &[Addition<'_>]) -> Result<String, HubError> {
        let doing = format!("committing to {}", push.repo);
        let lines = commit_lines(push, head, additions);
        let url = self.client.api(push.repo, &["commit", push.revision]);
        let ask = Ask::post(url, Body::Lines(lines.as_bytes()), Self::about(push, &doing));
        let commit = match self.client.json(&ask) {
            Ok(Committed { commit_oid }) => commit_oid,
            Err(error) => self.found_after(error, push, head, additions)?,
        };
        Ok(self.client.page(push.repo, &["commit", &commit]).into())
    }

    /// Looks for the commit after an error. An earlier try may have succeeded although its response was lost: if the
    /// branch moved and has the files, that is the commit.
    fn found_after(
        &self,
        error: HubError,
        push: &Push<'_>,
        before: &BranchHead,
        additions: &[Addition<'_>],
    ) -> Result<String, HubError> {
        let failed = |error, found| Err(HubError::Commit { error: Box::new(error), found });
        let Ok(now) = self.head(push) else { return failed(error, BranchState::Unknown) };
        if now.commit == before.commit {
            let found = if error.is_refusal() { BranchState::Nothing } else { BranchState::NothingYet };
            return failed(error, found);
        }
        let Ok(there) = listing::tree(&self.client, push.repo, &now.commit) else {
            return failed(error, BranchState::Unknown);
        };
        let is_there = additions.iter().all(|addition| addition.is_in(&there));
        if is_there { Ok(now.commit) } else { failed(error, BranchState::Others(now.commit)) }
    }
}

/// The body of a commit: one line of JSON for the header and one for each file.
fn commit_lines(push: &Push<'_>, head: &BranchHead, additions: &[Addition<'_>]) -> String {
    let header = json!({"summary": push.message, "description": "", "parentCommit": head.commit});
    let mut lines = json!({"key": "header", "value": header}).to_string();
    for addition in additions {
        lines.push('\n');
        lines.push_str(&addition.line);
    }
    lines
}

/// Files that the repository lacks or has in another version. Hashes only files whose size is equal.
fn changed<'l>(local: &'l [Local], there: &[Entry]) -> Result<Vec<&'l Local>, HubError> {
    let mut changed = Vec::new();
    for file in local {
        let same = match there.iter().find(|entry| entry.path == file.name).filter(|entry| entry.size == file.size) {
            Some(entry) => hash_like(&entry.hash, &file.path).map_err(HubError::io("read", &file.path))? == entry.hash,
            None => false,
        };
        if !same {
            changed.push(file);
        }
    }
    Ok(changed)
}

/// All files below a folder, and the names of those that are never pushed: hidden files, leftovers of interrupted
/// writes, links to folders.
fn scan(folder: &Path) -> Result<(Vec<Local>, Vec<String>), HubError> {
    let (mut local, mut left_out, mut folders) = (Vec::new(), Vec::new(), vec![folder.to_owned()]);
    while let Some(current) = folders.pop() {
        for entry in fs::read_dir(&current).map_err(HubError::io("read", &current))? {
            let path = entry.map_err(HubError::io("read", &current))?.path();
            let inside = path.strip_prefix(folder).expect("it was found there");
            let name = inside.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/");
            let last = name.rsplit('/').next().unwrap_or_default();
            let is_link = path.is_symlink();
            let metadata = fs::metadata(&path).map_err(HubError::io("read", &path))?;
            if last.starts_with('.')
                || last.ends_with(".partial")
                || last.ends_with(".incomplete")
                || metadata.is_dir() && is_link
            {
                left_out.push(name);
            } else if metadata.is_dir() {
                folders.push(path);
            } else {
                local.push(Local { name, path, size: metadata.len() });
            }
        }
    }
    local.sort_by(|a, b| a.name.cmp(&b.name));
    left_out.sort();
    Ok((local, left_out))
}

fn start(path: &Path) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    files::open_regular(path)
        .and_then(|file| file.take(SAMPLE).read_to_end(&mut bytes))
        .map_err(HubError::io("read", path))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn hidden_and_half_written_files_stay_here_and_only_changes_go() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["heads.safetensors", "deep/config.json", ".git/config", ".x", "y.partial", "empty"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let text = if name == "empty" { "" } else { name };
            files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        }
        let (local, left_out) = scan(folder.path()).unwrap();
        let names: Vec<_> = local.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["deep/config.json", "empty", "heads.safetensors"]);
        assert_eq!(left_out, [".git", ".x", "y.partial"]);
        let entry = |path: &str, size, hash| Entry { path: path.into(), size, hash };
        let git = |text: &str| text.to_owned();
        let sha256 = files::sha256(&local[2].path).unwrap();
        let there = [
            entry("empty", 0, git("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")), // git's hash of an empty file
            entry("deep/config.json", 16, git("0000000000000000000000000000000000000000")),
            entry("heads.safetensors", 17, sha256),
        ];
        let names: Vec<_> = changed(&local, &there).unwrap().iter().map(|file| file.name.clone()).collect();
        assert_eq!(names, ["deep/config.json"]);
    }

    #[test]
    fn what_was_sent_is_known_without_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let [small, large] = ["config.json", "heads.safetensors"].map(|name| {
            let path = folder.path().join(name);
            files::write_atomic(&path, |out| out.write_all(b"hello\n")).unwrap();
            Local { name: name.into(), path, size: 6 }
        });
        let sent = [Addition::inline(&small).unwrap(), Addition::large(&large).unwrap()];
        drop(folder);
        let git = "ce013625030ba8dba906f756967f9e9ca394464a"; // echo hello | git hash-object --stdin
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"; // echo hello | sha256sum
        let entry = |file: &Local, hash: &str| Entry { path: file.name.clone(), size: 6, hash: hash.to_owned() };
        assert!(sent.iter().all(|addition| addition.is_in(&[entry(&small, git), entry(&large, sha256)])));
        assert!(!sent.iter().any(|addition| addition.is_in(&[entry(&small, sha256), entry(&large, git)])));
    }
}
