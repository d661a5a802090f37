//! SentencePiece: reads a `tokenizer.model` and cuts text into its pieces, with the ids of sentencepiece itself. Knows nothing of
//! chat templates, and of special tokens only those that are pieces of the file.
//!
//! transformers turns such a file into the BPE and unigram models of the tokenizers crate. Plain BPE, as in Llama's and Mistral's files, keeps its
//! ids there; other files do not (crate 0.23, sentencepiece 0.2.3), so that this code would be needed beside a conversion. Smallest examples, with the
//! pieces of sentencepiece first, then the crate's:
//!
//! - BPE with `ab`, and `bc` user-defined, which is never cut: `abc` is `a bc`, not `ab c`.
//! - BPE with `ab`, and `bc` unused, which falls apart again after it was joined: `abc` is `a b c`, not `ab c`.
//! - BPE with `bc` and `ab` of the same score, the left one first: `abc` is `ab c`, not `a bc`. A merge of the crate has a rank of its own.
//! - Unigram with byte fallback: `<0x41>` is six bytes, not the byte 0x41.
//! - Rule `nmt_nfkc`: `ﬁ` with an accent is `f`, `i` and the accent; the crate's `Precompiled` replaces clusters of letters and loses the accent.
//! - `treat_whitespace_as_suffix`: `a` is `a▁`, not `▁a`; the crate has no such rule.

mod bpe;
mod charsmap;
mod error;
mod normalizer;
mod pieces;
mod prefixes;
mod proto;
mod unigram;

use std::collections::HashMap;
use std::ops::Range;

use serde_json::{Value, json};
use tokenizers::Token;

use charsmap::Charsmap;
pub use error::SentencePieceError;
use normalizer::DummyPrefix;
pub(super) use normalizer::SpaceNormalizer;
use pieces::PieceTable;
use proto::{ModelProto, PieceKind};
use unigram::UnigramTable;

/// How transformers reads the file: keys of tokenizer_config.json.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spacing {
    /// Each text between special tokens gets a space before it, not only the first.
    pub(super) legacy: bool,
    /// The first text gets a space before it, where the file asks for one.
    pub(super) add_prefix_space: bool,
}

/// A file's pieces and how they are chosen.
#[derive(Debug, Clone)]
pub(in crate::data::tokenize) struct SentencePiece {
    pieces: PieceTable,
    algorithm: Algorithm,
}

#[derive(Debug, Clone)]
enum Algorithm {
    Unigram(UnigramTable),
    Bpe,
    /// tiktoken's: a text that is a token is that token, others are joined by rank.
    Ranked,
}

/// Everything that a file says.
pub(super) struct SentencePieceFile {
    pub(super) model: SentencePiece,
    pub(super) normalizer: SpaceNormalizer,
    /// As tokenizer.json writes a decoder.
    pub(super) decoder: Value,
    /// `bos_token` and its like.
    pub(super) named: Vec<(&'static str, String)>,
    /// Control pieces with their ids.
    pub(super) special: Vec<(String, u32)>,
}

impl SentencePieceFile {
    /// # Errors
    /// [`SentencePieceError`].
    pub(super) fn parse(bytes: &[u8], spacing: Spacing) -> Result<Self, SentencePieceError> {
        let proto = ModelProto::parse(bytes).map_err(SentencePieceError::NoProtobuf)?;
        if proto.pieces.is_empty() {
            return Err(SentencePieceError::NoPieces);
        }
        let model = SentencePiece::new(&proto)?;
        let normalizer = normalizer_of(&proto, &model.pieces, spacing)?;
        let named = named(&proto, &model.pieces);
        let special = model.pieces.with_kind(PieceKind::Control).map(|(id, text)| (text.to_owned(), id)).collect();
        let decoder = decoder_of(&normalizer);
        Ok(Self { model, normalizer, decoder, named, special })
    }
}

impl SentencePiece {
    fn new(proto: &ModelProto) -> Result<Self, SentencePieceError> {
        let pieces = || PieceTable::new(proto.pieces.clone(), proto.trainer.byte_fallback);
        let refused = |number, name| Err(SentencePieceError::Algorithm { number, name });
        match proto.trainer.model_type {
            1 => {
                let pieces = pieces()?;
                Ok(Self { algorithm: Algorithm::Unigram(UnigramTable::new(&pieces)), pieces })
            }
            2 => Ok(Self { algorithm: Algorithm::Bpe, pieces: pieces()? }),
            3 => refused(3, "WORD"),
            4 => refused(4, "CHAR"),
            number => refused(number, "unknown to sentencepiece"),
        }
    }

    /// Tokens by their rank: the lower, the earlier they are joined.
    pub(super) fn ranked(tokens: Vec<String>) -> Result<Self, SentencePieceError> {
        Ok(Self { pieces: PieceTable::ranked(tokens)?, algorithm: Algorithm::Ranked })
    }

    /// The tokens of a normalised text.
    pub(super) fn tokenize(&self, text: &str) -> Vec<Token> {
        let found = self.cut(text);
        let mut tokens: Vec<Token> = Vec::with_capacity(found.len());
        for (id, bytes) in found {
            match (id.filter(|id| Some(*id) != self.pieces.unknown), &self.pieces.bytes) {
                (Some(id), _) => tokens.push(self.token(id, bytes)),
                (None, Some(ids)) => {
                    let each = text[bytes.clone()].bytes().zip(bytes);
                    tokens.extend(each.map(|(byte, at)| self.token(ids[usize::from(byte)], at..at + 1)));
                }
                (None, None) => self.push_unknown(&mut tokens, bytes),
            }
        }
        tokens
    }

    fn cut(&self, text: &str) -> Vec<(Option<u32>, Range<usize>)> {
        match &self.algorithm {
            Algorithm::Unigram(table) => table.encode(&self.pieces, text),
            Algorithm::Bpe => bpe::encode(&self.pieces, text),
            Algorithm::Ranked => match self.pieces.text_id(text) {
                Some(id) => vec![(Some(id), 0..text.len())],
                None => bpe::encode(&self.pieces, text),
            },
        }
    }

    /// Unknown characters beside each other are one token.
    fn push_unknown(&self, tokens: &mut Vec<Token>, bytes: Range<usize>) {
        let unknown = self.pieces.unknown.expect("a vocabulary without an unknown piece has every byte");
        match tokens.last_mut().filter(|last| last.id == unknown) {
            Some(last) => last.offsets.1 = bytes.end,
            None => tokens.push(self.token(unknown, bytes)),
        }
    }

    fn token(&self, id: u32, bytes: Range<usize>) -> Token {
        Token::new(id, self.pieces.all[id as usize].text.clone(), (bytes.start, bytes.end))
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.pieces.named(token)
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<&str> {
        self.pieces.all.get(id as usize).map(|piece| piece.text.as_str())
    }

    pub(super) fn vocab(&self) -> HashMap<String, u32> {
        self.pieces.all.iter().map(|piece| piece.text.clone()).zip(0..).collect()
    }

    /// Score and kind of each piece, in the numbers of the file; `None` unless pieces are joined by their scores.
    pub(super) fn scored(&self) -> Option<impl Iterator<Item = (f32, i64)>> {
        let is_bpe = matches!(self.algorithm, Algorithm::Bpe);
        is_bpe.then(|| self.pieces.all.iter().map(|piece| (piece.score, piece.kind as i64)))
    }

    pub(super) fn size(&self) -> usize {
        self.pieces.all.len()
    }
}

/// The names that transformers gives to the pieces of the file's trainer.
fn named(proto: &ModelProto, pieces: &PieceTable) -> Vec<(&'static str, String)> {
    let trainer = &proto.trainer;
    let controls = [("bos_token", &trainer.bos_piece), ("eos_token", &trainer.eos_piece)];
    let is_control = |name: &str| pieces.with_kind(PieceKind::Control).any(|(_, piece)| piece == name);
    let there = controls.into_iter().filter(|(_, piece)| is_control(piece));
    let unknown = pieces.with_kind(PieceKind::Unknown).map(|(_, piece)| ("unk_token", piece.to_owned()));
    there.map(|(name, piece)| (name, piece.clone())).chain(unknown).collect()
}

fn normalizer_of(
    proto: &ModelProto,
    pieces: &PieceTable,
    spacing: Spacing,
) -> Result<SpaceNormalizer, SentencePieceError> {
    let spec = &proto.normalizer;
    let bytes = &spec.precompiled_charsmap;
    let broken = || SentencePieceError::Charsmap { bytes: bytes.len() };
    let charsmap = (!bytes.is_empty()).then(|| Charsmap::parse(bytes).ok_or_else(broken)).transpose()?;
    let dummy_prefix = match (spec.add_dummy_prefix && spacing.add_prefix_space, spacing.legacy) {
        (false, _) => DummyPrefix::Never,
        (true, true) => DummyPrefix::Each,
        (true, false) => DummyPrefix::Start,
    };
    Ok(SpaceNormalizer {
        charsmap,
        user_defined: pieces.user_defined.clone(),
        dummy_prefix,
        remove_extra_whitespaces: spec.remove_extra_whitespaces,
        escape_whitespaces: spec.escape_whitespaces,
        treat_whitespace_as_suffix: proto.trainer.treat_whitespace_as_suffix,
    })
}

/// The space that was added is taken away again.
fn decoder_of(normalizer: &SpaceNormalizer) -> Value {
    let added = match (normalizer.dummy_prefix, normalizer.treat_whitespace_as_suffix) {
        (DummyPrefix::Never, _) => "(?!)",
        (_, false) => r"\A ",
        (_, true) => r" \z",
    };
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Replace", "pattern": {"Regex": added}, "content": ""},
    ]})
}
