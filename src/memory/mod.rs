//! The bytes that weights, caches, activations and trained tensors take, by a backbone's block and the format of its weights. Plans of training,
//! of batches and of a GPU count with them. Pure arithmetic: nothing is loaded or allocated here.

pub mod heap;
pub mod layer;
pub mod plan;
pub mod size;
pub mod stages;
pub mod weights;
pub mod widths;

/// Bytes of a float32.
pub const F32: u64 = 4;
