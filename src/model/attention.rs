//! Attention with grouped key/value heads: over whole rows (training), and of new tokens to a cache (decoding).

// B rows, T tokens of a row, N new tokens, S cached and new tokens, H hidden, Q query heads, G key/value heads, D head size,
// R = Q/G query heads that share a key/value head
use tch::{Device, Tensor};

use crate::fused::batch_attention::BatchAttention;
use crate::model::batch_step::{BatchStep, padded};
use crate::model::block_spec::{HeadShape, NormSpec};
use crate::model::kv_cache::{LayerCache, RowCache};
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::Adapters;
use crate::model::new_tokens::CacheMask;
use crate::model::norm::norm;
use crate::model::rope::Rotation;
use crate::torch::{flash_attention, wide};

mod chains;
mod row_mask;
pub use chains::ChainKeys;
pub use row_mask::{CAPPED_BLOCK, KindMask, RowMask};

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
        let rotated = |x: &Tensor| rotation.map_or_else(|| x.shallow_clone(), |rotation| rotation.apply(x));
        let out_bthd = self.attend_rows(&[rotated(&q_bthd), rotated(&k_bthd), heads(&values, g)], mask);
        self.o.forward(&out_bthd.reshape([b, t, q * d]), adapters)
    }

    /// New tokens behind rows of the cache, row after row: `x_nh` `[N, H]` to the same shape. Their keys and values become the rows' pending
    /// tokens. Rows of `x_nh` behind them are spare.
    pub fn over_cache(&self, x_nh: &Tensor, rotation: Option<&Rotation>, rows: &[(&CacheMask, &RowCache)]) -> Tensor {
        let qkv_nhd = self.queries_keys_values(x_nh, rotation);
        let mut end = 0;
        let attended = rows.iter().map(|(mask, cache)| {
            end += mask.new;
            self.behind_row(&qkv_nhd.narrow(0, end - mask.new, mask.new), mask, cache)
        });
        let attended: Vec<Tensor> = attended.collect();
        let out_ni = if let [one] = &attended[..] { one.shallow_clone() } else { Tensor::cat(&attended, 0) };
        self.o.forward(&padded(&out_ni, x_nh.size()[0]), Adapters::Off)
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
            self.attend_causal(&q_qnd.unsqueeze(0), &keys_1gsd, &values_1gsd)
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
        let HeadShape { q, d, .. } = self.shape;
        let qkv_phd = self.queries_keys_values(x_ph, rotation);
        let qkv_bhd = qkv_phd.narrow(0, 0, step.rows);
        let out_bi = self.attend_batch(&qkv_bhd, step, kind, cache).reshape([step.rows, q * d]);
        self.o.forward(&step.with_spare_rows(&out_bi), Adapters::Off)
    }

    /// Writes keys and values of `[B, Q + 2G, D]` to the cache; returns what the queries attend to, `[B, …]` of Q·D numbers.
    fn attend_batch(&self, qkv_bhd: &Tensor, step: &BatchStep, kind: usize, cache: &LayerCache) -> Tensor {
        let HeadShape { q, g, d, scale, softcap } = self.shape;
        let (cache_bgsd, window) = (&cache.both_bgsd, step.window(kind));
        let on_gpu = BatchAttention { qkv_bhd, cache_bgsd, lengths_b: &step.lengths_b, scale, window };
        if let Some(out_bqd) = softcap.is_none().then(|| on_gpu.run()).flatten() {
            return out_bqd;
        }
        let [keys_bgsd, values_bgsd] = cache.write(&qkv_bhd.narrow(1, q, 2 * g), step);
        let q_bgrd = qkv_bhd.narrow(1, 0, q).view([step.rows, g, q / g, d]);
        self.attend(&q_bgrd, &keys_bgsd, &values_bgsd, Some(step.mask_b11s(kind)))
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

    /// Whole rows: queries `[B, T, Q, D]`, keys and values `[B, T, G, D]`; returns `[B, T, Q, D]`.
    fn attend_rows(&self, qkv: &[Tensor; 3], mask: &KindMask) -> Tensor {
        let q_bthd = &qkv[0];
        if let Some(pattern) = mask.pattern.as_ref().filter(|_| self.has_flash_attention(q_bthd)) {
            let [q, k, v] = qkv.each_ref().map(|x_bthd| x_bthd.flatten(0, 1));
            let segments = pattern.segments(q_bthd.size()[0]);
            return flash_attention::attend([&q, &k, &v], segments, pattern.window, self.shape.scale).view_as(q_bthd);
        }
        let [q, k, v] = qkv.each_ref().map(|x_bthd| x_bthd.transpose(1, 2));
        self.attend_heads(&q, &k, &v, mask).transpose(1, 2)
    }

    /// As [`Self::attend_rows`], of queries `[B, Q, T, D]`, keys and values `[B, G, T, D]`, with masks as tensors.
    fn attend_heads(&self, q_bqtd: &Tensor, k_bgtd: &Tensor, v_bgtd: &Tensor, mask: &KindMask) -> Tensor {
        let for_each_query_head = || [k_bgtd, v_bgtd].map(|x_bgtd| self.for_each_query_head(x_bgtd));
        match (mask.block, &mask.pattern) {
            (None, None) => self.attend_causal(q_bqtd, k_bgtd, v_bgtd),
            (None, Some(pattern)) => {
                let [k_bqtd, v_bqtd] = for_each_query_head();
                self.attend_masked(q_bqtd, &k_bqtd, &v_bqtd, pattern.dense(q_bqtd.kind()))
            }
            (Some(n), _) => self.attend_blocks(q_bqtd, for_each_query_head(), mask.blocks(n, q_bqtd)),
        }
    }

    /// Whole rows, a block of queries at a time; `masks` as [`KindMask::blocks`] makes them.
    fn attend_blocks(&self, q_bqtd: &Tensor, [k_bqtd, v_bqtd]: [Tensor; 2], masks: &[Tensor]) -> Tensor {
        let mut from = 0;
        let block = |mask: &Tensor| {
            let [.., n, s] = mask.size()[..] else { panic!("[…, N, S], got {mask:?}") };
            let (k, v) = (k_bqtd.narrow(2, 0, s), v_bqtd.narrow(2, 0, s));
            from += n;
            self.attend_masked(&q_bqtd.narrow(2, from - n, n), &k, &v, mask)
        };
        Tensor::cat(&masks.iter().map(block).collect::<Vec<_>>(), 2)
    }

    /// Under an additive mask, all `[B, Q, …, D]`.
    fn attend_masked(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Tensor {
        match self.shape.softcap {
            Some(_) => self.attend_capped(q, k, v, Some(mask)),
            None => Tensor::scaled_dot_product_attention(q, k, v, Some(mask), 0.0, false, self.shape.scale, false),
        }
    }

    /// Each token attends to itself and all before it: queries `[B, Q, T, D]`, keys and values `[B, G, T, D]`.
    fn attend_causal(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        // Flash attention shares keys and values; libtorch's other kernels for GPUs do not, and its kernel for the CPU is slower when it does.
        let shares = self.has_flash_attention(q);
        let [k, v] = [k, v].map(|x| if shares { x.shallow_clone() } else { self.for_each_query_head(x) });
        if self.shape.softcap.is_some() {
            let t = q.size()[2];
            let hidden = Tensor::full([t, t], f64::NEG_INFINITY, (q.kind(), q.device())).triu(1);
            return self.attend_capped(q, &k, &v, Some(&hidden));
        }
        Tensor::scaled_dot_product_attention::<Tensor>(q, &k, &v, None, 0.0, true, self.shape.scale, shares)
    }

    /// Whether flash attention runs on these queries; it has no cap.
    fn has_flash_attention(&self, q: &Tensor) -> bool {
        self.shape.softcap.is_none() && flash_attention::runs_on(q)
    }

    /// Keys or values `[B, G, S, D]` to `[B, Q, S, D]`.
    fn for_each_query_head(&self, x_bgsd: &Tensor) -> Tensor {
        repeat_groups(x_bgsd, self.shape.q / self.shape.g)
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
        scores.softmax(-1, wide(q.kind())).to_kind(q.kind()).matmul(v)
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

#[cfg(test)]
mod tests;
