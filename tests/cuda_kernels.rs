//! Every kernel of a decoding step on the GPU computes what its oracle on tensors computes. The kernels run on the CPU,
//! in an emulator of blocks, warps and their instructions; a GPU's own rounding, timing and memory model are not tested
//! here.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "kernels are C++ that a test builds and loads")]

// N rows of a step, H hidden, Q query heads, G key/value heads, D head size, I width of the MLP, V vocabulary, K heads, S room for
// tokens, P guesses a head
use std::cell::{Cell, RefCell};

use medusa::engine::cuda::launches::{self, AttentionParts};
use medusa::engine::cuda::layout::{Nodes, Rotations};
use medusa::engine::cuda::oracle::{self, Accepted, BlockInput, Draws, HeadInputs, HeadNorms, Inherited, Places};
use medusa::engine::cuda::state::{self, Slot};
use medusa::nvidia::gemm::{Ending, InputNorm, Operands, Product, SplitRoom, Way, WrittenSums};
use medusa::nvidia::kernels::{KernelDtype, PRELUDE, Program};
use medusa::nvidia::launch::{Argument, Kernel, Launch};
use medusa::nvidia::nvrtc::Compiler;
use medusa::nvidia::rows::silu_mul;
use medusa::torch::Generator;
use medusa::tree::accept::TypicalAcceptance;
use medusa::tree::sparse_tree::SparseTree;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, IndexOp, Kind, Tensor};

pub(crate) mod emulator;

use emulator::{Emulator, Memory, Order};

const ROWS: [i64; 10] = [1, 2, 7, 8, 9, 16, 63, 64, 65, 128];
const CONTEXTS: [i64; 6] = [0, 1, 63, 64, 65, 4095];
const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// The setting of one test case: random numbers, memory that ends where tensors end, an order of threads, a dtype.
struct Case {
    name: String,
    memory: Memory,
    kind: Kind,
    order: Order,
    seed: u64,
    /// The source of random tensors; libtorch's generator is shared with concurrent tests.
    draws: RefCell<ChaCha8Rng>,
}

impl Case {
    /// Dtype and order depend on `number`, so that all combinations occur; the other `turn` has the opposite ones.
    fn new(number: usize, turn: usize, name: String) -> Self {
        let order = [Order::Forwards, Order::Backwards][(number / 2 + turn) % 2];
        let kind = KINDS[(number + turn) % 2];
        let name = format!("{name}, {kind:?}, {order:?}");
        let seed = number as u64;
        let draws = RefCell::new(ChaCha8Rng::seed_from_u64(seed));
        Self { name, memory: Memory::default(), kind, order, seed, draws }
    }

    fn emulator(&self, head_size: i64) -> Emulator {
        Emulator { element: KernelDtype::of(self.kind).expect("16 bits"), head_size }
    }

    fn run(&self, launches: &[Launch]) {
        self.run_with(128, launches);
    }

    fn run_with(&self, head_size: i64, launches: &[Launch]) {
        let hidden = self.memory.hidden();
        launches.iter().for_each(|launch| self.emulator(head_size).run_hiding(launch, self.order, &hidden));
    }

    fn rng(&self) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.seed)
    }

    /// Normal numbers with standard deviation 1, in the case's dtype.
    fn normal(&self, size: &[i64]) -> Tensor {
        self.memory.tensor(&self.gaussian(size).to_kind(self.kind))
    }

    /// Like [`Case::normal`], for weights.
    fn weights(&self, size: &[i64]) -> Tensor {
        self.memory.weights(&self.gaussian(size).to_kind(self.kind))
    }

    fn floats(&self, size: &[i64]) -> Tensor {
        self.memory.tensor(&self.gaussian(size))
    }

    fn below(&self, bound: i64, size: &[i64]) -> Tensor {
        self.memory.tensor(&(self.uniform(size) * bound).to_kind(Kind::Int))
    }

    /// Float64 numbers in [0, 1).
    fn uniform(&self, size: &[i64]) -> Tensor {
        let count = size.iter().product::<i64>();
        let numbers: Vec<f64> = (0..count).map(|_| self.draws.borrow_mut().random()).collect();
        Tensor::from_slice(&numbers).view(size)
    }

    /// Float32 normal numbers with standard deviation 1: the inverse of the normal distribution at [`Case::uniform`].
    fn gaussian(&self, size: &[i64]) -> Tensor {
        ((self.uniform(size) * 2.0 - 1.0).erfinv() * 2f64.sqrt()).to_kind(Kind::Float)
    }

    fn output(&self, size: &[i64]) -> Tensor {
        self.memory.poisoned(size, self.kind)
    }

    fn output_of(&self, size: &[i64], kind: Kind) -> Tensor {
        self.memory.poisoned(size, kind)
    }

    /// A random tree of `n` nodes; with `n` = 1, only the root.
    fn nodes(&self, n: i64) -> Nodes {
        let mut rng = self.rng();
        let mut paths: Vec<Vec<usize>> = vec![vec![]];
        while (paths.len() as i64) < n {
            let path = [&paths[rng.random_range(0..paths.len())][..], &[rng.random_range(0..10)]].concat();
            if path.len() <= 6 && !paths.contains(&path) {
                paths.push(path);
            }
        }
        let nodes = match paths.len() {
            1 => Nodes::chain(1, Device::Cpu),
            _ => Nodes::of_tree(&SparseTree::new(paths[1..].to_vec()).expect("a tree"), Device::Cpu),
        };
        let own = |tensor: &Tensor| self.memory.tensor(tensor);
        Nodes {
            depths_n: own(&nodes.depths_n),
            parents_n: own(&nodes.parents_n),
            guesses_n: own(&nodes.guesses_n),
            children_n2: own(&nodes.children_n2),
            sees_n2: own(&nodes.sees_n2),
        }
    }

    fn state(&self, context: i64) -> Tensor {
        self.memory.tensor(&state::before_first(context, 0, 0, Device::Cpu))
    }

    /// Checks a kernel's numbers: each must be within `units` last bits of its dtype, plus the error of sums of numbers
    /// of size `scale`.
    ///
    /// Kernel and oracle round the same float32 number once; if it lies near a midpoint, either neighbour is valid: one
    /// unit.
    fn assert_close(&self, got: &Tensor, expected: &Tensor, units: f64, scale: f64) {
        let unit = match got.kind() {
            Kind::BFloat16 => 2f64.powi(-7),
            Kind::Half => 2f64.powi(-10),
            _ => 2f64.powi(-20), // float32: sums of thousands of numbers in another order
        };
        let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        let allowed = expected.abs() * (unit * units) + scale * unit * units / 8.0;
        let wrong = (&got - &expected).abs().le_tensor(&allowed).logical_not(); // true for NaN
        let count = i64::try_from(wrong.sum(Kind::Int64)).expect("a number");
        if count > 0 {
            let at = Vec::<i64>::try_from(wrong.nonzero().i(0)).expect("an index");
            let number = |tensor: &Tensor| at.iter().fold(tensor.shallow_clone(), |t, &i| t.i(i)).double_value(&[]);
            panic!(
                "{}: {count} numbers differ, first at {at:?}: {}, expected {}",
                self.name,
                number(&got),
                number(&expected)
            );
        }
    }

    fn assert_equal(&self, got: &Tensor, expected: &Tensor) {
        assert_eq!(got.size(), expected.size(), "{}", self.name);
        assert!(got.equal(expected), "{}:\n{got}\nexpected\n{expected}", self.name);
    }
}

/// Runs every case in one dtype and order of threads, and again in the other dtype and order.
fn cases<T: std::fmt::Debug + Copy>(of: impl IntoIterator<Item = T>, check: impl Fn(&Case, T)) {
    for (number, what) in of.into_iter().enumerate() {
        for turn in [0, 1] {
            check(&Case::new(number, turn, format!("{what:?}")), what);
        }
    }
}

fn product<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter().flat_map(|&a| b.iter().map(move |&b| (a, b))).collect()
}

/// Two copies of a tensor, one for a kernel's output and one for its oracle's.
fn both(case: &Case, of: &Tensor) -> [Tensor; 2] {
    [case.memory.tensor(of), of.copy()]
}

#[test]
fn rows_are_embedded_normed_and_gated() {
    cases(product(&[1, 7, 128], &[8, 72, 2056]), |case, (n, h)| {
        let (tokens_n, table_vh) = (case.below(50, &[n]), case.normal(&[50, h]));
        let [got, expected] = both(case, &case.output(&[n, h]));
        case.run(&[launches::embed(&tokens_n, &table_vh, &got)]);
        oracle::embed(&tokens_n, &table_vh, &expected);
        case.assert_equal(&got, &expected);

        let (x_nh, weight_h) = (case.normal(&[n, h]), case.normal(&[h]));
        case.run(&[launches::rms_norm(&x_nh, &weight_h, 1e-5, &got)]);
        oracle::rms_norm(&x_nh, &weight_h, 1e-5, &expected);
        case.assert_close(&got, &expected, 1.0, 0.0);

        let (gate_up_n, [got, expected]) = (case.normal(&[n, 2 * h]), both(case, &case.output(&[n, h])));
        case.run(&[silu_mul(&gate_up_n, &got)]);
        oracle::silu_mul(&gate_up_n, &expected);
        case.assert_close(&got, &expected, 1.0, 0.0);
    });
}

/// Query heads, key/value heads.
const HEADS: [(i64, i64); 4] = [(4, 2), (1, 1), (7, 1), (3, 3)];

/// The norm of the difference, relative to that of what is expected.
fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    let [got, expected] = [got, expected].map(|tensor| tensor.to_kind(Kind::Double));
    ((got - &expected).norm() / expected.norm()).double_value(&[])
}

/// Whether q, k and v have a bias, and q and k norms: Llama, Qwen2, Qwen3, and both.
const HEAD_INPUTS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

/// Tables of random angles for `positions` positions.
fn rotations(case: &Case, positions: i64, d: i64) -> Rotations {
    let table = || case.memory.tensor(&case.floats(&[positions, d / 2]).sin_());
    Rotations { cos_sd: table(), sin_sd: table() }
}

/// Checks attention of a step of `n` rows after `context` tokens: its output, and what it appends to the cache.
fn check_attention(case: &Case, [n, context, q, g, d]: [i64; 5], window: Option<i64>, splits: i64) {
    let (nodes, state) = (case.nodes(n), case.state(context));
    let places = Places { nodes: &nodes, state: &state };
    let room = context + n; // no spare row
    let rotations = rotations(case, room, d);
    let (has_bias, has_norms) = HEAD_INPUTS[case.seed as usize % HEAD_INPUTS.len()];
    let bias_w = has_bias.then(|| case.normal(&[(q + 2 * g) * d]));
    let weights = [case.normal(&[d]), case.normal(&[d])];
    let [query_d, key_d] = &weights;
    let norms = has_norms.then_some(HeadNorms { query_d, key_d, eps: 1e-6 });
    let (qkv_nw, [kv_got, kv_expected]) =
        (case.normal(&[n, (q + 2 * g) * d]), both(case, &case.normal(&[2, g, room, d])));
    let inputs = HeadInputs { qkv_nw: &qkv_nw, bias_w: bias_w.as_ref(), norms, rotations: &rotations };
    let mut parts = AttentionParts::with_splits([n, q, d], g, splits, Device::Cpu);
    for tensor in parts.tensors_mut() {
        *tensor = case.memory.poisoned(&tensor.size(), tensor.kind());
    }
    let [got, expected] = both(case, &case.output(&[n, q, d]));
    let how = ((d as f64).powf(-0.5), window);
    case.run_with(d, &[launches::attention(inputs, places, &kv_got, how, &parts, &got)]);
    oracle::attention(inputs, places, &kv_expected, how, &expected);
    // The sum of squares in another order may round a normed number, of size up to 8, to its other neighbour.
    case.assert_close(&kv_got, &kv_expected, 1.0, if has_norms { 32.0 } else { 1e-3 });
    // That is rare. A kernel that does not round the sum or the norm as the oracle does is 2e-4 away in float16.
    let [new_got, new_expected] = [&kv_got, &kv_expected].map(|kv| kv.narrow(2, context, n));
    let far = distance(&new_got, &new_expected);
    assert!(far < 5e-5, "{}: {far}", case.name);
    let committed = |kv: &Tensor| kv.narrow(2, 0, context);
    case.assert_equal(&committed(&kv_got), &committed(&kv_expected));
    // Probabilities are rounded before their product with values of size 1: sums of up to thousands of errors of either
    // sign.
    case.assert_close(&got, &expected, 1.0, 5.0);
}

#[test]
fn attention_sees_the_committed_tokens_and_the_nodes_above() {
    // Every context with every number of rows; head sizes, heads, windows and splits vary in turn.
    for (number, (context, n)) in product(&CONTEXTS, &ROWS).into_iter().enumerate() {
        let (q, g) = HEADS[number % 4];
        let (d, window) = ([64, 128][number / 3 % 2], [None, Some(5), None, Some(64), Some(4000)][number % 5]);
        let splits = [1, 3, 8][number % 3];
        let name = format!("{n} rows behind {context}, heads {q}/{g} of {d}, window {window:?}, {splits} splits");
        check_attention(&Case::new(number, 0, name.clone()), [n, context, q, g, d], window, splits);
        if context < 100 {
            check_attention(&Case::new(number, 1, name), [n, context, q, g, d], window, splits);
        }
    }
}

/// Room for the sums of a product with M outputs, and no more.
fn split_room(case: &Case, way: Way, m: i64) -> SplitRoom {
    let [tiles, sums] = match way {
        Way::Tile { height, width, splits } => {
            let tiles = (m + height - 1) / height;
            [tiles, splits * tiles * height * width]
        }
        _ => [1, 1],
    };
    let arrived = case.memory.tensor(&Tensor::zeros([tiles], (Kind::Int, Device::Cpu)));
    SplitRoom { sums: case.output_of(&[sums], Kind::Float), arrived }
}

/// Runs one implementation of a product, and its oracle.
fn check_product(case: &Case, way: Way, [n, m, k]: [i64; 3], (normed, written): (bool, WrittenSums)) {
    let columns = if written == WrittenSums::Gated { m / 2 } else { m };
    let kind = if written == WrittenSums::Float32 { Kind::Float } else { case.kind };
    let y =
        if written == WrittenSums::Added { case.normal(&[n, columns]) } else { case.output_of(&[n, columns], kind) };
    let (x_nk, w_mk, [got, expected]) = (case.normal(&[n, k]), case.weights(&[m, k]), both(case, &y));
    let (norm_k, normed_nk, sums_nm) = (case.normal(&[k]), case.output(&[n, k]), case.output(&[n, m]));
    let of = |y_nm: &Tensor| {
        let [weight_k, normed_nk] = [&norm_k, &normed_nk].map(Tensor::shallow_clone);
        let ending = match written {
            WrittenSums::Rounded | WrittenSums::Float32 => Ending::Stored,
            WrittenSums::Added => Ending::Added,
            WrittenSums::Gated => Ending::Gated { sums_nm: sums_nm.shallow_clone() },
        };
        let norm = normed.then_some(InputNorm { weight_k, eps: 1e-5, normed_nk });
        Operands { norm, ending, ..Operands::new(&x_nk, &w_mk, y_nm) }
    };
    let room = split_room(case, way, m);
    case.run(&way.launches(&of(&got), &room));
    case.assert_equal(&room.arrived, &room.arrived.zeros_like());
    oracle::linear(&of(&expected));
    let size = (k as f64).sqrt();
    let scale = match written {
        WrittenSums::Float32 => 16.0 * size, // sums in another order
        WrittenSums::Rounded | WrittenSums::Added => 8e-3 * size,
        WrittenSums::Gated => 4.0 * size, // gate and up, which are rounded first, may be rounded to the other neighbour
    };
    case.assert_close(&got, &expected, if written == WrittenSums::Gated { 2.0 } else { 1.0 }, scale);
}

#[test]
fn products_are_those_of_every_row_and_weight() {
    // Columns that do not fill a tile, depths that do not fill a stage, and the tall tiles of a vocabulary.
    let weights = [(40, 8), (64, 64), (100, 328), (2100, 72)];
    let written = [WrittenSums::Float32, WrittenSums::Rounded, WrittenSums::Added, WrittenSums::Gated];
    cases(product(&[1, 2, 7, 8, 9, 20, 63, 65, 128], &weights), |case, (n, (m, k))| {
        if m > 1000 && ![1, 8, 9, 65].contains(&n) {
            return;
        }
        let plain = Product { rows: n, outputs: m, inputs: k, normed: false, written: WrittenSums::Rounded };
        let split = plain.own_ways().into_iter().filter_map(|way| match way {
            Way::Tile { height, width, .. } if k == 8 || k == 328 => Some(Way::Tile { height, width, splits: 3 }),
            _ => None,
        });
        for (number, way) in plain.own_ways().into_iter().chain(split).enumerate() {
            let is_few = matches!(way, Way::Few { .. });
            if !is_few && [2, 7, 8].contains(&n) {
                continue; // rows that fill a tile as little as one does
            }
            // Whatever is fused, one after the other; everything where it costs little.
            let all = product(if is_few { &[false, true][..] } else { &[false][..] }, &written);
            let count = if m < 1000 && (is_few || k == 8) { all.len() } else { 1 };
            let all = all.into_iter().cycle().skip(number + case.seed as usize).take(count);
            all.for_each(|fused| check_product(case, way, [n, m, k], fused));
        }
    });
}

#[test]
fn heads_read_the_last_accepted_row_or_their_own() {
    cases(product(&[1, 5], &[8, 40, 264]), |case, (k, h)| {
        let state = case.state(9);
        state::write(&state, Slot::Last, 6);
        let (hidden_nh, x_kh) = (case.normal(&[7, h]), case.normal(&[k, h]));
        let (w_khh, b_kh) = (case.weights(&[k, h, h]), case.normal(&[k, h]));
        for input in [BlockInput::Last { hidden_nh: &hidden_nh, state: &state }, BlockInput::Rows(&x_kh)] {
            let [got, expected] = both(case, &case.output(&[k, h]));
            case.run(&[launches::res_block(input, &w_khh, &b_kh, &got)]);
            oracle::res_block(input, &w_khh, &b_kh, &expected);
            case.assert_close(&got, &expected, 1.0, 0.1);
        }
    });
}

/// Logits with many ties: only 20 distinct values.
fn logits_with_ties(case: &Case, size: &[i64]) -> Tensor {
    case.memory.tensor(&case.below(20, size).to_kind(Kind::Float))
}

/// Compares the kernel with its oracle.
fn check_best(case: &Case, logits_nv: &Tensor) -> Vec<i64> {
    let [got, expected] = both(case, &case.output_of(&[logits_nv.size()[0]], Kind::Int));
    case.run(&[launches::best(logits_nv, &got)]);
    oracle::best(logits_nv, &expected);
    case.assert_equal(&got, &expected);
    Vec::try_from(got.to_kind(Kind::Int64)).expect("one axis")
}

#[test]
fn the_first_of_equals_comes_first() {
    cases(product(&[1, 2, 5], &[5, 50, 4096, 4097, 32_000]), |case, (n, v)| {
        let p = 16.min(v);
        for logits_nv in [logits_with_ties(case, &[n, v]), case.floats(&[n, v])] {
            check_best(case, &logits_nv);
            let [got, expected] = both(case, &case.output_of(&[n, p], Kind::Int));
            let parts = case.memory.poisoned(&launches::guess_parts([n, v], p, Device::Cpu).size(), Kind::Int64);
            let bias_v = (n != 2).then(|| case.normal(&[v]));
            case.run(&launches::top_guesses(&logits_nv, bias_v.as_ref(), &parts, &got));
            oracle::top_guesses(&logits_nv, bias_v.as_ref(), &expected);
            case.assert_equal(&got, &expected);
        }
    });
}

#[test]
fn probabilities_and_entropies_are_those_of_a_softmax() {
    cases(product(&[1, 9, 128], &[(5, 1.0), (1500, 0.7), (4097, 2.0)]), |case, (n, (v, temperature))| {
        let (nodes, tokens_n) = (case.nodes(n), case.below(v.min(70), &[n]));
        let logits_nv = case.memory.tensor(&(case.floats(&[n, v]) * 4));
        if v > 100 {
            let _ = logits_nv.narrow(1, 70, 20).fill_(f64::NEG_INFINITY); // impossible tokens
        }
        let [log_p, log_p_oracle] = both(case, &case.output_of(&[n], Kind::Float));
        let [entropy, entropy_oracle] = both(case, &case.output_of(&[n], Kind::Float));
        case.run(&[launches::posterior(&logits_nv, &tokens_n, &nodes, temperature, [&log_p, &entropy])]);
        oracle::posterior(&logits_nv, &tokens_n, &nodes, temperature, [&log_p_oracle, &entropy_oracle]);
        case.assert_close(&log_p, &log_p_oracle, 1.0, 8.0);
        case.assert_close(&entropy, &entropy_oracle, 1.0, 8.0);
    });
}

#[test]
fn sequential_heads_inherit_the_sums_of_the_level_above() {
    // Nodes, heads that are still to guess, width; levels below the first have passed a head above.
    cases(product(&[(1, 1), (1, 4), (5, 2), (127, 1)], &[8, 264]), |case, ((n, heads), h)| {
        for is_first in [true, false] {
            let (w, above) = (2 * heads * h, if is_first { 1 } else { 3 });
            let before = case.floats(&[above, w + if is_first { 0 } else { 2 * h }]);
            let parents_n = case.below(above, &[n]);
            let bias_w = is_first.then(|| case.normal(&[w]));
            let inherited = Inherited { before: &before, parents_n: &parents_n, bias_w: bias_w.as_ref() };
            let [sums, sums_oracle] = both(case, &case.floats(&[n, w]));
            let [got, expected] = both(case, &case.output(&[n, h]));
            case.run(&[launches::first_block(&sums, inherited, &got)]);
            oracle::first_block(&sums_oracle, inherited, &expected);
            case.assert_equal(&sums, &sums_oracle);
            case.assert_close(&got, &expected, 1.0, 1e-3);
        }
        let (product_nh, bias_h) = (case.floats(&[n, h]), case.normal(&[h]));
        let [got, expected] = both(case, &case.normal(&[n, h]));
        case.run(&[launches::residual(&got, &product_nh, &bias_h)]);
        oracle::residual(&expected, &product_nh, &bias_h);
        case.assert_close(&got, &expected, 1.0, 1e-3);
    });
}

#[test]
fn tokens_of_a_level_are_read_and_those_below_it_written() {
    cases(product(&[1, 6, 127], &[8, 2056]), |case, (n, h)| {
        let tokens = case.memory.tensor(&(case.below(51, &[128]) - 1)); // some are -1, as after logits with NaN
        let (nodes_n, table_vh) = (case.below(128, &[n]), case.normal(&[50, h]));
        let [got, expected] = both(case, &case.output(&[n, h]));
        case.run(&[launches::embed_nodes(&tokens, &nodes_n, &table_vh, &got)]);
        oracle::embed_nodes(&tokens, &nodes_n, &table_vh, &expected);
        case.assert_equal(&got, &expected);

        let (guesses_np, rows_c, ranks_c) = (case.below(1000, &[9, 10]), case.below(9, &[n]), case.below(10, &[n]));
        let [got, expected] = both(case, &case.output_of(&[n], Kind::Int));
        case.run(&[launches::fill_level(&guesses_np, &rows_c, &ranks_c, &got)]);
        oracle::fill_level(&guesses_np, &rows_c, &ranks_c, &expected);
        case.assert_equal(&got, &expected);
    });
}

/// The tokens drawn by the kernel and by its oracle.
fn draw_both(case: &Case, logits_nv: &Tensor, [temperature, top_p]: [f64; 2]) -> [Tensor; 2] {
    let n = logits_nv.size()[0];
    let (nodes, state) = (case.nodes(n), case.state(40));
    let places = Places { nodes: &nodes, state: &state };
    let uniforms_u = case.memory.tensor(&case.uniform(&[7]));
    let draws = Draws { temperature, top_p, uniforms_u: &uniforms_u };
    let [got, expected] = both(case, &case.output_of(&[n], Kind::Int));
    case.run(&[launches::draw(logits_nv, places, draws, &got)]);
    oracle::draw(logits_nv, places, draws, &expected);
    [got, expected]
}

#[test]
fn a_token_is_drawn_where_the_number_of_its_position_falls() {
    let (rows, at_borders) = (Cell::new(0), Cell::new(0));
    cases(
        product(&[1, 4], &product(&[5, 1500, 4097], &[[1.0, 1.0], [0.7, 0.9], [1.5, 0.3], [1.0, 1e-3]])),
        |case, (n, (v, how))| {
            for logits_nv in [logits_with_ties(case, &[n, v]), case.memory.tensor(&(case.floats(&[n, v]) * 2))] {
                let [got, expected] = draw_both(case, &logits_nv, how);
                rows.set(rows.get() + n);
                at_borders.set(
                    at_borders.get() + i64::try_from(got.ne_tensor(&expected).sum(Kind::Int64)).expect("a number"),
                );
            }
        },
    );
    // Because of float32's last bits, a nucleus of thousands of tokens may end one token later, which moves all later
    // borders: rare, but valid.
    assert!(at_borders.get() <= 2, "{} of {} rows are drawn otherwise", at_borders.get(), rows.get());
}

#[test]
fn of_what_is_no_number_no_token_is_chosen() {
    cases([5, 1500, 4097], |case, v| {
        let logits_nv = case.floats(&[5, v]);
        for (row, bad) in [(1, f64::NAN), (3, f64::INFINITY)] {
            let _ = logits_nv.i((row, v - 2)).fill_(bad);
        }
        let _ = logits_nv.i(2).fill_(f64::NEG_INFINITY);
        let _ = logits_nv.i((4, 1)).fill_(f64::NEG_INFINITY); // a finite row with one impossible token stays valid
        let is_chosen = |chosen: Vec<i64>| chosen.iter().map(|&token| (0..v).contains(&token)).collect::<Vec<_>>();
        let best = check_best(case, &logits_nv);
        assert_eq!((best[1], best[2], best[3]), (-1, -1, -1), "{}", case.name);
        assert_eq!(is_chosen(best), [true, false, false, false, true], "{}", case.name);
        for top_p in [1.0, 0.9] {
            for drawn in draw_both(case, &logits_nv, [0.7, top_p]) {
                let drawn = Vec::<i64>::try_from(drawn.to_kind(Kind::Int64)).expect("one axis");
                assert_eq!((drawn[1], drawn[2], drawn[3]), (-1, -1, -1), "{}", case.name);
                assert_eq!(is_chosen(drawn), [true, false, false, false, true], "{}", case.name);
            }
        }
    });
}

#[test]
fn rules_accept_the_paths_that_they_accept_on_the_host() {
    cases(product(&ROWS, &[1, 2, 3, 4]), |case, (n, vocabulary)| {
        let nodes = case.nodes(n);
        let (tokens_n, chosen_n) = (case.below(vocabulary, &[n]), case.below(vocabulary, &[n]));
        let levels = i64::try_from(nodes.depths_n.max()).expect("a number");
        let accepted = |rule: &dyn Fn(Accepted)| {
            let (path, state) = (case.output_of(&[levels + 1], Kind::Int), case.state(9));
            rule(Accepted { path: &path, state: &state });
            (path, state)
        };
        let same = |launch: &dyn Fn(Accepted) -> Launch, oracle: &dyn Fn(Accepted)| {
            let (got, expected) = (accepted(&|out| case.run(&[launch(out)])), accepted(oracle));
            case.assert_equal(&got.0, &expected.0);
            case.assert_equal(&got.1, &expected.1);
        };
        same(&|out| launches::walk(&nodes, &tokens_n, &chosen_n, out), &|out| {
            oracle::walk(&nodes, &tokens_n, &chosen_n, out);
        });
        // Few distinct numbers, so that paths of equal length and equal probability occur.
        let log_p_n = case.memory.tensor(&(case.below(4, &[n]) * -0.75 - 0.25).to_kind(Kind::Float));
        let entropy_n = case.memory.tensor(&case.below(3, &[n]).to_kind(Kind::Float));
        let rule = TypicalAcceptance::default();
        same(&|out| launches::typical(&nodes, [&log_p_n, &entropy_n], rule, &chosen_n, out), &|out| {
            oracle::typical(&nodes, [&log_p_n, &entropy_n], rule, &chosen_n, out);
        });
    });
}

#[test]
fn what_was_accepted_stays_and_the_next_tree_is_filled() {
    let shapes = product(&[(1, 0), (9, 63), (128, 70)], &[64, 128]);
    cases(shapes, |case, ((n, context), d)| {
        let mut rng = case.rng();
        let count = rng.random_range(1..=n.min(11));
        // A path ascends from the root; the entries after it are not read.
        let mut rows: Vec<i64> =
            rand::seq::index::sample(&mut rng, n as usize, count as usize).iter().map(|row| row as i64).collect();
        rows.sort_unstable();
        rows[0] = 0;
        let path = case.memory.tensor(&Tensor::from_slice(&[&rows[..], &[-1; 2]].concat()).to_kind(Kind::Int));
        let state = case.state(context);
        state::write(&state, Slot::Accepted, count);
        state::write(&state, Slot::Next, 77);
        state::write(&state, Slot::Step, 4);
        let accepted = Accepted { path: &path, state: &state };
        let [got, expected] = both(case, &case.normal(&[3, 2, 2, context + n, d]));
        case.run(&[launches::compact(&got, accepted)]);
        oracle::compact(&expected, accepted);
        case.assert_equal(&got, &expected);

        let tokens_n = case.below(1000, &[n]);
        let [results, results_oracle] = both(case, &case.below(9, &[3, state::RESULT_HEAD + 12]));
        let [state_got, state_oracle] = both(case, &state);
        case.run(&[launches::advance(Accepted { path: &path, state: &state_got }, &tokens_n, &results)]);
        oracle::advance(Accepted { path: &path, state: &state_oracle }, &tokens_n, &results_oracle);
        case.assert_equal(&results, &results_oracle);
        case.assert_equal(&state_got, &state_oracle);

        let (nodes, ids_kp) = (case.nodes(n), case.below(1000, &[6, 10]));
        let [got, expected] = both(case, &case.output_of(&[n], Kind::Int));
        case.run(&[launches::fill_tree(&nodes, &ids_kp, &state, &got)]);
        oracle::fill_tree(&nodes, &ids_kp, &state, &expected);
        case.assert_equal(&got, &expected);
    });
}

/// Runs a kernel in the emulator in both orders of threads: `OUT[thread]`, or the error.
fn of_kernel(body: &str, threads: u32, shared_bytes: u32) -> [Result<Vec<i64>, String>; 2] {
    of_whole_kernel(&format!("begin(); {body}"), threads, shared_bytes)
}

/// Like [`of_kernel`], of a kernel that waits for the kernels before it by itself.
fn of_whole_kernel(body: &str, threads: u32, shared_bytes: u32) -> [Result<Vec<i64>, String>; 2] {
    let memory = Memory::default();
    let source = format!(
        "#define ELEMENT_BF16
#define HEAD_SIZE 64
{PRELUDE}
KERNEL(64) probe(int* out) {{ {body} }}
"
    );
    [Order::Forwards, Order::Backwards].map(|order| {
        let out = memory.poisoned(&[i64::from(threads)], Kind::Int);
        let launch = Launch {
            kernel: Kernel { program: Program::Rows, name: "probe" },
            grid: [1, 1, 1],
            threads,
            shared_bytes,
            arguments: vec![Argument::Pointer(out.data_ptr() as u64)],
        };
        emulator::run(&source, &["probe"], &launch, order, &memory.hidden())?;
        Ok(Vec::try_from(out.to_kind(Kind::Int64)).expect("one axis"))
    })
}

#[test]
fn the_emulator_finds_what_a_gpu_would_not_forgive() {
    let faults = [
        ("int i = threadIdx.x; out[i + 1] = i;", "memory that is not its own"),
        ("if (threadIdx.x < 9) __syncwarp(); __syncthreads();", "waits for ever at __sync"),
        ("if (threadIdx.x < 32) __syncthreads();", "waits for ever at __syncthreads"),
        (
            "if (threadIdx.x % 2) __shfl_xor_sync(ALL_LANES, 1, 1); else __ballot_sync(ALL_LANES, 1);",
            "others of its warp or block are at",
        ),
        ("out[threadIdx.x] = __shfl_xor_sync(1u, 1, 1);", "a mask that is not the whole warp"),
        ("store16((char*)out + 4, make_uint4(1, 2, 3, 4));", "no multiple of 16"),
        ("LAUNCHED_SHARED(room); copy16_async(room, out, true);", "a copy that it never waited for"),
        ("LAUNCHED_SHARED(room); copy16_async(room + 64, out, true);", "not shared memory"),
        ("LAUNCHED_SHARED(room); room[64] = make_uint4(0, 0, 0, 0);", "memory that is not its own"),
    ];
    for (body, words) in faults {
        for outcome in of_kernel(body, 64, 1024) {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{body}: {outcome:?}");
        }
    }
    let early = [
        ("out[threadIdx.x] = 1; begin();", "before it has waited"),
        ("LAUNCHED_SHARED(room); copy16_async(room, out, true); begin(); wait_copies<0>();", "before it has waited"),
        ("if (threadIdx.x > 3) return; begin();", "ends without waiting for the kernels before it"),
    ];
    for (body, words) in early {
        for outcome in of_whole_kernel(body, 64, 1024) {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{body}: {outcome:?}");
        }
    }
    // Faults without an error show as a difference between the orders, or as poison.
    let racing = of_kernel(
        "SHARED int last; last = threadIdx.x; out[threadIdx.x] = last; __syncthreads(); out[threadIdx.x] = last;",
        64,
        0,
    );
    assert_ne!(racing[0], racing[1]);
    let before = of_kernel("SHARED int x[64]; out[threadIdx.x] = x[63 - threadIdx.x]; x[threadIdx.x] = 1;", 64, 0);
    assert!(before.iter().flatten().all(|out| out.contains(&-1)), "{before:?}");
    let copied = "LAUNCHED_SHARED(room); SHARED uint4 from[64]; int i = threadIdx.x; from[i] = make_uint4(7, 7, 7, 7); \
                  copy16_async(room + i, from + i, true); end_copies(); int early = room[i].x; wait_copies<0>(); ";
    for (read, expected) in [("early", -1), ("room[i].x", 7)] {
        let outcome = of_kernel(&format!("{copied} out[i] = {read};"), 64, 1024);
        assert!(outcome.iter().all(|out| out.as_ref().is_ok_and(|out| *out == [expected; 64])), "{outcome:?}");
    }
    let right =
        "SHARED int x[64]; x[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = x[63 - threadIdx.x];";
    assert_eq!(
        of_kernel(right, 64, 0).map(Result::unwrap),
        [(0..64).rev().collect::<Vec<i64>>(), (0..64).rev().collect()]
    );
}

#[test]
fn the_emulator_rounds_as_libtorch_does() {
    let all = Tensor::arange(65536, (Kind::Int, Device::Cpu)).to_kind(Kind::Int16).view([1, 65536]);
    for (number, &kind) in KINDS.iter().enumerate() {
        let case = Case::new(number, 0, "every number and another one".to_owned());
        assert_eq!(case.kind, kind);
        let x_nh = all.view_dtype(kind);
        let finite = |x: &Tensor| x.to_kind(Kind::Float).nan_to_num(0.0, 1e30, -1e30);
        let x_nh = finite(&x_nh).to_kind(kind); // without NaN; numbers too large for the dtype become infinite again
        for seed in 0..4 {
            let delta_nh = case.memory.tensor(&x_nh.index_select(1, &Generator::seeded(seed).permutation(65536)));
            let got = case.memory.tensor(&x_nh);
            add_in_place(&case, &got, &delta_nh);
            let expected = (x_nh.to_kind(Kind::Float) + delta_nh.to_kind(Kind::Float)).to_kind(kind);
            case.assert_equal(&finite(&got), &finite(&expected)); // inf - inf is NaN in both
        }
    }
}

/// x += delta by a kernel of the test.
fn add_in_place(case: &Case, x: &Tensor, delta: &Tensor) {
    let element = if case.kind == Kind::Half { "ELEMENT_F16" } else { "ELEMENT_BF16" };
    let body =
        "begin(); int i = blockIdx.x * 64 + threadIdx.x; x[i] = to_element(to_float(x[i]) + to_float(delta[i]));";
    let source = format!(
        "#define {element}\n#define HEAD_SIZE 64\n{PRELUDE}\nKERNEL(64) add(element* x, const element* delta) {{ {body} }}\n"
    );
    let launch = Launch {
        kernel: Kernel { program: Program::Rows, name: "add" },
        grid: [x.numel() as u32 / 64, 1, 1],
        threads: 64,
        shared_bytes: 0,
        arguments: [x, delta].map(|tensor| Argument::Pointer(tensor.data_ptr() as u64)).to_vec(),
    };
    emulator::run(&source, &["add"], &launch, case.order, &[]).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
#[expect(clippy::print_stdout, reason = "the table of what kernels take")]
fn every_kernel_compiles_for_every_gpu_without_spilling() {
    let folder = tempfile::tempdir().expect("a folder");
    let compiler = Compiler::open(Some(folder.path().into())).unwrap_or_else(|error| panic!("{error}"));
    println!(
        "NVRTC {:?}\n{:<24} {:>9} {:>5} {:>5} {:>5} {:>7} {:>6}",
        compiler.version(),
        "kernel",
        "element",
        "D",
        "arch",
        "regs",
        "shared",
        "spills"
    );
    let mut faults = vec![];
    for (arch, (program, kind)) in
        product(&["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"], &product(&Program::ALL, &KINDS))
    {
        if kind != KINDS[0] && !program.has_elements() {
            continue;
        }
        let element = KernelDtype::of(kind).expect("16 bits");
        for &head_size in if program.has_head_size() { &[64, 128][..] } else { &[128] } {
            let compiled =
                compiler.compile(program, element, head_size, arch).unwrap_or_else(|error| panic!("{error}"));
            let again = compiler.compile(program, element, head_size, arch).unwrap_or_else(|error| panic!("{error}"));
            assert!(compiled.cubin.starts_with(b"\x7fELF") && compiled == again);
            let mut found: Vec<String> = vec![];
            for takes in compiled.resources() {
                let line = format!(
                    "{:<24} {kind:>9?} {head_size:>5} {arch:>6} {:>4} {:>7} {:>6}",
                    takes.kernel, takes.registers, takes.shared_bytes, takes.spilled_bytes
                );
                println!("{line}");
                faults.extend((takes.spilled_bytes > 0 || takes.registers == 0).then_some(line));
                found.push(takes.kernel);
            }
            let mut expected = program.kernels();
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected);
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch (scripts/setup)")]
fn a_kernel_that_is_refused_tells_the_file_and_the_line() {
    let compiler = Compiler::open(None).unwrap_or_else(|error| panic!("{error}"));
    let error = compiler.compile(Program::TreeAttention, KernelDtype::BFloat16, 128, "sm_75").unwrap_err().to_string();
    assert!(error.contains("tree_attention.cu for sm_75"), "{error}");
}
