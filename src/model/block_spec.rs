//! A decoder block as data, read by every implementation: libtorch's (`decoder_layer`, `attention`), the CPU's (`engine/cpu`), the GPU's
//! (`engine/cuda`), the table of weights (loading, saving, counting) and the memory plan. Kinds are enums that each of them matches without a
//! wildcard, so a new kind does not compile until every implementation handles it.

// H hidden, F width of the MLP, Q query heads, G key/value heads, D head size, O outputs, I inputs
use serde::Serialize;

/// Hugging Face's names of weights.
pub mod names {
    /// `[V, H]`.
    pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
    /// `[H]`, the final norm.
    pub const NORM: &str = "model.norm.weight";
    /// `[V, H]`, absent when tied.
    pub const LM_HEAD: &str = "lm_head";
    /// The tensor of [`LM_HEAD`], which has no bias.
    pub const LM_HEAD_WEIGHT: &str = "lm_head.weight";
    /// Linear layers of a block, in the order of a file.
    pub const LINEARS: [&str; 7] = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    /// Linear layers that are stored as one in some families: q, k, v and gate, up.
    pub const FUSED: [&str; 2] = ["self_attn.qkv_proj", "mlp.gate_up_proj"];
    /// Norms of a block, `[H]` each. The place of the second one depends on the family: Llama norms the MLP's input with it, Gemma and OLMo 2 the
    /// output of attention.
    pub const NORMS: [&str; 4] = [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
    ];
    /// The norm of queries, `[D]` or `[Q·D]`.
    pub const QUERY_NORM: &str = "self_attn.q_norm.weight";
    /// The norm of keys, `[D]` or `[G·D]`.
    pub const KEY_NORM: &str = "self_attn.k_norm.weight";

    /// The full name of a part of decoder layer `layer`.
    pub fn in_layer(layer: usize, part: &str) -> String {
        format!("model.layers.{layer}.{part}")
    }
}

/// A decoder block as `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSpec {
    /// H.
    pub hidden_size: i64,
    /// Its norms, and the final one.
    pub norms: NormSpec,
    pub heads: HeadShape,
    /// The kinds of layers: window and position embeddings.
    pub layers: LayerKinds,
    pub mlp: MlpSpec,
    /// Which linear layers have a bias.
    pub biases: Biases,
    /// How the linear layers are stored.
    pub storage: LinearStorage,
    /// Factor of what attention and the MLP add to the residual stream.
    pub residual_multiplier: f64,
}

/// The norms of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f64,
    pub places: NormPlaces,
    /// The norm of queries and keys, before the rotation.
    pub query_key: Option<QueryKeyNorm>,
}

/// The formula of a norm; statistics are in float32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum NormKind {
    /// x / rms(x) · weight.
    #[default]
    Rms,
    /// x / rms(x) · (1 + weight), as in Gemma.
    RmsPlusOne,
}

/// Which values of a block are normed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum NormPlaces {
    /// The inputs of attention and of the MLP, as in Llama.
    #[default]
    Inputs,
    /// Their outputs, before they are added to the residual stream, as in OLMo 2.
    Outputs,
    /// Both, as in Gemma 2 and 3.
    InputsAndOutputs,
}

/// What a norm of queries and keys runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum QueryKeyNorm {
    /// Each head, weights `[D]`, as in Qwen3 and Gemma 3.
    EachHead,
    /// All heads together, weights `[Q·D]` and `[G·D]`, as in OLMo 2.
    AllHeads,
}

/// A place where a block has a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlace {
    AttentionInput,
    Query,
    Key,
    AttentionOutput,
    MlpInput,
    MlpOutput,
}

/// A norm's weight in the table of a block's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormWeight {
    /// Its name in the block.
    pub part: &'static str,
    pub place: NormPlace,
    /// How many numbers it has.
    pub size: i64,
}

/// Heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadShape {
    /// Q.
    pub q: i64,
    /// G; divides Q.
    pub g: i64,
    /// D.
    pub d: i64,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// c: scaled products s become c·tanh(s / c) before the softmax, as in Gemma 2.
    pub softcap: Option<f64>,
}

/// The distinct kinds of a backbone's layers, and the kind of each layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerKinds {
    kinds: Vec<LayerKind>,
    /// Index into `kinds`, by layer.
    by_layer: Vec<usize>,
}

/// How the layers of one kind attend.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerKind {
    /// A token attends to this many tokens, itself included; `None` = all before it.
    pub window: Option<i64>,
    /// Position embeddings of queries and keys; `None` = no position embeddings.
    pub rotary: Option<RotarySpec>,
}

/// Rotary position embeddings.
#[derive(Debug, Clone, PartialEq)]
pub struct RotarySpec {
    /// Rotated numbers of a head, the first ones: at most D.
    pub size: i64,
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
    /// The longest text; scalings that depend on the length are those of this length.
    pub context: i64,
}

/// How the rotary frequencies are stretched beyond the context of pre-training.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency is divided by the factor.
    Linear { factor: f64 },
    /// The base grows with the context ("NTK-aware"); up to the context of pre-training it is theta.
    Dynamic { factor: f64, original_max_position_embeddings: i64 },
    /// Llama 3.1: low frequencies are divided, high ones kept, a smooth ramp between.
    Llama3 {
        /// Low frequencies are divided by it.
        factor: f64,
        /// Wavelengths above original context / this are low.
        low_freq_factor: f64,
        /// Wavelengths below original context / this are high.
        high_freq_factor: f64,
        /// Context of pre-training.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al. 2023): frequencies of less than `beta_slow` turns in the context of pre-training are divided by the factor, those of more
    /// than `beta_fast` kept, a linear ramp over dimensions between.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole dimensions.
        truncate: bool,
        /// Context of pre-training.
        original_max_position_embeddings: i64,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
    /// LongRoPE (Ding et al. 2024), as in Phi-3: each frequency has its own divisor. The long ones are used where the context is longer than that of
    /// pre-training.
    LongRope {
        short_factor: Vec<f64>,
        long_factor: Vec<f64>,
        /// Context of pre-training.
        original_max_position_embeddings: i64,
        /// The longest context that the long divisors are made for.
        longest: i64,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
}

/// The kind of MLP. Executors take it apart by `let MlpSpec::Gated { .. }`, which another kind stops from compiling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpSpec {
    /// `down(activation(gate(x)) · up(x))`.
    Gated {
        /// F.
        width: i64,
        /// Of the gate.
        activation: Activation,
    },
}

/// An activation function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum Activation {
    /// x · sigmoid(x).
    #[default]
    Silu,
    /// GELU by its tanh approximation (Hendrycks and Gimpel 2016), `gelu_pytorch_tanh` in config.json.
    GeluTanh,
}

/// Which linear layers have a bias.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    pub o: bool,
    /// Gate, up and down projections.
    pub mlp: bool,
}

/// How a block's linear layers are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum LinearStorage {
    /// Each by itself.
    #[default]
    Separate,
    /// One for q, k, v and one for gate, up, as in Phi-3.
    Fused,
}

/// What becomes of the LM head's products.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LogitSpec {
    /// Products are divided by it.
    pub divisor: f64,
    /// c: quotients z then become c·tanh(z / c), as in Gemma 2.
    pub softcap: Option<f64>,
}

/// A linear layer in the table of a block's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearSpec {
    /// Its name in the block.
    pub part: &'static str,
    /// `[O, I]`.
    pub size: [i64; 2],
    /// Whether it has a bias `[O]`.
    pub bias: bool,
}

/// A block's linear layers in the order of a file, those together that read the same input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLinears {
    /// Query, key and value projections.
    pub qkv: Vec<LinearSpec>,
    pub o: LinearSpec,
    pub gate_up: Vec<LinearSpec>,
    pub down: LinearSpec,
}

impl Default for LogitSpec {
    fn default() -> Self {
        Self { divisor: 1.0, softcap: None }
    }
}

impl LogitSpec {
    /// Of a weight that is divided already, as a Medusa head's own W2 is.
    #[must_use]
    pub fn for_divided_weight(self) -> Self {
        Self { divisor: 1.0, ..self }
    }
}

impl HeadShape {
    /// Width of the query projection, Q·D.
    pub fn query_size(self) -> i64 {
        self.q * self.d
    }

    /// Width of the key and of the value projection, G·D.
    pub fn key_value_size(self) -> i64 {
        self.g * self.d
    }
}

impl LayerKinds {
    /// Of layers, first to last.
    pub fn new(layers: impl IntoIterator<Item = LayerKind>) -> Self {
        let (mut kinds, mut by_layer) = (vec![], vec![]);
        for layer in layers {
            let known = kinds.iter().position(|kind| *kind == layer);
            by_layer.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(layer);
            }
        }
        Self { kinds, by_layer }
    }

    /// The distinct kinds.
    pub fn kinds(&self) -> &[LayerKind] {
        &self.kinds
    }

    /// The window of each kind.
    pub fn windows(&self) -> Vec<Option<i64>> {
        self.kinds.iter().map(|kind| kind.window).collect()
    }

    /// Index of a layer's kind.
    pub fn kind_of(&self, layer: usize) -> usize {
        self.by_layer[layer]
    }

    /// The kind of all layers, where they are alike.
    pub fn only(&self) -> Option<&LayerKind> {
        match self.kinds.as_slice() {
            [kind] => Some(kind),
            _ => None,
        }
    }
}

impl Biases {
    /// Whether any layer has one.
    pub fn any(self) -> bool {
        self.qkv || self.o || self.mlp
    }
}

impl LinearSpec {
    /// How many numbers its weight has.
    pub fn numel(self) -> u64 {
        (self.size[0] * self.size[1]).unsigned_abs()
    }
}

impl BlockLinears {
    /// The layers by the input that they read.
    pub fn groups(&self) -> [&[LinearSpec]; 4] {
        [&self.qkv, std::slice::from_ref(&self.o), &self.gate_up, std::slice::from_ref(&self.down)]
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = LinearSpec> + '_ {
        self.groups().into_iter().flatten().copied()
    }
}

impl BlockSpec {
    /// Its linear layers.
    pub fn linears(&self) -> BlockLinears {
        let (h, q, kv) = (self.hidden_size, self.heads.query_size(), self.heads.key_value_size());
        let MlpSpec::Gated { width: f, activation: _ } = self.mlp;
        let Biases { qkv, o, mlp } = self.biases;
        let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = names::LINEARS;
        let [qkv_proj, gate_up_proj] = names::FUSED;
        let linear = |part, size, bias| LinearSpec { part, size, bias };
        let (qkv, gate_up) = match self.storage {
            LinearStorage::Separate => (
                vec![linear(q_proj, [q, h], qkv), linear(k_proj, [kv, h], qkv), linear(v_proj, [kv, h], qkv)],
                vec![linear(gate_proj, [f, h], mlp), linear(up_proj, [f, h], mlp)],
            ),
            LinearStorage::Fused => {
                (vec![linear(qkv_proj, [q + 2 * kv, h], qkv)], vec![linear(gate_up_proj, [2 * f, h], mlp)])
            }
        };
        BlockLinears { qkv, o: linear(o_proj, [h, q], o), gate_up, down: linear(down_proj, [h, f], mlp) }
    }

    /// Names in the block, and shapes, of all its weights.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let linear = |LinearSpec { part, size, bias }: LinearSpec| {
            let bias = bias.then(|| (format!("{part}.bias"), vec![size[0]]));
            std::iter::once((format!("{part}.weight"), size.to_vec())).chain(bias)
        };
        let norms = self.norm_weights().into_iter().map(|norm| (norm.part.to_owned(), vec![norm.size]));
        self.linears().all().flat_map(linear).chain(norms).collect()
    }

    /// Its norms' weights, in the order in which they are computed.
    pub fn norm_weights(&self) -> Vec<NormWeight> {
        let NormSpec { places, query_key, kind: _, eps: _ } = self.norms;
        let weight = |part, place, size| NormWeight { part, place, size };
        let stream = |part, place| weight(part, place, self.hidden_size);
        let query_and_key = query_key.map(|norm| match norm {
            QueryKeyNorm::EachHead => [self.heads.d; 2],
            QueryKeyNorm::AllHeads => [self.heads.query_size(), self.heads.key_value_size()],
        });
        let query_and_key = query_and_key.into_iter().flat_map(|[query, key]| {
            [weight(names::QUERY_NORM, NormPlace::Query, query), weight(names::KEY_NORM, NormPlace::Key, key)]
        });
        let [input, attention, before_mlp, after_mlp] = names::NORMS;
        let (before, after) = match places {
            NormPlaces::Inputs => {
                (vec![stream(input, NormPlace::AttentionInput)], vec![stream(attention, NormPlace::MlpInput)])
            }
            NormPlaces::Outputs => {
                (vec![], vec![stream(attention, NormPlace::AttentionOutput), stream(after_mlp, NormPlace::MlpOutput)])
            }
            NormPlaces::InputsAndOutputs => (
                vec![stream(input, NormPlace::AttentionInput)],
                vec![
                    stream(attention, NormPlace::AttentionOutput),
                    stream(before_mlp, NormPlace::MlpInput),
                    stream(after_mlp, NormPlace::MlpOutput),
                ],
            ),
        };
        before.into_iter().chain(query_and_key).chain(after).collect()
    }
}
