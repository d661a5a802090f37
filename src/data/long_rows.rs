//! `data.long_rows`: what becomes of rows of more than `max_length` tokens.

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

    /// Whether a row becomes several.
    pub(super) fn is_split(&self, row: &TokenRow) -> bool {
        self.long_rows == LongRows::Split && self.is_too_long(row)
    }

    /// What is kept of a row: the row, its pieces, its beginning, or nothing. `exchanges` are the tokens with which exchanges begin, where
    /// they are known.
    pub(super) fn of(&self, row: TokenRow, exchanges: &[usize]) -> Vec<RowPiece> {
        match self.long_rows {
            _ if !self.is_too_long(&row) => vec![row.into()],
            LongRows::Split => self.pieces(&row, exchanges),
            LongRows::Truncate => vec![row.truncated(self.max_length).into()],
            LongRows::Drop => vec![],
        }
    }

    /// The pieces of a row, in order, each of up to `max_length` tokens. What is in no piece is a last token that would stand alone.
    fn pieces(&self, row: &TokenRow, exchanges: &[usize]) -> Vec<RowPiece> {
        let (mut pieces, mut start, end) = (Vec::new(), 0, row.input_ids.len());
        while start < end {
            let lead = self.lead(row, start);
            let (room, left) = (self.max_length - usize::from(lead.is_some()), end - start);
            let length = if left <= room { left } else { cut(&row.labels, exchanges, start, room) };
            let place = start..start + length;
            let row = TokenRow {
                input_ids: lead.into_iter().chain(row.input_ids[place.clone()].iter().copied()).collect(),
                labels: lead.map(|_| IGNORE).into_iter().chain(row.labels[place].iter().copied()).collect(),
            };
            pieces.push(RowPiece { row, lead: usize::from(lead.is_some()) });
            start += length;
        }
        pieces.retain(|piece| piece.row.input_ids.len() > 1);
        pieces
    }

    /// The BOS before the piece that begins at `start`. Where a row begins with BOS, every piece does: the backbone has seen no text
    /// without it.
    fn lead(&self, row: &TokenRow, start: usize) -> Option<i32> {
        let begins_with = |at: usize, bos: i32| row.input_ids[at] == bos;
        self.bos.filter(|&bos| start > 0 && self.max_length > 2 && begins_with(0, bos) && !begins_with(start, bos))
    }
}

/// How long the piece from `start` is: it ends before the last exchange that begins within it. Where none does it ends behind the last
/// tokens with loss (an answer, or a call of a tool), or where it is full.
fn cut(labels: &[i32], exchanges: &[usize], start: usize, room: usize) -> usize {
    let exchange = exchanges.iter().rev().find(|at| (start + 2..=start + room).contains(at));
    let ends_answer = |length: &usize| labels[start + length - 1] != IGNORE && labels[start + length] == IGNORE;
    let answer = || (2..=room).rev().find(ends_answer);
    exchange.map(|at| at - start).or_else(answer).unwrap_or(room)
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

    fn fit(max_length: usize, bos: Option<i32>) -> RowFit {
        RowFit { max_length, long_rows: LongRows::Split, bos }
    }

    #[test]
    fn a_text_is_cut_where_a_piece_is_full_and_each_piece_begins_with_bos() {
        let text = row(&[0; 10]);
        let ids = |bos| fit(4, bos).pieces(&text, &[]).into_iter().map(|piece| piece.row.input_ids).collect::<Vec<_>>();
        assert_eq!(ids(Some(1)), [vec![1, 11, 12, 13], vec![1, 14, 15, 16], vec![1, 17, 18, 19]]);
        assert_eq!(ids(Some(7)), [vec![1, 11, 12, 13], vec![14, 15, 16, 17], vec![18, 19]], "it begins with no BOS");
        assert_eq!(fit(4, Some(1)).pieces(&text, &[])[1].row.labels, [X, 14, 15, 16]);
    }

    /// Lengths of the pieces, without repeated BOS.
    fn lengths(labels: &[i32], exchanges: &[usize], max_length: usize) -> Vec<usize> {
        let pieces = fit(max_length, Some(1)).pieces(&row(labels), exchanges);
        pieces.iter().map(|piece| piece.row.input_ids.len() - piece.lead).collect()
    }

    #[test]
    fn a_conversation_is_cut_between_exchanges() {
        let labels = [X, X, 0, 0, X, 0, X, X, X, 0, 0, 0, 0, X, 0];
        assert_eq!(lengths(&labels, &[], 8), [6, 7, 2], "behind answers, where exchanges are not known");
        assert_eq!(lengths(&[0; 15], &[3, 7, 12], 8), [7, 5, 3], "every token carries loss");
        let with_calls = [X, 0, 0, X, X, 0, 0, X, X, 0, 0, X, X, 0];
        assert_eq!(lengths(&with_calls, &[8], 12), [8, 6], "not between a call and its result");
        let long = [X, 0, X, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(lengths(&long, &[2], 6), [2, 5, 3], "an exchange that is too long alone");
    }

    #[test]
    fn a_template_that_writes_bos_before_every_exchange_gets_no_second_one() {
        let row = TokenRow { input_ids: vec![1, 5, 6, 1, 7, 8], labels: vec![X, X, 6, X, X, 8] };
        let pieces = fit(4, Some(1)).pieces(&row, &[3]);
        let ids: Vec<_> = pieces.iter().map(|piece| (piece.row.input_ids.clone(), piece.lead)).collect();
        assert_eq!(ids, [(vec![1, 5, 6], 0), (vec![1, 7, 8], 0)]);
    }

    proptest! {
        #[test]
        fn no_token_is_lost_or_there_twice(
            labels in prop::collection::vec(any::<bool>(), 2..80), max_length in 3_usize..20, has_bos: bool,
            exchanges in prop::collection::btree_set(1_usize..80, 0..8),
        ) {
            let labels: Vec<i32> = labels.into_iter().map(|learned| if learned { 0 } else { X }).collect();
            let exchanges: Vec<usize> = exchanges.into_iter().filter(|at| *at < labels.len()).collect();
            let row = row(&labels);
            let (mut ids, mut learned) = (vec![], vec![]);
            let pieces = fit(max_length, has_bos.then_some(1)).pieces(&row, &exchanges);
            for (at, RowPiece { row: piece, lead: repeated }) in pieces.into_iter().enumerate() {
                prop_assert!((2..=max_length).contains(&piece.input_ids.len()));
                let lead = usize::from(has_bos && at > 0);
                prop_assert_eq!(lead, repeated);
                prop_assert!(lead == 0 || (piece.input_ids[0], piece.labels[0]) == (1, X));
                ids.extend_from_slice(&piece.input_ids[lead..]);
                learned.extend_from_slice(&piece.labels[lead..]);
            }
            let lost = row.input_ids.len() - ids.len();
            prop_assert!(lost == 0 || lost == 1 && !has_bos, "with BOS a last token is a row of two");
            prop_assert!(row.input_ids.starts_with(&ids) && row.labels.starts_with(&learned));
        }
    }
}
