//! Lists a repository at a revision: its commit, and each file's size and hash, which is also the name of its blob.

use std::collections::HashSet;

use serde::Deserialize;
use url::Url;

use super::HubError;
use super::cache::{is_commit, is_hash};
use super::client::{Ask, Client, RequestContext, address, may_follow};
use super::id::{self, Repo};
use crate::bounds::LIST_PAGES;
use crate::http::connection::HttpAnswer;

#[derive(Debug, Deserialize)]
pub(super) struct BranchHead {
    #[serde(rename = "sha")]
    pub(super) commit: String,
    #[serde(default)]
    pub(super) private: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: String,
    pub(super) size: u64,
    /// The Hub's hash of the file and the name of its blob in the cache. Small text files have git's SHA-1 (40 digits,
    /// of `blob SIZE\0` and the bytes), files in LFS the SHA-256 of their bytes (64 digits).
    pub(super) hash: String,
}

#[derive(Deserialize)]
struct ListedFile {
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

/// The commit of a revision.
pub(super) fn head(client: &Client<'_>, repo: &Repo, revision: &str, doing: &str) -> Result<BranchHead, HubError> {
    let about = RequestContext { repo, revision, file: None, doing };
    let head: BranchHead = client.json(&Ask::get(client.api(repo, &["revision", revision]), about))?;
    if is_commit(&head.commit) { Ok(head) } else { Err(client.bad_answer(doing, "a commit that is no hash")) }
}

/// All files of a commit, sorted by path. Fails if a name points outside its folder or is there twice.
pub(super) fn tree(client: &Client<'_>, repo: &Repo, commit: &str) -> Result<Vec<Entry>, HubError> {
    let doing = format!("listing the files of {repo}");
    let about = RequestContext { repo, revision: commit, file: None, doing: &doing };
    let mut url = client.api(repo, &["tree", commit]);
    url.query_pairs_mut().append_pair("recursive", "true").append_pair("expand", "false");
    let (mut next, mut asked, mut entries) = (Some(url), HashSet::new(), Vec::new());
    while let Some(url) = next {
        asked.insert(url.clone());
        let ask = Ask::get(url, about);
        let response = client.send(&ask)?;
        let address = address(&response);
        let bad = |reason| client.bad_answer_of(&address, &doing, reason);
        next = next_page(&response).map_err(bad)?;
        if next.as_ref().is_some_and(|next| asked.contains(next)) {
            return Err(bad("a next page that was there before".into()));
        }
        if next.is_some() && asked.len() == LIST_PAGES {
            return Err(bad(format!("more than {LIST_PAGES} pages of files")));
        }
        let page: Vec<ListedFile> = client.read_json(&ask, response)?;
        for listed in page.into_iter().filter(|listed| listed.kind == "file") {
            entries.push(entry(repo, listed, &bad)?);
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    match entries.windows(2).find(|pair| pair[0].path == pair[1].path) {
        Some(pair) => Err(client.bad_answer(&doing, format!("{} twice", pair[0].path))),
        None => Ok(entries),
    }
}

fn entry(repo: &Repo, listed: ListedFile, bad: &dyn Fn(String) -> HubError) -> Result<Entry, HubError> {
    if !id::is_safe(&listed.path) {
        return Err(HubError::UnsafeName { repo: repo.to_string(), name: listed.path });
    }
    let (hash, digits, size) = match listed.lfs {
        Some(lfs) => (lfs.oid, 64, lfs.size),
        None => (listed.oid, 40, listed.size),
    };
    if !is_hash(&hash, digits) {
        return Err(bad(format!("a hash that is none, of {}", listed.path)));
    }
    Ok(Entry { path: listed.path, size, hash })
}

/// Parses `Link: <…>; rel="next"`. The next page may be on another host, as behind a mirror; like a redirect, it is
/// requested without the token and never over http after https. A link that cannot be followed is an error, since a
/// truncated list would pass for a complete one. The error names only the host, since the URL may be signed.
fn next_page(response: &HttpAnswer) -> Result<Option<Url>, String> {
    let links = response.headers().get_all("link").iter().map(|link| String::from_utf8_lossy(link.as_bytes()));
    let links = links.collect::<Vec<_>>().join(", ");
    let Some(next) = next_link(&links) else { return Ok(None) };
    let here = Url::parse(&address(response)).expect("it was asked there");
    let next = here.join(next).map_err(|error| format!("a next page whose address is none ({error})"))?;
    if may_follow(&here, &next) {
        return Ok(Some(next));
    }
    Err(format!("a next page at {}://{}", next.scheme(), next.host_str().unwrap_or_default()))
}

/// The URL of the relation `next` among links in the syntax of RFC 8288: quoted or not, in any case, beside other
/// relations.
fn next_link(header: &str) -> Option<&str> {
    let is_next = |parameter: &str| {
        let (key, value) = parameter.split_once('=').unwrap_or_default();
        let mut relations = value.trim().trim_matches('"').split_ascii_whitespace();
        key.trim().eq_ignore_ascii_case("rel") && relations.any(|relation| relation.eq_ignore_ascii_case("next"))
    };
    let mut links = header.split('<').skip(1).filter_map(|link| link.split_once('>'));
    links.find(|(_, parameters)| parameters.split([';', ',']).any(is_next)).map(|(address, _)| address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found_however_its_link_is_written() {
        for header in [
            "</b>; rel=\"next\"",
            "</b>; rel=next",
            "</a>; rel=\"prev\", </b>; title=\"more, or less\"; REL=\"last Next\"",
            "</a>;rel=first,</b>;rel=next,</c>;rel=last",
        ] {
            assert_eq!(next_link(header), Some("/b"), "{header}");
        }
        for header in ["", "</b>; rel=\"prev\"", "</b>; title=next", "</next>; rel=nextish"] {
            assert_eq!(next_link(header), None, "{header}");
        }
    }
}
