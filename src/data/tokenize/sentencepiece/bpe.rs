//! Byte-pair encoding by score: of all neighbours that join to a piece, those of the best score are joined first, of
//! equal ones the leftmost. sentencepiece's BPE; with the rank of a token as its (negative) score it is tiktoken's.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use super::pieces::PieceTable;

/// A part of the text, in a linked list.
struct Symbol {
    bytes: Range<usize>,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined piece: never joined.
    frozen: bool,
}

/// Two neighbours that join to a piece.
#[derive(PartialEq)]
struct Join {
    score: f32,
    left: usize,
    right: usize,
    /// Of the joined text in bytes; when it no longer fits, one of the two has been joined otherwise.
    length: usize,
}

/// How pieces that must not be used were joined.
type Unjoined<'t> = HashMap<&'t str, (&'t str, &'t str)>;

struct Merging<'t> {
    pieces: &'t PieceTable,
    text: &'t str,
    symbols: Vec<Symbol>,
    joins: BinaryHeap<Join>,
    unjoined: Unjoined<'t>,
}

/// The pieces of a text, and where they are in it; `None` for a character without a piece.
pub(super) fn encode(pieces: &PieceTable, text: &str) -> Vec<(Option<u32>, Range<usize>)> {
    let mut merging = Merging { pieces, text, symbols: Vec::new(), joins: BinaryHeap::new(), unjoined: HashMap::new() };
    merging.split();
    for right in 1..merging.symbols.len() {
        merging.propose(right - 1, right);
    }
    while let Some(join) = merging.joins.pop() {
        merging.apply(&join);
    }
    merging.finish()
}

impl Ord for Join {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Join {}

impl<'t> Merging<'t> {
    /// Characters, and user-defined pieces as a whole.
    fn split(&mut self) {
        let mut start = 0;
        while let Some(first) = self.text[start..].chars().next() {
            let defined = self.pieces.user_defined.longest(&self.text[start..]);
            let end = start + defined.unwrap_or(first.len_utf8());
            let at = self.symbols.len();
            let next = (end < self.text.len()).then_some(at + 1);
            self.symbols.push(Symbol {
                bytes: start..end,
                previous: at.checked_sub(1),
                next,
                frozen: defined.is_some(),
            });
            start = end;
        }
    }

    fn propose(&mut self, left: usize, right: usize) {
        let (a, b) = (&self.symbols[left], &self.symbols[right]);
        if a.frozen || b.frozen {
            return;
        }
        let joined = &self.text[a.bytes.start..b.bytes.end];
        let Some(id) = self.pieces.text_id(joined) else { return };
        if self.pieces.is_unused(id) {
            self.unjoined.insert(joined, (&self.text[a.bytes.clone()], &self.text[b.bytes.clone()]));
        }
        self.joins.push(Join { score: self.pieces.score(id), left, right, length: joined.len() });
    }

    fn apply(&mut self, join: &Join) {
        let (left, right) = (self.symbols[join.left].bytes.clone(), self.symbols[join.right].bytes.clone());
        if left.is_empty() || right.is_empty() || left.len() + right.len() != join.length {
            return;
        }
        let next = self.symbols[join.right].next;
        self.symbols[join.right].bytes = right.end..right.end;
        self.symbols[join.left].bytes = left.start..right.end;
        self.symbols[join.left].next = next;
        if let Some(previous) = self.symbols[join.left].previous {
            self.propose(previous, join.left);
        }
        if let Some(next) = next {
            self.symbols[next].previous = Some(join.left);
            self.propose(join.left, next);
        }
    }

    fn finish(self) -> Vec<(Option<u32>, Range<usize>)> {
        let mut found = Vec::new();
        let mut at = (!self.symbols.is_empty()).then_some(0);
        while let Some(symbol) = at.map(|at| &self.symbols[at]) {
            self.resegment(symbol.bytes.clone(), &mut found);
            at = symbol.next;
        }
        found
    }

    /// A piece that must not be used falls apart into those that it was joined from.
    fn resegment(&self, bytes: Range<usize>, found: &mut Vec<(Option<u32>, Range<usize>)>) {
        let text = &self.text[bytes.clone()];
        let id = self.pieces.named(text);
        let parts = id.filter(|id| self.pieces.is_unused(*id)).and_then(|_| self.unjoined.get(text));
        let Some((left, _)) = parts else { return found.push((id, bytes)) };
        let middle = bytes.start + left.len();
        self.resegment(bytes.start..middle, found);
        self.resegment(middle..bytes.end, found);
    }
}
