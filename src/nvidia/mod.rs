//! NVIDIA's driver and libraries, opened at run time: devices, the compiler of kernels, cuBLASLt, and the kernels' sources.

pub mod choices;
pub mod device;
pub mod gemm;
pub mod kernels;
pub mod nvrtc;
