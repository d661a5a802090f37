//! How conversations are made.

use std::num::NonZeroUsize;

/// How conversations are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Of one answer.
    pub max_new_tokens: NonZeroUsize,
    /// Answers of a conversation at most.
    pub turns: NonZeroUsize,
    /// The backbone writes the user's turns behind the first one, too.
    pub self_talk: bool,
    /// Of what is drawn.
    pub seed: u64,
    /// The backbone's `max_position_embeddings`.
    pub context: usize,
}
