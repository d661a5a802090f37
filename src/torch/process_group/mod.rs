//! Several processes by libtorch's own c10d (PyTorch's torch.distributed): they find each other over a TCP store, sum tensors on the CPU by gloo,
//! and those on GPUs by NCCL.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use tch::{Device, Tensor};

use crate::torch::collective::{Collective, CollectiveError};

mod c10d;
mod join;
mod nccl;
pub mod rendezvous;

use c10d::{C10dError, GlooGroup, Store};
pub use join::JoinError;
use nccl::{Nccl, NcclError, UniqueId};
use rendezvous::{LocalRank, Rendezvous};

/// A run of several processes, each connected to each other.
#[derive(Debug)]
pub struct ProcessGroup {
    gloo: GlooGroup,
    /// Made for the first tensor on a GPU.
    nccl: OnceCell<Nccl>,
    /// Its server runs in rank 0, or in what started the processes.
    _store: Store,
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
        let (store, local) = join::meet(rendezvous, timeout)?;
        let Rendezvous { rank, world_size, .. } = *rendezvous;
        let address = rendezvous.is_of_one_machine().then_some("127.0.0.1");
        let gloo = GlooGroup::open(&store, rank, world_size, address, timeout).map_err(JoinError::connecting)?;
        Ok(Self { gloo, nccl: OnceCell::new(), _store: store, rank, world_size, local, timeout })
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
        on_gpu: impl FnOnce(&Nccl) -> Result<(), NcclError>,
    ) -> Result<(), CollectiveError> {
        let Device::Cuda(device) = tensor.device() else { return self.run_gloo(operation, on_cpu) };
        let done = self.nccl(device).and_then(|nccl| on_gpu(nccl).map_err(Some));
        done.map_err(|error| match error {
            Some(NcclError::TimedOut) => CollectiveError::TimedOut { operation, seconds: self.timeout.as_secs() },
            Some(error) => CollectiveError::Lost { operation, reason: error.to_string() },
            None => CollectiveError::Lost { operation, reason: "rank 0 has no NCCL".into() },
        })
    }

    fn run_gloo(
        &self,
        operation: &'static str,
        body: impl FnOnce(&GlooGroup) -> Result<(), C10dError>,
    ) -> Result<(), CollectiveError> {
        let began = Instant::now();
        body(&self.gloo).map_err(|C10dError(reason)| match began.elapsed() >= self.timeout {
            true => CollectiveError::TimedOut { operation, seconds: self.timeout.as_secs() },
            false => CollectiveError::Lost { operation, reason },
        })
    }

    /// The communicator of the GPUs, which all ranks make at the same operation. Rank 0 gives its id, or nothing if it cannot.
    fn nccl(&self, device: usize) -> Result<&Nccl, Option<NcclError>> {
        if let Some(nccl) = self.nccl.get() {
            return Ok(nccl);
        }
        let own = if self.rank == 0 { UniqueId::new().map(Some) } else { Ok(None) };
        let bytes = own.as_ref().ok().and_then(Option::as_ref).map_or(&[][..], UniqueId::bytes);
        let all = self.all_gather_bytes(bytes).map_err(|_| None)?;
        own.map_err(Some)?;
        let id = UniqueId::from_bytes(&all[0]).ok_or(None)?;
        let nccl = Nccl::new(id, device, self.rank, self.world_size, self.timeout).map_err(Some)?;
        Ok(self.nccl.get_or_init(|| nccl))
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
        self.run("a sum over all processes", sum, |gloo| gloo.all_reduce(sum), |nccl| nccl.all_reduce(sum))
    }

    /// gloo has no sum of shares: on the CPU all of them are summed everywhere, which takes twice the bytes.
    fn reduce_scatter(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let own_n = self.share_of(shares_wn);
        let operation = "a sum of shares over all processes";
        self.run(operation, shares_wn, |gloo| gloo.all_reduce(shares_wn), |nccl| nccl.reduce_scatter(shares_wn, &own_n))
    }

    fn all_gather(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let own_n = self.share_of(shares_wn);
        let (gloo, nccl) =
            (|gloo: &GlooGroup| gloo.all_gather(shares_wn, &own_n), |nccl: &Nccl| nccl.all_gather(shares_wn, &own_n));
        self.run("an exchange of shares", shares_wn, gloo, nccl)
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), CollectiveError> {
        let (gloo, nccl) =
            (|gloo: &GlooGroup| gloo.broadcast(tensor, root), |nccl: &Nccl| nccl.broadcast(tensor, root));
        self.run("a copy to all processes", tensor, gloo, nccl)
    }
}

/// The store of processes on this machine, served by the process that starts them.
#[derive(Debug)]
pub struct LocalStore(Store);

impl LocalStore {
    /// Opens a free port, on all interfaces of the machine: c10d has no other servers.
    ///
    /// # Errors
    /// The words of libtorch.
    pub fn start() -> Result<Self, JoinError> {
        let opened = Store::open("127.0.0.1", 0, true, "", Duration::from_secs(20));
        opened.map(Self).map_err(|C10dError(reason)| JoinError::NoStore { host: "127.0.0.1".into(), port: 0, reason })
    }

    /// The port, for [`Rendezvous::variables_of_local`].
    pub fn port(&self) -> u16 {
        self.0.port()
    }
}

#[cfg(test)]
mod tests;
