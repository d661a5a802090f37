//! A kernel launch as data: an engine describes it; a GPU, or the tests' emulator, runs it.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::kernels::{KernelDtype, Program};

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Its file.
    pub program: Program,
    /// Its name there.
    pub name: &'static str,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// Address of a tensor's first number; 0 for none.
    Pointer(u64),
    /// int
    Int(i32),
    /// float
    Float(f32),
    /// double
    Double(f64),
}

impl Argument {
    /// Where the number itself lies: a driver takes a pointer to each argument.
    pub fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Int(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Float(number) => std::ptr::from_ref(number).cast_mut().cast(),
            Self::Double(number) => std::ptr::from_ref(number).cast_mut().cast(),
        }
    }
}

/// One launch: the same at every step, so that a graph can hold it.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Shared memory beside the kernel's own; above 48 kB the function's attribute must allow it.
    pub shared_bytes: u32,
    /// In the kernel's order.
    pub arguments: Vec<Argument>,
}

impl Launch {
    /// Without shared memory beside the kernel's own.
    ///
    /// # Panics
    /// For a grid or block of no size.
    pub fn new(program: Program, name: &'static str, grid: [i64; 3], threads: i64, arguments: Vec<Argument>) -> Self {
        let count = |number: i64| u32::try_from(number).expect("grids and blocks have positive sizes below 2^32");
        let kernel = Kernel { program, name };
        Self { kernel, grid: grid.map(count), threads: count(threads), shared_bytes: 0, arguments }
    }

    /// With shared memory for so many numbers of 16 bits.
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

/// A tensor of this dtype, laid out row by row.
///
/// # Panics
/// For any other tensor: a kernel would read something else.
pub fn tensor(tensor: &Tensor, kind: Kind) -> Argument {
    assert!(tensor.kind() == kind && tensor.is_contiguous(), "a kernel wants {kind:?} row by row, got {tensor:?}");
    Argument::Pointer(tensor.data_ptr() as u64)
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

/// A size that is read eight elements at a time.
///
/// # Panics
/// Where eight does not divide it.
pub fn eighths(of: i64) -> Argument {
    assert!(of % 8 == 0, "kernels read 8 elements at a time, got rows of {of}");
    size(of)
}

/// A tensor of float32.
pub fn floats(of: &Tensor) -> Argument {
    tensor(of, Kind::Float)
}

/// A tensor of int32.
pub fn ints(of: &Tensor) -> Argument {
    tensor(of, Kind::Int)
}

/// A number, rounded to float32: kernels compute in it.
#[expect(clippy::cast_possible_truncation, reason = "kernels compute in float32")]
pub fn float(number: f64) -> Argument {
    Argument::Float(number as f32)
}
