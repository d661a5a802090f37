//! The hidden states of a micro batch.

// B rows, T tokens of a row, N = B·T positions, M of them kept, W a token's states (see [`crate::model::taps`])
use tch::Tensor;

use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;

/// `[N, W]` of tokens `[B, T]`, rows flattened; no gradient reaches the backbone.
pub fn hidden_states(backbone: &Llama, (tokens_bt, rows): &(Tensor, RowMask), adapters: Adapters) -> Tensor {
    tch::no_grad(|| backbone.hidden_states(tokens_bt, rows, adapters)).view([-1, backbone.states_width()])
}

/// States `[M, W]` of the positions `kept_m` as `[n, W]`: zeros where none are kept.
pub fn at_every_position(states_mw: &Tensor, kept_m: &Tensor, n: i64) -> Tensor {
    let zeros_nw = Tensor::zeros([n, states_mw.size()[1]], (states_mw.kind(), states_mw.device()));
    zeros_nw.index_copy(0, kept_m, states_mw)
}
