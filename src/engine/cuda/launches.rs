//! Kernel launches equivalent to the functions of [`oracle`](super::oracle), on the same tensors. Grid sizes depend only on
//! shapes.

// N rows of a step, H hidden, Q query heads, G key/value heads, R = Q/G, D head size, W = (Q + 2G)·D, I width of the MLP,
// V vocabulary, K heads, S room for tokens, P guesses per head, L layers
use tch::{Device, Kind, Tensor};

use super::layout::{MAX_NODES, Nodes};
use super::oracle::{Accepted, BlockInput, Draws, HeadInputs, ParentSums, StepPositions};
use super::state::RESULT_HEAD;
use crate::nvidia::kernels::{BLOCK_COLUMNS, FEW_SHARED, KEYS, MOST_SLICES, Program, SLICE};
use crate::nvidia::launch::{Argument, Launch, blocks, eighths, elements, float, floats, ints, size, tensor};
pub use crate::nvidia::rows::rms_norm;
use crate::tree::accept::TypicalAcceptance;

/// See [`oracle::embed`](super::oracle::embed).
pub fn embed(tokens_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) -> Launch {
    let [n, h] = axes(x_nh);
    let arguments = vec![ints(tokens_n), elements(table_vh), elements(x_nh), size(h)];
    Launch::new(Program::Rows, "embed", [n, 1, 1], 256, arguments)
}

/// Target number of attention blocks in a step: two for each multiprocessor of the largest GPUs.
const ATTENTION_BLOCKS: i64 = 264;
/// Rows per block of attention if there are more than [`FEW_ROWS`].
const ROWS: i64 = 64;
/// Up to this many rows, each warp reads different keys.
const FEW_ROWS: i64 = 16;

/// Partial results of attention, until they are merged.
#[derive(Debug)]
pub struct AttentionParts {
    /// `[parts, Q·N, D]` float32.
    sums: Tensor,
    /// `[parts, Q·N, 2]` float32.
    marks: Tensor,
    /// Int32, 0 between kernels: blocks that have finished their part, for each tile of rows of each key/value head.
    arrived: Tensor,
    /// Number of blocks that the keys are split over.
    splits: i64,
}

impl AttentionParts {
    /// Buffers for queries `[N, Q, D]` and G key/value heads, with the keys split over enough blocks to fill a GPU.
    pub fn new([n, q, d]: [i64; 3], g: i64, device: Device) -> Self {
        Self::with_splits([n, q, d], g, splits(q / g * n, g), device)
    }

    /// Number of parts, and of rows per part, that [`AttentionParts::new`] allocates.
    pub fn counts([n, q, _]: [i64; 3], g: i64) -> [i64; 2] {
        [splits(q / g * n, g) * parts_a_split(q / g * n), q * n]
    }

    /// Like [`AttentionParts::new`], with the keys split over `splits` blocks.
    pub fn with_splits([n, q, d]: [i64; 3], g: i64, splits: i64, device: Device) -> Self {
        let parts = splits * parts_a_split(q / g * n);
        let zeros = |width| Tensor::zeros([parts, q * n, width], (Kind::Float, device));
        let arrived = Tensor::zeros([g * tiles(q / g * n)], (Kind::Int, device));
        Self { sums: zeros(d), marks: zeros(2), arrived, splits }
    }

    /// The sums and the marks.
    pub fn tensors_mut(&mut self) -> [&mut Tensor; 2] {
        [&mut self.sums, &mut self.marks]
    }
}

/// Number of blocks that share the keys of one key/value head, given its rows and the number of such heads.
fn splits(rows: i64, g: i64) -> i64 {
    (ATTENTION_BLOCKS / (g * tiles(rows))).clamp(1, 32)
}

/// Number of blocks that share the rows of one key/value head.
fn tiles(rows: i64) -> i64 {
    if rows <= FEW_ROWS { 1 } else { blocks(rows, ROWS) }
}

fn parts_a_split(rows: i64) -> i64 {
    if rows <= FEW_ROWS { 4 } else { 1 }
}

/// See [`oracle::attention`](super::oracle::attention).
pub fn attention(
    inputs: HeadInputs,
    places: StepPositions,
    kv_2gsd: &Tensor,
    (scale, window): (f64, Option<i64>),
    parts: &AttentionParts,
    o_nqd: &Tensor,
) -> Launch {
    let ([n, q, d], [_, g, room, _]) = (axes(o_nqd), axes(kv_2gsd));
    assert!(n <= MAX_NODES as i64, "a step has at most {MAX_NODES} rows");
    let rows = q / g * n;
    let name = if rows <= FEW_ROWS { "tree_attention_few" } else { "tree_attention_many" };
    let HeadInputs { qkv_nw, bias_w, norms, rotations } = inputs;
    let arguments = vec![
        elements(qkv_nw),
        if_any(bias_w),
        if_any(norms.map(|norms| norms.query_d)),
        if_any(norms.map(|norms| norms.key_d)),
        float(norms.map_or(0.0, |norms| norms.eps)),
        floats(&rotations.cos_sd),
        floats(&rotations.sin_sd),
        elements(kv_2gsd),
        tensor(&places.nodes.sees_n2, Kind::Int64),
        ints(&places.nodes.depths_n),
        ints(places.state),
        floats(&parts.sums),
        floats(&parts.marks),
        ints(&parts.arrived),
        elements(o_nqd),
        size(q),
        size(g),
        size(n),
        size(room),
        float(scale * std::f64::consts::LOG2_E),
        size(window.unwrap_or(0)),
    ];
    Launch::new(Program::TreeAttention, name, [g, tiles(rows), parts.splits], 128, arguments).with_shared(4 * KEYS * d)
}

/// See [`oracle::res_block`](super::oracle::res_block).
pub fn res_block(x: BlockInput, w_khh: &Tensor, b_kh: &Tensor, y_kh: &Tensor) -> Launch {
    let [k, h] = axes(y_kh);
    let (x, state) = match x {
        BlockInput::Last { hidden_nh, state } => (elements(hidden_nh), ints(state)),
        BlockInput::Rows(x_kh) => (elements(x_kh), Argument::Pointer(0)),
    };
    let arguments = vec![x, state, elements(w_khh), elements(b_kh), elements(y_kh), eighths(h)];
    Launch::new(Program::Linear, "res_block", [blocks(h, BLOCK_COLUMNS), k, 1], 256, arguments).with_shared(FEW_SHARED)
}

/// Scratch memory of [`best`], [`posterior`] and [`draw`], which read a row of logits in slices, for at most N rows.
#[derive(Debug)]
pub struct SliceRoom {
    /// `[N, slices, 3]` int64: what each slice adds up to.
    pub parts: Tensor,
    /// `[N]` int32: blocks of a row that are done, 0 between launches.
    pub arrived: Tensor,
    /// `[N, slices, SLICE]` int16: tokens that may be in a nucleus.
    pub places: Tensor,
    /// `[N, slices]` int32: how many.
    pub counts: Tensor,
}

impl SliceRoom {
    /// Shapes and dtypes, in the order of the fields.
    pub fn sizes([n, v]: [i64; 2]) -> [(Vec<i64>, Kind); 4] {
        let slices = blocks(v, SLICE);
        [
            (vec![n, slices, 3], Kind::Int64),
            (vec![n], Kind::Int),
            (vec![n, slices, SLICE], Kind::Int16),
            (vec![n, slices], Kind::Int),
        ]
    }

    /// Zeros for N rows of V logits.
    ///
    /// # Panics
    /// For a vocabulary of more than a million tokens.
    pub fn new(size: [i64; 2], device: Device) -> Self {
        assert!(
            blocks(size[1], SLICE) <= MOST_SLICES,
            "a vocabulary of {} tokens is larger than kernels take",
            size[1]
        );
        let [parts, arrived, places, counts] =
            Self::sizes(size).map(|(size, kind)| Tensor::zeros(size, (kind, device)));
        Self { parts, arrived, places, counts }
    }

    fn parts(&self) -> Argument {
        tensor(&self.parts, Kind::Int64)
    }
}

/// The shape of [`guess_parts`].
pub fn guess_parts_size([k, v]: [i64; 2], p: i64) -> Vec<i64> {
    vec![k, blocks(v, SLICE), p]
}

/// `[K, slices, P]`: the best guesses of each slice of a row, passed between the two launches of [`top_guesses`].
///
/// # Panics
/// If the guesses of all slices do not fit one block.
pub fn guess_parts([k, v]: [i64; 2], p: i64, device: Device) -> Tensor {
    assert!(p <= v && blocks(v, SLICE) * p <= SLICE, "{p} guesses of {v} tokens are more than a block takes");
    Tensor::zeros(guess_parts_size([k, v], p), (Kind::Int64, device))
}

/// See [`oracle::top_guesses`](super::oracle::top_guesses); `parts` comes from [`guess_parts`].
pub fn top_guesses(logits_kv: &Tensor, bias_v: Option<&Tensor>, parts: &Tensor, guesses_kp: &Tensor) -> [Launch; 2] {
    let ([k, v], [_, p]) = (axes(logits_kv), axes(guesses_kp));
    let slices = blocks(v, SLICE);
    let pointer = tensor(parts, Kind::Int64);
    let first = vec![floats(logits_kv), if_any(bias_v), pointer, size(v), size(p)];
    let merge = vec![pointer, ints(guesses_kp), size(v), size(slices), size(p)];
    [
        Launch::new(Program::Choose, "top_guesses_part", [slices, k, 1], 256, first),
        Launch::new(Program::Choose, "top_guesses_merge", [k, 1, 1], 256, merge),
    ]
}

/// Threads of a block that adds up a slice.
const SLICE_THREADS: i64 = 256;

/// See [`oracle::best`](super::oracle::best).
pub fn best(logits_nv: &Tensor, room: &SliceRoom, best_n: &Tensor) -> Launch {
    let [n, v] = axes(logits_nv);
    let arguments = vec![floats(logits_nv), room.parts(), ints(&room.arrived), ints(best_n), size(v)];
    Launch::new(Program::Choose, "best", [blocks(v, SLICE), n, 1], SLICE_THREADS, arguments)
}

/// See [`oracle::posterior`](super::oracle::posterior).
pub fn posterior(
    logits_nv: &Tensor,
    room: &SliceRoom,
    tokens_n: &Tensor,
    nodes: &Nodes,
    temperature: f64,
    [log_p_n, entropy_n]: [&Tensor; 2],
) -> Launch {
    let [n, v] = axes(logits_nv);
    let arguments = vec![
        floats(logits_nv),
        room.parts(),
        ints(&room.arrived),
        ints(tokens_n),
        ints(&nodes.children_n2),
        floats(log_p_n),
        floats(entropy_n),
        size(v),
        float(temperature),
    ];
    Launch::new(Program::Choose, "posterior", [blocks(v, SLICE), n, 1], SLICE_THREADS, arguments)
}

/// See [`oracle::draw`](super::oracle::draw).
pub fn draw(
    logits_nv: &Tensor,
    room: &SliceRoom,
    places: StepPositions,
    draws: Draws,
    drawn_n: &Tensor,
) -> [Launch; 2] {
    let [n, v] = axes(logits_nv);
    let Draws { temperature, top_p, uniforms_u } = draws;
    let first = vec![floats(logits_nv), room.parts(), size(v), float(temperature)];
    let second = vec![
        floats(logits_nv),
        room.parts(),
        tensor(&room.places, Kind::Int16),
        ints(&room.counts),
        ints(&room.arrived),
        ints(&places.nodes.depths_n),
        ints(places.state),
        tensor(uniforms_u, Kind::Double),
        ints(drawn_n),
        size(v),
        size(uniforms_u.size()[0]),
        float(temperature),
        Argument::Double(top_p),
        float(least_in_nucleus(v, top_p)),
    ];
    let slices = blocks(v, SLICE);
    let blocks = if top_p < 1.0 { slices } else { 1 };
    [
        Launch::new(Program::Choose, "add_slices", [slices, n, 1], SLICE_THREADS, first),
        Launch::new(Program::Choose, "draw", [blocks, n, 1], 1024, second),
    ]
}

/// A probability that is too low for a nucleus of `v` tokens: tokens of at most half of `(1 - top_p)/V` weigh at most half of what the nucleus
/// may lack, whatever rounding does. 0, below which no token is, where that half is within float32's rounding of a sum of 1.
fn least_in_nucleus(v: i64, top_p: f64) -> f64 {
    let lacking = 1.0 - top_p;
    if lacking < 1e-5 { 0.0 } else { lacking / (2.0 * v as f64) }
}

/// See [`oracle::walk`](super::oracle::walk).
pub fn walk(nodes: &Nodes, tokens_n: &Tensor, chosen_n: &Tensor, accepted: Accepted) -> Launch {
    let tensors = [tokens_n, chosen_n, &nodes.children_n2, accepted.path, accepted.state].map(ints);
    one_block("walk", [&tensors[..], &[size(nodes.len())]].concat())
}

/// See [`oracle::typical`](super::oracle::typical).
pub fn typical(
    nodes: &Nodes,
    posterior: [&Tensor; 2],
    rule: TypicalAcceptance,
    best_n: &Tensor,
    accepted: Accepted,
) -> Launch {
    let numbers = posterior.map(floats);
    let tensors = [&nodes.parents_n, &nodes.depths_n, best_n, accepted.path, accepted.state].map(ints);
    let levels = accepted.path.size()[0] - 1;
    let limits = [rule.posterior_threshold, rule.posterior_alpha].map(Argument::Double);
    one_block("typical", [&numbers[..], &tensors, &[size(nodes.len()), size(levels)], &limits].concat())
}

/// See [`oracle::compact`](super::oracle::compact).
pub fn compact(cache_l2gsd: &Tensor, accepted: Accepted) -> Launch {
    let [l, two, g, room, d] = cache_l2gsd.size()[..] else { panic!("[L, 2, G, S, D], got {cache_l2gsd:?}") };
    let planes = l * two * g;
    let [path, state] = [accepted.path, accepted.state].map(ints);
    let arguments = vec![elements(cache_l2gsd), path, state, size(planes), size(room), eighths(d)];
    Launch::new(Program::Accept, "compact", [blocks(planes * d / 8, 128), 1, 1], 128, arguments)
}

/// See [`oracle::advance`](super::oracle::advance).
pub fn advance(accepted: Accepted, tokens_n: &Tensor, results_rt: &Tensor) -> Launch {
    let [ring, width] = axes(results_rt);
    let tensors = [accepted.path, tokens_n, accepted.state, results_rt].map(ints);
    one_block("advance", [&tensors[..], &[size(ring), size(width - RESULT_HEAD)]].concat())
}

/// See [`oracle::fill_tree`](super::oracle::fill_tree).
pub fn fill_tree(nodes: &Nodes, guesses_kp: &Tensor, state: &Tensor, tokens_n: &Tensor) -> Launch {
    let tensors = [guesses_kp, &nodes.depths_n, &nodes.guesses_n, state, tokens_n].map(ints);
    one_block("fill_tree", [&tensors[..], &[size(nodes.len()), size(guesses_kp.size()[1])]].concat())
}

/// See [`oracle::embed_nodes`](super::oracle::embed_nodes).
pub fn embed_nodes(tokens: &Tensor, nodes_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) -> Launch {
    let [n, h] = axes(x_nh);
    let arguments = vec![ints(tokens), ints(nodes_n), elements(table_vh), elements(x_nh), eighths(h)];
    Launch::new(Program::Sequential, "embed_nodes", [n, 1, 1], 256, arguments)
}

/// See [`oracle::first_block`](super::oracle::first_block).
pub fn first_block(sums_nw: &Tensor, inherited: ParentSums, y_nh: &Tensor) -> Launch {
    let ([n, w], [_, before], [_, h]) = (axes(sums_nw), axes(inherited.before), axes(y_nh));
    let arguments = vec![
        floats(sums_nw),
        floats(inherited.before),
        ints(inherited.parents_n),
        if_any(inherited.bias_w),
        elements(y_nh),
        size(w / 2),
        size(before - w),
        size(h),
    ];
    Launch::new(Program::Sequential, "first_block", [blocks(w / 2, 256), n, 1], 256, arguments)
}

/// See [`oracle::residual`](super::oracle::residual).
pub fn residual(x_nh: &Tensor, product_nh: &Tensor, bias_h: &Tensor) -> Launch {
    let [n, h] = axes(x_nh);
    let arguments = vec![elements(x_nh), floats(product_nh), elements(bias_h), size(h)];
    Launch::new(Program::Sequential, "residual", [blocks(h, 256), n, 1], 256, arguments)
}

/// See [`oracle::fill_level`](super::oracle::fill_level).
pub fn fill_level(guesses_np: &Tensor, rows_c: &Tensor, ranks_c: &Tensor, tokens_c: &Tensor) -> Launch {
    let ([count], [_, p]) = (axes(tokens_c), axes(guesses_np));
    let tensors = [guesses_np, rows_c, ranks_c, tokens_c].map(ints);
    let arguments = [&tensors[..], &[size(count), size(p)]].concat();
    Launch::new(Program::Sequential, "fill_level", [1, 1, 1], MAX_NODES as i64, arguments)
}

/// The tensor's address, or null.
fn if_any(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or(Argument::Pointer(0), elements)
}

fn one_block(name: &'static str, arguments: Vec<Argument>) -> Launch {
    Launch::new(Program::Accept, name, [1, 1, 1], MAX_NODES as i64, arguments)
}

fn axes<const N: usize>(tensor: &Tensor) -> [i64; N] {
    tensor.size().try_into().unwrap_or_else(|size| panic!("{N} axes, got {size:?}"))
}
