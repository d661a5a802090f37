//! What the processes of a run compute together. In the words of torch.distributed, a *rank* is a process and the *world size* their number.

// W ranks, n elements of a rank's share
use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

/// The processes of a run. All ranks call the same methods in the same order, with tensors of the same shape and dtype.
pub trait Collective: Debug {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// The number of processes, W.
    fn world_size(&self) -> usize;

    /// Sums a contiguous tensor over all ranks, in place.
    ///
    /// # Errors
    /// [`CollectiveError`]; the tensor is then undefined.
    fn all_reduce(&self, sum: &Tensor) -> Result<(), CollectiveError>;

    /// `shares_wn`, `[W·n]`, has one share a rank. This rank's share becomes the sum over all ranks, in place; the other shares are undefined
    /// afterwards.
    ///
    /// # Errors
    /// [`CollectiveError`]; the tensor is then undefined.
    fn reduce_scatter(&self, shares_wn: &Tensor) -> Result<(), CollectiveError>;

    /// Copies each rank's own share of `shares_wn`, `[W·n]`, to all ranks, in place.
    ///
    /// # Errors
    /// [`CollectiveError`]; the tensor is then undefined.
    fn all_gather(&self, shares_wn: &Tensor) -> Result<(), CollectiveError>;

    /// Copies the contiguous tensor of rank `root` to all ranks, in place.
    ///
    /// # Errors
    /// [`CollectiveError`]; the tensor is then undefined.
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), CollectiveError>;

    /// What each rank passed, by rank.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let lengths_w = Tensor::zeros([self.world_size() as i64], (Kind::Int64, Device::Cpu));
        let _ = self.share_of(&lengths_w).fill_(own.len() as i64);
        self.all_gather(&lengths_w)?;
        let lengths: Vec<i64> = Vec::try_from(&lengths_w).expect("an int64 vector");
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let padded_wn = Tensor::zeros([self.world_size() as i64 * longest], (Kind::Uint8, Device::Cpu));
        self.share_of(&padded_wn).narrow(0, 0, own.len() as i64).copy_(&Tensor::from_slice(own));
        self.all_gather(&padded_wn)?;
        let rank_bytes = |(rank, &length)| padded_wn.narrow(0, rank * longest, length);
        Ok((0..).zip(&lengths).map(rank_bytes).map(|bytes| Vec::try_from(bytes).expect("a uint8 vector")).collect())
    }

    /// Waits until all ranks have come here from work that may take long, in which an operation of theirs would time out. A rank that failed
    /// says why; the others learn of the first that did.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn wait_for_all(&self, failed: Option<&str>) -> Result<Option<FailedRank>, CollectiveError> {
        let all = self.all_gather_bytes(failed.unwrap_or_default().as_bytes())?;
        let failed = all.into_iter().enumerate().find(|(_, why)| !why.is_empty());
        Ok(failed.map(|(rank, why)| FailedRank { rank, why: String::from_utf8_lossy(&why).into_owned() }))
    }

    /// This rank's share of `shares_wn`, `[W·n]`: a view `[n]`.
    fn share_of(&self, shares_wn: &Tensor) -> Tensor {
        let n = shares_wn.size()[0] / self.world_size() as i64;
        shares_wn.narrow(0, self.rank() as i64 * n, n)
    }
}

/// A rank that failed, and its words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedRank {
    pub rank: usize,
    pub why: String,
}

/// Why ranks could not compute something together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// The connection to another rank broke: its process ended.
    #[error(
        "another process ended during {operation} ({reason}): its own messages say why; when that is mended, start all processes again with --resume"
    )]
    Lost {
        operation: &'static str,
        /// The words of the library.
        reason: String,
    },
    /// The library of the GPUs could not do it.
    #[error("{operation} failed: {reason}; with NCCL_DEBUG=WARN in the environment, NCCL itself writes more")]
    Failed {
        operation: &'static str,
        /// The words of the library.
        reason: String,
    },
    /// Another rank did not take part in time.
    #[error(
        "no answer from another process during {operation} for {seconds} s: it hangs, or its step or its checkpoint takes longer than that (raise --process-timeout)"
    )]
    TimedOut { operation: &'static str, seconds: u64 },
}

/// A run of one process.
#[derive(Debug, Clone, Copy)]
pub struct OneProcess;

impl Collective for OneProcess {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce(&self, _: &Tensor) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn reduce_scatter(&self, _: &Tensor) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn all_gather(&self, _: &Tensor) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn broadcast(&self, _: &Tensor, _: usize) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Ok(vec![own.to_vec()])
    }
}
