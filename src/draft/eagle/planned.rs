//! An EAGLE-3 drafter before its weights: what the `[heads]` table of a recipe makes of a backbone's config, and the memory that it will take.

// N positions of a micro batch, T tokens of a row, H hidden, Q query heads, V draft vocabulary
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::EagleFile;
use super::weights::{EAGLE3, Eagle, default_taps, reads};
use crate::draft::error::DrafterError;
use crate::draft::heads::import::folder_of;
use crate::draft::loss::fused::chunk_rows;
use crate::draft::planned::{DrafterConfig, DrafterStart, PlannedDrafter, Teachers};
use crate::draft::token_map::TokenMap;
use crate::draft::trained::{Reads, TrainedDrafter};
use crate::memory::F32;
use crate::memory::layer::{LayerPass, TrainedLayers};
use crate::memory::weights::numel;
use crate::memory::widths::Widths;
use crate::model::config::LlamaConfig;
use crate::model::eagle_layer::EagleLayer;
use crate::model::llama::Llama;
use crate::model::taps::Taps;
use crate::torch::wide;

/// An EAGLE-3 drafter, as a recipe asks for it.
#[derive(Debug, Clone)]
pub struct EagleConfig {
    /// Steps of the training-time test.
    pub ttt_steps: NonZeroUsize,
    /// The backbone's layers whose inputs it reads; `None`: see [`default_taps`].
    pub tap_layers: Option<Vec<usize>>,
    pub draft_vocab_size: Option<NonZeroUsize>,
    pub init_from: Option<PathBuf>,
}

impl EagleConfig {
    /// The taps for a backbone. Recipes without them for a small backbone are refused before.
    fn taps(&self, backbone: &LlamaConfig) -> Taps {
        let default = || default_taps(backbone.num_hidden_layers).map_or_else(Vec::new, Vec::from);
        Taps::new(self.tap_layers.clone().unwrap_or_else(default))
    }
}

impl DrafterConfig for EagleConfig {
    fn reads(&self) -> Reads {
        reads(self.ttt_steps.get())
    }

    fn init_from(&self) -> Option<&Path> {
        self.init_from.as_deref()
    }

    fn draft_vocab_size(&self) -> Option<usize> {
        self.draft_vocab_size.map(NonZeroUsize::get)
    }

    fn dropout(&self) -> f64 {
        0.0
    }

    fn for_backbone(&self, backbone: &LlamaConfig) -> Arc<dyn PlannedDrafter> {
        Arc::new(PlannedEagle { taps: self.taps(backbone), config: self.clone() })
    }

    fn checked(&self, backbone: &LlamaConfig) -> Result<Arc<dyn PlannedDrafter>, DrafterError> {
        let planned = self.for_backbone(backbone);
        if let Some(path) = &self.init_from {
            let file = EagleFile::open(path)?;
            file.check_shape(backbone)?;
            let (expected, got) = (planned.taps(), file.own_taps(backbone));
            if expected != got {
                let [expected, got] = [expected, got].map(|taps| format!("tap_layers = {:?}", taps.layers()));
                return Err(DrafterError::OtherShape { path: path.clone(), expected, got });
            }
        }
        Ok(planned)
    }

    fn start(&self) -> Result<Option<DrafterStart>, DrafterError> {
        let Some(path) = &self.init_from else { return Ok(None) };
        let file = EagleFile::open(path)?;
        let token_map = file.tokens().map(<[i64]>::to_vec);
        Ok(Some(DrafterStart { folder: folder_of(path).to_owned(), files: file.files(), token_map }))
    }

    /// The output layer is the drafter's own: servers share none of a reduced vocabulary.
    fn with_shared_lm_head(&self) -> Option<(Arc<dyn DrafterConfig>, &'static str)> {
        None
    }
}

/// An EAGLE-3 drafter whose shape is known.
#[derive(Debug)]
struct PlannedEagle {
    config: EagleConfig,
    taps: Taps,
}

impl PlannedDrafter for PlannedEagle {
    fn reads(&self) -> Reads {
        self.config.reads()
    }

    fn taps(&self) -> Taps {
        self.taps.clone()
    }

    fn title(&self) -> String {
        format!("{EAGLE3}: {} steps on layers {:?}", self.config.ttt_steps, self.taps.layers())
    }

    fn shape(&self) -> serde_json::Value {
        serde_json::json!({
            "architecture": EAGLE3, "ttt_steps": self.config.ttt_steps, "tap_layers": self.taps.layers(),
            "draft_vocab_size": self.config.draft_vocab_size,
        })
    }

    fn build(
        &self,
        backbone: &Llama,
        tokens: Option<&[i64]>,
        seed: u64,
    ) -> Result<Box<dyn TrainedDrafter>, DrafterError> {
        let steps = self.config.ttt_steps.get();
        Ok(Box::new(match &self.config.init_from {
            None => {
                let map = tokens.map(|tokens| TokenMap::new(tokens.to_vec(), backbone.device()));
                Eagle::untrained(backbone, map, (self.taps.clone(), steps), seed)
            }
            Some(path) => {
                let options = (wide(backbone.kind()), backbone.device());
                EagleFile::open(path)?.read(&backbone.config, options)?.for_training(backbone.kind()).with_steps(steps)
            }
        }))
    }

    fn tensors(&self, backbone: &LlamaConfig) -> Vec<u64> {
        let in_layer = EagleLayer::tensors(backbone, self.taps.layers().len()).into_iter();
        in_layer
            .map(|(_, shape)| numel(&shape))
            .chain([self.outputs(backbone) * backbone.hidden_size.unsigned_abs()])
            .collect()
    }

    fn layer<'w>(&self, pass: &LayerPass<'w>) -> Option<LayerPass<'w>> {
        Some(Self::alone(pass))
    }

    /// What autograd keeps of the steps but the first, which [`PlannedDrafter::layer`] counts, and the loss of one step.
    fn loss_bytes(&self, pass: &LayerPass, teachers: Teachers) -> u64 {
        let (n, e, Widths { h, .. }) = (pass.positions(), pass.element, pass.widths());
        let (steps, queries) = (self.config.ttt_steps.get() as u64, pass.config.num_attention_heads.unsigned_abs());
        // Scores with those of the own chain, and their softmax.
        let scores = n * queries * (pass.length + steps) * (e + pass.wide());
        let each_step = pass.allocated(Self::alone(pass).kept()) + pass.allocated([(1, scores), (4, n * h * e)]);
        let outputs = pass.allocated([(steps, n * h * e), (steps, n * h * pass.wide())]);
        let v = self.outputs(pass.config);
        let chunk = chunk_rows(v.cast_signed(), pass.on_host).unsigned_abs().clamp(1, n.max(1)) * v;
        let logits = pass.allocated([(if teachers.for_drafter { 5 } else { 3 }, chunk * pass.wide()), (2, n * h * e)]);
        let teacher = if teachers.for_drafter && v < pass.widths().v { v * h * e } else { 0 };
        let cast = if e < F32 { v * h * e } else { 0 };
        (steps - 1) * each_step + outputs + logits + teacher + cast
    }

    fn lm_head_loss_bytes(&self, _: &LayerPass, _: Teachers) -> u64 {
        0 // the backbone is frozen
    }
}

impl PlannedEagle {
    /// How many tokens it can guess.
    fn outputs(&self, backbone: &LlamaConfig) -> u64 {
        self.config.draft_vocab_size.map_or(backbone.vocab_size.unsigned_abs(), |size| size.get() as u64)
    }

    fn alone<'w>(pass: &LayerPass<'w>) -> LayerPass<'w> {
        LayerPass { trained: TrainedLayers::Whole, quantization: None, blocks: None, recompute: false, ..*pass }
    }
}
