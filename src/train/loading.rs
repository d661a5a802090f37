//! The backbone as a plan trains it, and as it answers prompts.

use std::path::Path;

use tch::Kind;

use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::loading::{LoadError, Purpose};
use crate::model::{adapters, peft};
use crate::torch::wide;
use crate::train::checked::CheckedRun;
use crate::train::error::TrainError;
use crate::train::plan::BackboneTraining;

/// Loads the backbone as the plan trains it. With `layers` it is the first ones alone, with new adapters, to time passes with.
pub(super) fn backbone(checked: &CheckedRun, layers: Option<usize>) -> Result<Llama, TrainError> {
    let plan = &checked.plan;
    let kind = plan.backbone.dtype.kind();
    match &plan.trained {
        BackboneTraining::Frozen => load(checked, kind, Purpose::Training, layers),
        BackboneTraining::Full => load(checked, wide(kind), Purpose::FineTuning(kind), layers),
        BackboneTraining::Lora { lora, .. } => {
            let mut backbone = load(checked, kind, Purpose::Training, layers)?;
            match lora.init_from.as_ref().filter(|_| layers.is_none()) {
                None => adapters::attach_new(&mut backbone, lora, plan.train.seed),
                Some(adapter) => peft::attach(&mut backbone, adapter, Some(lora))?,
            }
            Ok(backbone)
        }
    }
}

/// A second backbone to answer prompts, where the trained one would dequantise all weights for every token. Call it before training allocates its
/// memory. `layers` as of [`backbone`].
pub(super) fn answering(checked: &CheckedRun, layers: Option<usize>) -> Result<Option<Llama>, TrainError> {
    let kind = checked.plan.backbone.dtype.kind();
    checked.answers_by_kernels(&checked.plan).then(|| load(checked, kind, Purpose::Decoding, layers)).transpose()
}

fn load(checked: &CheckedRun, kind: Kind, purpose: Purpose, layers: Option<usize>) -> Result<Llama, TrainError> {
    let CheckedRun { plan, stages, .. } = checked;
    let folder = Path::new(&plan.backbone.path);
    let mut backbone = match plan.output_part() {
        Some(part) => Llama::load_output(folder, kind, plan.device, part)?,
        None => {
            let config = LlamaConfig::load(folder).map_err(LoadError::from)?;
            Llama::load_with(folder, (config, layers), kind, stages.clone(), purpose, plan.backbone.quantization)?
        }
    };
    let longest_row = i64::try_from(plan.data.max_length.get()).unwrap_or(i64::MAX);
    backbone.set_context(longest_row.max(backbone.config.max_position_embeddings));
    backbone.set_taps(checked.drafter.taps());
    Ok(backbone)
}
