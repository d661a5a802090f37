//! What each kernel computes, in slow and simple form, on tensors on any device. As on the GPU, the functions write to output
//! tensors of the right size. Values are float32 until they are rounded once, to the dtype of the output.
//!
//! Integers are int32. Ties always go to the lower id. If logits contain NaN or infinity, no token is chosen: [`NO_TOKEN`].

// N rows of a step, H hidden, Q query heads, G key/value heads, D head size, W = (Q + 2G)·D, I width of the MLP, V vocabulary,
// K heads, S room for tokens, P guesses per head, R rows of results, L layers
use tch::{Device, Kind, Tensor};

use super::layout::{Nodes, Rotations};
use super::state::{self, RESULT_HEAD, Slot};
use crate::engine::sample;
use crate::model::llama::NO_TOKEN;
use crate::nvidia::gemm::{Ending, Operands};
use crate::tree::accept::TypicalAcceptance;

/// Copies row `tokens_n[n]` of the embedding `[V, H]` to row n of `x_nh`.
pub fn embed(tokens_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) {
    write(x_nh, &table_vh.index_select(0, tokens_n));
}

/// `y = x / √(mean(x²) + eps) · weight` over the last axis (Zhang and Sennrich 2019).
pub fn rms_norm(x_nh: &Tensor, weight_h: &Tensor, eps: f64, y_nh: &Tensor) {
    write(y_nh, &normed(&float(x_nh), weight_h, eps));
}

/// [`rms_norm`] in float32.
fn normed(x_nh: &Tensor, weight_h: &Tensor, eps: f64) -> Tensor {
    let mean_square_n1 = (x_nh * x_nh).mean_dim(-1, true, Kind::Float);
    x_nh * (mean_square_n1 + eps).rsqrt() * float(weight_h)
}

/// Positions of a step's rows: after the committed tokens, each at its depth.
#[derive(Debug, Clone, Copy)]
pub struct StepPositions<'a> {
    /// Depths and attention mask.
    pub nodes: &'a Nodes,
    /// See [`Slot`].
    pub state: &'a Tensor,
}

impl StepPositions<'_> {
    /// Tokens in the cache, which waits for the device.
    pub(super) fn context(&self) -> i64 {
        state::read(self.state, Slot::Context)
    }
}

/// From the product for q, k and v to attention.
#[derive(Debug, Clone, Copy)]
pub struct HeadInputs<'a> {
    /// `[N, W]`: queries, keys and values.
    pub qkv_nw: &'a Tensor,
    /// `[W]`: added to q, k and v.
    pub bias_w: Option<&'a Tensor>,
    /// Of each head of q and k, before the rotation.
    pub norms: Option<HeadNorms<'a>>,
    pub rotations: &'a Rotations,
}

/// The norms of query and key heads, see [`rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// `[D]`.
    pub query_d: &'a Tensor,
    /// `[D]`.
    pub key_d: &'a Tensor,
    pub eps: f64,
}

/// Adds the bias to q, k and v, norms each head of q and k, rotates both by their positions (Su et al. 2021; pairs halves, not
/// neighbours), and appends k and v to the committed rows of a layer's cache. Sum and norm are rounded to the product's dtype, as in
/// libtorch's pass.
/// - `q_nqd`: `[N, Q, D]` — `kv_2gsd`: `[2, G, S, D]`
pub fn rope_append(inputs: HeadInputs, places: StepPositions, q_nqd: &Tensor, kv_2gsd: &Tensor) {
    let qkv_nw = inputs.qkv_nw;
    let [n, q, d] = q_nqd.size()[..] else { panic!("[N, Q, D], got {q_nqd:?}") };
    let g = kv_2gsd.size()[1];
    let qkv_nhd = biased(qkv_nw, inputs.bias_w).view([n, q + 2 * g, d]);
    let [queries, keys] = [(0, q), (q, g)].map(|(from, heads)| qkv_nhd.narrow(1, from, heads));
    let normed_nhd = inputs.norms.map_or_else(
        || Tensor::cat(&[&queries, &keys], 1),
        |HeadNorms { query_d, key_d, eps }| {
            let normed = [(&queries, query_d), (&keys, key_d)].map(|(x_nhd, weight_d)| {
                let y_nhd = Tensor::empty(x_nhd.size(), (qkv_nw.kind(), qkv_nw.device()));
                rms_norm(x_nhd, weight_d, eps, &y_nhd);
                float(&y_nhd)
            });
            Tensor::cat(&normed, 1)
        },
    );
    let positions_n = &places.nodes.depths_n + places.context();
    let rotated_nhd = rotate(&normed_nhd, &positions_n, inputs.rotations);
    write(q_nqd, &rotated_nhd.narrow(1, 0, q));
    let rows = |plane| kv_2gsd.select(0, plane).narrow(1, places.context(), n);
    write(&rows(0), &rotated_nhd.narrow(1, q, g).transpose(0, 1));
    write(&rows(1), &qkv_nhd.narrow(1, q + g, g).transpose(0, 1));
}

/// `x` with its bias, in float32, rounded to x's dtype.
fn biased(x_nw: &Tensor, bias_w: Option<&Tensor>) -> Tensor {
    bias_w.map_or_else(|| float(x_nw), |bias_w| float(&(float(x_nw) + float(bias_w)).to_kind(x_nw.kind())))
}

/// Rotates `[N, heads, D]`, each row by its position.
fn rotate(x_nhd: &Tensor, positions_n: &Tensor, rotations: &Rotations) -> Tensor {
    let at = |table_sd: &Tensor| table_sd.index_select(0, positions_n).unsqueeze(1);
    let (cos, sin) = (at(&rotations.cos_sd), at(&rotations.sin_sd));
    let halves = x_nhd.chunk(2, -1);
    Tensor::cat(&[&halves[0] * &cos - &halves[1] * &sin, &halves[1] * &cos + &halves[0] * &sin], -1)
}

/// From the product for q, k and v to attention's output: [`rope_append`], then [`tree_attention`] with its queries.
/// - `kv_2gsd`: `[2, G, S, D]` — `o_nqd`: `[N, Q, D]`
pub fn attention(
    inputs: HeadInputs,
    places: StepPositions,
    kv_2gsd: &Tensor,
    (scale, window): (f64, Option<i64>),
    o_nqd: &Tensor,
) {
    let q_nqd = o_nqd.empty_like();
    rope_append(inputs, places, &q_nqd, kv_2gsd);
    tree_attention(&q_nqd, kv_2gsd, places, scale, window, o_nqd);
}

/// Attention of a step's rows to the committed rows of a layer's cache, and to those rows of the step that they may see. With a
/// `window`, a row at position p attends only to positions above p - window.
/// - `q_nqd`: `[N, Q, D]` — `kv_2gsd`: `[2, G, S, D]`, with the step's own rows already written — `o_nqd`: `[N, Q, D]`
pub fn tree_attention(
    q_nqd: &Tensor,
    kv_2gsd: &Tensor,
    places: StepPositions,
    scale: f64,
    window: Option<i64>,
    o_nqd: &Tensor,
) {
    let [n, q, _] = q_nqd.size()[..] else { panic!("[N, Q, D], got {q_nqd:?}") };
    let (g, rows) = (kv_2gsd.size()[1], places.context() + n);
    let per_query_head =
        |plane| float(&kv_2gsd.select(0, plane).narrow(1, 0, rows)).repeat_interleave_self_int(q / g, 0, None);
    let (k_qsd, v_qsd) = (per_query_head(0), per_query_head(1));
    let scores_qns = float(q_nqd).transpose(0, 1).matmul(&k_qsd.transpose(1, 2)) * scale;
    let hidden_ns = seen(places, window).logical_not();
    let p_qns = scores_qns.masked_fill(&hidden_ns, f64::NEG_INFINITY).softmax(-1, Kind::Float);
    write(o_nqd, &p_qns.matmul(&v_qsd).transpose(0, 1));
}

/// The attention mask: `[N, context + N]` bool.
fn seen(places: StepPositions, window: Option<i64>) -> Tensor {
    let StepPositions { nodes, .. } = places;
    let (n, context) = (nodes.len(), places.context());
    let on = nodes.depths_n.device();
    let step_nn = Tensor::stack(&(0..n).map(|key| bit(&nodes.sees_n2, key)).collect::<Vec<_>>(), 1);
    let sees_ns = Tensor::cat(&[Tensor::ones([n, context], (Kind::Bool, on)), step_nn], 1);
    let at_n = &nodes.depths_n + context;
    let at_s = Tensor::cat(&[Tensor::arange(context, (Kind::Int, on)), at_n.shallow_clone()], 0);
    let near_ns = (at_n.unsqueeze(1) - at_s.unsqueeze(0)).lt(window.unwrap_or(i64::from(i32::MAX)));
    sees_ns.logical_and(&near_ns)
}

/// `[N]` bool: which rows attend to row `key`.
fn bit(sees_n2: &Tensor, key: i64) -> Tensor {
    sees_n2.select(1, key / 64).bitwise_right_shift_tensor_scalar(key % 64).bitwise_and(1).ne(0)
}

/// `y = SiLU(gate) · up`: `[N, 2I]`, gate first, to `[N, I]`.
pub fn silu_mul(gate_up_ni: &Tensor, product_ni: &Tensor) {
    let halves = float(gate_up_ni).chunk(2, -1);
    write(product_ni, &(halves[0].silu() * &halves[1]));
}

/// A product with a weight, and what is fused into it. Only the sums of a gated product are rounded before its end.
pub fn linear(of: &Operands) {
    let x_nk = float(&of.x_nk);
    let x_nk = of.norm.as_ref().map_or_else(|| x_nk.shallow_clone(), |norm| normed(&x_nk, &norm.weight_k, norm.eps));
    let sums_nm = x_nk.matmul(&float(&of.w_mk).transpose(0, 1));
    match of.ending {
        Ending::Stored => write(&of.y_nm, &sums_nm),
        Ending::Added => write(&of.y_nm, &(float(&of.y_nm) + sums_nm)),
        Ending::Gated { .. } => silu_mul(&sums_nm.to_kind(of.w_mk.kind()), &of.y_nm),
    }
}

/// Input of a ResBlock of all heads.
#[derive(Debug, Clone, Copy)]
pub enum BlockInput<'a> {
    /// For the first block: the last accepted row of `hidden_nh`, the same for all heads.
    Last {
        /// `[N, H]`, after the final norm.
        hidden_nh: &'a Tensor,
        /// See [`Slot`].
        state: &'a Tensor,
    },
    /// For later blocks: one row per head, `[K, H]`.
    Rows(&'a Tensor),
}

/// `y = x + SiLU(W·x + b)` (paper section 2.1.1) for all heads: `w_khh` `[K, H, H]`, `b_kh` and `y_kh` `[K, H]`.
pub fn res_block(x: BlockInput, w_khh: &Tensor, b_kh: &Tensor, y_kh: &Tensor) {
    let x_kh = match x {
        BlockInput::Last { hidden_nh, state } => {
            hidden_nh.narrow(0, state::read(state, Slot::Last), 1).expand(y_kh.size(), false)
        }
        BlockInput::Rows(x_kh) => x_kh.shallow_clone(),
    };
    let product_kh = float(w_khh).matmul(&float(&x_kh).unsqueeze(2)).squeeze_dim(2);
    write(y_kh, &(float(&x_kh) + (product_kh + float(b_kh)).silu()));
}

/// Ids of the largest logits of each row, best first: `[K, V]` to `[K, P]`. `bias_v` is added to each row.
pub fn top_guesses(logits_kv: &Tensor, bias_v: Option<&Tensor>, guesses_kp: &Tensor) {
    let biased_kv = bias_v.map_or_else(|| logits_kv.shallow_clone(), |bias_v| logits_kv + float(bias_v));
    let (_, order_kv) = biased_kv.sort_stable(true, -1, true);
    write(guesses_kp, &order_kv.narrow(1, 0, guesses_kp.size()[1]));
}

/// The most probable token of each row: `[N, V]` to `[N]`; [`NO_TOKEN`] if the largest logit is infinite or any is NaN.
pub fn best(logits_nv: &Tensor, best_n: &Tensor) {
    let (sorted_nv, order_nv) = logits_nv.sort_stable(true, -1, true); // NaN sorts first
    let is_bad_n = sorted_nv.select(1, 0).isfinite().logical_not();
    write(best_n, &order_nv.select(1, 0).masked_fill(&is_bad_n, NO_TOKEN));
}

/// The inputs of typical acceptance for each node, float32: the log-probability of its token after its parent (the root's is not
/// read), and the entropy of the distribution after it, in nats.
pub fn posterior(
    logits_nv: &Tensor,
    tokens_n: &Tensor,
    nodes: &Nodes,
    temperature: f64,
    [log_p_n, entropy_n]: [&Tensor; 2],
) {
    let log_p_nv = sample::tempered(logits_nv, temperature).log_softmax(-1, Kind::Float);
    write(entropy_n, &sample::entropies(&log_p_nv));
    let after_parent_nv = log_p_nv.index_select(0, &nodes.parents_n);
    let chosen_n1 = after_parent_nv.gather(1, &tokens_n.to_kind(Kind::Int64).unsqueeze(1), false);
    write(log_p_n, &chosen_n1.squeeze_dim(1));
}

/// How tokens are drawn after each node.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// Above 0.
    pub temperature: f64,
    /// See [`Sampling`](crate::engine::sample::Sampling).
    pub top_p: f64,
    /// `[U]` float64, from 0 to below 1: the token at position p of the text is drawn with number `p % U`.
    pub uniforms_u: &'a Tensor,
}

/// Draws a token after each node: `[N, V]` to `[N]`. The token after a node of depth d has position `context + d + 1`, so a text
/// consumes the same numbers whatever the tree; plain decoding is the tree with only the root. Draws like
/// [`Sampler`](crate::engine::sample::Sampler), but the kernel sums probabilities in another order: where a number falls on the
/// border between two tokens, within float32 rounding, it may draw the neighbour. [`NO_TOKEN`] if probabilities are NaN.
pub fn draw(logits_nv: &Tensor, places: StepPositions, draws: Draws, drawn_n: &Tensor) {
    let p_nv = sample::tempered(logits_nv, draws.temperature).softmax(-1, Kind::Float);
    let uniforms = to_host::<f64>(&draws.uniforms_u.to_kind(Kind::Double));
    let drawn = host(&places.nodes.depths_n).into_iter().enumerate().map(|(node, depth)| {
        let position = (places.context() + depth + 1).unsigned_abs() as usize;
        let p_v = to_host::<f32>(&p_nv.select(0, node as i64));
        sample::token_at(&p_v, draws.top_p, uniforms[position % uniforms.len()])
    });
    write(drawn_n, &Tensor::from_slice(&drawn.collect::<Vec<_>>()));
}

/// Where an acceptance rule writes its result: the accepted nodes, root first, and the state's Accepted, Last and Next.
#[derive(Debug, Clone, Copy)]
pub struct Accepted<'a> {
    /// `[deepest level + 1]`; entries after the accepted nodes are not read.
    pub path: &'a Tensor,
    /// See [`Slot`].
    pub state: &'a Tensor,
}

impl Accepted<'_> {
    fn set(&self, path: &[i64], next: i64) {
        write(&self.path.narrow(0, 0, path.len() as i64), &Tensor::from_slice(path));
        state::write(self.state, Slot::Accepted, path.len() as i64);
        state::write(self.state, Slot::Last, path[path.len() - 1]);
        state::write(self.state, Slot::Next, next);
    }
}

/// Like [`accept::walk`](crate::tree::accept::walk): walks from the root along the first child that holds the token chosen after
/// its parent. Greedy acceptance if `chosen_n` comes from [`best`], speculative sampling if it comes from [`draw`].
pub fn walk(nodes: &Nodes, tokens_n: &Tensor, chosen_n: &Tensor, accepted: Accepted) {
    let (tokens, chosen, children) = (host(tokens_n), host(chosen_n), host(&nodes.children_n2));
    let mut path = vec![0i64];
    loop {
        let at = path[path.len() - 1].unsigned_abs() as usize;
        let mut below = children[2 * at]..children[2 * at + 1];
        match below.find(|&child| tokens[child.unsigned_abs() as usize] == chosen[at]) {
            Some(child) => path.push(child),
            None => return accepted.set(&path, chosen[at]),
        }
    }
}

/// Like [`accept::typical`](crate::tree::accept::typical), in float64; the next root is the most probable token.
pub fn typical(nodes: &Nodes, posterior: [&Tensor; 2], rule: TypicalAcceptance, best_n: &Tensor, accepted: Accepted) {
    let [log_p, entropy] = posterior.map(|numbers_n| to_host::<f64>(&numbers_n.to_kind(Kind::Double)));
    let (parents, depths) = (host(&nodes.parents_n), host(&nodes.depths_n));
    let parent = |node: usize| parents[node].unsigned_abs() as usize;
    let mut summed = vec![Some(0.0)];
    for node in 1..parents.len() {
        let accepts = log_p[node].exp() > rule.threshold(entropy[parent(node)]);
        summed.push(summed[parent(node)].filter(|_| accepts).map(|sum| sum + log_p[node]));
    }
    let mut last = 0;
    for (node, sum) in summed.iter().enumerate() {
        if let Some(sum) = sum
            && (depths[node], *sum) > (depths[last], summed[last].expect("an accepted node"))
        {
            last = node;
        }
    }
    let mut path: Vec<i64> =
        std::iter::successors(Some(last), |&node| (node > 0).then(|| parent(node))).map(|node| node as i64).collect();
    path.reverse();
    accepted.set(&path, host(best_n)[last]);
}

/// Keeps only the accepted rows of the step in the cache `[L, 2, G, S, D]`: moves them, in order, directly after the committed
/// rows, as if they had been decoded one by one.
pub fn compact(cache_l2gsd: &Tensor, accepted: Accepted) {
    let context = state::read(accepted.state, Slot::Context);
    let count = state::read(accepted.state, Slot::Accepted);
    let rows = accepted.path.narrow(0, 0, count) + context;
    let kept = cache_l2gsd.index_select(3, &rows);
    write(&cache_l2gsd.narrow(3, context, count), &kept);
}

/// Ends a step: Context grows by Accepted, Step by one. Writes to row `Step % R` of `results_rt` (`[R, RESULT_HEAD + K + 1]`):
/// the steps done including this one, the number of accepted tokens, the next root, and the accepted tokens.
pub fn advance(accepted: Accepted, tokens_n: &Tensor, results_rt: &Tensor) {
    let read = |slot| state::read(accepted.state, slot);
    let (count, before) = (read(Slot::Accepted), read(Slot::Step));
    let row = results_rt.select(0, before % results_rt.size()[0]);
    write(&row.narrow(0, 0, RESULT_HEAD), &Tensor::from_slice(&[before + 1, count, read(Slot::Next)]));
    write(&row.narrow(0, RESULT_HEAD, count), &tokens_n.index_select(0, &accepted.path.narrow(0, 0, count)));
    state::write(accepted.state, Slot::Context, read(Slot::Context) + count);
    state::write(accepted.state, Slot::Step, before + 1);
}

/// Writes the tokens of the next step's nodes: Next for the root; for a node of depth d, its guess from head d - 1 (0-based).
/// - `guesses_kp`: `[K, P]` — `tokens_n`: `[N]`
pub fn fill_tree(nodes: &Nodes, guesses_kp: &Tensor, state: &Tensor, tokens_n: &Tensor) {
    let head_n = (&nodes.depths_n - 1).clamp_min(0);
    let at_n = head_n * guesses_kp.size()[1] + &nodes.guesses_n;
    write(tokens_n, &guesses_kp.reshape([-1]).index_select(0, &at_n));
    write(&tokens_n.narrow(0, 0, 1), &state.narrow(0, Slot::Next as i64, 1));
}

/// The embeddings of the tokens of some nodes, `x_nh`; a token below 0 is read as 0.
pub fn embed_nodes(tokens: &Tensor, nodes_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) {
    embed(&tokens.index_select(0, nodes_n).clamp_min(0), table_vh, x_nh);
}

/// What the nodes of a level inherit, see [`levels`](super::levels).
#[derive(Debug, Clone, Copy)]
pub struct ParentSums<'a> {
    /// The sums of the level above, `[.., W + used]`; their last W numbers are inherited.
    pub before: &'a Tensor,
    /// `[N]`: each node's row in `before`.
    pub parents_n: &'a Tensor,
    /// `[W]`: biases, added once on each path.
    pub bias_w: Option<&'a Tensor>,
}

/// The first block of a sequential head at N nodes: `sums_nw`, which holds what the nodes' tokens add, plus what is inherited; then
/// `y = residual + SiLU(linear)` of the first head among the sums, `[N, H]`.
pub fn first_block(sums_nw: &Tensor, inherited: ParentSums, y_nh: &Tensor) {
    let ParentSums { before, parents_n, bias_w } = inherited;
    let (w, h) = (sums_nw.size()[1], y_nh.size()[1]);
    let inherited_nw = before.index_select(0, parents_n).narrow(1, before.size()[1] - w, w);
    let sum_nw = bias_w.map_or_else(|| sums_nw + &inherited_nw, |bias_w| sums_nw + &inherited_nw + float(bias_w));
    write(sums_nw, &sum_nw);
    let [linear_nh, residual_nh] = [0, h].map(|from| sum_nw.narrow(1, from, h));
    write(y_nh, &(residual_nh + linear_nh.silu()));
}

/// A later ResBlock of a sequential head behind its product: `x += SiLU(product + bias)`, `[N, H]`.
pub fn residual(x_nh: &Tensor, product_nh: &Tensor, bias_h: &Tensor) {
    write(x_nh, &(float(x_nh) + (product_nh + float(bias_h)).silu()));
}

/// Writes the tokens of a level's nodes, `tokens_c`: each holds a guess of its parent's row.
/// - `guesses_np`: `[N, P]` — `rows_c`: the parents' rows — `ranks_c`: which of a row's guesses
pub fn fill_level(guesses_np: &Tensor, rows_c: &Tensor, ranks_c: &Tensor, tokens_c: &Tensor) {
    let at_c = rows_c * guesses_np.size()[1] + ranks_c;
    write(tokens_c, &guesses_np.reshape([-1]).index_select(0, &at_c));
}

fn float(x: &Tensor) -> Tensor {
    x.to_kind(Kind::Float)
}

fn write(out: &Tensor, value: &Tensor) {
    out.shallow_clone().copy_(value);
}

fn host(numbers: &Tensor) -> Vec<i64> {
    to_host(&numbers.to_kind(Kind::Int64))
}

fn to_host<T: tch::kind::Element + Copy>(numbers: &Tensor) -> Vec<T> {
    Vec::try_from(numbers.to_device(Device::Cpu).reshape([-1])).expect("one axis, of the kind that was made")
}

#[cfg(test)]
mod tests;
