//! Attention of a decoding step with one new token for each of many texts: one launch, which also appends the new keys and values to the cache
//! and reads no more of a text's row than the text has. The oracle is masked attention over all rows, in `model/attention.rs`.

// B texts, R rows of the cache, Q query heads, G key/value heads, S room for tokens, D head size
use tch::{Kind, Tensor};

use super::kernels;
use crate::nvidia::kernels::{KernelDtype, Program};
use crate::nvidia::launch::{Launch, elements, float, size, tensor};

/// Threads of a block: 8 warps.
const THREADS: i64 = 256;
const WARPS: i64 = 8;
/// Kernels by head size and by the most query heads that share a key/value head.
const KERNELS: [(i64, i64, &str); 8] = [
    (64, 1, "batch_attention_64x1"),
    (64, 2, "batch_attention_64x2"),
    (64, 4, "batch_attention_64x4"),
    (64, 8, "batch_attention_64x8"),
    (128, 1, "batch_attention_128x1"),
    (128, 2, "batch_attention_128x2"),
    (128, 4, "batch_attention_128x4"),
    (128, 8, "batch_attention_128x8"),
];

/// What a step's attention reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct BatchAttention<'t> {
    /// `[B, Q + 2G, D]`: queries, keys and values of the new tokens, rotated.
    pub qkv_bhd: &'t Tensor,
    /// `[R, 2G, S, D]`, R at least B: keys, then values of each text. The new ones are written behind the text's.
    pub cache_bgsd: &'t Tensor,
    /// `[B]` int64: tokens of each text in the cache, without the new one; below S.
    pub lengths_b: &'t Tensor,
    pub scale: f64,
    /// The sliding window: how many tokens are seen, the new one among them.
    pub window: Option<i64>,
}

impl BatchAttention<'_> {
    /// The output of the heads, `[B, Q, D]`; `None` where there is no kernel, and nothing is written.
    pub fn run(&self) -> Option<Tensor> {
        let (kind, device) = (self.qkv_bhd.kind(), self.qkv_bhd.device());
        let kernels = kernels(device, kind)?;
        let [b, q, d] = self.sizes().map(|[b, q, _, d]| [b, q, d])?;
        let out_bqd = Tensor::empty([b, q, d], (kind, device));
        kernels.launch(&self.launch(&out_bqd)?);
        Some(out_bqd)
    }

    /// The launch that writes to `out_bqd` `[B, Q, D]`; `None` where there is no kernel for the shape.
    pub fn launch(&self, out_bqd: &Tensor) -> Option<Launch> {
        let [b, q, g, d] = self.sizes()?;
        KernelDtype::of(self.qkv_bhd.kind())?;
        let (_, share, name) = *KERNELS.iter().find(|(head, share, _)| *head == d && q <= g * share)?;
        let arguments = vec![
            elements(self.qkv_bhd),
            elements(self.cache_bgsd),
            tensor(self.lengths_b, Kind::Int64),
            elements(out_bqd),
            size(q),
            size(g),
            size(self.cache_bgsd.size()[2]),
            float(self.scale * std::f64::consts::LOG2_E),
            size(self.window.unwrap_or(0)),
        ];
        let launch = Launch::new(Program::BatchAttention, name, [g, b, 1], THREADS, arguments);
        Some(launch.with_shared(2 * WARPS * share * (d + 2))) // float32
    }

    /// B, Q, G, D; `None` for heads that do not share evenly.
    fn sizes(&self) -> Option<[i64; 4]> {
        let [b, heads, d] = self.qkv_bhd.size()[..] else { return None };
        let g = self.cache_bgsd.size()[1] / 2;
        let q = heads - 2 * g;
        (q % g == 0).then_some([b, q, g, d])
    }
}
