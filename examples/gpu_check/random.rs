//! Backbones and heads with random weights, trees of any size, and prompts.

use std::ops::ControlFlow;

use medusa::draft::medusa::heads::{Heads, HeadsShape};
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::llama::Llama;
use medusa::tree::sparse_tree::SparseTree;
use tch::{Device, Kind};

/// Shapes in which kernels are checked: dtype, head size, key/value heads for eight query heads, window.
pub(crate) const SHAPES: [(Kind, i64, i64, Option<i64>); 3] =
    [(Kind::BFloat16, 128, 8, None), (Kind::BFloat16, 64, 2, None), (Kind::Half, 128, 1, Some(100))];

/// Heads of every backbone here.
const HEADS: usize = 5;

/// A small config.
pub(crate) fn config(head_dim: i64, groups: i64, sliding_window: Option<i64>, layers: usize) -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 8 * head_dim,
        intermediate_size: 1024,
        num_hidden_layers: layers,
        num_attention_heads: 8,
        num_key_value_heads: groups,
        head_dim,
        vocab_size: 4096,
        max_position_embeddings: 4608,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window,
        tie_word_embeddings: false,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

pub(crate) fn llama_7b() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 4096,
        intermediate_size: 11008,
        num_attention_heads: 32,
        vocab_size: 32000,
        ..config(128, 32, None, 32)
    }
}

/// Random weights, large enough that attention matters.
pub(crate) fn backbone(config: LlamaConfig, kind: Kind, on: Device) -> Llama {
    let llama = Llama::random(config, kind, on, 1);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(3.0);
    }
    llama.for_decoding()
}

pub(crate) fn heads(llama: &Llama) -> Heads {
    let (hidden_size, vocab_size) = (llama.config.hidden_size, llama.config.vocab_size);
    let shape = HeadsShape { medusa_num_heads: HEADS, medusa_num_layers: 1, hidden_size, vocab_size };
    Heads::random(shape, llama.kind(), llama.device(), 2).for_decoding()
}

/// A tree of `nodes` nodes including the root: a chain that needs every head, then the nodes of a broad tree.
pub(crate) fn tree(nodes: usize) -> anyhow::Result<SparseTree> {
    let broad = SparseTree::cartesian(&[8, 4, 2, 2])?;
    let chain = (1..=HEADS).map(|depth| vec![0; depth]);
    let beside = (1..broad.len()).map(|node| broad.path(node).to_vec()).filter(|path| path.iter().any(|&at| at > 0));
    Ok(SparseTree::new(chain.chain(beside).take(nodes - 1).collect())?)
}

pub(crate) fn prompt(length: i64, vocabulary: i64) -> Vec<i64> {
    (0..length).map(|at| (at * at * 31 + at * 7 + 1) % vocabulary).collect()
}

pub(crate) fn go_on() -> impl FnMut(&[i64]) -> ControlFlow<()> {
    |_| ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_the_nodes_that_were_asked_for_and_use_every_head() {
        for nodes in [2, 8, 9, 16, 32, 64, 128] {
            let tree = tree(nodes).expect("paths without gaps");
            assert_eq!((tree.len(), tree.max_depth()), (nodes, HEADS.min(nodes - 1)));
        }
    }
}
