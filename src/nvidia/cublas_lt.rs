//! Matrix products by cublasLt's algorithms.
#![expect(unsafe_code, reason = "cublasLt's descriptors are raw handles, and its products take raw addresses")]

// N rows, M outputs, K inputs
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::size_of_val;
use std::ptr;
use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;
use tch::{Device, Kind, Tensor};

use super::device::{address, cublas_lt};
use super::error::GpuError;
use super::gemm::{Product, TRIED, WrittenSums};
use super::libraries::CublasLtFunctions;

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
    prepared: RefCell<HashMap<Product, LtProduct>>,
    functions: &'static CublasLtFunctions,
    handle: Owned<sys::cublasLtContext>,
    stream: Arc<CudaStream>,
    /// `[WORKSPACE_BYTES]` uint8.
    workspace: Tensor,
    kind: sys::cudaDataType,
}

/// A product described for cublasLt, and its algorithms.
#[derive(Debug)]
struct LtProduct {
    operation: Owned<sys::cublasLtMatmulDescOpaque_t>,
    weight: Owned<sys::cublasLtMatrixLayoutOpaque_t>,
    input: Owned<sys::cublasLtMatrixLayoutOpaque_t>,
    output: Owned<sys::cublasLtMatrixLayoutOpaque_t>,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
}

/// What cublasLt made, destroyed when dropped.
#[derive(Debug)]
struct Owned<T> {
    handle: *mut T,
    destroy: unsafe extern "C" fn(*mut T) -> sys::cublasStatus_t,
}

impl<T> Owned<T> {
    /// # Safety
    /// `create` writes what `destroy` destroys, unless it fails.
    unsafe fn new(
        create: impl FnOnce(*mut *mut T) -> sys::cublasStatus_t,
        destroy: unsafe extern "C" fn(*mut T) -> sys::cublasStatus_t,
    ) -> Result<Self, CublasError> {
        let mut handle = ptr::null_mut();
        create(&raw mut handle).result()?;
        Ok(Self { handle, destroy })
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: created once and not used any more. An error while closing is of no use and ignored.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

fn failed(error: CublasError) -> GpuError {
    GpuError::Failed { work: "a product of cublasLt", reason: format!("{:?}", error.0) }
}

impl CublasLt {
    /// A handle for weights of `kind`.
    ///
    /// # Errors
    /// [`GpuError::Library`], [`GpuError::Failed`].
    pub fn new(stream: Arc<CudaStream>, kind: Kind, device: Device) -> Result<Self, GpuError> {
        let kind = match kind {
            Kind::Half => sys::cudaDataType_t::CUDA_R_16F,
            _ => sys::cudaDataType_t::CUDA_R_16BF,
        };
        let functions = cublas_lt()?;
        let workspace = Tensor::zeros([WORKSPACE_BYTES], (Kind::Uint8, device));
        stream.context().bind_to_thread().map_err(GpuError::failed("entering its context"))?;
        // SAFETY: the two functions are a pair.
        let handle = unsafe { Owned::new(|handle| (functions.create)(handle), functions.destroy) }.map_err(failed)?;
        Ok(Self { prepared: RefCell::default(), functions, handle, stream, workspace, kind })
    }

    /// The number of algorithms that cublasLt recommends for a product.
    ///
    /// # Errors
    /// [`GpuError::Failed`] for any error except that cublasLt does not support the product, for which it has none.
    pub fn algorithms(&self, product: Product) -> Result<usize, GpuError> {
        let mut prepared = self.prepared.borrow_mut();
        let prepared = match prepared.entry(product) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.prepare(product).map_err(failed)?),
        };
        Ok(prepared.algorithms.len())
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
        if self.algorithms(product)? <= algorithm {
            return Err(failed(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)));
        }
        let prepared = &self.prepared.borrow()[&product];
        let (one, before) = (1.0f32, if product.written == WrittenSums::Added { 1.0f32 } else { 0.0 });
        let y = address(y_nm) as *mut c_void;
        // SAFETY: the layouts are those of these tensors, which live on the device as long as the engine; scalars are read during
        // the call.
        let done = unsafe {
            (self.functions.matmul)(
                self.handle.handle,
                prepared.operation.handle,
                (&raw const one).cast(),
                address(w_mk) as *const c_void,
                prepared.weight.handle,
                address(x_nk) as *const c_void,
                prepared.input.handle,
                (&raw const before).cast(),
                y,
                prepared.output.handle,
                y,
                prepared.output.handle,
                &raw const prepared.algorithms[algorithm],
                address(&self.workspace) as *mut c_void,
                self.workspace.numel(),
                self.stream.cu_stream().cast(),
            )
        };
        done.result().map_err(failed)
    }

    /// cublasLt is column-major, so our rows are its columns: `y [M, N] = (w [K, M])ᵀ · x [K, N]`.
    fn prepare(&self, product: Product) -> Result<LtProduct, CublasError> {
        let Product { rows, outputs, inputs, written, .. } = product;
        let to = if written == WrittenSums::Float32 { sys::cudaDataType_t::CUDA_R_32F } else { self.kind };
        let mut prepared = LtProduct {
            operation: self.operation()?,
            weight: self.layout(self.kind, inputs, outputs)?,
            input: self.layout(self.kind, inputs, rows)?,
            output: self.layout(to, outputs, rows)?,
            algorithms: vec![],
        };
        prepared.algorithms = self.recommended(&prepared)?;
        Ok(prepared)
    }

    /// The layout of a matrix without gaps between its columns.
    fn layout(
        &self,
        kind: sys::cudaDataType,
        height: i64,
        width: i64,
    ) -> Result<Owned<sys::cublasLtMatrixLayoutOpaque_t>, CublasError> {
        let [rows, columns] = [height, width].map(i64::unsigned_abs);
        let create = self.functions.create_layout;
        // SAFETY: the two functions are a pair.
        unsafe { Owned::new(|new| create(new, kind, rows, columns, height), self.functions.destroy_layout) }
    }

    /// The product of a transposed and a plain matrix, which is summed in float32.
    fn operation(&self) -> Result<Owned<sys::cublasLtMatmulDescOpaque_t>, CublasError> {
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        let create = self.functions.create_product;
        // SAFETY: the two functions are a pair.
        let new = unsafe { Owned::new(|new| create(new, compute, scale), self.functions.destroy_product) }?;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let transposed = 1i32; // CUBLAS_OP_T
        // SAFETY: the attribute is a number of this type.
        unsafe {
            let (value, size) = ((&raw const transposed).cast(), size_of_val(&transposed));
            (self.functions.set_product)(new.handle, attribute, value, size).result()?;
        }
        Ok(new)
    }

    /// What algorithms may use, and which addresses they can rely on.
    fn preference(&self) -> Result<Owned<sys::cublasLtMatmulPreferenceOpaque_t>, CublasError> {
        let create = self.functions.create_preference;
        // SAFETY: the two functions are a pair.
        let new = unsafe { Owned::new(|new| create(new), self.functions.destroy_preference) }?;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: each attribute is a number of the size that is given with it.
            unsafe { (self.functions.set_preference)(new.handle, attribute, value, size) }.result()
        };
        let bytes = self.workspace.numel();
        let workspace = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        set(workspace, (&raw const bytes).cast(), size_of_val(&bytes))?;
        let reductions = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        set(reductions, (&raw const REDUCTIONS).cast(), size_of_val(&REDUCTIONS))?;
        for attribute in ALIGNMENTS {
            set(attribute, (&raw const ALIGNMENT).cast(), size_of_val(&ALIGNMENT))?;
        }
        Ok(new)
    }

    /// The algorithms that cublasLt recommends, best first; none if it does not support the product.
    fn recommended(&self, prepared: &LtProduct) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = self.preference()?;
        let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = Vec::with_capacity(TRIED);
        let mut count = 0;
        // SAFETY: all handles exist; at most TRIED results are written, and `count` says how many.
        let asked = unsafe {
            (self.functions.heuristic)(
                self.handle.handle,
                prepared.operation.handle,
                prepared.weight.handle,
                prepared.input.handle,
                prepared.output.handle,
                prepared.output.handle,
                preference.handle,
                TRIED as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        if asked == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(vec![]);
        }
        asked.result()?;
        // SAFETY: `count` results were written.
        unsafe { found.set_len(count.unsigned_abs() as usize) };
        found.retain(|one| one.state.result().is_ok());
        Ok(found.into_iter().map(|one| one.algo).collect())
    }
}
