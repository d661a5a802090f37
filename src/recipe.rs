//! Recipes: one TOML file describes one run. The only module that reads TOML and sees every config.
//!
//! [`LoadedRecipe`] finds every mistake that can be found before expensive work; later code relies on it. Relative
//! paths in a recipe are relative to the working directory.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::data::DataConfig;
use crate::data::chat_template::TemplateChoice;
use crate::data::source::{self, SourceError};
use crate::draft::medusa::heads::{HEADS_FILE, HeadsConfig, import};
use crate::draft::medusa::loss::LossConfig;
use crate::files::FileError;
use crate::formats::run_folder::RECIPE;
use crate::hub::HubError;
use crate::model::BackboneConfig;
use crate::model::config::{ConfigError, LlamaConfig};
use crate::model::lora::modules_of;
use crate::model::peft::ADAPTER_FILE;
use crate::numbers::{Fraction, Positive};
use crate::train::TrainConfig;
use crate::train::plan::TrainPlan;
use crate::train::schedule::{ScheduleConfig, ScheduleName};

mod loaded;
mod located;
mod optimizer;
mod stage;

pub use loaded::LoadedRecipe;
use located::LocatedToml;
pub use located::RecipeSpan;
pub use optimizer::OptimizerConfig;
pub use stage::{Medusa1Config, Medusa2Config, Stage};

/// A recipe, with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The model that the heads are for.
    pub backbone: BackboneConfig,
    /// The heads to train.
    pub heads: HeadsConfig,
    /// Which parameters are trained, and how.
    pub stage: Stage,
    /// Weights of the heads' losses.
    #[serde(default)]
    pub loss: LossConfig,
    pub data: DataConfig,
    pub optimizer: OptimizerConfig,
    /// The learning rate over the run.
    pub schedule: ScheduleConfig,
    /// Steps, batches and folders of the run.
    pub train: TrainConfig,
}

/// Why a recipe cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file is missing or unreadable.
    #[error(transparent)]
    Unreadable(#[from] FileError),
    /// A Hub repository that the recipe names cannot be fetched.
    #[error("{place}: {key}: {error}\n{}", place.snippet())]
    Hub { place: Box<RecipeSpan>, key: &'static str, error: Box<HubError> },
    #[error("{place}: {mistake}\n{}", place.snippet())]
    Wrong { place: Box<RecipeSpan>, mistake: Box<Mistake> },
}

/// A mistake in a recipe.
#[derive(Debug, thiserror::Error)]
pub enum Mistake {
    /// TOML syntax, an unknown or duplicate key, or a value with a wrong type or out of range.
    #[error("{}{reason}", key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default())]
    Value {
        /// The key, if the mistake is in its value.
        key: Option<String>,
        /// The parser's message, with the accepted values.
        reason: String,
    },
    /// No table, or several, under `[stage]`.
    #[error("a recipe has exactly one of [stage.medusa1], [stage.medusa2]; this one has {found}")]
    Stages {
        /// The tables found.
        found: String,
    },
    /// Two exclusive keys.
    #[error("{first} and {second} exclude each other; keep one of them")]
    Both { first: &'static str, second: &'static str },
    /// One of two keys is required.
    #[error("one of {first} and {second} is needed")]
    Neither { first: &'static str, second: &'static str },
    /// A value that conflicts with another one.
    #[error("{key} = {got}: expected {expected}")]
    Clash {
        key: &'static str,
        got: String,
        /// The accepted values, and the reason.
        expected: String,
    },
    /// An invalid or unsupported config.json of the backbone.
    #[error("backbone.path: {0}")]
    Backbone(ConfigError),
    /// A key that requires another one.
    #[error("{key} needs {what}; add it, or remove {key}")]
    Needs { key: &'static str, what: &'static str },
    /// A file or folder in the recipe does not exist.
    #[error("{key}: {} does not exist; {hint}", path.display())]
    Missing {
        key: &'static str,
        /// The path as written in the recipe.
        path: PathBuf,
        /// What to give instead.
        hint: &'static str,
    },
    /// Missing data files.
    #[error("{key}: {error}")]
    Files { key: &'static str, error: SourceError },
}

impl Recipe {
    /// Parses a recipe without checking the files that it names. `file` is for error messages.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the text.
    pub fn parse(file: &Path, text: &str) -> Result<Self, RecipeError> {
        Ok(Self::read(file, text)?.0)
    }

    fn read<'t>(file: &'t Path, text: &'t str) -> Result<(Self, LocatedToml<'t>), RecipeError> {
        let located = LocatedToml::parse(file, text).map_err(|(place, reason)| wrong(place, plain(None, &reason)))?;
        check_stages(&located)?;
        let mut recipe: Self = toml::from_str(text).map_err(|error| {
            let span = error.span().unwrap_or(0..0);
            let key = located.key_of_value(&span);
            wrong(located.at(span), plain(key, error.message()))
        })?;
        recipe.check_values(&located)?;
        if let Stage::Medusa2(_) = recipe.stage {
            recipe.optimizer.medusa_lr_multiplier.get_or_insert_with(stage::paper_lr_multiplier);
        }
        Ok((recipe, located))
    }

    /// The recipe as TOML with all defaults written out. Parses to an equal recipe.
    ///
    /// # Panics
    /// Never: every recipe that loads can be serialized.
    pub fn resolved_toml(&self) -> String {
        toml::to_string(self).expect("a recipe holds only what TOML can say")
    }

    /// The plan of this recipe on `device`; the recipe must have local paths.
    pub fn plan(&self, device: Device) -> TrainPlan {
        let Self { backbone, heads, stage, loss, data, optimizer, schedule, train } = self.clone();
        TrainPlan {
            backbone,
            trained: stage.trained(),
            heads,
            loss,
            heads_coefficient: stage.heads_coefficient(),
            optimizer: optimizer.adamw(),
            learning_rate: optimizer.learning_rate.get(),
            heads_rate_factor: optimizer.medusa_lr_multiplier.map_or(1.0, Positive::get),
            schedule,
            max_grad_norm: optimizer.max_grad_norm.get(),
            data,
            train,
            device,
            skip_bad_rows: false,
            resolved_recipe: self.resolved_toml(),
            resolve: |text| Some(Self::parse(Path::new(RECIPE), text).ok()?.resolved_toml()),
            snapshot: None,
            sources: vec![],
        }
    }

    fn check_values(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        exclusive(text, "train.epochs", "train.max_steps")?;
        if self.train.epochs.is_none() && self.train.max_steps.is_none() {
            let mistake = Mistake::Neither { first: "train.epochs", second: "train.max_steps" };
            return Err(wrong(text.value("train"), mistake));
        }
        exclusive(text, "data.validation", "data.validation_fraction")?;
        self.check_stage(text)?;
        self.check_targets(text)?;
        self.check_schedule(text)?;
        check_w2(&self.heads, text)?;
        self.check_validation(text)?;
        self.check_best(text)?;
        self.check_batch(text)?;
        self.check_lengths(text)
    }

    /// The rows per optimizer step must not overflow.
    fn check_batch(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let (rows, passes) = (self.train.micro_batch_size, self.train.gradient_accumulation_steps);
        if rows.checked_mul(passes).is_some() {
            return Ok(());
        }
        let expected = format!("less: the product with train.gradient_accumulation_steps = {passes} overflows");
        Err(clash(text, "train.micro_batch_size", rows, expected))
    }

    /// Rejects keys that only the other stage supports.
    fn check_stage(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let needs = |key: &'static str, what| Err(wrong(text.value(key), Mistake::Needs { key, what }));
        match &self.stage {
            Stage::Medusa1(_) if self.optimizer.medusa_lr_multiplier.is_some() => {
                needs("optimizer.medusa_lr_multiplier", "[stage.medusa2]: in Medusa-1 only heads are trained")
            }
            Stage::Medusa1(_) if self.train.recompute => {
                needs("train.recompute", "[stage.medusa2]: Medusa-1 stores no activations of the backbone")
            }
            Stage::Medusa2(_) if self.train.hidden_state_cache.is_some() => needs(
                "train.hidden_state_cache",
                "[stage.medusa1]: the hidden states of a backbone in training change at every step",
            ),
            Stage::Medusa2(config) if config.lora.is_none() && self.backbone.quantization.is_some() => needs(
                "backbone.quantization",
                "[stage.medusa2.lora]: quantised weights cannot be trained, only adapters on them",
            ),
            Stage::Medusa2(_) if self.backbone.quantization.is_some() && !self.train.recompute => needs(
                "backbone.quantization",
                "train.recompute = true: without it every layer's dequantised weights stay in memory for the backward pass",
            ),
            Stage::Medusa2(config) if config.self_distillation && config.lora.is_none() => needs(
                "stage.medusa2.self_distillation",
                "[stage.medusa2.lora]: the teacher is the backbone with its adapters off",
            ),
            _ => Ok(()),
        }
    }

    fn check_targets(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        if !self.loss.on_unlabelled || self.loss.targets.are_soft() {
            return Ok(());
        }
        let (key, what) =
            ("loss.on_unlabelled", "loss.targets = \"backbone\" or a mix: without a label there is no other target");
        Err(wrong(text.value(key), Mistake::Needs { key, what }))
    }

    /// A constant rate has no smallest one.
    fn check_schedule(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        if self.schedule.min_ratio == Fraction::ZERO || self.schedule.name != ScheduleName::Constant {
            return Ok(());
        }
        let (key, what) =
            ("schedule.min_ratio", "schedule.name = \"cosine\" or \"linear\": a constant rate stays at its peak");
        Err(wrong(text.value(key), Mistake::Needs { key, what }))
    }

    fn check_validation(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let empty = |key, expected: &str| clash(text, key, "[]", expected.to_owned());
        if self.data.train.is_empty() {
            return Err(empty("data.train", "at least one file or glob"));
        }
        if text.key("data.validation").is_some() && self.data.validation.is_empty() {
            return Err(empty("data.validation", "at least one file or glob; or remove the key"));
        }
        match (self.data.validation_fraction, self.train.eval_every) {
            (Some(fraction), _) if fraction.get() == 0.0 => {
                Err(clash(text, "data.validation_fraction", 0, "a number above 0; or remove the key".into()))
            }
            (None, Some(_)) if self.data.validation.is_empty() => {
                let (key, what) = ("train.eval_every", "rows: data.validation or data.validation_fraction");
                Err(wrong(text.value(key), Mistake::Needs { key, what }))
            }
            _ => Ok(()),
        }
    }

    /// What is kept, and when a run stops early, depends on evaluations during the run.
    fn check_best(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let needs = |key: &'static str, what| Err(wrong(text.value(key), Mistake::Needs { key, what }));
        let TrainConfig { keep_best, patience, eval_every, .. } = self.train;
        match (keep_best, patience, eval_every) {
            (None, Some(_), _) => needs("train.patience", "train.keep_best, which says what a better evaluation is"),
            (Some(_), _, None) => {
                needs("train.keep_best", "train.eval_every, and data.validation or data.validation_fraction")
            }
            _ => Ok(()),
        }
    }

    fn check_lengths(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let (heads, length) = (self.heads.medusa_num_heads.get(), self.data.max_length.get());
        if length < heads + 2 {
            // head k (1-based) at position 0 predicts token k + 1
            let expected = format!("at least {}, so that each of {heads} heads has a target", heads + 2);
            return Err(clash(text, "data.max_length", length, expected));
        }
        match self.train.max_steps {
            Some(steps) if self.schedule.warmup_steps > steps.get() => {
                let expected = format!("at most train.max_steps = {steps}");
                Err(clash(text, "schedule.warmup_steps", self.schedule.warmup_steps, expected))
            }
            _ => Ok(()),
        }
    }

    fn check_backbone(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let folder = Path::new(&self.backbone.path);
        if !folder.is_dir() {
            let hint = "give a folder in Hugging Face layout, or an id of the Hub: owner/name or owner/name@revision";
            let mistake = Mistake::Missing { key: "backbone.path", path: folder.to_owned(), hint };
            return Err(wrong(text.value("backbone.path"), mistake));
        }
        let config =
            LlamaConfig::load(folder).map_err(|error| wrong(text.value("backbone.path"), Mistake::Backbone(error)))?;
        self.check_lora(text, &config)?;
        self.check_w2_sizes(text, &config)?;
        let (length, context) = (self.data.max_length.get(), config.largest_context());
        if i64::try_from(length).is_ok_and(|length| length <= context) {
            return Ok(());
        }
        let expected = format!("at most {context}, the backbone's context");
        Err(clash(text, "data.max_length", length, expected))
    }

    /// B·A of the hidden size or more would have more weights than W2, and a vocabulary of all tokens is not truncated.
    fn check_w2_sizes(&self, text: &LocatedToml<'_>, backbone: &LlamaConfig) -> Result<(), RecipeError> {
        let HeadsConfig { w2_rank, draft_vocab_size, .. } = self.heads;
        let sizes = [
            ("heads.w2_rank", w2_rank, backbone.hidden_size, "hidden size"),
            ("heads.draft_vocab_size", draft_vocab_size, backbone.vocab_size, "vocabulary"),
        ];
        for (key, size, whole, what) in sizes {
            if let Some(size) = size.filter(|size| size.get() as i64 >= whole) {
                let expected = format!("less than {whole}, the backbone's {what}; or remove the key");
                return Err(clash(text, key, size, expected));
            }
        }
        Ok(())
    }

    /// Every named layer exists: families name theirs differently.
    fn check_lora(&self, text: &LocatedToml<'_>, backbone: &LlamaConfig) -> Result<(), RecipeError> {
        let Some(foreign) = self.stage.lora().and_then(|lora| lora.target_modules.foreign_to(backbone)) else {
            return Ok(());
        };
        let expected = format!("some of this backbone's layers: {}", modules_of(backbone).join(", "));
        Err(clash(text, "stage.medusa2.lora.target_modules", foreign, expected))
    }

    fn check_files(&self, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        for (key, patterns) in [("data.train", &self.data.train), ("data.validation", &self.data.validation)] {
            source::find(patterns).map_err(|error| wrong(text.value(key), Mistake::Files { key, error }))?;
        }
        if let TemplateChoice::File(path) = &self.data.chat_template
            && !path.is_file()
        {
            let hint = "give the path of a Jinja template, or the name of a built-in one";
            let mistake = Mistake::Missing { key: "data.chat_template", path: path.clone(), hint };
            return Err(wrong(text.value("data.chat_template"), mistake));
        }
        let adapter = self.stage.lora().and_then(|lora| lora.init_from.as_ref());
        let of_heads = |path: &PathBuf| import::locate(path).unwrap_or_else(|_| path.join(HEADS_FILE));
        let of_adapter = |path: &PathBuf| path.join(ADAPTER_FILE);
        let heads_hint =
            "give heads.safetensors or a folder with it, such as a run's final/ (other layouts are also read)";
        let adapter_hint = "give a folder with a PEFT adapter, such as a run's final/";
        let starts = [
            ("heads.init_from", self.heads.init_from.as_ref().map(of_heads), heads_hint),
            ("stage.medusa2.lora.init_from", adapter.map(of_adapter), adapter_hint),
        ];
        for (key, path, hint) in starts {
            if let Some(path) = path.filter(|path| !path.is_file()) {
                return Err(wrong(text.value(key), Mistake::Missing { key, path, hint }));
            }
        }
        Ok(())
    }
}

fn wrong(place: RecipeSpan, mistake: Mistake) -> RecipeError {
    RecipeError::Wrong { place: Box::new(place), mistake: Box::new(mistake) }
}

fn clash(text: &LocatedToml<'_>, key: &'static str, got: impl ToString, expected: String) -> RecipeError {
    wrong(text.value(key), Mistake::Clash { key, got: got.to_string(), expected })
}

/// Heads that use the LM head have no W2 that could be smaller.
fn check_w2(heads: &HeadsConfig, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
    let none = "with heads.shared_lm_head = true heads have no W2";
    if !heads.shared_lm_head {
        return Ok(());
    }
    if let Some(rank) = heads.w2_rank {
        return Err(clash(text, "heads.w2_rank", rank, format!("no rank: {none}")));
    }
    if let Some(size) = heads.draft_vocab_size {
        return Err(clash(text, "heads.draft_vocab_size", size, format!("no size: {none}")));
    }
    if heads.shared_w2 { Err(clash(text, "heads.shared_w2", true, format!("false: {none}"))) } else { Ok(()) }
}

fn exclusive(text: &LocatedToml<'_>, first: &'static str, second: &'static str) -> Result<(), RecipeError> {
    match (text.key(first), text.key(second)) {
        (Some(_), Some(place)) => Err(wrong(place, Mistake::Both { first, second })),
        _ => Ok(()),
    }
}

/// Rewords serde's messages for recipes.
fn plain(key: Option<String>, reason: &str) -> Mistake {
    const WORDS: [(&str, &str); 7] = [
        ("unknown field", "unknown key"),
        ("missing field", "missing key"),
        ("unknown variant", "unknown value"),
        ("there are no fields", "this table has no keys"),
        ("a nonzero usize", "a whole number above 0"),
        ("expected usize", "expected a whole number of at least 0"),
        ("expected u64", "expected a whole number of at least 0"),
    ];
    let reason = WORDS.iter().fold(reason.to_owned(), |reason, (from, to)| reason.replace(from, to));
    Mistake::Value { key, reason }
}

/// Checks that there is exactly one stage, because serde's message would be about enums.
fn check_stages(text: &LocatedToml<'_>) -> Result<(), RecipeError> {
    let stages = text.keys("stage");
    match stages.as_slice() {
        [_] => Ok(()),
        [] => Err(wrong(text.value("stage"), Mistake::Stages { found: "none".into() })),
        [.., last] => {
            let found = stages.iter().map(|stage| format!("[stage.{stage}]")).collect::<Vec<_>>().join(" and ");
            let place = text.key(&format!("stage.{last}")).unwrap_or_else(|| text.value("stage"));
            Err(wrong(place, Mistake::Stages { found }))
        }
    }
}
