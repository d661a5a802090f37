//! Causal attention within segments of a row, by libtorch's flash attention for NVIDIA GPUs: no mask, and keys and values are shared by the
//! query heads of a group. libtorch offers it as the operator `_flash_attention_forward`, for which tch has no function.
#![expect(unsafe_code, reason = "calls an operator through the dispatcher")]

// N tokens of all segments, Q query heads, G key/value heads, D head size, S segments
use tch::{Device, Kind, Tensor};

use super::dispatcher::{self, Operand};
use super::{accelerator, upload};

/// The largest head size that its kernels are compiled for; a head size is a multiple of [`HEAD_STEP`].
const LARGEST_HEAD: i64 = 256;
const HEAD_STEP: i64 = 8;

/// Where the segments of flattened rows begin and end.
#[derive(Debug)]
pub struct Segments {
    /// `[S + 1]` int32: the first token of each, and the end of the last.
    bounds: Tensor,
    /// Tokens of the longest.
    longest: i64,
}

impl Segments {
    /// Of these lengths, one after the other; empty ones are left out.
    ///
    /// # Panics
    /// If they have 2³¹ tokens or more together.
    pub fn new(lengths: &[i64], device: Device) -> Self {
        let mut bounds = vec![0];
        let mut end = 0;
        for length in lengths.iter().filter(|&&length| length > 0) {
            end += length;
            bounds.push(i32::try_from(end).expect("below 2^31 tokens"));
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        Self { bounds: upload(&bounds, device), longest }
    }
}

/// Whether the kernels run on queries `[…, D]`.
pub fn runs_on(queries: &Tensor) -> bool {
    let head_dim = queries.size().last().copied().unwrap_or(0);
    runs_with(head_dim, queries.kind(), queries.device()) || is_emulated()
}

/// Whether there are kernels for heads of this size: in 16 bits, on a GPU of compute capability 8.0 or higher.
pub fn runs_with(head_dim: i64, kind: Kind, device: Device) -> bool {
    let fits = head_dim % HEAD_STEP == 0 && head_dim <= LARGEST_HEAD && matches!(kind, Kind::Half | Kind::BFloat16);
    fits && accelerator::is_ampere(device)
}

/// Attention of each token to itself and to those before it in its segment, within the sliding window if there is one, with autograd.
/// Queries are `[N, Q, D]`, keys and values `[N, G, D]`; returns `[N, Q, D]`.
///
/// # Panics
/// As libtorch's operations do if it fails, for [`guard`](super::guard()) to catch. libtorch has printed why.
pub fn attend([q_nqd, k_ngd, v_ngd]: [&Tensor; 3], segments: &Segments, window: Option<i64>, scale: f64) -> Tensor {
    let (bounds, longest) = (Operand::Tensor(&segments.bounds), Operand::Int(segments.longest));
    let behind = Operand::Int(window.map_or(-1, |window| window - 1));
    let arguments = [
        Operand::Tensor(q_nqd),
        Operand::Tensor(k_ngd),
        Operand::Tensor(v_ngd),
        Operand::Some(&bounds), // of queries
        Operand::Some(&bounds), // of keys
        longest,
        longest,
        Operand::Float(0.0),  // dropout
        Operand::Bool(true),  // causal
        Operand::Bool(false), // returns no mask
        Operand::Some(&Operand::Float(scale)),
        Operand::Some(&behind),
        Operand::None, // tokens ahead: causal
        Operand::None, // lengths of keys: those of the bounds
        Operand::None, // ALiBi
    ];
    // SAFETY: the arguments of the schema in libtorch 2.11, which the emulation's kernel unpacks; it returns five tensors.
    let results = unsafe { dispatcher::call::<5>(c"aten::_flash_attention_forward", &arguments) };
    let Some([out_nqd, ..]) = results else {
        // Room for the output and for what is kept beside it: fails with libtorch's own error if memory is still too short.
        drop([q_nqd.empty_like(), q_nqd.empty_like()]);
        super::raise(&format!("libtorch's flash attention of {q_nqd:?} failed, for the reason that it printed above"));
    };
    out_nqd
}

#[cfg(not(test))]
const fn is_emulated() -> bool {
    false
}

#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
use tests::emulation::is_emulated;
