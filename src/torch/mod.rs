//! Everything specific to libtorch: opening CUDA at run time, devices, dtypes, seeded random numbers, panics as errors,
//! memory figures, raw bytes of tensors, optimizers. No other module depends on the version of libtorch or on the
//! device.

use std::str::FromStr;

use tch::{Device, Kind};

use crate::dtype::Dtype;

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

impl DeviceChoice {
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
}
