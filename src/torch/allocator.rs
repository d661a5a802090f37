//! Figures of libtorch's caching allocator on a GPU, as `torch.cuda.memory_stats()` has them. tch and libtorch's C functions lack them: they
//! are a virtual C++ method, called here through the table of libtorch 2.11.0.
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

/// Place of `c10::DeviceAllocator::getDeviceStats` in the table of virtual methods: after two destructors, four methods of
/// `c10::Allocator`, and `initialized`, `emptyCache` and `recordStream`.
const GET_DEVICE_STATS: usize = 9;
const METHODS: usize = 12;

type GetDeviceStats = unsafe extern "C" fn(allocator: *const CppAllocator, index: i8) -> DeviceStats;

/// A `c10::DeviceAllocator`: begins with the address of its table.
#[repr(C)]
struct CppAllocator {
    table: *const [*const c_void; METHODS],
}

unsafe extern "C" {
    #[link_name = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"]
    fn get_allocator(device_type: *const i8) -> *const CppAllocator;
}

/// What libtorch's tensors take on a GPU; `None` on the CPU.
pub fn allocated(device: Device) -> Option<AllocatedMemory> {
    let Device::Cuda(index) = device else { return None };
    // SAFETY: tensors of a GPU exist only after libtorch_cuda has registered its allocator, which lives as long as the process.
    unsafe { figures(get_allocator(&raw const CUDA), i8::try_from(index).ok()?) }
}

/// # Safety
/// `allocator` is null or a `c10::DeviceAllocator` of libtorch 2.11.0.
unsafe fn figures(allocator: *const CppAllocator, index: i8) -> Option<AllocatedMemory> {
    if allocator.is_null() {
        return None;
    }
    // SAFETY: the table has at least METHODS entries, and this one has this type.
    let stats = unsafe {
        let method = (*(*allocator).table)[GET_DEVICE_STATS];
        std::mem::transmute::<*const c_void, GetDeviceStats>(method)(allocator, index)
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
    use super::*;

    const STAT: Stat = Stat { current: 0, peak: 0, allocated: 0, freed: 0 };

    /// As the compiler of libtorch lays out a method that returns a large struct.
    unsafe extern "C" fn get_device_stats(_: *const CppAllocator, index: i8) -> DeviceStats {
        let stat = |current: i64| [Stat { current, peak: 10 * current, allocated: 0, freed: 0 }, STAT, STAT];
        let (allocated_bytes, reserved_bytes) = (stat(i64::from(index)), stat(i64::from(index) + 1));
        DeviceStats { counts: [[STAT; 3]; 4], allocated_bytes, reserved_bytes, others: [7; 50] }
    }

    #[test]
    fn figures_are_read_through_the_table_of_methods() {
        let mut table = [std::ptr::null(); METHODS];
        table[GET_DEVICE_STATS] = get_device_stats as *const c_void;
        let allocator = CppAllocator { table: &raw const table };
        // SAFETY: the allocator has the table of one.
        let figures = unsafe { figures(&raw const allocator, 3) };
        let expected = AllocatedMemory { current_bytes: 3, peak_bytes: 30, reserved_peak_bytes: 40 };
        assert_eq!(figures, Some(expected));
    }

    #[test]
    fn a_cpu_has_no_figures_and_libtorch_without_cuda_has_no_allocator() {
        assert_eq!(allocated(Device::Cpu), None);
        assert_eq!(allocated(Device::Cuda(0)), None);
    }
}
