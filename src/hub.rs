//! The Hugging Face Hub: downloads the files behind an id into the cache shared by all Hugging Face programs, and
//! pushes a folder to a repository.
//!
//! This module knows which files make up a backbone, heads or a data set. It reads none of them except the index of
//! sharded weights. It prints nothing: an observer receives the progress.
//!
//! Settings come from the environment variables of Python's `huggingface_hub`: `HF_ENDPOINT`, `HF_TOKEN` or the file
//! `$HF_HOME/token` (`HF_TOKEN_PATH`), `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HTTPS_PROXY`, `NO_PROXY` and
//! `SSL_CERT_FILE`.

use std::path::{Path, PathBuf};

use url::Url;

use crate::formats::provenance::HubSnapshot;
use crate::gguf;

mod cache;
mod client;
mod download;
mod error;
pub mod id;
mod listing;
pub mod push;
mod token;
mod transfer;
mod wanted;

use cache::Cache;
use client::Client;
pub use download::hashes_of_blob;
pub use error::{BranchState, HubError};
use id::Id;
use token::Token;
pub use transfer::{Observer, TransferEvent};
pub use wanted::{DataSplit, Wanted};

const ENDPOINT: &str = "https://huggingface.co";

/// A client of the Hub that the environment names, and the local cache.
pub struct Hub<'o> {
    client: Client<'o>,
    cache: Cache,
    offline: bool,
    observer: Observer<'o>,
}

/// The downloaded part of a repository's snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The snapshot's folder in the cache.
    pub folder: PathBuf,
    pub files: Vec<PathBuf>,
    /// Repository and commit.
    pub origin: HubSnapshot,
}

impl Fetched {
    /// The place of a model: its GGUF file, the first of several shards, or else the snapshot's folder.
    pub fn model(&self) -> &Path {
        self.files.iter().find(|file| gguf::file::is_gguf(file)).unwrap_or(&self.folder)
    }
}

impl<'o> Hub<'o> {
    /// Reads the environment; sends no request.
    ///
    /// # Errors
    /// [`HubError::Setting`] for a variable with an invalid value.
    pub fn from_env(observer: Observer<'o>) -> Result<Self, HubError> {
        Self::with_settings(&|name| std::env::var(name).ok(), observer)
    }

    /// As [`Hub::from_env`], with the values of the variables from elsewhere.
    ///
    /// # Errors
    /// As [`Hub::from_env`].
    pub fn with_settings(of: &dyn Fn(&str) -> Option<String>, observer: Observer<'o>) -> Result<Self, HubError> {
        let setting = |name: &str| of(name).filter(|value| !value.trim().is_empty());
        let text = setting("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = Url::parse(text.trim_end_matches('/'))
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.host().is_some())
            .filter(|url| url.username().is_empty() && url.password().is_none()) // errors name the endpoint
            .ok_or_else(|| HubError::setting("HF_ENDPOINT", "an address such as https://huggingface.co"))?;
        let home = cache::home(&setting);
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().find_map(|name| setting(name));
        let offline = offline.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()));
        let token = if offline { None } else { Token::from_env(&setting, &home)? }; // no request is sent offline
        let client = Client::new(endpoint, token, &setting, observer)?;
        Ok(Self { client, cache: Cache::of(&setting, &home), offline, observer })
    }

    /// Fetches the wanted files if `place` is a Hub id; `None` if it is a path (see [`id::model`]).
    ///
    /// # Errors
    /// [`HubError`].
    pub fn fetch_model(&self, place: &Path, wanted: Wanted) -> Result<Option<Fetched>, HubError> {
        let id = place.to_str().and_then(id::model);
        id.map(|id| self.fetch(&id, wanted)).transpose()
    }

    /// Fetches the data files of an entry if it is a Hub id; `None` if it is a path or a glob (see [`id::data`]).
    ///
    /// # Errors
    /// [`HubError`].
    pub fn fetch_data(&self, entry: &str, split: DataSplit) -> Result<Option<Fetched>, HubError> {
        id::data(entry).map(|id| self.fetch(&id, Wanted::Data(split))).transpose()
    }

    /// The local files of each entry of a list of data: those of a Hub id, or the path or glob itself. Also returns the snapshots of
    /// those files.
    ///
    /// # Errors
    /// [`HubError`].
    pub fn fetch_all(
        &self,
        entries: &[String],
        split: DataSplit,
    ) -> Result<(Vec<Vec<String>>, Vec<HubSnapshot>), HubError> {
        let (mut all, mut origins) = (Vec::new(), Vec::new());
        for entry in entries {
            match self.fetch_data(entry, split)? {
                None => all.push(vec![entry.clone()]),
                Some(fetched) => {
                    all.push(fetched.files.iter().map(|file| file.to_string_lossy().into_owned()).collect());
                    origins.push(fetched.origin);
                }
            }
        }
        Ok((all, origins))
    }

    /// Downloads the wanted files of a repository that the cache lacks.
    ///
    /// # Errors
    /// [`HubError`].
    pub fn fetch(&self, id: &Id, wanted: Wanted) -> Result<Fetched, HubError> {
        let files = if self.offline { self.find(id, wanted) } else { self.download(id, wanted) };
        let (commit, names) = files?;
        let folder = self.cache.snapshot(&id.repo, &commit);
        let files = names.iter().map(|name| folder.join(name)).collect();
        Ok(Fetched { folder, files, origin: HubSnapshot { id: id.repo.to_string(), commit } })
    }

    /// Finds the wanted files in the cache alone. The cache may hold only part of a data set, so its files are chosen
    /// from the list saved with the download; the files of a backbone and of heads can be chosen without such a list.
    fn find(&self, id: &Id, wanted: Wanted) -> Result<(String, Vec<String>), HubError> {
        let missing = |file: String| HubError::Offline { id: id.to_string(), file, cache: self.cache.root.clone() };
        let commit = self.cache.commit(&id.repo, id.revision());
        let commit = commit.ok_or_else(|| missing(format!("any file of revision {}", id.revision())))?;
        let folder = self.cache.snapshot(&id.repo, &commit);
        let here = self.cache.names(&folder);
        let names = match wanted {
            Wanted::Data(_) if !id.file.as_ref().is_some_and(|file| here.contains(file)) => {
                let listed = self.cache.listed(&id.repo, &commit);
                listed.ok_or_else(|| missing("the list of all files (which others do not keep)".into()))?
            }
            _ => here.clone(),
        };
        let in_cache = |error| match error {
            HubError::NoFile { file, .. } => missing(file),
            HubError::NothingWanted { expected, .. } => missing(expected),
            other => other,
        };
        let chosen = wanted.choose(id, &names).map_err(in_cache)?;
        let weights = wanted.weights(id, &folder, &names).map_err(in_cache)?;
        let all: Vec<String> = chosen.into_iter().chain(weights).collect();
        match all.iter().find(|name| !here.contains(name)) {
            Some(name) => Err(missing(name.clone())),
            None => Ok((commit, all)),
        }
    }
}

/// Repository and commit of a snapshot's folder in the cache, or of a GGUF file in one, parsed from its path.
pub fn origin(place: &Path) -> Option<HubSnapshot> {
    let folder = snapshot_of(place)?;
    let commit = folder.file_name()?.to_str()?.to_owned();
    let snapshots = folder.parent()?;
    let repo = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    (snapshots.file_name()? == "snapshots").then(|| HubSnapshot { id: repo.replacen("--", "/", 1), commit })
}

fn snapshot_of(place: &Path) -> Option<&Path> {
    let is_snapshot = |folder: &&Path| folder.parent().is_some_and(|parent| parent.ends_with("snapshots"));
    if gguf::file::is_gguf(place) { place.ancestors().find(is_snapshot) } else { Some(place) }
}

/// The name of a model in messages: `owner/name@commit` for a snapshot of the Hub, with the GGUF file if it is one, else its path.
pub fn name_of(place: &Path) -> String {
    let Some(HubSnapshot { id, commit }) = origin(place) else { return place.display().to_string() };
    let file = snapshot_of(place).and_then(|folder| place.strip_prefix(folder).ok()).unwrap_or(Path::new(""));
    match file.as_os_str().is_empty() {
        true => format!("{id}@{commit}"),
        false => format!("{id}@{commit}/{}", file.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshots_path_says_its_origin() {
        let origin = origin(Path::new("/cache/models--meta-llama--Llama-2-7b/snapshots/0a1b")).unwrap();
        assert_eq!(origin, HubSnapshot { id: "meta-llama/Llama-2-7b".into(), commit: "0a1b".into() });
        assert_eq!(super::origin(Path::new("checkpoints/run/final")), None);
        let file = Path::new("/cache/models--a--b-GGUF/snapshots/0a1b/q/model.gguf");
        assert_eq!(super::origin(file), Some(HubSnapshot { id: "a/b-GGUF".into(), commit: "0a1b".into() }));
        assert_eq!(name_of(file), "a/b-GGUF@0a1b/q/model.gguf");
        assert_eq!(super::origin(Path::new("models/model.gguf")), None);
    }
}
