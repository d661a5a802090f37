//! Memory that kernels pass to each other within one operation.

use tch::{Device, Tensor};

use super::launches::{self, AttentionParts, SliceRoom};
use super::shape::Shape;
use crate::nvidia::gemm::SplitRoom;

/// Buffers that the kernels of one operation pass to each other.
#[derive(Debug)]
pub struct Scratch {
    /// For attention, by number of rows.
    parts: Vec<(i64, AttentionParts)>,
    /// For the heads' guesses.
    guess_parts: Option<Tensor>,
    splits: SplitRoom,
    slices: SliceRoom,
}

impl Scratch {
    /// Scratch memory for all steps of `shape`.
    pub fn new(shape: &Shape, device: Device) -> Self {
        let config = shape.config;
        let queries = |rows| [rows, config.num_attention_heads, config.head_dim];
        let parts = |rows| (rows, AttentionParts::new(queries(rows), config.num_key_value_heads, device));
        let guess_parts = shape.draft.map(|_| {
            let size = [shape.guessing_rows(), config.vocab_size];
            launches::guess_parts(size, shape.guesses() as i64, device)
        });
        let splits = SplitRoom::new(device);
        let slices = SliceRoom::new(shape.logits(), device);
        Self { parts: shape.rows_of_steps().into_iter().map(parts).collect(), guess_parts, splits, slices }
    }

    /// Scratch memory of attention with `rows` rows.
    pub fn parts(&self, rows: i64) -> &AttentionParts {
        let parts = self.parts.iter().find(|(of, _)| *of == rows);
        &parts.expect("a step has one of the shape's numbers of rows").1
    }

    /// Scratch memory of matrix products whose depth is split.
    pub fn splits(&self) -> &SplitRoom {
        &self.splits
    }

    /// Scratch memory of what chooses among logits.
    pub fn slices(&self) -> &SliceRoom {
        &self.slices
    }

    /// Scratch memory of the heads' guesses.
    pub fn guess_parts(&self) -> &Tensor {
        self.guess_parts.as_ref().expect("heads guess")
    }
}
