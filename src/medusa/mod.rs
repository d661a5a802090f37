//! The method, one idea a file (arXiv 2401.10774). What is about trees has no tensors.

pub mod fused_loss;
pub mod heads;
pub mod loss;
pub mod path_counts;
pub mod replay;
pub mod tree;
pub mod tree_file;
pub mod tree_search;
pub mod tree_svg;
