//! How Medusa heads guess (arXiv 2401.10774): each of them from the hidden state alone.

pub mod drafter;
pub mod levels;
