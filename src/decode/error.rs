//! Errors of decoding.

use crate::engine::cuda::error::CudaError;
use crate::model::config::LlamaConfig;
use crate::torch::TorchPanic;

/// A prompt cannot be decoded, or decoding failed.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// A prompt without tokens.
    #[error("the prompt has no tokens; expected at least one (a BOS will do)")]
    EmptyPrompt,
    /// The prompt leaves no room in the context for a new token.
    #[error(
        "the prompt has {length} tokens, but the backbone's context is {context}, and at least one new token must fit; shorten the prompt"
    )]
    PromptTooLong {
        /// Its tokens.
        length: usize,
        /// `max_position_embeddings`.
        context: i64,
    },
    /// A token id outside of the vocabulary.
    #[error("prompt token {position} is id {id}; expected 0 to {}", vocab_size - 1)]
    TokenOutOfRange {
        /// 0-based.
        position: usize,
        id: i64,
        /// The backbone's.
        vocab_size: i64,
    },
    /// No token can be chosen.
    #[error(
        "logits contain NaN or infinity at new token {token}; decode in another --dtype, or check the \
         backbone's weights"
    )]
    NotFinite {
        /// 1-based.
        token: usize,
    },
    /// A text of a batch does not fit, with no other text beside it.
    #[error(
        "the text does not fit the memory: it ran out at {tokens} tokens, prompt included, with no other text beside it; shorten the \
         prompt, or ask for fewer new tokens"
    )]
    OutOfMemory {
        /// Tokens of prompt and text.
        tokens: usize,
        /// What was computed.
        source: TorchPanic,
    },
    /// The CUDA engine cannot decode this request, or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchPanic),
}

/// Checks that the prompt fits the backbone's context and vocabulary.
pub(super) fn check_prompt(config: &LlamaConfig, prompt: &[i64]) -> Result<(), DecodeError> {
    let (context, vocab_size) = (config.max_position_embeddings, config.vocab_size);
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    if prompt.len() as i64 >= context {
        return Err(DecodeError::PromptTooLong { length: prompt.len(), context });
    }
    match prompt.iter().position(|id| !(0..vocab_size).contains(id)) {
        Some(position) => Err(DecodeError::TokenOutOfRange { position, id: prompt[position], vocab_size }),
        None => Ok(()),
    }
}
