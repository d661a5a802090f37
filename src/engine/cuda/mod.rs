//! The decoding step as kernels on an NVIDIA GPU.
//!
//! Everything that a step needs is in buffers that never move, except for the cache, which may grow between texts. What changes
//! from step to step is read on the device from [`state`](state::Slot), so a step can be captured once in a CUDA graph and
//! replayed. Each kernel has an oracle of the same name in [`oracle`], on tensors on any device. A test compares the two without
//! a GPU.
//!
//! | | kernels, in the order of a step |
//! | --- | --- |
//! | each layer | `linear` (norm, queries, keys, values), `attention`, `linear` (adds the output), `linear` (norm, gated), `linear` (adds the output) |
//! | before and after the layers | `embed`; `rms_norm` and `linear` (the LM head) |
//! | acceptance | greedy: `best`, `walk`; typical: `best`, `posterior`, `typical`; rejection: `draw`, `walk` |
//! | commit | `compact`, then `advance` |
//! | the next tree, Medusa heads | `res_block`, `linear` (the heads' logits), `top_guesses`, `fill_tree` |
//! | the next tree, Hydra heads | `fill_tree` (the root), `embed` and `linear` (the hidden state) |
//! | each level of it | `embed_nodes`, `linear`, `first_block`, `linear` and `residual` (later ResBlocks), `linear` (logits), `top_guesses`, `fill_level` |

pub mod buffers;
pub mod compare;
pub mod draft;
pub mod engine;
pub mod error;
pub mod launches;
pub mod layer_products;
pub mod layout;
pub mod levels;
pub mod memory;
pub mod next_tree;
pub mod ops;
pub mod oracle;
pub mod plan;
pub mod rule;
pub mod scratch;
pub mod sequential;
pub mod shape;
pub mod state;
pub mod step;
pub mod target;
