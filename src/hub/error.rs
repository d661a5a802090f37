//! Errors of the Hub. No variant holds a token, a signed URL or a proxy password.

use std::io;
use std::path::{Path, PathBuf};

/// Why a download or a push failed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// An environment variable or the token file.
    #[error("{name} is invalid: expected {expected}")]
    Setting { name: String, expected: &'static str },
    #[error(
        "access to {repo} is restricted: request it at {page}, then set HF_TOKEN to a token of that account ({token})"
    )]
    Gated {
        repo: String,
        page: String,
        /// The token's source, or that none was sent.
        token: String,
    },
    /// No such repository, or one that the user may not see.
    #[error(
        "{endpoint} has no {repo}, and there is no such local path; check the spelling. A private repository needs HF_TOKEN ({token})"
    )]
    NoRepo {
        endpoint: String,
        /// `model owner/name`.
        repo: String,
        /// The token's source, or that none was sent.
        token: String,
    },
    #[error("{repo} has no revision {revision:?}; give a branch, a tag or a commit hash after the @")]
    NoRevision { repo: String, revision: String },
    #[error("{id} has no file {file:?}{}", hint(holds))]
    NoFile {
        /// Repository and revision.
        id: String,
        file: String,
        /// Files of the repository.
        holds: Vec<String>,
    },
    /// A repository of another kind, such as a model without heads.
    #[error("{id} has no {expected}{}", hint(holds))]
    NothingWanted {
        /// Repository and revision.
        id: String,
        expected: String,
        /// Files of the repository.
        holds: Vec<String>,
    },
    /// A split without a config, in a repository with several.
    #[error("{id} has several configs with data files of split {split:?}: {}; name one, such as {id}:{}:{split}", configs.join(", "), configs[0])]
    SeveralConfigs {
        /// Repository and revision.
        id: String,
        split: String,
        /// Folders that hold files of the split.
        configs: Vec<String>,
    },
    /// Weights in an unsupported format.
    #[error(
        "{id} has only {found} weights, but safetensors or pytorch_model.bin are needed: convert them, or use a revision that has them"
    )]
    NoReadableWeights {
        /// Repository and revision.
        id: String,
        found: String,
    },
    #[error("{endpoint} rejected the token from {from}; create one at {endpoint}/settings/tokens")]
    WrongToken {
        endpoint: String,
        /// Source of the token.
        from: String,
    },
    #[error("pushing needs a token with write access: create one at {endpoint}/settings/tokens and set HF_TOKEN")]
    NeedsToken { endpoint: String },
    /// The token lacks the permission.
    #[error("{endpoint} does not allow {doing} with {token}{}; use a token with that permission", said(message))]
    Forbidden {
        endpoint: String,
        doing: String,
        /// Source of the token.
        token: String,
        message: String,
    },
    /// Missing in the cache while `HF_HUB_OFFLINE` is set.
    #[error("HF_HUB_OFFLINE is set, and the cache {} lacks {file} of {id}; unset it to download the file", cache.display())]
    Offline {
        /// Repository and revision.
        id: String,
        file: String,
        cache: PathBuf,
    },
    /// Rate limit, or server errors.
    #[error("{endpoint} answered {status} to {doing}, {tries} times{}; try again later", said(message))]
    Busy {
        endpoint: String,
        /// HTTP status.
        status: u16,
        doing: String,
        tries: u32,
        /// The Hub's message, or how long it asks to wait.
        message: String,
    },
    #[error(
        "cannot reach {endpoint} ({reason}) for {doing}; check the network, HTTPS_PROXY, SSL_CERT_FILE and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to \
         use only the cache"
    )]
    Unreachable { endpoint: String, reason: String, doing: String },
    /// A transfer broke, and retries made no progress.
    #[error(
        "the download of {file} stopped at {have} of {size} bytes, and retrying made no progress; run the command again to continue from there"
    )]
    Broken {
        file: String,
        /// Bytes on disk.
        have: u64,
        size: u64,
    },
    /// The size or hash differs from the Hub's.
    #[error("the download of {file} is damaged: expected {expected}, got {got}; it was deleted, run the command again")]
    Damaged {
        file: String,
        /// Size or hash.
        expected: String,
        got: String,
    },
    /// A file name from the Hub, or of an index of weights, that points outside its folder, or no file can have.
    #[error(
        "{repo} has a file named {name:?}, a path outside its folder; nothing was written: use another revision, or tell its owner"
    )]
    UnsafeName { repo: String, name: String },
    /// A response that does not follow the Hub's protocol.
    #[error("{endpoint} sent an invalid response to {doing}: {reason}; check HF_ENDPOINT")]
    BadAnswer { endpoint: String, doing: String, reason: String },
    /// Any other refusal.
    #[error("{endpoint} refused {doing} with status {status}{}", said(message))]
    Refused {
        endpoint: String,
        doing: String,
        /// HTTP status.
        status: u16,
        message: String,
    },
    /// The branch changed during a push.
    #[error("{repo} changed during the push")]
    Moved { repo: String },
    /// The commit of a push failed.
    #[error("{error}; {found}")]
    Commit {
        error: Box<HubError>,
        /// State of the branch afterwards.
        found: BranchState,
    },
    /// `--private` with an existing public repository.
    #[error("{repo} already exists and is public; make it private in its settings, or drop --private")]
    IsPublic { repo: String },
    #[error("{} has no file to push{}", folder.display(), left_out_words(left_out))]
    NothingToPush {
        folder: PathBuf,
        /// Files that are never pushed.
        left_out: Vec<String>,
    },
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
}

/// State of the branch after a commit that failed or got no response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BranchState {
    /// Unchanged after a refusal.
    #[error("the branch is unchanged, so nothing was committed; push again")]
    Nothing,
    /// Unchanged, but the Hub may still be working on the commit.
    #[error("the branch is unchanged so far, but the commit may still arrive; check the branch before pushing again")]
    NothingYet,
    /// Another commit, without the pushed files.
    #[error("the branch moved on to {0}, which does not contain these files; push again")]
    Others(String),
    /// The branch cannot be read.
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

    /// Whether the Hub refused the request, so that it cannot take effect later.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Busy { .. } | Self::Unreachable { .. } | Self::BadAnswer { .. } => false,
            Self::Refused { status, .. } => *status < 500,
            _ => true,
        }
    }

    /// For `map_err`: an I/O error.
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

/// Lists the first few files.
fn hint(holds: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = if holds.len() > SHOWN { ", …" } else { "" };
    let first = holds.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if holds.is_empty() { "; it has no such files".into() } else { format!("; it has {first}{more}") }
}
