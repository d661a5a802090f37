//! Progress events of a transfer.

/// What an observer is told of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferEvent {
    /// A transfer of so much begins; what is there already is told as [`TransferEvent::Moved`], too.
    Began {
        /// The repository.
        what: String,
        /// How many files.
        files: usize,
        /// All their bytes.
        bytes: u64,
    },
    /// So many bytes more went over, or were there.
    Moved(u64),
    /// So many bytes have to go over once more.
    Lost(u64),
    /// It waits before it tries again.
    Waiting {
        /// How long.
        seconds: u64,
        /// Why.
        why: String,
    },
    /// Another process downloads this file; it waits for that.
    Locked {
        /// Its name.
        file: String,
    },
    /// The transfer that began is over.
    Ended,
}

/// Told by several threads at once.
pub type Observer<'o> = &'o (dyn Fn(TransferEvent) + Sync);
