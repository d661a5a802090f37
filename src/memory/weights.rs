//! The weights of a backbone, or of the part of it that lies on one device.

use crate::model::block_spec::LinearSpec;
use crate::model::config::LlamaConfig;
use crate::model::stored::format::StoredFormat;

/// The part of a backbone that lies on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageShape {
    /// Decoder layers.
    pub layers: usize,
    /// Has the embedding.
    pub is_first: bool,
    /// Has the final norm, the LM head, the heads and all losses.
    pub is_last: bool,
}

impl StageShape {
    /// A backbone of so many layers on one device.
    pub fn whole(layers: usize) -> Self {
        Self { layers, is_first: true, is_last: true }
    }

    /// Stages with so many layers each.
    pub fn all(counts: &[usize]) -> Vec<Self> {
        let last = counts.len().saturating_sub(1);
        counts.iter().enumerate().map(|(at, &layers)| Self { layers, is_first: at == 0, is_last: at == last }).collect()
    }

    /// Numbers in its weights.
    pub fn parameters(self, config: &LlamaConfig) -> u64 {
        let a_layer: u64 = config.block().tensors().iter().map(|(_, shape)| numel(shape)).sum();
        let norm = if self.is_last { config.hidden_size.unsigned_abs() } else { 0 };
        self.vocabularies(config) * numel(&config.lm_head().size) + a_layer * self.layers as u64 + norm
    }

    /// Numbers of a tied LM head that is a copy of the embedding, which lies on another stage.
    pub fn copied_embedding(self, config: &LlamaConfig) -> u64 {
        let is_copied = config.tie_word_embeddings && self.is_last && !self.is_first;
        if is_copied { numel(&config.lm_head().size) } else { 0 }
    }

    /// Numbers of its linear layers, without the LM head.
    pub fn in_linears(self, config: &LlamaConfig) -> u64 {
        in_linears(config) * self.layers as u64
    }

    /// Numbers of its largest weight.
    pub fn largest(self, config: &LlamaConfig) -> u64 {
        let has_vocabulary = self.vocabularies(config) > 0;
        largest_linear(config).max(if has_vocabulary { numel(&config.lm_head().size) } else { 0 })
    }

    /// Bytes of its weights: the linear layers' as they are stored, all others in numbers of `element` bytes.
    pub fn weight_bytes(self, config: &LlamaConfig, stored: &dyn StoredFormat, element: u64) -> u64 {
        let linears = config.block().linears();
        let a_layer: u64 = linears.all().map(|linear| stored.bytes(linear.size.map(i64::unsigned_abs))).sum();
        let rest = self.parameters(config) - self.in_linears(config) + self.copied_embedding(config);
        rest * element + a_layer * self.layers as u64
    }

    /// As [`StageShape::weight_bytes`], of embedding, LM head and linear layers, without the latter's scales: what decides which device has how
    /// many layers.
    pub fn matrix_bytes(self, config: &LlamaConfig, stored: &dyn StoredFormat, element: u64) -> u64 {
        let vocabularies = u64::from(self.is_first) + u64::from(self.is_last);
        let a_layer = in_linears(config) * stored.bits() / 8;
        self.layers as u64 * a_layer + vocabularies * numel(&config.lm_head().size) * element
    }

    /// How many of embedding and LM head are weights of its own.
    fn vocabularies(self, config: &LlamaConfig) -> u64 {
        u64::from(self.is_first) + u64::from(self.is_last && !config.tie_word_embeddings)
    }
}

/// Numbers of a tensor.
pub fn numel(shape: &[i64]) -> u64 {
    shape.iter().product::<i64>().unsigned_abs()
}

/// Numbers in the linear layers of one decoder layer.
pub fn in_linears(config: &LlamaConfig) -> u64 {
    config.block().linears().all().map(LinearSpec::numel).sum()
}

/// Numbers of the largest linear layer of a decoder layer.
pub fn largest_linear(config: &LlamaConfig) -> u64 {
    config.block().linears().all().map(LinearSpec::numel).max().unwrap_or(0)
}
