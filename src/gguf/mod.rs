//! GGUF, the files of llama.cpp: a backbone in one file, its weights in blocks of a few bits, its config and tokenizer among the metadata. Read
//! here are the header and the blocks; [`folder`] lets such a file stand where a Hugging Face folder does.
//!
//! Why no crate: those that were found (2026-11: `gguf` 0.1, `gguf-rs` 0.1, `ggus` 0.5, `gguf-rs-lib` 0.3) trust the lengths that a file claims,
//! or do not dequantise all types that are in use; `candle-core` 0.11, which does, reads whole tensors into its own and brings a second tensor
//! library.

pub mod codes;
mod config;
pub mod file;
pub mod folder;
pub mod header;
pub mod metadata;
pub mod names;
mod quantize;
pub mod types;
pub mod vocabulary;
pub mod write;
