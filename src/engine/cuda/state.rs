//! The decoding state on the device.

use tch::{Device, Kind, Tensor};

/// Indices into the state, which is int32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// Committed tokens, which are the cache rows that stay.
    Context = 0,
    /// Tokens that the last step accepted, root included.
    Accepted = 1,
    /// Row of the last accepted node.
    Last = 2,
    /// The token after it, which is the next root.
    Next = 3,
    /// Steps done.
    Step = 4,
}

/// Length of the state; entries without a name are zero.
pub const LEN: i64 = 8;

/// Numbers at the start of a row of results (see [`advance`](super::oracle::advance)): steps done, accepted tokens, next root.
pub const RESULT_HEAD: i64 = 3;

/// `[LEN]`: the state before the first step, after `context` committed tokens. Row `last` holds the hidden state that `next` was
/// predicted from.
pub fn before_first(context: i64, last: i64, next: i64, device: Device) -> Tensor {
    Tensor::from_slice(&[context, 1, last, next, 0, 0, 0, 0]).to_kind(Kind::Int).to_device(device)
}

/// Reads one entry of a state to the host.
pub fn read(state: &Tensor, slot: Slot) -> i64 {
    state.int64_value(&[slot as i64])
}

/// Writes one entry of a state.
pub fn write(state: &Tensor, slot: Slot, number: i64) {
    let _ = state.narrow(0, slot as i64, 1).fill_(number);
}
