//! Progress events of a transfer.

/// Progress of a download or an upload, for the caller to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferEvent {
    /// A transfer begins. Bytes that are already on disk are reported as [`TransferEvent::Moved`] too.
    Began {
        /// The repository.
        what: String,
        files: usize,
        /// Total of all files.
        bytes: u64,
    },
    /// More bytes transferred, or found on disk.
    Moved(u64),
    /// Bytes that have to be transferred again.
    Lost(u64),
    /// A pause before the next try.
    Waiting { seconds: u64, why: String },
    /// Waits for another process that downloads the same file.
    Locked { file: String },
    /// The transfer ended.
    Ended,
}

/// Called from several threads at once.
pub type Observer<'o> = &'o (dyn Fn(TransferEvent) + Sync);
