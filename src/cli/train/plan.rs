//! What a run will do, told before its first step.

use std::path::PathBuf;

use serde::Serialize;

use crate::cli::mebibytes;
use crate::data::LoadReport;
use crate::medusa::heads::HeadsShape;
use crate::recipe::Recipe;
use crate::torch::device_name;
use crate::torch::optim::OptimizerName;
use crate::train::run::Prepared;

/// What training keeps of so many parameters: float32 weights, float32 gradients, and the optimizer's moments.
fn bytes_of(parameters: u64, optimizer: OptimizerName) -> [(&'static str, u64); 3] {
    [("weights", 4 * parameters), ("gradients", 4 * parameters), ("AdamW", optimizer.moment_bytes(parameters))]
}

/// The plan of a run.
#[derive(Debug, Serialize)]
pub(super) struct Plan {
    output_dir: PathBuf,
    device: String,
    backbone: String,
    backbone_parameters: i64,
    backbone_bytes: u64,
    heads: HeadsShape,
    heads_parameters: i64,
    heads_bytes: u64,
    #[serde(skip)]
    heads_memory: [(&'static str, u64); 3],
    data: LoadReport,
    sequences: usize,
    fill_rate: f64,
    validation_sequences: usize,
    steps_per_epoch: usize,
    steps: usize,
    tokens: usize,
    hidden_state_cache_bytes: Option<u64>,
}

impl Plan {
    pub(super) fn of(prepared: &Prepared, recipe: &Recipe) -> Self {
        let backbone = prepared.backbone();
        let backbone_parameters = backbone.config.parameters();
        let heads_parameters = prepared.heads_shape.parameters();
        let heads_memory = bytes_of(heads_parameters.unsigned_abs(), recipe.optimizer.name);
        let (sequences, validation_sequences) = prepared.sequence_counts();
        let steps_per_epoch = prepared.steps_per_epoch();
        Self {
            output_dir: prepared.output_dir().to_owned(),
            device: device_name(backbone.device()),
            backbone: recipe.backbone.path.clone(),
            backbone_parameters,
            backbone_bytes: backbone.weight_bytes() as u64,
            heads: prepared.heads_shape,
            heads_parameters,
            heads_bytes: heads_memory.iter().map(|(_, bytes)| bytes).sum(),
            heads_memory,
            data: prepared.train_report.clone(),
            sequences,
            fill_rate: prepared.pack_report.fill_rate(),
            validation_sequences,
            steps_per_epoch,
            steps: prepared.total_steps,
            tokens: prepared.pack_report.tokens * prepared.total_steps / steps_per_epoch.max(1),
            hidden_state_cache_bytes: prepared.hidden_state_bytes(),
        }
    }

    pub(super) fn text(&self) -> String {
        let HeadsShape { medusa_num_heads, medusa_num_layers, .. } = self.heads;
        let of_heads = self.heads_memory.map(|(what, bytes)| format!("{what} {}", mebibytes(bytes)));
        let lines = [
            ("output", self.output_dir.display().to_string()),
            ("device", self.device.clone()),
            ("backbone", format!("{}: {} parameters, frozen", self.backbone, self.backbone_parameters)),
            (
                "heads",
                format!("{medusa_num_heads} of {medusa_num_layers} ResBlock(s): {} parameters", self.heads_parameters),
            ),
            (
                "memory",
                format!(
                    "backbone {}, heads {}; and the activations",
                    mebibytes(self.backbone_bytes),
                    of_heads.join(" + ")
                ),
            ),
            ("data", self.data.to_string()),
            (
                "sequences",
                format!(
                    "{} to train on, {:.0} % full; {} to validate on",
                    self.sequences,
                    100.0 * self.fill_rate,
                    self.validation_sequences
                ),
            ),
            ("steps", format!("{} ({} an epoch), about {} tokens", self.steps, self.steps_per_epoch, self.tokens)),
        ];
        let on_disk =
            self.hidden_state_cache_bytes.map(|bytes| ("disk", format!("hidden states {}", mebibytes(bytes))));
        let lines = lines.into_iter().chain(on_disk).map(|(name, value)| format!("{name:<12} {value}"));
        lines.collect::<Vec<_>>().join("\n")
    }
}
