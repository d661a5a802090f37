//! Copies between host and device that nobody waits for. A GPU copies in the order of its stream while the host goes on, provided that the
//! host's memory is pinned. On the CPU nothing is copied.
#![expect(unsafe_code, reason = "writes to the memory of a new tensor")]

use std::convert::Infallible;

use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use super::{bytes, rehearsal};

/// `numbers` on a device, `[N]`. On a GPU the copy goes through pinned memory and is queued behind the work that is there: the host does
/// not wait for it. libtorch keeps the pinned memory until the copy is done.
pub fn upload<T: Element>(numbers: &[T], device: Device) -> Tensor {
    let on_host = Tensor::from_slice(numbers);
    match device {
        Device::Cpu => rehearsal::in_place_of(&["upload"], || on_host),
        // Not `pin_memory`, which prints a warning at each call because tch passes it a device.
        _ => on_host.internal_pin_memory(device).to_device_(device, T::KIND, true, false),
    }
}

/// A tensor in the host's memory for a device.
#[derive(Debug)]
pub struct HostTensor {
    tensor: Tensor,
    device: Device,
}

impl HostTensor {
    /// A tensor of `size` whose bytes `fill` writes.
    ///
    /// # Errors
    /// That of `fill`.
    pub fn filled<E>(
        size: &[i64],
        kind: Kind,
        device: Device,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut new = Self { tensor: empty(size, kind, device), device };
        // SAFETY: the new tensor has no other handle.
        fill(unsafe { bytes::raw_mut(&mut new.tensor) })?;
        Ok(new)
    }

    /// A list of integers.
    pub fn from_integers(list: &[i64], device: Device) -> Self {
        let copy = |memory: &mut [u8]| {
            let places = memory.as_chunks_mut::<8>().0.iter_mut();
            places.zip(list).for_each(|(place, number)| *place = number.to_ne_bytes());
            Ok(())
        };
        let Ok(filled) = Self::filled::<Infallible>(&[list.len() as i64], Kind::Int64, device, copy);
        filled
    }

    /// The copy of a device's tensor, which is complete after the next [`wait_for`] of the device.
    pub fn copied(from: &Tensor) -> Self {
        let tensor = from.contiguous().to_device_(Device::Cpu, from.kind(), true, false); // pinned, if it comes from a GPU
        Self { tensor, device: from.device() }
    }

    /// The same numbers on the device: these themselves on the CPU. On a GPU, kernels that read them are launched after this call.
    pub fn on_device(&self) -> Tensor {
        if !self.device.is_cuda() {
            return rehearsal::in_place_of(&["upload"], || self.tensor.shallow_clone());
        }
        self.tensor.to_device_(self.device, self.tensor.kind(), true, false)
    }

    /// The bytes in memory order.
    pub fn bytes(&self) -> &[u8] {
        bytes::raw(&self.tensor)
    }
}

/// Waits for the work of a GPU; that of the CPU is always done.
pub fn wait_for(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

/// Memory of the host: pinned if it is for a GPU.
fn empty(size: &[i64], kind: Kind, device: Device) -> Tensor {
    let memory = Tensor::empty(size, (kind, Device::Cpu));
    if device.is_cuda() { memory.internal_pin_memory(device) } else { memory }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_and_bytes_come_back() {
        for list in [vec![], vec![3, -1, i64::MAX]] {
            let host = HostTensor::from_integers(&list, Device::Cpu);
            assert_eq!(Vec::<i64>::try_from(host.on_device()).unwrap(), list);
            assert_eq!(HostTensor::copied(&host.on_device()).bytes(), host.bytes());
        }
        let transposed = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).view([2, 2]).tr();
        let copied = HostTensor::copied(&transposed);
        assert_eq!(copied.on_device(), transposed);
        assert_eq!(copied.bytes()[4..8], 3f32.to_ne_bytes());
    }

    #[test]
    fn an_error_of_the_filler_is_returned() {
        assert_eq!(HostTensor::filled(&[2], Kind::Half, Device::Cpu, |_| Err("no bytes")).unwrap_err(), "no bytes");
    }
}
