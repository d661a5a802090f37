//! Hydra heads as a drafter (arXiv 2402.05109): each head reads the tokens that the heads before it guessed, so trees are filled level by
//! level, with one batched product a level.

pub mod levels;
pub mod prefix;
