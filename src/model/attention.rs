//! Attention with grouped key/value heads: over whole rows (training), and of new tokens to a cache (decoding).

// B rows, T tokens of a row, N new tokens, S cached and new tokens, H hidden, Q query heads, G key/value heads, D head size,
// R = Q/G query heads that share a key/value head
use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::model::batch_step::BatchStep;
use crate::model::block_spec::{HeadShape, Windows};
use crate::model::config::LlamaConfig;
use crate::model::kv_cache::{LayerCache, RowCache};
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::Adapters;
use crate::model::new_tokens::CacheMask;
use crate::model::rope::{Rope, Rotation};

/// Projections of one layer.
#[derive(Debug)]
pub struct Attention {
    pub(super) qkv: LinearGroup,
    pub(super) o: Linear,
    pub(super) shape: HeadShape,
}

impl Attention {
    /// Whole rows: `x_bth` `[B, T, H]` to the same shape; `rows` says who sees whom.
    pub fn over_rows(&self, x_bth: &Tensor, rotation: &Rotation, rows: &RowMask, adapters: Adapters) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let (b, t) = (x_bth.size()[0], x_bth.size()[1]);
        let [queries, keys, values] = self.qkv.each(x_bth, [q * d, g * d, g * d], adapters);
        let heads = |x: &Tensor, heads: i64| x.view([b, t, heads, d]);
        let q_bqtd = rotation.apply(&heads(&queries, q)).transpose(1, 2);
        let k_bqtd = repeat_groups(&rotation.apply(&heads(&keys, g)).transpose(1, 2), q / g);
        let v_bqtd = repeat_groups(&heads(&values, g).transpose(1, 2), q / g);
        let out_bqtd = attend_rows(&q_bqtd, &k_bqtd, &v_bqtd, rows, self.shape.scale());
        self.o.forward(&out_bqtd.transpose(1, 2).reshape([b, t, q * d]), adapters)
    }

    /// New tokens behind a row of the cache: `x_nh` `[N, H]` to the same shape. Their keys and values become the row's pending tokens.
    pub fn over_cache(&self, x_nh: &Tensor, rotation: &Rotation, mask: &CacheMask, cache: &RowCache) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let n = x_nh.size()[0];
        let qkv_nhd = self.qkv.forward(x_nh, Adapters::Off).view([n, q + 2 * g, d]);
        rotation.apply_(&qkv_nhd.narrow(1, 0, q + g));
        write(&cache.both_gsd, &qkv_nhd.narrow(1, q, 2 * g), mask.len);
        let keys_1gsd = cache.keys_1gsd.narrow(2, 0, mask.len + n);
        let values_1gsd = cache.values_1gsd.narrow(2, 0, mask.len + n);
        let q_nqd = qkv_nhd.narrow(1, 0, q);
        if n == 1 {
            // Query heads of a group lie side by side already: no transposes, which cost as much as a small product.
            let q_1grd = q_nqd.view([1, g, q / g, d]);
            let out_1grd = attend(&q_1grd, &keys_1gsd, &values_1gsd, mask.mask_ns.as_ref(), self.shape.scale());
            return self.o.forward(&out_1grd.reshape([1, q * d]), Adapters::Off);
        }
        let q_qnd = q_nqd.transpose(0, 1);
        let out_qnd = if mask.first_causal {
            let q_1qnd = q_qnd.unsqueeze(0);
            let (k, v) = (repeat_groups(&keys_1gsd, q / g), repeat_groups(&values_1gsd, q / g));
            Tensor::scaled_dot_product_attention::<Tensor>(&q_1qnd, &k, &v, None, 0.0, true, self.shape.scale(), false)
        } else {
            // The R query heads of a group are more rows of one attention: keys and values are read once.
            let q_1gnd = q_qnd.reshape([1, g, q / g * n, d]);
            attend(&q_1gnd, &keys_1gsd, &values_1gsd, mask.mask_ns.as_ref(), self.shape.scale())
        };
        self.o.forward(&out_qnd.reshape([q, n, d]).transpose(0, 1).reshape([n, q * d]), Adapters::Off)
    }

    /// One new token of each of several generations: `x_ph` `[P, H]` to the same shape. Their keys and values go to the cache.
    /// The spare rows (see `BatchStep`) attend to nothing.
    pub fn over_batch(&self, x_ph: &Tensor, rotation: &Rotation, step: &BatchStep, cache: &LayerCache) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let qkv_phd = self.qkv.forward(x_ph, Adapters::Off).view([step.product_rows, q + 2 * g, d]);
        rotation.apply_(&qkv_phd.narrow(1, 0, q + g));
        let qkv_bhd = qkv_phd.narrow(0, 0, step.rows);
        let [keys_bgsd, values_bgsd] = cache.write(&qkv_bhd.narrow(1, q, 2 * g), step);
        let q_bgrd = qkv_bhd.narrow(1, 0, q).view([step.rows, g, q / g, d]);
        let out_bgrd = attend(&q_bgrd, &keys_bgsd, &values_bgsd, Some(&step.mask_b11s), self.shape.scale());
        self.o.forward(&step.with_spare_rows(&out_bgrd.reshape([step.rows, q * d])), Adapters::Off)
    }
}

/// Keys and values of the new tokens, `[N, 2G, D]`, into the cache `[2G, S, D]` from token `at` on.
fn write(both_gsd: &Tensor, new_ngd: &Tensor, at: i64) {
    both_gsd.narrow(1, at, new_ngd.size()[0]).copy_(&new_ngd.transpose(0, 1));
}

/// `[B, G, S, D]` to `[B, G·R, S, D]`, each group R times in a row.
fn repeat_groups(x_bgsd: &Tensor, r: i64) -> Tensor {
    if r == 1 {
        return x_bgsd.shallow_clone();
    }
    let size = x_bgsd.size();
    let [b, g, s, d] = size[..] else { panic!("[B, G, S, D], got {size:?}") };
    x_bgsd.unsqueeze(2).expand([b, g, r, s, d], false).reshape([b, g * r, s, d])
}

/// Whole rows, all `[B, Q, T, D]`.
fn attend_rows(q_bqtd: &Tensor, k_bqtd: &Tensor, v_bqtd: &Tensor, rows: &RowMask, scale: f64) -> Tensor {
    if !rows.by_blocks {
        let (mask, causal) = (rows.mask_b1tt.as_ref(), rows.mask_b1tt.is_none());
        return Tensor::scaled_dot_product_attention(q_bqtd, k_bqtd, v_bqtd, mask, 0.0, causal, scale, false);
    }
    let masks = rows.causal_blocks.get_or_init(|| causal_blocks(q_bqtd.size()[2], q_bqtd.kind()));
    let mut from = 0;
    let block = |mask_ns: &Tensor| {
        let [n, s] = mask_ns.size()[..] else { panic!("[N, S], got {mask_ns:?}") };
        let (k, v) = (k_bqtd.narrow(2, 0, s), v_bqtd.narrow(2, 0, s));
        from += n;
        Tensor::scaled_dot_product_attention(
            &q_bqtd.narrow(2, from - n, n),
            &k,
            &v,
            Some(mask_ns),
            0.0,
            false,
            scale,
            false,
        )
    };
    Tensor::cat(&masks.iter().map(block).collect::<Vec<_>>(), 2)
}

/// libtorch's choice among its kernels costs as much as a small one takes: on the CPU it is always this one.
fn attend(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, scale: f64) -> Tensor {
    if q.device() == Device::Cpu {
        return Tensor::internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, mask, scale).0;
    }
    Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, false, scale, false)
}

/// Who sees whom in whole rows, and where each token stands.
#[derive(Debug)]
pub struct RowMask {
    /// `[B, 1, T, T]` bool; absent = causal.
    mask_b1tt: Option<Tensor>,
    /// Causal attention block after block, each with the keys up to its end: where libtorch's causal kernel would compute the
    /// upper triangle too, which is on the CPU, up to its block of 512 keys.
    by_blocks: bool,
    /// `[N, S]` each, 0 or -inf, in the dtype of attention; made by the first layer.
    causal_blocks: OnceCell<Vec<Tensor>>,
    /// `[T]` or `[B, T]`, float32.
    positions: Tensor,
}

/// Queries of one block of [`RowMask::causal`].
const CAUSAL_BLOCK: i64 = 64;
/// Keys that libtorch's CPU kernel treats at once.
const KERNEL_KEYS: i64 = 512;

impl RowMask {
    /// Each row is one text; padding at its right end is seen by nothing before it.
    pub fn causal(t: i64, config: &LlamaConfig, device: Device) -> Self {
        let positions = Tensor::arange(t, (Kind::Float, device));
        let Windows::EveryLayer(window) = config.block().windows;
        let mask = window.filter(|&w| w < t).map(|w| within_window(&positions.unsqueeze(0), w));
        let by_blocks = mask.is_none() && device == Device::Cpu && (CAUSAL_BLOCK + 1..=KERNEL_KEYS).contains(&t);
        Self { mask_b1tt: mask.map(|m| m.unsqueeze(1)), by_blocks, causal_blocks: OnceCell::new(), positions }
    }

    /// Each row holds several texts (segments) that do not see each other; positions restart with each.
    /// `segment_lengths[b]` sums to at most `t`; what is left of a row is padding.
    pub fn packed(segment_lengths: &[Vec<usize>], t: i64, config: &LlamaConfig, device: Device) -> Self {
        if segment_lengths.iter().all(|row| row.len() == 1) {
            return Self::causal(t, config, device);
        }
        let b = segment_lengths.len() as i64;
        let layouts = segment_lengths.iter().map(|row| segment_layout(row, t));
        let (segments, positions): (Vec<_>, Vec<_>) = layouts.unzip();
        let tensor = |rows: Vec<Vec<f32>>| Tensor::from_slice(&rows.concat()).view([b, t]).to_device(device);
        let (segments_bt, positions_bt) = (tensor(segments), tensor(positions));
        let same_btt = segments_bt.unsqueeze(2).eq_tensor(&segments_bt.unsqueeze(1));
        let Windows::EveryLayer(window) = config.block().windows;
        let sees_btt = within_window(&positions_bt, window.unwrap_or(t)).logical_and(&same_btt);
        Self {
            mask_b1tt: Some(sees_btt.unsqueeze(1)),
            by_blocks: false,
            causal_blocks: OnceCell::new(),
            positions: positions_bt,
        }
    }

    pub(super) fn rotation(&self, rope: &Rope) -> Rotation {
        rope.at(&self.positions)
    }
}

/// Masks of the blocks of `t` queries, in the dtype of attention.
fn causal_blocks(t: i64, kind: Kind) -> Vec<Tensor> {
    let block = |from: i64| {
        let end = t.min(from + CAUSAL_BLOCK);
        let hidden = Tensor::full([end - from, end], f64::NEG_INFINITY, (kind, Device::Cpu));
        hidden.triu(from + 1)
    };
    (0..t).step_by(usize::try_from(CAUSAL_BLOCK).expect("above 0")).map(block).collect()
}

/// Segment number and position in it for each of `t` tokens; padding is one more segment.
fn segment_layout(lengths: &[usize], t: i64) -> (Vec<f32>, Vec<f32>) {
    let room = usize::try_from(t).expect("a length is not negative");
    let padding = room - lengths.iter().sum::<usize>();
    let all = lengths.iter().copied().chain([padding]).enumerate();
    all.flat_map(|(segment, length)| (0..length).map(move |position| (segment as f32, position as f32))).unzip()
}

/// `[B, T]` positions to `[B, T, T]` bool: a query sees keys at its own position and up to `window` - 1 before.
fn within_window(positions_bt: &Tensor, window: i64) -> Tensor {
    let distance_btt = positions_bt.unsqueeze(2) - positions_bt.unsqueeze(1);
    distance_btt.ge(0).logical_and(&distance_btt.lt(window))
}
