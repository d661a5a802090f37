//! The oracle agrees with the decoding loop on the host.

use proptest::prelude::*;

use super::*;
use crate::torch::Generator;
use crate::tree::accept;
use crate::tree::sparse_tree::SparseTree;
use crate::tree::sparse_tree::strategy::trees;

fn ints(numbers: &[i64]) -> Tensor {
    Tensor::from_slice(numbers).to_kind(Kind::Int)
}

/// The path that a rule accepts, and the token after it.
fn accepted(nodes: &Nodes, rule: impl FnOnce(Accepted)) -> (Vec<usize>, i64) {
    let (path, state) =
        (ints(&vec![-1; nodes.len().unsigned_abs() as usize]), state::before_first(9, 0, 0, Device::Cpu));
    rule(Accepted { path: &path, state: &state });
    let count = state::read(&state, Slot::Accepted);
    let path: Vec<usize> = host(&path.narrow(0, 0, count)).iter().map(|&node| node as usize).collect();
    assert_eq!(path.last().copied(), Some(state::read(&state, Slot::Last) as usize));
    (path, state::read(&state, Slot::Next))
}

proptest! {
    #[test]
    fn rules_accept_what_they_accept_on_the_host(
        tree in trees(40, 4, 3),
        tokens in proptest::collection::vec(0i64..3, 41),
        chosen in proptest::collection::vec(0i64..3, 41),
        log_p in proptest::collection::vec(0usize..4, 41),
        entropy in 0.0f64..4.0,
    ) {
        let (n, nodes) = (tree.len(), Nodes::for_tree(&tree, Device::Cpu));
        let (tokens, chosen) = (&tokens[..n], &chosen[..n]);
        let walked = accepted(&nodes, |out| walk(&nodes, &ints(tokens), &ints(chosen), out));
        prop_assert_eq!(walked, accept::walk(&tree, tokens, |node| chosen[node]));
        // Values that are exact in float32, some of them equal.
        let log_p: Vec<f64> = log_p[..n].iter().map(|&at| [-0.25, -0.5, -1.75, -4.0][at]).collect();
        let (rule, entropy) = (TypicalAcceptance::default(), vec![f64::from(entropy as f32); n]);
        let posterior = [&Tensor::from_slice(&log_p), &Tensor::from_slice(&entropy)];
        let got = accepted(&nodes, |out| typical(&nodes, posterior, rule, &ints(chosen), out));
        let path = accept::typical(&tree, &log_p, &entropy, rule);
        prop_assert_eq!(got.1, chosen[path[path.len() - 1]]);
        prop_assert_eq!(got.0, path);
    }
}

/// Without a rotation, queries and keys are what libtorch's sum and norm compute, and values its sum.
#[test]
fn bias_and_norms_round_as_libtorchs_pass_does() {
    let [n, q, g, d] = [7, 4, 2, 64];
    let (nodes, state) = (Nodes::chain(n as usize, Device::Cpu), state::before_first(0, 0, 0, Device::Cpu));
    let table = |number: f64| Tensor::full([n, d / 2], number, (Kind::Float, Device::Cpu));
    let rotations = Rotations { cos_sd: table(1.0), sin_sd: table(0.0) };
    for kind in [Kind::BFloat16, Kind::Half] {
        let mut generator = Generator::seeded(5);
        let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).to_kind(kind);
        let (qkv_nw, bias_w) = (normal(&[n, (q + 2 * g) * d]), normal(&[(q + 2 * g) * d]));
        let (query_d, key_d) = (normal(&[d]), normal(&[d]));
        let norms = Some(HeadNorms { query_d: &query_d, key_d: &key_d, eps: 1e-6 });
        let inputs = HeadInputs { qkv_nw: &qkv_nw, bias_w: Some(&bias_w), norms, rotations: &rotations };
        let (q_nqd, kv_2gnd) = (normal(&[n, q, d]), normal(&[2, g, n, d]));
        rope_append(inputs, StepPositions { nodes: &nodes, state: &state }, &q_nqd, &kv_2gnd);
        let sum_nhd = (&qkv_nw + &bias_w).view([n, q + 2 * g, d]);
        let normed =
            |from, heads, weight_d: &Tensor| sum_nhd.narrow(1, from, heads).rms_norm([d], Some(weight_d), 1e-6);
        assert_eq!(q_nqd, normed(0, q, &query_d), "{kind:?}");
        assert_eq!(kv_2gnd.select(0, 0).transpose(0, 1), normed(q, g, &key_d), "{kind:?}");
        assert_eq!(kv_2gnd.select(0, 1).transpose(0, 1), sum_nhd.narrow(1, q + g, g), "{kind:?}");
    }
}

#[test]
fn the_accepted_rows_follow_the_committed_ones() {
    let cache = Tensor::arange(2 * 2 * 3 * 12 * 4, (Kind::Float, Device::Cpu)).view([2, 2, 3, 12, 4]);
    let before = cache.copy();
    let (path, state) = (ints(&[0, 2, 5]), state::before_first(4, 0, 0, Device::Cpu));
    state::write(&state, Slot::Accepted, 3);
    let accepted = Accepted { path: &path, state: &state };
    compact(&cache, accepted);
    let rows = |cache: &Tensor, rows: &[i64]| cache.index_select(3, &Tensor::from_slice(rows));
    assert_eq!(rows(&cache, &[0, 1, 2, 3, 4, 5, 6]), rows(&before, &[0, 1, 2, 3, 4, 6, 9]));
    let results = ints(&[0; 12]).view([2, 6]);
    state::write(&state, Slot::Next, 77);
    state::write(&state, Slot::Step, 3);
    advance(accepted, &ints(&[10, 11, 12, 13, 14, 15]), &results);
    assert_eq!(host(&results.select(0, 1)), [4, 3, 77, 10, 12, 15]);
    assert_eq!([state::read(&state, Slot::Context), state::read(&state, Slot::Step)], [7, 4]);
}

#[test]
fn nodes_hold_the_root_and_the_heads_guesses() {
    let tree = SparseTree::new(vec![vec![0], vec![2], vec![0, 1], vec![0, 1, 0]]).unwrap();
    let nodes = Nodes::for_tree(&tree, Device::Cpu);
    let (state, tokens_n) = (state::before_first(4, 0, 99, Device::Cpu), ints(&[-1; 5]));
    fill_tree(&nodes, &Tensor::arange(9, (Kind::Int, Device::Cpu)).view([3, 3]), &state, &tokens_n);
    assert_eq!(host(&tokens_n), [99, 0, 2, 4, 6]);
}
