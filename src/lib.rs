//! Medusa heads for Llama-family backbones: train them, measure them, search their tree, decode with them
//! (arXiv 2401.10774).
//!
//! # The life of a run
//!
//! ```text
//! recipe.toml ─ recipe ─► data rows ─► backbone (frozen) ─► hidden states ─► heads ─► losses ─► AdamW ─► final/
//!                                                                                                          │
//!            calibration.json ◄─ calibrate ◄───────────────────────────────────────────────────────────────┤
//!                   └─► tree search ─► tree.json ─► decode: propose ─ verify in one pass ─ accept ─ commit ◄┘
//! ```
//!
//! # Layers
//!
//! Imports point down only, siblings do not import each other (`tests/layering.rs` checks it):
//!
//! ```text
//! L6 cli, bin          one file a verb
//! L5 recipe  report    the only TOML reader; a run as one page
//! L4 calibrate latency distill export hub  what is made from a trained run; what a backbone says, as rows; the Hugging Face Hub
//! L3 train   decode    the two loops
//! L2 medusa  data      the method; text to labelled token rows
//! L1 model             a Llama backbone, which has never heard of Medusa
//! L0 torch cpu files numbers   devices, optimizers; kernels of a step on the CPU; atomic files; numbers that cannot be bad
//! ```
//!
//! # Danger
//!
//! `unsafe` stands in four places, each block with its reason: `torch` (libtorch's handles and memory), `cpu` (vector instructions and
//! threads that share a job), `decode/cuda` (NVIDIA's libraries), and the mapped files of `model/weights.rs` (`tests/layering.rs` checks
//! it).
//!
//! # Shape letters
//!
//! `B` rows, `T` tokens of a row, `S` cached tokens, `N` rows of a product (any tokens, flattened), `H` hidden size,
//! `V` vocabulary, `K` Medusa heads, `Q` query heads, `G` key/value heads, `D` head size.
//! A tensor's name ends in its axes: `hidden_bth` is `[B, T, H]`.

pub mod calibrate;
pub mod cli;
pub mod cpu;
pub mod data;
pub mod decode;
pub mod distill;
pub mod export;
pub mod files;
pub mod hub;
pub mod latency;
pub mod medusa;
pub mod model;
pub mod numbers;
pub mod recipe;
pub mod report;
pub mod torch;
pub mod train;
