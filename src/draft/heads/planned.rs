//! Heads before their weights: what the `[heads]` table of a recipe makes of a backbone's config, and the memory that they will take.

// N positions of a micro batch, H hidden, V vocabulary, e bytes of a number in the backbone's dtype
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use super::import::{HeadsFile, folder_of};
use super::{Heads, HeadsConfig, HeadsShape};
use crate::draft::error::DrafterError;
use crate::draft::loss::fused::chunk_rows;
use crate::draft::planned::{DrafterConfig, DrafterStart, PlannedDrafter, Teachers};
use crate::draft::token_map::TokenMap;
use crate::draft::trained::{Reads, TrainedDrafter};
use crate::memory::F32;
use crate::memory::heap::Tensors;
use crate::memory::layer::{LayerPass, TrainedLayers};
use crate::memory::weights::numel;
use crate::memory::widths::Widths;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::prefix_layer::PrefixLayer;
use crate::plural::counted;
use crate::torch::wide;

impl DrafterConfig for HeadsConfig {
    fn reads(&self) -> Reads {
        self.shape([0, 0]).reads()
    }

    fn init_from(&self) -> Option<&Path> {
        self.init_from.as_deref()
    }

    fn draft_vocab_size(&self) -> Option<usize> {
        self.draft_vocab_size.map(NonZeroUsize::get)
    }

    fn dropout(&self) -> f64 {
        self.dropout.get()
    }

    fn for_backbone(&self, backbone: &LlamaConfig) -> Arc<dyn PlannedDrafter> {
        Arc::new(PlannedHeads { shape: self.shape([backbone.vocab_size, backbone.hidden_size]), config: self.clone() })
    }

    /// The file decides whether W2 has a bias.
    fn checked(&self, backbone: &LlamaConfig) -> Result<Arc<dyn PlannedDrafter>, DrafterError> {
        let Some(path) = &self.init_from else { return Ok(self.for_backbone(backbone)) };
        let got = Heads::check(path, backbone)?;
        let ours = self.shape([backbone.vocab_size, backbone.hidden_size]);
        let expected = HeadsShape { w2_bias: got.w2_bias, ..ours };
        if got != expected {
            let [expected, got] = [expected, got].map(|shape| in_words(&shape));
            return Err(DrafterError::OtherShape { path: path.clone(), expected, got });
        }
        Ok(Arc::new(PlannedHeads { shape: got, config: self.clone() }))
    }

    fn start(&self) -> Result<Option<DrafterStart>, DrafterError> {
        let Some(path) = &self.init_from else { return Ok(None) };
        let file = HeadsFile::open(path)?;
        let token_map = file.token_map().map(<[i64]>::to_vec);
        Ok(Some(DrafterStart { folder: folder_of(path).to_owned(), files: file.files(), token_map }))
    }

    fn with_shared_lm_head(&self) -> Option<(Arc<dyn DrafterConfig>, &'static str)> {
        let cannot = self.init_from.is_some() || self.draft_vocab_size.is_some() || self.w2_rank.is_some();
        let changed = Self { shared_lm_head: true, shared_w2: false, ..self.clone() };
        (!self.shared_lm_head && !cannot).then(|| (Arc::new(changed) as _, "heads.shared_lm_head = true"))
    }
}

/// Heads whose shape is known.
#[derive(Debug)]
pub struct PlannedHeads {
    config: HeadsConfig,
    shape: HeadsShape,
}

impl PlannedDrafter for PlannedHeads {
    fn reads(&self) -> Reads {
        self.shape.reads()
    }

    fn title(&self) -> String {
        let HeadsShape { architecture, medusa_num_heads, medusa_num_layers, shared_w2, .. } = self.shape;
        let kind = if architecture.is_sequential() { format!(" ({})", architecture.name()) } else { String::new() };
        let w2 = if shared_w2 { ", one W2" } else { "" };
        format!("{medusa_num_heads}{kind} of {}{w2}", counted(medusa_num_layers, "ResBlock"))
    }

    fn shape(&self) -> serde_json::Value {
        serde_json::to_value(self.shape).expect("numbers and names")
    }

    fn build(
        &self,
        backbone: &Llama,
        tokens: Option<&[i64]>,
        seed: u64,
    ) -> Result<Box<dyn TrainedDrafter>, DrafterError> {
        Ok(Box::new(match &self.config.init_from {
            None => {
                let map = tokens.map(|tokens| TokenMap::new(tokens.to_vec(), backbone.device()));
                Heads::new(&self.config, &backbone.logit_weight(), map).with_new_prefix(backbone, seed)
            }
            Some(path) => Heads::load_for(path, &backbone.config, wide(backbone.kind()), backbone.device())?
                .for_training(backbone.kind()),
        }))
    }

    fn tensors(&self, backbone: &LlamaConfig) -> Vec<u64> {
        let in_prefix = if self.has_prefix() { PrefixLayer::tensors(backbone) } else { vec![] };
        self.shape.tensors().into_iter().chain(in_prefix).map(|(_, shape)| numel(&shape)).collect()
    }

    /// The prefix layer.
    fn layer<'w>(&self, pass: &LayerPass<'w>) -> Option<LayerPass<'w>> {
        let alone = LayerPass { trained: TrainedLayers::Whole, quantization: None, recompute: false, ..*pass };
        self.has_prefix().then_some(alone)
    }

    fn loss_bytes(&self, pass: &LayerPass, teachers: Teachers) -> u64 {
        let (n, e, Widths { h, v: vocabulary, .. }) = (pass.positions(), pass.element, pass.widths());
        let (wide_number, is_direct) = (pass.wide(), pass.trained == TrainedLayers::Whole);
        let v = if self.shape.vocab_size > 0 { self.shape.vocab_size.unsigned_abs() } else { vocabulary };
        let chunk = chunk_rows(v.cast_signed(), pass.on_host).unsigned_abs().clamp(1, n.max(1)) * v;
        let teacher = teachers.for_backbone || teachers.for_drafter;
        // Logits and a comparison with the target's logit; for a teacher also its logits and the logarithm of the
        // ratio.
        let wide = if teacher { 4 } else { 2 };
        let cast = e < F32;
        // The comparison also has a mask of a byte per logit. In 16 bits: the product and the gradient; a GPU stores the product in float32.
        let in_16_bits = if pass.on_host { 2 } else { 1 };
        let chunks = [(wide, chunk * wide_number), (1, chunk), (if cast { in_16_bits } else { 0 }, chunk * e)];
        // Selected states, the blocks' output, its gradient, and the tensors that autograd keeps for a block.
        let layers = self.shape.medusa_num_layers as u64;
        let rows = [(3 + 3 * layers, n * h * e), (if self.drops() { 2 * layers } else { 0 }, n * h * e)];
        // The weight that is trained: W2, or the LM head of a backbone that is trained itself.
        let is_trained = self.shape.vocab_size > 0 || is_direct;
        let inner = if self.shape.w2_rank > 0 { self.shape.w2_rank.unsigned_abs() } else { h };
        // That weight in the backbone's dtype, and on the CPU its gradient of one chunk before and after the cast.
        let chunk_bytes = if pass.on_host { e + F32 } else { 0 };
        let trained_weight = if is_trained && cast { v * inner * (e + chunk_bytes) } else { 0 };
        // The teacher's copy of trained weights, or of the rows of a truncated vocabulary.
        let copied = (is_direct && cast) || v < vocabulary;
        let teacher_weight = if teachers.for_drafter && copied { v * h * e } else { 0 };
        // oneDNN reorders W2, or the teacher's weight, for many rows: measured for 131, but not for 15.
        let widest = if teacher { h } else { inner };
        let reordered = if pass.on_host && chunk / v >= 64 { v * widest * e } else { 0 };
        let input = self.input_of_sequential_head(pass);
        pass.allocated(chunks.into_iter().chain(rows).chain(input)) + trained_weight + teacher_weight + reordered
    }

    /// The first block is like that of these heads.
    fn lm_head_loss_bytes(&self, pass: &LayerPass, teachers: Teachers) -> u64 {
        let shape = HeadsShape { vocab_size: 0, w2_rank: 0, medusa_num_layers: 0, ..self.shape };
        let teachers = Teachers { for_drafter: false, ..teachers };
        Self { shape, config: self.config.clone() }.loss_bytes(pass, teachers)
    }
}

impl PlannedHeads {
    fn has_prefix(&self) -> bool {
        self.shape.architecture.has_prefix()
    }

    fn drops(&self) -> bool {
        self.config.dropout.get() > 0.0
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
        let copies = 1 + if self.drops() { 2 } else { 0 } + if is_joint { 2 } else { 0 };
        let trained = pass.wide() + if e < F32 { 2 * e } else { 0 };
        vec![(copies, n * inputs * e), (1, n * (inputs - h) * e), (1, n * h * e), (2, inputs * h * trained)]
    }
}

fn in_words(shape: &HeadsShape) -> String {
    let HeadsShape { architecture, medusa_num_heads, medusa_num_layers, .. } = shape;
    let architecture = architecture.name();
    let w2 = match (shape.vocab_size, shape.w2_rank) {
        (0, _) => "the backbone's lm_head".to_owned(),
        (v, rank) => {
            let rank = if rank > 0 { format!(" and rank {rank}") } else { String::new() };
            let [owner, heads] = if shape.shared_w2 { ["one", " for all heads"] } else { ["their own", ""] };
            format!("{owner} output layer of {v} tokens{rank}{heads}")
        }
    };
    format!(
        "architecture = \"{architecture}\", medusa_num_heads = {medusa_num_heads}, medusa_num_layers = {medusa_num_layers} and {w2}"
    )
}
