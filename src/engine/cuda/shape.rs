//! The sizes that a step is computed for, and checks for what the kernels do not support.

use tch::Kind;

use super::draft::{DeviceDraft, DraftInput, DraftShape};
use super::layout::MAX_NODES;
use crate::dtype::Dtype;
use crate::model::block_spec::{
    Activation, Biases, BlockSpec, LogitSpec, MlpSpec, NormKind, NormPlaces, NormSpec, QueryKeyNorm,
};
use crate::model::config::{FamilyTraits, LlamaConfig};
use crate::model::llama::Llama;

/// The cache grows in blocks of this many tokens.
pub const BLOCK: i64 = 4096;
/// The block at the end of the context is rounded up to a multiple of this.
pub(super) const GRAIN: i64 = 64;
/// Widths of matrix products must be multiples of this.
const WIDTHS: i64 = 64;
/// Possible lengths of a prompt piece: the smallest that holds the rest of the prompt is used.
pub const CHUNKS: [usize; 3] = [8, 32, MAX_NODES];
/// Head sizes that the kernels support.
pub const HEAD_SIZES: [i64; 2] = [64, 128];
/// Largest number of guesses per head.
pub const MAX_GUESSES: usize = 16;

/// Why a backbone, heads or a tree cannot be decoded on a GPU.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UnsupportedModel {
    /// A dtype other than bfloat16 and float16.
    #[error("its kernels compute in bfloat16 and float16, the backbone in {dtype}; use --dtype bfloat16")]
    Dtype { dtype: String },
    /// A head size that the kernels do not support.
    #[error("its kernels are for heads of size 64 and 128, the backbone's have {head_dim}")]
    HeadSize { head_dim: i64 },
    /// A width that is not a multiple of what the kernels need.
    #[error("its kernels need a {what} that is a multiple of {multiple}, the backbone's is {got}")]
    Width {
        /// `hidden size` or `width of the MLP`.
        what: &'static str,
        multiple: i64,
        /// The backbone's.
        got: i64,
    },
    /// Weights that the kernels do not support.
    #[error("{what} {why}")]
    Weights {
        /// `the backbone` or `the heads`.
        what: &'static str,
        why: &'static str,
    },
    /// Hydra++ heads.
    #[error(
        "Hydra++ heads read a prefix layer, which the CUDA engine has no kernels for; use --engine tch, or --engine cpu on the CPU"
    )]
    Prefix,
    /// Heads with a truncated vocabulary.
    #[error(
        "the heads guess among a part of the vocabulary, which the CUDA engine has no kernels for; use --engine tch, or --engine cpu on the CPU"
    )]
    Vocabulary,
    /// A tree with too many nodes.
    #[error(
        "a step has at most {MAX_NODES} nodes with the root, the tree has {nodes}; make a smaller one with `medusa tree`"
    )]
    Tree {
        /// Root included.
        nodes: usize,
    },
    /// A tree that is too wide.
    #[error(
        "a head makes at most {MAX_GUESSES} guesses, the tree asks for {guesses}; make a narrower one with `medusa tree`"
    )]
    Guesses {
        /// Guesses on its widest level.
        guesses: usize,
    },
}

/// The sizes that determine a step's launches and memory.
#[derive(Debug, Clone, Copy)]
pub struct Shape<'a> {
    pub config: &'a LlamaConfig,
    /// The backbone's dtype.
    pub kind: Kind,
    /// Heads and the tree that they fill.
    pub draft: Option<DraftShape<'a>>,
}

impl<'a> Shape<'a> {
    /// The shape for a backbone and a drafter.
    pub fn of(backbone: &'a Llama, draft: Option<&DeviceDraft<'a>>) -> Self {
        Self { config: &backbone.config, kind: backbone.kind(), draft: draft.map(|draft| draft.shape) }
    }

    /// Checks that there are kernels for this shape.
    ///
    /// # Errors
    /// [`UnsupportedModel`] names what is not supported.
    pub fn check_kernels(&self) -> Result<(), UnsupportedModel> {
        let config = self.config;
        if !matches!(self.kind, Kind::BFloat16 | Kind::Half) {
            return Err(UnsupportedModel::Dtype { dtype: Dtype::of(self.kind).to_string() });
        }
        if !HEAD_SIZES.contains(&config.head_dim) {
            return Err(UnsupportedModel::HeadSize { head_dim: config.head_dim });
        }
        let widths = [("hidden size", config.hidden_size), ("width of the MLP", config.intermediate_size)];
        match widths.into_iter().find(|(_, width)| width % WIDTHS != 0) {
            Some((what, got)) => Err(UnsupportedModel::Width { what, multiple: WIDTHS, got }),
            None => Ok(()),
        }
    }

    /// Checks that a step can compute the blocks of backbone and heads.
    ///
    /// # Errors
    /// [`UnsupportedModel::Weights`].
    pub fn check_blocks(&self) -> Result<(), UnsupportedModel> {
        if let Some(why) = self.unsupported() {
            return Err(UnsupportedModel::Weights { what: "the backbone", why });
        }
        match self.draft {
            Some(DraftShape { input: DraftInput::PrefixAndPath, .. }) => Err(UnsupportedModel::Prefix),
            Some(DraftShape { is_truncated: true, .. }) => Err(UnsupportedModel::Vocabulary),
            Some(DraftShape { blocks: 0, .. }) => Err(UnsupportedModel::Weights {
                what: "the heads",
                why: "have no ResBlocks, which its kernels begin with",
            }),
            _ => Ok(()),
        }
    }

    /// What of the backbone's blocks the kernels do not compute.
    fn unsupported(&self) -> Option<&'static str> {
        let BlockSpec { hidden_size: _, norms, heads, layers, mlp, biases, storage: _, residual_multiplier } =
            self.config.block();
        let NormSpec { kind, eps: _, places, query_key } = norms;
        let MlpSpec::Gated { width: _, activation } = mlp;
        let FamilyTraits { embedding_multiplier, logits, rotary_size, .. } = self.config.family;
        let Biases { qkv: _, o, mlp } = biases;
        let norms_all_heads = match query_key {
            None | Some(QueryKeyNorm::EachHead) => false,
            Some(QueryKeyNorm::AllHeads) => true,
        };
        let checks = [
            (o || mlp, "has a bias in o_proj or in the MLP, which it has no kernels for"),
            (norms_all_heads, "norms all heads of queries and keys together, which it has no kernels for"),
            (kind != NormKind::Rms, "has norms that multiply by 1 + weight, which it has no kernels for"),
            (
                places != NormPlaces::Inputs,
                "norms the outputs of attention and of the MLP, which it has no kernels for",
            ),
            (activation != Activation::Silu, "has a GELU MLP, which it has no kernels for"),
            (heads.softcap.is_some(), "caps its attention scores, which it has no kernels for"),
            (
                layers.only().is_none_or(|layer| layer.rotary.is_none()),
                "has several kinds of layers, which it has no kernels for",
            ),
            (rotary_size.is_some(), "rotates a part of each head, which it has no kernels for"),
            (
                residual_multiplier != 1.0 || embedding_multiplier != 1.0 || logits != LogitSpec::default(),
                "scales embeddings, residuals or logits, which it has no kernels for",
            ),
        ];
        checks.into_iter().find(|(is_met, _)| *is_met).map(|(_, why)| why)
    }

    /// Checks that the tree fits a step.
    ///
    /// # Errors
    /// [`UnsupportedModel::Tree`] and [`UnsupportedModel::Guesses`].
    pub fn check_tree(&self) -> Result<(), UnsupportedModel> {
        let Some(draft) = self.draft else { return Ok(()) };
        let guesses = self.guesses();
        match draft.tree.len() {
            nodes if nodes > MAX_NODES => Err(UnsupportedModel::Tree { nodes }),
            _ if guesses > MAX_GUESSES => Err(UnsupportedModel::Guesses { guesses }),
            _ => Ok(()),
        }
    }

    /// Rows of hidden states that the heads compute logits of at once: one for each Medusa head, or those of a level.
    pub fn guessing_rows(&self) -> i64 {
        self.draft.map_or(0, |draft| match draft.input {
            DraftInput::Hidden => draft.num_heads(),
            DraftInput::HiddenAndPath | DraftInput::PrefixAndPath => draft.level_rows().into_iter().max().unwrap_or(0),
        })
    }

    /// The draft, if its heads are sequential.
    pub fn sequential(&self) -> Option<DraftShape<'a>> {
        self.draft.filter(|draft| draft.input != DraftInput::Hidden)
    }

    /// Guesses taken from each head.
    pub fn guesses(&self) -> usize {
        self.draft.map_or(0, |draft| draft.tree.widths().into_iter().max().unwrap_or(0))
    }

    /// Cache room for `tokens` and a step after them, in whole blocks up to the end of the context.
    pub fn room(&self, tokens: i64) -> i64 {
        let round_up = |tokens: i64, to: i64| (tokens + to - 1) / to * to;
        round_up(tokens + MAX_NODES as i64, BLOCK).min(round_up(self.positions(), GRAIN))
    }

    /// U: positions that a node can have, including those past the end of the context.
    pub fn positions(&self) -> i64 {
        self.config.max_position_embeddings + MAX_NODES as i64
    }

    /// Rows and columns of the most logits from which tokens are chosen.
    pub fn logits(&self) -> [i64; 2] {
        [self.draft.map_or(1, |draft| draft.tree.len() as i64), self.config.vocab_size]
    }

    /// Possible numbers of rows in a step: one node, a prompt piece, the tree.
    pub fn rows_of_steps(&self) -> Vec<i64> {
        let tree = self.draft.map(|draft| draft.tree.len());
        let mut rows: Vec<i64> = CHUNKS.into_iter().chain([1]).chain(tree).map(|rows| rows as i64).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::config::Biases;
    use crate::tree::sparse_tree::SparseTree;

    /// Five heads of one ResBlock each.
    pub(in crate::engine::cuda) fn five(tree: &SparseTree) -> Option<DraftShape<'_>> {
        let parameters = 5 * (4096 * 4096 + 4096 + 32000 * 4096);
        let (input, is_truncated) = (DraftInput::Hidden, false);
        Some(DraftShape { tree, input, blocks: 1, multiplied_out: 0, is_truncated, parameters })
    }

    pub(in crate::engine::cuda) fn tree() -> SparseTree {
        SparseTree::cartesian(&[3, 4, 2, 1, 1]).expect("88 nodes")
    }

    #[test]
    fn room_grows_by_blocks_up_to_the_contexts_end() {
        let config = LlamaConfig { max_position_embeddings: 10_000, ..LlamaConfig::llama_2_7b() };
        let shape = Shape { config: &config, kind: Kind::Half, draft: None };
        let room = [1, 3968, 3969, 8064, 8065, 10_000].map(|tokens| shape.room(tokens));
        assert_eq!(room, [4096, 4096, 8192, 8192, 10_176, 10_176]);
    }

    #[test]
    fn what_has_no_kernels_is_refused_with_its_reason() {
        let checked = |config: &LlamaConfig, kind| Shape { config, kind, draft: None }.check_kernels();
        let config = LlamaConfig::llama_2_7b();
        assert_eq!(checked(&config, Kind::Half), Ok(()));
        assert_eq!(checked(&config, Kind::Float), Err(UnsupportedModel::Dtype { dtype: "float32".into() }));
        let odd = LlamaConfig { head_dim: 96, ..config.clone() };
        assert_eq!(checked(&odd, Kind::Half), Err(UnsupportedModel::HeadSize { head_dim: 96 }));
        let odd = LlamaConfig { hidden_size: 4000, ..config.clone() };
        assert!(matches!(checked(&odd, Kind::Half), Err(UnsupportedModel::Width { what: "hidden size", .. })));
        let with = |tree: &SparseTree| Shape { config: &config, kind: Kind::Half, draft: five(tree) }.check_tree();
        assert_eq!(with(&SparseTree::cartesian(&[16, 6]).unwrap()), Ok(()));
        assert_eq!(with(&SparseTree::cartesian(&[16, 7]).unwrap()), Err(UnsupportedModel::Tree { nodes: 129 }));
        assert_eq!(with(&SparseTree::cartesian(&[17]).unwrap()), Err(UnsupportedModel::Guesses { guesses: 17 }));
        let tree = tree();
        let blocks = |config: &LlamaConfig, draft| Shape { config, kind: Kind::Half, draft }.check_blocks();
        assert_eq!(blocks(&config, five(&tree)), Ok(()));
        let without = five(&tree).map(|draft| DraftShape { blocks: 0, ..draft });
        assert!(matches!(blocks(&config, without), Err(UnsupportedModel::Weights { what: "the heads", .. })));
        let plus_plus = five(&tree).map(|draft| DraftShape { input: DraftInput::PrefixAndPath, ..draft });
        assert_eq!(blocks(&config, plus_plus), Err(UnsupportedModel::Prefix));
        let truncated = five(&tree).map(|draft| DraftShape { is_truncated: true, ..draft });
        assert_eq!(blocks(&config, truncated), Err(UnsupportedModel::Vocabulary));
        let biased = LlamaConfig { biases: Biases { mlp: true, ..Biases::default() }, ..config.clone() };
        assert!(matches!(blocks(&biased, None), Err(UnsupportedModel::Weights { what: "the backbone", .. })));
    }
}
