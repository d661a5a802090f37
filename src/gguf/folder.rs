//! A GGUF file in the place of a Hugging Face folder: the JSON files, tokenizer and template that such a folder would have, by the paths that they would have in
//! it, `model.gguf/config.json`. Paths in real folders are read as they are.

use std::io;
use std::path::{Path, PathBuf};

use super::config;
use super::file::{GgufError, GgufFile, is_gguf};
use super::header::HeaderError;
use super::vocabulary::Vocabulary;
use crate::files;

const CONFIG: &str = "config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TOKENIZER_JSON: &str = "tokenizer.json";
const TOKENIZER_MODEL: &str = "tokenizer.model";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Files beside a GGUF file that take the place of its tokenizer, all of them together.
const TOKENIZER_FILES: [&str; 5] =
    [TOKENIZER_JSON, TOKENIZER_MODEL, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"];

/// The GGUF file that a path is in.
pub fn gguf_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|parent| is_gguf(parent) && parent.is_file())
}

/// A file of a folder, or what a GGUF file says in its place.
///
/// # Errors
/// As [`files::read`]; [`io::ErrorKind::NotFound`] also for a file that the GGUF file has nothing for.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_with(path, files::read)
}

/// As [`read`], of a file of at most so many bytes. What a GGUF file says has its own bounds.
///
/// # Errors
/// As [`read`].
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_with(path, |path| files::read_at_most(path, most))
}

/// As [`read`], of a text in UTF-8.
///
/// # Errors
/// As [`read`], and bytes that are no text.
pub fn read_text(path: &Path) -> io::Result<String> {
    match gguf_of(path) {
        None => files::read_text(path),
        Some(_) => String::from_utf8(read(path)?).map_err(io::Error::other),
    }
}

/// Whether [`read`] would find it.
pub fn exists(path: &Path) -> bool {
    match gguf_of(path) {
        None => path.exists(),
        Some(_) => !matches!(read(path), Err(error) if error.kind() == io::ErrorKind::NotFound),
    }
}

/// The file that is read for a path: itself, one beside the GGUF file that it is in, or that file.
pub fn behind(path: PathBuf) -> PathBuf {
    match gguf_of(&path) {
        None => path,
        Some(gguf) => instead_of(gguf, &path).unwrap_or_else(|| gguf.to_owned()),
    }
}

/// The files of a folder; of a GGUF file, those that [`read`] finds in it.
///
/// # Errors
/// A folder that cannot be read.
pub fn paths(folder: &Path) -> io::Result<Vec<PathBuf>> {
    if !is_gguf(folder) || folder.is_dir() {
        return std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    }
    let all = TOKENIZER_FILES.into_iter().chain([CONFIG, CHAT_TEMPLATE]).map(|name| folder.join(name));
    Ok(all.filter(|path| exists(path)).collect())
}

/// The folder that a backbone is in: itself, or that of its GGUF file.
pub fn on_disk(place: &Path) -> &Path {
    if is_gguf(place) && !place.is_dir() { files::parent(place) } else { place }
}

/// The files beside a GGUF file that are read instead of what it says.
pub fn beside(gguf: &Path) -> Vec<PathBuf> {
    let names = TOKENIZER_FILES.into_iter().chain([CHAT_TEMPLATE]);
    names.map(|name| gguf.join(name)).filter_map(|path| instead_of(gguf, &path)).collect()
}

fn read_with(path: &Path, read: impl FnOnce(&Path) -> io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    let Some(gguf) = gguf_of(path) else { return read(path) };
    if let Some(beside) = instead_of(gguf, path) {
        return read(&beside);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_tokenizer_file = TOKENIZER_FILES.contains(&&*name);
    if is_tokenizer_file && has_tokenizer_beside(gguf) {
        return Err(io::ErrorKind::NotFound.into());
    }
    said(gguf, &name).map_err(io::Error::other)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The file beside a GGUF file that is read in the place of `path` in it.
fn instead_of(gguf: &Path, path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?;
    let beside = files::parent(gguf).join(name);
    let may = match name.to_str()? {
        CHAT_TEMPLATE => true,
        name => TOKENIZER_FILES.contains(&name) && has_tokenizer_beside(gguf),
    };
    (may && beside.is_file()).then_some(beside)
}

fn has_tokenizer_beside(gguf: &Path) -> bool {
    [TOKENIZER_JSON, TOKENIZER_MODEL].iter().any(|name| files::parent(gguf).join(name).is_file())
}

/// What the file says in the place of one of a folder; `None` for nothing.
fn said(gguf: &Path, name: &str) -> Result<Option<Vec<u8>>, GgufError> {
    if ![CONFIG, TOKENIZER_CONFIG, TOKENIZER_JSON, TOKENIZER_MODEL, CHAT_TEMPLATE].contains(&name) {
        return Ok(None);
    }
    let file = GgufFile::open(gguf)?;
    said_of(&file, name).map_err(|source| GgufError::Header { path: gguf.into(), source })
}

fn said_of(file: &GgufFile, name: &str) -> Result<Option<Vec<u8>>, HeaderError> {
    let json = |value: serde_json::Value| Some(value.to_string().into_bytes());
    match name {
        CONFIG => return config::config(file).map(|config| json(config.into())),
        CHAT_TEMPLATE => return template(file),
        _ => {}
    }
    let Some(vocabulary) = Vocabulary::of(file.metadata())? else { return Ok(None) };
    Ok(match (name, vocabulary.is_sentencepiece()?) {
        (TOKENIZER_CONFIG, _) => json(vocabulary.config()?),
        (TOKENIZER_JSON, false) => json(vocabulary.bpe()?),
        (TOKENIZER_MODEL, true) => Some(vocabulary.sentencepiece()?),
        _ => None,
    })
}

fn template(file: &GgufFile) -> Result<Option<Vec<u8>>, HeaderError> {
    const KEY: &str = "tokenizer.chat_template";
    let Some(value) = file.metadata().get(KEY) else { return Ok(None) };
    let wrong = || HeaderError::Value { key: KEY.into(), expected: "text".into(), got: value.to_string() };
    value.text().map(|text| Some(text.as_bytes().to_owned())).ok_or_else(wrong)
}
