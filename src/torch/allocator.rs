//! Figures of libtorch's caching allocator on a GPU, as `torch.cuda.memory_stats()` has them. tch and libtorch's C functions lack them: they
//! are a virtual C++ method, called here through the table of libtorch 2.11.
#![expect(unsafe_code, reason = "calls a virtual method of a C++ object")]

use std::ffi::c_void;

use tch::Device;

/// Bytes in libtorch's tensors on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatedMemory {
    pub current_bytes: u64,
    /// The most so far, as `torch.cuda.max_memory_allocated()`.
    pub peak_bytes: u64,
    /// The most that libtorch took from the driver, free blocks that it keeps included.
    pub reserved_peak_bytes: u64,
}

/// `c10::CachingAllocator::Stat`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Stat {
    current: i64,
    peak: i64,
    allocated: i64,
    freed: i64,
}

/// All blocks, small ones, large ones.
type StatArray = [Stat; 3];

/// `c10::CachingDeviceAllocator::DeviceStats`.
#[derive(Clone, Copy)]
#[repr(C)]
struct DeviceStats {
    counts: [StatArray; 4],
    allocated_bytes: StatArray,
    reserved_bytes: StatArray,
    others: [i64; 50],
}

/// sizeof(DeviceStats).
const STATS_BYTES: usize = 976;
const _: () = assert!(size_of::<DeviceStats>() == STATS_BYTES);

/// `c10::DeviceType::CUDA`.
static CUDA: i8 = 1;

/// Places in the table of virtual methods of `c10::DeviceAllocator`: `initialized` comes after two destructors and four methods of
/// `c10::Allocator`, and `getDeviceStats` after `emptyCache` and `recordStream`.
const INITIALIZED: usize = 6;
const GET_DEVICE_STATS: usize = 9;
const METHODS: usize = 12;

/// Major and minor version of the libtorch that has this table, as `TORCH_ABI_VERSION` begins.
const ABI: u64 = 2 << 8 | 11;

type Initialized = unsafe extern "C" fn(allocator: *const CppAllocator) -> bool;
type GetDeviceStats = unsafe extern "C" fn(allocator: *const CppAllocator, index: i8) -> DeviceStats;

/// A `c10::DeviceAllocator`: begins with the address of its table.
#[repr(C)]
struct CppAllocator {
    table: *const [*const c_void; METHODS],
}

unsafe extern "C" {
    #[link_name = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"]
    fn get_allocator(device_type: *const i8) -> *const CppAllocator;
    fn aoti_torch_abi_version() -> u64;
}

/// What libtorch's tensors take on a GPU; `None` on the CPU, on a GPU that libtorch does not see or has not used yet, and in another
/// version of libtorch.
pub fn allocated(device: Device) -> Option<AllocatedMemory> {
    let Device::Cuda(index) = device else { return None };
    let is_there = i64::try_from(index).is_ok_and(|index| index < tch::Cuda::device_count());
    // SAFETY: takes nothing and returns a number.
    if !is_there || unsafe { aoti_torch_abi_version() } >> 48 != ABI {
        return None;
    }
    // SAFETY: libtorch sees the GPU, so libtorch_cuda has registered its allocator, of this version, which lives as long as the process.
    unsafe { figures(get_allocator(&raw const CUDA), i8::try_from(index).ok()?) }
}

/// # Safety
/// `allocator` is null or a `c10::DeviceAllocator` of libtorch 2.11, and it has the device if it is initialized.
unsafe fn figures(allocator: *const CppAllocator, index: i8) -> Option<AllocatedMemory> {
    if allocator.is_null() {
        return None;
    }
    // SAFETY: the table has at least METHODS entries, and these two have these types.
    let stats = unsafe {
        let table = *(*allocator).table;
        let initialized = std::mem::transmute::<*const c_void, Initialized>(table[INITIALIZED]);
        let get_device_stats = std::mem::transmute::<*const c_void, GetDeviceStats>(table[GET_DEVICE_STATS]);
        initialized(allocator).then(|| get_device_stats(allocator, index))?
    };
    let [allocated, reserved] = [stats.allocated_bytes[0], stats.reserved_bytes[0]];
    let bytes = |count: i64| u64::try_from(count).ok();
    Some(AllocatedMemory {
        current_bytes: bytes(allocated.current)?,
        peak_bytes: bytes(allocated.peak)?,
        reserved_peak_bytes: bytes(reserved.peak)?,
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::torch::accelerator::libtorch_folder;

    /// An allocator of libtorch's own headers, with figures of its own.
    const ALLOCATOR: &str = r#"
#include <c10/core/CachingDeviceAllocator.h>
struct Fixed : c10::DeviceAllocator {
    bool is_ready = false;
    c10::DataPtr allocate(size_t) override { return {}; }
    void copy_data(void*, const void*, size_t) const override {}
    bool initialized() override { return is_ready; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0].increase(10 * device);
        stats.allocated_bytes[0].decrease(9 * device);
        stats.reserved_bytes[0].increase(100 * device);
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {}
};
extern "C" void* fixed_allocator(bool is_ready) {
    auto* fixed = new Fixed;
    fixed->is_ready = is_ready;
    return static_cast<c10::DeviceAllocator*>(fixed);
}
"#;

    #[test]
    #[cfg(target_os = "linux")]
    fn figures_are_read_from_an_allocator_of_libtorchs_headers() {
        let folder = tempfile::tempdir().unwrap();
        let [source, library] = ["fixed.cpp", "libfixed.so"].map(|name| folder.path().join(name));
        crate::files::write_atomic(&source, |out| std::io::Write::write_all(out, ALLOCATOR.as_bytes())).unwrap();
        let torch = libtorch_folder().unwrap();
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let mut build = Command::new(compiler);
        build.args(["-std=c++20", "-w", "-shared", "-fPIC", "-o"]).args([&library, &source]);
        build.arg("-I").arg(torch.join("../include")).arg("-L").arg(&torch).arg("-lc10");
        let built = build.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        // SAFETY: the library has no initialisers of its own, and the function has this type; its objects are never freed.
        let figures_of = |is_ready: bool| unsafe {
            let library = libloading::Library::new(&library).unwrap();
            let new = library.get::<unsafe extern "C" fn(bool) -> *const CppAllocator>(b"fixed_allocator").unwrap();
            let read = figures(new(is_ready), 3);
            std::mem::forget(library);
            read
        };
        let expected = AllocatedMemory { current_bytes: 3, peak_bytes: 30, reserved_peak_bytes: 300 };
        assert_eq!((figures_of(true), figures_of(false)), (Some(expected), None));
    }

    #[test]
    fn the_table_is_that_of_this_libtorch() {
        // SAFETY: takes nothing and returns a number.
        assert_eq!(unsafe { aoti_torch_abi_version() } >> 48, ABI);
    }

    #[test]
    fn a_cpu_has_no_figures_and_libtorch_without_cuda_has_no_allocator() {
        assert_eq!(allocated(Device::Cpu), None);
        assert_eq!(allocated(Device::Cuda(0)), None);
    }
}
