//! The method, one idea a file (arXiv 2401.10774). `tree` and `tree_search` have no tensors.

pub mod fused_loss;
pub mod heads;
pub mod loss;
pub mod replay;
pub mod tree;
pub mod tree_search;
