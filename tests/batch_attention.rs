//! Promise: the kernel that attends for a batch of texts computes what libtorch's masked attention computes, and appends to the cache. It runs in
//! the emulator of `cuda_kernels`.
#![cfg(target_os = "linux")]

// B texts, Q query heads, G key/value heads, R = Q/G, S room for tokens, D head size
use medusa::fused::batch_attention::BatchAttention;
use medusa::nvidia::kernels::KernelDtype;
use medusa::torch::Generator;
use tch::{Device, Kind, Tensor};

use crate::cuda_kernels::emulator::{Emulator, Memory, Order};

const ROOM: i64 = 130;
const SCALE: f64 = 0.11;

/// Masked attention in float32 over the whole room: `[B, Q, D]`.
fn by_libtorch(qkv_bhd: &Tensor, cache_bgsd: &Tensor, lengths: &[i64], window: Option<i64>) -> Tensor {
    let [b, heads, d] = qkv_bhd.size()[..] else { panic!("[B, Q + 2G, D]") };
    let g = cache_bgsd.size()[1] / 2;
    let (q, at_s) = (heads - 2 * g, Tensor::arange(ROOM, (Kind::Int64, Device::Cpu)));
    let lengths_b1 = Tensor::from_slice(lengths).unsqueeze(1);
    let behind_bs = &lengths_b1 - at_s;
    let hidden_bs = behind_bs.lt(0).logical_or(&behind_bs.ge(window.unwrap_or(i64::MAX)));
    let mask_b11s = Tensor::zeros([b, ROOM], (Kind::Float, Device::Cpu)).masked_fill(&hidden_bs, f64::NEG_INFINITY);
    let all = cache_bgsd.nan_to_num(0.0, 0.0, 0.0).to_kind(Kind::Float); // what no text has written is poisoned
    let [keys, values] = [0, g].map(|from| all.narrow(1, from, g));
    let q_bgrd = qkv_bhd.narrow(1, 0, q).to_kind(Kind::Float).view([b, g, q / g, d]);
    let mask = mask_b11s.unsqueeze(1).unsqueeze(1);
    Tensor::scaled_dot_product_attention(&q_bgrd, &keys, &values, Some(&mask), 0.0, false, SCALE, false).view([b, q, d])
}

/// Keys and values of texts of these lengths; NaN behind them, and in a row that belongs to none.
fn cache(memory: &Memory, lengths: &[i64], [g, d]: [i64; 2], kind: Kind) -> Tensor {
    let b = lengths.len() as i64;
    let cache_bgsd = memory.poisoned(&[b + 1, 2 * g, ROOM, d], kind);
    for (row, &length) in (0i64..).zip(lengths) {
        let committed = Generator::seeded(row.unsigned_abs()).normal(&[2 * g, length, d], (Kind::Float, Device::Cpu));
        cache_bgsd.select(0, row).narrow(1, 0, length).copy_(&committed);
    }
    cache_bgsd
}

#[test]
fn every_text_attends_to_its_own_tokens_and_keeps_the_new_one() {
    let mut number = 0;
    for d in [64, 128] {
        for share in [1, 2, 3, 4, 7, 8] {
            for window in [None, Some(1), Some(5), Some(40)] {
                number += 1;
                let (kind, order) =
                    ([Kind::BFloat16, Kind::Half][number % 2], [Order::Forwards, Order::Backwards][number / 2 % 2]);
                let what = format!("heads of {d}, {share} a key, window {window:?}, {kind:?}, {order:?}");
                let (memory, g, lengths) = (Memory::default(), 2, [0, [63, 64, 65, 31][number % 4], ROOM - 1]);
                let cache_bgsd = cache(&memory, &lengths, [g, d], kind);
                let new = Generator::seeded(number as u64).normal(&[3, (share + 2) * g, d], (Kind::Float, Device::Cpu));
                let (qkv_bhd, lengths_b) =
                    (memory.tensor(&new.to_kind(kind)), memory.tensor(&Tensor::from_slice(&lengths)));
                let expected_cache = cache_bgsd.copy();
                for (row, &length) in (0i64..).zip(&lengths) {
                    let appended = qkv_bhd.get(row).narrow(0, share * g, 2 * g);
                    expected_cache.get(row).select(1, length).copy_(&appended);
                }
                let expected = by_libtorch(&qkv_bhd, &expected_cache.narrow(0, 0, 3), &lengths, window);
                let out_bqd = memory.poisoned(&[3, share * g, d], kind);
                let attention = BatchAttention {
                    qkv_bhd: &qkv_bhd,
                    cache_bgsd: &cache_bgsd,
                    lengths_b: &lengths_b,
                    scale: SCALE,
                    window,
                };
                let launch = attention.launch(&out_bqd).expect("a kernel for the shape");
                Emulator { element: KernelDtype::of(kind).expect("16 bits"), head_size: 0 }.run(&launch, order);
                let unit = if kind == Kind::BFloat16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
                let far = (out_bqd.to_kind(Kind::Float) - &expected).abs() / (expected.abs() + 0.1);
                assert!(far.max().double_value(&[]) <= 2.0 * unit, "{what}: {far:?}");
                let bits = |cache: &Tensor| cache.view_dtype(Kind::Int16);
                assert_eq!(
                    bits(&cache_bgsd),
                    bits(&expected_cache),
                    "{what}: what was there stays, the new keys and values are behind it"
                );
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_left_to_libtorch() {
    let of = |q: i64, g: i64, d: i64, kind: Kind| {
        let zeros = |size: &[i64]| Tensor::zeros(size, (kind, Device::Cpu));
        let (qkv_bhd, cache_bgsd) = (zeros(&[1, q + 2 * g, d]), zeros(&[1, 2 * g, 8, d]));
        let lengths_b = Tensor::zeros([1], (Kind::Int64, Device::Cpu));
        let attention = BatchAttention {
            qkv_bhd: &qkv_bhd,
            cache_bgsd: &cache_bgsd,
            lengths_b: &lengths_b,
            scale: 1.0,
            window: None,
        };
        assert!(attention.run().is_none(), "no kernel runs on a CPU");
        attention.launch(&zeros(&[1, q, d])).is_some()
    };
    assert!(of(8, 1, 64, Kind::BFloat16) && of(32, 32, 128, Kind::Half));
    assert!(!of(9, 1, 64, Kind::BFloat16), "more heads a key");
    assert!(!of(4, 4, 96, Kind::BFloat16), "another head size");
    assert!(!of(4, 4, 64, Kind::Float), "float32");
}
