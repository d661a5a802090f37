//! The decoding loops: plain (the oracle) and Medusa, one text at a time, and plain decoding of several prompts together; on any
//! device of libtorch.
//!
//! One step of Medusa decoding ([`session`]): `propose` fills the tree with the heads' guesses, the backbone verifies all of it in
//! one pass, `accept` decides which path is kept, and the cache keeps just that path. Decisions belong to tree nodes, never to whole
//! candidates, and are made without tensors. Above temperature 0, `sample` draws one number a token in the order of the text.

pub mod batch;
pub mod device;
pub mod generate;
pub mod likelihood;
pub mod loops;
pub mod medusa;
pub mod penalty;
pub mod propose;
pub mod request;
pub mod session;
pub mod stats;
pub mod text;
pub(crate) mod transcript;
