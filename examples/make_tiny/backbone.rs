//! The tiny Llama: trained on the conversations, saved as a Hugging Face folder.

use std::path::Path;

use anyhow::Result;
use tokenizers::Tokenizer;

use crate::conversations::{Conversation, ConversationSet};

/// The ids that the program trains on and sees: the text as a `text` row, BOS before it, the end after it.
pub(crate) fn encode(tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Vec<i64>> {
    let text = conversation.text() + crate::conversations::EOS;
    let encoding = tokenizer.encode(text, true).map_err(anyhow::Error::from_boxed)?;
    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
}

pub(crate) fn make(_folder: &Path, _tokenizer: &Tokenizer, _set: &ConversationSet, _seed: u64) -> Result<()> {
    Ok(())
}
