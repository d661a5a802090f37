//! Whether the hidden states of a server are what they should be: how often the LM head predicts the next token from them. States of another
//! layer, of another backbone or after the final norm are trained on without an error otherwise.

// M kept positions, H hidden
use tch::Tensor;

use crate::data::loader::Batch;
use crate::draft::medusa::fused_loss::{OutputLayer, head_loss};
use crate::draft::medusa::loss::Targets;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::upload;
use crate::train::hidden_states::{CapturedReader, HiddenStatesError, RowPositions, StatesReader};

/// The LM head on hidden states of a server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NextTokens {
    /// Positions that were looked at.
    pub tokens: usize,
    /// How often the most probable token comes next, from 0 to 1.
    pub accuracy: f64,
    /// Mean cross-entropy of the next token.
    pub cross_entropy: f64,
    /// That of a guess at random: ln V.
    pub at_random: f64,
}

impl NextTokens {
    /// Of the states that the heads read in `batch`; `None` if no token comes after them.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn of(backbone: &Llama, reader: CapturedReader, batch: &Batch) -> Result<Option<Self>, HiddenStatesError> {
        let rows = StatesReader::Captured(reader.clone()).rows(batch);
        let (positions, tokens) = targets(batch, &rows);
        if tokens.is_empty() {
            return Ok(None);
        }
        let hidden_mh = tch::no_grad(|| reader.read(&rows).map(|states| backbone.final_norm(&states.on_device())))?;
        let [positions_m, tokens_m] = [&positions, &tokens].map(|list| upload(list, backbone.device()));
        let targets = Targets { positions_m, tokens_m, previous_mj: None };
        let sums = head_loss(None, OutputLayer::lm_head(backbone, Adapters::Off), &hidden_mh, &targets, None);
        let mean = |sum: &Tensor| sum.double_value(&[0][..sum.dim()]) / tokens.len() as f64;
        let at_random = (backbone.config.vocab_size as f64).ln();
        Ok(Some(Self { tokens: tokens.len(), accuracy: mean(&sums.hits), cross_entropy: mean(&sums.loss), at_random }))
    }

    /// Whether the LM head does worse than a guess at random.
    pub fn is_noise(&self) -> bool {
        self.cross_entropy >= self.at_random
    }
}

/// Which states have a token after them, and the tokens.
fn targets(batch: &Batch, rows: &[RowPositions]) -> (Vec<i64>, Vec<i64>) {
    let mut before = 0;
    let mut found = vec![];
    for ((_, place), RowPositions { positions, .. }) in batch.segments().zip(rows) {
        let next = |position: usize| Some(place.start + position + 1).filter(|next| place.contains(next));
        let states = (before..).zip(positions).filter_map(|(state, &position)| Some((state, next(position)?)));
        found.extend(states.map(|(state, next)| (state, batch.input_ids[next])));
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
        assert_eq!(targets(&batch, &rows), (vec![0, 2], vec![11, 14]));
    }
}
