//! The JSON files beside a tokenizer: tokenizer_config.json, special_tokens_map.json and added_tokens.json.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::AddedToken;

use super::error::TokenizeError;
use crate::files::{self, failed};

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

/// Classes of transformers that take the ids of tokenizer.model as they are.
const CLASSES: [&str; 5] =
    ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend"];
/// What templates are rendered with.
const NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];
/// Names of further tokens that transformers keeps whole in a text.
const OTHER_NAMES: [&str; 3] = ["sep_token", "cls_token", "mask_token"];
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

impl TokenizerConfig {
    /// # Errors
    /// Files that cannot be read.
    pub(super) fn load(folder: &Path) -> Result<Self, TokenizeError> {
        let read = |name| Ok::<_, TokenizeError>(read_json(&folder.join(name))?.unwrap_or_default());
        Ok(Self {
            folder: folder.to_owned(),
            config: read("tokenizer_config.json")?,
            map: read("special_tokens_map.json")?,
            added: read("added_tokens.json")?,
        })
    }

    /// A named token is a file's own (`own`) unless the JSON files name it, or say that there is none (null).
    pub(super) fn special_tokens(&self, own: &[(&'static str, String)]) -> SpecialTokens {
        let find = |name: &str| match self.named(name) {
            Some(value) => token_text(value),
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
            let files = [("tokenizer_config.json", &self.config), ("special_tokens_map.json", &self.map)];
            let named = files.into_iter().find(|(_, values)| !values[key].is_null());
            let Some((file, value)) = named.map(|(file, values)| (file, &values[key])) else { continue };
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
            value => Err(self.wrong("tokenizer_config.json", key, "true or false", value)),
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
        let path = self.folder.join("tokenizer_config.json");
        Err(TokenizeError::Class { path, class: class.into(), folder: self.folder.display().to_string() })
    }

    /// The tokens that are looked for in a text before it is cut, each with its id where a file gives it one: those of
    /// `added_tokens_decoder` (or else of added_tokens.json), and the special tokens. Special tokens have no text.
    ///
    /// # Errors
    /// An id or a token that is none.
    pub(super) fn added_tokens(&self) -> Result<Vec<(AddedToken, Option<u32>)>, TokenizeError> {
        let special = self.special();
        let mut tokens = self.declared()?;
        for (token, _) in &mut tokens {
            token.special |= special.iter().any(|named| named.content == token.content);
        }
        for named in special {
            if !tokens.iter().any(|(token, _)| token.content == named.content) {
                tokens.push((named, None));
            }
        }
        Ok(tokens)
    }

    /// Those with an id.
    fn declared(&self) -> Result<Vec<(AddedToken, Option<u32>)>, TokenizeError> {
        let wrong = |file, key: &str, value: &Value| self.wrong(file, key, "a token and its id", value);
        if let Some(decoder) = self.config["added_tokens_decoder"].as_object() {
            let file = "tokenizer_config.json";
            let token = |(id, value): (&String, &Value)| {
                let id: u32 = id.parse().map_err(|_| wrong(file, "added_tokens_decoder", value))?;
                let token = added_token(value).ok_or_else(|| wrong(file, &format!("added_tokens_decoder.{id}"), value));
                Ok((token?, Some(id)))
            };
            return decoder.iter().map(token).collect();
        }
        let token = |(text, value): (&String, &Value)| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| wrong("added_tokens.json", text, value))?;
            Ok((AddedToken::from(text.as_str(), false).normalized(false), Some(id)))
        };
        self.added.as_object().into_iter().flatten().map(token).collect()
    }

    /// The named special tokens and the lists of further ones.
    fn special(&self) -> Vec<AddedToken> {
        let named = NAMES.iter().chain(&OTHER_NAMES).filter_map(|name| self.named(name));
        let files = [&self.config, &self.map];
        let lists = LISTS.iter().flat_map(|list| files.map(|file| &file[*list]));
        let listed = lists.flat_map(|list| match list {
            Value::Array(tokens) => tokens.iter().collect(),
            Value::Object(tokens) => tokens.values().collect(),
            _ => Vec::new(),
        });
        let special = named.chain(listed).filter_map(added_token);
        special.map(|token| AddedToken { special: true, ..token }).filter(|token| !token.content.is_empty()).collect()
    }

    /// As transformers: special_tokens_map.json counts for tokenizers that were saved without `added_tokens_decoder`.
    fn named(&self, name: &str) -> Option<&Value> {
        let files = match self.config["added_tokens_decoder"].is_null() {
            true => [&self.map, &self.config],
            false => [&self.config, &self.map],
        };
        let values = || files.iter().filter_map(|file| file.get(name));
        values().find(|value| token_text(value).is_some()).or_else(|| values().next())
    }

    fn wrong(&self, file: &str, key: &str, expected: &'static str, got: &Value) -> TokenizeError {
        TokenizeError::Key { path: self.folder.join(file), key: key.into(), expected, got: got.to_string() }
    }
}

/// A file's JSON; `None` where there is no such file.
///
/// # Errors
/// A file that cannot be read.
pub(in crate::data) fn read_json(path: &Path) -> Result<Option<Value>, TokenizeError> {
    let bytes = match files::read(path) {
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

/// Looked for in the text as it is written, as transformers' own tokenizers do (`normalized` is only for lower case).
fn added_token(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str| value[name].as_bool().unwrap_or(false);
    let token = AddedToken::from(token_text(value)?, flag("special")).normalized(false);
    Some(token.single_word(flag("single_word")).lstrip(flag("lstrip")).rstrip(flag("rstrip")))
}
