//! Every kernel of a decoding step on the GPU computes what its oracle on tensors computes. The kernels run on the CPU,
//! in an emulator of blocks, warps and their instructions; a GPU's own rounding, timing and memory model are not tested
//! here.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "kernels are C++ that a test builds and loads")]

// N rows of a step, H hidden, Q query heads, G key/value heads, D head size, I width of the MLP, V vocabulary, K heads, S room for
// tokens, P guesses a head
use std::cell::{Cell, RefCell};

use medusa::engine::cuda::launches::{self, AttentionParts, SliceRoom};
use medusa::engine::cuda::layout::{Nodes, Rotations};
use medusa::engine::cuda::oracle::{
    self, Accepted, BlockInput, Draws, HeadInputs, HeadNorms, ParentSums, StepPositions,
};
use medusa::engine::cuda::state::{self, Slot};
use medusa::nvidia::gemm::{Ending, GemmAlgorithm, InputNorm, Operands, Product, SplitRoom, WrittenSums};
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

mod attention;
mod choices;
mod compiled;
pub(crate) mod emulator;
mod faults;
mod products;

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
            _ => Nodes::for_tree(&SparseTree::new(paths[1..].to_vec()).expect("a tree"), Device::Cpu),
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

#[test]
fn sequential_heads_inherit_the_sums_of_the_level_above() {
    // Nodes, heads that are still to guess, width; levels below the first have passed a head above.
    cases(product(&[(1, 1), (1, 4), (5, 2), (127, 1)], &[8, 264]), |case, ((n, heads), h)| {
        for is_first in [true, false] {
            let (w, above) = (2 * heads * h, if is_first { 1 } else { 3 });
            let before = case.floats(&[above, w + if is_first { 0 } else { 2 * h }]);
            let parents_n = case.below(above, &[n]);
            let bias_w = is_first.then(|| case.normal(&[w]));
            let inherited = ParentSums { before: &before, parents_n: &parents_n, bias_w: bias_w.as_ref() };
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
