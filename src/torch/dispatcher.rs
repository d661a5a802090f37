//! Calls operators of libtorch by name that tch has no function for, through the C functions that libtorch exports for compiled models.
#![expect(unsafe_code, reason = "passes tensor handles to C functions of libtorch")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use tch::Tensor;

/// A tensor handle of libtorch's C functions.
pub(super) type Handle = *mut c_void;

unsafe extern "C" {
    fn aoti_torch_new_tensor_handle(tensor: Handle, copy: *mut Handle) -> i32;
    fn aoti_torch_call_dispatcher(operator: *const c_char, overload: *const c_char, stack: *mut u64) -> i32;
    /// C++'s `operator new`.
    #[link_name = "_Znwm"]
    fn operator_new(bytes: usize) -> *mut u64;
}

/// An argument of an operator. An optional one is `None` or `Some`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operand<'t> {
    Tensor(&'t Tensor),
    Int(i64),
    Float(f64),
    Bool(bool),
    None,
    Some(&'t Operand<'t>),
}

impl Operand<'_> {
    /// As the dispatcher reads it. The dispatcher frees what this allocates.
    pub(super) fn packed(self) -> u64 {
        match self {
            Self::Tensor(tensor) => new_handle(tensor) as u64,
            Self::Int(value) => value.cast_unsigned(),
            Self::Float(value) => value.to_bits(),
            Self::Bool(value) => u64::from(value),
            Self::None => 0,
            Self::Some(argument) => {
                let value = argument.packed();
                // SAFETY: operator new returns memory for one u64 or throws; the dispatcher deletes it.
                unsafe {
                    let boxed = operator_new(size_of::<u64>());
                    boxed.write(value);
                    boxed as u64
                }
            }
        }
    }
}

/// Calls an operator that has no overload name; `None` if it fails, after libtorch has printed why.
///
/// # Safety
/// The arguments are those of the operator's schema, all of them and in its order, and it returns `N` tensors.
pub(super) unsafe fn call<const N: usize>(operator: &CStr, arguments: &[Operand]) -> Option<[Tensor; N]> {
    let mut stack: Vec<u64> = arguments.iter().map(|argument| argument.packed()).collect();
    stack.resize(arguments.len().max(N), 0);
    // SAFETY: the stack holds what the schema asks for, and has room for what it returns; the dispatcher consumes the handles.
    let status = unsafe { aoti_torch_call_dispatcher(operator.as_ptr(), c"".as_ptr(), stack.as_mut_ptr()) };
    // SAFETY: on success the first N slots hold owned at::Tensor*, which tch may own from here.
    let owned = |slot: usize| unsafe { Tensor::from_ptr(stack[slot] as *mut torch_sys::C_tensor) };
    (status == 0).then(|| std::array::from_fn(owned))
}

/// A new reference to a tensor.
fn new_handle(tensor: &Tensor) -> Handle {
    let mut handle: Handle = ptr::null_mut();
    // SAFETY: a tch tensor's pointer is an at::Tensor*, as the handle is; the callee makes a new reference.
    let status = unsafe { aoti_torch_new_tensor_handle(tensor.as_ptr().cast_mut().cast(), &raw mut handle) };
    assert_eq!(status, 0, "libtorch refuses a handle of {tensor:?}");
    handle
}
