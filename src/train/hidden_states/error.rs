//! Errors of cached hidden states.

use std::io;
use std::path::PathBuf;

use crate::data::cache::CacheError;

/// Why hidden states cannot be cached.
#[derive(Debug, thiserror::Error)]
pub enum HiddenStatesError {
    #[error(
        "train.hidden_state_cache: cannot {doing} {}: {source}; the cache needs {bytes} bytes: free some space, choose another \
         folder, or train without the key", path.display()
    )]
    Io {
        doing: &'static str,
        path: PathBuf,
        /// Size of the whole file.
        bytes: u64,
        source: io::Error,
    },
    #[error(transparent)]
    Rows(#[from] CacheError),
    /// Another run is writing the file.
    #[error("train.hidden_state_cache: {} is in use by another run on the same rows and backbone: wait for it to finish, or choose another folder", path.display())]
    InUse { path: PathBuf },
    /// The file's size is wrong.
    #[error("train.hidden_state_cache: {} has {got} bytes, expected {expected}: it was truncated or changed; remove it to recompute it", path.display())]
    Size {
        path: PathBuf,
        /// Computed from the rows.
        expected: u64,
        got: u64,
    },
}
