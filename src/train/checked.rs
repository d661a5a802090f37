//! A plan with everything that is read and checked before the backbone's weights: rows, tokenizer, config, tensor
//! headers and the memory plan.

use std::collections::HashSet;
use std::iter;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use tch::{Device, Kind};

use crate::cpu;
use crate::data::cache::CacheError;
use crate::data::captured::CapturedSet;
use crate::data::chat_template::ChatTemplate;
use crate::data::loader::{Batch, BatchShare, Loader};
use crate::data::mix::{Mix, MixedShare};
use crate::data::pack::{PackReport, Sequences};
use crate::data::rows::TokenRow;
use crate::data::split::{self, Split};
use crate::data::store::RowStore;
use crate::data::tokenize::TextTokenizer;
use crate::data::{self, DataError, LoadReport, LoadSettings, Watch, prompts};
use crate::draft::error::DrafterError;
use crate::draft::planned::PlannedDrafter;
use crate::dtype::Dtype;
use crate::formats::best::BestBy;
use crate::formats::run_folder::FINAL;
use crate::formats::trained_prompts::prompt_hash;
use crate::gguf;
use crate::memory::layer::{LayerPass, TrainedLayers};
use crate::memory::plan::{MemoryPlan, WorldPlan};
use crate::memory::stages::{StageMemory, balanced};
use crate::memory::weights::StageShape;
use crate::model::config::LlamaConfig;
use crate::model::device_map::DeviceMap;
use crate::model::llama::Llama;
use crate::model::loading::LoadError;
use crate::model::peft;
use crate::model::stages::Stages;
use crate::model::taps::Taps;
use crate::model::weights::{TensorHeader, WeightFiles};
use crate::torch::{device_name, flash_attention, guard};
use crate::train::device_room::{self, DeviceRoom, MemorySaving};
use crate::train::draft_vocabulary::{DraftVocabulary, smallest_with};
use crate::train::error::TrainError;
use crate::train::finished::RunProgress;
use crate::train::hidden_states::{self, CapturedRows, CapturedSplits};
use crate::train::memory_plan::Workload;
use crate::train::plan::{BackboneTraining, TrainPlan};
use crate::train::target_rule::TargetRule;
use crate::tree::cross_validation::half_of;

/// Everything that a run needs except the backbone's weights, read and checked.
#[derive(Debug)]
pub struct CheckedRun {
    pub plan: TrainPlan,
    pub(super) config: LlamaConfig,
    /// What renders conversations, where there is a template.
    pub(super) template: Option<ChatTemplate>,
    /// The tokens with which it opens an answer.
    pub(super) answer_header: Vec<i32>,
    pub(super) train: Loader,
    pub(super) validation: Option<Loader>,
    /// Whether the backbone's folder has weights, whose headers were then checked.
    pub has_weights: bool,
    /// Of the linear layers, if the backbone's file has them in blocks.
    block_bytes: Option<u64>,
    pub train_report: LoadReport,
    pub validation_report: Option<LoadReport>,
    /// As [`Split::is_by_prompt`].
    pub split_by_prompt: bool,
    pub pack_report: PackReport,
    /// Which of the backbone's layers lie on which device.
    pub stages: Stages,
    /// Optimizer steps of the whole run.
    pub total_steps: usize,
    pub drafter: Arc<dyn PlannedDrafter>,
    /// The tokens that the drafter can guess, if the recipe truncates their vocabulary.
    pub draft_vocabulary: Option<DraftVocabulary>,
    /// The rows' hidden states, if a server captured them.
    pub captured: Option<CapturedSplits>,
    /// Bytes on disk of `train.hidden_state_cache`, if the plan has one.
    pub hidden_state_bytes: Option<u64>,
}

impl CheckedRun {
    /// Reads rows, tokenizer and config, and checks them against each other and against the headers of the backbone's
    /// weights, if it has any. Writes nothing. `watch` receives the progress of reading rows.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn load(plan: TrainPlan, watch: Watch) -> Result<Self, TrainError> {
        let folder = Path::new(&plan.backbone.path);
        let (outline, has_weights) = guard("checking the backbone", || outline(&plan))??;
        let (config, block_bytes) = (outline.config, block_bytes(folder)?);
        let tokenizer = load_tokenizer(folder, config.vocab_size)?;
        let cache = data::cache::TokenCache::for_user();
        let template = ChatTemplate::choose(&plan.data.chat_template, folder).map_err(DataError::from)?;
        let settings = LoadSettings {
            tokenizer: tokenizer.as_ref(),
            vocab_size: usize::try_from(config.vocab_size).expect("a checked config"),
            max_length: plan.data.max_length,
            long_rows: plan.data.long_rows,
            limit: plan.data.limit,
            cache: cache.as_ref(),
            columns: plan.data.columns.as_ref(),
            template: template.as_ref(),
            loss_on: plan.data.loss_on,
            skip_bad_rows: plan.skip_bad_rows,
            watch,
        };
        let captured = captured_set(&plan, &config, &settings)?;
        let rows = load_rows(&plan, &settings, captured.as_deref())?;
        let drafter = planned(&plan, &config)?;
        check_taps(&drafter.taps(), &plan, captured.as_deref())?;
        let draft_vocabulary = draft_vocabulary(&plan, &rows.train, settings.vocab_size)?;
        let captured = captured.map(|set| rows.captured(&set)).transpose()?;
        let (train, pack_report) = train_loader(rows.train, &rows.train_counts, &plan)?;
        let rule = TargetRule::new(&plan.loss, drafter.reads());
        check_targets(&train, rule)?;
        let validation = rows.validation.map(|rows| loader(data::sequences(rows, &plan.data).0, &plan, None));
        check_halves(&plan, validation.as_ref(), "validation row")?;
        let total_steps = total_steps(&plan, train.steps_per_epoch())?;
        let (train_report, validation_report) = (rows.train_report, rows.validation_report);
        let width = drafter.taps().width(config.hidden_size);
        let hidden_state_bytes = hidden_state_bytes(&plan, (rule, width), [Some(&train), validation.as_ref()])?;
        let answer_header = prompts::answer_header(tokenizer.as_ref(), template.as_ref());
        let mut checked = Self {
            stages: Stages::one(plan.device),
            plan,
            config,
            template,
            answer_header,
            train,
            validation,
            has_weights,
            block_bytes,
            train_report,
            validation_report,
            split_by_prompt: rows.split_by_prompt,
            pack_report,
            total_steps,
            drafter,
            draft_vocabulary,
            captured,
            hidden_state_bytes,
        };
        checked.stages = checked.mapped_stages();
        Ok(checked)
    }

    /// `backbone.device_map` on the devices of this process.
    fn mapped_stages(&self) -> Stages {
        let map = self.plan.backbone.device_map.as_ref();
        let devices = DeviceMap::devices(map, self.plan.gpus, self.plan.device);
        let counts = match map {
            Some(DeviceMap::Layers(counts)) => counts.clone(),
            Some(DeviceMap::Auto) if devices.len() > 1 => {
                let work = self.workload(&self.plan, &*self.drafter);
                let peak = |stage| MemoryPlan::of(&Workload { stage, ..work }).peak_bytes();
                balanced(self.config.num_hidden_layers, devices.len(), peak)
            }
            Some(DeviceMap::Auto) | None => return Stages::one(devices[0]),
        };
        Stages::new(devices.into_iter().zip(counts))
    }

    /// The devices that the run computes on, as `--device` spells them: "cuda:0, cuda:1".
    pub fn device_names(&self) -> String {
        let mut names: Vec<String> = self.stages.devices().map(device_name).collect();
        names.dedup();
        names.join(", ")
    }

    /// Plans the run's memory on each stage.
    pub fn memory(&self) -> StageMemory {
        self.memory_on_these_rows(&self.plan, &*self.drafter)
    }

    /// Plans the memory of another run with a new drafter for the same backbone, on the same rows and stages.
    pub fn memory_of(&self, plan: &TrainPlan) -> StageMemory {
        self.memory_on_these_rows(plan, &*plan.drafter.for_backbone(&self.config))
    }

    /// Changes of the recipe with which the run fits into `room` of a device; empty if it does as it is.
    pub fn savings(&self, device: Device, room: DeviceRoom) -> Vec<MemorySaving> {
        device_room::savings(&self.plan, room, |plan| self.memory_of(plan).peak_on(device))
    }

    fn memory_on_these_rows(&self, plan: &TrainPlan, drafter: &dyn PlannedDrafter) -> StageMemory {
        let work = self.workload(plan, drafter);
        StageMemory::of(&self.stages, self.config.num_hidden_layers, |stage| {
            MemoryPlan::of(&Workload { stage, ..work })
        })
    }

    fn workload<'w>(&'w self, plan: &'w TrainPlan, drafter: &'w dyn PlannedDrafter) -> Workload<'w> {
        let TrainPlan { backbone, trained, optimizer, train, device, data, .. } = plan;
        let evaluates = !data.validation.is_empty() || data.validation_fraction.is_some();
        let answers = evaluates && train.eval_answers != Some(0) && data.hidden_states.is_none();
        let sequences = self.train.sequences();
        let ids = || 0..sequences.len();
        let lengths = || ids().map(|id| sequences.length(id));
        let [longest, shortest] = [lengths().max(), lengths().min()].map(Option::unwrap_or_default);
        let pass = LayerPass {
            config: &self.config,
            element: backbone.dtype.kind().elt_size_in_bytes() as u64,
            quantization: backbone.quantization,
            blocks: self.block_bytes.filter(|_| {
                *device == Device::Cpu && backbone.quantization.is_none() && trained.layers() != TrainedLayers::Whole
            }),
            trained: trained.layers(),
            recompute: train.recompute,
            rows: train.micro_batch_size.get().min(sequences.len()) as u64,
            length: longest.min(data.max_length.get()) as u64,
            masked: ids().any(|id| sequences.segments(id) > 1),
            flash: flash_attention::runs_with(self.config.head_dim, backbone.dtype.kind(), *device),
            on_host: *device == Device::Cpu,
        };
        Workload {
            pass,
            stage: StageShape::whole(self.config.num_hidden_layers),
            drafter,
            teachers: plan.teachers(),
            optimizer: optimizer.name,
            world: WorldPlan { size: plan.world_size, zero_stage: plan.zero_stage },
            unequal: 2 * shortest < longest,
            cached: train.hidden_state_cache.is_some(),
            loaded: plan.output_part(),
            answers_twice: answers && self.answers_by_kernels(plan),
        }
    }

    /// Whether another copy of the backbone answers the validation prompts of a run: with quantised weights the CPU's own kernels are many times
    /// faster than training's, which dequantises. An adapter or weights that training starts from are in training's alone.
    pub(super) fn answers_by_kernels(&self, plan: &TrainPlan) -> bool {
        let is_quantized = plan.backbone.quantization.is_some() || self.block_bytes.is_some();
        let has_kernels = plan.device == Device::Cpu && plan.backbone.dtype != Dtype::Float16 && cpu::available();
        let is_as_stored = plan.trained != BackboneTraining::Full && plan.trained.adapter_to_start_from().is_none();
        is_quantized && is_as_stored && has_kernels
    }

    /// A size for `heads.draft_vocab_size` of at least `fewest`, with which this fraction of the training labels can be guessed, a power of two;
    /// `None` if it is more than half of the backbone's vocabulary.
    ///
    /// # Errors
    /// A damaged token cache.
    pub fn draft_vocabulary_with(&self, fraction: f64, fewest: usize) -> Result<Option<usize>, DataError> {
        let all = usize::try_from(self.config.vocab_size).unwrap_or_default();
        let size = smallest_with(self.train.sequences().store(), all, fraction)?.max(fewest);
        Ok(Some(size).filter(|size| 2 * size <= all))
    }

    /// About how many bytes the hidden states of the training rows have.
    pub fn state_bytes(&self, kind: Kind) -> u64 {
        let width = self.drafter.taps().width(self.config.hidden_size).unsigned_abs();
        self.train_report.counts.tokens as u64 * width * kind.elt_size_in_bytes() as u64
    }

    /// Numbers of training and validation sequences.
    pub fn sequence_counts(&self) -> (usize, usize) {
        (self.train.sequences_per_epoch(), self.validation.as_ref().map_or(0, |rows| rows.sequences().len()))
    }

    /// Whether conversations can be rendered for this backbone.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The rows that the run evaluates on; `None` if its recipe holds out none.
    pub fn held_out(&self) -> Option<&RowStore> {
        Some(self.validation.as_ref()?.sequences().store())
    }

    /// How many rows of `data.validation` ask what a training row asks; a text without answers is compared whole. Reads all rows.
    ///
    /// # Errors
    /// A damaged token cache.
    pub fn validation_rows_trained_on(&self) -> Result<usize, DataError> {
        let (Some(_), Some(validation)) = (&self.validation_report, self.held_out()) else { return Ok(0) };
        let question = |row: Result<TokenRow, CacheError>| Ok(prompt_hash(row?.question_or_whole(&self.answer_header)));
        let trained: HashSet<u64> =
            self.train.sequences().store().iter().map(question).collect::<Result<_, DataError>>()?;
        let asked = validation.iter().map(question).collect::<Result<Vec<_>, DataError>>()?;
        Ok(asked.iter().filter(|hash| trained.contains(hash)).count())
    }

    /// What came of reading the training and the validation rows.
    pub fn reports(&self) -> impl Iterator<Item = &LoadReport> {
        iter::once(&self.train_report).chain(&self.validation_report)
    }

    /// A process's micro batches of an optimizer step (0-based).
    ///
    /// # Errors
    /// A damaged token cache.
    pub fn batches(&self, step: usize, share: BatchShare) -> Result<Vec<Batch>, TrainError> {
        Ok(self.train.step_share(step, share).map_err(DataError::from)?)
    }

    /// The part of each entry of `data.train` in an epoch; empty without `data.mix`.
    pub fn mixed(&self) -> Vec<MixedShare> {
        self.train.mix().map(Mix::shares).unwrap_or_default()
    }

    /// The last step of the run in the output folder, if it has finished and the recipe asks for no more.
    ///
    /// # Errors
    /// A file of the run cannot be read.
    pub fn finished_step(&self) -> Result<Option<usize>, TrainError> {
        let is_run = self.plan.train.output_dir.join(FINAL).exists();
        if is_run { RunProgress::read(&self.plan, self.total_steps)?.finished() } else { Ok(None) }
    }

    /// As [`Loader::fraction_of_step`].
    pub fn fraction_of_step(&self, step: usize) -> f64 {
        self.train.fraction_of_step(step)
    }

    /// Optimizer steps of one pass over the training rows.
    pub fn steps_per_epoch(&self) -> usize {
        self.train.steps_per_epoch()
    }
}

/// `train.max_steps`, or `train.epochs` times the steps of an epoch. Warm-up must not be longer.
fn total_steps(plan: &TrainPlan, steps_per_epoch: usize) -> Result<usize, TrainError> {
    let epochs = plan.train.epochs.map_or(0, NonZeroUsize::get);
    let by_epochs = || epochs.checked_mul(steps_per_epoch).ok_or(TrainError::TooManySteps { epochs, steps_per_epoch });
    let total_steps = plan.train.max_steps.map_or_else(by_epochs, |steps| Ok(steps.get()))?;
    if let Some(warmup_steps) = plan.schedule.warmup_steps.filter(|&steps| steps > total_steps) {
        return Err(TrainError::WarmupTooLong { warmup_steps, total_steps });
    }
    Ok(total_steps)
}

/// Bytes of the decoder's linear layers in a GGUF file; `None` if none is in blocks.
fn block_bytes(folder: &Path) -> Result<Option<u64>, TrainError> {
    if !gguf::file::is_gguf(folder) {
        return Ok(None);
    }
    let files = WeightFiles::open(folder).map_err(LoadError::from)?;
    let is_linear = |header: &TensorHeader| header.shape.len() == 2 && header.name.starts_with("model.layers.");
    let linears: Vec<TensorHeader> = files.tensors().into_iter().filter(is_linear).collect();
    let in_blocks = linears.iter().any(|linear| files.is_in_blocks(&linear.name));
    Ok(in_blocks.then(|| linears.iter().map(|linear| linear.bytes as u64).sum()))
}

/// The backbone's config and tensor names without its weights, with the adapter that it starts from.
fn outline(plan: &TrainPlan) -> Result<(Llama, bool), TrainError> {
    let folder = Path::new(&plan.backbone.path);
    let (mut outline, has_weights) = match plan.output_part() {
        None => Llama::outline(folder)?,
        Some(part) => Llama::outline_output(folder, part)?,
    };
    if let Some(lora) = plan.trained.lora()
        && let Some(adapter) = &lora.init_from
    {
        peft::check(&mut outline, adapter, lora)?;
    }
    Ok((outline, has_weights))
}

/// The recipe's drafter for this backbone.
fn planned(plan: &TrainPlan, config: &LlamaConfig) -> Result<Arc<dyn PlannedDrafter>, TrainError> {
    plan.drafter.checked(config).map_err(|error| match error {
        DrafterError::OtherShape { path, expected, got } => TrainError::InitShape { path, expected, got },
        error => TrainError::InitFrom(error),
    })
}

/// The hidden states that a drafter reads beside the last one are those of a frozen backbone, or of a server that captured as many layers.
fn check_taps(taps: &Taps, plan: &TrainPlan, captured: Option<&CapturedSet>) -> Result<(), TrainError> {
    let expected = 1 + taps.layers().len();
    match captured.map(CapturedSet::layers) {
        _ if expected > 1 && !plan.trained.is_frozen() => Err(TrainError::TapsOfTrainedBackbone),
        Some(got) if got > 0 && got < expected => Err(TrainError::TooFewLayers { expected, got }),
        _ => Ok(()),
    }
}

/// Counts the labels if the recipe truncates the vocabulary. A drafter that training starts from keeps its own tokens, at least one of which
/// must be a label if labels alone teach.
fn draft_vocabulary(
    plan: &TrainPlan,
    rows: &RowStore,
    vocab_size: usize,
) -> Result<Option<DraftVocabulary>, TrainError> {
    let Some(size) = plan.drafter.draft_vocab_size() else { return Ok(None) };
    let given = plan.drafter.start()?.and_then(|start| start.token_map);
    let vocabulary = DraftVocabulary::of(rows, vocab_size, size, given).map_err(DataError::from)?;
    match plan.drafter.init_from() {
        Some(path) if vocabulary.label_fraction == 0.0 && !plan.loss.targets.are_soft() => {
            Err(TrainError::NoLabelInTokenMap { path: path.into(), tokens: size })
        }
        _ => Ok(Some(vocabulary)),
    }
}

/// Rows of tokens need no tokenizer, so a folder without one is accepted.
fn load_tokenizer(folder: &Path, vocab_size: i64) -> Result<Option<TextTokenizer>, TrainError> {
    let tokenizer = TextTokenizer::load_if_there(folder)?;
    if let Some(tokenizer) = &tokenizer {
        tokenizer.check_vocabulary(usize::try_from(vocab_size).expect("a checked config"))?;
    }
    Ok(tokenizer)
}

struct SplitRows {
    train: RowStore,
    /// Rows of each entry.
    train_counts: Vec<usize>,
    train_report: LoadReport,
    validation: Option<RowStore>,
    validation_report: Option<LoadReport>,
    /// As [`Split::is_by_prompt`].
    split_by_prompt: bool,
}

impl SplitRows {
    /// The hidden states of all rows.
    fn captured(&self, set: &Arc<CapturedSet>) -> Result<CapturedSplits, DataError> {
        let split = |rows: &RowStore| CapturedRows::new(set, rows);
        Ok(CapturedSplits { train: split(&self.train)?, validation: self.validation.as_ref().map(split).transpose()? })
    }
}

/// The files of `data.hidden_states`.
fn captured_set(
    plan: &TrainPlan,
    config: &LlamaConfig,
    settings: &LoadSettings,
) -> Result<Option<Arc<CapturedSet>>, DataError> {
    let hidden_size = usize::try_from(config.hidden_size).expect("a checked config");
    let open = |entry: &String| CapturedSet::open(entry, hidden_size, settings).map(Arc::new);
    plan.data.hidden_states.as_ref().map(open).transpose()
}

/// The rows of some entries. Where a server captured hidden states, only rows that have some; without entries, the rows of its files.
fn load_entries(
    entries: &[&[String]],
    settings: &LoadSettings,
    captured: Option<&CapturedSet>,
) -> Result<(RowStore, LoadReport), DataError> {
    let Some(set) = captured else { return data::load_entries(entries, settings) };
    let (rows, mut report) =
        if entries.is_empty() { set.rows(settings)? } else { data::load_entries(entries, settings)? };
    set.check_whole(&report)?;
    let rows = set.rows_with_states(rows, &mut report, settings.skip_bad_rows)?;
    Ok((rows, report))
}

fn load_rows(
    plan: &TrainPlan,
    settings: &LoadSettings,
    captured: Option<&CapturedSet>,
) -> Result<SplitRows, TrainError> {
    let (train, train_report) = load_entries(&plan.data.train_entries(), settings, captured)?;
    let train_counts = train_report.rows_of_entries.clone();
    let mut rows = SplitRows {
        train,
        train_counts,
        train_report,
        validation: None,
        validation_report: None,
        split_by_prompt: false,
    };
    if !plan.data.validation.is_empty() {
        let (validation, report) = load_entries(&plan.data.validation_entries(), settings, captured)?;
        (rows.validation, rows.validation_report) = (Some(validation), Some(report));
    } else if let Some(fraction) = plan.data.validation_fraction {
        let sets = if plan.data.mix.is_some() { rows.train_counts } else { vec![rows.train.len()] };
        let header = prompts::answer_header(settings.tokenizer, settings.template);
        let Split { training, counts, validation, is_by_prompt } =
            split::split_sets(rows.train, &sets, fraction, plan.train.seed, &header)?;
        rows = SplitRows {
            train: training,
            train_counts: counts,
            validation: Some(validation),
            split_by_prompt: is_by_prompt,
            ..rows
        };
    }
    Ok(rows)
}

/// All training rows, or the sets that the recipe mixes.
fn train_loader(rows: RowStore, counts: &[usize], plan: &TrainPlan) -> Result<(Loader, PackReport), TrainError> {
    let Some(weights) = &plan.data.mix else {
        let (sequences, report) = data::sequences(rows, &plan.data);
        return Ok((loader(sequences, plan, plan.data.shuffle.then_some(plan.train.seed)), report));
    };
    let entries: Vec<String> = plan.data.train_entries().iter().map(|entry| entry.join(", ")).collect();
    let max_length = plan.data.max_length.get();
    let mix = data::mixed(rows, counts, weights, &entries, plan.data.packing.then_some(max_length))?;
    let report = mix.report(max_length);
    let (micro, accumulation) = (plan.train.micro_batch_size.get(), plan.train.gradient_accumulation_steps.get());
    Ok((Loader::mixed(mix, micro, accumulation, plan.train.seed), report))
}

fn loader(sequences: Sequences, plan: &TrainPlan, shuffle: Option<u64>) -> Loader {
    let (micro, accumulation) = (plan.train.micro_batch_size.get(), plan.train.gradient_accumulation_steps.get());
    Loader::new(sequences, micro, accumulation, shuffle)
}

fn check_targets(train: &Loader, rule: TargetRule) -> Result<(), TrainError> {
    let mut missing: Vec<usize> = (1..=rule.reads.levels).collect();
    for batch in train.eval_batches() {
        let batch = batch.map_err(DataError::from)?;
        missing.retain(|head| rule.targets(&batch, head + 1).positions.is_empty());
        if missing.is_empty() {
            return Ok(());
        }
    }
    missing.first().map_or(Ok(()), |&head| Err(TrainError::NoTargetForHead { head, ahead: head + 1 }))
}

/// Checks that evaluations on these rows have tokens per step, if `train.keep_best` judges by them. `text`: what a row is.
pub(super) fn check_halves(plan: &TrainPlan, rows: Option<&Loader>, text: &'static str) -> Result<(), TrainError> {
    let (Some(BestBy::TokensPerStep), Some(rows)) = (plan.train.keep_best, rows) else { return Ok(()) };
    let mut has_target = [false; 2];
    for batch in rows.eval_batches() {
        let batch = batch.map_err(DataError::from)?;
        let positions = batch.targets(2).positions;
        for (row, place) in batch.segments() {
            has_target[half_of(row)] |= positions.iter().any(|&at| place.contains(&(at as usize)));
        }
        if has_target == [true; 2] {
            return Ok(());
        }
    }
    Err(TrainError::NoTokensPerStep { rows: rows.sequences().rows(), text })
}

/// Of training and validation rows. Reads all labels if the recipe caches hidden states.
fn hidden_state_bytes(
    plan: &TrainPlan,
    (rule, width): (TargetRule, i64),
    rows: [Option<&Loader>; 2],
) -> Result<Option<u64>, TrainError> {
    if plan.train.hidden_state_cache.is_none() {
        return Ok(None);
    }
    let kind = plan.backbone.dtype.kind();
    let bytes = |rows: &Loader| hidden_states::file_bytes(rows.sequences(), rule, width, kind);
    let all: Result<Vec<u64>, _> = rows.into_iter().flatten().map(bytes).collect();
    Ok(Some(all.map_err(DataError::from)?.into_iter().sum()))
}
