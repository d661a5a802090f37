//! Attention over whole rows, in blocks and by segments, against attention under one mask.

use tch::Kind;

use super::*;
use crate::model::config::LlamaConfig;
use crate::model::mask::additive;
use crate::torch::Generator;
use crate::torch::flash_attention::tests::emulation::emulated;

const T: i64 = 2 * CAPPED_BLOCK + 37;

/// Attention without projections.
fn attention(shape: HeadShape) -> Attention {
    let o = Linear::dense(Tensor::zeros([0, 0], (Kind::Double, Device::Cpu)), None);
    Attention { qkv: LinearGroup::separate(vec![]), o, shape, query_key_norm: None }
}

/// `[2, T, heads, D]` each, random.
fn queries_keys_values(shape: HeadShape) -> [Tensor; 3] {
    let mut random = Generator::seeded(3);
    let options = (Kind::Double, Device::Cpu);
    [shape.q, shape.g, shape.g].map(|heads| random.normal(&[2, T, heads, shape.d], options) * 3.0)
}

/// Attention `[2, T, Q, D]` and the gradients of queries, keys and values.
fn with_gradients(attend: impl Fn(&[Tensor; 3]) -> Tensor, shape: HeadShape) -> [Tensor; 4] {
    let inputs = queries_keys_values(shape).map(|input| input.set_requires_grad(true));
    let out = attend(&inputs);
    let weights = Generator::seeded(4).normal(&out.size(), (Kind::Double, Device::Cpu));
    (&out * weights).sum(Kind::Double).backward();
    let [q, k, v] = inputs.map(|input| input.grad());
    [out.detach(), q, k, v]
}

fn assert_equal(expected: &[Tensor; 4], got: &[Tensor; 4]) {
    for (what, (expected, got)) in ["out", "dq", "dk", "dv"].iter().zip(expected.iter().zip(got)) {
        let difference = (expected - got).abs().max().double_value(&[]);
        assert!(difference < 1e-11, "{what}: {difference}");
    }
}

/// Some rows hold several texts, one has no padding; or a row is one text.
fn masks(config: &LlamaConfig) -> [RowMask; 2] {
    let packed = [vec![150, 90], vec![1, 92, 200]];
    [RowMask::causal(T, config, Device::Cpu), RowMask::packed(&packed, T, config, Device::Cpu)]
}

#[test]
fn capped_attention_in_blocks_equals_attention_over_all_keys() {
    let families = LlamaConfig::tiny_of_each_family();
    let config = families.into_iter().find(|config| config.block().heads.softcap.is_some()).expect("Gemma 2");
    let attention = attention(config.block().heads);
    let [causal, packed] = masks(&config);
    assert!(causal.kinds().iter().any(|kind| kind.pattern.is_some()), "a window cuts");
    assert!(causal.kinds().iter().any(|kind| kind.pattern.is_none()), "some layers have no window");
    for mask in causal.kinds().iter().chain(packed.kinds()) {
        assert_eq!(mask.block, Some(CAPPED_BLOCK));
        let lower = || additive(&Tensor::ones([T, T], (Kind::Bool, Device::Cpu)).tril(0), Kind::Double);
        let all = mask.pattern.as_ref().map_or_else(lower, |pattern| pattern.dense(Kind::Double).shallow_clone());
        let at_once = |qkv: &[Tensor; 3]| {
            let [q, k, v] = qkv.each_ref().map(|x| x.transpose(1, 2));
            let [k, v] = [k, v].map(|x| attention.for_each_query_head(&x));
            attention.attend_capped(&q, &k, &v, Some(&all)).transpose(1, 2)
        };
        let expected = with_gradients(at_once, attention.shape);
        assert_equal(&expected, &with_gradients(|qkv| attention.attend_rows(qkv, mask), attention.shape));
    }
}

/// Windows that cut and windows that do not, and groups of query heads.
#[test]
fn flash_attention_over_segments_equals_attention_under_a_mask() {
    let config = LlamaConfig::tiny();
    for window in [None, Some(1), Some(40), Some(T)] {
        let config = LlamaConfig { sliding_window: window, ..config.clone() };
        let attention = attention(config.block().heads);
        assert!(attention.shape.q > attention.shape.g && attention.shape.softcap.is_none());
        for mask in masks(&config).iter().flat_map(RowMask::kinds).filter(|mask| mask.pattern.is_some()) {
            let attend = |qkv: &[Tensor; 3]| attention.attend_rows(qkv, mask);
            let expected = with_gradients(attend, attention.shape);
            assert_equal(&expected, &emulated(|| with_gradients(attend, attention.shape)));
        }
    }
}

/// libtorch shares keys and values where it is asked to.
#[test]
fn causal_attention_that_shares_keys_equals_that_of_repeated_keys() {
    let attention = attention(LlamaConfig::tiny().block().heads);
    let attend = |qkv: &[Tensor; 3]| {
        let [q, k, v] = qkv.each_ref().map(|x| x.transpose(1, 2));
        attention.attend_causal(&q, &k, &v).transpose(1, 2)
    };
    assert_equal(&with_gradients(attend, attention.shape), &emulated(|| with_gradients(attend, attention.shape)));
}
