//! Errors of stored hidden states.

use std::io;
use std::path::PathBuf;

use crate::data::cache::CacheError;
use crate::files::in_words;
use crate::formats::captured_states::CapturedError;
use crate::torch::TorchPanic;

/// Why hidden states cannot be stored or read.
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
    /// The disk of the folder has too little space.
    #[error(
        "train.hidden_state_cache: {} has {:.1} MiB free, of which {:.1} MiB are left to checkpoints, and the hidden states take \
         {:.1} MiB more: free some space, or choose another folder", folder.display(), mib(*free), mib(*reserved), mib(*needed)
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64, reserved: u64 },
    #[error(transparent)]
    Rows(#[from] CacheError),
    /// A file that a server captured.
    #[error("data.hidden_states: {_0}{}", skipping(_0))]
    Captured(#[from] CapturedError),
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    /// Another run is writing the file.
    #[error(
        "train.hidden_state_cache: {} is in use by another run{} on the same rows and backbone: wait for it to finish, or choose another folder",
        path.display(), in_words(*holder)
    )]
    InUse { path: PathBuf, holder: Option<u32> },
    /// The states of a row are not those that were written.
    #[error(
        "train.hidden_state_cache: {}: the states of row {row} are damaged (expected CRC-32 {expected:08x}, got {got:08x}); they are computed again",
        path.display()
    )]
    Damaged { path: PathBuf, row: usize, expected: u32, got: u32 },
    /// The file's size is wrong.
    #[error("train.hidden_state_cache: {} has {got} bytes, expected {expected}: it was truncated or changed; remove it to recompute it", path.display())]
    Size {
        path: PathBuf,
        /// Computed from the rows.
        expected: u64,
        got: u64,
    },
}

impl HiddenStatesError {
    /// Whether the disk, or the user's part of it, is full: training can go on without storing more states.
    pub fn is_full_disk(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match self {
            Self::NoSpace { .. } => true,
            Self::Io { source, .. } => matches!(source.kind(), FileTooLarge | QuotaExceeded | StorageFull),
            Self::Rows(_)
            | Self::Captured(_)
            | Self::Torch(_)
            | Self::InUse { .. }
            | Self::Damaged { .. }
            | Self::Size { .. } => false,
        }
    }
}

/// The alternative to another file.
fn skipping(error: &CapturedError) -> &'static str {
    if error.kind().is_some() { "; a run that begins with --skip-bad-rows leaves such files out" } else { "" }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
