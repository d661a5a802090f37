//! A tokenizer of the tokenizers crate whose model is the crate's (tokenizer.json) or ours (tokenizer.model).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Token, TokenizerImpl,
};

use super::sentencepiece::{SentencePiece, SpaceNormalizer};
use crate::panics;

/// The crate's tokenizer with a model of either kind.
pub(super) type Pipeline =
    TokenizerImpl<TokenModel, TextNormalizer, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Text to tokens.
#[derive(Debug, Clone)]
pub(super) enum TokenModel {
    Library(ModelWrapper),
    SentencePiece {
        model: SentencePiece,
        /// Of tokens that tokenizer_config.json or added_tokens.json give an id.
        declared: HashMap<String, u32>,
    },
}

/// Text to the text that the model gets.
#[derive(Debug, Clone)]
pub(super) enum TextNormalizer {
    Library(NormalizerWrapper),
    Space(SpaceNormalizer),
}

impl<'de> Deserialize<'de> for TokenModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ModelWrapper::deserialize(deserializer).map(Self::Library)
    }
}

impl<'de> Deserialize<'de> for TextNormalizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NormalizerWrapper::deserialize(deserializer).map(Self::Library)
    }
}

impl Normalizer for TextNormalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match self {
            Self::Library(normalizer) => normalizer.normalize(text),
            Self::Space(normalizer) => normalizer.normalize(text),
        }
    }
}

impl Model for TokenModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Self::Library(model) => model.tokenize(text),
            Self::SentencePiece { model, .. } => Ok(model.tokenize(text)),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Library(model) => model.token_to_id(token),
            Self::SentencePiece { model, declared } => {
                declared.get(token).copied().or_else(|| model.token_to_id(token))
            }
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Library(model) => model.id_to_token(id),
            Self::SentencePiece { model, .. } => model.id_to_token(id).map(str::to_owned),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Library(model) => model.get_vocab(),
            Self::SentencePiece { model, .. } => model.vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Library(model) => model.get_vocab_size(),
            Self::SentencePiece { model, declared } => {
                let declared = declared.values().max().map_or(0, |id| *id as usize + 1);
                model.size().max(declared)
            }
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        match self {
            Self::Library(model) => model.save(folder, prefix),
            Self::SentencePiece { .. } => Err("a tokenizer.model is only read".into()),
        }
    }

    /// The trait asks for one; nothing here trains a tokenizer.
    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            Self::Library(model) => model.get_trainer(),
            Self::SentencePiece { .. } => BpeTrainer::default().into(),
        }
    }
}

/// Runs the tokenizers library; a panic in it becomes an error.
pub(super) fn catch<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    panics::catch(work).unwrap_or_else(|panic| Err(panic.into()))
}
