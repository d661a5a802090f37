//! Matrix products with weights and what is fused into them, by own kernels or by cublasLt's algorithms. All candidates are timed once per
//! GPU and set of shapes, and the fastest is used.

// N rows, M outputs, K inputs
use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::kernels::{
    FEW_COLUMNS, FEW_SHARED, LINEAR_FEW, LINEAR_TILES, LinearFew, LinearTile, Program, TILE_DEPTH, TILE_STAGES,
};
use super::launch::{Argument, Launch, blocks, eighths, elements, float, floats, ints, size};
use super::rows::{rms_norm, silu_mul};

/// Number of cublasLt algorithms that are tried per product.
pub(super) const TRIED: usize = 16;

/// What is written of a product's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WrittenSums {
    /// The sums, in the weight's dtype.
    Rounded,
    /// The sums, in float32.
    Float32,
    /// y plus the sums.
    Added,
    /// SiLU(gate) · up, of the sums in the weight's dtype: the first half of the weight's rows yields gate, the second half up.
    Gated,
}

/// The sizes of `norm(x_nk) · w_mkᵀ`, and what is fused into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Product {
    /// N.
    pub rows: i64,
    /// M.
    pub outputs: i64,
    /// K.
    pub inputs: i64,
    /// Whether x is normed before the product.
    pub normed: bool,
    pub written: WrittenSums,
}

/// The norm of a product's input: `x / √(mean(x²) + eps) · weight`.
#[derive(Debug)]
pub struct InputNorm {
    /// `[K]`.
    pub weight_k: Tensor,
    pub eps: f64,
    /// `[N, K]`: the normed input, for implementations that compute it before the product.
    pub normed_nk: Tensor,
}

/// What becomes of a product's sums.
#[derive(Debug)]
pub enum Ending {
    /// They are y, in its dtype.
    Stored,
    /// They are added to y, before rounding.
    Added,
    /// y `[N, M/2]` is gated, see [`WrittenSums::Gated`].
    Gated {
        /// `[N, M]`: the sums, for implementations that gate them after the product.
        sums_nm: Tensor,
    },
}

/// A product with its tensors, and what is fused into it.
#[derive(Debug)]
pub struct Operands {
    /// `[N, K]`.
    pub x_nk: Tensor,
    pub norm: Option<InputNorm>,
    /// `[M, K]`.
    pub w_mk: Tensor,
    /// `[N, M]`, or `[N, M/2]` if it is gated.
    pub y_nm: Tensor,
    pub ending: Ending,
}

impl Operands {
    /// `y = x·wᵀ`.
    pub fn new(x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Self {
        let [x_nk, w_mk, y_nm] = [x_nk, w_mk, y_nm].map(Tensor::shallow_clone);
        Self { x_nk, norm: None, w_mk, y_nm, ending: Ending::Stored }
    }

    /// The product's sizes.
    pub fn product(&self) -> Product {
        let [outputs, inputs] = self.w_mk.size()[..] else { panic!("[M, K], got {:?}", self.w_mk) };
        let written = match self.ending {
            Ending::Stored if self.y_nm.kind() == Kind::Float => WrittenSums::Float32,
            Ending::Stored => WrittenSums::Rounded,
            Ending::Added => WrittenSums::Added,
            Ending::Gated { .. } => WrittenSums::Gated,
        };
        Product { rows: self.x_nk.size()[0], outputs, inputs, normed: self.norm.is_some(), written }
    }

    /// The launch that norms x, if an implementation does not, and the input of the product after it.
    pub(super) fn norm_before(&self) -> (Option<Launch>, &Tensor) {
        self.norm.as_ref().map_or((None, &self.x_nk), |InputNorm { weight_k, eps, normed_nk }| {
            (Some(rms_norm(&self.x_nk, weight_k, *eps, normed_nk)), normed_nk)
        })
    }

    /// The output of the product, if an implementation does not gate it, and the launch that gates it.
    pub(super) fn gate_after(&self) -> (&Tensor, Option<Launch>) {
        match &self.ending {
            Ending::Gated { sums_nm } => (sums_nm, Some(silu_mul(sums_nm, &self.y_nm))),
            Ending::Stored | Ending::Added => (&self.y_nm, None),
        }
    }
}

impl Product {
    /// Its implementations: own kernels, then cublasLt's algorithms.
    pub fn ways(&self) -> Vec<GemmAlgorithm> {
        // cublasLt assumes that every row of y starts at a multiple of 16 bytes, even the first row of a slice of a larger y.
        let tried = if self.outputs % 8 == 0 { TRIED } else { 0 };
        self.own_ways().into_iter().chain((0..tried).map(|algorithm| GemmAlgorithm::CublasLt { algorithm })).collect()
    }

    /// The own kernels that can hold its rows.
    pub fn own_ways(&self) -> Vec<GemmAlgorithm> {
        let most = LINEAR_FEW.iter().map(|few| few.most).find(|&most| most >= self.rows);
        let few = LINEAR_FEW.iter().filter(|few| Some(few.most) == most);
        let few = few.map(|few| GemmAlgorithm::Few { most: few.most, split: few.split });
        let width = LINEAR_TILES.iter().map(|tile| tile.width).find(|&width| width >= self.rows);
        let tiles = LINEAR_TILES.iter().filter(|tile| Some(tile.width) == width);
        few.chain(tiles.flat_map(|tile| self.tile_ways(*tile))).collect()
    }

    /// A tile with K in one piece, and split where that leaves more multiprocessors with work.
    fn tile_ways(&self, LinearTile { height, width, .. }: LinearTile) -> Vec<GemmAlgorithm> {
        let tiles = blocks(self.outputs, height);
        let useful = |splits: &i64| {
            let each = blocks(blocks(self.inputs, TILE_DEPTH), *splits);
            SPLIT_BLOCKS.contains(&(tiles * splits))
                && each >= TILE_STAGES
                && splits * tiles * height * width <= SPLIT_NUMBERS
        };
        let splits = [1].into_iter().chain([2, 4, 8].into_iter().filter(useful));
        splits.map(|splits| GemmAlgorithm::Tile { height, width, splits }).collect()
    }

    /// The product without what only own kernels fuse into it.
    pub fn bare(self) -> Self {
        let written = if self.written == WrittenSums::Gated { WrittenSums::Rounded } else { self.written };
        Self { normed: false, written, ..self }
    }

    /// Columns of y.
    fn columns(&self) -> i64 {
        if self.written == WrittenSums::Gated { self.outputs / 2 } else { self.outputs }
    }
}

/// An implementation of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmAlgorithm {
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
        /// Blocks that share a tile, each with a part of K.
        splits: i64,
    },
    /// A cublasLt algorithm, by its rank among those that cublasLt recommends.
    CublasLt {
        /// 0-based.
        algorithm: usize,
    },
}

impl fmt::Display for GemmAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Few { most, split } => write!(f, "{most}/{split}"),
            Self::Tile { height, width, splits: 1 } => write!(f, "{height}x{width}"),
            Self::Tile { height, width, splits } => write!(f, "{height}x{width}/{splits}"),
            Self::CublasLt { algorithm } => write!(f, "cublasLt {algorithm}"),
        }
    }
}

impl GemmAlgorithm {
    /// The default for a product that was not timed: the first own kernel.
    pub fn untimed(product: Product) -> Self {
        product.ways()[0]
    }

    /// The launches of a product with an own kernel, one of [`Product::own_ways`].
    ///
    /// # Panics
    /// For any other implementation.
    pub fn launches(self, of: &Operands, room: &SplitRoom) -> Vec<Launch> {
        let rows = of.product().rows;
        match self {
            Self::Few { most, split } => {
                let few = LINEAR_FEW.into_iter().find(|few| (few.most, few.split) == (most, split) && most >= rows);
                vec![few_launch(few.expect("one of the own ways"), of)]
            }
            Self::Tile { height, width, splits } => {
                let mut tiles = LINEAR_TILES.into_iter();
                let tile = tiles.find(|tile| (tile.height, tile.width) == (height, width) && width >= rows);
                let (before, x_nk) = of.norm_before();
                let arguments = [arguments(x_nk, of), vec![floats(&room.sums), ints(&room.arrived)]].concat();
                let launch = tile_launch(tile.expect("one of the own ways"), of.product().outputs, splits, arguments);
                before.into_iter().chain([launch]).collect()
            }
            Self::CublasLt { .. } => panic!("a product of cublasLt is no launch"),
        }
    }
}

/// The arguments of all own kernels.
fn arguments(x_nk: &Tensor, of: &Operands) -> Vec<Argument> {
    let product = of.product();
    let Product { rows, outputs, inputs, written, .. } = product;
    assert!(of.y_nm.size() == [rows, product.columns()], "y of {product:?}, got {:?}", of.y_nm);
    let y = if written == WrittenSums::Float32 { floats(&of.y_nm) } else { elements(&of.y_nm) };
    let sizes = [size(rows), size(outputs), eighths(inputs), Argument::Int(written as i32)];
    [&[elements(x_nk), elements(&of.w_mk), y], &sizes[..]].concat()
}

fn few_launch(few: LinearFew, of: &Operands) -> Launch {
    let (mut arguments, mut name) = (arguments(&of.x_nk, of), few.name);
    if let Some(norm) = &of.norm {
        arguments.extend([elements(&norm.weight_k), float(norm.eps)]);
        name = few.normed;
    }
    let grid = [blocks(of.product().outputs, FEW_COLUMNS / few.split), 1, 1];
    Launch::new(Program::Linear, name, grid, 256, arguments).with_shared(FEW_SHARED)
}

fn tile_launch(tile: LinearTile, outputs: i64, splits: i64, arguments: Vec<Argument>) -> Launch {
    let LinearTile { name, height, width } = tile;
    let grid = [blocks(outputs, height), splits, 1];
    Launch::new(Program::Linear, name, grid, (2 * height).max(128), arguments)
        .with_shared(TILE_STAGES * (height + width) * TILE_DEPTH)
}

/// Numbers of blocks for which K is split: from one for each multiprocessor of the largest GPUs on.
const SPLIT_BLOCKS: RangeInclusive<i64> = 128..=528;
/// Largest number of partial sums of a product.
const SPLIT_NUMBERS: i64 = 4 << 20;

/// Where blocks that share a tile pass their sums to the last of them.
#[derive(Debug)]
pub struct SplitRoom {
    /// `[SPLIT_NUMBERS]` float32.
    pub sums: Tensor,
    /// Int32: blocks that have come to each tile; all 0 between kernels.
    pub arrived: Tensor,
}

impl SplitRoom {
    /// Room for every product.
    pub fn new(device: Device) -> Self {
        Self {
            sums: Tensor::zeros([SPLIT_NUMBERS], (Kind::Float, device)),
            arrived: Tensor::zeros([*SPLIT_BLOCKS.end()], (Kind::Int, device)),
        }
    }

    /// Size in memory.
    pub fn bytes() -> u64 {
        4 * (SPLIT_NUMBERS + SPLIT_BLOCKS.end()).unsigned_abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product([rows, outputs, inputs]: [i64; 3], written: WrittenSums) -> Product {
        Product { rows, outputs, inputs, normed: false, written }
    }

    #[test]
    fn a_product_is_tried_with_the_smallest_kernels_that_hold_its_rows() {
        let own = |sizes| {
            product(sizes, WrittenSums::Rounded).own_ways().iter().map(GemmAlgorithm::to_string).collect::<Vec<_>>()
        };
        assert_eq!(own([3, 22016, 4096])[..3], ["4/1", "4/4", "32x16"]);
        // K is split where whole tiles are fewer than multiprocessors.
        let o_proj =
            ["32x64", "32x64/2", "32x64/4", "64x64", "64x64/2", "64x64/4", "64x64/8", "128x64", "128x64/4", "128x64/8"];
        assert_eq!(own([64, 4096, 4096]), o_proj);
        assert_eq!(own([64, 22016, 4096]), ["32x64", "64x64", "128x64", "128x64/2"]);
        assert_eq!(own([128, 32000, 4096]), ["64x128"]);
        assert_eq!(
            own([64, 4096, 512]),
            ["32x64", "32x64/2", "64x64", "64x64/2", "128x64"],
            "each split has four stages"
        );
        let all = product([64, 22016, 4096], WrittenSums::Gated).ways();
        assert_eq!(all.len(), 4 + TRIED);
        let odd = product([1, 32001, 4096], WrittenSums::Float32).ways();
        assert_eq!(odd.len(), 5, "of no multiple of 16 bytes, the second row of logits is cublasLt's no more: {odd:?}");
        let untimed = GemmAlgorithm::untimed(product([64, 8, 8], WrittenSums::Float32));
        assert_eq!(untimed, GemmAlgorithm::Tile { height: 32, width: 64, splits: 1 });
    }
}
