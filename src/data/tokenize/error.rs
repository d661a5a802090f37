//! Why a tokenizer, or one of its results, cannot be used.

use std::path::PathBuf;

use super::sentencepiece::SentencePieceError;
use super::tiktoken::TiktokenError;
use crate::bounds::TOKENIZER_GROWTH;
use crate::files::FileError;

/// Why a tokenizer, or one of its results, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    #[error(
        "{} has neither tokenizer.json nor tokenizer.model; copy the tokenizer's files from the model's repository \
         (or write them with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER))",
        folder.display()
    )]
    Missing { folder: PathBuf },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file beside the tokenizer that is no JSON.
    #[error("{} is no valid JSON", path.display())]
    BrokenJson { path: PathBuf, source: serde_json::Error },
    /// A value of tokenizer_config.json or added_tokens.json.
    #[error("{}: {key}: expected {expected}, got {got}", path.display())]
    Key { path: PathBuf, key: String, expected: &'static str, got: String },
    /// Two files that give a token different ids.
    #[error(
        "{}: {token:?} has id {id}, but with {} it is {own}{}; copy both files from the model's repository, or remove the token here",
        path.display(), vocabulary.display(), held(*id, holder.as_deref())
    )]
    OtherId {
        path: PathBuf,
        token: String,
        id: u32,
        /// tokenizer.json.
        vocabulary: PathBuf,
        own: u32,
        /// tokenizer.json's token with `id`.
        holder: Option<String>,
    },
    /// A tokenizer that llama.cpp does not have.
    #[error("{}: cannot be written to a GGUF file: {why}", path.display())]
    NotInGguf { path: PathBuf, why: &'static str },
    /// A tokenizer.json that the tokenizers crate refuses.
    #[error("{}: the tokenizers library cannot load it", path.display())]
    Unusable { path: PathBuf, source: tokenizers::Error },
    #[error("{}: {source}", path.display())]
    SentencePiece { path: PathBuf, source: SentencePieceError },
    #[error("{}: {source}", path.display())]
    Tiktoken { path: PathBuf, source: TiktokenError },
    /// transformers reads the file with other ids than its own.
    #[error(
        "{}: tokenizer_class {class:?} gives the pieces of tokenizer.model ids in a way of its own, which is not read; write a \
         tokenizer.json with transformers: AutoTokenizer.from_pretrained(\"{folder}\").save_pretrained(\"{folder}\")",
        path.display()
    )]
    Class { path: PathBuf, class: String, folder: String },
    /// Rules of tokenizer.json by which a short text becomes a very long one.
    #[error(
        "{}: {key}: its Replace rules may make a text {growth} times as long, and up to {TOKENIZER_GROWTH} are accepted; use the tokenizer that was \
         published with the backbone", path.display()
    )]
    Growth {
        path: PathBuf,
        /// `normalizer` or `decoder`.
        key: &'static str,
        growth: usize,
    },
    /// Rules of tokenizer.json that make every text long.
    #[error(
        "{}: {key}: it adds {added} {what} to every text, and up to {TOKENIZER_GROWTH} are accepted; use the tokenizer that was published with the \
         backbone", path.display()
    )]
    Added {
        path: PathBuf,
        /// `normalizer` or `post_processor`.
        key: &'static str,
        added: usize,
        /// `bytes` or `tokens`.
        what: &'static str,
    },
    /// A rule of tokenizer.json that finds its pattern everywhere.
    #[error("{}: {key}: a Replace rule has an empty pattern; use the tokenizer that was published with the backbone", path.display())]
    EmptyPattern {
        path: PathBuf,
        /// `normalizer` or `decoder`.
        key: &'static str,
    },
    /// A text of more tokens than any context.
    #[error("a text of {bytes} bytes that begins {start:?} cannot be tokenised: the most is {most}; divide it")]
    TooLong {
        /// The first characters.
        start: String,
        bytes: usize,
        most: usize,
    },
    /// The library failed on a text.
    #[error("{}: cannot tokenise a text that begins {start:?}", path.display())]
    Encode {
        /// Of the tokenizer.
        path: PathBuf,
        /// The first characters.
        start: String,
        source: tokenizers::Error,
    },
    /// The library failed on ids.
    #[error("{}: cannot turn tokens {ids:?} into text", path.display())]
    Decode { path: PathBuf, ids: Vec<i32>, source: tokenizers::Error },
    /// The tokenizer can produce ids that the backbone has no embedding for.
    #[error(
        "{}: token {token:?} has id {id}, but the backbone's config.json has vocab_size {vocab_size} \
         (ids 0 to {}); use the tokenizer that belongs to this backbone", path.display(), vocab_size - 1
    )]
    BeyondVocabulary {
        path: PathBuf,
        /// The token with the highest id.
        token: String,
        id: u32,
        vocab_size: usize,
    },
}

/// Which token has an id, within a sentence.
fn held(id: u32, holder: Option<&str>) -> String {
    holder.map_or_else(String::new, |token| format!(" ({id} is {token:?})"))
}
