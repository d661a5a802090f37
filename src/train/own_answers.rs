//! What evaluations measure their tokens per step on: the backbone's own answers to prompts of the validation rows, made before the first step and kept
//! in the run's folder. Other text has tokens that this backbone would not write, and heads seem worse on it than decoding finds them.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::data::loader::Loader;
use crate::data::pack;
use crate::data::rows::TokenRow;
use crate::data::store::RowStore;
use crate::data::{DataError, IGNORE, source};
use crate::decode::error::DecodeError;
use crate::decode::identity::identity;
use crate::decode::own_answers::{AnswerLimits, RowPrompts, greedy_answers};
use crate::files::parent;
use crate::formats::provenance::DistillProvenance;
use crate::formats::run_folder::ANSWERS;
use crate::formats::validation_answers::ValidationAnswers;
use crate::model::llama::Llama;
use crate::plural::counted;
use crate::torch::guard;
use crate::train::checked::CheckedRun;
use crate::train::error::TrainError;
use crate::train::loading;
use crate::train::plan::TrainPlan;

/// Without `train.eval_answers`.
const DEFAULT_ANSWERS: usize = 40;
/// Tokens of an answer.
pub(super) const NEW_TOKENS: usize = 128;

/// The texts that tokens per step are measured on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredTexts {
    /// At most so many answers of the backbone.
    Answers(NonZeroUsize),
    /// The validation rows.
    Rows(WhyRows),
}

/// Why the backbone answers no prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyRows {
    /// `train.eval_answers = 0`.
    Asked,
    /// `medusa distill` made them with this backbone.
    AreAnswers,
    /// `data.hidden_states`: the backbone's layers are not loaded.
    HiddenStates,
    /// `backbone.device_map`: decoding uses one device.
    DeviceMap,
}

impl fmt::Display for MeasuredTexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answers(most) => {
                write!(f, "on the backbone's answers to at most {}", counted(most.get(), "validation prompt"))
            }
            Self::Rows(why) => write!(f, "on the validation rows ({why})"),
        }
    }
}

impl fmt::Display for WhyRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "train.eval_answers = 0",
            Self::AreAnswers => "which this backbone wrote",
            Self::HiddenStates => "data.hidden_states has no backbone that answers",
            Self::DeviceMap => "a backbone on several devices does not answer",
        })
    }
}

impl MeasuredTexts {
    /// At most how many prompts the backbone answers, if it does.
    pub(super) fn answers(self) -> Option<NonZeroUsize> {
        if let Self::Answers(most) = self { Some(most) } else { None }
    }

    /// Those of a run; `None` without validation rows.
    ///
    /// # Errors
    /// A `distill.json` beside the rows, or a file of the backbone that it is compared with, cannot be read.
    pub fn of(checked: &CheckedRun) -> Result<Option<Self>, TrainError> {
        let plan = &checked.plan;
        if checked.validation.is_none() {
            return Ok(None);
        }
        let report = checked.validation_report.as_ref().unwrap_or(&checked.train_report);
        let mut files = report.files.iter().map(|file| file.path.as_path());
        let why = match plan.train.eval_answers {
            Some(0) => Some(WhyRows::Asked),
            _ if plan.data.hidden_states.is_some() => Some(WhyRows::HiddenStates),
            _ if checked.stages.len() > 1 => Some(WhyRows::DeviceMap),
            None if are_answers(&mut files, Path::new(&plan.backbone.path))? => Some(WhyRows::AreAnswers),
            _ => None,
        };
        let wanted = plan.train.eval_answers.unwrap_or(DEFAULT_ANSWERS);
        Ok(why.map_or_else(|| NonZeroUsize::new(wanted).map(Self::Answers), |why| Some(Self::Rows(why))))
    }
}

/// Whether the backbone of a run wrote its training rows.
///
/// # Errors
/// As [`MeasuredTexts::of`].
pub fn wrote_rows(checked: &CheckedRun) -> Result<bool, TrainError> {
    let files = checked.train_report.files.iter().map(|file| file.path.as_path());
    are_answers(files, Path::new(&checked.plan.backbone.path))
}

/// Whether the backbone in `folder` wrote the rows of all files, as the `distill.json`s beside them say.
fn are_answers<'p>(files: impl Iterator<Item = &'p Path>, folder: &Path) -> Result<bool, TrainError> {
    let places: BTreeSet<&Path> = files.map(parent).collect();
    let mut writers = vec![];
    for place in places {
        let records = source::distillations(place).map_err(DataError::from)?;
        if records.is_empty() {
            return Ok(false);
        }
        for record in records {
            writers.push(DistillProvenance::entries(&record)?.remove("backbone_sha256"));
        }
    }
    let own = if writers.is_empty() { None } else { Some(Value::String(identity(folder)?)) };
    Ok(own.is_some() && writers.iter().all(|writer| *writer == own))
}

/// The answers in the run's folder, or made now. `on_step` gets the numbers of finished answers and of prompts; `None` if it ends the work, which then
/// leaves nothing behind.
///
/// # Errors
/// [`TrainError`]: a prompt, the disk, or a file that is not as it was written.
pub(super) fn kept_or_made(
    checked: &CheckedRun,
    backbone: &Llama,
    most: NonZeroUsize,
    on_step: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Option<Vec<TokenRow>>, TrainError> {
    let (plan, path) = (&checked.plan, checked.plan.train.output_dir.join(ANSWERS));
    if path.exists() {
        return Ok(Some(read(&path, checked)?));
    }
    let rows = checked.held_out().expect("validation rows have prompts");
    let prompts = RowPrompts::of(rows, most).map_err(DataError::from)?;
    let prompts: Vec<&[i64]> = prompts.chosen.iter().map(|(_, ids)| ids.as_slice()).collect();
    let limits = AnswerLimits {
        together: together(plan, prompts.iter().map(|prompt| prompt.len())),
        new_tokens: NEW_TOKENS,
        length: plan.data.max_length.get(),
    };
    let answering = guard("loading the backbone", || loading::answering(checked, None))??;
    let backbone = answering.as_ref().unwrap_or(backbone);
    let made = greedy_answers(backbone, &prompts, limits, &mut |done| on_step(done, prompts.len()));
    let made = made.map_err(|error| match error {
        DecodeError::NotFinite { .. } => TrainError::AnswersNotFinite { dtype: plan.backbone.dtype },
        other => TrainError::Answering(other),
    })?;
    let Some(rows) = made else { return Ok(None) };
    let answers = ValidationAnswers { rows };
    answers.save(&path)?;
    Ok(Some(answers.rows))
}

/// How many prompts of so many tokens are answered at a time: as many as fit, with their answers, into the tokens of a micro batch.
pub(super) fn together(plan: &TrainPlan, prompt_lengths: impl Iterator<Item = usize>) -> NonZeroUsize {
    let (rows, length) = (plan.train.micro_batch_size, plan.data.max_length.get());
    let longest = prompt_lengths.map(|prompt| length.min(prompt + NEW_TOKENS)).max().unwrap_or(length);
    NonZeroUsize::new(rows.get() * length / longest.max(1)).unwrap_or(rows)
}

fn read(path: &Path, checked: &CheckedRun) -> Result<Vec<TokenRow>, TrainError> {
    let rows = ValidationAnswers::load(path)?.rows;
    let fault = |row| fault(row, checked.config.vocab_size, checked.plan.data.max_length.get());
    match rows.iter().enumerate().find_map(|(index, row)| Some((index + 1, fault(row)?))) {
        Some((row, why)) => Err(TrainError::Answers { path: path.into(), row, why }),
        None => Ok(rows),
    }
}

fn fault(TokenRow { input_ids, labels }: &TokenRow, vocab_size: i64, longest: usize) -> Option<String> {
    let in_vocabulary = |id: &i32| (0..vocab_size).contains(&i64::from(*id));
    if input_ids.len() != labels.len() || input_ids.len() > longest {
        let (ids, labels) = (counted(input_ids.len(), "token"), counted(labels.len(), "label"));
        return Some(format!("{ids} and {labels}; expected as many of both, at most {longest}"));
    }
    let label = |label: &&i32| **label != IGNORE;
    let outside = input_ids.iter().chain(labels.iter().filter(label)).find(|id| !in_vocabulary(id))?;
    Some(format!("token id {outside}; expected 0 to {}", vocab_size - 1))
}

/// Batches of rows as an evaluation reads them.
pub(super) fn loader(rows: Vec<TokenRow>, plan: &TrainPlan) -> Option<Loader> {
    if rows.is_empty() {
        return None;
    }
    let (sequences, _) = pack::one_each(RowStore::in_memory(rows), plan.data.max_length.get());
    Some(Loader::new(sequences, plan.train.micro_batch_size.get(), 1, None))
}
