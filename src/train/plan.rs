//! What a run trains, with which loss and learning rates, resolved once from the recipe. The loop reads the plan and never branches on
//! the stage.

use std::path::PathBuf;

use tch::Device;

use crate::data::DataConfig;
use crate::draft::medusa::heads::HeadsConfig;
use crate::draft::medusa::loss::LossConfig;
use crate::formats::provenance::{HubSnapshot, HubSource};
use crate::model::BackboneConfig;
use crate::model::backward::Keep;
use crate::model::lora::LoraConfig;
use crate::torch::optim::AdamWConfig;
use crate::train::TrainConfig;
use crate::train::schedule::{HeadsCoefficient, ScheduleConfig};

/// A resolved recipe: all that decides a run's numbers, and where it came from.
#[derive(Debug, Clone)]
pub struct TrainPlan {
    /// The backbone; its path is one of this machine.
    pub backbone: BackboneConfig,
    /// What of the backbone is trained, and on which loss.
    pub trained: BackboneTraining,
    /// The heads.
    pub heads: HeadsConfig,
    /// λk.
    pub loss: LossConfig,
    /// λ0 over the run.
    pub heads_coefficient: HeadsCoefficient,
    /// How parameters are updated.
    pub optimizer: AdamWConfig,
    /// Peak learning rate of the backbone, and times [`TrainPlan::heads_rate_factor`] of the heads.
    pub learning_rate: f64,
    /// The heads' learning rate ÷ [`TrainPlan::learning_rate`].
    pub heads_rate_factor: f64,
    /// The learning rates over the run.
    pub schedule: ScheduleConfig,
    /// Gradients are clipped to this norm over all parameters.
    pub max_grad_norm: f64,
    /// The rows.
    pub data: DataConfig,
    /// Steps, batches, folders.
    pub train: TrainConfig,
    /// Where to compute.
    pub device: Device,
    /// Rows that are not right are left out and counted (`--skip-bad-rows`).
    pub skip_bad_rows: bool,
    /// The recipe with every default written out.
    pub resolved_recipe: String,
    /// Where the backbone came from, if the Hub has it.
    pub snapshot: Option<HubSnapshot>,
    /// What else came from the Hub.
    pub sources: Vec<HubSource>,
}

/// What of the backbone is trained with the heads.
#[derive(Debug, Clone, PartialEq)]
pub enum BackboneTraining {
    /// Nothing (Medusa-1): the loss is that of the heads alone.
    Frozen,
    /// Adapters on it (Medusa-2).
    Lora {
        /// Their shape, and on which layers.
        lora: LoraConfig,
        /// L_LM is KL(backbone without adapters ‖ with) instead of the cross-entropy of the next token.
        self_distillation: bool,
    },
    /// All its weights (Medusa-2 as direct fine-tuning).
    Full,
}

/// Which learning rate a parameter has, and which part of the loss or of the backbone's pass gives its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterGroup {
    /// Of this head, 0-based.
    Head(usize),
    /// Of this part of the backbone's pass over whole rows (see [`crate::model::llama::Llama::parts`]).
    BackbonePart(usize),
    /// Of the LM head.
    LmHead,
}

impl TrainPlan {
    /// What the backbone is called in what the run writes: its id, or its folder.
    pub(super) fn backbone_name(&self) -> &str {
        self.snapshot.as_ref().map_or(&self.backbone.path, |snapshot| &snapshot.id)
    }

    /// What a pass of a backbone in training keeps for its backward pass.
    pub(super) fn keep(&self) -> Keep {
        if self.train.recompute { Keep::Inputs } else { Keep::Everything }
    }

    /// The learning rate of `group` ÷ that of the step.
    pub(super) fn rate_factor(&self, group: ParameterGroup) -> f64 {
        if group.is_of_heads() { self.heads_rate_factor } else { 1.0 }
    }
}

impl BackboneTraining {
    /// Whether only heads are trained.
    pub fn is_frozen(&self) -> bool {
        matches!(self, Self::Frozen)
    }

    /// The adapters that are trained.
    pub fn lora(&self) -> Option<&LoraConfig> {
        if let Self::Lora { lora, .. } = self { Some(lora) } else { None }
    }

    /// The adapter that training starts from.
    pub fn adapter_to_start_from(&self) -> Option<&PathBuf> {
        self.lora()?.init_from.as_ref()
    }

    /// Whether the backbone without its adapters teaches the one with them.
    pub fn has_teacher(&self) -> bool {
        matches!(self, Self::Lora { self_distillation: true, .. })
    }
}

impl ParameterGroup {
    /// Of any head.
    pub fn is_of_heads(self) -> bool {
        matches!(self, Self::Head(_))
    }

    /// Of the backbone, its LM head included.
    pub fn is_of_backbone(self) -> bool {
        !self.is_of_heads()
    }
}
