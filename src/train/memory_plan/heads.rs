//! What heads take that are trained.

// N positions of a micro batch, H hidden, V vocabulary, e bytes of a number in the backbone's dtype
use crate::draft::heads::HeadsShape;
use crate::draft::loss::fused::chunk_rows;
use crate::memory::F32;
use crate::memory::heap::Tensors;
use crate::memory::layer::{LayerPass, TrainedLayers};
use crate::memory::weights::numel;
use crate::memory::widths::Widths;
use crate::model::config::LlamaConfig;
use crate::model::prefix_layer::PrefixLayer;

/// Heads, and how they are trained.
#[derive(Debug, Clone, Copy)]
pub struct HeadsWork {
    pub shape: HeadsShape,
    /// With dropout.
    pub drops: bool,
    /// The LM head teaches them.
    pub soft_targets: bool,
}

impl HeadsWork {
    /// The size of each of their tensors.
    pub(super) fn tensors(&self, backbone: &LlamaConfig) -> Vec<u64> {
        let of_prefix = if self.has_prefix() { PrefixLayer::tensors(backbone) } else { vec![] };
        self.shape.tensors().into_iter().chain(of_prefix).map(|(_, shape)| numel(&shape)).collect()
    }

    /// Their prefix layer, if they have one: trained itself, over the same micro batch.
    pub(super) fn prefix_layer<'w>(&self, pass: &LayerPass<'w>) -> Option<LayerPass<'w>> {
        let alone = LayerPass { trained: TrainedLayers::Whole, quantization: None, recompute: false, ..*pass };
        self.has_prefix().then_some(alone)
    }

    fn has_prefix(&self) -> bool {
        self.shape.architecture.has_prefix()
    }

    /// The largest tensors of one head's loss that exist at the same time. `has_teacher`: the backbone learns from itself without adapters.
    pub(super) fn loss(&self, pass: &LayerPass, has_teacher: bool) -> u64 {
        let (n, e, Widths { h, v: vocabulary, .. }) = (pass.positions(), pass.element, pass.widths());
        let (wide_number, is_direct) = (pass.wide(), pass.trained == TrainedLayers::Whole);
        let v = if self.shape.vocab_size > 0 { self.shape.vocab_size.unsigned_abs() } else { vocabulary };
        let chunk = chunk_rows(v.cast_signed(), pass.on_host).unsigned_abs().clamp(1, n.max(1)) * v;
        let teacher = has_teacher || self.soft_targets;
        // Logits and a comparison with the target's logit; for a teacher also its logits and the logarithm of the
        // ratio.
        let wide = if teacher { 4 } else { 2 };
        let cast = e < F32;
        // The comparison also has a mask of a byte per logit. In 16 bits: the product and the gradient; a GPU stores the product in float32.
        let in_16_bits = if pass.on_host { 2 } else { 1 };
        let chunks = [(wide, chunk * wide_number), (1, chunk), (if cast { in_16_bits } else { 0 }, chunk * e)];
        // Selected states, the blocks' output, its gradient, and the tensors that autograd keeps for a block.
        let layers = self.shape.medusa_num_layers as u64;
        let rows = [(3 + 3 * layers, n * h * e), (if self.drops { 2 * layers } else { 0 }, n * h * e)];
        // The weight that is trained: W2, or the LM head of a backbone that is trained itself.
        let is_trained = self.shape.vocab_size > 0 || is_direct;
        let inner = if self.shape.w2_rank > 0 { self.shape.w2_rank.unsigned_abs() } else { h };
        // That weight in the backbone's dtype, and on the CPU its gradient of one chunk before and after the cast.
        let of_chunk = if pass.on_host { e + F32 } else { 0 };
        let trained_weight = if is_trained && cast { v * inner * (e + of_chunk) } else { 0 };
        // The teacher's copy of trained weights, or of the rows of a truncated vocabulary.
        let copied = (is_direct && cast) || v < vocabulary;
        let teacher_weight = if self.soft_targets && copied { v * h * e } else { 0 };
        // oneDNN reorders W2, or the teacher's weight, for many rows: measured for 131, but not for 15.
        let widest = if teacher { h } else { inner };
        let reordered = if pass.on_host && chunk / v >= 64 { v * widest * e } else { 0 };
        let input = self.input_of_sequential_head(pass);
        pass.allocated(chunks.into_iter().chain(rows).chain(input)) + trained_weight + teacher_weight + reordered
    }

    /// The largest tensors of the LM head's own loss, with heads whose first block is like these.
    pub(super) fn loss_of_lm_head(&self, pass: &LayerPass, has_teacher: bool) -> u64 {
        let shape = HeadsShape { vocab_size: 0, w2_rank: 0, medusa_num_layers: 0, ..self.shape };
        Self { shape, soft_targets: false, ..*self }.loss(pass, has_teacher)
    }

    /// Of the last head, which reads the most: its input, and the gradients of the two layers that read it.
    fn input_of_sequential_head(&self, pass: &LayerPass) -> Tensors {
        if !self.shape.architecture.is_sequential() {
            return vec![];
        }
        let (n, e, Widths { h, .. }) = (pass.positions(), pass.element, pass.widths());
        let inputs = self.shape.inputs(self.shape.medusa_num_heads - 1, 0).unsigned_abs();
        // With the dropout mask and what is left, and in Medusa-2 the gradients of both layers' input.
        let is_joint = pass.trained != TrainedLayers::Frozen;
        let copies = 1 + if self.drops { 2 } else { 0 } + if is_joint { 2 } else { 0 };
        let trained = pass.wide() + if e < F32 { 2 * e } else { 0 };
        vec![(copies, n * inputs * e), (1, n * (inputs - h) * e), (1, n * h * e), (2, inputs * h * trained)]
    }
}
