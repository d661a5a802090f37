//! Errors of the Hub. No variant holds a token, a signed URL or a proxy password.

use std::io;
use std::path::{Path, PathBuf};

/// Why a download or a push failed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A variable of the environment, or the token's file.
    #[error("{name} is invalid: expected {expected}")]
    Setting {
        /// Which.
        name: String,
        /// What it should be.
        expected: &'static str,
    },
    /// One has to ask for access.
    #[error(
        "access to {repo} is restricted: request it at {page}, then set HF_TOKEN to a token of that account ({token})"
    )]
    Gated {
        /// The repository.
        repo: String,
        /// Its page.
        page: String,
        /// Whether one was sent.
        token: String,
    },
    /// No such repository, or one that this user may not see.
    #[error(
        "{endpoint} has no {repo}, and there is no such local path; check the spelling. A private repository needs HF_TOKEN ({token})"
    )]
    NoRepo {
        /// The Hub.
        endpoint: String,
        /// `model owner/name`.
        repo: String,
        /// Whether one was sent.
        token: String,
    },
    /// No such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}; give a branch, a tag or a commit hash after the @")]
    NoRevision {
        /// The repository.
        repo: String,
        /// What was asked for.
        revision: String,
    },
    /// No such file.
    #[error("{id} has no file {file:?}{}", hint(holds))]
    NoFile {
        /// Repository and revision.
        id: String,
        /// What was asked for.
        file: String,
        /// What it has.
        holds: Vec<String>,
    },
    /// It is something else.
    #[error("{id} has no {expected}{}", hint(holds))]
    NothingWanted {
        /// Repository and revision.
        id: String,
        /// What belongs there.
        expected: String,
        /// What it has.
        holds: Vec<String>,
    },
    /// Weights of a kind that is not read: GGUF and others.
    #[error(
        "{id} has only {found} weights, but safetensors or pytorch_model.bin are needed: convert them, or use a revision that has them"
    )]
    NoReadableWeights {
        /// Repository and revision.
        id: String,
        /// The file.
        found: String,
    },
    /// The token is none.
    #[error("{endpoint} rejected the token from {from}; create one at {endpoint}/settings/tokens")]
    WrongToken {
        /// The Hub.
        endpoint: String,
        /// Where the token was found.
        from: String,
    },
    /// It needs a token.
    #[error("pushing needs a token with write access: create one at {endpoint}/settings/tokens and set HF_TOKEN")]
    NeedsToken {
        /// The Hub.
        endpoint: String,
    },
    /// The token may not.
    #[error("{endpoint} does not allow {doing} with {token}{}; use a token with that permission", said(message))]
    Forbidden {
        /// The Hub.
        endpoint: String,
        /// What was tried.
        doing: String,
        /// Which.
        token: String,
        /// The Hub's words.
        message: String,
    },
    /// Not in the cache, and nobody may be asked.
    #[error("HF_HUB_OFFLINE is set, and the cache {} lacks {file} of {id}; unset it to download the file", cache.display())]
    Offline {
        /// Repository and revision.
        id: String,
        /// What is missing.
        file: String,
        /// The cache.
        cache: PathBuf,
    },
    /// Too many requests, or a server in trouble.
    #[error("{endpoint} answered {status} to {doing}, {tries} times{}; try again later", said(message))]
    Busy {
        /// The Hub.
        endpoint: String,
        /// HTTP's.
        status: u16,
        /// What was tried.
        doing: String,
        /// How often.
        tries: u32,
        /// The Hub's words, or how long it asks to wait.
        message: String,
    },
    /// Nobody answers.
    #[error(
        "cannot reach {endpoint} ({reason}) for {doing}; check the network, HTTPS_PROXY, SSL_CERT_FILE and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to \
         use only the cache"
    )]
    Unreachable {
        /// The Hub.
        endpoint: String,
        /// Why.
        reason: String,
        /// What was tried.
        doing: String,
    },
    /// A transfer that broke and could not go on.
    #[error(
        "the download of {file} stopped at {have} of {size} bytes, and retrying made no progress; run the command again to continue from there"
    )]
    Broken {
        /// Which file.
        file: String,
        /// Bytes that are kept.
        have: u64,
        /// Bytes in all.
        size: u64,
    },
    /// Not what the Hub has.
    #[error("the download of {file} is damaged: expected {expected}, got {got}; it was deleted, run the command again")]
    Damaged {
        /// Which file.
        file: String,
        /// Size or hash.
        expected: String,
        /// The same of what came.
        got: String,
    },
    /// A name from the Hub that would leave its folder.
    #[error(
        "{repo} has a file named {name:?}, a path outside its folder; nothing was written: use another revision, or tell its owner"
    )]
    UnsafeName {
        /// The repository.
        repo: String,
        /// The name.
        name: String,
    },
    /// An answer that is not the Hub's protocol.
    #[error("{endpoint} sent an invalid response to {doing}: {reason}; check HF_ENDPOINT")]
    BadAnswer {
        /// The Hub.
        endpoint: String,
        /// What was tried.
        doing: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Any other refusal.
    #[error("{endpoint} refused {doing} with status {status}{}", said(message))]
    Refused {
        /// The Hub.
        endpoint: String,
        /// What was tried.
        doing: String,
        /// HTTP's.
        status: u16,
        /// The Hub's words.
        message: String,
    },
    /// The repository went on while a push was under way.
    #[error("{repo} changed during the push")]
    Moved {
        /// The repository.
        repo: String,
    },
    /// The last step of a push.
    #[error("{error}; {found}")]
    Commit {
        /// Why.
        error: Box<HubError>,
        /// What the branch says of it.
        found: BranchState,
    },
    /// `--private` of a repository that all can see.
    #[error("{repo} already exists and is public; make it private in its settings, or drop --private")]
    IsPublic {
        /// The repository.
        repo: String,
    },
    /// A folder without files.
    #[error("{} has no file to push{}", folder.display(), left_out_words(left_out))]
    NothingToPush {
        /// The folder.
        folder: PathBuf,
        /// Files that are never pushed.
        left_out: Vec<String>,
    },
    /// The disk.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// What a branch is seen to be after a commit that failed, or whose answer was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BranchState {
    /// As before, after a refusal.
    #[error("the branch is unchanged, so nothing was committed; push again")]
    Nothing,
    /// As before, after an answer that leaves open whether the Hub still works on it.
    #[error("the branch is unchanged so far, but the commit may still arrive; check the branch before pushing again")]
    NothingYet,
    /// Another commit, without the files of this one.
    #[error("the branch moved on to {0}, which does not contain these files; push again")]
    Others(String),
    /// Nobody answers.
    #[error(
        "the branch could not be read afterwards, so the commit may or may not exist; push again: existing files are not committed \
         twice"
    )]
    Unknown,
}

impl HubError {
    pub(super) fn setting(name: &str, expected: &'static str) -> Self {
        Self::Setting { name: name.to_owned(), expected }
    }

    /// Whether the Hub said no, so that nothing of what it was asked comes later.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Busy { .. } | Self::Unreachable { .. } | Self::BadAnswer { .. } => false,
            Self::Refused { status, .. } => *status < 500,
            _ => true,
        }
    }

    /// For `map_err`: an error of the disk.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn left_out_words(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("; skipped: {}", names.join(", ")) }
}

/// The first of what there is.
fn hint(holds: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = if holds.len() > SHOWN { ", …" } else { "" };
    let first = holds.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if holds.is_empty() { "; it has no such files".into() } else { format!("; it has {first}{more}") }
}
