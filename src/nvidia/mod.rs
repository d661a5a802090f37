//! NVIDIA's driver and libraries, opened at run time: devices, graphs, NVRTC, cuBLASLt, and the kernels' sources.

pub mod choices;
pub mod cublas_lt;
pub mod device;
pub mod error;
pub mod functions;
pub mod gemm;
pub mod graph;
pub mod kernels;
pub mod launch;
pub mod launcher;
pub mod libraries;
pub mod nvrtc;
pub mod rows;
