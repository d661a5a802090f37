//! Everything specific to libtorch: opening CUDA at run time, devices, dtypes, seeded random numbers, panics as errors,
//! memory figures, raw bytes of tensors, optimizers. No other module depends on the version of libtorch or on the
//! device.

use std::str::FromStr;

use tch::{Device, Kind};

use crate::dtype::Dtype;
use process_group::rendezvous::LocalRank;

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
        }
    }

    /// The dtype of a tensor that a backbone computes with: float32 for all except the 16-bit ones.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::BFloat16 => Dtype::BFloat16,
            Kind::Half => Dtype::Float16,
            _ => Dtype::Float32,
        }
    }
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

/// Several processes were given one GPU.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "--device cuda:{index} is one GPU, and {processes} processes run on this machine: use --device cuda, and each takes its own"
)]
pub struct SharedGpu {
    index: usize,
    processes: usize,
}

impl DeviceChoice {
    /// For one of several processes of a machine: each computes on the GPU with its number, if there are GPUs.
    ///
    /// # Errors
    /// A GPU was named, which the processes would share.
    pub fn of_process(self, local: LocalRank) -> Result<Self, SharedGpu> {
        match (self, accelerator::open()) {
            (Self::Auto, Accelerator::Cuda { .. }) | (Self::Cuda(0), _) => Ok(Self::Cuda(local.rank)),
            (Self::Cuda(index), _) if local.world_size > 1 => Err(SharedGpu { index, processes: local.world_size }),
            (choice, _) => Ok(choice),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_the_command_line_has_them() {
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert!("cuda:x".parse::<DeviceChoice>().is_err() && "gpu".parse::<DeviceChoice>().is_err());
    }
    #[test]
    fn processes_do_not_share_a_gpu() {
        let (first, second) = (LocalRank { rank: 0, world_size: 2 }, LocalRank { rank: 1, world_size: 2 });
        assert_eq!(DeviceChoice::Cuda(0).of_process(second).unwrap(), DeviceChoice::Cuda(1));
        assert_eq!(DeviceChoice::Cpu.of_process(second).unwrap(), DeviceChoice::Cpu);
        let shared = DeviceChoice::Cuda(1).of_process(first).unwrap_err().to_string();
        assert!(shared.starts_with("--device cuda:1 is one GPU, and 2 processes"), "{shared}");
    }
}
