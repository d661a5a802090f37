//! Weights are quantised and dequantised a slice at a time.

use tch::Device;

/// Elements quantised or dequantised at a time on the CPU: float32 temporaries stay in the cache.
pub(super) const SLICE_ON_CPU: i64 = 1 << 18;
/// The same elsewhere, where every operation is a launch.
const SLICE_ON_GPU: i64 = 1 << 24;

/// How many elements to work on at a time.
pub(super) fn slice(device: Device) -> i64 {
    if device.is_cuda() { SLICE_ON_GPU } else { SLICE_ON_CPU }
}

/// Ranges of `length` each that cover `0..end`, as start and length; the last may be shorter.
pub(super) fn ranges(end: i64, length: i64) -> impl Iterator<Item = (i64, i64)> {
    let count = (end + length - 1) / length;
    (0..count).map(move |i| (i * length, length.min(end - i * length)))
}
