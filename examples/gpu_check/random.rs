//! Backbones and heads with random weights, trees of any size, and prompts.

use std::ops::ControlFlow;

use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use medusa::dtype::DraftDtype;
use medusa::model::block_spec::QueryKeyNorm;
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::llama::Llama;
use medusa::torch::Generator;
use medusa::tree::sparse_tree::SparseTree;
use tch::{Device, Kind};

/// A backbone whose kernels are checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    /// `llama`, `qwen2` (q, k and v have biases) or `qwen3` (queries and keys are normed).
    pub(crate) family: &'static str,
    pub(crate) kind: Kind,
    pub(crate) head_dim: i64,
    /// Key/value heads for eight query heads.
    pub(crate) groups: i64,
    pub(crate) window: Option<i64>,
}

pub(crate) const CHECKED: [Checked; 5] = [
    Checked { family: "llama", kind: Kind::BFloat16, head_dim: 128, groups: 8, window: None },
    Checked { family: "llama", kind: Kind::BFloat16, head_dim: 64, groups: 2, window: None },
    Checked { family: "llama", kind: Kind::Half, head_dim: 128, groups: 1, window: Some(100) },
    Checked { family: "qwen2", kind: Kind::Half, head_dim: 64, groups: 1, window: None },
    Checked { family: "qwen3", kind: Kind::BFloat16, head_dim: 128, groups: 4, window: None },
];

impl Checked {
    pub(crate) fn backbone(self, layers: usize, on: Device) -> Llama {
        backbone(self.config(layers), self.kind, on)
    }

    fn config(self, layers: usize) -> LlamaConfig {
        let Self { family, kind: _, head_dim, groups, window } = self;
        let query_key_norm = (family == "qwen3").then_some(QueryKeyNorm::EachHead);
        LlamaConfig {
            model_type: family.into(),
            biases: Biases { qkv: family == "qwen2", ..Biases::default() },
            family: FamilyTraits { query_key_norm, ..FamilyTraits::default() },
            ..config(head_dim, groups, window, layers)
        }
    }
}

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

/// Random weights, large enough that attention matters; biases and norms of queries and keys are random, too.
pub(crate) fn backbone(config: LlamaConfig, kind: Kind, on: Device) -> Llama {
    let llama = Llama::random(config, kind, on, 1);
    let mut generator = Generator::seeded(3);
    for (name, weight) in &llama.weights() {
        if weight.dim() == 2 {
            let _ = weight.shallow_clone().g_mul_scalar_(3.0);
        } else if name.contains("self_attn") {
            weight.shallow_clone().copy_(&generator.normal(&weight.size(), (kind, on)));
        }
    }
    llama.for_decoding()
}

/// Medusa heads of one ResBlock.
pub(crate) fn heads(llama: &Llama) -> Heads {
    heads_of(llama, HeadsArchitecture::Medusa, 1)
}

/// Hydra heads of two ResBlocks, with a bias of W2 as in published ones.
pub(crate) fn hydra_heads(llama: &Llama) -> Heads {
    heads_of(llama, HeadsArchitecture::Hydra, 2)
}

fn heads_of(llama: &Llama, architecture: HeadsArchitecture, medusa_num_layers: usize) -> Heads {
    let shape = HeadsShape {
        architecture,
        medusa_num_heads: HEADS,
        medusa_num_layers,
        hidden_size: llama.config.hidden_size,
        vocab_size: llama.config.vocab_size,
        w2_bias: architecture == HeadsArchitecture::Hydra,
        ..HeadsShape::default()
    };
    Heads::random(shape, llama.kind(), llama.device(), 2).for_decoding(DraftDtype::default())
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
    use medusa::engine::cuda::shape::Shape;

    use super::*;

    #[test]
    fn there_are_kernels_for_every_backbone_and_norms_and_biases_among_them() {
        let of = CHECKED.map(|checked| (checked.config(1), checked.kind));
        for (config, kind) in &of {
            let shape = Shape { config, kind: *kind, draft: None };
            assert_eq!((shape.check_kernels(), shape.check_blocks()), (Ok(()), Ok(())), "{}", config.model_type);
        }
        assert!(of.iter().any(|(config, _)| config.block().biases.qkv));
        assert!(of.iter().any(|(config, _)| config.block().norms.query_key.is_some()));
    }

    #[test]
    fn trees_have_the_nodes_that_were_asked_for_and_use_every_head() {
        for nodes in [2, 8, 9, 16, 32, 64, 128] {
            let tree = tree(nodes).expect("paths without gaps");
            assert_eq!((tree.len(), tree.max_depth()), (nodes, HEADS.min(nodes - 1)));
        }
    }
}
