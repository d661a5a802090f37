//! Why hidden states cannot be kept.

use std::io;
use std::path::PathBuf;

use crate::data::cache::CacheError;

/// Why hidden states cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum HiddenStatesError {
    /// The disk.
    #[error(
        "train.hidden_state_cache: cannot {doing} {}: {source}; it takes {bytes} bytes in all: make room, choose another \
         folder, or train without the key", path.display()
    )]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Size of the whole file.
        bytes: u64,
        /// Why not.
        source: io::Error,
    },
    /// The rows.
    #[error(transparent)]
    Rows(#[from] CacheError),
    /// Another run fills the file now.
    #[error("train.hidden_state_cache: {} is in use by another run on the same rows and backbone: wait for its end, or choose another folder", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A file that is not as it was made.
    #[error("train.hidden_state_cache: {} has {got} bytes, expected {expected}: it was cut off or changed; remove it, and it is made again", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// From the sequences.
        expected: u64,
        /// On the disk.
        got: u64,
    },
}
