//! Attention of a decoding step with one new token for each of many texts: one launch, which also appends the new keys and values to the cache
//! and reads no more of a text's row than the text has. The oracle is masked attention over all rows, in `model/attention.rs`.

// B texts, R rows of the cache, Q query heads, G key/value heads, S room for tokens, D head size
use tch::{Device, Kind, Tensor};

use super::{kernels, unavailable};
use crate::dtype::Dtype;
use crate::nvidia::error::GpuError;
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

/// Why a step of many texts on a GPU has no kernel, so that libtorch attends to the whole room of every text under a mask.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub enum NoBatchKernel {
    #[error("{0}")]
    Unavailable(&'static GpuError),
    #[error("the kernel computes in bfloat16 and float16, not in {0}")]
    Dtype(Dtype),
    #[error("the kernel is for heads of 64 and 128 numbers, not of {0}")]
    HeadSize(i64),
    #[error("at most 8 query heads share a key in the kernel, not {0}")]
    Sharing(i64),
}

/// Why the kernel does not run for Q query heads and G key/value heads of D numbers; `None` if it does, and on a CPU.
pub fn missing(device: Device, kind: Kind, [q, g, d]: [i64; 3]) -> Option<NoBatchKernel> {
    if !device.is_cuda() {
        return None;
    }
    if KernelDtype::of(kind).is_none() {
        return Some(NoBatchKernel::Dtype(Dtype::of(kind)));
    }
    if !KERNELS.iter().any(|(head, ..)| *head == d) {
        return Some(NoBatchKernel::HeadSize(d));
    }
    if kernel_for([q, g, d]).is_none() {
        return Some(NoBatchKernel::Sharing(q / g));
    }
    unavailable(device, kind).map(NoBatchKernel::Unavailable)
}

/// The kernel for Q query heads and G key/value heads of D numbers: how many query heads it lets share a key, and its name.
fn kernel_for([q, g, d]: [i64; 3]) -> Option<(i64, &'static str)> {
    let fits = |(head, share, _): &&(i64, i64, &str)| *head == d && q % g == 0 && q <= g * share;
    KERNELS.iter().find(fits).map(|(_, share, name)| (*share, *name))
}

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
        let [b, q, _, d] = self.sizes()?;
        let out_bqd = Tensor::empty([b, q, d], (kind, device));
        kernels.launch(&self.launch(&out_bqd)?);
        Some(out_bqd)
    }

    /// The launch that writes to `out_bqd` `[B, Q, D]`; `None` where there is no kernel for the shape.
    pub fn launch(&self, out_bqd: &Tensor) -> Option<Launch> {
        let [b, q, g, d] = self.sizes()?;
        KernelDtype::of(self.qkv_bhd.kind())?;
        let (share, name) = kernel_for([q, g, d])?;
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
        let [b, heads, d] = self.qkv_bhd.size3().ok()?.into();
        let [rows, both, ..] = <[i64; 4]>::from(self.cache_bgsd.size4().ok()?);
        let (g, q) = (both / 2, heads - both);
        let is_one_dtype = self.cache_bgsd.kind() == self.qkv_bhd.kind();
        (q % g == 0 && b <= rows && is_one_dtype && self.window.is_none_or(|window| window > 0)).then_some([b, q, g, d])
    }
}
