//! The only room that knows which libtorch and which device: opening CUDA at run time, dtypes, the seed,
//! panics of libtorch turned into errors, memory figures, raw bytes of tensors.

use std::str::FromStr;

use tch::{Device, Kind};

use crate::dtype::Dtype;

pub mod accelerator;
pub mod bytes;
pub mod dropout;
mod generator;
mod guard;
pub mod memory;
pub mod onednn;
pub mod optim;

pub use accelerator::Accelerator;
pub use generator::Generator;
pub use guard::{TorchPanic, guard};

/// The libtorch that this program is built for.
pub const LIBTORCH_VERSION: &str = "2.11.0";

impl Dtype {
    /// libtorch's name of it.
    pub fn kind(self) -> Kind {
        match self {
            Dtype::Float32 => Kind::Float,
            Dtype::BFloat16 => Kind::BFloat16,
            Dtype::Float16 => Kind::Half,
        }
    }

    /// Of tensors that are computed with; float64 is none of a backbone's.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::BFloat16 => Dtype::BFloat16,
            Kind::Half => Dtype::Float16,
            _ => Dtype::Float32,
        }
    }
}

/// `--device` as it was typed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where there is a usable one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
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

/// A device was asked for that this process cannot use.
#[derive(Debug, thiserror::Error)]
#[error("cuda:{index} cannot be used: {reason}; run `medusa doctor`, or use --device cpu")]
pub struct DeviceUnavailable {
    index: usize,
    reason: String,
}

impl DeviceChoice {
    /// The device, if this process can use it.
    ///
    /// # Errors
    /// [`DeviceUnavailable`] names what is missing.
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
}
