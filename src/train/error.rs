//! Errors of training.

use std::path::PathBuf;

use crate::data::DataError;
use crate::data::tokenize::TokenizeError;
use crate::draft::medusa::heads::{HeadsError, HeadsShape};
use crate::files::FileError;
use crate::formats::FormatError;
use crate::formats::metrics::MetricsError;
use crate::model::loading::LoadError;
use crate::model::peft::PeftError;
use crate::torch::TorchPanic;
use crate::train::checkpoint::CheckpointError;
use crate::train::hidden_states::HiddenStatesError;
use crate::train::step::StepError;

/// Why a run failed or did not start.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The backbone.
    #[error(transparent)]
    Backbone(#[from] LoadError),
    /// The heads to start from.
    #[error("heads.init_from: {0}")]
    InitFrom(#[from] HeadsError),
    /// The heads to start from have another shape than the recipe's.
    #[error("heads.init_from {}: expected {}, as in the recipe, got {}", path.display(), in_words(expected), in_words(got))]
    InitShape {
        /// The folder.
        path: PathBuf,
        /// The recipe's.
        expected: HeadsShape,
        /// The folder's.
        got: HeadsShape,
    },
    /// The adapter to start from.
    #[error("stage.medusa2.lora.init_from: {0}")]
    Adapter(#[from] PeftError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizeError),
    /// The rows.
    #[error("{_0}{}", skipping(_0))]
    Data(#[from] DataError),
    /// Rows from which a head can learn nothing.
    #[error(
        "head {head} has no target in the training data: it predicts the token {ahead} positions ahead, and no sequence has a label there; use longer rows, rows with more labels, or fewer heads"
    )]
    NoTargetForHead {
        /// 1-based.
        head: usize,
        /// How far ahead it predicts.
        ahead: usize,
    },
    /// The learning rate would never reach its peak.
    #[error(
        "schedule.warmup_steps = {warmup_steps}, but the run has only {total_steps} optimizer steps; lower it, or train for more epochs"
    )]
    WarmupTooLong {
        /// The recipe's.
        warmup_steps: usize,
        /// All steps of the run.
        total_steps: usize,
    },
    /// More steps than can be counted.
    #[error(
        "train.epochs = {epochs} of {steps_per_epoch} optimizer steps each overflow the step counter; lower train.epochs, or raise \
         train.gradient_accumulation_steps"
    )]
    TooManySteps {
        /// The recipe's.
        epochs: usize,
        /// Of the rows, in the recipe's batches.
        steps_per_epoch: usize,
    },
    /// The output folder belongs to something else.
    #[error("train.output_dir {} {why}", path.display())]
    OutputTaken {
        /// The folder.
        path: PathBuf,
        /// What is there, and what to do.
        why: String,
    },
    /// A checkpoint or a final folder.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file or folder of the run.
    #[error(transparent)]
    File(#[from] FileError),
    /// provenance.json.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// metrics.jsonl or the event files.
    #[error("{_0}{}", changed_by_hand(_0))]
    Log(#[from] MetricsError),
    /// A file of the run's folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Kept hidden states.
    #[error(transparent)]
    HiddenStates(#[from] HiddenStatesError),
    /// A step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// libtorch.
    #[error("{}", with_advice(_0))]
    Torch(#[from] TorchPanic),
}

impl TrainError {
    /// Whether the recipe has to change: its values conflict with each other or with the files that it names.
    pub fn is_of_the_recipe(&self) -> bool {
        match self {
            Self::InitShape { .. } | Self::WarmupTooLong { .. } | Self::TooManySteps { .. } => true,
            Self::Data(DataError::Template(error)) => error.is_no_template(),
            _ => false,
        }
    }
}

fn in_words(shape: &HeadsShape) -> String {
    let HeadsShape { medusa_num_heads, medusa_num_layers, .. } = shape;
    let w2 = if shape.vocab_size == 0 { "the backbone's lm_head" } else { "their own output layer" };
    format!("medusa_num_heads = {medusa_num_heads}, medusa_num_layers = {medusa_num_layers} and {w2}")
}

/// Why a line of metrics.jsonl cannot be read.
fn changed_by_hand(error: &MetricsError) -> &'static str {
    match error {
        MetricsError::Line { .. } => "; the file was edited, or belongs to another run",
        MetricsError::File(_) => "",
    }
}

/// The alternative to fixing a malformed row.
fn skipping(error: &DataError) -> &'static str {
    match error {
        DataError::Row(row) if row.problem.kind().is_some() => "; --skip-bad-rows skips and counts such rows",
        _ => "",
    }
}

fn with_advice(panic: &TorchPanic) -> String {
    let advice = if panic.out_of_memory { "; lower train.micro_batch_size or data.max_length" } else { "" };
    format!("{panic}{advice}")
}
