//! Several processes by libtorch's own c10d (PyTorch's torch.distributed): they find each other over a TCP store, sum tensors on the CPU by gloo,
//! and those on GPUs by NCCL.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use tch::{Device, Tensor};

use crate::torch::collective::{Collective, CollectiveError, FailedRank};

mod c10d;
mod communicators;
mod join;
mod long_work;
mod nccl;
pub mod rendezvous;

use c10d::{C10dError, GlooGroup, Store};
use communicators::Communicators;
pub use join::{JoinError, machine_id};
use long_work::LongWork;
use nccl::{Communicator, NcclError};
use rendezvous::{LocalRank, Rendezvous};

/// This machine, for itself.
const LOOPBACK: &str = "127.0.0.1";

/// A run of several processes, each connected to each other.
#[derive(Debug)]
pub struct ProcessGroup {
    long_work: LongWork,
    gloo: GlooGroup,
    /// The first error of gloo, and that of all its later operations: no process knows what the others did of it. GPUs have their own.
    gloo_error: OnceCell<CollectiveError>,
    /// Of the GPUs.
    communicators: Communicators,
    /// Its server runs in rank 0, or in what started the processes.
    store: Store,
    rank: usize,
    world_size: usize,
    /// This process among those of its machine.
    local: LocalRank,
    /// How long an operation may take.
    timeout: Duration,
}

impl ProcessGroup {
    /// Waits until all processes of `rendezvous` have come, and connects them. An operation with them may take `timeout`.
    ///
    /// # Errors
    /// [`JoinError`] if some do not come, or were started with other numbers.
    pub fn join(rendezvous: &Rendezvous, timeout: Duration) -> Result<Self, JoinError> {
        Self::join_within(timeout.min(join::LONGEST_WAIT), rendezvous, timeout)
    }

    /// As [`ProcessGroup::join`], with a time for the others to come.
    fn join_within(wait: Duration, rendezvous: &Rendezvous, timeout: Duration) -> Result<Self, JoinError> {
        let (store, local) = join::meet(rendezvous, wait)?;
        let Rendezvous { rank, world_size, .. } = *rendezvous;
        let address = rendezvous.is_of_one_machine().then_some(LOOPBACK);
        let gloo = GlooGroup::open(&store, rank, world_size, address, timeout).map_err(JoinError::connecting)?;
        let long_work = LongWork::new(rendezvous, timeout).map_err(JoinError::connecting)?;
        let (communicators, gloo_error) = (Communicators::new([rank, world_size], timeout), OnceCell::new());
        Ok(Self { long_work, gloo, gloo_error, communicators, store, rank, world_size, local, timeout })
    }

    /// This process among those of its machine.
    pub fn local(&self) -> LocalRank {
        self.local
    }

    fn run(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        on_cpu: impl FnOnce(&GlooGroup) -> Result<(), C10dError>,
        on_gpu: impl FnOnce(&Communicator, Instant) -> Result<(), NcclError>,
    ) -> Result<(), CollectiveError> {
        let Device::Cuda(device) = tensor.device() else { return self.run_gloo(operation, on_cpu) };
        self.communicators.run(operation, device, &|own| self.all_gather_bytes(own), on_gpu)
    }

    fn run_gloo(
        &self,
        operation: &'static str,
        body: impl FnOnce(&GlooGroup) -> Result<(), C10dError>,
    ) -> Result<(), CollectiveError> {
        if let Some(first) = self.gloo_error.get() {
            return Err(first.clone());
        }
        let began = Instant::now();
        let done = body(&self.gloo).map_err(|C10dError(reason)| match began.elapsed() >= self.timeout {
            true => CollectiveError::TimedOut { operation, seconds: self.timeout.as_secs() },
            false => CollectiveError::Lost { operation, reason },
        });
        done.inspect_err(|error| {
            self.gloo_error.get_or_init(|| error.clone());
        })
    }
}

impl Collective for ProcessGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce(&self, sum: &Tensor) -> Result<(), CollectiveError> {
        let on_gpu = |nccl: &Communicator, deadline| nccl.all_reduce(sum, deadline);
        self.run("a sum over all processes", sum, |gloo| gloo.all_reduce(sum), on_gpu)
    }

    /// gloo has no sum of shares: on the CPU all of them are summed everywhere, which takes twice the bytes.
    fn reduce_scatter(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let own_n = self.share_of(shares_wn);
        let on_gpu = |nccl: &Communicator, deadline| nccl.reduce_scatter(shares_wn, &own_n, deadline);
        self.run("a sum of shares over all processes", shares_wn, |gloo| gloo.all_reduce(shares_wn), on_gpu)
    }

    fn all_gather(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let own_n = self.share_of(shares_wn);
        let on_gpu = |nccl: &Communicator, deadline| nccl.all_gather(shares_wn, &own_n, deadline);
        self.run("an exchange of shares", shares_wn, |gloo| gloo.all_gather(shares_wn, &own_n), on_gpu)
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), CollectiveError> {
        let on_gpu = |nccl: &Communicator, deadline| nccl.broadcast(tensor, root, deadline);
        self.run("a copy to all processes", tensor, |gloo| gloo.broadcast(tensor, root), on_gpu)
    }

    fn wait_for_all(&self, failed: Option<&str>) -> Result<Option<FailedRank>, CollectiveError> {
        let operation = "the wait for all processes";
        self.long_work
            .wait(&self.store, failed)
            .map_err(|C10dError(reason)| CollectiveError::Lost { operation, reason })
    }
}

/// The store of processes on this machine, served by the process that starts them.
#[derive(Debug)]
pub struct LocalStore(Store);

impl LocalStore {
    /// Opens a free port, which only this machine reaches.
    ///
    /// # Errors
    /// The words of the system or of libtorch.
    pub fn start() -> Result<Self, JoinError> {
        let no_store = |reason| JoinError::NoStore { host: LOOPBACK.into(), port: 0, reason };
        let bound = join::listener(LOOPBACK, 0).and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) = bound.map_err(|error| no_store(error.to_string()))?;
        let opened = Store::open(LOOPBACK, port, Some(listener), "", Duration::from_secs(20));
        opened.map(Self).map_err(|C10dError(reason)| no_store(reason))
    }

    /// The port, for [`Rendezvous::variables_of_local`].
    pub fn port(&self) -> u16 {
        self.0.port()
    }
}

#[cfg(test)]
mod tests;
