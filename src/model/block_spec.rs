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
    /// Norms of a block, `[H]` each, in the order in which they are computed.
    pub const NORMS: [&str; 2] = ["input_layernorm.weight", "post_attention_layernorm.weight"];

    /// The full name of a part of decoder layer `layer`.
    pub fn in_layer(layer: usize, part: &str) -> String {
        format!("model.layers.{layer}.{part}")
    }
}

/// A decoder block as `config.json` describes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// H.
    pub hidden_size: i64,
    /// Its norms, and the final one.
    pub norms: NormSpec,
    pub heads: HeadShape,
    /// Position embeddings of queries and keys.
    pub rotary: RotarySpec,
    /// How far back a token sees.
    pub windows: Windows,
    pub mlp: MlpSpec,
    /// Which linear layers have a bias.
    pub biases: Biases,
}

/// The norms of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f64,
    pub places: NormPlaces,
}

/// What a norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// x / rms(x) · weight.
    Rms,
}

/// Where a block norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlaces {
    /// The inputs of attention and of the MLP.
    Inputs,
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
    /// Products of queries and keys are divided by its square root.
    pub query_pre_attn_scalar: f64,
}

/// Rotary position embeddings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotarySpec {
    /// Rotated part of a head: D.
    pub size: i64,
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// How the rotary frequencies are stretched beyond the context of pre-training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency is divided by the factor.
    Linear { factor: f64 },
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
}

/// Sliding windows of the layers: a token sees so many tokens, itself included; `None` = all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// The same in every layer.
    EveryLayer(Option<i64>),
}

/// The gated MLP: `down(activation(gate(x)) · up(x))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpSpec {
    /// F.
    pub width: i64,
    /// Of the gate.
    pub activation: Activation,
}

/// An activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
}

/// Which linear layers have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    pub o: bool,
    /// Gate, up and down projections.
    pub mlp: bool,
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

impl HeadShape {
    /// What products of queries and keys are multiplied by.
    pub fn scale(self) -> f64 {
        self.query_pre_attn_scalar.powf(-0.5)
    }

    /// Width of the query projection, Q·D.
    pub fn query_size(self) -> i64 {
        self.q * self.d
    }

    /// Width of the key and of the value projection, G·D.
    pub fn key_value_size(self) -> i64 {
        self.g * self.d
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
        let (h, f, q, kv) = (self.hidden_size, self.mlp.width, self.heads.query_size(), self.heads.key_value_size());
        let Biases { qkv, o, mlp } = self.biases;
        let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = names::LINEARS;
        let linear = |part, size, bias| LinearSpec { part, size, bias };
        BlockLinears {
            qkv: vec![linear(q_proj, [q, h], qkv), linear(k_proj, [kv, h], qkv), linear(v_proj, [kv, h], qkv)],
            o: linear(o_proj, [h, q], o),
            gate_up: vec![linear(gate_proj, [f, h], mlp), linear(up_proj, [f, h], mlp)],
            down: linear(down_proj, [h, f], mlp),
        }
    }

    /// Names in the block, and shapes, of all its weights.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let linear = |LinearSpec { part, size, bias }: LinearSpec| {
            let bias = bias.then(|| (format!("{part}.bias"), vec![size[0]]));
            std::iter::once((format!("{part}.weight"), size.to_vec())).chain(bias)
        };
        let norms = names::NORMS.map(|name| (name.to_owned(), vec![self.hidden_size]));
        self.linears().all().flat_map(linear).chain(norms).collect()
    }
}
