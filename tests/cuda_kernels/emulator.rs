//! Compiles the kernels with this machine's C++ compiler and `emulator.h`, and allocates memory that ends with the
//! tensor.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;
use medusa::engine::cuda::error::CudaError;
use medusa::engine::cuda::target::LaunchTarget;
use medusa::files;
use medusa::nvidia::kernels::{KernelDtype, Program};
use medusa::nvidia::launch::Launch;
use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda_kernels");

type Entry = unsafe extern "C" fn(
    *const c_uint,
    c_uint,
    c_uint,
    *mut *mut c_void,
    c_uint,
    bool,
    *const Hidden,
    c_uint,
    bool,
) -> *const c_char;

/// Memory that a kernel must not touch before it has waited for the kernels before it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Hidden {
    begin: *mut c_void,
    bytes: usize,
}

/// The order in which blocks and threads run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Order {
    Forwards,
    Backwards,
}

/// Kernels for one element type and head size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Emulator {
    pub(crate) element: KernelDtype,
    pub(crate) head_size: i64,
}

/// The CUDA engine's kernels on the CPU; the one named by `broken` does nothing.
#[derive(Debug)]
pub(crate) struct EmulatedTarget {
    pub(crate) emulator: Emulator,
    pub(crate) broken: Option<&'static str>,
}

impl LaunchTarget for EmulatedTarget {
    fn name(&self) -> &'static str {
        "the emulator"
    }

    fn launch(&self, launch: &Launch) -> Result<(), CudaError> {
        if self.broken != Some(launch.kernel.name) {
            self.emulator.run(launch, Order::Forwards);
        }
        Ok(())
    }
}

/// Locked during a launch: a library has global state.
static LIBRARIES: Mutex<Option<HashMap<PathBuf, Library>>> = Mutex::new(None);

impl Emulator {
    /// Panics if the launch fails.
    pub(crate) fn run(self, launch: &Launch, order: Order) {
        self.run_hiding(launch, order, &[]);
    }

    /// Like [`Emulator::run`]; memory is hidden until the kernel has waited for those before it.
    pub(crate) fn run_hiding(self, launch: &Launch, order: Order, hidden: &[Hidden]) {
        let source = launch.kernel.program.source(self.element, self.head_size);
        let kernels = launch.kernel.program.kernels();
        let result = run(&source, &kernels, launch, order, hidden);
        result.unwrap_or_else(|error| panic!("{error}\n{launch:?}"));
    }

    pub(crate) fn run_all(self, launches: &[Launch], order: Order) {
        launches.iter().for_each(|launch| self.run(launch, order));
    }
}

/// Runs a launch of one of `source`'s `kernels`.
pub(crate) fn run(
    source: &str,
    kernels: &[&str],
    launch: &Launch,
    order: Order,
    hidden: &[Hidden],
) -> Result<(), String> {
    let path = build(source, kernels);
    let mut libraries = LIBRARIES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let library = libraries.get_or_insert_default().entry(path).or_insert_with_key(|path| {
        // SAFETY: our own kernels and emulator, without initializers.
        unsafe { Library::new(path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    });
    let name = format!("launch_{}", launch.kernel.name);
    let mut arguments: Vec<*mut c_void> = launch.arguments.iter().map(|argument| argument.address()).collect();
    // SAFETY: every entry has this signature (see `build`); the entry checks the number of arguments, the test their
    // types, and tensors live until the launch returns.
    let error = unsafe {
        let entry = library.get::<Entry>(name.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let [count, ranges] = [arguments.len(), hidden.len()].map(|length| length as c_uint);
        let (arguments, backwards) = (arguments.as_mut_ptr(), order == Order::Backwards);
        let (grid, threads, shared) = (launch.grid.as_ptr(), launch.threads, launch.shared_bytes);
        let awaits = Program::OF_STEPS.contains(&launch.kernel.program);
        entry(grid, threads, shared, arguments, count, backwards, hidden.as_ptr(), ranges, awaits)
    };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a string in the library's static memory, which stays loaded.
    Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
}

/// The compiled library of a source, from disk if it was built before.
fn build(source: &str, kernels: &[&str]) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _one = BUILDING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let entry = |kernel: &&str| {
        format!(
            "extern \"C\" const char* launch_{kernel}(const unsigned* grid, unsigned threads, unsigned shared, void** arguments, \
             unsigned count, bool backwards, const emulator::Hidden* hidden, unsigned ranges, bool awaits) {{\n    \
             return emulator::launch(\"{kernel}\", {kernel}, grid, threads, shared, arguments, count, backwards, hidden, ranges, \
             awaits);\n}}\n"
        )
    };
    let defines = source.lines().take_while(|line| line.starts_with("#define")).map(|line| format!("{line}\n"));
    let defines: String = defines.collect();
    let entries: String = kernels.iter().map(entry).collect();
    let emulator = fs::read_to_string(Path::new(TESTS).join("emulator.h")).expect("emulator.h");
    let all = format!("#define ON_CPU\n{defines}{emulator}\n{source}\n{entries}");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("kernels-{}.so", &files::hex(&Sha256::digest(&all))[..32]));
    if !path.exists() {
        compile(&all, &path);
    }
    path
}

fn compile(source: &str, library: &Path) {
    let (text, partial) = (library.with_extension("cpp"), library.with_extension("partial"));
    files::write_atomic(&text, |out| std::io::Write::write_all(out, source.as_bytes())).expect("a file under target/");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let options = ["-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared", "-o"];
    let output = Command::new(&compiler).args(options).arg(&partial).arg(&text).output();
    let output = output.unwrap_or_else(|error| panic!("a C++ compiler is needed ({}): {error}", compiler.display()));
    assert!(output.status.success(), "{}\n{}", text.display(), String::from_utf8_lossy(&output.stderr));
    fs::rename(&partial, library).expect("a file under target/");
}

/// Memory of a test: each tensor ends at an inaccessible page, except for up to 15 bytes that align its beginning.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    mapped: RefCell<Vec<Hidden>>,
    /// Addresses of tensors that are weights.
    weights: RefCell<Vec<*mut c_void>>,
}

const PAGE: usize = 4096;

impl Memory {
    /// A copy of a tensor.
    pub(crate) fn tensor(&self, of: &Tensor) -> Tensor {
        let tensor = self.poisoned(&of.size(), of.kind());
        tensor.shallow_clone().copy_(of);
        tensor
    }

    /// A copy of a tensor that kernels may read before they have waited for the kernels before them.
    pub(crate) fn weights(&self, of: &Tensor) -> Tensor {
        let tensor = self.tensor(of);
        self.weights.borrow_mut().push(tensor.data_ptr());
        tensor
    }

    /// All tensors except weights.
    pub(crate) fn hidden(&self) -> Vec<Hidden> {
        let weights = self.weights.borrow();
        let is_weight = |of: &Hidden| {
            let end = of.begin.wrapping_byte_add(of.bytes);
            weights.iter().any(|at| (of.begin..end).contains(at))
        };
        self.mapped.borrow().iter().filter(|of| !is_weight(of)).copied().collect()
    }

    /// Filled with bytes 0xff: NaN or -1.
    pub(crate) fn poisoned(&self, size: &[i64], kind: Kind) -> Tensor {
        let bytes = usize::try_from(size.iter().product::<i64>()).expect("a size") * kind.elt_size_in_bytes();
        let room = bytes.max(1).next_multiple_of(PAGE);
        // SAFETY: a new mapping, whose last page is made inaccessible.
        let begin = unsafe {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let base = libc::mmap(std::ptr::null_mut(), room + PAGE, access, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED, "memory for a test");
            assert_eq!(libc::mprotect(base.byte_add(room), PAGE, libc::PROT_NONE), 0);
            self.mapped.borrow_mut().push(Hidden { begin: base, bytes: room });
            base.cast::<u8>().write_bytes(0xff, room);
            base.cast::<u8>().add(room - bytes.next_multiple_of(16))
        };
        let strides: Vec<i64> = (0..size.len()).map(|axis| size[axis + 1..].iter().product()).collect();
        // SAFETY: the memory lives until `self` is dropped, after every tensor of the test.
        unsafe { Tensor::from_blob(begin, size, &strides, kind, Device::Cpu) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for Hidden { begin, bytes } in self.mapped.borrow().iter() {
            // SAFETY: mapped above, with a page behind it, and unmapped once.
            unsafe { libc::munmap(*begin, bytes + PAGE) };
        }
    }
}
