//! Operations on tensors that are one kernel on a GPU, in place of many launches by libtorch. [`kernels`] decides where they run; elsewhere,
//! on a CPU above all, libtorch's calls compute the same, and they are the kernels' oracle.

pub mod batch_attention;
pub mod dequantize;
pub mod dropout;
pub mod optim;
pub mod pass;
mod tensor_kernels;

pub use tensor_kernels::{TensorKernels, kernels, unavailable};
