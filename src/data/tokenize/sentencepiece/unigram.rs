//! The unigram language model: of all ways to cut a text into pieces, the one of the highest sum of scores (Viterbi).
//! Sums are float32 and compared as sentencepiece 0.2.3 compares them, so that ties fall the same way. (Up to 0.2.1 it
//! compared in float64, and gave user-defined pieces another bonus.)

use std::ops::Range;

use super::pieces::PieceTable;
use super::prefixes::Prefixes;
use super::proto::PieceKind;

/// A character without a piece scores this much below the worst piece.
const UNKNOWN_PENALTY: f32 = 10.0;
/// What a user-defined piece scores for each byte but its first.
const USER_DEFINED_BONUS: f32 = 0.1;

/// What the search needs of the pieces.
#[derive(Debug, Clone)]
pub(super) struct UnigramTable {
    prefixes: Prefixes,
    lowest: f32,
}

/// The best way to cut the text up to a byte.
#[derive(Clone, Copy, Default)]
struct Best {
    score: f32,
    /// The last piece, and where it starts; `None` before a way is found.
    last: Option<(Option<u32>, usize)>,
}

impl UnigramTable {
    pub(super) fn new(pieces: &PieceTable) -> Self {
        let normal = pieces.all.iter().filter(|piece| piece.kind == PieceKind::Normal);
        let text_pieces = (0..).zip(&pieces.all).filter(|(_, piece)| piece.is_of_text());
        Self {
            prefixes: Prefixes::new(text_pieces.map(|(id, piece)| (piece.text.as_str(), id))),
            lowest: normal.map(|piece| piece.score).fold(f32::MAX, f32::min),
        }
    }

    /// The pieces of a text, and where they are in it; `None` for a character without a piece.
    pub(super) fn encode(&self, pieces: &PieceTable, text: &str) -> Vec<(Option<u32>, Range<usize>)> {
        let mut lattice = vec![Best::default(); text.len() + 1];
        for (start, letter) in text.char_indices() {
            let before = lattice[start].score;
            let mut has_letter = false;
            self.prefixes.each(&text.as_bytes()[start..], |length, id| {
                if pieces.is_unused(id) {
                    return;
                }
                has_letter |= length == letter.len_utf8();
                let score = score(pieces, id, length) + before;
                lattice[start + length].improve(score, Some(id), start);
            });
            if !has_letter {
                let score = self.lowest - UNKNOWN_PENALTY + before;
                lattice[start + letter.len_utf8()].improve(score, None, start);
            }
        }
        path(&lattice)
    }
}

/// User-defined pieces are preferred, the longer the more.
fn score(pieces: &PieceTable, id: u32, length: usize) -> f32 {
    let piece = &pieces.all[id as usize];
    match piece.kind {
        PieceKind::UserDefined => USER_DEFINED_BONUS * (length - 1) as f32,
        _ => piece.score,
    }
}

impl Best {
    fn improve(&mut self, score: f32, id: Option<u32>, start: usize) {
        if self.last.is_none() || score > self.score {
            *self = Self { score, last: Some((id, start)) };
        }
    }
}

/// Back from the end.
fn path(lattice: &[Best]) -> Vec<(Option<u32>, Range<usize>)> {
    let (mut found, mut end) = (Vec::new(), lattice.len() - 1);
    while let Some((id, start)) = lattice[end].last {
        found.push((id, start..end));
        end = start;
    }
    found.reverse();
    found
}
