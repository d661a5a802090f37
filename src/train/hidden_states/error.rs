//! Errors of cached hidden states.

use std::io;
use std::path::PathBuf;

use crate::data::cache::CacheError;

/// Why hidden states cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum HiddenStatesError {
    /// The disk.
    #[error(
        "train.hidden_state_cache: cannot {doing} {}: {source}; the cache needs {bytes} bytes: free some space, choose another \
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
    #[error("train.hidden_state_cache: {} is in use by another run on the same rows and backbone: wait for it to finish, or choose another folder", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A file that is not as it was made.
    #[error("train.hidden_state_cache: {} has {got} bytes, expected {expected}: it was truncated or changed; remove it to recompute it", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// From the sequences.
        expected: u64,
        /// On the disk.
        got: u64,
    },
}
