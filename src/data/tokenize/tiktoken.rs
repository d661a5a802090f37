//! tiktoken's vocabulary, as Meta ships Llama 3's `tokenizer.model`: a line for each token, its bytes in base64 and its rank.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::sentencepiece::{SentencePiece, SentencePieceError};

/// Splits a text into words that are tokenised apart: Llama 3's (and transformers' for every such file).
const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The tokens of Llama 3's file; its 256 special tokens follow.
const LLAMA_3: usize = 128_000;
const LLAMA_3_SPECIAL: usize = 256;

/// What is wrong with a vocabulary of tiktoken.
#[derive(Debug, thiserror::Error)]
pub enum TiktokenError {
    #[error("line {line}: expected a token in base64, a space and the rank {rank}, got {got:?}")]
    Line { line: usize, rank: usize, got: String },
    #[error("no token for the byte {byte:#04x}; a tiktoken vocabulary has one for each of the 256")]
    NoByte { byte: u8 },
    #[error("a token is there twice")]
    Twice(#[from] SentencePieceError),
}

/// Whether the first line is one of such a file.
pub(super) fn is_tiktoken(bytes: &[u8]) -> bool {
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(first).is_ok_and(|line| token_and_rank(line).is_some())
}

/// The vocabulary, its tokens spelt with one character a byte as the crate's `ByteLevel` spells them.
///
/// # Errors
/// [`TiktokenError`].
pub(super) fn parse(bytes: &[u8]) -> Result<SentencePiece, TiktokenError> {
    let text = String::from_utf8_lossy(bytes);
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty()).enumerate();
    let token = |(rank, (at, line)): (usize, (usize, &str))| {
        let wrong = || TiktokenError::Line { line: at + 1, rank, got: line.chars().take(80).collect() };
        let (token, _) = token_and_rank(line).filter(|(_, read)| *read == rank).ok_or_else(wrong)?;
        Ok(token.into_iter().map(spelt).collect())
    };
    let tokens: Vec<String> = lines.map(token).collect::<Result<_, TiktokenError>>()?;
    let model = SentencePiece::ranked(tokens)?;
    let is_there = |byte: &u8| model.token_to_id(&spelt(*byte).to_string()).is_some();
    match (0..=u8::MAX).find(|byte| !is_there(byte)) {
        Some(byte) => Err(TiktokenError::NoByte { byte }),
        None => Ok(model),
    }
}

/// Into words, and these into characters that stand for a byte; as tokenizer.json writes it.
pub(super) fn pre_tokenizer() -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

/// Back to bytes.
pub(super) fn decoder() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}

/// The special tokens behind the file's `size` tokens, which the file does not name: Llama 3.1's.
pub(super) fn special_tokens(size: usize) -> Vec<String> {
    if size != LLAMA_3 {
        return Vec::new();
    }
    let named = |at| match at {
        0 => "begin_of_text",
        1 => "end_of_text",
        4 => "finetune_right_pad_id",
        6 => "start_header_id",
        7 => "end_header_id",
        8 => "eom_id",
        9 => "eot_id",
        10 => "python_tag",
        _ => "",
    };
    let mut reserved = 0..;
    let name = |at| match named(at) {
        "" => format!("<|reserved_special_token_{}|>", reserved.next().unwrap_or_default()),
        name => format!("<|{name}|>"),
    };
    (0..LLAMA_3_SPECIAL).map(name).collect()
}

/// `bos_token` and `eos_token` of such a file.
pub(super) fn named(size: usize) -> Vec<(&'static str, String)> {
    let mut special = special_tokens(size).into_iter();
    ["bos_token", "eos_token"].into_iter().map_while(|name| Some((name, special.next()?))).collect()
}

fn token_and_rank(line: &str) -> Option<(Vec<u8>, usize)> {
    let (token, rank) = line.trim_end().split_once(' ')?;
    Some((STANDARD.decode(token).ok()?, rank.parse().ok()?))
}

/// GPT-2's character for a byte: its own where it is a visible one, else one from U+0100 on.
fn spelt(byte: u8) -> char {
    let is_visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_visible(&byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|other| !is_visible(other)).count() as u32;
    char::from_u32(0x100 + before).expect("few bytes have no character of their own")
}
