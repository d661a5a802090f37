//! Converts text to token ids and back with the backbone's tokenizer.json or tokenizer.model. Knows nothing of rows,
//! conversations or labels.

mod config;
pub mod config_keys;
mod error;
mod gguf_keys;
mod growth;
mod json_file;
mod model_file;
mod pipeline;
mod sentencepiece;
mod tiktoken;
mod vocabulary;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};
use tokenizers::Encoding;

use crate::bounds::TEXT_BYTES;
use crate::files::{self, failed};
use crate::gguf::folder;
use config::TokenizerConfig;
pub(super) use config::{SpecialTokens, read_json};
pub use error::TokenizeError;
use json_file::JsonFile;
use model_file::ModelFile;
use pipeline::{Pipeline, catch};
pub use sentencepiece::SentencePieceError;
pub use tiktoken::TiktokenError;
pub use vocabulary::VocabularyMismatch;

/// The file with the vocabulary, the first that is there. (transformers takes them in this order, too.)
const FILES: [&str; 2] = [JSON, MODEL];
const JSON: &str = "tokenizer.json";
const MODEL: &str = "tokenizer.model";
/// Part of the digest of a tokenizer.model: raise it when the same files would give other ids.
const MODEL_FORMAT: &str = "tokenizer.model 1";

/// A text with more bytes than so many times the longest token of each place of the context is refused before it becomes tokens. More than 1,
/// as a tokenizer may drop blanks and compose letters first.
const MARGIN: usize = 4;
/// A piece of text with more tokens than this is emitted although its last character may be incomplete.
const MOST_PENDING: usize = 16;
/// Tokens that may hold a character of four bytes.
const OF_CHARACTER: usize = 4;

/// A backbone's tokenizer.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    tokenizer: Pipeline,
    path: PathBuf,
    sha256: String,
    highest: HighestToken,
    /// Bytes.
    longest: usize,
    /// How many times as long its normalizer may make a text.
    growth: usize,
    bos: Option<i32>,
    eos: Option<i32>,
}

/// The token with the highest id.
#[derive(Debug, Clone)]
struct HighestToken {
    token: String,
    id: u32,
    /// The file that it comes from.
    path: PathBuf,
}

impl TextTokenizer {
    /// Reads tokenizer.json or else tokenizer.model, and the JSON files beside it.
    ///
    /// # Errors
    /// Neither of the two, or files that cannot be read.
    pub fn load(folder: &Path) -> Result<Self, TokenizeError> {
        Self::load_if_there(folder)?.ok_or_else(|| TokenizeError::Missing { folder: folder.to_owned() })
    }

    /// As [`TextTokenizer::load`]; `None` for a folder without a tokenizer.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn load_if_there(folder: &Path) -> Result<Option<Self>, TokenizeError> {
        let Some(path) = vocabulary_file(folder) else { return Ok(None) };
        let config = TokenizerConfig::load(folder)?;
        let read = if path.ends_with(JSON) { Self::from_json(path, &config) } else { Self::from_model(path, &config) };
        read.map(Some)
    }

    fn from_json(path: PathBuf, config: &TokenizerConfig) -> Result<Self, TokenizeError> {
        let bytes = folder::read(&path).map_err(failed("read", &path))?;
        let growth = growth::of(&path, &bytes)?;
        let JsonFile { pipeline, changed, splits_special } = JsonFile::parse(&bytes, &path, config)?;
        let mut sha256 = Sha256::new_with_prefix(&bytes);
        if !changed.is_empty() || splits_special {
            sha256.update(config.deciding());
        }
        let mut read = Self::of(pipeline, path, files::hex(&sha256.finalize()), &config.special_tokens(&[]));
        if let Some(named) = changed.iter().find(|named| named.token.content == read.highest.token) {
            read.highest.path = config.path(named.file);
        }
        Ok(Self { growth, ..read })
    }

    fn from_model(path: PathBuf, config: &TokenizerConfig) -> Result<Self, TokenizeError> {
        let file = ModelFile::read(&path, config)?;
        let sha256 = Sha256::new().chain_update(MODEL_FORMAT).chain_update(config.deciding()).chain_update(&file.bytes);
        let special = file.special_tokens(config);
        Ok(Self::of(file.pipeline(config)?, path, files::hex(&sha256.finalize()), &special))
    }

    fn of(tokenizer: Pipeline, path: PathBuf, sha256: String, special: &SpecialTokens) -> Self {
        let id = |name: &str| special.get(name).and_then(|token| tokenizer.token_to_id(token)).map(to_i32);
        let (bos, eos) = (id("bos_token"), id("eos_token"));
        let vocab = tokenizer.get_vocab(true);
        let longest = vocab.keys().map(String::len).max().unwrap_or_default();
        let (token, id) = vocab.into_iter().max_by_key(|(_, id)| *id).unwrap_or_default();
        let highest = HighestToken { token, id, path: path.clone() };
        Self { sha256, tokenizer, path, highest, longest, growth: growth::USUAL, bos, eos }
    }

    /// Ids of a text; `add_special` adds what the tokenizer puts around one (Llama: BOS before it). A text that begins with BOS, as rendered
    /// ones do, gets no second one.
    ///
    /// # Errors
    /// The library's own.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<i32>, TokenizeError> {
        let encoded = self.encoding(text, || self.tokenizer.encode_fast(text, add_special))?;
        Ok(encoded.get_ids().iter().skip(self.second_bos(&encoded)).map(|&id| to_i32(id)).collect())
    }

    /// 1 where the tokenizer put a BOS before that of the text, else 0.
    fn second_bos(&self, encoded: &Encoding) -> usize {
        let is_added = encoded.get_special_tokens_mask().first() == Some(&1);
        let is_bos = |at: usize| self.bos.is_some() && encoded.get_ids().get(at).map(|&id| to_i32(id)) == self.bos;
        usize::from(is_added && is_bos(0) && is_bos(1))
    }

    /// Ids of a text with nothing around it, and which bytes of the text each stands for.
    ///
    /// # Errors
    /// The library's own.
    pub fn encode_with_places(&self, text: &str) -> Result<(Vec<i32>, Vec<Range<usize>>), TokenizeError> {
        let encoded = self.encoding(text, || self.tokenizer.encode(text, false))?;
        let places = encoded.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok((encoded.get_ids().iter().map(|&id| to_i32(id)).collect(), places))
    }

    /// As [`TextTokenizer::encode_with_places`], with what the tokenizer puts around a text: it stands for no bytes at the text's ends.
    ///
    /// # Errors
    /// The library's own.
    pub fn encode_around(&self, text: &str) -> Result<(Vec<i32>, Vec<Range<usize>>), TokenizeError> {
        let encoded = self.encoding(text, || self.tokenizer.encode(text, true))?;
        let mut at = 0; // behind the last token of the text
        let place = |((start, end), &is_around): (&(usize, usize), &u32)| -> Range<usize> {
            if is_around != 0 {
                return if at == 0 { 0..0 } else { text.len()..text.len() };
            }
            at = *end;
            *start..*end
        };
        let second_bos = self.second_bos(&encoded);
        let places =
            encoded.get_offsets().iter().zip(encoded.get_special_tokens_mask()).skip(second_bos).map(place).collect();
        Ok((encoded.get_ids().iter().skip(second_bos).map(|&id| to_i32(id)).collect(), places))
    }

    /// Runs the library on a text; those of more than a quarter of the most one after the other, as each takes some hundred bytes for each of its own.
    fn encoding(
        &self,
        text: &str,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, TokenizeError> {
        static ONE_LONG_TEXT: Mutex<()> = Mutex::new(());
        let most = TEXT_BYTES / self.growth.div_ceil(growth::USUAL);
        if text.len() > most {
            return Err(TokenizeError::TooLong { start: start(text), bytes: text.len(), most });
        }
        let _alone = (text.len() > most / 4).then(|| ONE_LONG_TEXT.lock().unwrap_or_else(PoisonError::into_inner));
        catch(encode).map_err(|source| self.failed_on(text, source))
    }

    /// Whether a text surely has more tokens than `context`: 4 MB of short ones take ten seconds and half a gigabyte to be counted.
    pub fn is_beyond(&self, text: &str, context: usize) -> bool {
        text.len() / MARGIN / self.longest.max(1) >= context
    }

    /// The length of the special token that a text begins with; `None` if it begins with none.
    pub fn special_token_at(&self, text: &str) -> Option<usize> {
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().values();
        let here = added.filter(|token| token.special && text.starts_with(&token.content));
        here.map(|token| token.content.len()).filter(|length| *length > 0).max()
    }

    /// Text of ids. Like every Llama tokenizer's, it drops the space before the first word:
    /// what follows other text is decoded with [`TextTokenizer::stream_after`].
    ///
    /// # Errors
    /// The library's own.
    pub fn decode(&self, ids: &[i32], skip_special: bool) -> Result<String, TokenizeError> {
        // A negative id becomes one that no vocabulary has, and is left out like any unknown id.
        let known: Vec<u32> = ids.iter().map(|&id| u32::try_from(id).unwrap_or(u32::MAX)).collect();
        let failed = |source| TokenizeError::Decode { path: self.path.clone(), ids: ids.to_vec(), source };
        catch(|| self.tokenizer.decode(&known, skip_special)).map_err(failed)
    }

    fn failed_on(&self, text: &str, source: tokenizers::Error) -> TokenizeError {
        TokenizeError::Encode { path: self.path.clone(), start: start(text), source }
    }

    /// Text piece by piece, special tokens left out.
    pub fn stream(&self) -> TextStream<'_> {
        self.stream_after(&[])
    }

    /// Text piece by piece, as it reads after the text of `before` (a prompt): a first space is kept.
    pub fn stream_after(&self, before: &[i32]) -> TextStream<'_> {
        // Four tokens hold any one character (UTF-8 has at most four bytes), special tokens have no text.
        let special = |id: &i32| self.is_special(*id);
        let mut ids: Vec<i32> = before.iter().rev().filter(|id| !special(id)).take(4).copied().collect();
        ids.reverse();
        TextStream { tokenizer: self, emitted: ids.len(), ids }
    }

    /// Bytes of the longest token of the vocabulary.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// One more than the highest id it can produce, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.highest.id as usize + 1
    }

    /// The id of `bos_token`, if there is one.
    pub fn bos_id(&self) -> Option<i32> {
        self.bos
    }

    /// The id of `eos_token`, if there is one.
    pub fn eos_id(&self) -> Option<i32> {
        self.eos
    }

    /// A hash of what decides ids: tokenizer.json or tokenizer.model, and the JSON files beside it where they change its tokens.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Refuses a tokenizer that can produce ids beyond the backbone's vocabulary. (Fewer are fine: vocabularies get padded.)
    ///
    /// # Errors
    /// [`TokenizeError::BeyondVocabulary`].
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<(), TokenizeError> {
        if self.vocab_size() <= vocab_size {
            return Ok(());
        }
        let HighestToken { token, id, path } = self.highest.clone();
        Err(TokenizeError::BeyondVocabulary { path, token, id, vocab_size })
    }

    /// Whether it is one of the tokens that stand for no text.
    pub fn is_special(&self, id: i32) -> bool {
        let token = u32::try_from(id).ok().and_then(|id| self.tokenizer.id_to_token(id));
        token.is_some_and(|token| self.tokenizer.get_added_vocabulary().is_special_token(&token))
    }
}

/// Turns ids into text as they come. A piece never ends inside a UTF-8 character.
///
/// The window of Hugging Face's text-generation-inference: decode the piece together with the one before it, because a
/// decoder treats a first token in its own way. (The tokenizers crate's `DecodeStream` fails where a byte token makes the
/// bytes before it invalid, and loses a space after a special token.)
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    /// The ids of the last emitted piece and of everything after it.
    ids: Vec<i32>,
    /// How many of `ids` are emitted already.
    emitted: usize,
}

impl TextStream<'_> {
    /// The text that this id completes; `None` while a character is still incomplete, or for a special token.
    ///
    /// # Errors
    /// The library's own.
    pub fn push(&mut self, id: i32) -> Result<Option<String>, TokenizeError> {
        self.ids.push(id);
        let piece = self.pending(self.ids.len())?;
        if !piece.is_empty() && !piece.ends_with(char::REPLACEMENT_CHARACTER) {
            self.ids.drain(..self.emitted);
            self.emitted = self.ids.len();
            return Ok(Some(piece));
        }
        if self.ids.len() - self.emitted > MOST_PENDING { self.emit_invalid(&piece) } else { Ok(None) }
    }

    /// Emits what the newest tokens cannot complete any more: bytes that are no text are not decoded again with each token.
    fn emit_invalid(&mut self, pending: &str) -> Result<Option<String>, TokenizeError> {
        let newest = self.ids.len() - OF_CHARACTER;
        let (mut end, mut piece) = (newest, self.pending(newest)?);
        while !pending.starts_with(&piece) && end > newest - OF_CHARACTER {
            end -= 1; // a character was cut in two
            piece = self.pending(end)?;
        }
        self.ids.drain(..self.emitted);
        self.emitted = end - self.emitted;
        Ok(Some(piece).filter(|piece| !piece.is_empty()))
    }

    /// What [`TextStream::push`] would return for this id, as text: a special token as it is written, and nothing for an incomplete
    /// character.
    ///
    /// # Errors
    /// The library's own.
    pub fn text_of(&self, id: i32) -> Result<String, TokenizeError> {
        if self.tokenizer.is_special(id) {
            return self.tokenizer.decode(&[id], false);
        }
        Ok(self.clone().push(id)?.unwrap_or_default())
    }

    /// Whether an id stands for no text.
    pub fn is_special(&self, id: i32) -> bool {
        self.tokenizer.is_special(id)
    }

    /// What is left: an incomplete character shows as U+FFFD.
    ///
    /// # Errors
    /// The library's own.
    pub fn finish(self) -> Result<Option<String>, TokenizeError> {
        Ok(Some(self.pending(self.ids.len())?).filter(|piece| !piece.is_empty()))
    }

    /// The text of the tokens before `end` that is not emitted yet.
    fn pending(&self, end: usize) -> Result<String, TokenizeError> {
        let before = self.tokenizer.decode(&self.ids[..self.emitted], true)?;
        let all = self.tokenizer.decode(&self.ids[..end], true)?;
        match all.strip_prefix(&before) {
            Some(piece) => Ok(piece.to_owned()),
            // Bytes that made a character became invalid with the next ones. What is emitted stays emitted.
            None => self.tokenizer.decode(&self.ids[self.emitted..end], true),
        }
    }
}

/// tokenizer.json, or else tokenizer.model; `None` for a folder without a tokenizer.
fn vocabulary_file(folder: &Path) -> Option<PathBuf> {
    FILES.map(|name| folder.join(name)).into_iter().find(|path| folder::exists(path))
}

/// The files of a folder that decide how text becomes ids, those that are there or not.
pub fn files_of(folder: &Path) -> Vec<PathBuf> {
    let is_model = vocabulary_file(folder).is_some_and(|path| path.ends_with(MODEL));
    let vocabulary = if is_model { MODEL } else { JSON };
    [&[vocabulary][..], &config::FILES].concat().into_iter().map(|name| folder.join(name)).collect()
}

/// `bos_token` and its like, by the JSON files or, where these name none, by tokenizer.model.
///
/// # Errors
/// Files that cannot be read.
pub(super) fn special_tokens(folder: &Path) -> Result<SpecialTokens, TokenizeError> {
    let config = TokenizerConfig::load(folder)?;
    match vocabulary_file(folder) {
        Some(path) if path.ends_with(MODEL) && !config.names_both_ends() => {
            Ok(ModelFile::read(&path, &config)?.special_tokens(&config))
        }
        _ => Ok(config.special_tokens(&[])),
    }
}

/// The first characters of a text, for an error.
fn start(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Vocabularies have far fewer tokens than 2³¹; beyond it, an id that no vocabulary has.
fn to_i32(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}
/// Token ids as tensors hold them.
pub fn wide(ids: &[i32]) -> Vec<i64> {
    ids.iter().map(|&id| i64::from(id)).collect()
}

/// Token ids as tokenizers and rows hold them.
///
/// # Panics
/// For an id that no vocabulary has.
pub fn narrow(ids: &[i64]) -> Vec<i32> {
    ids.iter().map(|&id| i32::try_from(id).expect("a vocabulary has far fewer tokens than 2^31")).collect()
}
