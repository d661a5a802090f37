//! What decoding with a tree would do on a text that is already known: the steps it would take. No tensors here.

use super::tree::SparseTree;

/// One text, token by token. Entry s belongs to a step whose root is token s: the guesses that are right there, as 0-based ranks of
/// heads 1, 2, … up to the first head that misses it or would look behind the text's end.
pub type Run = Vec<Vec<usize>>;

/// Steps that decoding would take, and the tokens they would commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    /// Tokens of the texts.
    pub tokens: usize,
    /// Steps to get them all.
    pub steps: usize,
}

impl Replay {
    /// Mean tokens that a step commits. 0 where there was no text.
    pub fn tokens_per_step(&self) -> f64 {
        if self.steps == 0 { 0.0 } else { self.tokens as f64 / self.steps as f64 }
    }
}
