//! Attention of a step, with what it does to queries, keys and values first.

// Letters as in `cuda_kernels`

use super::*;

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
    let places = StepPositions { nodes: &nodes, state: &state };
    let room = context + n; // no spare row
    let rotations = rotations(case, room, d);
    let (has_bias, has_norms) = HEAD_INPUTS[case.seed as usize / HEADS.len() % HEAD_INPUTS.len()];
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
    // These errors are independent: a tile of keys that is left out is farther off than all of them together.
    let (far, most) = (distance(&got, &expected), if case.kind == Kind::BFloat16 { 5e-3 } else { 1e-3 });
    assert!(far < most, "{}: the output is {far} away", case.name);
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
