//! Small copies from the host to a device.

use tch::kind::Element;
use tch::{Device, Tensor};

use super::rehearsal;

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
