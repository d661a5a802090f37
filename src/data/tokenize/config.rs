//! The JSON files beside a tokenizer: tokenizer_config.json, special_tokens_map.json and added_tokens.json.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::AddedToken;

use super::error::TokenizeError;
use crate::bounds::JSON_FILE_BYTES;
use crate::files::failed;
use crate::gguf::folder;

/// `bos_token` and its like, by name.
#[derive(Debug, Clone, Default)]
pub(in crate::data) struct SpecialTokens(Vec<(String, String)>);

impl SpecialTokens {
    pub(in crate::data) fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, token)| token)
    }

    pub(in crate::data) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, token)| (name.as_str(), token.as_str()))
    }
}

/// The files' content; null for a file that is not there.
#[derive(Debug)]
pub(super) struct TokenizerConfig {
    folder: PathBuf,
    config: Value,
    map: Value,
    added: Value,
}

/// A token that a file names beside those of the vocabulary.
#[derive(Debug, Clone)]
pub(super) struct NamedToken {
    pub(super) token: AddedToken,
    /// Where the file gives it one.
    pub(super) id: Option<u32>,
    pub(super) file: &'static str,
}

pub(super) const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
pub(super) const FILES: [&str; 3] = [CONFIG, MAP, ADDED];
/// Classes of transformers that take the ids of tokenizer.model as they are.
const CLASSES: [&str; 5] =
    ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend"];
/// What templates are rendered with.
const NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];
/// Names of further tokens that transformers keeps whole in a text, in its order.
const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
/// Its name in transformers 4.
const ADDITIONAL: &str = "additional_special_tokens";

impl TokenizerConfig {
    /// # Errors
    /// Files that cannot be read.
    pub(super) fn load(folder: &Path) -> Result<Self, TokenizeError> {
        let read = |name| Ok::<_, TokenizeError>(read_json(&folder.join(name))?.unwrap_or_default());
        Ok(Self { folder: folder.to_owned(), config: read(CONFIG)?, map: read(MAP)?, added: read(ADDED)? })
    }

    /// A named token is a file's own (`own`) unless the JSON files name it, or say that there is none (null).
    pub(super) fn special_tokens(&self, own: &[(&'static str, String)]) -> SpecialTokens {
        let find = |name: &str| match self.named(name) {
            Some((_, value)) => token_text(value),
            None => own.iter().find(|(known, _)| *known == name).map(|(_, token)| token.clone()),
        };
        SpecialTokens(NAMES.iter().filter_map(|name| Some(((*name).to_owned(), find(name)?))).collect())
    }

    /// Whether `bos_token` and `eos_token` are named here.
    pub(super) fn names_both_ends(&self) -> bool {
        ["bos_token", "eos_token"].iter().all(|name| self.named(name).is_some())
    }

    /// Refuses a `bos_token` or `eos_token` that is no token: its letters would be in the texts.
    ///
    /// # Errors
    /// [`TokenizeError::Key`].
    pub(super) fn check_ends(&self, is_token: impl Fn(&str) -> bool) -> Result<(), TokenizeError> {
        for key in ["bos_token", "eos_token"] {
            let Some((file, value)) = self.named(key) else { continue };
            if token_text(value).is_some_and(|token| !token.is_empty() && !is_token(&token)) {
                return Err(self.wrong(file, key, "a token of tokenizer.json, or null", value));
            }
        }
        Ok(())
    }

    /// What of these files decides ids.
    pub(super) fn deciding(&self) -> String {
        let mut config = self.config.clone();
        if let Some(keys) = config.as_object_mut() {
            keys.retain(|key, _| key != "chat_template");
        }
        format!("{config} {} {}", self.map, self.added)
    }

    /// A switch of tokenizer_config.json.
    ///
    /// # Errors
    /// A value that is neither true, false nor null.
    pub(super) fn switch(&self, key: &str, default: bool) -> Result<bool, TokenizeError> {
        match &self.config[key] {
            Value::Null => Ok(default),
            Value::Bool(value) => Ok(*value),
            value => Err(self.wrong(CONFIG, key, "true or false", value)),
        }
    }

    /// Refuses a class of transformers that has ids of its own.
    ///
    /// # Errors
    /// [`TokenizeError::Class`].
    pub(super) fn check_class(&self) -> Result<(), TokenizeError> {
        let Some(class) = self.config["tokenizer_class"].as_str() else { return Ok(()) };
        if CLASSES.contains(&class.trim_end_matches("Fast")) {
            return Ok(());
        }
        let path = self.path(CONFIG);
        Err(TokenizeError::Class { path, class: class.into(), folder: self.folder.display().to_string() })
    }

    /// The tokens with an id: those of `added_tokens_decoder`, or else of added_tokens.json; in the order of their ids.
    ///
    /// # Errors
    /// An id or a token that is none.
    pub(super) fn declared(&self) -> Result<Vec<NamedToken>, TokenizeError> {
        let mut tokens = match self.config["added_tokens_decoder"].as_object() {
            Some(decoder) => {
                decoder.iter().map(|(id, value)| self.decoder_entry(id, value)).collect::<Result<Vec<_>, _>>()
            }
            None => self.added.as_object().into_iter().flatten().map(|(text, id)| self.added_entry(text, id)).collect(),
        }?;
        tokens.sort_by_key(|token| token.id);
        Ok(tokens)
    }

    fn decoder_entry(&self, id: &str, value: &Value) -> Result<NamedToken, TokenizeError> {
        let wrong = |key: &str| self.wrong(CONFIG, key, "a token and its id", value);
        let number: u32 = id.parse().map_err(|_| wrong("added_tokens_decoder"))?;
        let mut token = added_token(value, false).ok_or_else(|| wrong(&format!("added_tokens_decoder.{id}")))?;
        token.special |= self.special_names().any(|(_, special)| token_text(special).as_ref() == Some(&token.content));
        Ok(NamedToken { token, id: Some(number), file: CONFIG })
    }

    fn added_entry(&self, text: &str, id: &Value) -> Result<NamedToken, TokenizeError> {
        let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let number = number.ok_or_else(|| self.wrong(ADDED, text, "a token and its id", id))?;
        let is_special = self.special().iter().any(|special| special.token.content == text);
        Ok(NamedToken { token: AddedToken::from(text, is_special), id: Some(number), file: ADDED })
    }

    /// The special tokens, which have no text: those with a name of their own, then the list of further ones.
    pub(super) fn special(&self) -> Vec<NamedToken> {
        let token = |(file, value)| Some(NamedToken { token: added_token(value, true)?, id: None, file });
        let all = self.special_names().chain(self.listed()).filter_map(token);
        all.filter(|named| !named.token.content.is_empty()).collect()
    }

    /// `bos_token` and its like; also `image_token` and other names that one model has, and lists with names.
    fn special_names(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        let keys = self.sources().into_iter().filter_map(|(_, values)| values.as_object()).flat_map(|keys| keys.keys());
        let other_names = keys.filter(|key| key.ends_with("_token") && !SPECIAL_NAMES.contains(&key.as_str()));
        let names = SPECIAL_NAMES.into_iter().chain(other_names.map(String::as_str));
        let lists = self.sources().into_iter().filter_map(|(file, values)| Some((file, values[EXTRA].as_object()?)));
        let listed = lists.flat_map(|(file, list)| list.values().map(move |value| (file, value)));
        names.filter_map(|name| self.named(name)).chain(listed).filter(|(file, _)| self.is_older() || *file == CONFIG)
    }

    /// The list of further special tokens. As transformers 5: the new name counts before the old one, tokenizer_config.json's before
    /// special_tokens_map.json's, which adds its list of the new name.
    fn listed(&self) -> Vec<(&'static str, &Value)> {
        let list = |file: &'static str, name: &str| -> Vec<(&'static str, &Value)> {
            let values = if file == CONFIG { &self.config } else { &self.map };
            values[name].as_array().into_iter().flatten().map(|value| (file, value)).collect()
        };
        let listed_in =
            |file| Some(list(file, EXTRA)).filter(|list| !list.is_empty()).unwrap_or_else(|| list(file, ADDITIONAL));
        match listed_in(CONFIG) {
            listed if !self.is_older() => listed,
            listed if listed.is_empty() => listed_in(MAP),
            listed => [listed, list(MAP, EXTRA)].concat(),
        }
    }

    /// A token's value, and the file with it.
    fn named(&self, name: &str) -> Option<(&'static str, &Value)> {
        let values = || self.sources().into_iter().filter_map(|(file, values)| Some((file, values.get(name)?)));
        values().find(|(_, value)| token_text(value).is_some()).or_else(|| values().next())
    }

    /// As transformers: special_tokens_map.json counts for tokenizers that were saved without `added_tokens_decoder`.
    fn sources(&self) -> [(&'static str, &Value); 2] {
        let (config, map) = ((CONFIG, &self.config), (MAP, &self.map));
        if self.is_older() { [map, config] } else { [config, map] }
    }

    fn is_older(&self) -> bool {
        self.config["added_tokens_decoder"].is_null()
    }

    /// One of the files.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    fn wrong(&self, file: &str, key: &str, expected: &'static str, got: &Value) -> TokenizeError {
        TokenizeError::Key { path: self.path(file), key: key.into(), expected, got: got.to_string() }
    }
}

/// A file's JSON; `None` where there is no such file.
///
/// # Errors
/// A file that cannot be read.
pub(in crate::data) fn read_json(path: &Path) -> Result<Option<Value>, TokenizeError> {
    let bytes = match folder::read_at_most(path, JSON_FILE_BYTES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(failed("read", path))?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| TokenizeError::BrokenJson { path: path.to_owned(), source })
}

/// `"<s>"` or `{"content": "<s>", …}`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// With Python's defaults for the flags that are not there.
fn added_token(value: &Value, is_special: bool) -> Option<AddedToken> {
    let flag = |name: &str| value[name].as_bool();
    let is = |name: &str| flag(name).unwrap_or(false);
    let token = AddedToken::from(token_text(value)?, is_special || is("special"));
    let normalized = flag("normalized").unwrap_or(token.normalized);
    Some(token.normalized(normalized).single_word(is("single_word")).lstrip(is("lstrip")).rstrip(is("rstrip")))
}
