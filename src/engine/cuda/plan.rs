//! The GPU memory that decoding takes, computed before anything is allocated.

// L layers, G key/value heads, S room for tokens, D head size, K heads, H hidden, U positions
use std::fmt;

use tch::Kind;

use super::buffers::Buffers;
use super::draft::{DraftInput, DraftShape};
use super::launches::{self, AttentionParts, SliceRoom};
use super::layout::MAX_NODES;
use super::shape::{GRAIN, Shape};
use crate::memory::size::Size;
use crate::memory::weights::StageShape;
use crate::model::stored::dense::Dense;
use crate::nvidia::cublas_lt::WORKSPACE_BYTES;
use crate::nvidia::gemm::SplitRoom;

/// Every buffer, the cache, and what is allocated beside the backbone's own weights.
#[derive(Debug, Clone, PartialEq)]
pub struct DevicePlan {
    /// Buffers that steps write.
    pub buffers: Buffers<Size>,
    /// `[L, 2, G, S, D]`.
    pub cache_l2gsd: Size,
    /// `[2, U, D/2]` float32: cosines and sines of every position of the context.
    pub rotations_2ud: Size,
    /// `[U]` float64: random numbers to draw with.
    pub uniforms_u: Size,
    /// Copies of the heads' weights, laid out for the kernels.
    pub head_copies: Vec<Size>,
    /// Scratch memory of kernels: parts of attention, the heads' guesses per slice, slices of logits, parts of matrix products, cublasLt's
    /// workspace.
    pub between_kernels_bytes: u64,
    /// Already allocated: the weights of backbone and heads.
    pub weight_bytes: u64,
    /// Largest number of tokens in a text.
    pub context: i64,
}

/// A plan that does not fit into free memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortage {
    plan: DevicePlan,
    free_bytes: u64,
}

impl DevicePlan {
    /// The plan for a cache with room for `room` tokens.
    pub fn of(shape: &Shape, room: i64) -> Self {
        let (config, element) = (shape.config, shape.kind.elt_size_in_bytes() as u64);
        let backbone = StageShape::whole(config.num_hidden_layers).weight_bytes(config, &Dense(element), element);
        let heads = shape.draft.map_or(0, |draft| draft.parameters.unsigned_abs() * element);
        Self {
            buffers: Buffers::of(shape),
            cache_l2gsd: Size::for_cache(config, room, shape.kind),
            rotations_2ud: Size::new([2, shape.positions(), config.head_dim / 2], Kind::Float),
            uniforms_u: Size::new([shape.positions()], Kind::Double),
            head_copies: shape.draft.map_or(vec![], |draft| copies(shape, draft)),
            between_kernels_bytes: between_kernels(shape),
            weight_bytes: backbone + heads,
            context: config.max_position_embeddings,
        }
    }

    /// Bytes to allocate: everything except the weights.
    pub fn bytes(&self) -> u64 {
        self.rows().iter().map(|(_, bytes)| bytes).sum()
    }

    /// S, the number of tokens that the cache has room for.
    pub fn room(&self) -> i64 {
        self.cache_l2gsd.shape[3]
    }

    /// Bytes by purpose, for messages.
    fn rows(&self) -> Vec<(String, u64)> {
        let logits = self.buffers.logits_nv.bytes() + self.buffers.head_logits_rv.bytes();
        let buffers: u64 = self.buffers.named().iter().map(|(_, size)| size.bytes()).sum();
        vec![
            (format!("cache of {} tokens", self.room()), self.cache_l2gsd.bytes()),
            ("copies of heads' weights".into(), self.head_copies.iter().map(Size::bytes).sum()),
            ("logits".into(), logits),
            ("other buffers of a step".into(), buffers - logits + self.between_kernels_bytes),
            ("rotations and draws".into(), self.rotations_2ud.bytes() + self.uniforms_u.bytes()),
        ]
    }

    fn beside_weights(&self) -> String {
        let rows = self.rows().into_iter().map(|(what, bytes)| format!("{what} {}", gibibytes(bytes)));
        rows.collect::<Vec<_>>().join(", ")
    }

    /// Checks that the plan fits into free memory.
    ///
    /// # Errors
    /// [`Shortage`] lists the memory by purpose, and the context that would fit.
    pub fn check_fits(&self, free_bytes: u64) -> Result<(), Box<Shortage>> {
        if self.bytes() <= free_bytes {
            return Ok(());
        }
        Err(Box::new(Shortage { plan: self.clone(), free_bytes }))
    }

    /// The longest context whose whole cache fits into free memory; `None` if not even the shortest does.
    pub fn largest_context(&self, free_bytes: u64) -> Option<i64> {
        let a_position = |size: &Size| size.bytes() / size.shape[size.shape.len() - 2].unsigned_abs();
        let uniform = self.uniforms_u.kind.elt_size_in_bytes() as u64;
        let a_token = a_position(&self.cache_l2gsd) + a_position(&self.rotations_2ud) + uniform;
        let per_token = self.cache_l2gsd.bytes() + self.rotations_2ud.bytes() + self.uniforms_u.bytes();
        let rest = self.bytes() - per_token;
        let tokens = (free_bytes.saturating_sub(rest) / a_token).cast_signed() / GRAIN * GRAIN - MAX_NODES as i64;
        (tokens >= GRAIN).then_some(tokens.min(self.context))
    }
}

/// Weights of the heads that are laid out anew for the kernels: of Medusa heads the ResBlocks of all heads stacked, of sequential heads the
/// first blocks by what they read; of both, W2 of a low rank multiplied out.
fn copies(shape: &Shape, draft: DraftShape) -> Vec<Size> {
    let (k, h, v) = (draft.num_heads(), shape.config.hidden_size, shape.config.vocab_size);
    let size = |axes: &[i64]| Size { shape: axes.to_vec(), kind: shape.kind };
    let blocks = match draft.input {
        DraftInput::Hidden => (0..draft.blocks).flat_map(|_| [size(&[k, h, h]), size(&[k, h])]).collect(),
        DraftInput::HiddenAndPath | DraftInput::PrefixAndPath => {
            let token_parts = (0..k).map(|level| size(&[2 * (k - level) * h, h]));
            [size(&[2 * k * h, h]), size(&[2 * k * h])].into_iter().chain(token_parts).collect()
        }
    };
    [blocks, vec![size(&[v, h]); draft.multiplied_out]].concat()
}

/// Bytes of the kernels' scratch memory.
fn between_kernels(shape: &Shape) -> u64 {
    let config = shape.config;
    let attention = shape.rows_of_steps().into_iter().map(|rows| {
        let queries = [rows, config.num_attention_heads, config.head_dim];
        let [parts, rows] = AttentionParts::counts(queries, config.num_key_value_heads);
        Size::new([parts, rows, config.head_dim + 2], Kind::Float).bytes()
    });
    let guesses = shape.draft.map_or(0, |_| {
        let size = [shape.guessing_rows(), config.vocab_size];
        Size { shape: launches::guess_parts_size(size, shape.guesses() as i64), kind: Kind::Int64 }.bytes()
    });
    let slices = SliceRoom::sizes(shape.logits()).map(|(shape, kind)| Size { shape, kind }.bytes());
    let workspace = SplitRoom::bytes() + WORKSPACE_BYTES.unsigned_abs();
    attention.sum::<u64>() + guesses + slices.iter().sum::<u64>() + workspace
}

impl fmt::Display for DevicePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [weights, all] = [self.weight_bytes, self.weight_bytes + self.bytes()].map(gibibytes);
        write!(f, "{all} of memory: weights {weights}, {}", self.beside_weights())
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, free_bytes } = self;
        let weights = gibibytes(plan.weight_bytes);
        write!(
            f,
            "too little memory is free: {}, and beside {weights} of weights decoding takes {}",
            gibibytes(*free_bytes),
            gibibytes(plan.bytes())
        )?;
        write!(f, " ({}); ", plan.beside_weights())?;
        match plan.largest_context(*free_bytes) {
            Some(context) => write!(f, "--max-context {context} would fit"),
            None => write!(f, "no context would fit: use a GPU with more memory, or a smaller tree"),
        }
    }
}

impl std::error::Error for Shortage {}

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cuda::shape::tests::{five, tree};
    use crate::model::block_spec::QueryKeyNorm;
    use crate::model::config::{Biases, FamilyTraits, LlamaConfig};
    use crate::tree::sparse_tree::SparseTree;

    #[test]
    fn seven_billion_weights_with_five_heads_and_a_whole_cache_fit_eighteen_gigabytes() {
        let (config, tree) = (LlamaConfig::llama_2_7b(), tree());
        let shape = Shape { config: &config, kind: Kind::BFloat16, draft: five(&tree) };
        let plan = DevicePlan::of(&shape, shape.room(4096));
        // Keys and values of a token: 32 layers · 2 · 32 heads · 128 numbers of 2 bytes.
        assert_eq!(plan.cache_l2gsd.bytes(), (4096 + 128) * 524_288);
        // 6,738,415,616 weights of the backbone; 5 · (4096·4096 + 4096 + 32000·4096) of the heads.
        assert_eq!(plan.weight_bytes, 2 * (6_738_415_616 + 739_266_560));
        let all = plan.weight_bytes + plan.bytes();
        assert!(all < 18_000_000_000 && all > 17_000_000_000, "{all} bytes: {plan}");
        assert_eq!(plan.check_fits(18_000_000_000 - plan.weight_bytes), Ok(()));
        assert_eq!(
            plan.to_string(),
            "16.25 GiB of memory: weights 13.93 GiB, cache of 4224 tokens 2.06 GiB, copies of heads' weights 0.16 GiB, \
             logits 0.01 GiB, other buffers of a step 0.09 GiB, rotations and draws 0.00 GiB"
        );
    }

    #[test]
    fn sequential_heads_take_a_copy_of_their_first_blocks_and_the_sums_of_each_level() {
        let (config, tree) = (LlamaConfig::llama_2_7b(), SparseTree::cartesian(&[3, 2, 2, 1]).expect("34 nodes"));
        let (input, medusa_draft) = (DraftInput::HiddenAndPath, five(&tree).expect("heads"));
        let plan = |draft| {
            let shape = Shape { config: &config, kind: Kind::BFloat16, draft: Some(draft) };
            DevicePlan::of(&shape, shape.room(4096))
        };
        let (medusa, hydra) = (plan(medusa_draft), plan(DraftShape { input, ..medusa_draft }));
        let copies = |plan: &DevicePlan| plan.head_copies.iter().map(Size::bytes).sum::<u64>();
        // Four heads read two to five rows of 4096 numbers, in two layers each; 1, 3, 6 and 12 nodes have children.
        assert_eq!(copies(&hydra), 2 * (2 * (2 + 3 + 4 + 5) * 4096 * 4096 + 2 * 4 * 4096));
        let sums = 8 + 8 + 3 * 6 + 6 * 4 + 12 * 2;
        assert_eq!(hydra.buffers.level_sums.bytes(), 4 * sums * 4096);
        // Rows of heads and logits are the nodes of the widest level, not the heads; a later block's product is float32.
        let row_bytes = 2 * 2 * 4096 + 4 * 32_000 + 4 * 3 + 8 * 8 * 3;
        let more = (12 - 4) * row_bytes + 12 * 4 * 4096 + 4 * sums * 4096 + copies(&hydra);
        assert_eq!(hydra.bytes(), medusa.bytes() - copies(&medusa) + more);
    }

    #[test]
    fn biases_and_norms_count_as_weights() {
        let qwen2_5_7b = LlamaConfig {
            hidden_size: 3584,
            intermediate_size: 18_944,
            num_hidden_layers: 28,
            num_attention_heads: 28,
            num_key_value_heads: 4,
            vocab_size: 152_064,
            biases: Biases { qkv: true, ..Biases::default() },
            ..LlamaConfig::llama_2_7b()
        };
        let family = FamilyTraits { query_key_norm: Some(QueryKeyNorm::EachHead), ..FamilyTraits::default() };
        let qwen3_8b = LlamaConfig {
            intermediate_size: 12_288,
            num_hidden_layers: 36,
            num_key_value_heads: 8,
            vocab_size: 151_936,
            family,
            ..LlamaConfig::llama_2_7b()
        };
        // The published models' numbers of parameters.
        for (config, parameters) in [(qwen2_5_7b, 7_615_616_512), (qwen3_8b, 8_190_735_360)] {
            let shape = Shape { config: &config, kind: Kind::BFloat16, draft: None };
            assert_eq!((shape.check_kernels(), shape.check_blocks()), (Ok(()), Ok(())));
            assert_eq!(DevicePlan::of(&shape, shape.room(1)).weight_bytes, 2 * parameters);
        }
    }

    #[test]
    fn what_does_not_fit_is_reported_with_the_context_that_would() {
        let (config, tree) = (LlamaConfig::llama_2_7b(), tree());
        let check = |context: i64, free| {
            let config = LlamaConfig { max_position_embeddings: context, ..config.clone() };
            let shape = Shape { config: &config, kind: Kind::BFloat16, draft: five(&tree) };
            DevicePlan::of(&shape, shape.room(context)).check_fits(free)
        };
        let free = 1 << 30;
        let error = check(4096, free).unwrap_err().to_string();
        assert!(error.starts_with("too little memory is free: 1.00 GiB, and beside 13.93 GiB of weights"), "{error}");
        let (_, context) = error.split_once("--max-context ").expect("a context that would fit");
        let context: i64 = context.split(' ').next().unwrap().parse().unwrap();
        assert!(check(context, free).is_ok() && check(context + 2 * GRAIN, free).is_err(), "{context}");
        let error = check(4096, 1 << 20).unwrap_err().to_string();
        assert!(error.ends_with("no context would fit: use a GPU with more memory, or a smaller tree"), "{error}");
    }
}
