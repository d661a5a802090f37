//! The plan printed before the first step: data, steps and memory.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use tch::Device;

use crate::data::mix::MixedShare;
use crate::data::store::RowStore;
use crate::data::{BadRows, LoadReport};
use crate::dtype::Dtype;
use crate::memory::plan::{MemoryGroup, MemoryPlan};
use crate::memory::stages::{PlannedStage, StageMemory};
use crate::plural::{counted, gibibytes, mebibytes};
use crate::recipe::Recipe;
use crate::torch::device_name;
use crate::train::checked::CheckedRun;
use crate::train::device_room::{DeviceRoom, MemorySaving};
use crate::train::draft_vocabulary::DraftVocabulary;
use crate::train::error::TrainError;
use crate::train::hidden_states::CapturedSplits;
use crate::train::own_answers::MeasuredTexts;
use crate::train::run_folder::check_output_dir;

/// Data, steps and memory of a run.
#[derive(Debug, Serialize)]
pub(super) struct RunPreview {
    /// The last step of a run that has finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_step: Option<usize>,
    output_dir: PathBuf,
    device: String,
    backbone: String,
    /// Whether the headers of the weights were checked, and not only config.json.
    weights_checked: bool,
    backbone_parameters: u64,
    backbone_bytes: u64,
    /// Those of a backbone with several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stages: Vec<StagePreview>,
    heads: Value,
    #[serde(skip)]
    heads_title: String,
    heads_parameters: u64,
    heads_bytes: u64,
    adapters_parameters: u64,
    adapters_bytes: u64,
    /// Of all devices together.
    memory: MemoryPlan,
    /// Of several devices, on the one that has the least to spare.
    peak_bytes: u64,
    data: LoadReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_data: Option<LoadReport>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mix: Vec<MixedEntry>,
    sequences: usize,
    fill_rate: f64,
    validation_sequences: usize,
    /// What evaluations measure tokens per step on.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_per_step: Option<MeasuredTexts>,
    steps_per_epoch: usize,
    steps: usize,
    #[serde(skip)]
    is_by_epochs: bool,
    tokens: usize,
    hidden_state_cache_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_states: Option<CapturedFiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_vocabulary: Option<DraftVocabulary>,
    /// Of the device of `peak_bytes`; `None` if the system does not say.
    device_memory: Option<DeviceRoom>,
    /// What would make the run fit, if it does not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    memory_savings: Vec<MemorySaving>,
    warnings: Vec<String>,
}

/// A stage of the backbone.
#[derive(Debug, Serialize)]
struct StagePreview {
    device: String,
    /// First and last, counted from 1.
    layers: [usize; 2],
    peak_bytes: u64,
}

/// The files of `data.hidden_states`.
#[derive(Debug, Serialize)]
struct CapturedFiles {
    entry: String,
    files: usize,
    bytes: u64,
    layers: usize,
    dtype: Dtype,
    /// Files whose tokens are those of no row.
    of_no_row: usize,
    /// Files with the tokens of an earlier one, whose states are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeated: Option<BadRows>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    left_out: BTreeMap<&'static str, BadRows>,
}

impl CapturedFiles {
    fn of(captured: &CapturedSplits) -> Self {
        let set = captured.train.set();
        let first = &set.files()[0];
        Self {
            entry: set.entry().to_owned(),
            files: set.files().len(),
            bytes: set.bytes(),
            layers: first.layers,
            dtype: first.dtype,
            of_no_row: captured.files_of_no_row(),
            repeated: set.repeated().cloned(),
            left_out: set.left_out().clone(),
        }
    }
}

impl fmt::Display for CapturedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, files, bytes, layers, dtype, of_no_row, repeated, left_out } = self;
        let layers = if *layers == 1 { "one layer".into() } else { format!("the last of {layers} layers") };
        write!(f, "{layers} in {dtype}, {} in {} in {entry}", binary(*bytes), counted(*files, "file"))?;
        if *of_no_row > 0 {
            write!(f, ", {of_no_row} with the tokens of no row")?;
        }
        if let Some(BadRows { rows, first }) = repeated {
            write!(f, ", {rows} with the tokens of another one, whose states are taken ({first})")?;
        }
        for (kind, bad) in left_out {
            write!(f, ", {} skipped ({kind}; first {})", bad.rows, bad.first)?;
        }
        Ok(())
    }
}

/// An entry of `data.train` and its part in an epoch.
#[derive(Debug, Serialize)]
struct MixedEntry {
    entry: String,
    #[serde(flatten)]
    share: MixedShare,
}

impl RunPreview {
    /// `resume`: the run may go on in its folder.
    ///
    /// # Errors
    /// A file of an earlier run in the folder cannot be read.
    pub(super) fn of(checked: &CheckedRun, recipe: &Recipe, resume: bool) -> Result<Self, TrainError> {
        let planned = checked.memory();
        let (memory, FullestDevice { device, peak_bytes, room: device_memory }) = (planned.whole(), fullest(&planned));
        let group = |name: &str| memory.groups.iter().find(|group| group.name == name);
        let parameters = |name| group(name).map_or(0, |group| group.parameters);
        let bytes = |name| group(name).map_or(0, MemoryGroup::bytes);
        let (sequences, validation_sequences) = checked.sequence_counts();
        let steps_per_epoch = checked.steps_per_epoch();
        let memory_savings = device_memory.map_or(vec![], |room| checked.savings(device, room));
        let finished_step = checked.finished_step()?;
        let taken = check_output_dir(&checked.plan.train.output_dir, resume || finished_step.is_some()).err();
        let mut warnings =
            warnings(checked, &FullestDevice { device, peak_bytes, room: device_memory }, &memory_savings);
        warnings.extend(trained_on(checked)?);
        warnings.extend(taken.map(|error| error.to_string()));
        Ok(Self {
            finished_step,
            output_dir: checked.plan.train.output_dir.clone(),
            device: checked.device_names(),
            stages: stages(&planned),
            backbone: recipe.backbone.path.clone(),
            weights_checked: checked.has_weights,
            backbone_parameters: parameters("backbone"),
            backbone_bytes: bytes("backbone"),
            heads: checked.drafter.shape(),
            heads_title: checked.drafter.title(),
            heads_parameters: parameters("heads"),
            heads_bytes: bytes("heads"),
            adapters_parameters: parameters("adapters"),
            adapters_bytes: bytes("adapters"),
            peak_bytes,
            data: checked.train_report.clone(),
            validation_data: checked.validation_report.clone(),
            mix: recipe
                .data
                .train
                .iter()
                .zip(checked.mixed())
                .map(|(entry, share)| MixedEntry { entry: entry.clone(), share })
                .collect(),
            sequences,
            fill_rate: checked.pack_report.fill_rate(),
            validation_sequences,
            tokens_per_step: MeasuredTexts::of(checked)?,
            steps_per_epoch,
            steps: checked.total_steps,
            is_by_epochs: checked.plan.train.max_steps.is_none(),
            tokens: checked.tokens(),
            hidden_state_cache_bytes: checked.hidden_state_bytes,
            hidden_states: checked.captured.as_ref().map(CapturedFiles::of),
            draft_vocabulary: checked.draft_vocabulary.clone(),
            warnings,
            device_memory,
            memory_savings,
            memory,
        })
    }

    /// That the run has finished, and what to do.
    pub(super) fn finished(&self) -> Option<String> {
        let step = self.finished_step?;
        let change = match self.is_by_epochs {
            _ if step < self.steps => "raise or remove train.patience", // it stopped early
            true => "raise train.epochs",
            false => "raise train.max_steps",
        };
        Some(format!(
            "this run is already finished (step {step} of {}): {change} and continue with --resume, or choose another \
             train.output_dir",
            self.steps
        ))
    }

    pub(super) fn text(&self) -> String {
        let mut lines: Vec<_> = self.warnings.iter().map(|warning| ("warning", warning.clone())).collect();
        lines.extend([
            ("output", self.output_dir.display().to_string()),
            ("device", self.device.clone()),
            ("backbone", self.backbone.clone()),
        ]);
        if !self.weights_checked {
            lines.push(("weights", "not in the folder; only config.json was checked".into()));
        }
        lines.push(("heads", self.heads_title.clone()));
        lines.extend(self.draft_vocabulary.iter().map(|vocabulary| ("vocabulary", vocabulary.to_string())));
        lines.push(("data", self.data.to_string()));
        lines.extend(self.validation_data.iter().map(|report| ("validation", report.to_string())));
        lines.extend(self.hidden_states.iter().map(|files| ("states", files.to_string())));
        lines.extend(self.mix.iter().map(|MixedEntry { entry, share }| ("mix", format!("{entry}: {share}"))));
        lines.extend(self.data.tokenised.map(|took| ("tokenised", took.to_string())));
        lines.push((
            "sequences",
            format!(
                "{} for training, {:.0} % full; {} for validation",
                self.sequences,
                100.0 * self.fill_rate,
                self.validation_sequences
            ),
        ));
        lines.extend(self.tokens_per_step.map(|texts| ("tokens/step", format!("measured {texts}"))));
        let steps = format!("{} ({} per epoch), {}", self.steps, self.steps_per_epoch, counted(self.tokens, "token"));
        lines.push(("steps", steps));
        lines.extend((self.memory.world_size > 1).then(|| ("processes", self.processes())));
        lines
            .extend(self.hidden_state_cache_bytes.map(|bytes| ("disk", format!("hidden states {}", mebibytes(bytes)))));
        let lines = lines.into_iter().map(|(name, value)| format!("{name:<12} {value}"));
        self.finished().into_iter().chain(lines).chain(self.table()).collect::<Vec<_>>().join("\n")
    }

    /// How many there are, and what each sends.
    fn processes(&self) -> String {
        let MemoryPlan { world_size, sent_bytes, .. } = self.memory;
        let sends = mebibytes(sent_bytes);
        format!("{world_size}; each sends and receives {sends} an optimizer step, and needs the memory below")
    }

    /// Parameters by group, other memory, and the peak.
    fn table(&self) -> Vec<String> {
        let row = |[name, parameters, weights, gradients, optimizer, all]: [&str; 6]| {
            format!("{name:<20}{parameters:>12}{weights:>12}{gradients:>12}{optimizer:>12}{all:>12}")
        };
        let mut rows = vec![String::new(), row(["memory", "parameters", "weights", "gradients", "AdamW", "total"])];
        for group in &self.memory.groups {
            let name = format!("  {}, {}", group.name, if group.trained { "trained" } else { "frozen" });
            let [weights, gradients, optimizer, all] =
                [group.weight_bytes, group.gradient_bytes, group.optimizer_bytes, group.bytes()].map(binary);
            rows.push(row([&name, &group.parameters.to_string(), &weights, &gradients, &optimizer, &all]));
        }
        let MemoryPlan { activation_bytes, hidden_state_bytes, working_bytes, program_bytes, .. } = self.memory;
        for (name, bytes) in [
            ("  activations", activation_bytes),
            ("  hidden states", hidden_state_bytes),
            ("  working memory", working_bytes),
            ("  program", program_bytes),
        ] {
            rows.push(row([name, "", "", "", "", &binary(bytes)]));
        }
        for StagePreview { device, layers: [first, last], peak_bytes } in &self.stages {
            let layers = if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") };
            let name = format!("  {layers} on {device}");
            rows.push(format!("{name:<68}{:>12}", binary(*peak_bytes)));
        }
        rows.push(row(["peak", "", "", "", "", &binary(self.peak_bytes)]));
        rows
    }
}

/// In MiB, from 10 GiB on in GiB.
fn binary(bytes: u64) -> String {
    if bytes < 10 << 30 { mebibytes(bytes) } else { gibibytes(bytes) }
}

/// That some processes wait for others in each step.
fn uneven(micro_batches: usize, world_size: usize) -> Option<String> {
    (!micro_batches.is_multiple_of(world_size)).then(|| {
        format!(
            "train.gradient_accumulation_steps = {micro_batches} is no multiple of the {world_size} processes: some of them have fewer micro \
             batches than others, and wait in each step"
        )
    })
}

/// A device and its planned peak.
struct FullestDevice {
    device: Device,
    peak_bytes: u64,
    room: Option<DeviceRoom>,
}

/// The device with the least to spare, or the most planned where the system does not say.
fn fullest(planned: &StageMemory) -> FullestDevice {
    let devices = planned.devices().into_iter().map(|(device, plan)| FullestDevice {
        device,
        peak_bytes: plan.peak_bytes(),
        room: DeviceRoom::of(device),
    });
    let over = |of: &FullestDevice| i128::from(of.peak_bytes) - of.room.map_or(0, |room| i128::from(room.free_bytes));
    devices.max_by_key(over).expect("a device")
}

fn stages(planned: &StageMemory) -> Vec<StagePreview> {
    let stage = |PlannedStage { device, layers, plan }: &PlannedStage| StagePreview {
        device: device_name(*device),
        layers: [layers.start + 1, layers.end],
        peak_bytes: plan.peak_bytes(),
    };
    if planned.stages.len() > 1 { planned.stages.iter().map(stage).collect() } else { vec![] }
}

fn warnings(checked: &CheckedRun, fullest: &FullestDevice, savings: &[MemorySaving]) -> Vec<String> {
    let FullestDevice { device, peak_bytes, room } = *fullest;
    let quantized_teacher =
        "the teacher of self-distillation is the quantised backbone, so the adapters also learn its quantisation error";
    let mut warnings = vec![];
    if checked.plan.trained.has_teacher() && checked.plan.backbone.quantization.is_some() {
        warnings.push(quantized_teacher.into());
    }
    if checked.total_steps == 1 && checked.plan.schedule.factor(0, 1) == 0.0 {
        warnings.push("the learning rate of the only step is 0, because it is the first of the warm-up".into());
    }
    warnings.extend(uneven(checked.plan.train.gradient_accumulation_steps.get(), checked.plan.world_size));
    let too_small = room.filter(|room| !room.holds(peak_bytes));
    warnings.extend(too_small.map(|room| does_not_fit(&device_name(device), peak_bytes, room, savings)));
    let gpus = checked.plan.gpus.per_process(device).filter(|&gpus| gpus > 1);
    if let (Some(_), Some(gpus), None) = (too_small, gpus, &checked.plan.backbone.device_map) {
        warnings.push(format!(
            "this process has {gpus} GPUs: backbone.device_map = \"auto\" spreads the backbone over them"
        ));
    }
    warnings
}

/// That validation rows were trained on.
fn trained_on(checked: &CheckedRun) -> Result<Option<String>, TrainError> {
    let (count, rows) = (checked.validation_rows_trained_on()?, checked.held_out().map_or(0, RowStore::len));
    Ok((count > 0).then(|| {
        let rows = counted(rows, "validation row");
        format!("{count} of {rows} ask what a training row asks, so validation looks better than it is")
    }))
}

/// That the plan does not fit, and the changes with which it does.
fn does_not_fit(device: &str, peak: u64, room: DeviceRoom, savings: &[MemorySaving]) -> String {
    let DeviceRoom { free_bytes, total_bytes } = room;
    let has = format!("{device} has {} free of {}", gibibytes(free_bytes), gibibytes(total_bytes));
    let change = |MemorySaving { keys, peak_bytes }: &MemorySaving| format!("{keys} ({})", gibibytes(*peak_bytes));
    let changes: Vec<String> = savings.iter().map(change).collect();
    let advice = match savings.last() {
        None => "use a device with more memory".into(),
        Some(last) if room.holds(last.peak_bytes) => format!("set {}", changes.join(", then ")),
        Some(_) => format!("even {} does not fit: use a device with more memory", changes.join(", then ")),
    };
    let spare = if peak <= free_bytes { ", a tenth of which a plan leaves free" } else { "" };
    format!("the planned peak is {}, and {has}{spare}: {advice}", gibibytes(peak))
}
