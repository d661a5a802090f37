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
//! Imports point down only, and modules on the same layer do not import each other (checked by `tests/layering.rs`):
//!
//! ```text
//! L14 cli bin           one file per subcommand
//! L13 bench  recipe  report  decoding under load; recipes, the only TOML read here; a run's HTML page
//! L12 serve  session    an OpenAI-compatible server; from paths and names to a loaded model that decodes
//! L11 calibrate latency distill export hub  measuring, distilling, exporting; a client of the Hugging Face Hub
//! L10 train             the training loop, whose evaluations decode
//! L9  decode            the decoding loops
//! L8  draft             drafters: heads, draft models, those without training
//! L7  engine            runs the backbone on new tokens
//! L6  memory            bytes that a backbone takes, by block and stored format
//! L5  tree data model   trees of guesses; text to labelled token rows; the backbone, independent of Medusa
//! L4  fused             operations on tensors that are one kernel on a GPU
//! L3  cpu nvidia        decoding kernels for the CPU; NVIDIA's driver and libraries, and kernels
//! L2  torch             devices, optimizers, everything that uses libtorch's handles
//! L1  formats gguf http files that pass between commands; the files of llama.cpp; HTTP clients
//! L0  bounds files json key_use numbers dtype panics plural  bounds of input; atomic files; JSON; keys of others' files; range-checked numbers; dtypes; panics; "1 row", "2 rows"
//! ```
//!
//! # Unsafe code
//!
//! `unsafe` is allowed in five places (checked by `tests/layering.rs`), and each block states its reason: `torch` (libtorch's handles
//! and memory), `cpu` (vector instructions, and threads that share a job), `nvidia` (NVIDIA's libraries), the mapped files of
//! `model/weights.rs` and `model/weights/`, and the bytes of `model/kv_cache.rs` (memory that libtorch's views share).
//!
//! # Shape letters
//!
//! `B` rows, `T` tokens of a row, `S` cached tokens, `N` rows of a product (tokens of all rows, flattened), `H` hidden size,
//! `V` vocabulary, `W` a token's states (the hidden state after the final norm, then its taps), `K` Medusa heads, `Q` query heads,
//! `G` key/value heads, `D` head size.
//! A tensor's name ends in its axes: `hidden_bth` is `[B, T, H]`.

#[cfg(not(unix))]
compile_error!("medusa-train runs on Linux and macOS; on Windows, build it in WSL");

pub mod bench;
pub mod bounds;
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
pub mod fused;
pub mod gguf;
pub mod http;
pub mod hub;
pub mod json;
pub mod key_use;
pub mod latency;
pub mod memory;
pub mod model;
pub mod numbers;
pub mod nvidia;
pub mod panics;
pub mod plural;
pub mod recipe;
pub mod report;
pub mod serve;
pub mod session;
pub mod torch;
pub mod train;
pub mod tree;
