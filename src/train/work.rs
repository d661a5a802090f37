//! The arithmetic of a run, known before it starts: the products of linear layers, of heads and of LM heads. Those of attention are left out.

use crate::memory::weights::{StageShape, numel};
use crate::train::checked::CheckedRun;
use crate::train::plan::BackboneTraining;

/// Products with a trained weight per token: the forward pass, its inputs' gradient and its own.
const TRAINED: f64 = 3.0;

impl CheckedRun {
    /// Tokens of all steps.
    pub fn tokens(&self) -> usize {
        let epochs_tokens = self.pack_report.tokens as u128 * self.total_steps as u128;
        usize::try_from(epochs_tokens / self.steps_per_epoch().max(1) as u128).unwrap_or(usize::MAX)
    }

    /// The size `[outputs, inputs]` of the backbone's usual linear layers.
    pub fn linear_size(&self) -> [i64; 2] {
        [self.config.intermediate_size, self.config.hidden_size]
    }

    /// Multiply-adds of the whole run.
    pub fn multiply_adds(&self) -> f64 {
        let counts = &self.train_report.counts;
        let tokens = self.tokens() as f64;
        let labelled = tokens * counts.tokens_with_loss as f64 / counts.tokens.max(1) as f64;
        let targets = if self.plan.loss.on_unlabelled { tokens } else { labelled };
        let layers = StageShape::whole(self.config.num_hidden_layers).in_linears(&self.config) as f64;
        let lm_head = numel(&self.config.lm_head().size) as f64;
        let adapters = self
            .memory()
            .whole()
            .groups
            .iter()
            .find(|group| group.name == "adapters")
            .map_or(0, |group| group.parameters);
        let drafter = self.drafter.multiply_adds(&self.config, self.plan.teachers()) as f64;
        tokens * (self.layer_passes() * layers + TRAINED * adapters as f64)
            + labelled * self.logits() * lm_head
            + targets * drafter
    }

    /// How often each token meets the weights of a decoder layer: in a forward pass, for the gradient of its inputs, and for that of its weights.
    fn layer_passes(&self) -> f64 {
        let recomputed = f64::from(u8::from(self.plan.train.recompute));
        match &self.plan.trained {
            BackboneTraining::Frozen if self.captured.is_some() => 0.0,
            BackboneTraining::Frozen if self.plan.train.hidden_state_cache.is_some() => {
                (self.steps_per_epoch() as f64 / self.total_steps as f64).min(1.0)
            }
            BackboneTraining::Frozen => 1.0,
            trained @ BackboneTraining::Lora { .. } => 2.0 + recomputed + f64::from(u8::from(trained.has_teacher())),
            BackboneTraining::Full => TRAINED + recomputed,
        }
    }

    /// How often each label meets the LM head in the backbone's own loss.
    fn logits(&self) -> f64 {
        let trained = match self.plan.trained {
            BackboneTraining::Frozen => 0.0,
            BackboneTraining::Lora { .. } => 2.0,
            BackboneTraining::Full => TRAINED,
        };
        trained + f64::from(u8::from(self.plan.trained.has_teacher()))
    }
}
