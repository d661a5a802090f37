//! Matrix products with weights, by own kernels or by cublasLt's algorithms. All candidates are timed once per GPU and set of
//! shapes, and the fastest is used.
#![expect(unsafe_code, reason = "cublasLt's descriptors are raw handles, and its products take raw addresses")]

// N rows, M outputs, K inputs
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::fmt;
use std::mem::size_of_val;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::device::address;
use super::error::GpuError;
use super::kernels::{FEW_COLUMNS, LINEAR_FEW, LINEAR_TILES, Program};
use super::launch::{Argument, Launch, blocks, eighths, elements, floats, size};

/// Number of cublasLt algorithms that are tried per product.
pub(super) const TRIED: usize = 16;
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

/// `y_nm = x_nk · w_mkᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Product {
    /// N.
    pub rows: i64,
    /// M.
    pub outputs: i64,
    /// K.
    pub inputs: i64,
    /// Whether y is float32; otherwise it has the weight's dtype.
    pub to_float32: bool,
}

impl Product {
    /// The product of these tensors.
    pub fn of(x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Self {
        let [outputs, inputs] = w_mk.size()[..] else { panic!("[M, K], got {w_mk:?}") };
        Self { rows: x_nk.size()[0], outputs, inputs, to_float32: y_nm.kind() == Kind::Float }
    }

    /// Its implementations: own kernels, then cublasLt's algorithms.
    pub fn ways(&self) -> Vec<Way> {
        // cublasLt assumes that every row of y starts at a multiple of 16 bytes, even the first row of a slice of a larger y.
        let tried = if self.outputs % 8 == 0 { TRIED } else { 0 };
        self.own_ways().into_iter().chain((0..tried).map(|algorithm| Way::CublasLt { algorithm })).collect()
    }

    /// The own kernels that can hold its rows.
    pub fn own_ways(&self) -> Vec<Way> {
        let most = LINEAR_FEW.iter().map(|few| few.most).find(|&most| most >= self.rows);
        let few = LINEAR_FEW.iter().filter(|few| Some(few.most) == most);
        let few = few.map(|few| Way::Few { most: few.most, split: few.split });
        let width = LINEAR_TILES.iter().map(|tile| tile.width).find(|&width| width >= self.rows);
        let tiles = LINEAR_TILES.iter().filter(|tile| Some(tile.width) == width);
        few.chain(tiles.map(|tile| Way::Tile { height: tile.height, width: tile.width })).collect()
    }
}

/// An implementation of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The own kernel for at most `most` rows.
    Few {
        most: i64,
        /// Warps that share the columns of y.
        split: i64,
    },
    /// The own kernel on tensor cores.
    Tile {
        /// Rows of the weight per block.
        height: i64,
        /// Rows of x per block.
        width: i64,
    },
    /// A cublasLt algorithm, by its rank among those that cublasLt recommends.
    CublasLt {
        /// 0-based.
        algorithm: usize,
    },
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Few { most, split } => write!(f, "{most}/{split}"),
            Self::Tile { height, width } => write!(f, "{height}x{width}"),
            Self::CublasLt { algorithm } => write!(f, "cublasLt {algorithm}"),
        }
    }
}

impl Way {
    /// The default for a product that was not timed: the first own kernel.
    pub fn untimed(product: Product) -> Self {
        product.ways()[0]
    }

    /// The launch of `y = x·wᵀ` with an own kernel, one of [`Product::own_ways`].
    ///
    /// # Panics
    /// For any other implementation.
    pub fn launch(self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Launch {
        let Product { rows: n, outputs: m, inputs: k, to_float32 } = Product::of(x_nk, w_mk, y_nm);
        let y = if to_float32 { floats(y_nm) } else { elements(y_nm) };
        let arguments =
            vec![elements(x_nk), elements(w_mk), y, size(n), size(m), eighths(k), Argument::Int(to_float32.into())];
        match self {
            Self::Few { most, split } => {
                let few = LINEAR_FEW.into_iter().find(|few| (few.most, few.split) == (most, split) && most >= n);
                let name = few.expect("one of the own ways").name;
                Launch::new(Program::Linear, name, [blocks(m, FEW_COLUMNS / split), 1, 1], 256, arguments)
            }
            Self::Tile { height, width } => {
                let mut tiles = LINEAR_TILES.into_iter();
                let tile = tiles.find(|tile| (tile.height, tile.width) == (height, width) && width >= n);
                let name = tile.expect("one of the own ways").name;
                Launch::new(Program::Linear, name, [blocks(m, height), 1, 1], 128, arguments)
                    .with_shared(TILE_STAGES * (height + width) * TILE_DEPTH)
            }
            Self::CublasLt { .. } => panic!("a product of cublasLt is no launch"),
        }
    }
}

/// Stages of a tile in shared memory, and the depth of a stage along K.
const TILE_STAGES: i64 = 4;
const TILE_DEPTH: i64 = 64;

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

    /// Computes `y = x·wᵀ` with one of the algorithms.
    ///
    /// # Errors
    /// [`GpuError::Failed`], also if cublasLt lacks the algorithm.
    pub fn multiply(&self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor, algorithm: usize) -> Result<(), GpuError> {
        let product = Product::of(x_nk, w_mk, y_nm);
        self.stream.context().bind_to_thread().map_err(GpuError::failed("entering its context"))?;
        if !self.has(product, algorithm)? {
            return Err(failed(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)));
        }
        let prepared = &self.prepared.borrow()[&product];
        let (one, zero) = (1.0f32, 0.0f32);
        let y = address(y_nm) as *mut c_void;
        // SAFETY: the layouts are those of these tensors, which live on the device as long as the engine; scalars are read during
        // the call.
        let done = unsafe {
            result::matmul(
                self.handle,
                prepared.operation,
                (&raw const one).cast(),
                (&raw const zero).cast(),
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
        let Product { rows, outputs, inputs, to_float32 } = product;
        let to = if to_float32 { sys::cudaDataType_t::CUDA_R_32F } else { self.kind };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_tried_with_the_smallest_kernels_that_hold_its_rows() {
        let ways = |rows| Product { rows, outputs: 4096, inputs: 4096, to_float32: false }.ways();
        assert_eq!(
            ways(3)[..4],
            [
                Way::Few { most: 4, split: 1 },
                Way::Few { most: 4, split: 4 },
                Way::Tile { height: 32, width: 16 },
                Way::Tile { height: 64, width: 16 }
            ]
        );
        assert_eq!(ways(64)[..2], [Way::Tile { height: 32, width: 64 }, Way::Tile { height: 64, width: 64 }]);
        assert_eq!((ways(1).len(), ways(9).len()), (6 + TRIED, 2 + TRIED));
        let odd = Product { rows: 1, outputs: 32001, inputs: 4096, to_float32: true }.ways();
        assert_eq!(odd.len(), 6, "of no multiple of 16 bytes, the second row of logits is cublasLt's no more: {odd:?}");
        let product = Product { rows: 64, outputs: 8, inputs: 8, to_float32: true };
        assert_eq!(Way::untimed(product), Way::Tile { height: 32, width: 64 });
    }
}
