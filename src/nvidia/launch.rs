//! A kernel launch as data: an engine describes it; a GPU, or the tests' emulator, runs it.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::kernels::{KernelDtype, Program};

/// A kernel, identified by its file and name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    pub program: Program,
    pub name: &'static str,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// Address of a tensor's first element; 0 for none.
    Pointer(u64),
    Int(i32),
    Long(i64),
    Float(f32),
    Double(f64),
}

impl Argument {
    /// Address of the value itself: the driver takes a pointer to each argument.
    pub fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Int(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Long(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Float(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Double(number) => std::ptr::from_ref(number).cast_mut().cast(),
        }
    }
}

/// One launch. It is the same at every step, so that a graph can hold it.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    pub kernel: Kernel,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Per block.
    pub threads: u32,
    /// Dynamic shared memory; above 48 kB the function's attribute must allow it.
    pub shared_bytes: u32,
    /// In the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

impl Launch {
    /// A launch without dynamic shared memory.
    ///
    /// # Panics
    /// If a size is below 1, or 2^32 or more.
    pub fn new(program: Program, name: &'static str, grid: [i64; 3], threads: i64, arguments: Vec<Argument>) -> Self {
        let count = |number: i64| match u32::try_from(number) {
            Ok(number @ 1..) => number,
            _ => panic!("{name}: grids and blocks have sizes from 1 to below 2^32, got {number}"),
        };
        let kernel = Kernel { program, name };
        Self { kernel, grid: grid.map(count), threads: count(threads), shared_bytes: 0, arguments }
    }

    /// Adds dynamic shared memory for `elements` values of 16 bits.
    #[must_use]
    pub fn with_shared(mut self, elements: i64) -> Self {
        self.shared_bytes = u32::try_from(2 * elements).expect("shared memory is small");
        self
    }
}

/// `⌈count / each⌉`: blocks of `each` that cover `count`.
pub fn blocks(count: i64, each: i64) -> i64 {
    (count + each - 1) / each
}

/// The address of a contiguous tensor of dtype `kind`.
///
/// # Panics
/// For any other tensor, which the kernel would misread.
pub fn address(tensor: &Tensor, kind: Kind) -> u64 {
    assert!(tensor.kind() == kind && tensor.is_contiguous(), "a kernel wants {kind:?} row by row, got {tensor:?}");
    tensor.data_ptr() as u64
}

/// A contiguous tensor of dtype `kind`.
///
/// # Panics
/// As [`address`].
pub fn tensor(tensor: &Tensor, kind: Kind) -> Argument {
    Argument::Pointer(address(tensor, kind))
}

/// A tensor of weights or activations, in 16 bits.
///
/// # Panics
/// As [`tensor`].
pub fn elements(of: &Tensor) -> Argument {
    assert!(KernelDtype::of(of.kind()).is_some(), "kernels compute in 16 bits, got {of:?}");
    tensor(of, of.kind())
}

/// A size.
pub fn size(size: i64) -> Argument {
    Argument::Int(i32::try_from(size).expect("sizes of tensors are far below 2^31"))
}

/// A size that kernels process eight elements at a time.
///
/// # Panics
/// If it is not a multiple of eight.
pub fn eighths(of: i64) -> Argument {
    assert!(of % 8 == 0, "kernels read 8 elements at a time, got rows of {of}");
    size(of)
}

/// A float32 tensor.
pub fn floats(of: &Tensor) -> Argument {
    tensor(of, Kind::Float)
}

/// An int32 tensor.
pub fn ints(of: &Tensor) -> Argument {
    tensor(of, Kind::Int)
}

/// A number rounded to float32, in which kernels compute.
#[expect(clippy::cast_possible_truncation, reason = "kernels compute in float32")]
pub fn float(number: f64) -> Argument {
    Argument::Float(number as f32)
}
