//! The kernels' sources, as passed to NVRTC.

use tch::Kind;

/// Dtype of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelDtype {
    BFloat16,
    Half,
}

impl KernelDtype {
    /// The kernel dtype for `kind`; `None` if no kernel computes in it.
    pub fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::BFloat16 => Some(Self::BFloat16),
            Kind::Half => Some(Self::Half),
            _ => None,
        }
    }

    fn define(self) -> &'static str {
        match self {
            Self::BFloat16 => "ELEMENT_BF16",
            Self::Half => "ELEMENT_F16",
        }
    }
}

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Program {
    /// Embedding, norms, the gate of the MLP.
    Rows,
    /// Matrix products with weights.
    Linear,
    /// Attention: bias, norms and rotary embedding of queries and keys, the cache, and the tree.
    TreeAttention,
    /// Argmax, top guesses, posteriors and draws from logits.
    Choose,
    /// Acceptance, cache compaction and the next tree.
    Accept,
    /// The levels of the next tree that sequential heads fill.
    Sequential,
    /// The optimizer's update, the norm of gradients, the check of parameters.
    Optim,
    /// Weights from their codes.
    Dequantize,
    /// Masks of dropout.
    Dropout,
    /// Rotary embedding and the gate of the MLP in a pass of libtorch.
    Pass,
    /// Attention of a decoding step of many texts.
    BatchAttention,
}

/// Compiled in front of each file.
pub const PRELUDE: &str = include_str!("kernels/prelude.cu");

/// Name and source of each file, in the order of [`Program::ALL`].
const FILES: [(&str, &str); 11] = [
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("linear.cu", include_str!("kernels/linear.cu")),
    ("tree_attention.cu", include_str!("kernels/tree_attention.cu")),
    ("choose.cu", include_str!("kernels/choose.cu")),
    ("accept.cu", include_str!("kernels/accept.cu")),
    ("sequential.cu", include_str!("kernels/sequential.cu")),
    ("optim.cu", include_str!("kernels/optim.cu")),
    ("dequantize.cu", include_str!("kernels/dequantize.cu")),
    ("dropout.cu", include_str!("kernels/dropout.cu")),
    ("pass.cu", include_str!("kernels/pass.cu")),
    ("batch_attention.cu", include_str!("kernels/batch_attention.cu")),
];

impl Program {
    pub const ALL: [Self; 11] = [
        Self::Rows,
        Self::Linear,
        Self::TreeAttention,
        Self::Choose,
        Self::Accept,
        Self::Sequential,
        Self::Optim,
        Self::Dequantize,
        Self::Dropout,
        Self::Pass,
        Self::BatchAttention,
    ];

    /// The files of the CUDA engine's steps.
    pub const OF_STEPS: [Self; 6] =
        [Self::Rows, Self::Linear, Self::TreeAttention, Self::Choose, Self::Accept, Self::Sequential];

    /// The files of single operations on tensors, which [`fused`](crate::fused) launches.
    pub const OF_TENSORS: [Self; 5] = [Self::Optim, Self::Dequantize, Self::Dropout, Self::Pass, Self::BatchAttention];

    /// The file name.
    pub fn file(self) -> &'static str {
        FILES[self as usize].0
    }

    fn text(self) -> &'static str {
        FILES[self as usize].1
    }

    /// Names of the kernels in the file.
    pub fn kernels(self) -> Vec<&'static str> {
        let launched = self.text().split("\nKERNEL(").skip(1).filter_map(|rest| rest.split_once(") "));
        let plain = launched.map(|(_, rest)| rest.split('(').next().unwrap_or_default());
        match self {
            Self::Linear => {
                let few = LINEAR_FEW.into_iter().flat_map(|few| [few.name, few.normed]);
                plain.chain(few).chain(LINEAR_TILES.map(|tile| tile.name)).collect()
            }
            _ => plain.collect(),
        }
    }

    /// Whether its code depends on the head size.
    pub fn has_head_size(self) -> bool {
        matches!(self, Self::TreeAttention)
    }

    /// Whether its code depends on the dtype of elements.
    pub fn has_elements(self) -> bool {
        !matches!(self, Self::Optim)
    }

    /// The source passed to NVRTC: definitions, the prelude, the file.
    pub fn source(self, element: KernelDtype, head_size: i64) -> String {
        let define = format!("#define {}\n#define HEAD_SIZE {head_size}\n", element.define());
        let sizes: String = self.sizes().iter().map(|(name, size)| format!("#define {name} {size}\n")).collect();
        format!("{define}#line 1 \"prelude.cu\"\n{PRELUDE}\n{sizes}#line 1 \"{}\"\n{}", self.file(), self.text())
    }

    /// Sizes that the file's kernels share with their launches, by their names in the file.
    fn sizes(self) -> &'static [(&'static str, i64)] {
        match self {
            Self::Linear => &[
                ("COLUMNS", COLUMNS),
                ("FEW_WARPS", FEW_WARPS),
                ("FEW_STAGES", FEW_STAGES),
                ("BLOCK_SPLIT", BLOCK_SPLIT),
                ("STAGES", TILE_STAGES),
                ("DEPTH", TILE_DEPTH),
            ],
            Self::TreeAttention => &[("KEYS", KEYS)],
            Self::Choose => &[("SLICE", SLICE), ("MOST_SLICES", MOST_SLICES)],
            Self::Optim => &[("CHUNK", CHUNK)],
            _ => &[],
        }
    }
}

/// Logits of a row that a block of choose.cu reads at once.
pub const SLICE: i64 = 4096;
/// The most slices of a row.
pub const MOST_SLICES: i64 = 256;
/// Keys in a tile of attention.
pub const KEYS: i64 = 64;
/// Numbers of a parameter that a block of optim.cu treats.
pub const CHUNK: i64 = 16_384;
/// Stages of a tile in shared memory, and the depth of a stage along K.
pub(super) const TILE_STAGES: i64 = 4;
pub(super) const TILE_DEPTH: i64 = 64;
/// Rows of the weight for a group of warps, in products with few rows.
const COLUMNS: i64 = 4;
/// Warps in a block of these products.
const FEW_WARPS: i64 = 8;
/// Runs of weights that pass through shared memory at once.
const FEW_STAGES: i64 = 3;
/// Warps that share the columns of a ResBlock.
const BLOCK_SPLIT: i64 = 4;

/// Columns of y per block, in products with few rows whose columns are not split.
pub(super) const FEW_COLUMNS: i64 = COLUMNS * FEW_WARPS;
/// Columns of y per block of a ResBlock.
pub const BLOCK_COLUMNS: i64 = FEW_COLUMNS / BLOCK_SPLIT;

/// A kernel for products with few rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearFew {
    pub(super) name: &'static str,
    /// The kernel that also norms x.
    pub(super) normed: &'static str,
    /// Largest number of rows of x.
    pub(super) most: i64,
    /// Number of warps that share the columns of y.
    pub(super) split: i64,
}

const fn few([name, normed]: [&'static str; 2], most: i64, split: i64) -> LinearFew {
    LinearFew { name, normed, most, split }
}

/// The kernels in linear.cu, in its order.
pub(super) const LINEAR_FEW: [LinearFew; 7] = [
    few(["linear_1_1", "normed_linear_1_1"], 1, 1),
    few(["linear_1_4", "normed_linear_1_4"], 1, 4),
    few(["linear_1_8", "normed_linear_1_8"], 1, 8),
    few(["linear_4_1", "normed_linear_4_1"], 4, 1),
    few(["linear_4_4", "normed_linear_4_4"], 4, 4),
    few(["linear_8_1", "normed_linear_8_1"], 8, 1),
    few(["linear_8_4", "normed_linear_8_4"], 8, 4),
];
/// Shared memory of a product with few rows and of a ResBlock, in elements: a piece of 8 for each thread, column and stage, and two float32 for
/// each thread.
pub const FEW_SHARED: i64 = (FEW_STAGES * COLUMNS * 8 + 2 * 2) * FEW_WARPS * 32;

/// A kernel for products with many rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearTile {
    pub(super) name: &'static str,
    /// Rows of the weight per block.
    pub(super) height: i64,
    /// Largest number of rows of x.
    pub(super) width: i64,
}

const fn tile(name: &'static str, height: i64, width: i64) -> LinearTile {
    LinearTile { name, height, width }
}

/// The kernels in linear.cu, narrow ones first.
pub(super) const LINEAR_TILES: [LinearTile; 8] = [
    tile("linear_32x16", 32, 16),
    tile("linear_64x16", 64, 16),
    tile("linear_32x32", 32, 32),
    tile("linear_64x32", 64, 32),
    tile("linear_32x64", 32, 64),
    tile("linear_64x64", 64, 64),
    tile("linear_128x64", 128, 64),
    tile("linear_64x128", 64, 128),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_found_in_its_file() {
        let names = |program: Program| program.kernels();
        assert_eq!(names(Program::Rows), ["embed", "rms_norm", "silu_mul"]);
        assert_eq!(names(Program::TreeAttention), ["tree_attention_few", "tree_attention_many"]);
        let choose = ["best", "top_guesses_part", "top_guesses_merge", "posterior", "add_slices", "draw"];
        assert_eq!(names(Program::Choose), choose);
        assert_eq!(names(Program::Accept), ["walk", "typical", "compact", "advance", "fill_tree"]);
        assert_eq!(names(Program::Sequential), ["embed_nodes", "first_block", "residual", "fill_level"]);
        assert_eq!(names(Program::Optim), ["adamw", "adamw_8bit", "squares", "norm_of_squares", "first_not_finite"]);
        assert_eq!(names(Program::Dequantize), ["nf4_weight", "int8_weight"]);
        assert_eq!(names(Program::Dropout), ["dropout_mask"]);
        assert_eq!(names(Program::Pass), ["rotate", "silu_up"]);
        let head_sizes = |d: i64| [1, 2, 4, 8].map(|share| format!("batch_attention_{d}x{share}"));
        assert_eq!(names(Program::BatchAttention), [head_sizes(64), head_sizes(128)].concat());
        assert_eq!(names(Program::Linear).len(), 1 + 2 * LINEAR_FEW.len() + LINEAR_TILES.len());
        assert_eq!(names(Program::Linear)[0], "res_block");
        for LinearFew { name, normed, most, split } in LINEAR_FEW {
            assert!(Program::Linear.text().contains(&format!("\nLINEAR_FEW({most}, {split})")), "{name}");
            assert_eq!((name, normed), (&*format!("linear_{most}_{split}"), &*format!("normed_linear_{most}_{split}")));
        }
        for LinearTile { name, height, width } in LINEAR_TILES {
            assert!(Program::Linear.text().contains(&format!("\nLINEAR_TILE({height}, {width})")), "{name}");
            assert_eq!(name, format!("linear_{height}x{width}"));
        }
    }
}
