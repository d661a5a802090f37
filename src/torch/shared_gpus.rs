//! Which GPUs of a machine are whose: processes of a run may all see all of them, or each only its own, as Slurm's `--gpus-per-task` makes it.

use serde::{Deserialize, Serialize};
use tch::Device;

use super::DeviceChoice;
use super::accelerator::{self, Accelerator};
use super::collective::{Collective, CollectiveError};
use super::cuda_runtime::{self, CudaRuntimeError};
use super::process_group::{ProcessGroup, machine_id};
use crate::plural::counted;

/// The GPUs that a process sees, and the processes of its run that see the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedGpus {
    /// That the process sees.
    pub gpus: usize,
    /// The process among those that see them, counted from 0.
    pub local_rank: usize,
    /// Processes that see them.
    pub processes: usize,
}

/// The GPUs of a machine cannot be shared out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SharedGpusError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A GPU does not report where it is.
    #[error(transparent)]
    Runtime(#[from] CudaRuntimeError),
    /// Some GPUs are seen by two processes, but not all.
    #[error(
        "ranks {} and {} run on one machine and share some GPUs but not all (CUDA_VISIBLE_DEVICES): let each process see GPUs of its own, \
         or all of them the same ones in the same order",
        ranks[0],
        ranks[1]
    )]
    Overlap { ranks: [usize; 2] },
}

/// What a process sends the others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SeenGpus {
    machine: String,
    local_rank: usize,
    /// On the PCI bus, in the order of their numbers.
    addresses: Vec<String>,
}

impl SharedGpus {
    /// Of a process that shares them with no other.
    pub fn alone(device: Device) -> Self {
        let gpus = if device.is_cuda() { visible() } else { 0 };
        Self { gpus, local_rank: 0, processes: 1 }
    }

    /// Of one of several processes, all of which ask. One that computes on the CPU sees no GPU.
    ///
    /// # Errors
    /// [`SharedGpusError`].
    pub fn for_rank(group: &ProcessGroup, choice: DeviceChoice) -> Result<Self, SharedGpusError> {
        let addresses = if choice == DeviceChoice::Cpu { Ok(vec![]) } else { addresses() };
        let own = SeenGpus {
            machine: machine_id(),
            local_rank: group.local().rank,
            addresses: addresses.clone().unwrap_or_default(),
        };
        let all = group.all_gather_bytes(&serde_json::to_vec(&own).expect("JSON holds it"));
        addresses?; // the others wait for what this process sends
        // Those of another version of the program may be unreadable: the comparison of the runs says so.
        let read = |seen: &Vec<u8>| serde_json::from_slice(seen).unwrap_or_default();
        let all: Vec<SeenGpus> = all?.iter().map(read).collect();
        from_seen(&all, group.rank())
    }

    /// GPUs for each process, of which the first of a process of its own is `device`; `None` on a CPU, which can have any number of stages.
    pub fn per_process(self, device: Device) -> Option<usize> {
        match device {
            Device::Cuda(_) if self.processes > 1 => Some(self.gpus / self.processes),
            Device::Cuda(first) => Some(self.gpus.saturating_sub(first)),
            _ => None,
        }
    }
}

fn visible() -> usize {
    if let Accelerator::Cuda { devices } = accelerator::open() { *devices } else { 0 }
}

fn addresses() -> Result<Vec<String>, CudaRuntimeError> {
    (0..visible()).map(cuda_runtime::pci_address).collect()
}

/// Of a rank, from what all saw. All ranks find the same error.
fn from_seen(all: &[SeenGpus], rank: usize) -> Result<SharedGpus, SharedGpusError> {
    let overlap = |one: &SeenGpus, other: &SeenGpus| {
        let shares = || one.addresses.iter().any(|address| other.addresses.contains(address));
        one.machine == other.machine && one.addresses != other.addresses && shares()
    };
    for (second, seen) in all.iter().enumerate() {
        if let Some(first) = all[..second].iter().position(|other| overlap(seen, other)) {
            return Err(SharedGpusError::Overlap { ranks: [first, second] });
        }
    }
    let own = &all[rank];
    let is_same = |seen: &SeenGpus| seen.machine == own.machine && seen.addresses == own.addresses;
    let same = all.iter().enumerate().filter(|(_, seen)| is_same(seen));
    let places: Vec<(usize, usize)> = same.map(|(rank, seen)| (seen.local_rank, rank)).collect();
    let local_rank = places.iter().filter(|&&place| place < (own.local_rank, rank)).count();
    Ok(SharedGpus { gpus: own.addresses.len(), local_rank, processes: places.len() })
}

/// The processes of a machine cannot have a GPU each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GpuForEachError {
    /// One GPU was named for several processes.
    #[error(
        "--device cuda:{index} is one GPU, and {processes} processes run on this machine: use --device cuda, and each takes its own"
    )]
    OneNamed { index: usize, processes: usize },
    /// There are more processes than GPUs.
    #[error(
        "{processes} processes on this machine share {}, and each needs one of its own: start {gpus} (--nproc, torchrun --nproc_per_node, \
         #SBATCH --ntasks-per-node), or use --device cpu",
        counted(*gpus, "GPU")
    )]
    TooFew { processes: usize, gpus: usize },
}

impl DeviceChoice {
    /// For one of several processes: each computes on GPUs of its own, if there are any, so many from this one on.
    ///
    /// # Errors
    /// [`GpuForEachError`].
    pub fn for_process(self, shared: SharedGpus, gpus_of_each: usize) -> Result<Self, GpuForEachError> {
        let SharedGpus { gpus, local_rank, processes } = shared;
        match self {
            Self::Cpu => Ok(self),
            Self::Auto | Self::Cuda(_) if gpus == 0 => Ok(self),
            Self::Cuda(index) if index > 0 && processes > 1 => Err(GpuForEachError::OneNamed { index, processes }),
            Self::Cuda(index) if index > 0 => Ok(self),
            _ if processes > gpus => Err(GpuForEachError::TooFew { processes, gpus }),
            _ => Ok(Self::Cuda(local_rank * gpus_of_each.clamp(1, gpus / processes))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(machine: &str, local_rank: usize, addresses: &[&str]) -> SeenGpus {
        let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
        SeenGpus { machine: machine.to_owned(), local_rank, addresses }
    }

    fn shared_by_rank(all: &[SeenGpus]) -> Vec<SharedGpus> {
        (0..all.len()).map(|rank| from_seen(all, rank).expect("no overlap")).collect()
    }

    const ONE_OF_ITS_OWN: SharedGpus = SharedGpus { gpus: 1, local_rank: 0, processes: 1 };

    #[test]
    fn processes_that_see_all_gpus_take_them_in_order_on_each_machine() {
        let all = ["65", "b3"];
        let shared = shared_by_rank(&[seen("a", 1, &all), seen("a", 0, &all), seen("b", 0, &all), seen("b", 1, &all)]);
        let sharing = |local_rank| SharedGpus { gpus: 2, local_rank, processes: 2 };
        assert_eq!(shared, [sharing(1), sharing(0), sharing(0), sharing(1)]);
    }

    /// srun --gpus-per-task=1: each is cuda:0 of its process.
    #[test]
    fn a_process_that_sees_one_gpu_of_its_own_shares_it_with_none() {
        let shared = shared_by_rank(&[seen("a", 0, &["65"]), seen("a", 1, &["b3"]), seen("b", 0, &["65"])]);
        assert_eq!(shared, [ONE_OF_ITS_OWN; 3]);
    }

    /// srun --gpus-per-task=2 --gpu-bind, or several launchers on a machine, each with local rank 0.
    #[test]
    fn processes_with_one_local_rank_are_in_the_order_of_their_ranks() {
        let [pair, other] = [["1", "2"], ["3", "4"]];
        let shared =
            shared_by_rank(&[seen("a", 0, &pair), seen("a", 0, &other), seen("a", 0, &pair), seen("a", 0, &other)]);
        let sharing = |local_rank| SharedGpus { gpus: 2, local_rank, processes: 2 };
        assert_eq!(shared, [sharing(0), sharing(0), sharing(1), sharing(1)]);
    }

    #[test]
    fn processes_without_gpus_have_none() {
        let shared = shared_by_rank(&[seen("a", 0, &[]), seen("a", 1, &[])]);
        assert_eq!(shared, [0, 1].map(|local_rank| SharedGpus { gpus: 0, local_rank, processes: 2 }));
    }

    #[test]
    fn some_gpus_in_common_are_reported_to_all() {
        let all = [seen("a", 0, &["1"]), seen("a", 1, &["2", "3"]), seen("a", 2, &["3"])];
        for rank in 0..3 {
            assert_eq!(from_seen(&all, rank), Err(SharedGpusError::Overlap { ranks: [1, 2] }));
        }
        let error = from_seen(&[seen("a", 0, &["1", "2"]), seen("a", 1, &["2", "1"])], 0).unwrap_err().to_string();
        assert!(error.starts_with("ranks 0 and 1 run on one machine"), "{error}");
    }

    #[test]
    fn processes_do_not_share_a_gpu() {
        let [first, second] = [0, 1].map(|local_rank| SharedGpus { gpus: 8, local_rank, processes: 2 });
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.for_process(first, 1), Ok(DeviceChoice::Cuda(0)));
            assert_eq!(choice.for_process(second, 1), Ok(DeviceChoice::Cuda(1)));
            assert_eq!(choice.for_process(second, 3), Ok(DeviceChoice::Cuda(3)));
            assert_eq!(
                choice.for_process(second, 9),
                Ok(DeviceChoice::Cuda(4)),
                "too many: the recipe's check says so"
            );
        }
        assert_eq!(DeviceChoice::Cpu.for_process(second, 1), Ok(DeviceChoice::Cpu));
        let named = DeviceChoice::Cuda(1).for_process(first, 1).unwrap_err().to_string();
        assert!(named.starts_with("--device cuda:1 is one GPU, and 2 processes"), "{named}");
    }

    #[test]
    fn a_gpu_that_only_this_process_sees_is_cuda_0() {
        let own = SharedGpus { gpus: 1, local_rank: 0, processes: 1 };
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.for_process(own, 1), Ok(DeviceChoice::Cuda(0)));
        }
        let two = SharedGpus { gpus: 2, ..own };
        assert_eq!(DeviceChoice::Cuda(1).for_process(two, 1), Ok(DeviceChoice::Cuda(1)));
    }

    #[test]
    fn more_processes_than_gpus_are_refused() {
        let ninth = SharedGpus { gpus: 8, local_rank: 8, processes: 9 };
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.for_process(ninth, 1), Err(GpuForEachError::TooFew { processes: 9, gpus: 8 }));
        }
        let message = GpuForEachError::TooFew { processes: 2, gpus: 1 }.to_string();
        assert!(message.contains("share 1 GPU, and") && !message.contains("  "), "{message}");
        let none = SharedGpus { gpus: 0, ..ninth };
        assert_eq!(DeviceChoice::Auto.for_process(none, 1), Ok(DeviceChoice::Auto), "the CPU");
        assert_eq!(DeviceChoice::Cuda(0).for_process(none, 1), Ok(DeviceChoice::Cuda(0)), "which `resolve` refuses");
    }
}
