//! Whether the hidden states of a server are what they should be: how often the LM head predicts the next token from them. States of another
//! layer, of another backbone or after the final norm are trained on without an error otherwise.
//!
//! A layer shortly before the last one cannot be distinguished from the last one if it is alone in its files: it predicts almost as well.

// M kept positions, H hidden
use tch::{Kind, Tensor};

use crate::data::loader::Batch;
use crate::draft::loss::Targets;
use crate::draft::loss::fused::{OutputLayer, level_loss};
use crate::formats::captured_states::CapturedError;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::upload;
use crate::train::hidden_states::{CapturedReader, HiddenStatesError, RowPositions, StatesReader};
use crate::train::token_pairs::{TokenPair, TokenPairs};

/// How far the mean square of each state without the norm's weight may be from 1 after the final norm: that of bfloat16 is rounded.
const NORM_TOLERANCE: f64 = 0.02;
/// Another layer is better than the last one if its cross-entropy is below this part of the last one's.
const CLEARLY_BETTER: f64 = 0.98;

/// The LM head on hidden states of a server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NextTokens {
    /// Positions that were looked at.
    pub tokens: usize,
    /// How often the most probable token comes next, from 0 to 1.
    pub accuracy: f64,
    /// Mean cross-entropy of the next token.
    pub cross_entropy: f64,
    /// That of a guess from the token before, by counts in the training rows.
    pub by_pairs: f64,
    /// Why these are probably not the states that the heads need.
    pub doubt: Option<StatesDoubt>,
}

/// What is probably wrong with hidden states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StatesDoubt {
    /// They are as after the final norm.
    Normalised,
    /// The LM head does no better than a guess from the token before.
    NoContext,
    /// The LM head does better on another layer of the files.
    OtherLayer {
        /// From 1.
        layer: usize,
        layers: usize,
        cross_entropy: f64,
    },
}

/// The states of a batch and the tokens after them.
struct JudgedBatch<'b> {
    backbone: &'b Llama,
    reader: &'b CapturedReader,
    rows: Vec<RowPositions>,
    /// The states with a token after them, and the token.
    positions_m: Tensor,
    tokens_m: Tensor,
    tokens: usize,
}

impl NextTokens {
    /// Of the states that the heads read in `batch`; `None` if no token comes after them. `pairs` are those of the training rows.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn of(
        backbone: &Llama,
        reader: &CapturedReader,
        batch: &Batch,
        pairs: &TokenPairs,
    ) -> Result<Option<Self>, HiddenStatesError> {
        let rows = StatesReader::Captured(reader.clone()).rows(batch);
        let (positions, seen) = targets(batch, &rows);
        if seen.is_empty() {
            return Ok(None);
        }
        let next: Vec<i64> = seen.iter().map(|&(_, next)| next).collect();
        let [positions_m, tokens_m] = [&positions, &next].map(|list| upload(list, backbone.device()));
        let judged = JudgedBatch { backbone, reader, rows, positions_m, tokens_m, tokens: next.len() };
        let last_mh = judged.states(reader.layers() - 1)?;
        let [accuracy, cross_entropy] = judged.predictions(&last_mh);
        let by_pairs = pairs.cross_entropy(&seen);
        let other =
            judged.best_other_layer()?.filter(|&(_, other)| other < CLEARLY_BETTER * cross_entropy.min(by_pairs));
        let doubt = match other {
            _ if judged.are_normalised(&last_mh) => Some(StatesDoubt::Normalised),
            Some((layer, cross_entropy)) => {
                Some(StatesDoubt::OtherLayer { layer: layer + 1, layers: reader.layers(), cross_entropy })
            }
            None => (cross_entropy >= by_pairs).then_some(StatesDoubt::NoContext),
        };
        Ok(Some(Self { tokens: next.len(), accuracy, cross_entropy, by_pairs, doubt }))
    }
}

impl JudgedBatch<'_> {
    /// `[M, H]` of a layer, as they are in the files.
    fn states(&self, layer: usize) -> Result<Tensor, HiddenStatesError> {
        Ok(self.reader.read_layers(&[layer], &self.rows)?.on_device().squeeze_dim(0))
    }

    /// How often the LM head is right, and its mean cross-entropy.
    fn predictions(&self, states_mh: &Tensor) -> [f64; 2] {
        let hidden_mh = tch::no_grad(|| self.backbone.final_norm(states_mh));
        let (positions_m, tokens_m) = (self.positions_m.shallow_clone(), self.tokens_m.shallow_clone());
        let targets = Targets { positions_m, tokens_m, previous_mj: None };
        let sums = level_loss(None, OutputLayer::lm_head(self.backbone, Adapters::Off), &hidden_mh, &targets, None);
        [&sums.hits, &sums.loss].map(|sum| sum.double_value(&[0][..sum.dim()]) / self.tokens as f64)
    }

    /// The layer before the last one with the lowest cross-entropy. A layer with numbers that are not finite is none.
    fn best_other_layer(&self) -> Result<Option<(usize, f64)>, HiddenStatesError> {
        let mut best: Option<(usize, f64)> = None;
        for layer in 0..self.reader.layers() - 1 {
            let states_mh = match self.states(layer) {
                Err(HiddenStatesError::Captured(CapturedError::NotFinite { .. })) => continue,
                states => states?,
            };
            let [_, cross_entropy] = self.predictions(&states_mh);
            if best.is_none_or(|(_, lowest)| cross_entropy < lowest) {
                best = Some((layer, cross_entropy));
            }
        }
        Ok(best)
    }

    /// Whether the final norm was applied to the states: without its weight, their mean square is then 1.
    fn are_normalised(&self, states_mh: &Tensor) -> bool {
        let ones_1h = Tensor::ones([1, states_mh.size()[1]], (states_mh.kind(), states_mh.device()));
        let weight_1h = tch::no_grad(|| self.backbone.final_norm(&ones_1h)).to_kind(Kind::Float);
        let squares_mh = (states_mh.to_kind(Kind::Float) / weight_1h).square();
        let far_m = (squares_mh.mean_dim(-1, false, Kind::Float) - 1.0).abs();
        far_m.max().double_value(&[]) < NORM_TOLERANCE
    }
}

/// Which states have a token after them, and the tokens at and after them.
fn targets(batch: &Batch, rows: &[RowPositions]) -> (Vec<i64>, Vec<TokenPair>) {
    let mut before = 0;
    let mut found = vec![];
    for ((_, place), RowPositions { positions, .. }) in batch.segments().zip(rows) {
        let pair = |position: usize| {
            let at = place.start + position;
            place.contains(&(at + 1)).then(|| (batch.input_ids[at], batch.input_ids[at + 1]))
        };
        let states = (before..).zip(positions).filter_map(|(state, &position)| Some((state, pair(position)?)));
        found.extend(states);
        before += positions.len() as i64;
    }
    found.into_iter().unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_row_has_none_after_it() {
        let batch = Batch {
            row_ids: vec![vec![0, 1]],
            rows: 1,
            length: 5,
            input_ids: vec![10, 11, 12, 13, 14],
            labels: vec![0; 5],
            segment_lengths: vec![vec![2, 3]],
        };
        let rows = [(0, vec![0, 1]), (1, vec![1, 2])].map(|(id, positions)| RowPositions { id, positions });
        assert_eq!(targets(&batch, &rows), (vec![0, 2], vec![(10, 11), (13, 14)]));
    }
}
