//! How much memory this process holds, and that it keeps what it will need again.
#![expect(unsafe_code, reason = "mallopt and malloc_trim are C functions")]

use tch::{Device, Kind, Tensor};

/// Bytes of the process in memory now, and the most it ever held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident now.
    pub resident_bytes: u64,
    /// The most that was ever resident.
    pub peak_bytes: u64,
}

/// Freed blocks below this stay in the process: glibc's largest threshold.
pub const KEPT_BLOCK: u64 = 32 << 20;

/// Keeps freed blocks of up to [`KEPT_BLOCK`] in the process. Tensors of a step are freed and asked for again
/// at the next; by default glibc gives such blocks back to the system, which clears them page by page when they return: a quarter
/// of a training step on a small model. To be called when all is loaded: what loading freed is given back first.
pub fn keep_freed_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: both take integers, lock the allocator, and touch nothing else.
    unsafe {
        libc::malloc_trim(0);
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT_BLOCK as i32);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Gives what libtorch keeps of a GPU's memory for later back to the device. Layers that were merged leave pieces that fit nothing; and
/// tch has no word for this: an allocation that no GPU can serve makes libtorch's allocator free all it keeps before it gives up.
pub fn release_cached(device: Device) {
    const MORE_THAN_ANY_GPU: i64 = 1 << 45;
    if device.is_cuda() {
        drop(Tensor::f_empty([MORE_THAN_ANY_GPU], (Kind::Uint8, device)));
    }
}

/// Reads the kernel's own figures; `None` where there is no `/proc`.
pub fn process() -> Option<ProcessMemory> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(ProcessMemory { resident_bytes: field(&status, "VmRSS:")?, peak_bytes: field(&status, "VmHWM:")? })
}

/// The machine's memory: total and available bytes; `None` where there is no `/proc`.
pub fn machine() -> Option<(u64, u64)> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some((field(&info, "MemTotal:")?, field(&info, "MemAvailable:")?))
}

/// The kernel writes `Name:   1234 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_at_least_what_is_resident() {
        let memory = super::process().unwrap();
        assert!(memory.peak_bytes >= memory.resident_bytes && memory.resident_bytes > 0);
    }
}
