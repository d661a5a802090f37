//! Distinguishes local paths from Hub ids.
//!
//! Existing local paths win over Hub ids. An id is `owner/name` or `owner/name@revision`; for data also
//! `owner/name/file` and `owner/name@revision/file`, where the file may be a glob or a folder, and `owner/name:config`,
//! `owner/name:config:split` and `owner/name::split`; for models `owner/name/file.gguf` and `owner/name:quantisation`.
//! Anything else is a path: `./x`, `/x`, `~/x`, a single word, and for models other names of three words. If the first word is an existing folder and there is
//! no `@revision`, it is a path too, so that a misspelt path does not reach the Hub.

use std::fmt;
use std::path::Path;

use crate::data::source;
use crate::gguf::file;

/// Default revision.
pub const MAIN: &str = "main";

/// The kinds of Hub repository used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    Model,
    Dataset,
}

/// `owner/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    pub kind: RepoKind,
    /// A user or an organisation.
    pub owner: String,
    pub name: String,
}

/// A repository at a revision, or files in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Id {
    pub repo: Repo,
    /// A branch, tag or commit; `None` means [`MAIN`].
    pub revision: Option<String>,
    /// A file, a glob or a folder; of a model, a GGUF file.
    pub file: Option<String>,
    /// Config and split of a data set; of a model, the quantisation of a GGUF file as the config.
    pub part: Option<DataPart>,
}

/// Config and split, as `load_dataset` takes them: `owner/name:config:split`; at least one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataPart {
    pub config: Option<String>,
    pub split: Option<String>,
}

impl DataPart {
    /// Parses what stands behind the first colon.
    fn parse(text: &str) -> Option<Self> {
        let (config, split) = text.split_once(':').map_or((text, None), |(config, split)| (config, Some(split)));
        let is_good = |word: &str| is_safe(word) && !word.contains([':', '/', '@', '*', '?', '[']);
        let config = Some(config).filter(|config| !config.is_empty());
        let mut words = config.into_iter().chain(split).peekable();
        let is_part = words.peek().is_some() && words.all(is_good);
        is_part.then(|| Self { config: config.map(str::to_owned), split: split.map(str::to_owned) })
    }
}

impl fmt::Display for DataPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, ":{}", self.config.as_deref().unwrap_or_default())?;
        self.split.iter().try_for_each(|split| write!(out, ":{split}"))
    }
}

impl Repo {
    /// Parses `owner/name`.
    pub fn parse(kind: RepoKind, text: &str) -> Option<Self> {
        let (owner, name) = text.split_once('/')?;
        let is_good = is_word(owner) && is_word(name) && !name.ends_with(".git");
        is_good.then(|| Self { kind, owner: owner.into(), name: name.into() })
    }

    /// The name of the kind in URLs of the API.
    pub(super) fn plural(&self) -> &'static str {
        match self.kind {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }
}

impl Id {
    /// The branch, tag or commit, [`MAIN`] by default.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.owner, self.name)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(out, "@{revision}"))?;
        self.file.iter().try_for_each(|file| write!(out, "/{file}"))?;
        self.part.iter().try_for_each(|part| write!(out, "{part}"))
    }
}

/// Parses the id of a model, heads or an adapter; `None` for a path. A GGUF file is named by its path in the repository, or by a
/// quantisation, as in llama.cpp: `owner/name/file.gguf`, `owner/name:Q4_K_M`.
pub fn model(place: &str) -> Option<Id> {
    let id = remote(place, RepoKind::Model)?;
    let is_gguf = |file: &String| file::is_gguf(Path::new(file));
    let is_quantization = |part: &DataPart| part.config.is_some() && part.split.is_none();
    // `folder/model.gguf` is a missing file; a repository of that name is written `folder/model.gguf@main`.
    let is_repo = id.revision.is_some() || id.file.is_some() || !is_gguf(&id.repo.name);
    (is_repo && id.file.as_ref().is_none_or(is_gguf) && id.part.as_ref().is_none_or(is_quantization)).then_some(id)
}

/// Parses the id of data; `None` for a path or a glob.
pub fn data(place: &str) -> Option<Id> {
    let id = remote(place, RepoKind::Dataset)?;
    // `folder/rows.jsonl` is a missing file; a repository of that name is written `folder/rows.jsonl@main`.
    let is_more = id.file.is_some() || id.revision.is_some() || id.part.is_some();
    (is_more || !source::is_data(&id.repo.name)).then_some(id)
}

fn remote(place: &str, kind: RepoKind) -> Option<Id> {
    let id = parse(place, kind)?;
    let is_here = Path::new(place).exists() || id.revision.is_none() && Path::new(&id.repo.owner).is_dir();
    (!is_here).then_some(id)
}

/// Parses the grammar without looking at local files.
fn parse(text: &str, kind: RepoKind) -> Option<Id> {
    let (owner, rest) = text.split_once('/')?;
    let (name, rest) = rest.split_at(rest.find(['@', '/', ':']).unwrap_or(rest.len()));
    let repo = Repo::parse(kind, &format!("{owner}/{name}"))?;
    let (revision, file) = match rest.strip_prefix('@') {
        Some(rest) => {
            // refs/pr/7 and refs/convert/parquet are the Hub's own names; in other revisions a slash would be ambiguous
            // with a file
            let words = if rest.starts_with("refs/") { 3 } else { 1 };
            let end = rest.match_indices('/').nth(words - 1).map_or(rest.len(), |(at, _)| at);
            let end = rest[..end].find(':').unwrap_or(end);
            (Some(rest[..end].to_owned()), &rest[end..])
        }
        None => (None, rest),
    };
    let part = match file.strip_prefix(':') {
        Some(part) => Some(DataPart::parse(part)?),
        None => None,
    };
    let file = file.strip_prefix('/').map(str::to_owned);
    let is_good = revision.as_deref().is_none_or(is_revision) && file.as_deref().is_none_or(is_safe);
    is_good.then_some(Id { repo, revision, file, part })
}

/// The Hub's rule for the names of owners and repositories.
fn is_word(word: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    word.len() <= 96
        && word.chars().all(is_inner)
        && is_outer(word.chars().next())
        && is_outer(word.chars().last())
        && !word.contains("--")
        && !word.contains("..")
}

/// Whether this can name a branch, tag or commit. It becomes a path below `refs/` in the cache.
pub fn is_revision(revision: &str) -> bool {
    is_safe(revision) && !revision.chars().any(|c| c.is_whitespace() || matches!(c, '~' | '^' | ':' | '?' | '*' | '['))
}

/// Whether a name from outside stays inside the folder that it is joined to, on every system.
pub(super) fn is_safe(name: &str) -> bool {
    let is_good = |part: &str| !matches!(part, "" | "." | "..");
    name.split('/').all(is_good) && !name.chars().any(|c| c == '\\' || c.is_control()) && !has_drive(name)
}

/// `C:x` is an absolute path on Windows.
fn has_drive(name: &str) -> bool {
    matches!(name.as_bytes(), [letter, b':', ..] if letter.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Option<(String, Option<String>, Option<String>)> {
        parse(text, RepoKind::Dataset).map(|id| {
            assert_eq!(id.to_string(), text);
            (id.repo.to_string(), id.revision, id.file)
        })
    }

    #[test]
    fn an_id_has_a_repository_a_revision_and_a_file() {
        let id = |repo: &str, revision: Option<&str>, file: Option<&str>| {
            Some((repo.to_owned(), revision.map(str::to_owned), file.map(str::to_owned)))
        };
        assert_eq!(shown("a/b"), id("a/b", None, None));
        assert_eq!(shown("a/b@v1.0"), id("a/b", Some("v1.0"), None));
        assert_eq!(shown("a/b/c/d.jsonl"), id("a/b", None, Some("c/d.jsonl")));
        assert_eq!(shown("a/b@v1/c/*.parquet"), id("a/b", Some("v1"), Some("c/*.parquet")));
        assert_eq!(shown("a/b@refs/pr/7"), id("a/b", Some("refs/pr/7"), None));
        assert_eq!(
            shown("a/b@refs/convert/parquet/c.parquet"),
            id("a/b", Some("refs/convert/parquet"), Some("c.parquet"))
        );
    }

    #[test]
    fn an_id_of_data_may_name_config_and_split() {
        let part = |text: &str| {
            let id = parse(text, RepoKind::Dataset)?;
            assert_eq!((id.to_string().as_str(), id.repo.to_string().as_str()), (text, "a/b"));
            let part = id.part?;
            Some((part.config.unwrap_or_default(), part.split.unwrap_or_default(), id.revision.is_some()))
        };
        let expected = |config: &str, split: &str, has_revision| Some((config.into(), split.into(), has_revision));
        assert_eq!(part("a/b:main:train"), expected("main", "train", false));
        assert_eq!(part("a/b:en"), expected("en", "", false));
        assert_eq!(part("a/b::train_sft"), expected("", "train_sft", false));
        assert_eq!(part("a/b@v1:en:test"), expected("en", "test", true));
        assert_eq!(part("a/b@refs/convert/parquet:en"), expected("en", "", true));
        for wrong in ["a/b:", "a/b::", "a/b:x:", "a/b:x:y:z", "a/b:x/y", "a/b:*"] {
            assert_eq!(part(wrong), None, "{wrong}");
        }
        assert!(data("no-such-owner/rows.jsonl:en").is_some());
    }

    #[test]
    fn an_id_of_a_model_may_name_a_gguf_file_or_a_quantisation() {
        let id = model("no-such-owner/name@v1/q/b-Q4_0.gguf").unwrap();
        assert_eq!((id.file.as_deref(), id.revision.as_deref()), (Some("q/b-Q4_0.gguf"), Some("v1")));
        let part = model("no-such-owner/name:Q4_K_M").unwrap().part.unwrap();
        assert_eq!((part.config.as_deref(), part.split), (Some("Q4_K_M"), None));
        assert_eq!(model("no-such-owner/name:a:b"), None);
        assert!(model("no-such-owner/name.gguf@main").is_some());
    }

    #[test]
    fn what_is_no_id_is_a_path() {
        let paths = [
            "word",
            "./a",
            "../a",
            "/a/b",
            "~/a",
            "a/",
            "/a",
            "a//b",
            "a/b/",
            "a/b/../c",
            "a/*.jsonl",
            "a\\b/c",
            "a/b@",
        ];
        for path in paths
            .into_iter()
            .chain(["a/b@../x", "a/b@x y", "a/b\0", "a--b/c", "a/b.git", ".a/b", "a/-b", "C:/b", "é/b"])
        {
            assert_eq!(shown(path), None, "{path}");
        }
        assert_eq!(model("a/b/c"), None, "three words");
        assert_eq!(model("a/b@v1/c"), None);
        assert_eq!(data("a/b.jsonl"), None);
        assert_eq!(model("a/b.gguf"), None);
    }

    #[test]
    fn what_stands_here_is_a_path() {
        assert_eq!(model("src/hub"), None, "it exists");
        assert_eq!(model("src/nothing"), None, "its first word is a folder here"); // tests run in the root of the repository
        assert_eq!(data("src/nothing/rows.jsonl"), None);
        assert!(model("src/nothing@main").is_some(), "nobody means a path by that");
        assert!(model("no-such-owner/name").is_some() && data("no-such-owner/name/rows.jsonl").is_some());
    }

    #[test]
    fn names_that_leave_their_folder_are_unsafe() {
        for name in ["../x", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\0b", "", "a/..", "C:\\x", "c:x", "a\nb"] {
            assert!(!is_safe(name), "{name:?}");
        }
        assert!(is_safe("a/b.c/..d") && is_safe("model-00001-of-00002.safetensors"));
    }
}
