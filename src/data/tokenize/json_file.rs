//! `tokenizer.json` as a tokenizer, with the tokens of the JSON files beside it. As transformers 5: the flags of `added_tokens_decoder` count
//! before those of tokenizer.json, and tokens that tokenizer.json lacks are added behind its own. transformers then ignores the ids of those
//! files; here, another id is an error.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Encoding, ModelWrapper};

use super::config::{self, NamedToken, TokenizerConfig};
use super::error::TokenizeError;
use super::pipeline::{Pipeline, TokenModel, catch};
use crate::panics;

/// A tokenizer that makes the library panic on this would do so on all texts.
const PROBE: &str = "Hello, world: 12\n";

/// What is read of it.
pub(super) struct JsonFile {
    pub(super) pipeline: Pipeline,
    /// Tokens of the files beside it that it lacks, or has with other flags.
    pub(super) changed: Vec<NamedToken>,
    /// Special tokens of a text are cut like the rest of it.
    pub(super) splits_special: bool,
}

impl JsonFile {
    /// # Errors
    /// A file that cannot be read, or does not fit the files beside it.
    pub(super) fn parse(bytes: &[u8], path: &Path, config: &TokenizerConfig) -> Result<Self, TokenizeError> {
        let unusable = |source| TokenizeError::Unusable { path: path.to_owned(), source };
        let read = |bytes: &[u8]| catch(|| Pipeline::from_bytes(bytes)).map_err(unusable);
        let (mut pipeline, declared) = (read(bytes)?, config.declared()?);
        check_dropout(&pipeline, path)?;
        let mut changed = with_other_flags(&pipeline, &declared);
        if !changed.is_empty() {
            pipeline = read(&with_flags(bytes, &changed).map_err(|error| unusable(error.into()))?)?;
        }
        changed.extend(add_new(&mut pipeline, &declared, config, path)?);
        let splits_special = config.switch("split_special_tokens", false)?;
        pipeline.set_encode_special_tokens(splits_special);
        // Left in the file by whoever saved it; a row's length is the recipe's business (as in transformers).
        pipeline.with_truncation(None).map_err(unusable)?.with_padding(None);
        let probed = panics::catch(|| pipeline.encode_fast(PROBE, true)).map_err(|panic| unusable(panic.into()))?;
        // Other texts may have tokens where this one has none.
        let ids = probed.as_ref().map_or(&[][..], Encoding::get_ids);
        match ids.iter().find(|&&id| pipeline.id_to_token(id).is_none()) {
            Some(id) => Err(wrong(path, "post_processor", "ids of the vocabulary", id.to_string())),
            None => Ok(Self { pipeline, changed, splits_special }),
        }
    }
}

fn wrong(path: &Path, key: &str, expected: &'static str, got: String) -> TokenizeError {
    TokenizeError::Key { path: path.to_owned(), key: key.into(), expected, got }
}

/// Refuses BPE dropout, with which the same text gets different tokens each time. (transformers uses the dropout, too, but with
/// LlamaTokenizer, which leaves it out.)
fn check_dropout(pipeline: &Pipeline, path: &Path) -> Result<(), TokenizeError> {
    let TokenModel::Library(ModelWrapper::BPE(model)) = pipeline.get_model() else { return Ok(()) };
    match model.dropout {
        Some(dropout) if dropout > 0.0 => {
            let expected = "null or 0, since dropout gives a text other tokens each time";
            Err(wrong(path, "model.dropout", expected, dropout.to_string()))
        }
        _ => Ok(()),
    }
}

/// The declared tokens that tokenizer.json has with other flags.
fn with_other_flags(pipeline: &Pipeline, declared: &[NamedToken]) -> Vec<NamedToken> {
    // added_tokens.json has no flags.
    let in_config = declared.iter().filter(|named| named.file == config::CONFIG);
    let changed = in_config.filter_map(|named| {
        let own = own_token(pipeline, &named.token.content)?;
        // A token that is special once stays so, in transformers, too.
        let token = AddedToken { special: named.token.special || own.special, ..named.token.clone() };
        Some(NamedToken { token, ..named.clone() }).filter(|named| named.token != *own)
    });
    changed.collect()
}

/// tokenizer.json with these flags. (The library cannot change `normalized` of a token that it has.)
fn with_flags(json: &[u8], tokens: &[NamedToken]) -> serde_json::Result<Vec<u8>> {
    const KEY: &str = "added_tokens";
    let mut file: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(json)?;
    let mut own: Vec<Map<String, Value>> = serde_json::from_str(file.get(KEY).map_or("[]", |tokens| tokens.get()))?;
    for flags in &mut own {
        if let Some(named) = tokens.iter().find(|named| flags["content"] == named.token.content.as_str()) {
            flags.extend(serde_json::from_value::<Map<String, Value>>(serde_json::to_value(&named.token)?)?);
        }
    }
    file.insert(KEY.to_owned(), to_raw_value(&own)?);
    serde_json::to_vec(&file)
}

/// Adds the tokens that tokenizer.json (`path`) lacks, and returns them.
///
/// # Errors
/// Files that give a token different ids; a `bos_token` or `eos_token` that no file gives an id.
fn add_new(
    pipeline: &mut Pipeline,
    declared: &[NamedToken],
    config: &TokenizerConfig,
    path: &Path,
) -> Result<Vec<NamedToken>, TokenizeError> {
    let mut all = add(pipeline, declared);
    declared.iter().try_for_each(|named| check_id(pipeline, named, config, path))?;
    config.check_ends(|token| pipeline.token_to_id(token).is_some())?;
    all.extend(add(pipeline, &config.special()));
    Ok(all)
}

fn add(pipeline: &mut Pipeline, tokens: &[NamedToken]) -> Vec<NamedToken> {
    let is_new = |named: &&NamedToken| own_token(pipeline, &named.token.content).is_none();
    let new: Vec<NamedToken> = tokens.iter().filter(is_new).cloned().collect();
    pipeline.add_tokens(&new.iter().map(|named| named.token.clone()).collect::<Vec<_>>());
    new
}

/// A token that is looked for in a text before it is cut.
fn own_token<'t>(pipeline: &'t Pipeline, content: &str) -> Option<&'t AddedToken> {
    let vocabulary = pipeline.get_added_vocabulary();
    vocabulary.get_added_tokens_decoder().get(vocabulary.get_vocab().get(content)?)
}

/// Refuses a token whose id is another one in the tokenizer.
fn check_id(
    pipeline: &Pipeline,
    NamedToken { token, id, file }: &NamedToken,
    config: &TokenizerConfig,
    path: &Path,
) -> Result<(), TokenizeError> {
    match (*id, pipeline.token_to_id(&token.content)) {
        (Some(id), Some(own)) if id != own => Err(TokenizeError::OtherId {
            path: config.path(file),
            token: token.content.clone(),
            id,
            vocabulary: path.to_owned(),
            own,
            holder: pipeline.id_to_token(id),
        }),
        _ => Ok(()),
    }
}
