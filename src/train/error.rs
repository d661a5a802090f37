//! Errors of training.

use std::path::PathBuf;

use crate::data::DataError;
use crate::data::tokenize::TokenizeError;
use crate::decode::error::DecodeError;
use crate::draft::error::DrafterError;
use crate::dtype::Dtype;
use crate::files::FileError;
use crate::files::checksums::ChecksumError;
use crate::formats::FormatError;
use crate::formats::metrics::MetricsError;
use crate::model::loading::LoadError;
use crate::model::peft::PeftError;
use crate::plural::counted;
use crate::torch::TorchPanic;
use crate::train::checkpoint::CheckpointError;
use crate::train::hidden_states::HiddenStatesError;
use crate::train::ranks::RanksError;
use crate::train::step::{StepError, float16_advice};

/// Why a run failed or did not start.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Backbone(#[from] LoadError),
    #[error("heads.init_from: {0}")]
    InitFrom(#[from] DrafterError),
    /// The heads in `heads.init_from` differ in shape from the recipe's.
    #[error("heads.init_from {}: expected {expected}, as in the recipe, got {got}", path.display())]
    InitShape {
        path: PathBuf,
        /// The recipe's shape.
        expected: String,
        /// The folder's shape.
        got: String,
    },
    /// The backward pass of a trained backbone begins at its last hidden states.
    #[error(
        "the drafter reads hidden states before the last ones, which only a frozen backbone gives: train it with [stage.medusa1]"
    )]
    TapsOfTrainedBackbone,
    /// Files of a server with fewer layers than the drafter reads.
    #[error(
        "data.hidden_states: expected at least {expected} layers in each file, as many as the drafter reads, got {got}; let the server write \
         these layers, the last decoder layer at the end"
    )]
    TooFewLayers { expected: usize, got: usize },
    /// None of the labels is among the tokens that the heads in `heads.init_from` can guess.
    #[error(
        "heads.init_from {}: its token_map of {} holds none of the labels of the training data, so labels teach these heads nothing; \
         remove heads.init_from to start from new heads for this data, or use soft targets (loss.targets = \"backbone\")",
        path.display(), counted(*tokens, "token")
    )]
    NoLabelInTokenMap { path: PathBuf, tokens: usize },
    /// The adapter in `stage.medusa2.lora.init_from`.
    #[error("stage.medusa2.lora.init_from: {0}")]
    Adapter(#[from] PeftError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizeError),
    #[error("{_0}{}", skipping(_0))]
    Data(#[from] DataError),
    /// No row is long enough for a head to have a target.
    #[error(
        "head {head} has no target in the training data: it predicts the token {ahead} positions ahead, and no sequence has a label there; use longer rows, rows with more labels, or fewer heads"
    )]
    NoTargetForHead {
        /// 1-based.
        head: usize,
        /// Positions from the hidden state to the token that it predicts.
        ahead: usize,
    },
    /// One half of the validation rows has no target.
    #[error(
        "train.keep_best = \"tokens_per_step\" searches a tree on one half of the {text}s and judges it on the other; \
         in {}, head 1 has a target in at most one half; add rows, or set train.keep_best = \"loss\"", counted(*rows, text)
    )]
    NoTokensPerStep {
        rows: usize,
        /// "validation row" or "validation answer".
        text: &'static str,
    },
    /// The backbone's answers to validation prompts.
    #[error("{}: row {row}: {why}; remove the file, and the run makes it again", path.display())]
    Answers {
        path: PathBuf,
        /// 1-based.
        row: usize,
        why: String,
    },
    /// The backbone cannot answer.
    #[error("the backbone's answers to validation prompts: its logits are NaN or infinite; check its weights{}", float16_advice(*dtype))]
    AnswersNotFinite { dtype: Dtype },
    /// Decoding the answers to validation prompts failed.
    #[error("the backbone's answers to validation prompts: {0}")]
    Answering(#[from] DecodeError),
    /// The learning rate would never reach its peak.
    #[error(
        "schedule.warmup_steps = {warmup_steps}, but the run has only {total_steps} optimizer steps; lower it, or train for more epochs"
    )]
    WarmupTooLong { warmup_steps: usize, total_steps: usize },
    /// The number of steps overflows.
    #[error(
        "train.epochs = {epochs} of {steps_per_epoch} optimizer steps each overflow the step counter; lower train.epochs, or raise \
         train.gradient_accumulation_steps"
    )]
    TooManySteps { epochs: usize, steps_per_epoch: usize },
    /// `train.output_dir` holds something else.
    #[error("train.output_dir {} {why}", path.display())]
    OutputTaken {
        path: PathBuf,
        /// The folder's content and the remedy, as the end of the sentence.
        why: String,
    },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    File(#[from] FileError),
    /// Files that the run starts from, or its finished heads.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
    /// provenance.json.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// metrics.jsonl or the event files.
    #[error("{_0}{}", changed_by_hand(_0))]
    Log(#[from] MetricsError),
    /// A file in the run's folder.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    HiddenStates(#[from] HiddenStatesError),
    #[error(transparent)]
    Step(StepError),
    #[error("{}", with_advice(_0))]
    Torch(#[from] TorchPanic),
    /// Another process of the run.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// A step has fewer micro batches than there are processes.
    #[error(
        "{world_size} processes share the micro batches of an optimizer step, and train.gradient_accumulation_steps = {micro_batches} gives \
         it only {micro_batches}: {advice}"
    )]
    TooManyRanks { world_size: usize, micro_batches: usize, advice: String },
}

impl From<StepError> for TrainError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::HiddenStates(error) => error.into(),
            StepError::Torch(panic) => panic.into(),
            StepError::Ranks(error) => error.into(),
            error => Self::Step(error),
        }
    }
}

impl TrainError {
    /// Whether the recipe has to change: its values conflict with each other or with the files that it names.
    pub fn is_of_the_recipe(&self) -> bool {
        match self {
            Self::InitShape { .. }
            | Self::NoLabelInTokenMap { .. }
            | Self::NoTokensPerStep { .. }
            | Self::WarmupTooLong { .. }
            | Self::TooManyRanks { .. }
            | Self::TooManySteps { .. } => true,
            Self::Data(DataError::Template(error)) => error.is_no_template(),
            Self::Data(DataError::LongerThanCaptured { .. }) => true,
            _ => false,
        }
    }
}

/// The likely cause of a malformed line in metrics.jsonl.
fn changed_by_hand(error: &MetricsError) -> &'static str {
    match error {
        MetricsError::Line { .. } => "; the file was edited, or belongs to another run",
        MetricsError::File(_) | MetricsError::Gone { .. } => "",
    }
}

/// The alternative to fixing a malformed row.
fn skipping(error: &DataError) -> &'static str {
    match error {
        DataError::Row(row) if row.problem.kind().is_some() && !row.is_of_the_columns() => {
            "; --skip-bad-rows skips and counts such rows"
        }
        DataError::Captured(error) if error.kind().is_some() => "; --skip-bad-rows skips and counts such files",
        _ => "",
    }
}

fn with_advice(panic: &TorchPanic) -> String {
    let advice = if panic.out_of_memory { "; lower train.micro_batch_size or data.max_length" } else { "" };
    format!("{panic}{advice}")
}
