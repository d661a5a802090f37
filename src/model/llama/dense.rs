//! A backbone's weights as plain matrices, for decoders with products of their own.

// V vocabulary, H hidden, Q query heads, G key/value heads, D head size, I width of the MLP, W = (Q + 2G)·D
use tch::{Kind, Tensor};

use super::{DecoderLayer, Llama};
use crate::model::attention::QueryKeyWeights;
use crate::model::block_spec::{Biases, NormPlace, NormPlaces, NormSpec, QueryKeyNorm};
use crate::model::linear::Linear;
use crate::model::norm::LayerNorms;
use crate::model::rope::Frequencies;

/// Weights of a pass, in the backbone's dtype; views wherever the backbone itself has them so.
#[derive(Debug)]
pub struct DenseWeights {
    /// `[V, H]`.
    pub embed_tokens_vh: Tensor,
    /// First to last.
    pub layers: Vec<DenseLayer>,
    /// `[H]`: the final norm.
    pub norm_h: Tensor,
    /// `[V, H]`.
    pub lm_head_vh: Tensor,
}

/// Weights of one decoder layer.
#[derive(Debug)]
pub struct DenseLayer {
    /// `[H]`.
    pub input_layernorm_h: Tensor,
    /// `[W, H]`: q, k and v below each other.
    pub qkv_wh: Tensor,
    /// `[W]`.
    pub qkv_bias_w: Option<Tensor>,
    /// `[D]` each: the norms of query heads and of key heads.
    pub query_key_norms_d: Option<[Tensor; 2]>,
    /// `[H, Q·D]`.
    pub o_hq: Tensor,
    /// `[H]`.
    pub post_attention_layernorm_h: Tensor,
    /// `[2I, H]`: gate, then up.
    pub gate_up_ih: Tensor,
    /// `[H, I]`.
    pub down_hi: Tensor,
}

/// A decoder layer with one product for q, k, v and one for gate, up.
#[derive(Debug)]
pub struct MergedLayer<'a> {
    /// Weights of the norms that the family has, by place.
    pub norms: [(NormPlace, Option<&'a Tensor>); 6],
    /// To `[W]`: q, then k, then v.
    pub qkv: &'a Linear,
    /// To `[H]`.
    pub o: &'a Linear,
    /// To `[2I]`: gate, then up.
    pub gate_up: &'a Linear,
    /// To `[H]`.
    pub down: &'a Linear,
}

impl Llama {
    /// Its weights as matrices. `None` where they are quantised, or laid out for the CPU's own kernels, and where the block has
    /// weights beyond those of [`DenseLayer`]: other biases, other norms.
    pub fn dense_weights(&self) -> Option<DenseWeights> {
        let Biases { qkv: _, o, mlp } = self.block.biases;
        let NormSpec { places, query_key, .. } = self.block.norms;
        if o || mlp || places != NormPlaces::Inputs || query_key == Some(QueryKeyNorm::AllHeads) {
            return None;
        }
        Some(DenseWeights {
            embed_tokens_vh: self.embed_tokens.numbers(self.kind).to_kind(self.kind),
            layers: self.layers.iter().map(|layer| layer.dense_weights(self.kind)).collect::<Option<_>>()?,
            norm_h: self.norm_h.to_kind(self.kind),
            lm_head_vh: self.lm_head.in_rows()?.to_kind(self.kind),
        })
    }

    /// Its decoder layers with products merged, first to last. `None` where q, k, v or gate, up are separate.
    pub fn merged_layers(&self) -> Option<Vec<MergedLayer<'_>>> {
        self.layers.iter().map(DecoderLayer::merged).collect()
    }

    /// `[H]`: the final norm.
    pub fn norm(&self) -> &Tensor {
        &self.norm_h
    }

    /// What the rotations of the layers of one kind are computed from; `None` where they have none.
    pub fn rotary_frequencies(&self, kind: usize) -> Option<&Frequencies> {
        self.ropes[0].frequencies(kind)
    }
}

impl DecoderLayer {
    fn merged(&self) -> Option<MergedLayer<'_>> {
        let LayerNorms { attention_input, attention_output, mlp_input, mlp_output } = &self.norms;
        let query_key = self.attention.query_key_norm.as_ref();
        Some(MergedLayer {
            norms: [
                (NormPlace::AttentionInput, attention_input.as_ref()),
                (NormPlace::Query, query_key.map(|norm| &norm.query)),
                (NormPlace::Key, query_key.map(|norm| &norm.key)),
                (NormPlace::AttentionOutput, attention_output.as_ref()),
                (NormPlace::MlpInput, mlp_input.as_ref()),
                (NormPlace::MlpOutput, mlp_output.as_ref()),
            ],
            qkv: self.attention.qkv.merged_layer()?,
            o: &self.attention.o,
            gate_up: self.gate_up.merged_layer()?,
            down: &self.down,
        })
    }

    fn dense_weights(&self, kind: Kind) -> Option<DenseLayer> {
        Some(DenseLayer {
            input_layernorm_h: self.norms.attention_input.as_ref()?.to_kind(kind),
            qkv_wh: self.attention.qkv.in_rows()?.to_kind(kind),
            qkv_bias_w: self.attention.qkv.bias().map(|bias_w| bias_w.to_kind(kind)),
            query_key_norms_d: self.attention.query_key_norm.as_ref().map(|norm| {
                let QueryKeyWeights { query, key, spec: _ } = norm;
                [query, key].map(|weight_d| weight_d.to_kind(kind))
            }),
            o_hq: self.attention.o.in_rows()?.to_kind(kind),
            post_attention_layernorm_h: self.norms.mlp_input.as_ref()?.to_kind(kind),
            gate_up_ih: self.gate_up.in_rows()?.to_kind(kind),
            down_hi: self.down.in_rows()?.to_kind(kind),
        })
    }
}
