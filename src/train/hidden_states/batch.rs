//! The hidden states of a micro batch.

// B rows, T tokens of a row, N = B·T positions, M of them kept, H hidden
use tch::Tensor;

use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;

/// `[N, H]` of tokens `[B, T]`, rows flattened; no gradient reaches the backbone.
pub fn hidden_states(backbone: &Llama, (tokens_bt, rows): &(Tensor, RowMask), adapters: Adapters) -> Tensor {
    tch::no_grad(|| backbone.hidden_states(tokens_bt, rows, adapters)).view([-1, backbone.config.hidden_size])
}

/// States `[M, H]` of the positions `kept_m` as `[n, H]`: zeros where none are kept.
pub fn of_every_position(hidden_mh: &Tensor, kept_m: &Tensor, n: i64) -> Tensor {
    let zeros_nh = Tensor::zeros([n, hidden_mh.size()[1]], (hidden_mh.kind(), hidden_mh.device()));
    zeros_nh.index_copy(0, kept_m, hidden_mh)
}
