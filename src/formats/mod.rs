//! Files that pass between commands: each has one type, one reader and one writer, here, and every other room imports them.
//! No tensors here.

pub mod bench;
pub mod calibration;
mod error;
pub mod heads_config;
pub mod latency;
pub mod metrics;
pub mod provenance;
pub mod run_folder;
pub mod tree;

pub use error::FormatError;
