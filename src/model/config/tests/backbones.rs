//! Backbones small enough for tests, and one of a real size.

use super::super::*;

impl LlamaConfig {
    /// A backbone small enough for float64 tests: grouped heads, a head size that is no power of two, its own lm_head.
    pub(crate) fn tiny() -> Self {
        Self {
            model_type: "llama".into(),
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 6,
            vocab_size: 50,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            sliding_window: None,
            tie_word_embeddings: false,
            biases: Biases::default(),
            family: FamilyTraits::default(),
            eos_token_ids: vec![],
        }
    }

    /// Llama 2 7B.
    pub(crate) fn llama_2_7b() -> Self {
        Self {
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            vocab_size: 32000,
            max_position_embeddings: 4096,
            eos_token_ids: vec![2],
            ..Self::tiny()
        }
    }
}

impl LlamaConfig {
    /// [`LlamaConfig::tiny`], and a backbone with what each family has beyond it.
    pub(crate) fn tiny_of_each_family() -> Vec<Self> {
        use crate::model::block_spec::{Activation, LinearStorage, LogitSpec, NormKind, NormPlaces, QueryKeyNorm};
        let config =
            |model_type: &str, family: FamilyTraits| Self { model_type: model_type.into(), family, ..Self::tiny() };
        let layer = |slides, rotates| LayerTraits { slides, rotates };
        let qwen3 = FamilyTraits { query_key_norm: Some(QueryKeyNorm::EachHead), ..FamilyTraits::default() };
        let gemma = FamilyTraits {
            norm_kind: NormKind::RmsPlusOne,
            norm_places: NormPlaces::InputsAndOutputs,
            activation: Activation::GeluTanh,
            attention_scale: Some(0.3),
            attention_softcap: Some(1.5),
            embedding_multiplier: 32f64.sqrt(),
            logits: LogitSpec { divisor: 1.0, softcap: Some(2.0) },
            layers: vec![layer(true, true), layer(false, true)],
            local_rope_theta: Some(100.0),
            ..qwen3.clone()
        };
        let phi = FamilyTraits { storage: LinearStorage::Fused, rotary_size: Some(4), ..FamilyTraits::default() };
        let granite = FamilyTraits {
            attention_scale: Some(0.2),
            embedding_multiplier: 3.0,
            residual_multiplier: 0.5,
            logits: LogitSpec { divisor: 4.0, softcap: None },
            ..FamilyTraits::default()
        };
        let olmo = FamilyTraits {
            norm_places: NormPlaces::Outputs,
            query_key_norm: Some(QueryKeyNorm::AllHeads),
            ..FamilyTraits::default()
        };
        let smollm = FamilyTraits { layers: vec![layer(true, false), layer(true, true)], ..FamilyTraits::default() };
        let qwen2 =
            Self { biases: Biases { qkv: true, o: false, mlp: false }, ..config("qwen2", FamilyTraits::default()) };
        vec![
            Self::tiny(),
            qwen2,
            config("qwen3", qwen3),
            Self { sliding_window: Some(5), ..config("gemma3_text", gemma) },
            config("phi3", phi),
            config("granite", granite),
            config("olmo2", olmo),
            config("smollm3", smollm),
        ]
    }
}
