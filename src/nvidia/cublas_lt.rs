//! Matrix products by cublasLt's algorithms.
#![expect(unsafe_code, reason = "cublasLt's descriptors are raw handles, and its products take raw addresses")]

// N rows, M outputs, K inputs
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::size_of_val;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;
use tch::{Device, Kind, Tensor};

use super::device::address;
use super::error::GpuError;
use super::gemm::{Product, TRIED, WrittenSums};

/// Size of cublasLt's workspace.
pub const WORKSPACE_BYTES: i64 = 32 << 20;

/// How algorithms that split K may add their parts: in float32, in the workspace. The other schemes add them in y's dtype.
static REDUCTIONS: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// Alignment of addresses in bytes, also of single rows. By default, cublasLt would assume 256.
static ALIGNMENT: u32 = 16;
const ALIGNMENTS: [sys::cublasLtMatmulPreferenceAttributes_t; 4] = [
    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
];

/// cublasLt with the products prepared so far.
#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    stream: Arc<CudaStream>,
    /// `[WORKSPACE_BYTES]` uint8.
    workspace: Tensor,
    kind: sys::cudaDataType,
    prepared: RefCell<HashMap<Product, LtProduct>>,
}

/// A product described for cublasLt, and its algorithms.
#[derive(Debug)]
struct LtProduct {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
}

fn failed(error: CublasError) -> GpuError {
    GpuError::Failed { work: "a product of cublasLt", reason: format!("{:?}", error.0) }
}

impl CublasLt {
    /// A handle for weights of `kind`.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn new(stream: Arc<CudaStream>, kind: Kind, device: Device) -> Result<Self, GpuError> {
        let kind = match kind {
            Kind::Half => sys::cudaDataType_t::CUDA_R_16F,
            _ => sys::cudaDataType_t::CUDA_R_16BF,
        };
        let workspace = Tensor::zeros([WORKSPACE_BYTES], (Kind::Uint8, device));
        stream.context().bind_to_thread().map_err(GpuError::failed("entering its context"))?;
        let handle = result::create_handle().map_err(failed)?;
        Ok(Self { handle, stream, workspace, kind, prepared: RefCell::default() })
    }

    /// Whether cublasLt has such an algorithm for a product.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn has(&self, product: Product, algorithm: usize) -> Result<bool, GpuError> {
        let mut prepared = self.prepared.borrow_mut();
        let prepared = match prepared.entry(product) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.prepare(product).map_err(failed)?),
        };
        Ok(prepared.algorithms.len() > algorithm)
    }

    /// Computes `y = x·wᵀ` with one of the algorithms, or adds it to y: a product that is [`bare`](Product::bare).
    ///
    /// # Errors
    /// [`GpuError::Failed`], also if cublasLt lacks the algorithm.
    pub fn multiply(
        &self,
        product: Product,
        [x_nk, w_mk, y_nm]: [&Tensor; 3],
        algorithm: usize,
    ) -> Result<(), GpuError> {
        self.stream.context().bind_to_thread().map_err(GpuError::failed("entering its context"))?;
        if !self.has(product, algorithm)? {
            return Err(failed(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)));
        }
        let prepared = &self.prepared.borrow()[&product];
        let (one, before) = (1.0f32, if product.written == WrittenSums::Added { 1.0f32 } else { 0.0 });
        let y = address(y_nm) as *mut c_void;
        // SAFETY: the layouts are those of these tensors, which live on the device as long as the engine; scalars are read during
        // the call.
        let done = unsafe {
            result::matmul(
                self.handle,
                prepared.operation,
                (&raw const one).cast(),
                (&raw const before).cast(),
                address(w_mk) as *const c_void,
                prepared.weight,
                address(x_nk) as *const c_void,
                prepared.input,
                y,
                prepared.output,
                y,
                prepared.output,
                &raw const prepared.algorithms[algorithm],
                address(&self.workspace) as *mut c_void,
                self.workspace.numel(),
                self.stream.cu_stream().cast(),
            )
        };
        done.map_err(failed)
    }

    /// cublasLt is column-major, so our rows are its columns: `y [M, N] = (w [K, M])ᵀ · x [K, N]`.
    fn prepare(&self, product: Product) -> Result<LtProduct, CublasError> {
        let Product { rows, outputs, inputs, written, .. } = product;
        let to = if written == WrittenSums::Float32 { sys::cudaDataType_t::CUDA_R_32F } else { self.kind };
        let layout = |kind, height: i64, width: i64| {
            result::create_matrix_layout(kind, height.unsigned_abs(), width.unsigned_abs(), height)
        };
        let operation =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)?;
        let transposed = 1i32; // CUBLAS_OP_T
        // SAFETY: the descriptor was just made; the attribute is a number of this type.
        unsafe {
            result::set_matmul_desc_attribute(
                operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        let mut prepared = LtProduct {
            operation,
            weight: layout(self.kind, inputs, outputs)?,
            input: layout(self.kind, inputs, rows)?,
            output: layout(to, outputs, rows)?,
            algorithms: vec![],
        };
        prepared.algorithms = self.algorithms(&prepared)?;
        Ok(prepared)
    }

    fn algorithms(&self, prepared: &LtProduct) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let bytes = self.workspace.numel();
        let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = Vec::with_capacity(TRIED);
        let mut count = 0;
        // SAFETY: all handles were just made; at most TRIED results are written, and `count` says how many.
        let asked = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )?;
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const REDUCTIONS).cast(),
                size_of_val(&REDUCTIONS),
            )?;
            for attribute in ALIGNMENTS {
                let (alignment, size) = ((&raw const ALIGNMENT).cast(), size_of_val(&ALIGNMENT));
                result::set_matmul_pref_attribute(preference, attribute, alignment, size)?;
            }
            let asked = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                prepared.operation,
                prepared.weight,
                prepared.input,
                prepared.output,
                prepared.output,
                preference,
                TRIED as i32,
                found.as_mut_ptr(),
                &raw mut count,
            );
            result::destroy_matmul_pref(preference)?;
            asked
        };
        if asked.result().is_err() {
            return Ok(vec![]); // none: the product has other implementations
        }
        // SAFETY: `count` results were written.
        unsafe { found.set_len(count.unsigned_abs() as usize) };
        found.retain(|one| one.state.result().is_ok());
        Ok(found.into_iter().map(|one| one.algo).collect())
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        for (_, prepared) in self.prepared.borrow_mut().drain() {
            // SAFETY: each was created once and is not used any more. Errors while closing are of no use and ignored.
            unsafe {
                let _ = result::destroy_matmul_desc(prepared.operation);
                let layouts = [prepared.weight, prepared.input, prepared.output];
                let _ = layouts.map(|layout| result::destroy_matrix_layout(layout));
            }
        }
        // SAFETY: the handle was created once, and nothing uses it any more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
