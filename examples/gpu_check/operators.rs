//! Checks on a GPU what decoding and training call there and nowhere else: attention of batches and of packed rows, products that are stored in
//! float32, tokens that are drawn on the device, copies through pinned memory, and the figures of libtorch's allocator.

// B texts, Q query heads, G key/value heads, D head size, S room for tokens, N tokens
use medusa::cli::print_json;
use medusa::engine::sample::{Sampler, Sampling, Stream, next_of_each};
use medusa::fused::batch_attention::BatchAttention;
use medusa::numbers::{NonNegative, Probability};
use medusa::torch::flash_attention::{self, Segments};
use medusa::torch::products::Float32Products;
use medusa::torch::transfer::{HostTensor, wait_for};
use medusa::torch::{allocator, cuda_runtime, memory, upload};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::fused::{FARTHEST, distance, normal};

const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Half];
/// Query and key/value heads.
const HEADS: [i64; 2] = [8, 2];
const WINDOWS: [Option<i64>; 2] = [None, Some(40)];

/// Runs every check.
///
/// # Errors
/// Those that failed.
pub(crate) fn check(on: Device) -> anyhow::Result<()> {
    let mut wrong = vec![];
    let mut report = |operation: String, distance: f64, most: f64| -> anyhow::Result<()> {
        print_json(&json!({"check": "operators", "operation": operation, "distance": distance.min(f64::MAX)}))?;
        if distance.is_nan() || distance > most {
            wrong.push(operation);
        }
        Ok(())
    };
    let cases = KINDS.iter().flat_map(|&kind| [64, 128].map(|d| (kind, d)));
    for (kind, d, window) in cases.flat_map(|(kind, d)| WINDOWS.map(|window| (kind, d, window))) {
        let what = format!("{kind:?}, heads of {d}, window {window:?}");
        for (part, far) in batch_attention(on, kind, d, window)? {
            report(format!("attention of a batch: {part}, {what}"), far, FARTHEST)?;
        }
        for (part, far) in packed_attention(on, kind, d, window) {
            report(format!("flash attention: {part}, {what}"), far, 2.0 * FARTHEST)?; // backwards, scores are rounded twice
        }
    }
    for kind in KINDS {
        report(format!("products in float32 of {kind:?}"), products(on, kind), 1e-4)?;
    }
    for (what, differing) in draws(on) {
        report(format!("draws: {what}"), differing, 1.0)?; // a border between two tokens may be rounded otherwise
    }
    report("pinned copies".to_owned(), f64::from(!copies_come_back(on)), 0.0)?;
    report("allocator".to_owned(), f64::from(!allocator_counts(on)?), 0.0)?;
    anyhow::ensure!(wrong.is_empty(), "wrong on this GPU: {wrong:?}");
    Ok(())
}

/// Softmax attention in float32, by products: queries `[Q, N, D]`, keys and values `[G, S, D]`, `hidden_ns` where a query sees nothing.
fn attention([q, k, v]: [&Tensor; 3], hidden_ns: &Tensor, scale: f64) -> Tensor {
    let shared = q.size()[0] / k.size()[0];
    let [q, k, v] = [
        q.shallow_clone(),
        k.repeat_interleave_self_int(shared, 0, None),
        v.repeat_interleave_self_int(shared, 0, None),
    ]
    .map(|x| x.to_kind(Kind::Float));
    let scores = (q.matmul(&k.transpose(-2, -1)) * scale).masked_fill(hidden_ns, f64::NEG_INFINITY);
    scores.softmax(-1, Kind::Float).matmul(&v)
}

/// Whether the tokens at `places` are hidden from those at `from`: later ones, and those before the window.
fn hidden(from_n: &Tensor, places_s: &Tensor, window: Option<i64>) -> Tensor {
    let behind_ns = from_n.unsqueeze(1) - places_s.unsqueeze(0);
    behind_ns.lt(0).logical_or(&behind_ns.ge(window.unwrap_or(i64::MAX)))
}

/// A step of five texts of unlike lengths: how far its output is, and the share of the cache that is not what it should be.
fn batch_attention(on: Device, kind: Kind, d: i64, window: Option<i64>) -> anyhow::Result<[(&'static str, f64); 2]> {
    const LENGTHS: [i64; 5] = [0, 63, 64, 200, 299];
    const ROOM: i64 = 300;
    let ([q, g], b) = (HEADS, LENGTHS.len() as i64);
    let (qkv_bhd, cache_bgsd) = (normal(1, &[b, q + 2 * g, d], kind, on), normal(2, &[b, 2 * g, ROOM, d], kind, on));
    let (expected_cache, scale) = (cache_bgsd.copy(), (d as f64).powf(-0.5));
    let of_text = |(row, &length): (i64, &i64)| {
        let (new_hd, cache_gsd) = (qkv_bhd.get(row), expected_cache.get(row));
        cache_gsd.select(1, length).copy_(&new_hd.narrow(0, q, 2 * g));
        let places_s = Tensor::arange(ROOM, (Kind::Int64, on));
        let hidden_1s = hidden(&Tensor::from_slice(&[length]).to_device(on), &places_s, window);
        let [k, v] = [0, g].map(|from| cache_gsd.narrow(0, from, g));
        attention([&new_hd.narrow(0, 0, q).unsqueeze(1), &k, &v], &hidden_1s, scale).squeeze_dim(1)
    };
    let expected = Tensor::stack(&(0..).zip(&LENGTHS).map(of_text).collect::<Vec<_>>(), 0);
    let lengths_b = upload(&LENGTHS, on);
    let step = BatchAttention { qkv_bhd: &qkv_bhd, cache_bgsd: &cache_bgsd, lengths_b: &lengths_b, scale, window };
    let Some(out_bqd) = step.run() else {
        anyhow::ensure!(!on.is_cuda(), "attention of a batch has no kernel for heads of {d} in {kind:?}");
        return Ok([("output", 0.0), ("cache", 0.0)]);
    };
    let differs = cache_bgsd.ne_tensor(&expected_cache).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    Ok([("output", distance(&out_bqd, &expected)), ("cache", differs)])
}

/// Texts of several lengths in one row, forwards and backwards.
fn packed_attention(on: Device, kind: Kind, d: i64, window: Option<i64>) -> Vec<(&'static str, f64)> {
    const LENGTHS: [i64; 3] = [5, 64, 131];
    let ([q, g], n, scale) = (HEADS, LENGTHS.iter().sum::<i64>(), (d as f64).powf(-0.5));
    if !flash_attention::runs_on(&Tensor::empty([d], (kind, on))) {
        return vec![("is not used on this device", if on.is_cuda() { f64::INFINITY } else { 0.0 })];
    }
    let inputs = [q, g, g].map(|heads| normal(heads.unsigned_abs() + 7, &[n, heads, d], kind, on));
    let gradient = normal(3, &[n, q, d], kind, on);
    let with_gradients = |attend: &dyn Fn([&Tensor; 3]) -> Tensor| {
        tch::with_grad(|| {
            let inputs = inputs.each_ref().map(|x| x.detach().copy().set_requires_grad(true));
            let out = attend(inputs.each_ref());
            (&out.to_kind(Kind::Float) * &gradient).sum(Kind::Float).backward();
            let [q, k, v] = inputs.map(|x| x.grad());
            [out.detach(), q, k, v]
        })
    };
    let segments = Segments::new(&LENGTHS, on);
    let got = with_gradients(&|inputs| flash_attention::attend(inputs, &segments, window, scale));
    let places =
        LENGTHS.iter().enumerate().flat_map(|(text, &length)| (0..length).map(move |at| text as i64 * 10_000 + at));
    let places_n = Tensor::from_slice(&places.collect::<Vec<i64>>()).to_device(on);
    let behind = places_n.unsqueeze(1) - places_n.unsqueeze(0);
    let hidden_nn = hidden(&places_n, &places_n, window).logical_or(&behind.ge(5_000)); // another text
    let expected = with_gradients(&|inputs| {
        attention(inputs.map(|x| x.transpose(0, 1)).each_ref(), &hidden_nn, scale).transpose(0, 1)
    });
    let names = ["output", "gradient of queries", "gradient of keys", "gradient of values"];
    names.into_iter().zip(got.iter().zip(&expected)).map(|(name, (got, right))| (name, distance(got, right))).collect()
}

/// The three kinds of products of 16-bit matrices, against those of float32 ones.
fn products(on: Device, kind: Kind) -> f64 {
    let [a, b, c] = [(1, [40, 72]), (2, [72, 24]), (3, [24, 72])].map(|(seed, size)| normal(seed, &size, kind, on));
    let [wide_a, wide_b, wide_c] = [&a, &b, &c].map(|x| x.to_kind(Kind::Float));
    let products = Float32Products::on(on);
    let sum = Tensor::ones([40, 24], (Kind::Float, on));
    products.add(&sum, &a, &b);
    let product = products.of(&a, &b);
    let linear = products.linear([&a, &c], Some([&a, &c]));
    let exact = wide_a.matmul(&wide_b);
    let pairs = [(sum, &exact + 1.0), (product, exact), (linear, wide_a.matmul(&wide_c.tr()) * 2.0)];
    let is_cast = !on.is_cuda(); // a CPU stores them in 16 bits
    pairs.iter().map(|(got, right)| if is_cast { 0.0 } else { distance(got, right) }).fold(0.0, f64::max)
}

/// How many of 256 tokens are drawn otherwise on the device than on the host.
fn draws(on: Device) -> Vec<(String, f64)> {
    let logits_bv = normal(5, &[256, 5000], Kind::Float, on) * 3.0;
    let number = |value| NonNegative::new(value).expect("above 0");
    let of = |temperature: f64, top_k: usize, top_p: f64| Sampling {
        top_k: std::num::NonZeroUsize::new(top_k),
        top_p: Probability::new(top_p).expect("above 0"),
        ..Sampling::with_temperature(number(temperature))
    };
    let drawn = |logits_bv: &Tensor, sampling: Sampling| {
        let sampler = |index| Sampler::new(sampling, Stream { index, ..Stream::default() });
        let mut samplers: Vec<Sampler> = (0..256).map(sampler).collect();
        next_of_each(logits_bv, &mut samplers.iter_mut().collect::<Vec<_>>())
    };
    [of(1.3, 0, 1.0), of(0.7, 0, 0.9), of(1.0, 50, 1.0), of(1.0, 50, 0.8)]
        .map(|sampling| {
            let both = [drawn(&logits_bv, sampling), drawn(&logits_bv.to_device(Device::Cpu), sampling)];
            let differing = both[0].iter().zip(&both[1]).filter(|(a, b)| a != b).count();
            (format!("{sampling:?}"), differing as f64)
        })
        .into()
}

/// Whether numbers that go to the device and back through pinned memory are the same, also with work queued before them.
fn copies_come_back(on: Device) -> bool {
    let busy = normal(1, &[2048, 2048], Kind::Float, on);
    [0usize, 1, 1000, 1 << 20].into_iter().all(|count| {
        let list: Vec<i64> = (0..count as i64).map(|at| at * at - 7).collect();
        let host = HostTensor::from_integers(&list, on);
        let queued = busy.matmul(&busy);
        let (there, uploaded) = (host.on_device(), upload(&list, on));
        let [back, again] = [&there, &uploaded].map(HostTensor::copied);
        drop((there, uploaded, queued));
        wait_for(on);
        back.bytes() == host.bytes() && again.bytes() == host.bytes()
    })
}

/// Whether the allocator's figures follow an allocation; prints them beside the device's memory.
fn allocator_counts(on: Device) -> anyhow::Result<bool> {
    const BYTES: i64 = 256 << 20;
    let Device::Cuda(index) = on else { return Ok(true) };
    memory::release_cached(on);
    let figures = || allocator::allocated(on).ok_or_else(|| anyhow::anyhow!("libtorch's allocator has no figures"));
    let before = figures()?;
    let tensor = Tensor::zeros([BYTES], (Kind::Uint8, on));
    let with_it = figures()?;
    drop(tensor);
    let after = figures()?;
    let (total, free) = cuda_runtime::memory(index)?;
    let capability = cuda_runtime::capability(index)?;
    print_json(&json!({
        "check": "allocator", "before": before.current_bytes, "with_256_mib": with_it.current_bytes, "after": after.current_bytes,
        "peak": after.peak_bytes, "reserved_peak": after.reserved_peak_bytes, "total": total, "free": free, "capability": capability,
    }))?;
    let grown = with_it.current_bytes.checked_sub(before.current_bytes);
    Ok(grown == Some(BYTES.unsigned_abs())
        && after.current_bytes == before.current_bytes
        && after.peak_bytes >= with_it.current_bytes
        && (after.peak_bytes..=total).contains(&after.reserved_peak_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_on_a_cpu_is_right_there() {
        check(Device::Cpu).unwrap();
    }

    #[test]
    fn the_oracle_is_libtorchs_attention() {
        let [q, k, v] = [8, 2, 2].map(|heads| normal(heads, &[heads.cast_signed(), 9, 64], Kind::Float, Device::Cpu));
        let places = Tensor::arange(9, (Kind::Int64, Device::Cpu));
        let got = attention([&q, &k, &v], &hidden(&places, &places, None), 0.1);
        let of = |x: &Tensor| x.unsqueeze(0);
        let expected =
            Tensor::scaled_dot_product_attention::<Tensor>(&of(&q), &of(&k), &of(&v), None, 0.0, true, 0.1, true);
        assert!(distance(&got, &expected.squeeze_dim(0)) < 1e-5);
        let near = hidden(&places, &places, Some(2));
        assert_eq!(
            Vec::<bool>::try_from(near.get(4)).unwrap(),
            [true, true, true, false, false, true, true, true, true]
        );
    }
}
