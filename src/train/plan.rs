//! The parameters, losses and learning rates of a run, resolved once from the recipe. The loop reads the plan and never
//! branches on the stage.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::Device;

use crate::data::DataConfig;
use crate::draft::loss::LossConfig;
use crate::draft::planned::{DrafterConfig, Teachers};
use crate::formats::provenance::{HubSnapshot, HubSource};
use crate::model::BackboneConfig;
use crate::model::backward::Keep;
use crate::model::config::LlamaConfig;
use crate::model::loading::{LoadError, OutputPart};
use crate::model::lora::LoraConfig;
use crate::model::weights;
use crate::torch::optim::{AdamWConfig, ZeroStage};
use crate::torch::shared_gpus::SharedGpus;
use crate::train::TrainConfig;
use crate::train::schedule::{HeadsCoefficient, ScheduleConfig};

/// A resolved recipe: everything that determines a run's results, and its origin.
#[derive(Debug, Clone)]
pub struct TrainPlan {
    /// Its path is local, not a Hub id.
    pub backbone: BackboneConfig,
    /// The trained part of the backbone, and its loss.
    pub trained: BackboneTraining,
    pub drafter: Arc<dyn DrafterConfig>,
    /// Has the weight λk of each level.
    pub loss: LossConfig,
    /// λ0 over the run.
    pub heads_coefficient: HeadsCoefficient,
    pub optimizer: AdamWConfig,
    /// Peak learning rate of the backbone; the heads' is [`TrainPlan::heads_rate_factor`] times this.
    pub learning_rate: f64,
    /// The heads' learning rate divided by [`TrainPlan::learning_rate`].
    pub heads_rate_factor: f64,
    /// The learning rate over the run.
    pub schedule: ScheduleConfig,
    /// Gradients are clipped to this norm over all parameters.
    pub max_grad_norm: f64,
    /// What several processes share of the optimizer.
    pub zero_stage: ZeroStage,
    pub data: DataConfig,
    /// Steps, batches and folders.
    pub train: TrainConfig,
    pub device: Device,
    /// Those that this process shares with others of its machine.
    pub gpus: SharedGpus,
    /// Processes that train together.
    pub world_size: usize,
    /// Malformed rows are skipped and counted (`--skip-bad-rows`).
    pub skip_bad_rows: bool,
    /// The recipe with all defaults written out.
    pub resolved_recipe: String,
    /// Writes out the defaults in the text of another recipe; `None` if it is not a valid one.
    pub resolve: fn(&str) -> Option<String>,
    /// The Hub snapshot of the backbone, if it came from there.
    pub snapshot: Option<HubSnapshot>,
    /// Other files from the Hub.
    pub sources: Vec<HubSource>,
}

/// The part of the backbone that is trained with the heads.
#[derive(Debug, Clone, PartialEq)]
pub enum BackboneTraining {
    /// Nothing (Medusa-1): the loss is that of the heads alone.
    Frozen,
    /// Adapters (Medusa-2).
    Lora {
        lora: LoraConfig,
        /// L_LM is KL(backbone without adapters ‖ with adapters) instead of the cross-entropy of the next token.
        self_distillation: bool,
    },
    /// All weights (Medusa-2 as direct fine-tuning).
    Full,
}

/// Determines a parameter's learning rate, and which loss or part of the backbone's pass produces its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterGroup {
    Drafter,
    /// A part of the backbone's pass over whole rows (see [`crate::model::llama::Llama::parts`]).
    BackbonePart(usize),
    LmHead,
}

impl TrainPlan {
    /// The backbone's name in the run's files: its Hub id, or its folder.
    pub(super) fn backbone_name(&self) -> &str {
        self.snapshot.as_ref().map_or(&self.backbone.path, |snapshot| &snapshot.id)
    }

    /// Who teaches beside the labels.
    pub(super) fn teachers(&self) -> Teachers {
        Teachers { for_drafter: self.loss.targets.are_soft(), for_backbone: self.trained.has_teacher() }
    }

    /// See [`output_part`].
    pub(super) fn output_part(&self) -> Option<OutputPart> {
        output_part(&self.data, &*self.drafter)
    }

    /// The files of the backbone's weights that are read.
    pub(super) fn weight_files(&self) -> Result<Vec<PathBuf>, LoadError> {
        let folder = Path::new(&self.backbone.path);
        Ok(match self.output_part() {
            None => weights::files_of(folder)?,
            Some(part) => weights::files_with(folder, &part.tensors(&LlamaConfig::load(folder)?))?,
        })
    }

    /// The tensors that a trained backbone keeps for its backward pass.
    pub(super) fn keep(&self) -> Keep {
        if self.train.recompute { Keep::Inputs } else { Keep::Everything }
    }

    /// The learning rate of `group` divided by that of the step.
    pub(super) fn rate_factor(&self, group: ParameterGroup) -> f64 {
        if group.is_of_drafter() { self.heads_rate_factor } else { 1.0 }
    }
}

/// The part of the backbone that is loaded, if a server captured the rows' hidden states; `None`: all of it.
pub fn output_part(data: &DataConfig, drafter: &dyn DrafterConfig) -> Option<OutputPart> {
    data.hidden_states.as_ref()?;
    Some(if drafter.reads().tokens { OutputPart::WithEmbedding } else { OutputPart::NormAndLmHead })
}

impl BackboneTraining {
    /// Whether only heads are trained.
    pub fn is_frozen(&self) -> bool {
        matches!(self, Self::Frozen)
    }

    /// The trained adapters.
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
    /// Whether it belongs to the drafter.
    pub fn is_of_drafter(self) -> bool {
        self == Self::Drafter
    }

    /// Whether it belongs to the backbone, including its LM head.
    pub fn is_of_backbone(self) -> bool {
        !self.is_of_drafter()
    }
}
