//! Tensor names of Medusa heads in every supported layout: one table for import and export.

use serde::Serialize;

/// File name of trained heads in a checkpoint or `final/`.
pub const HEADS_FILE: &str = "heads.safetensors";

/// The shape of a set of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HeadsShape {
    pub medusa_num_heads: usize,
    /// ResBlocks per head.
    pub medusa_num_layers: usize,
    pub hidden_size: i64,
    /// 0 if the heads use the backbone's lm_head.
    pub vocab_size: i64,
}

impl HeadsShape {
    /// Placeholder until the tensors are counted.
    pub(super) const NONE: Self = Self { medusa_num_heads: 0, medusa_num_layers: 0, hidden_size: 0, vocab_size: 0 };

    /// Every tensor, by head, then layer.
    pub fn places(&self) -> Vec<HeadTensor> {
        let n = self.medusa_num_layers;
        let of_head = |head: usize| {
            let blocks =
                (0..n).flat_map(move |layer| [HeadPart::W1, HeadPart::B1].map(|part| HeadTensor { head, layer, part }));
            blocks.chain((self.vocab_size > 0).then_some(HeadTensor { head, layer: n, part: HeadPart::W2 }))
        };
        (0..self.medusa_num_heads).flat_map(of_head).collect()
    }

    /// The shape of a tensor.
    pub fn size(&self, place: HeadTensor) -> Vec<i64> {
        match place.part {
            HeadPart::W1 => vec![self.hidden_size; 2],
            HeadPart::B1 => vec![self.hidden_size],
            HeadPart::W2 => vec![self.vocab_size, self.hidden_size],
        }
    }

    /// Names and shapes of all tensors in `heads.safetensors`, by head, then layer.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        HeadsLayout::Heads.tensors(self)
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
}

/// The role of a tensor in its head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeadPart {
    /// A ResBlock's weight, `[H, H]`.
    W1,
    /// A ResBlock's bias, `[H]`.
    B1,
    /// The projection to the vocabulary, `[V, H]`.
    W2,
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

/// Name patterns. vLLM's W2 has no layer in its name.
const NAMES: [(HeadsLayout, HeadPart, &str); 12] = [
    (HeadsLayout::Heads, HeadPart::W1, "{head}.{layer}.linear.weight"),
    (HeadsLayout::Heads, HeadPart::B1, "{head}.{layer}.linear.bias"),
    (HeadsLayout::Heads, HeadPart::W2, "{head}.{layer}.weight"),
    (HeadsLayout::Merged, HeadPart::W1, "medusa_head.{head}.{layer}.linear.weight"),
    (HeadsLayout::Merged, HeadPart::B1, "medusa_head.{head}.{layer}.linear.bias"),
    (HeadsLayout::Merged, HeadPart::W2, "medusa_head.{head}.{layer}.weight"),
    (HeadsLayout::ModelOpt, HeadPart::W1, "medusa_heads.{head}.{layer}.linear.weight"),
    (HeadsLayout::ModelOpt, HeadPart::B1, "medusa_heads.{head}.{layer}.linear.bias"),
    (HeadsLayout::ModelOpt, HeadPart::W2, "medusa_heads.{head}.{layer}.weight"),
    (HeadsLayout::Vllm, HeadPart::W1, "blocks.{head}.layers.{layer}.weight"),
    (HeadsLayout::Vllm, HeadPart::B1, "blocks.{head}.layers.{layer}.bias"),
    (HeadsLayout::Vllm, HeadPart::W2, "lm_heads.{head}.weight"),
];

/// The lm_head that all heads share in vLLM's layout, `[V, H]`.
pub const VLLM_LM_HEAD: &str = "lm_head.weight";
/// vLLM's list of token ids for heads with a reduced vocabulary.
pub const VLLM_TOKEN_MAP: &str = "token_map";
/// Optional prefix: vLLM's loader removes it from every name.
const VLLM_PREFIX: &str = "medusa_heads.";

impl HeadsLayout {
    pub const ALL: [HeadsLayout; 4] =
        [HeadsLayout::Heads, HeadsLayout::Merged, HeadsLayout::ModelOpt, HeadsLayout::Vllm];

    /// The name of a tensor in this layout.
    pub fn name(self, place: HeadTensor) -> String {
        let (_, _, pattern) = NAMES
            .iter()
            .find(|(layout, part, _)| (*layout, *part) == (self, place.part))
            .expect("the table has every part of every layout");
        pattern.replace("{head}", &place.head.to_string()).replace("{layer}", &place.layer.to_string())
    }

    /// Parses a tensor name; `None` if it is not of this layout. The layer of vLLM's W2 is 0.
    pub fn place(self, name: &str) -> Option<HeadTensor> {
        let name = if self == HeadsLayout::Vllm { name.strip_prefix(VLLM_PREFIX).unwrap_or(name) } else { name };
        let patterns = NAMES.iter().filter(|(layout, ..)| *layout == self);
        patterns.filter_map(|(_, part, pattern)| matched(pattern, name, *part)).next()
    }

    /// Prefix of the heads' names in a file that also holds the backbone's weights.
    pub fn prefix(self) -> Option<&'static str> {
        match self {
            HeadsLayout::Merged => Some("medusa_head."),
            HeadsLayout::ModelOpt => Some("medusa_heads."),
            HeadsLayout::Heads | HeadsLayout::Vllm => None,
        }
    }

    /// A description for messages.
    pub fn title(self) -> &'static str {
        match self {
            HeadsLayout::Heads => "heads alone (FasterDecoding, TGI, LoRAX, TensorRT-LLM)",
            HeadsLayout::Merged => "inside a backbone's weights (FasterDecoding v1.0)",
            HeadsLayout::ModelOpt => "inside a backbone's weights (NVIDIA ModelOpt, TensorRT-LLM)",
            HeadsLayout::Vllm => "vLLM's draft model",
        }
    }

    /// Names and shapes of all tensors of heads of this shape, in the order of [`HeadsShape::tensors`].
    pub fn tensors(self, shape: &HeadsShape) -> Vec<(String, Vec<i64>)> {
        shape.places().into_iter().map(|place| (self.name(place), shape.size(place))).collect()
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
        for layout in HeadsLayout::ALL {
            for part in [HeadPart::W1, HeadPart::B1, HeadPart::W2] {
                let place = HeadTensor {
                    head: 3,
                    layer: if part == HeadPart::W2 && layout == HeadsLayout::Vllm { 0 } else { 1 },
                    part,
                };
                let name = layout.name(place);
                for other in HeadsLayout::ALL {
                    assert_eq!(other.place(&name), (other == layout).then_some(place), "{name} as {other:?}");
                }
            }
        }
    }

    #[test]
    fn names_are_those_of_the_published_files() {
        let of = |head, layer, part| HeadTensor { head, layer, part };
        assert_eq!(HeadsLayout::Heads.name(of(0, 1, HeadPart::W2)), "0.1.weight");
        assert_eq!(HeadsLayout::Merged.name(of(4, 0, HeadPart::B1)), "medusa_head.4.0.linear.bias");
        assert_eq!(HeadsLayout::ModelOpt.name(of(1, 0, HeadPart::W1)), "medusa_heads.1.0.linear.weight");
        assert_eq!(HeadsLayout::Vllm.name(of(2, 1, HeadPart::W2)), "lm_heads.2.weight");
        assert_eq!(HeadsLayout::Vllm.place("medusa_heads.blocks.2.layers.0.bias"), Some(of(2, 0, HeadPart::B1)));
        for none in ["01.0.linear.weight", "0.+1.weight", "0.weight", "model.0.0.linear.weight", "9999.0.weight"] {
            assert!(HeadsLayout::ALL.iter().all(|layout| layout.place(none).is_none()), "{none}");
        }
    }
}
