//! Runs a prompt in chunks, so that what attention takes of memory is bounded, whatever the prompt's length.

// N tokens of a pass, W a token's states
use tch::Tensor;

use super::{Engine, RowTokens};
use crate::model::kv_cache::KvCache;
use crate::model::new_tokens::NewTokens;
use crate::torch::upload;

/// Tokens of a prompt that are computed together.
pub const PREFILL_CHUNK: usize = 512;

/// Runs a prompt, or the rest of one, behind a row of the cache, `chunk` tokens at a time; returns the last token's states,
/// `[1, W]`. `on_chunk` receives the tokens and states `[N, W]` of each chunk when it is committed.
pub fn prefill(
    chunk: usize,
    engine: &dyn Engine,
    (cache, row): (&mut KvCache, usize),
    tokens: &[i64],
    on_chunk: &mut dyn FnMut(&[i64], Tensor),
) -> Tensor {
    let (kind, device) = (engine.backbone().kind(), engine.backbone().device());
    let chain = |n: usize| NewTokens::chain(n as i64, &engine.backbone().config, kind, device);
    let full = chain(chunk.min(tokens.len())); // one for all whole chunks: they share its mask
    let mut state_1w = None;
    for piece in tokens.chunks(chunk) {
        let rest = (piece.len() as i64 != full.len()).then(|| chain(piece.len()));
        let nodes = rest.as_ref().unwrap_or(&full);
        let tokens_n = upload(piece, device);
        let states_nw = engine.extend(cache, &tokens_n, &[RowTokens { row, nodes }]);
        cache.commit(row, nodes.len());
        state_1w = Some(states_nw.narrow(0, nodes.len() - 1, 1));
        on_chunk(piece, states_nw.narrow(0, 0, nodes.len()));
    }
    state_1w.expect("a prompt has at least one token that is not cached")
}
