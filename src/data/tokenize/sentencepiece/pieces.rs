//! The vocabulary of a SentencePiece model.

use std::collections::HashMap;

use super::error::SentencePieceError as Error;
use super::prefixes::Prefixes;
use super::proto::{PieceKind, PieceProto};

/// The pieces by id and by text.
#[derive(Debug, Clone)]
pub(super) struct PieceTable {
    pub(super) all: Vec<PieceProto>,
    /// What text can become: normal, user-defined and unused pieces.
    by_text: HashMap<String, u32>,
    /// Control pieces, bytes and the unknown piece.
    reserved: HashMap<String, u32>,
    pub(super) unknown: Option<u32>,
    /// The ids of `<0x00>` to `<0xFF>`, with byte fallback.
    pub(super) bytes: Option<Vec<u32>>,
    pub(super) user_defined: Prefixes,
}

impl PieceTable {
    /// Those of a SentencePiece model.
    ///
    /// # Errors
    /// What sentencepiece refuses, too.
    pub(super) fn new(all: Vec<PieceProto>, byte_fallback: bool) -> Result<Self, Error> {
        let mut pieces = Self::indexed(all)?;
        let unknown: Vec<u32> = pieces.with_kind(PieceKind::Unknown).map(|(id, _)| id).collect();
        let &[unknown] = unknown.as_slice() else { return Err(Error::Unknown { got: unknown.len() }) };
        pieces.unknown = Some(unknown);
        pieces.bytes = byte_fallback.then(|| byte_pieces(&pieces.reserved)).transpose()?;
        pieces.user_defined = Prefixes::new(pieces.with_kind(PieceKind::UserDefined).map(|(id, piece)| (piece, id)));
        Ok(pieces)
    }

    /// Tokens whose score is the better the lower their id. Every text has tokens, so none is unknown.
    ///
    /// # Errors
    /// A token that is there twice, or empty.
    pub(super) fn ranked(tokens: Vec<String>) -> Result<Self, Error> {
        let piece = |(rank, text): (usize, String)| PieceProto { text, score: -(rank as f32), kind: PieceKind::Normal };
        Self::indexed(tokens.into_iter().enumerate().map(piece).collect())
    }

    fn indexed(all: Vec<PieceProto>) -> Result<Self, Error> {
        let (mut by_text, mut reserved) = (HashMap::with_capacity(all.len()), HashMap::new());
        for (id, piece) in (0..).zip(&all) {
            if piece.text.is_empty() {
                return Err(Error::EmptyPiece { id });
            }
            let map = if piece.is_of_text() { &mut by_text } else { &mut reserved };
            if let Some(first) = map.insert(piece.text.clone(), id) {
                return Err(Error::Twice { piece: piece.text.clone(), first, second: id });
            }
        }
        Ok(Self { by_text, reserved, unknown: None, bytes: None, user_defined: Prefixes::new([].into_iter()), all })
    }

    /// The piece that this text can become by merging.
    pub(super) fn text_id(&self, text: &str) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// The piece of this name, of whatever kind.
    pub(super) fn named(&self, name: &str) -> Option<u32> {
        self.reserved.get(name).or_else(|| self.by_text.get(name)).copied()
    }

    /// Id and text of the pieces of a kind.
    pub(super) fn with_kind(&self, kind: PieceKind) -> impl Iterator<Item = (u32, &str)> {
        let ids = (0..).zip(&self.all).filter(move |(_, piece)| piece.kind == kind);
        ids.map(|(id, piece)| (id, piece.text.as_str()))
    }

    pub(super) fn score(&self, id: u32) -> f32 {
        self.all[id as usize].score
    }

    pub(super) fn is_unused(&self, id: u32) -> bool {
        self.all[id as usize].kind == PieceKind::Unused
    }
}

impl PieceProto {
    pub(super) fn is_of_text(&self) -> bool {
        matches!(self.kind, PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused)
    }
}

fn byte_pieces(reserved: &HashMap<String, u32>) -> Result<Vec<u32>, Error> {
    let id = |byte: u8| {
        let piece = format!("<0x{byte:02X}>");
        reserved.get(&piece).copied().ok_or(Error::NoByte { piece })
    };
    (0..=u8::MAX).map(id).collect()
}
