//! The decoding state on the device.

use tch::{Device, Kind, Tensor};

/// Index of a number in the state, int32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// Committed tokens: rows of the cache that stay.
    Context = 0,
    /// Tokens that the last step accepted, the root among them.
    Accepted = 1,
    /// The row of the last accepted node.
    Last = 2,
    /// The token after it: the next root.
    Next = 3,
    /// Steps done.
    Step = 4,
}

/// Numbers in the state; those without a name are zero.
pub const LEN: i64 = 8;

/// Numbers in front of a row of results (see [`advance`](super::oracle::advance)): steps done, accepted tokens, the next root.
pub const RESULT_HEAD: i64 = 3;

/// `[LEN]`: a state before its first step, behind `context` committed tokens. The hidden state that `next` was predicted from is in
/// row `last`.
pub fn before_first(context: i64, last: i64, next: i64, device: Device) -> Tensor {
    Tensor::from_slice(&[context, 1, last, next, 0, 0, 0, 0]).to_kind(Kind::Int).to_device(device)
}

/// One number of a state, on the host.
pub fn read(state: &Tensor, slot: Slot) -> i64 {
    state.int64_value(&[slot as i64])
}

/// Writes one number of a state.
pub fn write(state: &Tensor, slot: Slot, number: i64) {
    let _ = state.narrow(0, slot as i64, 1).fill_(number);
}
