//! Attention with grouped key/value heads: over whole rows (training), and of new tokens to a cache (decoding).

// B rows, T tokens of a row, N new tokens, S cached and new tokens, H hidden, Q query heads, G key/value heads, D head size,
// R = Q/G query heads that share a key/value head
use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::model::batch_step::BatchStep;
use crate::model::block_spec::{HeadShape, NormSpec};
use crate::model::config::LlamaConfig;
use crate::model::kv_cache::{LayerCache, RowCache};
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::Adapters;
use crate::model::new_tokens::CacheMask;
use crate::model::norm::norm;
use crate::model::rope::{Ropes, Rotation, RotationsByKind};

/// Projections of one layer.
#[derive(Debug)]
pub struct Attention {
    pub(super) qkv: LinearGroup,
    pub(super) o: Linear,
    pub(super) shape: HeadShape,
    pub(super) query_key_norm: Option<QueryKeyWeights>,
}

/// Norms of queries and keys, before their rotation.
#[derive(Debug)]
pub(super) struct QueryKeyWeights {
    /// `[D]` of each head, or `[Q·D]` of all together.
    pub(super) query: Tensor,
    /// `[D]` of each head, or `[G·D]` of all together.
    pub(super) key: Tensor,
    pub(super) spec: NormSpec,
}

impl Attention {
    /// Whole rows: `x_bth` `[B, T, H]` to the same shape; `mask` says which tokens attend to which.
    pub fn over_rows(
        &self,
        x_bth: &Tensor,
        rotation: Option<&Rotation>,
        mask: &KindMask,
        adapters: Adapters,
    ) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let (b, t) = (x_bth.size()[0], x_bth.size()[1]);
        let [queries, keys, values] = self.qkv.each(x_bth, [q * d, g * d, g * d], adapters);
        let heads = |x: &Tensor, heads: i64| x.view([b, t, heads, d]);
        let [q_bthd, k_bthd] = self.normed([heads(&queries, q), heads(&keys, g)]);
        let rotated =
            |x: &Tensor| rotation.map_or_else(|| x.shallow_clone(), |rotation| rotation.apply(x)).transpose(1, 2);
        let k_bqtd = repeat_groups(&rotated(&k_bthd), q / g);
        let v_bqtd = repeat_groups(&heads(&values, g).transpose(1, 2), q / g);
        let out_bqtd = self.attend_rows(&rotated(&q_bthd), &k_bqtd, &v_bqtd, mask);
        self.o.forward(&out_bqtd.transpose(1, 2).reshape([b, t, q * d]), adapters)
    }

    /// New tokens behind rows of the cache, row after row: `x_nh` `[N, H]` to the same shape. Their keys and values become the rows' pending
    /// tokens.
    pub fn over_cache(&self, x_nh: &Tensor, rotation: Option<&Rotation>, rows: &[(&CacheMask, &RowCache)]) -> Tensor {
        let qkv_nhd = self.queries_keys_values(x_nh, rotation);
        let out_ni = if let [(mask, cache)] = rows {
            self.behind_row(&qkv_nhd, mask, cache)
        } else {
            let mut end = 0;
            let attended = rows.iter().map(|(mask, cache)| {
                end += mask.new;
                self.behind_row(&qkv_nhd.narrow(0, end - mask.new, mask.new), mask, cache)
            });
            Tensor::cat(&attended.collect::<Vec<_>>(), 0)
        };
        self.o.forward(&out_ni, Adapters::Off)
    }

    /// Attention of new tokens behind a row of the cache: `[N, Q + 2G, D]` to `[N, Q·D]`.
    fn behind_row(&self, qkv_nhd: &Tensor, mask: &CacheMask, cache: &RowCache) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let n = mask.new;
        write(&cache.both_gsd, &qkv_nhd.narrow(1, q, 2 * g), mask.len);
        let keys_1gsd = cache.keys_1gsd.narrow(2, 0, mask.len + n);
        let values_1gsd = cache.values_1gsd.narrow(2, 0, mask.len + n);
        let q_nqd = qkv_nhd.narrow(1, 0, q);
        if n == 1 {
            // Query heads of a group lie side by side already: no transposes, which cost as much as a small product.
            let q_1grd = q_nqd.view([1, g, q / g, d]);
            return self.attend(&q_1grd, &keys_1gsd, &values_1gsd, mask.mask_ns.as_ref()).reshape([1, q * d]);
        }
        let q_qnd = q_nqd.transpose(0, 1);
        let out_qnd = if mask.first_causal {
            let (k, v) = (repeat_groups(&keys_1gsd, q / g), repeat_groups(&values_1gsd, q / g));
            self.attend_causal(&q_qnd.unsqueeze(0), &k, &v)
        } else {
            // The R query heads of a group are more rows of one attention: keys and values are read once.
            let q_1gnd = q_qnd.reshape([1, g, q / g * n, d]);
            self.attend(&q_1gnd, &keys_1gsd, &values_1gsd, mask.mask_ns.as_ref())
        };
        out_qnd.reshape([q, n, d]).transpose(0, 1).reshape([n, q * d])
    }

    /// One new token of each of several generations: `x_ph` `[P, H]` to the same shape. Their keys and values go to the cache.
    /// The spare rows (see `BatchStep`) attend to nothing.
    pub fn over_batch(
        &self,
        x_ph: &Tensor,
        rotation: Option<&Rotation>,
        (step, kind): (&BatchStep, usize),
        cache: &LayerCache,
    ) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let qkv_phd = self.queries_keys_values(x_ph, rotation);
        let qkv_bhd = qkv_phd.narrow(0, 0, step.rows);
        let [keys_bgsd, values_bgsd] = cache.write(&qkv_bhd.narrow(1, q, 2 * g), step);
        let q_bgrd = qkv_bhd.narrow(1, 0, q).view([step.rows, g, q / g, d]);
        let out_bgrd = self.attend(&q_bgrd, &keys_bgsd, &values_bgsd, Some(step.mask_b11s(kind)));
        self.o.forward(&step.with_spare_rows(&out_bgrd.reshape([step.rows, q * d])), Adapters::Off)
    }

    /// Queries, keys and values of new tokens, normed and rotated: `[N, H]` to `[N, Q + 2G, D]`.
    fn queries_keys_values(&self, x_nh: &Tensor, rotation: Option<&Rotation>) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let qkv_nhd = self.qkv.forward(x_nh, Adapters::Off).view([x_nh.size()[0], q + 2 * g, d]);
        if self.query_key_norm.is_some() {
            let parts = [qkv_nhd.narrow(1, 0, q), qkv_nhd.narrow(1, q, g)];
            let normed = self.normed(parts.each_ref().map(Tensor::shallow_clone));
            parts.iter().zip(&normed).for_each(|(part, normed)| part.shallow_clone().copy_(normed));
        }
        if let Some(rotation) = rotation {
            rotation.apply_(&qkv_nhd.narrow(1, 0, q + g));
        }
        qkv_nhd
    }

    /// Queries `[…, Q, D]` and keys `[…, G, D]` after their norms, if there are any.
    fn normed(&self, [queries, keys]: [Tensor; 2]) -> [Tensor; 2] {
        let Some(QueryKeyWeights { query, key, spec }) = &self.query_key_norm else { return [queries, keys] };
        [(queries, query), (keys, key)].map(|(x, weight)| {
            let over = |x: &Tensor| norm(x, weight, *spec);
            if weight.size()[0] == self.shape.d { over(&x) } else { over(&x.flatten(-2, -1)).view(x.size().as_slice()) }
        })
    }

    /// Whole rows, all `[B, Q, T, D]`.
    fn attend_rows(&self, q_bqtd: &Tensor, k_bqtd: &Tensor, v_bqtd: &Tensor, rows: &KindMask) -> Tensor {
        match (rows.block, &rows.mask_b1tt) {
            (Some(n), _) => self.attend_blocks(q_bqtd, k_bqtd, v_bqtd, rows.of_blocks(n, q_bqtd)),
            (None, Some(mask)) => {
                let (mask, scale) = (Some(mask), self.shape.scale);
                Tensor::scaled_dot_product_attention(q_bqtd, k_bqtd, v_bqtd, mask, 0.0, false, scale, false)
            }
            (None, None) => self.attend_causal(q_bqtd, k_bqtd, v_bqtd),
        }
    }

    /// Whole rows, a block of queries at a time; `masks` as [`KindMask::of_blocks`] makes them.
    fn attend_blocks(&self, q_bqtd: &Tensor, k_bqtd: &Tensor, v_bqtd: &Tensor, masks: &[Tensor]) -> Tensor {
        let mut from = 0;
        let block = |mask: &Tensor| {
            let [.., n, s] = mask.size()[..] else { panic!("[…, N, S], got {mask:?}") };
            let (k, v) = (k_bqtd.narrow(2, 0, s), v_bqtd.narrow(2, 0, s));
            from += n;
            let q = q_bqtd.narrow(2, from - n, n);
            match self.shape.softcap {
                Some(_) => self.attend_capped(&q, &k, &v, Some(mask)),
                None => {
                    let (mask, scale) = (Some(mask), self.shape.scale);
                    Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, false, scale, false)
                }
            }
        };
        Tensor::cat(&masks.iter().map(block).collect::<Vec<_>>(), 2)
    }

    /// Each token attends to itself and all before it; `[B, Q, T, D]`.
    fn attend_causal(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        if self.shape.softcap.is_some() {
            let t = q.size()[2];
            let hidden = Tensor::full([t, t], f64::NEG_INFINITY, (q.kind(), q.device())).triu(1);
            return self.attend_capped(q, k, v, Some(&hidden));
        }
        Tensor::scaled_dot_product_attention::<Tensor>(q, k, v, None, 0.0, true, self.shape.scale, false)
    }

    /// Attention under an additive mask, or without one; without autograd.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let scale = self.shape.scale;
        if self.shape.softcap.is_some() {
            return self.attend_capped(q, k, v, mask);
        }
        // libtorch's choice among its kernels costs as much as a small one takes: on the CPU it is always this one.
        if q.device() == Device::Cpu {
            return Tensor::internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, mask, scale).0;
        }
        Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, false, scale, false)
    }

    /// Attention with soft-capped scores, which libtorch has no kernel for; the softmax is in float32 or wider. The mask is additive.
    fn attend_capped(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let cap = self.shape.softcap.expect("a cap");
        let scores = (q.matmul(&k.transpose(-2, -1)) * (self.shape.scale / cap)).tanh() * cap;
        let scores = mask.map_or_else(|| scores.shallow_clone(), |mask| &scores + mask);
        let wide = if q.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        scores.softmax(-1, wide).to_kind(q.kind()).matmul(v)
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

/// A mask that is true where a token is seen, as 0 there and -inf elsewhere.
fn additive(mask: &Tensor, kind: Kind) -> Tensor {
    Tensor::zeros(mask.size(), (kind, mask.device())).masked_fill(&mask.logical_not(), f64::NEG_INFINITY)
}

/// Which tokens of whole rows attend to which, and the position of each token.
#[derive(Debug)]
pub struct RowMask {
    /// By kind of layer.
    kinds: Vec<KindMask>,
    /// `[T]` or `[B, T]`, float32.
    positions: Tensor,
}

/// Which tokens of whole rows attend to which, in the layers of one kind.
#[derive(Debug)]
pub struct KindMask {
    /// `[B, 1, T, T]` bool; absent = causal.
    mask_b1tt: Option<Tensor>,
    /// Queries of a block, if attention runs a block of queries at a time.
    block: Option<i64>,
    /// What [`KindMask::of_blocks`] returns; made by the first layer.
    block_masks: OnceCell<Vec<Tensor>>,
}

/// Queries of a block where libtorch's causal kernel would compute the upper triangle too: on the CPU, up to its block of
/// [`KERNEL_KEYS`].
const CAUSAL_BLOCK: i64 = 64;
/// Keys that libtorch's CPU kernel treats at once.
const KERNEL_KEYS: i64 = 512;
/// Queries of a block of capped attention, whose scores are a tensor `[B, Q, N, S]`.
pub const CAPPED_BLOCK: i64 = 128;

impl RowMask {
    /// Each row is one text; padding at its right end is seen by nothing before it.
    pub fn causal(t: i64, config: &LlamaConfig, device: Device) -> Self {
        let positions = Tensor::arange(t, (Kind::Float, device));
        let by_blocks = device == Device::Cpu && (CAUSAL_BLOCK + 1..=KERNEL_KEYS).contains(&t);
        let causal = by_blocks.then_some(CAUSAL_BLOCK);
        let capped = capped_block(config);
        let of_window = |window: Option<i64>| match window.filter(|&w| w < t) {
            Some(window) => KindMask::bool(&within_window(&positions.unsqueeze(0), window), capped),
            None => KindMask { mask_b1tt: None, block: capped.or(causal), block_masks: OnceCell::new() },
        };
        Self { kinds: config.layer_kinds().windows().into_iter().map(of_window).collect(), positions }
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
        let capped = capped_block(config);
        let of_window = |window: Option<i64>| {
            KindMask::bool(&within_window(&positions_bt, window.unwrap_or(t)).logical_and(&same_btt), capped)
        };
        let kinds = config.layer_kinds().windows().into_iter().map(of_window).collect();
        Self { kinds, positions: positions_bt }
    }

    pub(super) fn rotations(&self, ropes: &Ropes) -> RotationsByKind {
        ropes.at(&self.positions)
    }

    /// The mask of the layers of one kind.
    pub(super) fn of(&self, kind: usize) -> &KindMask {
        &self.kinds[kind]
    }
}

impl KindMask {
    /// From `[B, T, T]`, true where a token is seen.
    fn bool(sees_btt: &Tensor, block: Option<i64>) -> Self {
        Self { mask_b1tt: Some(sees_btt.unsqueeze(1)), block, block_masks: OnceCell::new() }
    }

    /// The masks of the blocks of `n` queries of `q_bqtd`, each with the keys up to its end: `[N, S]` or `[B, 1, N, S]`, 0 or -inf, in the
    /// queries' dtype.
    fn of_blocks(&self, n: i64, q_bqtd: &Tensor) -> &[Tensor] {
        let t = q_bqtd.size()[2];
        let block = |from: i64| {
            let end = t.min(from + n);
            match &self.mask_b1tt {
                Some(mask) => additive(&mask.narrow(2, from, end - from).narrow(3, 0, end), q_bqtd.kind()),
                None => {
                    let options = (q_bqtd.kind(), q_bqtd.device());
                    Tensor::full([end - from, end], f64::NEG_INFINITY, options).triu(from + 1)
                }
            }
        };
        let blocks = || (0..t).step_by(usize::try_from(n).expect("above 0")).map(block).collect();
        self.block_masks.get_or_init(blocks)
    }
}

/// [`CAPPED_BLOCK`] if the backbone caps attention's scores.
fn capped_block(config: &LlamaConfig) -> Option<i64> {
    config.block().heads.softcap.map(|_| CAPPED_BLOCK)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Generator;

    const T: i64 = 2 * CAPPED_BLOCK + 37;

    /// Attention and the gradients of queries, keys and values.
    fn with_gradients(attend: impl Fn(&[Tensor; 3]) -> Tensor, shape: HeadShape) -> [Tensor; 4] {
        let mut random = Generator::seeded(3);
        let of_heads = [2, shape.q, T, shape.d];
        let inputs: [Tensor; 3] = std::array::from_fn(|_| {
            (random.normal(&of_heads, (Kind::Double, Device::Cpu)) * 3.0).set_requires_grad(true)
        });
        let out = attend(&inputs);
        (&out * random.normal(&of_heads, (Kind::Double, Device::Cpu))).sum(Kind::Double).backward();
        let [q, k, v] = inputs.map(|input| input.grad());
        [out.detach(), q, k, v]
    }

    #[test]
    fn capped_attention_in_blocks_equals_attention_over_all_keys() {
        let families = LlamaConfig::tiny_of_each_family();
        let config = families.into_iter().find(|config| config.block().heads.softcap.is_some()).expect("Gemma 2");
        let shape = config.block().heads;
        let o = Linear::dense(Tensor::zeros([0, 0], (Kind::Double, Device::Cpu)), None);
        let attention = Attention { qkv: LinearGroup::separate(vec![]), o, shape, query_key_norm: None };
        let causal = RowMask::causal(T, &config, Device::Cpu);
        let packed = RowMask::packed(&[vec![150, 90], vec![200]], T, &config, Device::Cpu);
        assert!(causal.kinds.iter().any(|kind| kind.mask_b1tt.is_some()), "a window cuts");
        assert!(causal.kinds.iter().any(|kind| kind.mask_b1tt.is_none()), "some layers have no window");
        for mask in causal.kinds.iter().chain(&packed.kinds) {
            assert_eq!(mask.block, Some(CAPPED_BLOCK));
            let lower = || Tensor::ones([T, T], (Kind::Bool, Device::Cpu)).tril(0);
            let sees = mask.mask_b1tt.as_ref().map_or_else(lower, Tensor::shallow_clone);
            let all = additive(&sees, Kind::Double);
            let whole = with_gradients(|[q, k, v]| attention.attend_capped(q, k, v, Some(&all)), shape);
            let blocks = with_gradients(|[q, k, v]| attention.attend_rows(q, k, v, mask), shape);
            for (whole, blocks) in whole.iter().zip(&blocks) {
                let difference = (whole - blocks).abs().max().double_value(&[]);
                assert!(difference < 1e-12, "{difference}");
            }
        }
    }
}
