//! Memory figures of the process and the machine, and settings of the allocators of the CPU and the GPU.
#![expect(unsafe_code, reason = "mallopt and malloc_trim are C functions")]

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::{allocator, cgroup};

/// Resident bytes of the process, now and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    pub resident_bytes: u64,
    pub peak_bytes: u64,
}

/// The part of the free memory that work may be planned for. The rest is for what no plan counts: workspaces of products, kernels that are loaded
/// when they are first called, holes between tensors.
pub const USABLE: f64 = 0.9;

/// Freed blocks of up to this many bytes stay in the process: glibc's largest threshold.
pub const KEPT_BLOCK: u64 = 32 << 20;

/// Whether work with this planned peak fits into so much free memory.
pub fn holds(free_bytes: u64, peak_bytes: u64) -> bool {
    peak_bytes as f64 <= USABLE * free_bytes as f64
}

/// Keeps freed blocks of up to [`KEPT_BLOCK`] in the process, for the next step to reuse. By default glibc returns them to the system,
/// which clears every page when they are allocated again: a quarter of a training step on a small model. Call it after loading: it first
/// returns what loading freed.
pub fn keep_freed_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: both take integers, lock the allocator, and touch nothing else.
    unsafe {
        libc::malloc_trim(0);
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT_BLOCK as i32);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Returns the unused memory in libtorch's caching allocator to the GPU, as `torch.cuda.empty_cache()` does: merging
/// layers leaves blocks that no later allocation fits into. Neither tch nor torch-sys 0.24 exposes that function (it is
/// a virtual C++ method of libc10_cuda), so this asks for 32 TiB: before the allocator reports that it is out of
/// memory, it frees every cached block. The error is expected and dropped.
pub fn release_cached(device: Device) {
    const MORE_THAN_ANY_GPU: i64 = 1 << 45;
    if device.is_cuda() {
        drop(Tensor::f_empty([MORE_THAN_ANY_GPU], (Kind::Uint8, device)));
    }
}

/// Memory of this process, from the kernel; `None` without `/proc`.
pub fn process() -> Option<ProcessMemory> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(ProcessMemory { resident_bytes: field(&status, "VmRSS:")?, peak_bytes: field(&status, "VmHWM:")? })
}

/// The memory of a run, for its log: at most in libtorch's tensors on a GPU; what is resident of the process on the CPU.
pub fn in_use(device: Device) -> Option<u64> {
    match device {
        Device::Cuda(_) => allocator::allocated(device).map(|memory| memory.peak_bytes),
        _ => process().map(|memory| memory.resident_bytes),
    }
}

/// The memory that this process may use, of the machine or of its container: total and available bytes; `None` without `/proc`.
pub fn machine() -> Option<(u64, u64)> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default(); // kernels without control groups
    within_groups(&info, Path::new("/sys/fs/cgroup"), &membership)
}

fn within_groups(meminfo: &str, mount: &Path, membership: &str) -> Option<(u64, u64)> {
    let machine = (field(meminfo, "MemTotal:")?, field(meminfo, "MemAvailable:")?);
    let groups = cgroup::limits(mount, membership).into_iter();
    Some(groups.fold(machine, |(total, available), group| {
        (total.min(group.limit_bytes), available.min(group.available_bytes))
    }))
}

/// Parses the kernel's `Name:   1234 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_at_least_what_is_resident() {
        let memory = super::process().unwrap();
        assert!(memory.peak_bytes >= memory.resident_bytes && memory.resident_bytes > 0);
    }

    #[test]
    fn a_containers_limit_bounds_the_machines_memory() {
        let mount = tempfile::tempdir().unwrap();
        for (name, text) in [("memory.max", "8388608\n"), ("memory.current", "1048576\n")] {
            crate::files::write_atomic(&mount.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
        }
        let meminfo = "MemTotal:  65536 kB\nMemFree:  1 kB\nMemAvailable:  32768 kB\n";
        assert_eq!(super::within_groups(meminfo, mount.path(), "0::/\n"), Some((8 << 20, 7 << 20)));
        assert_eq!(super::within_groups(meminfo, mount.path(), ""), Some((64 << 20, 32 << 20)));
    }
}
