//! `tokenizer.model` as a tokenizer: SentencePiece's or tiktoken's, with the special tokens of the JSON files beside it.

use std::collections::HashMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokenizers::{AddedToken, DecoderWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use super::config::{NamedToken, SpecialTokens, TokenizerConfig};
use super::error::TokenizeError;
use super::pipeline::{Pipeline, TextNormalizer, TokenModel};
use super::sentencepiece::{SentencePiece, SentencePieceFile, Spacing};
use super::tiktoken;
use crate::files::failed;
use crate::gguf::folder;

/// What is read of it.
pub(super) struct ModelFile {
    pub(super) bytes: Vec<u8>,
    model: SentencePiece,
    normalizer: Option<TextNormalizer>,
    pre_tokenizer: Option<Value>,
    decoder: Value,
    /// `bos_token` and its like, where the JSON files do not name them.
    named: Vec<(&'static str, String)>,
    /// Special tokens with their ids.
    special: Vec<(String, u32)>,
}

impl ModelFile {
    /// # Errors
    /// A file that is neither, or broken.
    pub(super) fn read(path: &Path, config: &TokenizerConfig) -> Result<Self, TokenizeError> {
        let bytes = folder::read(path).map_err(failed("read", path))?;
        if tiktoken::is_tiktoken(&bytes) {
            return Self::from_tiktoken(bytes, path);
        }
        config.check_class()?;
        let spacing = Spacing {
            legacy: config.switch("legacy", true)?,
            add_prefix_space: config.switch("add_prefix_space", true)?,
        };
        let broken = |source| TokenizeError::SentencePiece { path: path.to_owned(), source };
        let file = SentencePieceFile::parse(&bytes, spacing).map_err(broken)?;
        Ok(Self {
            normalizer: Some(TextNormalizer::Space(file.normalizer)),
            pre_tokenizer: None,
            decoder: file.decoder,
            named: file.named,
            special: file.special,
            model: file.model,
            bytes,
        })
    }

    fn from_tiktoken(bytes: Vec<u8>, path: &Path) -> Result<Self, TokenizeError> {
        let broken = |source| TokenizeError::Tiktoken { path: path.to_owned(), source };
        let model = tiktoken::parse(&bytes).map_err(broken)?;
        let size = model.size();
        Ok(Self {
            normalizer: None,
            pre_tokenizer: Some(tiktoken::pre_tokenizer()),
            decoder: tiktoken::decoder(),
            named: tiktoken::named(size),
            special: tiktoken::special_tokens(size).into_iter().zip((size as u32)..).collect(),
            model,
            bytes,
        })
    }

    pub(super) fn special_tokens(&self, config: &TokenizerConfig) -> SpecialTokens {
        config.special_tokens(&self.named)
    }

    /// The tokenizer. BOS goes before a text unless `add_bos_token` is false, EOS behind it if `add_eos_token` is true.
    ///
    /// # Errors
    /// Keys of the JSON files that are not right.
    pub(super) fn pipeline(self, config: &TokenizerConfig) -> Result<Pipeline, TokenizeError> {
        let (adds_bos, adds_eos) = (config.switch("add_bos_token", true)?, config.switch("add_eos_token", false)?);
        let special = self.special_tokens(config);
        let tokens = self.added_tokens(config, &special)?;
        let declared = tokens.iter().filter_map(|(token, id)| Some((token.content.clone(), (*id)?)));
        let declared: HashMap<String, u32> = declared.collect();
        let mut pipeline: Pipeline = TokenizerImpl::new(TokenModel::SentencePiece { model: self.model, declared });
        pipeline.with_normalizer(self.normalizer);
        pipeline.with_pre_tokenizer(self.pre_tokenizer.map(part::<PreTokenizerWrapper>));
        pipeline.with_decoder(Some(part::<DecoderWrapper>(self.decoder)));
        let tokens: Vec<AddedToken> = tokens.into_iter().map(|(token, _)| token).collect();
        pipeline.add_tokens(&tokens);
        pipeline.set_encode_special_tokens(config.switch("split_special_tokens", false)?);
        let token = |name| special.get(name).and_then(|token| Some((token.to_owned(), pipeline.token_to_id(token)?)));
        let bos = token("bos_token").filter(|_| adds_bos);
        let eos = token("eos_token").filter(|_| adds_eos);
        pipeline.with_post_processor(Some(part::<PostProcessorWrapper>(template(bos.as_ref(), eos.as_ref()))));
        Ok(pipeline)
    }

    /// The JSON files', then the file's own, and the named tokens.
    fn added_tokens(
        &self,
        config: &TokenizerConfig,
        special: &SpecialTokens,
    ) -> Result<Vec<(AddedToken, Option<u32>)>, TokenizeError> {
        let named = config.declared()?.into_iter().chain(config.special());
        let mut tokens: Vec<(AddedToken, Option<u32>)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for NamedToken { token, id, .. } in named {
            places.entry(token.content.clone()).or_insert_with(|| {
                // Looked for in the text as it is written, as transformers does beside a tokenizer.model.
                tokens.push((token.normalized(false), id));
                tokens.len() - 1
            });
        }
        let own = self.special.iter().map(|(token, id)| (token.as_str(), Some(*id)));
        for (text, id) in own.chain(special.iter().map(|(_, token)| (token, None))) {
            let at = *places.entry(text.to_owned()).or_insert(tokens.len());
            if at == tokens.len() {
                tokens.push((AddedToken::from(text, true), id));
            }
            tokens[at].0.special = true;
        }
        Ok(tokens)
    }
}

/// A text with what goes around it, as tokenizer.json writes it.
fn template(bos: Option<&(String, u32)>, eos: Option<&(String, u32)>) -> Value {
    let special = |token: &(String, u32)| json!({"SpecialToken": {"id": token.0, "type_id": 0}});
    let text = |name: &str, kind: u32| json!({"Sequence": {"id": name, "type_id": kind}});
    let around = |text| bos.into_iter().map(special).chain([text]).chain(eos.map(special));
    let single: Vec<Value> = around(text("A", 0)).collect();
    let pair: Vec<Value> = around(text("A", 0)).chain(around(text("B", 1))).collect();
    let tokens = bos
        .into_iter()
        .chain(eos)
        .map(|(token, id)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]})));
    let special_tokens: serde_json::Map<String, Value> = tokens.collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens})
}

/// A part of a tokenizer that is written here.
fn part<T: DeserializeOwned>(json: Value) -> T {
    serde_json::from_value(json).expect("a part that the tokenizers crate knows")
}
