//! Everything specific to libtorch: opening CUDA at run time, devices, dtypes, seeded random numbers, panics as errors,
//! memory figures, raw bytes of tensors, optimizers. No other module depends on the version of libtorch or on the
//! device.

use std::str::FromStr;

use tch::{Device, Kind};

use crate::dtype::Dtype;
use crate::plural::counted;
use shared_gpus::SharedGpus;

pub mod accelerator;
pub mod allocator;
pub mod bytes;
mod cgroup;
pub mod collective;
pub mod cuda_runtime;
mod dispatcher;
pub mod dropout;
pub mod flash_attention;
mod generator;
mod guard;
pub mod loss_scale;
pub mod memory;
pub mod onednn;
pub mod optim;
pub mod process_group;
pub mod products;
pub mod rehearsal;
pub mod shared_gpus;
pub mod transfer;

pub use accelerator::Accelerator;
pub use generator::Generator;
pub use guard::{TorchPanic, guard, raise};
pub use transfer::upload;

/// The libtorch version that the program is built for.
pub const LIBTORCH_VERSION: &str = "2.11.0";

impl Dtype {
    /// The same dtype in libtorch.
    pub fn kind(self) -> Kind {
        match self {
            Dtype::Float32 => Kind::Float,
            Dtype::BFloat16 => Kind::BFloat16,
            Dtype::Float16 => Kind::Half,
            Dtype::Float64 => Kind::Double,
        }
    }

    /// The dtype of a tensor that a backbone computes with: float32 for all except the 16-bit ones and float64.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::BFloat16 => Dtype::BFloat16,
            Kind::Half => Dtype::Float16,
            Kind::Double => Dtype::Float64,
            _ => Dtype::Float32,
        }
    }
}

/// The dtype of master weights, gradients, moments, logits and sums where the backbone computes in `kind`: float32, or float64 in float64.
pub fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// The value of `--device`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device if one is usable, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// A CUDA device by index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceChoice::Auto),
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::Cuda(0)),
            Some(("cuda", index)) => index.parse().map(DeviceChoice::Cuda).map_err(|_| bad_device(text)),
            _ => Err(bad_device(text)),
        }
    }
}

fn bad_device(text: &str) -> String {
    format!("expected auto, cpu, cuda or cuda:N, got {text:?}")
}

/// The requested device is not usable.
#[derive(Debug, thiserror::Error)]
#[error("cuda:{index} cannot be used: {reason}; run `medusa doctor`, or use --device cpu")]
pub struct DeviceUnavailable {
    index: usize,
    reason: String,
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
    pub fn of_process(self, shared: SharedGpus, gpus_of_each: usize) -> Result<Self, GpuForEachError> {
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

    /// Picks the device.
    ///
    /// # Errors
    /// [`DeviceUnavailable`], with the reason.
    pub fn resolve(self) -> Result<Device, DeviceUnavailable> {
        let index = match (self, accelerator::open()) {
            (DeviceChoice::Cpu, _) => return Ok(Device::Cpu),
            (DeviceChoice::Auto, Accelerator::Cuda { .. }) => return Ok(Device::Cuda(0)),
            (DeviceChoice::Auto, _) => return Ok(Device::Cpu),
            (DeviceChoice::Cuda(index), Accelerator::Cuda { devices }) if index < *devices => {
                return Ok(Device::Cuda(index));
            }
            (DeviceChoice::Cuda(index), _) => index,
        };
        Err(DeviceUnavailable { index, reason: accelerator::open().to_string() })
    }
}

/// A device as `--device` spells it.
pub fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// The kind of a device, such as `cpu` and `cuda`: devices of a kind round alike.
pub fn device_kind(device: Device) -> String {
    let name = device_name(device);
    name.split_once(':').map_or(name.as_str(), |(kind, _)| kind).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_kind_have_one_name() {
        assert_eq!([Device::Cpu, Device::Cuda(0), Device::Cuda(3)].map(device_kind), ["cpu", "cuda", "cuda"]);
    }

    #[test]
    fn devices_are_read_as_the_command_line_has_them() {
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert!("cuda:x".parse::<DeviceChoice>().is_err() && "gpu".parse::<DeviceChoice>().is_err());
    }

    #[test]
    fn processes_do_not_share_a_gpu() {
        let [first, second] = [0, 1].map(|local_rank| SharedGpus { gpus: 8, local_rank, processes: 2 });
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.of_process(first, 1), Ok(DeviceChoice::Cuda(0)));
            assert_eq!(choice.of_process(second, 1), Ok(DeviceChoice::Cuda(1)));
            assert_eq!(choice.of_process(second, 3), Ok(DeviceChoice::Cuda(3)));
            assert_eq!(choice.of_process(second, 9), Ok(DeviceChoice::Cuda(4)), "too many: the recipe's check says so");
        }
        assert_eq!(DeviceChoice::Cpu.of_process(second, 1), Ok(DeviceChoice::Cpu));
        let named = DeviceChoice::Cuda(1).of_process(first, 1).unwrap_err().to_string();
        assert!(named.starts_with("--device cuda:1 is one GPU, and 2 processes"), "{named}");
    }

    #[test]
    fn a_gpu_that_only_this_process_sees_is_cuda_0() {
        let own = SharedGpus { gpus: 1, local_rank: 0, processes: 1 };
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.of_process(own, 1), Ok(DeviceChoice::Cuda(0)));
        }
        let two = SharedGpus { gpus: 2, ..own };
        assert_eq!(DeviceChoice::Cuda(1).of_process(two, 1), Ok(DeviceChoice::Cuda(1)));
    }

    #[test]
    fn more_processes_than_gpus_are_refused() {
        let ninth = SharedGpus { gpus: 8, local_rank: 8, processes: 9 };
        for choice in [DeviceChoice::Auto, DeviceChoice::Cuda(0)] {
            assert_eq!(choice.of_process(ninth, 1), Err(GpuForEachError::TooFew { processes: 9, gpus: 8 }));
        }
        let told = GpuForEachError::TooFew { processes: 2, gpus: 1 }.to_string();
        assert!(told.contains("share 1 GPU, and") && !told.contains("  "), "{told}");
        let none = SharedGpus { gpus: 0, ..ninth };
        assert_eq!(DeviceChoice::Auto.of_process(none, 1), Ok(DeviceChoice::Auto), "the CPU");
        assert_eq!(DeviceChoice::Cuda(0).of_process(none, 1), Ok(DeviceChoice::Cuda(0)), "which `resolve` refuses");
    }
}
