//! What a repository holds at a revision: its commit, and of every file the size and the hash that is also its blob's name.

use serde::Deserialize;
use ureq::Response;
use url::Url;

use super::cache::{is_commit, is_hash};
use super::client::{About, Ask, Client, may_follow};
use super::id::{self, Repo};
use super::{HubError, cache};

/// The state of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Head {
    #[serde(rename = "sha")]
    pub(super) commit: String,
    #[serde(default)]
    pub(super) private: bool,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: String,
    pub(super) size: u64,
    pub(super) hash: Hash,
}

/// What the Hub knows a file by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Hash {
    /// Of git: SHA-1 of `blob SIZE\0` and the bytes. Small text files.
    Git(String),
    /// Of the bytes. Everything in LFS.
    Sha256(String),
}

impl Hash {
    /// The name of the blob in the cache: the Hub's ETag.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Git(text) | Self::Sha256(text) => text,
        }
    }
}

#[derive(Deserialize)]
struct Listed {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

/// The commit that a revision is.
pub(super) fn head(client: &Client<'_>, repo: &Repo, revision: &str, doing: &str) -> Result<Head, HubError> {
    let about = About { repo, revision, file: None, doing };
    let head: Head = client.json(&Ask::get(client.api(repo, &["revision", revision]), about))?;
    if is_commit(&head.commit) { Ok(head) } else { Err(client.bad_answer(doing, "a commit that is no hash")) }
}

/// All files of a commit, sorted by path. Refused as a whole where one name would leave its folder.
pub(super) fn tree(client: &Client<'_>, repo: &Repo, commit: &str) -> Result<Vec<Entry>, HubError> {
    let doing = format!("listing the files of {repo}");
    let about = About { repo, revision: commit, file: None, doing: &doing };
    let mut url = client.api(repo, &["tree", commit]);
    url.query_pairs_mut().append_pair("recursive", "true").append_pair("expand", "false");
    let (mut next, mut entries) = (Some(url), Vec::new());
    while let Some(url) = next {
        let ask = Ask::get(url, about);
        let response = client.send(&ask)?;
        next = next_page(&response).map_err(|link| client.bad_answer(&doing, format!("a next page {link:?}")))?;
        let page: Vec<Listed> = client.read_json(&ask, response)?;
        for file in page.into_iter().filter(|listed| listed.kind == "file") {
            entries.push(entry(client, repo, &doing, file)?);
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}

fn entry(client: &Client<'_>, repo: &Repo, doing: &str, listed: Listed) -> Result<Entry, HubError> {
    if !id::is_safe(&listed.path) {
        return Err(HubError::UnsafeName { repo: repo.to_string(), name: listed.path });
    }
    let (hash, size) = match listed.lfs {
        Some(lfs) => (Hash::Sha256(lfs.oid), lfs.size),
        None => (Hash::Git(listed.oid), listed.size),
    };
    let is_good = match &hash {
        Hash::Git(text) => cache::is_commit(text),
        Hash::Sha256(text) => is_hash(text, 64),
    };
    let bad = || client.bad_answer(doing, format!("a hash that is none, of {}", listed.path));
    if is_good { Ok(Entry { path: listed.path, size, hash }) } else { Err(bad()) }
}

/// `Link: <…>; rel="next"`. It may lead to another host, as behind a mirror: it is followed like a redirection, that is without the
/// token, and never from https to http. What cannot be followed is an error (the header): a list cut short would pass for a whole one.
fn next_page(response: &Response) -> Result<Option<Url>, String> {
    let header = response.header("link").unwrap_or_default();
    let Some((before, _)) = header.split_once("rel=\"next\"") else { return Ok(None) };
    let address = before.rsplit_once('<').and_then(|(_, rest)| Some(rest.split_once('>')?.0));
    let here = Url::parse(response.get_url()).expect("it was asked there");
    let next = address.and_then(|address| here.join(address).ok()).filter(|next| may_follow(&here, next));
    next.map(Some).ok_or_else(|| header.to_owned())
}
