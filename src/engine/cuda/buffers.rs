//! The buffers that a step writes: their sizes, for planning memory, or the tensors themselves.

// N nodes of a step (at most C), H hidden, Q query heads, G key/value heads, D head size, W = (Q + 2G)·D, I width of the MLP,
// V vocabulary, K heads, P guesses per head, R = K Medusa heads, or the most nodes with children on a level of sequential heads' tree
use tch::Kind;

use super::layout::MAX_NODES;
use super::shape::Shape;
use super::state;
use crate::memory::size::Size;
use crate::model::block_spec::MlpSpec;

/// Number of step results kept on the device, as a ring, for the host to read.
pub const RESULTS: i64 = 8;

macro_rules! buffers {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Every buffer that a step writes: its size (in a `DevicePlan`), or a tensor that never moves.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Buffers<T> {
            $($(#[$doc])* pub $name: T,)*
        }

        impl<T> Buffers<T> {
            /// Maps each buffer.
            pub fn map<U>(&self, mut make: impl FnMut(&T) -> U) -> Buffers<U> {
                Buffers { $($name: make(&self.$name),)* }
            }

            /// Each buffer with its name.
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
    /// `[C, H]`: normalised, the input of matrix products that do not norm it themselves.
    normed_nh,
    /// `[C, W]`: queries, keys and values.
    qkv_nw,
    /// `[C, Q, D]`: attention's output.
    attended_nqd,
    /// `[C, 2I]`: gate and up, of matrix products that do not gate them themselves.
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
    /// `[R, H]`: the heads' hidden states. ResBlocks of Medusa heads read this buffer or `heads_other_rh` and write the other.
    heads_rh,
    /// `[R, H]`: see `heads_rh`. With sequential heads, the hidden state or the embeddings that their first blocks read.
    heads_other_rh,
    /// `[R, V]` float32: the heads' logits.
    head_logits_rv,
    /// `[R, P]` int32: the heads' guesses.
    guesses_rp,
    /// Float32: the sums of sequential heads' first blocks, see `DraftShape::level_sums`.
    level_sums,
    /// `[R, H]` float32: the product of a sequential head's later ResBlock.
    level_product_rh,
}

impl Buffers<Size> {
    /// The buffers of all steps of a shape.
    pub fn of(shape: &Shape) -> Self {
        let config = shape.config;
        let (c, h, v) = (MAX_NODES as i64, config.hidden_size, config.vocab_size);
        let MlpSpec::Gated { width: i, activation: _ } = config.block().mlp;
        let (q, d) = (config.num_attention_heads, config.head_dim);
        let (n, k) = shape.draft.map_or((1, 0), |draft| (draft.tree.len() as i64, draft.tree.max_depth() as i64));
        let (p, r) = (shape.guesses() as i64, shape.guessing_rows());
        let sums: i64 = shape
            .sequential()
            .map_or(0, |draft| draft.level_sums(h).into_iter().map(|[rows, width]| rows * width).sum());
        let products = shape.sequential().map_or(0, |_| r);
        let (sixteen, float, int) = (shape.kind, Kind::Float, Kind::Int);
        Self {
            state: Size::new([state::LEN], int),
            results_rt: Size::new([RESULTS, state::RESULT_HEAD + k + 1], int),
            tokens_n: Size::new([c], int),
            x_nh: Size::new([c, h], sixteen),
            normed_nh: Size::new([c, h], sixteen),
            qkv_nw: Size::new([c, config.query_size() + 2 * config.key_value_size()], sixteen),
            attended_nqd: Size::new([c, q, d], sixteen),
            gate_up_ni: Size::new([c, 2 * i], sixteen),
            product_ni: Size::new([c, i], sixteen),
            hidden_nh: Size::new([c, h], sixteen),
            logits_nv: Size::new([n, v], float),
            best_n: Size::new([n], int),
            log_p_n: Size::new([n], float),
            entropy_n: Size::new([n], float),
            path_d: Size::new([k + 1], int),
            heads_rh: Size::new([r, h], sixteen),
            heads_other_rh: Size::new([r, h], sixteen),
            head_logits_rv: Size::new([r, v], float),
            guesses_rp: Size::new([r.max(1), p.max(1)], int), // without heads, nodes read one entry whose value does not matter
            level_sums: Size::new([sums], float),
            level_product_rh: Size::new([products, h], float),
        }
    }
}
