//! What decoding on a GPU takes of its memory, on paper, and what it cannot decode at all: both are known before anything is allocated.

// L layers, N nodes of a step (at most C), H hidden, Q query heads, G key/value heads, D head size, W = (Q + 2G)·D, I width of the MLP,
// V vocabulary, K heads, P guesses a head, S room for tokens, U positions
use std::fmt;

use tch::Kind;

use super::draft::{DeviceDraft, DraftShape};
use super::launches::{self, AttentionParts};
use super::layout::MAX_NODES;
use super::state;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::nvidia::gemm::WORKSPACE_BYTES;

/// The cache's room grows by whole blocks of tokens.
pub const BLOCK: i64 = 4096;
/// Where the context ends within a block, room is rounded up to this.
const GRAIN: i64 = 64;
/// What the widths of products are multiples of.
const WIDTHS: i64 = 64;
/// Rows of a piece of a prompt: the smallest that holds what is left of it.
pub const CHUNKS: [usize; 3] = [8, 32, MAX_NODES];
/// Head sizes that there are kernels for.
pub const HEAD_SIZES: [i64; 2] = [64, 128];
/// Most guesses of a head.
pub const MAX_GUESSES: usize = 16;
/// Results that the device keeps for the host to read.
pub const RESULTS: i64 = 8;

/// Why a backbone, heads or a tree cannot be decoded on a GPU, or not on this one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Unfit {
    /// Another dtype than 16 bits.
    #[error("its kernels compute in bfloat16 and float16, the backbone in {dtype}; use --dtype bfloat16")]
    Dtype {
        /// The backbone's.
        dtype: String,
    },
    /// A head size without kernels.
    #[error("its kernels are for heads of size 64 and 128, the backbone's have {head_dim}")]
    HeadSize {
        /// The backbone's.
        head_dim: i64,
    },
    /// A width that 16-byte loads do not divide.
    #[error("its kernels need a {what} that is a multiple of {multiple}, the backbone's is {got}")]
    Width {
        /// `hidden size` or so.
        what: &'static str,
        /// What it must be a multiple of.
        multiple: i64,
        /// The backbone's.
        got: i64,
    },
    /// Weights that are no plain matrices.
    #[error("{what} {why}")]
    Weights {
        /// `the backbone` or `the heads`.
        what: &'static str,
        /// The obstacle.
        why: &'static str,
    },
    /// Too large a tree.
    #[error(
        "a step has at most {MAX_NODES} nodes with the root, the tree has {nodes}; make a smaller one with `medusa tree`"
    )]
    Tree {
        /// With the root.
        nodes: usize,
    },
    /// Too wide a tree.
    #[error(
        "a head makes at most {MAX_GUESSES} guesses, the tree asks for {guesses}; make a narrower one with `medusa tree`"
    )]
    Guesses {
        /// Of its widest level.
        guesses: usize,
    },
    /// Too little memory.
    #[error("too little memory is free: {0}")]
    Memory(Box<Shortage>),
}

/// What was needed and what there was.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortage {
    plan: DevicePlan,
    free_bytes: u64,
}

/// A buffer on paper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    /// Its axes.
    pub shape: Vec<i64>,
    /// Its dtype.
    pub kind: Kind,
}

impl Size {
    fn new<const M: usize>(shape: [i64; M], kind: Kind) -> Self {
        Self { shape: shape.to_vec(), kind }
    }

    /// In memory.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<i64>().unsigned_abs() * self.kind.elt_size_in_bytes() as u64
    }
}

macro_rules! buffers {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Everything that a step writes: sizes on paper ([`DevicePlan`]), or tensors that never move.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Buffers<T> {
            $($(#[$doc])* pub $name: T,)*
        }

        impl<T> Buffers<T> {
            /// The same buffers as something else.
            pub fn map<U>(&self, mut make: impl FnMut(&T) -> U) -> Buffers<U> {
                Buffers { $($name: make(&self.$name),)* }
            }

            /// Each with its name.
            pub fn named(&self) -> Vec<(&'static str, &T)> {
                vec![$((stringify!($name), &self.$name),)*]
            }
        }
    };
}

buffers! {
    /// Int32, see [`state`].
    state,
    /// `[RESULTS, RESULT_HEAD + K + 1]` int32: what the host reads of each step.
    results_rt,
    /// `[C]` int32: the nodes' tokens.
    tokens_n,
    /// `[C, H]`: the residual stream.
    x_nh,
    /// `[C, H]`: normed, the input of products.
    normed_nh,
    /// `[C, H]`: what a block adds to the residual stream.
    delta_nh,
    /// `[C, W]`: queries, keys and values.
    qkv_nw,
    /// `[C, Q, D]`: rotated queries.
    q_nqd,
    /// `[C, Q, D]`: attention's output.
    attended_nqd,
    /// `[C, 2I]`: gate and up.
    gate_up_ni,
    /// `[C, I]`: SiLU(gate)·up.
    product_ni,
    /// `[C, H]`: after the final norm.
    hidden_nh,
    /// `[N, V]` float32: the LM head's logits.
    logits_nv,
    /// `[N]` int32: the most probable token after each node.
    best_n,
    /// `[N]` float32: log-probability of each node's token.
    log_p_n,
    /// `[N]` float32: entropy after each node.
    entropy_n,
    /// `[K + 1]` int32: accepted nodes.
    path_d,
    /// `[K, H]`: a head's hidden state, before and after a ResBlock.
    heads_kh,
    /// `[K, H]`: the other one.
    heads_other_kh,
    /// `[K, V]` float32: the heads' logits.
    head_logits_kv,
    /// `[K, P]` int32: their guesses.
    guesses_kp,
}

/// Every buffer, the cache and what is kept beside the backbone's own weights.
#[derive(Debug, Clone, PartialEq)]
pub struct DevicePlan {
    /// What steps write.
    pub buffers: Buffers<Size>,
    /// `[L, 2, G, S, D]`.
    pub cache_l2gsd: Size,
    /// `[2, U, D/2]` float32: cosines and sines of every position of the context.
    pub rotations_2ud: Size,
    /// `[U]` float64: the numbers that are drawn with.
    pub uniforms_u: Size,
    /// `[K, H, H]` for each ResBlock: the heads' matrices in one piece, a copy.
    pub blocks_khh: Vec<Size>,
    /// What kernels use among themselves: parts of attention, the heads' guesses slice by slice, the workspace of cublasLt.
    pub between_kernels_bytes: u64,
    /// Already allocated: the weights of backbone and heads.
    pub weight_bytes: u64,
    /// Most tokens of a text.
    pub context: i64,
}

/// What a plan is made for.
#[derive(Debug, Clone, Copy)]
pub struct Shape<'a> {
    /// The backbone's.
    pub config: &'a LlamaConfig,
    /// What it computes in.
    pub kind: Kind,
    /// Heads and the tree that they fill.
    pub draft: Option<DraftShape<'a>>,
}

impl<'a> Shape<'a> {
    /// Of a backbone and a drafter.
    pub fn of(backbone: &'a Llama, draft: Option<&DeviceDraft<'a>>) -> Self {
        Self { config: &backbone.config, kind: backbone.kind(), draft: draft.map(|draft| draft.shape) }
    }

    /// Whether there are kernels for it.
    ///
    /// # Errors
    /// [`Unfit`] says what there are none for.
    pub fn check_kernels(&self) -> Result<(), Unfit> {
        let config = self.config;
        if !matches!(self.kind, Kind::BFloat16 | Kind::Half) {
            return Err(Unfit::Dtype { dtype: format!("{:?}", self.kind).to_lowercase() });
        }
        if !HEAD_SIZES.contains(&config.head_dim) {
            return Err(Unfit::HeadSize { head_dim: config.head_dim });
        }
        let widths = [("hidden size", config.hidden_size), ("width of the MLP", config.intermediate_size)];
        match widths.into_iter().find(|(_, width)| width % WIDTHS != 0) {
            Some((what, got)) => Err(Unfit::Width { what, multiple: WIDTHS, got }),
            None => Ok(()),
        }
    }

    /// Whether a step computes such blocks, the backbone's and the heads'.
    ///
    /// # Errors
    /// [`Unfit::Weights`].
    pub fn check_blocks(&self) -> Result<(), Unfit> {
        if self.config.block().biases.any() {
            let why = "has linear layers with a bias, which it has no kernels for";
            return Err(Unfit::Weights { what: "the backbone", why });
        }
        match self.draft {
            Some(DraftShape { blocks: 0, .. }) => {
                Err(Unfit::Weights { what: "the heads", why: "have no ResBlocks, which its kernels begin with" })
            }
            _ => Ok(()),
        }
    }

    /// Whether a step can hold the tree.
    ///
    /// # Errors
    /// [`Unfit::Tree`] and [`Unfit::Guesses`].
    pub fn check_tree(&self) -> Result<(), Unfit> {
        let Some(draft) = self.draft else { return Ok(()) };
        let guesses = self.guesses();
        match draft.tree.len() {
            nodes if nodes > MAX_NODES => Err(Unfit::Tree { nodes }),
            _ if guesses > MAX_GUESSES => Err(Unfit::Guesses { guesses }),
            _ => Ok(()),
        }
    }

    /// Guesses taken of each head.
    pub fn guesses(&self) -> usize {
        self.draft.map_or(0, |draft| draft.tree.widths().into_iter().max().unwrap_or(0))
    }

    /// Room for `tokens` and a step behind them, in whole blocks up to the context's end.
    pub fn room(&self, tokens: i64) -> i64 {
        let round_up = |tokens: i64, to: i64| (tokens + to - 1) / to * to;
        round_up(tokens + MAX_NODES as i64, BLOCK).min(round_up(self.positions(), GRAIN))
    }

    /// U: positions that a node can stand at, be it behind the context's end.
    pub fn positions(&self) -> i64 {
        self.config.max_position_embeddings + MAX_NODES as i64
    }

    /// What decoding takes with room for `room` tokens.
    pub fn plan(&self, room: i64) -> DevicePlan {
        let config = self.config;
        let (layers, g, d) =
            (config.num_hidden_layers.cast_signed() as i64, config.num_key_value_heads, config.head_dim);
        let blocks = self.draft.map_or(vec![], |draft| {
            let block = Size::new([draft.tree.max_depth() as i64, config.hidden_size, config.hidden_size], self.kind);
            vec![block; draft.blocks]
        });
        let parameters = config.parameters() + self.draft.map_or(0, |draft| draft.parameters);
        DevicePlan {
            buffers: self.buffers(),
            cache_l2gsd: Size::new([layers, 2, g, room, d], self.kind),
            rotations_2ud: Size::new([2, self.positions(), d / 2], Kind::Float),
            uniforms_u: Size::new([self.positions()], Kind::Double),
            blocks_khh: blocks,
            between_kernels_bytes: self.between_kernels(),
            weight_bytes: parameters.unsigned_abs() * self.kind.elt_size_in_bytes() as u64,
            context: config.max_position_embeddings,
        }
    }

    /// Rows that a step can have: one node, a piece of a prompt, the tree.
    pub fn rows_of_steps(&self) -> Vec<i64> {
        let tree = self.draft.map(|draft| draft.tree.len());
        let mut rows: Vec<i64> = CHUNKS.into_iter().chain([1]).chain(tree).map(|rows| rows as i64).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    fn between_kernels(&self) -> u64 {
        let config = self.config;
        let attention = self.rows_of_steps().into_iter().map(|rows| {
            let queries = [rows, config.num_attention_heads, config.head_dim];
            let [parts, rows] = AttentionParts::counts(queries, config.num_key_value_heads);
            Size::new([parts, rows, config.head_dim + 2], Kind::Float).bytes()
        });
        let guesses = self.draft.map_or(0, |draft| {
            let size = [draft.tree.max_depth() as i64, config.vocab_size];
            Size { shape: launches::guess_parts_size(size, self.guesses() as i64), kind: Kind::Int64 }.bytes()
        });
        attention.sum::<u64>() + guesses + WORKSPACE_BYTES.unsigned_abs()
    }

    fn buffers(&self) -> Buffers<Size> {
        let (config, kind) = (self.config, self.kind);
        let (c, h, v, i) = (MAX_NODES as i64, config.hidden_size, config.vocab_size, config.intermediate_size);
        let (q, d) = (config.num_attention_heads, config.head_dim);
        let (n, k) = self.draft.map_or((1, 0), |draft| (draft.tree.len() as i64, draft.tree.max_depth() as i64));
        let p = self.guesses() as i64;
        let (sixteen, float, int) = (kind, Kind::Float, Kind::Int);
        Buffers {
            state: Size::new([state::LEN], int),
            results_rt: Size::new([RESULTS, state::RESULT_HEAD + k + 1], int),
            tokens_n: Size::new([c], int),
            x_nh: Size::new([c, h], sixteen),
            normed_nh: Size::new([c, h], sixteen),
            delta_nh: Size::new([c, h], sixteen),
            qkv_nw: Size::new([c, config.query_size() + 2 * config.key_value_size()], sixteen),
            q_nqd: Size::new([c, q, d], sixteen),
            attended_nqd: Size::new([c, q, d], sixteen),
            gate_up_ni: Size::new([c, 2 * i], sixteen),
            product_ni: Size::new([c, i], sixteen),
            hidden_nh: Size::new([c, h], sixteen),
            logits_nv: Size::new([n, v], float),
            best_n: Size::new([n], int),
            log_p_n: Size::new([n], float),
            entropy_n: Size::new([n], float),
            path_d: Size::new([k + 1], int),
            heads_kh: Size::new([k, h], sixteen),
            heads_other_kh: Size::new([k, h], sixteen),
            head_logits_kv: Size::new([k, v], float),
            guesses_kp: Size::new([k.max(1), p.max(1)], int), // nodes without heads read one that does not matter
        }
    }
}

impl DevicePlan {
    /// Bytes to allocate: everything but the weights.
    pub fn bytes(&self) -> u64 {
        self.rows().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Room for tokens, S.
    pub fn room(&self) -> i64 {
        self.cache_l2gsd.shape[3]
    }

    /// What takes how much.
    fn rows(&self) -> Vec<(String, u64)> {
        let logits = self.buffers.logits_nv.bytes() + self.buffers.head_logits_kv.bytes();
        let buffers: u64 = self.buffers.named().iter().map(|(_, size)| size.bytes()).sum();
        vec![
            (format!("cache of {} tokens", self.room()), self.cache_l2gsd.bytes()),
            ("the heads' ResBlocks in one piece".into(), self.blocks_khh.iter().map(Size::bytes).sum()),
            ("logits".into(), logits),
            ("other buffers of a step".into(), buffers - logits + self.between_kernels_bytes),
            ("rotations and draws".into(), self.rotations_2ud.bytes() + self.uniforms_u.bytes()),
        ]
    }

    fn beside_weights(&self) -> String {
        let rows = self.rows().into_iter().map(|(what, bytes)| format!("{what} {}", gibibytes(bytes)));
        rows.collect::<Vec<_>>().join(", ")
    }

    /// Whether it fits into what is free.
    ///
    /// # Errors
    /// [`Unfit::Memory`] says what takes how much, and what would fit.
    pub fn check_fits(&self, free_bytes: u64) -> Result<(), Unfit> {
        if self.bytes() <= free_bytes {
            return Ok(());
        }
        Err(Unfit::Memory(Box::new(Shortage { plan: self.clone(), free_bytes })))
    }

    /// The longest context whose whole cache fits into what is free; `None` where not even the shortest does.
    pub fn largest_context(&self, free_bytes: u64) -> Option<i64> {
        let of_position = |size: &Size| size.bytes() / size.shape[size.shape.len() - 2].unsigned_abs();
        let uniform = self.uniforms_u.kind.elt_size_in_bytes() as u64;
        let a_token = of_position(&self.cache_l2gsd) + of_position(&self.rotations_2ud) + uniform;
        let per_token = self.cache_l2gsd.bytes() + self.rotations_2ud.bytes() + self.uniforms_u.bytes();
        let rest = self.bytes() - per_token;
        let tokens = (free_bytes.saturating_sub(rest) / a_token).cast_signed() / GRAIN * GRAIN - MAX_NODES as i64;
        (tokens >= GRAIN).then_some(tokens.min(self.context))
    }
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
            "{}, and beside {weights} of weights decoding takes {}",
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

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::RopeScaling;
    use crate::tree::sparse_tree::SparseTree;

    /// Llama 2 7B with a context of 4096.
    fn llama_7b() -> LlamaConfig {
        LlamaConfig {
            model_type: "llama".into(),
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            vocab_size: 32000,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            sliding_window: None,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
        }
    }

    /// Five heads of one ResBlock each.
    fn five(tree: &SparseTree) -> Option<DraftShape<'_>> {
        Some(DraftShape { tree, blocks: 1, parameters: 5 * (4096 * 4096 + 4096 + 32000 * 4096) })
    }

    fn tree() -> SparseTree {
        SparseTree::cartesian(&[3, 4, 2, 1, 1]).expect("88 nodes")
    }

    #[test]
    fn seven_billion_weights_with_five_heads_and_a_whole_cache_fit_eighteen_gigabytes() {
        let (config, tree) = (llama_7b(), tree());
        let shape = Shape { config: &config, kind: Kind::BFloat16, draft: five(&tree) };
        let plan = shape.plan(shape.room(4096));
        // Keys and values of a token: 32 layers · 2 · 32 heads · 128 numbers of 2 bytes.
        assert_eq!(plan.cache_l2gsd.bytes(), (4096 + 128) * 524_288);
        // 6,738,415,616 weights of the backbone; 5 · (4096·4096 + 4096 + 32000·4096) of the heads.
        assert_eq!(plan.weight_bytes, 2 * (6_738_415_616 + 739_266_560));
        let all = plan.weight_bytes + plan.bytes();
        assert!(all < 18_000_000_000 && all > 17_000_000_000, "{all} bytes: {plan}");
        assert_eq!(plan.check_fits(18_000_000_000 - plan.weight_bytes), Ok(()));
        assert_eq!(
            plan.to_string(),
            "16.23 GiB of memory: weights 13.93 GiB, cache of 4224 tokens 2.06 GiB, the heads' ResBlocks in one piece 0.16 GiB, \
             logits 0.01 GiB, other buffers of a step 0.07 GiB, rotations and draws 0.00 GiB"
        );
    }

    #[test]
    fn what_does_not_fit_is_told_with_the_context_that_would() {
        let (config, tree) = (llama_7b(), tree());
        let check = |context: i64, free| {
            let config = LlamaConfig { max_position_embeddings: context, ..config.clone() };
            let shape = Shape { config: &config, kind: Kind::BFloat16, draft: five(&tree) };
            shape.plan(shape.room(context)).check_fits(free)
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

    #[test]
    fn room_grows_by_blocks_up_to_the_contexts_end() {
        let config = LlamaConfig { max_position_embeddings: 10_000, ..llama_7b() };
        let shape = Shape { config: &config, kind: Kind::Half, draft: None };
        let room = [1, 3968, 3969, 8064, 8065, 10_000].map(|tokens| shape.room(tokens));
        assert_eq!(room, [4096, 4096, 8192, 8192, 10_176, 10_176]);
    }

    #[test]
    fn what_has_no_kernels_is_refused_with_its_reason() {
        let of = |config: &LlamaConfig, kind| Shape { config, kind, draft: None }.check_kernels();
        let config = llama_7b();
        assert_eq!(of(&config, Kind::Half), Ok(()));
        assert_eq!(of(&config, Kind::Float), Err(Unfit::Dtype { dtype: "float".into() }));
        let odd = LlamaConfig { head_dim: 96, ..config.clone() };
        assert_eq!(of(&odd, Kind::Half), Err(Unfit::HeadSize { head_dim: 96 }));
        let odd = LlamaConfig { hidden_size: 4000, ..config.clone() };
        assert!(matches!(of(&odd, Kind::Half), Err(Unfit::Width { what: "hidden size", .. })));
        let with = |tree: &SparseTree| Shape { config: &config, kind: Kind::Half, draft: five(tree) }.check_tree();
        assert_eq!(with(&SparseTree::cartesian(&[16, 6]).unwrap()), Ok(()));
        assert_eq!(with(&SparseTree::cartesian(&[16, 7]).unwrap()), Err(Unfit::Tree { nodes: 129 }));
        assert_eq!(with(&SparseTree::cartesian(&[17]).unwrap()), Err(Unfit::Guesses { guesses: 17 }));
        let tree = tree();
        let blocks = |config: &LlamaConfig, draft| Shape { config, kind: Kind::Half, draft }.check_blocks();
        assert_eq!(blocks(&config, five(&tree)), Ok(()));
        let without = five(&tree).map(|draft| DraftShape { blocks: 0, ..draft });
        assert!(matches!(blocks(&config, without), Err(Unfit::Weights { what: "the heads", .. })));
        let biased = LlamaConfig { mlp_bias: true, ..config.clone() };
        assert!(matches!(blocks(&biased, None), Err(Unfit::Weights { what: "the backbone", .. })));
    }
}
