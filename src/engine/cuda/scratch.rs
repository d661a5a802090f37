//! Memory that kernels pass to each other within one operation.

use tch::{Device, Tensor};

use super::launches::{self, AttentionParts};
use super::shape::Shape;

/// Buffers between kernels of one operation.
#[derive(Debug)]
pub struct Scratch {
    /// Of attention, for each number of rows.
    parts: Vec<(i64, AttentionParts)>,
    /// Of the heads' guesses.
    guess_parts: Option<Tensor>,
}

impl Scratch {
    /// For all steps of `shape`.
    pub fn new(shape: &Shape, device: Device) -> Self {
        let config = shape.config;
        let queries = |rows| [rows, config.num_attention_heads, config.head_dim];
        let parts = |rows| (rows, AttentionParts::new(queries(rows), config.num_key_value_heads, device));
        let guess_parts = shape.draft.map(|draft| {
            let size = [draft.tree.max_depth() as i64, config.vocab_size];
            launches::guess_parts(size, shape.guesses() as i64, device)
        });
        Self { parts: shape.rows_of_steps().into_iter().map(parts).collect(), guess_parts }
    }

    /// Where attention of so many rows keeps its parts.
    pub fn parts(&self, rows: i64) -> &AttentionParts {
        let parts = self.parts.iter().find(|(of, _)| *of == rows);
        &parts.expect("a step has one of the shape's numbers of rows").1
    }

    /// Where the heads' guesses are found slice by slice.
    pub fn guess_parts(&self) -> &Tensor {
        self.guess_parts.as_ref().expect("heads guess")
    }
}
