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
//! L10 cli bin           one file a verb
//! L9  recipe  report    the only TOML reader; a run as one page
//! L8  calibrate latency distill export hub  what is made from a trained run; the Hugging Face Hub
//! L7  train   decode    the two loops
//! L6  draft             who guesses: Medusa heads, prompt lookup
//! L5  engine            who computes: the backbone over new tokens
//! L4  tree data model   the tree of guesses; text to labelled token rows; a backbone, which has never heard of Medusa
//! L3  cpu nvidia        kernels of a step on the CPU; NVIDIA's driver and libraries
//! L2  torch             devices, optimizers: all that knows libtorch's handles
//! L1  formats           files that pass between commands
//! L0  files numbers dtype   atomic files; numbers that cannot be bad; dtypes
//! ```
//!
//! # Danger
//!
//! `unsafe` is allowed in five places, each block with its reason (`tests/layering.rs` checks it): `torch` (libtorch's handles and memory),
//! `cpu` (vector instructions and threads that share a job), `nvidia` (NVIDIA's libraries), the mapped files of `model/weights.rs` and
//! `model/weights/`, and the bytes of `model/kv_cache.rs` (memory that libtorch's views share).
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
pub mod draft;
pub mod dtype;
pub mod engine;
pub mod export;
pub mod files;
pub mod formats;
pub mod hub;
pub mod latency;
pub mod model;
pub mod numbers;
pub mod nvidia;
pub mod recipe;
pub mod report;
pub mod torch;
pub mod train;
pub mod tree;
