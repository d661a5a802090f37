//! The hidden states of a micro batch, and the row in them of each position.

// B rows, T tokens of a row, N = B·T positions, M of them kept, H hidden
use std::borrow::Cow;

use tch::Tensor;

use crate::data::loader::Batch;
use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;

/// Hidden states of one micro batch.
#[derive(Debug)]
pub struct BatchStates {
    /// `[N, H]`, or `[M, H]` if only some positions are kept; in the backbone's dtype, on its device, without autograd.
    pub hidden_nh: Tensor,
    /// For each of the N positions its row in `hidden_nh` (-1: not kept); `None` if all are kept.
    row_of: Option<Vec<i64>>,
}

impl BatchStates {
    /// Runs the backbone over a batch.
    pub fn computed(backbone: &Llama, batch: &Batch) -> Self {
        Self::all(hidden_states(backbone, &inputs(backbone, batch), Adapters::Off))
    }

    /// Hidden states of every position, `[N, H]`.
    pub fn all(hidden_nh: Tensor) -> Self {
        Self { hidden_nh, row_of: None }
    }

    /// Hidden states `[M, H]` of the positions `positions_m`, in this order, out of `n`.
    pub(super) fn of_positions(hidden_mh: Tensor, positions_m: &[i64], n: usize) -> Self {
        let mut row_of = vec![-1; n];
        for (row, &position) in positions_m.iter().enumerate() {
            row_of[position as usize] = row as i64;
        }
        Self { hidden_nh: hidden_mh, row_of: Some(row_of) }
    }

    /// The same states, with a row for each of the N positions: zeros where none are kept.
    #[must_use]
    pub fn of_every_position(self) -> Self {
        let Some(row_of) = &self.row_of else { return self };
        let kept: Vec<i64> = (0..).zip(row_of).filter(|(_, row)| **row >= 0).map(|(position, _)| position).collect();
        let (device, h) = (self.hidden_nh.device(), self.hidden_nh.size()[1]);
        let zeros_nh = Tensor::zeros([row_of.len() as i64, h], (self.hidden_nh.kind(), device));
        Self::all(zeros_nh.index_copy(0, &Tensor::from_slice(&kept).to_device(device), &self.hidden_nh))
    }

    /// Rows in `hidden_nh` of flat positions of the batch that are kept.
    pub fn rows_of<'p>(&self, positions: &'p [i64]) -> Cow<'p, [i64]> {
        match &self.row_of {
            None => positions.into(),
            Some(row_of) => positions.iter().map(|&at| row_of[at as usize]).collect(),
        }
    }
}

/// Tokens `[B, T]` on the backbone's device, and their attention mask.
pub fn inputs(backbone: &Llama, batch: &Batch) -> (Tensor, RowMask) {
    let (b, t, device) = (batch.rows as i64, batch.length as i64, backbone.device());
    let tokens_bt = Tensor::from_slice(&batch.input_ids).view([b, t]).to_device(device);
    (tokens_bt, RowMask::packed(&batch.segment_lengths, t, &backbone.config, device))
}

/// `[N, H]`, rows flattened; no gradient reaches the backbone.
pub fn hidden_states(backbone: &Llama, (tokens_bt, rows): &(Tensor, RowMask), adapters: Adapters) -> Tensor {
    tch::no_grad(|| backbone.hidden_states(tokens_bt, rows, adapters)).view([-1, backbone.config.hidden_size])
}
