//! Architectures, sizes and tensor names of heads in every supported layout: one table for import and export.

use serde::{Deserialize, Serialize};

use crate::draft::trained::Reads;
use crate::model::prefix_layer::PREFIX;

/// File name of trained heads in a checkpoint or `final/`.
pub const HEADS_FILE: &str = "heads.safetensors";

/// What a head reads, `heads.architecture` of a recipe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadsArchitecture {
    /// The last hidden state alone (arXiv 2401.10774): heads are independent of each other.
    #[default]
    Medusa,
    /// Also the tokens between the hidden state's position and the one to predict (arXiv 2402.05109): heads are sequential.
    Hydra,
    /// As [`HeadsArchitecture::Hydra`], with the output of a [prefix layer](crate::model::prefix_layer) in place of the hidden state.
    #[serde(rename = "hydra++")]
    HydraPlusPlus,
}

impl HeadsArchitecture {
    /// Its name in recipes and config.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Medusa => "medusa",
            Self::Hydra => "hydra",
            Self::HydraPlusPlus => "hydra++",
        }
    }

    /// What a head of this kind is called.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Medusa => "head",
            Self::Hydra => "Hydra head",
            Self::HydraPlusPlus => "Hydra++ head",
        }
    }

    /// Whether a head reads the tokens before the one that it predicts, so that a node's guesses depend on its path in the tree.
    pub(in crate::draft) fn is_sequential(self) -> bool {
        self != Self::Medusa
    }

    /// Whether the heads read the output of a prefix layer.
    pub(in crate::draft) fn has_prefix(self) -> bool {
        self == Self::HydraPlusPlus
    }
}

/// The shape of a set of heads, without their prefix layer, whose shape the backbone decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HeadsShape {
    pub architecture: HeadsArchitecture,
    pub medusa_num_heads: usize,
    /// ResBlocks per head.
    pub medusa_num_layers: usize,
    pub hidden_size: i64,
    /// 0 if the heads use the backbone's lm_head.
    pub vocab_size: i64,
    /// Whether W2 has a bias, as in published Hydra heads.
    pub w2_bias: bool,
    /// R, the rank of W2 = B·A; 0 if W2 is one matrix.
    pub w2_rank: i64,
    /// Whether all heads have one W2; false for a single head.
    pub shared_w2: bool,
}

impl HeadsShape {
    /// What these heads read of a row.
    pub fn reads(&self) -> Reads {
        let Self { architecture, medusa_num_heads: levels, .. } = *self;
        Reads { levels, tokens: architecture.is_sequential(), whole_rows: architecture.has_prefix() }
    }

    /// Every tensor, by head, then layer; at the end a W2 that all heads share, as head 0's.
    pub fn places(&self) -> Vec<HeadTensor> {
        let n = self.medusa_num_layers;
        let layer_tensors = |head, layer| {
            self.parts_of_layer(layer).iter().map(move |&part| HeadTensor { head, layer, part }).collect::<Vec<_>>()
        };
        let own = if self.shared_w2 { n } else { n + 1 };
        let head_tensors =
            (0..self.medusa_num_heads).flat_map(|head| (0..own).flat_map(move |layer| layer_tensors(head, layer)));
        head_tensors.chain((own..=n).flat_map(|layer| layer_tensors(0, layer))).collect()
    }

    /// The tensors that a head needs, with those that it shares.
    pub fn places_of(&self, head: usize) -> Vec<HeadTensor> {
        let is_its = |place: &HeadTensor| place.head == head || self.is_shared(*place);
        self.places().into_iter().filter(is_its).collect()
    }

    /// Whether all heads use this tensor.
    pub fn is_shared(&self, place: HeadTensor) -> bool {
        self.shared_w2 && !place.part.is_of_block()
    }

    /// The tensors of a ResBlock; of the output layer if `layer` is their number.
    pub(super) fn parts_of_layer(&self, layer: usize) -> &'static [HeadPart] {
        match layer {
            0 if self.architecture.is_sequential() => &[HeadPart::W1, HeadPart::B1, HeadPart::Res, HeadPart::ResBias],
            _ if layer < self.medusa_num_layers => &[HeadPart::W1, HeadPart::B1],
            _ if self.vocab_size == 0 => &[],
            _ if self.w2_rank > 0 && self.w2_bias => &[HeadPart::W2Down, HeadPart::W2, HeadPart::W2Bias],
            _ if self.w2_rank > 0 => &[HeadPart::W2Down, HeadPart::W2],
            _ if self.w2_bias => &[HeadPart::W2, HeadPart::W2Bias],
            _ => &[HeadPart::W2],
        }
    }

    /// The inputs of a ResBlock: in a sequential head, the first reads the hidden state and the embeddings of the tokens after it.
    pub fn inputs(&self, head: usize, layer: usize) -> i64 {
        let tokens = if layer == 0 { self.reads().tokens_of(head) as i64 } else { 0 };
        (1 + tokens) * self.hidden_size
    }

    /// The shape of a tensor.
    pub fn size(&self, place: HeadTensor) -> Vec<i64> {
        match place.part {
            HeadPart::W1 | HeadPart::Res => vec![self.hidden_size, self.inputs(place.head, place.layer)],
            HeadPart::B1 | HeadPart::ResBias => vec![self.hidden_size],
            HeadPart::W2Down => vec![self.w2_rank, self.hidden_size],
            HeadPart::W2 if self.w2_rank > 0 => vec![self.vocab_size, self.w2_rank],
            HeadPart::W2 => vec![self.vocab_size, self.hidden_size],
            HeadPart::W2Bias => vec![self.vocab_size],
        }
    }

    /// Names and shapes of all tensors in `heads.safetensors`, by head, then layer.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        HeadsLayout::Heads.tensors(self)
    }

    /// The same heads, each with a W2 of its own.
    #[must_use]
    pub fn with_own_w2(self) -> Self {
        Self { shared_w2: false, ..self }
    }

    /// Number of weights.
    pub fn parameters(&self) -> i64 {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum()
    }
}

/// A naming scheme for the tensors of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadsLayout {
    /// Files that hold only heads: ours, FasterDecoding v0.1, TGI, LoRAX, TensorRT-LLM. Without W2, also what `train_legacy.py`
    /// of FasterDecoding and TGI call version 2.
    Heads,
    /// Stored with the backbone's weights, as in FasterDecoding v1.0 (axolotl).
    Merged,
    /// Stored with the backbone's weights, as in NVIDIA ModelOpt.
    ModelOpt,
    /// vLLM's draft model.
    Vllm,
    /// `hydra_lm_head.pt` of Hydra's authors.
    Hydra,
    /// The same for Hydra++. A dropout module stands before each layer there, and counts.
    #[serde(rename = "hydra++")]
    HydraPlusPlus,
}

/// The role of a tensor in its head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeadPart {
    /// A ResBlock's weight, `[H, H]`; `[H, (k+2)·H]` in the first block of sequential head k (0-based).
    W1,
    /// A ResBlock's bias, `[H]`.
    B1,
    /// The residual connection of a sequential head's first block, `[H, (k+2)·H]`.
    Res,
    /// Its bias, `[H]`.
    ResBias,
    /// A of a low-rank projection to the vocabulary W2 = B·A, `[R, H]`.
    W2Down,
    /// The projection to the vocabulary, `[V, H]`; B of a low-rank one, `[V, R]`.
    W2,
    /// Its bias, `[V]`.
    W2Bias,
}

impl HeadPart {
    /// Whether it belongs to a ResBlock, not to the output layer.
    pub(super) fn is_of_block(self) -> bool {
        !matches!(self, Self::W2Down | Self::W2 | Self::W2Bias)
    }
}

/// Identifies a tensor of the heads. Ordered as in [`HeadsShape::tensors`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeadTensor {
    /// 0-based.
    pub head: usize,
    /// The ResBlock, 0-based; for W2 the number of ResBlocks, as torch's `nn.Sequential` counts.
    pub layer: usize,
    pub part: HeadPart,
}

/// Name patterns. The W2 of vLLM and Hydra has no layer in its name. Only two layouts can hold sequential heads and a bias of W2.
const NAMES: [(HeadsLayout, HeadPart, &str); 28] = [
    (HeadsLayout::Heads, HeadPart::W1, "{head}.{layer}.linear.weight"),
    (HeadsLayout::Heads, HeadPart::B1, "{head}.{layer}.linear.bias"),
    (HeadsLayout::Heads, HeadPart::Res, "{head}.{layer}.res_connection.weight"),
    (HeadsLayout::Heads, HeadPart::ResBias, "{head}.{layer}.res_connection.bias"),
    (HeadsLayout::Heads, HeadPart::W2Down, "{head}.{layer}.down.weight"),
    (HeadsLayout::Heads, HeadPart::W2, "{head}.{layer}.weight"),
    (HeadsLayout::Heads, HeadPart::W2Bias, "{head}.{layer}.bias"),
    (HeadsLayout::Merged, HeadPart::W1, "medusa_head.{head}.{layer}.linear.weight"),
    (HeadsLayout::Merged, HeadPart::B1, "medusa_head.{head}.{layer}.linear.bias"),
    (HeadsLayout::Merged, HeadPart::W2, "medusa_head.{head}.{layer}.weight"),
    (HeadsLayout::ModelOpt, HeadPart::W1, "medusa_heads.{head}.{layer}.linear.weight"),
    (HeadsLayout::ModelOpt, HeadPart::B1, "medusa_heads.{head}.{layer}.linear.bias"),
    (HeadsLayout::ModelOpt, HeadPart::W2, "medusa_heads.{head}.{layer}.weight"),
    (HeadsLayout::Vllm, HeadPart::W1, "blocks.{head}.layers.{layer}.weight"),
    (HeadsLayout::Vllm, HeadPart::B1, "blocks.{head}.layers.{layer}.bias"),
    (HeadsLayout::Vllm, HeadPart::W2, "lm_heads.{head}.weight"),
    (HeadsLayout::Hydra, HeadPart::W1, "hydra_mlp.{head}.{layer}.linear.weight"),
    (HeadsLayout::Hydra, HeadPart::B1, "hydra_mlp.{head}.{layer}.linear.bias"),
    (HeadsLayout::Hydra, HeadPart::Res, "hydra_mlp.{head}.{layer}.res_connection.weight"),
    (HeadsLayout::Hydra, HeadPart::ResBias, "hydra_mlp.{head}.{layer}.res_connection.bias"),
    (HeadsLayout::Hydra, HeadPart::W2, "hydra_lm_head.{head}.weight"),
    (HeadsLayout::Hydra, HeadPart::W2Bias, "hydra_lm_head.{head}.bias"),
    (HeadsLayout::HydraPlusPlus, HeadPart::W1, "hydra_mlp.{head}.{layer}.linear.weight"),
    (HeadsLayout::HydraPlusPlus, HeadPart::B1, "hydra_mlp.{head}.{layer}.linear.bias"),
    (HeadsLayout::HydraPlusPlus, HeadPart::Res, "hydra_mlp.{head}.{layer}.res_connection.weight"),
    (HeadsLayout::HydraPlusPlus, HeadPart::ResBias, "hydra_mlp.{head}.{layer}.res_connection.bias"),
    (HeadsLayout::HydraPlusPlus, HeadPart::W2, "hydra_lm_head.{head}.1.weight"),
    (HeadsLayout::HydraPlusPlus, HeadPart::W2Bias, "hydra_lm_head.{head}.1.bias"),
];

/// Names of a W2 that all heads share.
const SHARED_NAMES: [(HeadsLayout, HeadPart, &str); 4] = [
    (HeadsLayout::Heads, HeadPart::W2Down, "w2.down.weight"),
    (HeadsLayout::Heads, HeadPart::W2, "w2.weight"),
    (HeadsLayout::Heads, HeadPart::W2Bias, "w2.bias"),
    (HeadsLayout::Vllm, HeadPart::W2, VLLM_LM_HEAD),
];

/// The lm_head that all heads share in vLLM's layout, `[V, H]`.
pub const VLLM_LM_HEAD: &str = "lm_head.weight";
/// Optional prefix: vLLM's loader removes it from every name.
const VLLM_PREFIX: &str = "medusa_heads.";
/// What the names of Hydra++'s prefix layer begin with, spelt as its authors do.
const HYDRA_PREFIX: &str = "prefix_embeding_layer.";
/// Tensors in the files of Hydra's authors that no head computes with: the backbone's embedding, the prefix layer's, which is not read, and the
/// frequencies of its rotary embeddings.
pub(super) const HYDRA_UNUSED: [&str; 3] = [
    "input_embed_fn.weight",
    "prefix_embeding_layer.embed_tokens.weight",
    "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
];

impl HeadsLayout {
    pub const ALL: [HeadsLayout; 6] = [
        HeadsLayout::Heads,
        HeadsLayout::Merged,
        HeadsLayout::ModelOpt,
        HeadsLayout::Vllm,
        HeadsLayout::Hydra,
        HeadsLayout::HydraPlusPlus,
    ];

    /// The name of a tensor in this layout.
    ///
    /// # Panics
    /// If the layout cannot hold such a tensor.
    pub fn name(self, place: HeadTensor) -> String {
        let pattern = self.pattern(place.part).expect("a layout that holds this tensor");
        let layer = if self == HeadsLayout::HydraPlusPlus { 2 * place.layer + 1 } else { place.layer };
        pattern.replace("{head}", &place.head.to_string()).replace("{layer}", &layer.to_string())
    }

    /// The name of a tensor of heads of this shape.
    ///
    /// # Panics
    /// If the layout cannot hold such a tensor.
    pub fn name_in(self, shape: &HeadsShape, place: HeadTensor) -> String {
        if shape.is_shared(place) {
            return self.shared_name(place.part).expect("a layout that holds this shared tensor").into();
        }
        self.name(place)
    }

    fn shared_name(self, part: HeadPart) -> Option<&'static str> {
        SHARED_NAMES.iter().find(|(layout, of, _)| (*layout, *of) == (self, part)).map(|(.., name)| *name)
    }

    /// The part of a W2 that all heads share with this name; `None` for other names. vLLM's lm_head may also be the backbone's.
    pub(super) fn shared_part(self, name: &str) -> Option<HeadPart> {
        SHARED_NAMES.iter().find(|(layout, _, of)| (*layout, *of) == (self, name)).map(|(_, part, _)| *part)
    }

    fn pattern(self, part: HeadPart) -> Option<&'static str> {
        NAMES.iter().find(|(layout, of, _)| (*layout, *of) == (self, part)).map(|(.., pattern)| *pattern)
    }

    /// Whether the output layer's name has no layer in it.
    pub(super) fn names_w2_by_head(self) -> bool {
        matches!(self, HeadsLayout::Vllm | HeadsLayout::Hydra | HeadsLayout::HydraPlusPlus)
    }

    /// What the names of a prefix layer begin with, in place of [`prefix_layer::PREFIX`](crate::model::prefix_layer::PREFIX).
    pub fn prefix_layer(self) -> Option<&'static str> {
        match self {
            HeadsLayout::Heads => Some(PREFIX),
            HeadsLayout::HydraPlusPlus => Some(HYDRA_PREFIX),
            HeadsLayout::Merged | HeadsLayout::ModelOpt | HeadsLayout::Vllm | HeadsLayout::Hydra => None,
        }
    }

    /// Parses a tensor name; `None` if it is not of this layout. The layer of an output layer named by its head is 0.
    pub fn place(self, name: &str) -> Option<HeadTensor> {
        let name = if self == HeadsLayout::Vllm { name.strip_prefix(VLLM_PREFIX).unwrap_or(name) } else { name };
        let patterns = NAMES.iter().filter(|(layout, ..)| *layout == self);
        let place = patterns.filter_map(|(_, part, pattern)| matched(pattern, name, *part)).next()?;
        if self == HeadsLayout::HydraPlusPlus && place.part.is_of_block() {
            return (place.layer % 2 == 1).then_some(HeadTensor { layer: place.layer / 2, ..place });
        }
        Some(place)
    }

    /// Prefix of the heads' names in a file that also holds the backbone's weights.
    pub fn prefix(self) -> Option<&'static str> {
        match self {
            HeadsLayout::Merged => Some("medusa_head."),
            HeadsLayout::ModelOpt => Some("medusa_heads."),
            HeadsLayout::Heads | HeadsLayout::Vllm | HeadsLayout::Hydra | HeadsLayout::HydraPlusPlus => None,
        }
    }

    /// A description for messages.
    pub fn title(self) -> &'static str {
        match self {
            HeadsLayout::Heads => "heads alone (FasterDecoding, TGI, LoRAX, TensorRT-LLM)",
            HeadsLayout::Merged => "inside a backbone's weights (FasterDecoding v1.0)",
            HeadsLayout::ModelOpt => "inside a backbone's weights (NVIDIA ModelOpt, TensorRT-LLM)",
            HeadsLayout::Vllm => "vLLM's draft model",
            HeadsLayout::Hydra => "Hydra heads alone (zankner/Hydra)",
            HeadsLayout::HydraPlusPlus => "Hydra++ heads and their prefix layer (zankner/Hydra)",
        }
    }

    /// Names and shapes of all tensors of heads of this shape, in the order of [`HeadsShape::tensors`].
    pub fn tensors(self, shape: &HeadsShape) -> Vec<(String, Vec<i64>)> {
        shape.places().into_iter().map(|place| (self.name_in(shape, place), shape.size(place))).collect()
    }
}

/// Matches `name` against a pattern of the table, component by component between the dots.
fn matched(pattern: &str, name: &str, part: HeadPart) -> Option<HeadTensor> {
    let mut place = HeadTensor { head: 0, layer: 0, part };
    let (words, found) = (pattern.split('.'), name.split('.'));
    if words.clone().count() != found.clone().count() {
        return None;
    }
    for (word, got) in words.zip(found) {
        match word {
            "{head}" => place.head = number(got)?,
            "{layer}" => place.layer = number(got)?,
            _ if word == got => {}
            _ => return None,
        }
    }
    Some(place)
}

/// Parses an index without sign or leading zeros. Indices from 1000 on are rejected: no file has that many heads or layers.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|number: &usize| number.to_string() == text && *number < 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_means_its_place_in_its_own_layout_alone() {
        for (layout, part, _) in NAMES {
            let layer = if !part.is_of_block() && layout.names_w2_by_head() { 0 } else { 1 };
            let place = HeadTensor { head: 3, layer, part };
            let name = layout.name(place);
            // The blocks of both layouts of Hydra's authors have the same names; those of the output layers distinguish them.
            let hydra = [HeadsLayout::Hydra, HeadsLayout::HydraPlusPlus];
            let is_other = |other: &HeadsLayout| {
                let both_of_hydra = hydra.contains(&layout) && hydra.contains(other);
                !(both_of_hydra && *other != layout && part.is_of_block())
            };
            for other in HeadsLayout::ALL.into_iter().filter(is_other) {
                assert_eq!(other.place(&name), (other == layout).then_some(place), "{name} as {other:?}");
            }
        }
    }

    #[test]
    fn names_are_those_of_the_published_files() {
        let tensor = |head, layer, part| HeadTensor { head, layer, part };
        assert_eq!(HeadsLayout::Heads.name(tensor(0, 1, HeadPart::W2)), "0.1.weight");
        assert_eq!(HeadsLayout::Merged.name(tensor(4, 0, HeadPart::B1)), "medusa_head.4.0.linear.bias");
        assert_eq!(HeadsLayout::ModelOpt.name(tensor(1, 0, HeadPart::W1)), "medusa_heads.1.0.linear.weight");
        assert_eq!(HeadsLayout::Vllm.name(tensor(2, 1, HeadPart::W2)), "lm_heads.2.weight");
        assert_eq!(HeadsLayout::Hydra.name(tensor(3, 0, HeadPart::Res)), "hydra_mlp.3.0.res_connection.weight");
        assert_eq!(HeadsLayout::Hydra.name(tensor(3, 1, HeadPart::W2Bias)), "hydra_lm_head.3.bias");
        let plus_plus = HeadsLayout::HydraPlusPlus;
        assert_eq!(plus_plus.name(tensor(3, 2, HeadPart::W1)), "hydra_mlp.3.5.linear.weight");
        assert_eq!(plus_plus.name(tensor(3, 4, HeadPart::W2)), "hydra_lm_head.3.1.weight");
        assert_eq!(plus_plus.place("hydra_mlp.3.4.linear.weight"), None, "a dropout module");
        assert_eq!(HeadsLayout::Vllm.place("medusa_heads.blocks.2.layers.0.bias"), Some(tensor(2, 0, HeadPart::B1)));
        for none in ["01.0.linear.weight", "0.+1.weight", "0.weight", "model.0.0.linear.weight", "9999.0.weight"] {
            assert!(HeadsLayout::ALL.iter().all(|layout| layout.place(none).is_none()), "{none}");
        }
    }

    #[test]
    fn a_sequential_head_reads_one_more_embedding_than_the_one_before() {
        let shape = HeadsShape {
            architecture: HeadsArchitecture::Hydra,
            medusa_num_heads: 2,
            medusa_num_layers: 2,
            hidden_size: 8,
            vocab_size: 50,
            w2_bias: true,
            ..HeadsShape::default()
        };
        let tensors = shape.tensors();
        let sizes: Vec<(&str, &[i64])> = tensors.iter().map(|(name, size)| (name.as_str(), size.as_slice())).collect();
        let second_head = [
            ("1.0.linear.weight", &[8, 24][..]),
            ("1.0.linear.bias", &[8]),
            ("1.0.res_connection.weight", &[8, 24]),
            ("1.0.res_connection.bias", &[8]),
            ("1.1.linear.weight", &[8, 8]),
            ("1.1.linear.bias", &[8]),
            ("1.2.weight", &[50, 8]),
            ("1.2.bias", &[50]),
        ];
        assert_eq!(sizes[8..], second_head);
        assert_eq!(sizes[0], ("0.0.linear.weight", &[8, 16][..]));
    }
}
