//! `data.long_rows`: what becomes of rows of more than `max_length` tokens.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::rows::{IGNORE, TokenRow};

/// `data.long_rows` in a recipe and `--long-rows`: rows of more than `max_length` tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LongRows {
    /// Become several rows: conversations between two exchanges where possible, other rows wherever they are full.
    #[default]
    Split,
    /// Lose the tokens beyond `max_length`.
    Truncate,
    /// Are left out.
    Drop,
}

/// How rows are made to fit.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowFit {
    pub(super) max_length: usize,
    pub(super) long_rows: LongRows,
    /// The tokenizer's.
    pub(super) bos: Option<i32>,
}

/// What is kept of a row, or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowPiece {
    pub(super) row: TokenRow,
    /// So many tokens at its beginning repeat the row's BOS.
    pub(super) lead: usize,
}

impl From<TokenRow> for RowPiece {
    fn from(row: TokenRow) -> Self {
        Self { row, lead: 0 }
    }
}

impl RowFit {
    pub(super) fn is_too_long(&self, row: &TokenRow) -> bool {
        row.input_ids.len() > self.max_length
    }

    /// What is kept of a row: the row, its pieces, its beginning, or nothing.
    pub(super) fn of(&self, row: TokenRow) -> Vec<RowPiece> {
        match self.long_rows {
            _ if !self.is_too_long(&row) => vec![row.into()],
            LongRows::Split => pieces(&row, self.max_length, self.bos),
            LongRows::Truncate => vec![row.truncated(self.max_length).into()],
            LongRows::Drop => vec![],
        }
    }
}

/// The pieces of a row, in order, each of up to `max_length` tokens. Where the row begins with BOS, every piece does: the backbone
/// has seen no text without it. What is in no piece is a last token that would have nothing before it.
fn pieces(row: &TokenRow, max_length: usize, bos: Option<i32>) -> Vec<RowPiece> {
    let bos = bos.filter(|bos| row.input_ids.first() == Some(bos) && max_length > 2);
    let piece = |place: Range<usize>| {
        let lead = bos.filter(|_| place.start > 0);
        let row = TokenRow {
            input_ids: lead.into_iter().chain(row.input_ids[place.clone()].iter().copied()).collect(),
            labels: lead.map(|_| IGNORE).into_iter().chain(row.labels[place].iter().copied()).collect(),
        };
        RowPiece { row, lead: usize::from(lead.is_some()) }
    };
    places(&row.labels, max_length, usize::from(bos.is_some())).into_iter().map(piece).collect()
}

/// Where the pieces stand; each but the first leaves room for `lead` tokens.
fn places(labels: &[i32], max_length: usize, lead: usize) -> Vec<Range<usize>> {
    let (mut places, mut start) = (Vec::new(), 0);
    while labels.len() - start > 1 {
        let room = if start == 0 { max_length } else { max_length - lead };
        let length = if labels.len() - start <= room { labels.len() - start } else { cut(&labels[start..], room) };
        places.push(start..start + length);
        start += length;
    }
    places
}

/// How long the next piece is: it ends behind the last answer that fits, so that the next one begins with a question. An exchange that
/// is too long alone, and what has no questions, is cut where the piece is full.
fn cut(labels: &[i32], room: usize) -> usize {
    let ends_answer = |at: &usize| labels[at - 1] != IGNORE && labels[*at] == IGNORE;
    (2..=room).rev().find(ends_answer).unwrap_or(room)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const X: i32 = IGNORE;

    fn row(labels: &[i32]) -> TokenRow {
        let input_ids = (0..labels.len() as i32).map(|at| if at == 0 { 1 } else { 10 + at }).collect::<Vec<_>>();
        let labels = input_ids.iter().zip(labels).map(|(&id, &label)| if label == X { X } else { id }).collect();
        TokenRow { input_ids, labels }
    }

    #[test]
    fn a_text_is_cut_where_a_piece_is_full_and_each_piece_begins_with_bos() {
        let text = row(&[0; 10]);
        let ids = |bos| pieces(&text, 4, bos).into_iter().map(|piece| piece.row.input_ids).collect::<Vec<_>>();
        assert_eq!(ids(Some(1)), [vec![1, 11, 12, 13], vec![1, 14, 15, 16], vec![1, 17, 18, 19]]);
        assert_eq!(ids(Some(7)), [vec![1, 11, 12, 13], vec![14, 15, 16, 17], vec![18, 19]], "it begins with no BOS");
        assert_eq!(pieces(&text, 4, Some(1))[1].row.labels, [X, 14, 15, 16]);
    }

    #[test]
    fn a_conversation_is_cut_between_exchanges() {
        let talk = row(&[X, X, 0, 0, X, 0, X, X, X, 0, 0, 0, 0, X, 0]);
        let places = places(&talk.labels, 8, 1);
        assert_eq!(places, [0..6, 6..13, 13..15]);
        let long = row(&[X, 0, X, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(super::places(&long.labels, 6, 1), [0..2, 2..7, 7..10], "an exchange that is too long alone");
    }

    proptest! {
        #[test]
        fn no_token_is_lost_or_there_twice(
            labels in prop::collection::vec(any::<bool>(), 2..80), max_length in 3_usize..20, has_bos: bool,
        ) {
            let labels: Vec<i32> = labels.into_iter().map(|learned| if learned { 0 } else { X }).collect();
            let row = row(&labels);
            let bos = has_bos.then_some(1);
            let (mut ids, mut learned) = (vec![], vec![]);
            for (at, RowPiece { row: piece, lead: repeated }) in pieces(&row, max_length, bos).into_iter().enumerate() {
                prop_assert!((2..=max_length).contains(&piece.input_ids.len()));
                let lead = usize::from(has_bos && at > 0);
                prop_assert_eq!(lead, repeated);
                prop_assert!(lead == 0 || (piece.input_ids[0], piece.labels[0]) == (1, X));
                ids.extend_from_slice(&piece.input_ids[lead..]);
                learned.extend_from_slice(&piece.labels[lead..]);
            }
            prop_assert!(row.input_ids.len() - ids.len() <= 1);
            prop_assert!(row.input_ids.starts_with(&ids) && row.labels.starts_with(&learned));
        }
    }
}
