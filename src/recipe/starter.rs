//! A starter recipe for a backbone, data and a machine, with comments: what `medusa init` writes.

use std::fmt::Write;
use std::path::Path;

use tch::Device;
use toml::Value;

use super::{Recipe, RecipeError, Stage};
use crate::data::DataError;
use crate::data::chat_template::TemplateChoice;
use crate::data::column_names::ColumnNames;
use crate::draft::heads::layout::HeadsArchitecture;
use crate::model::lora::LoraConfig;
use crate::model::stored_dtype::stored_dtype;
use crate::torch::memory;
use crate::train::checked::CheckedRun;

/// Heads guess the most frequent tokens that are together this part of the labels: the others are rare, and their rows of W2 take most of
/// the heads' time.
const GUESSED_LABELS: f64 = 0.99;
/// Few rows have few tokens, and other texts have others.
const FEWEST_GUESSED: usize = 4096;
/// Sequential heads on a CPU, where more than a few guesses per step do not pay: joined with prompt lookup, two decoded the proving ground as
/// fast as five, and have a third of the weights to train.
const HEADS_ON_A_CPU: usize = 2;
/// Most tokens of a forward pass: more are hardly faster.
const TOKENS_OF_A_PASS: usize = 8192;
/// Aims: optimizer steps of an epoch and of a run, evaluations of a run, and rows to evaluate on.
const STEPS_OF_AN_EPOCH: usize = 100;
const STEPS_OF_A_RUN: usize = 200;
/// Aim: tokens that a run trains on, all its epochs together.
const TOKENS_OF_A_RUN: usize = 1_000_000;
/// The same if the hidden states are cached: an epoch without the backbone takes a fraction of the time.
const TOKENS_OF_A_CACHED_RUN: usize = 3_000_000;
/// The heads' learning rate at so many tokens of an optimizer step, on the proving ground; at others it goes by the square root of their number.
const LEARNING_RATE: f64 = 2e-3;
const TOKENS_OF_LEARNING_RATE: f64 = 4096.0;
/// The largest learning rate is the paper's at this hidden size, the paper's, and in inverse proportion to smaller ones.
const PAPER_LEARNING_RATE: f64 = 1e-3;
const PAPER_HIDDEN_SIZE: f64 = 4096.0;
/// Most passes over the rows for that aim: more of few rows are learnt by heart.
const MOST_EPOCHS_BY_TOKENS: usize = 10;
/// Fewer tokens make heads that guess badly.
const FEW_TOKENS: usize = 200_000;
const EVALUATIONS: usize = 10;
const VALIDATION_ROWS: f64 = 100.0;
/// Most sequences of an optimizer step (the paper's), passes over the rows, and steps of the warm-up (the paper's).
const LARGEST_BATCH: usize = 64;
const MOST_EPOCHS: usize = 20;
const LONGEST_WARMUP: usize = 40;
/// The part of a shorter run that is warm-up.
const WARMUP: f64 = 0.1;
/// Hidden states of so many bytes are kept on disk: every epoch but the first then does without the backbone.
const MOST_HIDDEN_STATES: u64 = 4 << 30;
/// Their folder, beside the run's.
const HIDDEN_STATES: &str = "hidden_states";
/// Most optimizer steps between checkpoints (the default).
const SAVE_EVERY: usize = 200;
/// LoRA's dropout (the paper's).
const LORA_DROPOUT: f64 = 0.05;
/// Why a recipe does not compute in the dtype of the weights.
const FLOAT16: &str = "the weights are float16, slow on a CPU";
/// Fewer rows are not split.
const FEWEST_TO_SPLIT: usize = 20;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StarterStage {
    /// Heads on the frozen backbone.
    Medusa1,
    /// Heads and adapters on the backbone.
    Medusa2,
}

/// The user's choices.
#[derive(Debug, Clone)]
pub struct StarterRecipe {
    /// Path or Hub id.
    pub backbone: String,
    /// Paths, globs or Hub ids.
    pub data: Vec<String>,
    /// Rows to evaluate on, likewise; without any a part of `data` is held out.
    pub validation: Vec<String>,
    pub columns: Option<ColumnNames>,
    pub chat_template: TemplateChoice,
    pub stage: StarterStage,
    /// Medusa-2 learns from the backbone without adapters.
    pub self_distillation: bool,
    /// The kind of heads.
    pub heads: HeadsArchitecture,
    /// The command that trains it, as a shell reads it.
    pub train_command: String,
}

/// The machine that the recipe is for.
#[derive(Debug, Clone)]
pub struct StarterMachine {
    pub device: Device,
    /// In words.
    pub name: String,
    /// `None` if the system does not say.
    pub free_bytes: Option<u64>,
}

/// A recipe as text, and the peak memory that is planned for it.
#[derive(Debug, Clone)]
pub struct FittedRecipe {
    pub text: String,
    pub peak_bytes: u64,
    /// Why it does not compute in the dtype of the weights, if so.
    pub dtype_note: Option<String>,
    /// How good its heads may become, if there are too few rows.
    pub few_tokens_note: Option<String>,
}

/// Why there is no recipe.
#[derive(Debug, thiserror::Error)]
pub enum StarterRecipeError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Rows(#[from] DataError),
    /// Not even the smallest run fits.
    #[error(
        "the smallest run of {stage} on this backbone needs {:.1} GiB, and {name} has {:.1} GiB free; close other programs, use a machine \
         with more memory, or a smaller backbone{advice}",
        *needed as f64 / GIB, *free as f64 / GIB
    )]
    TooLarge { stage: &'static str, name: String, needed: u64, free: u64, advice: &'static str },
}

const GIB: f64 = (1_u64 << 30) as f64;

/// What a run does without, to need less memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Savings {
    eight_bit_moments: bool,
    recompute: bool,
    nf4: bool,
    shared_lm_head: bool,
}

/// Numbers that follow from the rows.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RunLength {
    batch: usize,
    epochs: usize,
    /// A tenth of the run is longer than the longest warm-up.
    has_long_warmup: bool,
    /// Optimizer steps between evaluations.
    eval_every: usize,
    /// Optimizer steps between checkpoints.
    save_every: usize,
}

impl StarterStage {
    fn name(self) -> &'static str {
        match self {
            Self::Medusa1 => "Medusa-1",
            Self::Medusa2 => "Medusa-2",
        }
    }

    /// From the most exact and fastest run to the smallest one.
    fn ladder(self) -> Vec<Savings> {
        let none = Savings::default();
        let recompute = Savings { recompute: self == Self::Medusa2, ..none };
        let eight_bit_moments = Savings { eight_bit_moments: true, ..recompute };
        let nf4 = Savings { nf4: true, ..eight_bit_moments };
        let mut ladder = vec![none, recompute, eight_bit_moments, nf4, Savings { shared_lm_head: true, ..nf4 }];
        ladder.dedup();
        ladder
    }
}

impl StarterRecipe {
    /// The keys that every recipe for the device has, for reading the rows.
    pub fn shortest(&self, device: Device) -> String {
        let stage = match self.stage {
            StarterStage::Medusa1 => "[stage.medusa1]",
            StarterStage::Medusa2 if self.self_distillation => {
                "[stage.medusa2]\nself_distillation = true\n[stage.medusa2.lora]"
            }
            StarterStage::Medusa2 => "[stage.medusa2.lora]",
        };
        let (path, train, template) = (quoted(&self.backbone), list(&self.data), self.template());
        let mut text =
            format!("[backbone]\npath = {path}\n\n{stage}\n\n[data]\ntrain = {train}\nchat_template = {template}\n");
        if !self.validation.is_empty() {
            let _ = writeln!(text, "validation = {}", list(&self.validation)); // a String takes any text
        }
        if let Some(columns) = &self.columns {
            let _ = writeln!(text, "columns = {}", columns.to_toml()); // as above
        }
        if self.heads != HeadsArchitecture::Medusa {
            let _ = write!(text, "\n[heads]\narchitecture = {}\nshared_w2 = true\n", quoted(self.heads.name())); // as above
            if device == Device::Cpu {
                let _ = writeln!(text, "medusa_num_heads = {HEADS_ON_A_CPU}"); // as above
            }
        }
        text
    }

    /// The recipe with the fewest savings that fits into the machine's memory, and the largest micro batch with these. `checked` is the run of
    /// [`StarterRecipe::shortest`], read as `shortest`.
    ///
    /// # Errors
    /// [`StarterRecipeError`].
    pub fn fitted(
        &self,
        file: &Path,
        shortest: &Recipe,
        checked: &CheckedRun,
        machine: &StarterMachine,
    ) -> Result<FittedRecipe, StarterRecipeError> {
        let rows = checked.train_report.counts.whole_rows();
        let validation_fraction = if self.validation.is_empty() { held_out(rows) } else { None };
        let tokens = checked.train_report.counts.tokens_with_loss;
        let state_bytes = checked.state_bytes(shortest.backbone.dtype.kind());
        let keeps_states = self.stage == StarterStage::Medusa1 && state_bytes <= MOST_HIDDEN_STATES;
        let aim = if keeps_states { TOKENS_OF_A_CACHED_RUN } else { TOKENS_OF_A_RUN };
        let (sequences, held_out) = (checked.sequence_counts().0, validation_fraction.unwrap_or(0.0));
        let length = RunLength::of(sequences, held_out, aim.div_ceil(tokens.max(1)));
        let tokens_of_a_step = (length.batch * checked.pack_report.tokens) as f64 / sequences.max(1) as f64;
        let learning_rate = match self.stage {
            StarterStage::Medusa1 => learning_rate(tokens_of_a_step, checked.hidden_size()),
            StarterStage::Medusa2 => shortest.optimizer.learning_rate.get(),
        };
        let guessed = checked.draft_vocabulary_with(GUESSED_LABELS, FEWEST_GUESSED)?;
        // However short the rows are, all packed sequences but one are longer than half of `max_length`: two shorter ones would be one.
        let largest = (TOKENS_OF_A_PASS / shortest.data.max_length.get()).max(1);
        let micro_batches: Vec<usize> = (0..=length.batch.ilog2()).rev().map(|power| 1 << power).collect();
        let stored = stored_dtype(Path::new(&checked.plan.backbone.path)).ok().flatten();
        let slow = stored.filter(|stored| *stored != shortest.backbone.dtype).map(|_| FLOAT16);
        let mut smallest = u64::MAX;
        for savings in self.stage.ladder() {
            for &micro_batch in micro_batches.iter().filter(|&&micro_batch| micro_batch <= largest) {
                let text = self.text(
                    shortest,
                    &Choice {
                        savings,
                        micro_batch,
                        length,
                        validation_fraction,
                        slow,
                        guessed,
                        keeps_states,
                        learning_rate,
                    },
                    machine,
                );
                let plan = Recipe::parse(file, &text)?.plan(machine.device);
                let peak_bytes = checked.memory_of(&plan).peak_on(machine.device);
                smallest = smallest.min(peak_bytes);
                if machine.free_bytes.is_none_or(|free_bytes| memory::holds(free_bytes, peak_bytes)) {
                    let dtype_note = slow.map(|slow| format!("dtype = \"{}\": {slow}", shortest.backbone.dtype));
                    return Ok(FittedRecipe { text, peak_bytes, dtype_note, few_tokens_note: few_tokens_note(tokens) });
                }
            }
        }
        let advice = match self.stage {
            StarterStage::Medusa1 => "",
            StarterStage::Medusa2 => ", or --stage medusa1",
        };
        let (stage, name, free) = (self.stage.name(), machine.name.clone(), machine.free_bytes.unwrap_or_default());
        Err(StarterRecipeError::TooLarge { stage, name, needed: smallest, free, advice })
    }

    fn template(&self) -> String {
        quoted(&String::from(self.chat_template.clone()))
    }

    fn text(&self, shortest: &Recipe, choice: &Choice, machine: &StarterMachine) -> String {
        let mut out = self.head(machine);
        let mut table = |name: &str, lines: &[Line]| {
            let lines = lines.iter().map(|(line, comment)| match *comment {
                "" => format!("{line}\n"),
                comment => format!("{line:<35} # {comment}\n"),
            });
            let _ = write!(out, "\n[{name}]\n{}", lines.collect::<String>()); // a String takes any text
        };
        table("backbone", &self.backbone_lines(shortest, choice));
        table("heads", &heads_lines(shortest, choice));
        match &shortest.stage {
            Stage::Medusa1(_) => table("stage.medusa1", &[]),
            Stage::Medusa2(config) => {
                let coefficient = format!("medusa_heads_coefficient = {:?}", config.medusa_heads_coefficient.get());
                let distils = ("self_distillation = true".into(), "keep what the backbone says");
                let lines = [(coefficient, "λ0, the weight of the heads' loss"), distils];
                table("stage.medusa2", &lines[..1 + usize::from(config.self_distillation)]);
                config.lora.iter().for_each(|lora| table("stage.medusa2.lora", &lora_lines(lora)));
            }
        }
        table("data", &self.data_lines(shortest, choice));
        table("optimizer", &optimizer_lines(shortest, choice));
        let warmup = match choice.length.has_long_warmup {
            true => (format!("warmup_steps = {LONGEST_WARMUP}"), "optimizer steps from 0 to learning_rate"),
            false => (format!("warmup_ratio = {WARMUP}"), "part of the run from 0 to learning_rate"),
        };
        table("schedule", &[("name = \"cosine\"".into(), ""), warmup]);
        table("train", &self.train_lines(shortest, choice));
        out
    }

    fn head(&self, machine: &StarterMachine) -> String {
        let train = &self.train_command;
        let what = match self.stage {
            StarterStage::Medusa1 => "Medusa-1: trains heads; the backbone stays as it is",
            StarterStage::Medusa2 => "Medusa-2: trains heads and adapters of the backbone",
        };
        let memory =
            machine.free_bytes.map_or_else(|| "unknown".into(), |free| format!("{:.1} GiB", free as f64 / GIB));
        format!(
            "# {what}.\n#\n#   {train} --check    # plan and defaults\n#   {train}\n#\n\
             # Written by `medusa init` for {} (free memory: {memory}).\n# All keys: docs/training.md\n",
            machine.name
        )
    }

    fn backbone_lines(&self, shortest: &Recipe, choice: &Choice) -> Vec<Line> {
        let mut lines = vec![
            (format!("path = {}", quoted(&self.backbone)), ""),
            (format!("dtype = \"{}\"", shortest.backbone.dtype), choice.slow.unwrap_or("what it computes in")),
        ];
        if choice.savings.nf4 {
            lines.push(("quantization = \"nf4\"".into(), "4-bit weights, to fit into the memory"));
        }
        lines
    }

    fn data_lines(&self, shortest: &Recipe, choice: &Choice) -> Vec<Line> {
        let mut lines = vec![(format!("train = {}", list(&self.data)), "")];
        lines.push(match (choice.validation_fraction, &self.validation[..]) {
            (Some(part), _) => (format!("validation_fraction = {part}"), "held out, for evaluations during the run"),
            (None, []) => ("# validation = [\"…\"]".into(), "too few rows to hold some out"),
            (None, validation) => (format!("validation = {}", list(validation)), "for evaluations during the run"),
        });
        if let Some(columns) = &self.columns {
            lines.push((format!("columns = {}", columns.to_toml()), ""));
        }
        if self.chat_template != TemplateChoice::Tokenizer {
            lines.push((format!("chat_template = {}", self.template()), "renders conversations"));
        }
        lines.push((format!("max_length = {}", shortest.data.max_length), "tokens per sequence"));
        lines
    }

    fn train_lines(&self, shortest: &Recipe, choice: &Choice) -> Vec<Line> {
        let Choice { savings, micro_batch, length, validation_fraction, .. } = *choice;
        let accumulated = length.batch / micro_batch;
        let mut lines = vec![
            (format!("output_dir = {}", quoted(&shortest.train.output_dir.to_string_lossy())), ""),
            (format!("epochs = {}", length.epochs), "raise it and --resume to train longer"),
            (format!("micro_batch_size = {micro_batch}"), "sequences in memory at a time"),
            (format!("gradient_accumulation_steps = {accumulated}"), "micro batches per optimizer step"),
            (format!("save_every = {}", length.save_every), "optimizer steps between checkpoints"),
        ];
        if validation_fraction.is_some() || !self.validation.is_empty() {
            lines.push((format!("eval_every = {}", length.eval_every), "and between evaluations"));
        }
        if choice.keeps_states {
            let folder = shortest.train.output_dir.with_file_name(HIDDEN_STATES);
            let folder = quoted(&folder.to_string_lossy());
            lines.push((format!("hidden_state_cache = {folder}"), "skips the backbone later"));
        }
        if savings.recompute {
            lines.push(("recompute = true".into(), "slower, and fits into the memory"));
        }
        lines
    }
}

/// The text of a recipe whose training starts from these heads.
pub fn from_heads(text: &str, heads: &Path) -> String {
    let start = format!("[heads]\ninit_from = {} # train them first\n", quoted(&heads.to_string_lossy()));
    text.replacen("[heads]\n", &start, 1)
}

/// A line of a recipe and its comment.
type Line = (String, &'static str);

#[derive(Debug, Clone, Copy)]
struct Choice {
    savings: Savings,
    micro_batch: usize,
    length: RunLength,
    validation_fraction: Option<f64>,
    /// Why it does not compute in the dtype of the weights, if so.
    slow: Option<&'static str>,
    /// How many tokens heads with a W2 guess, if not all.
    guessed: Option<usize>,
    /// The hidden states are cached.
    keeps_states: bool,
    learning_rate: f64,
}

fn few_tokens_note(tokens: usize) -> Option<String> {
    (tokens < FEW_TOKENS).then(|| {
        format!(
            "the rows have {tokens} tokens to train on; below {FEW_TOKENS} heads guess badly: let the backbone answer more prompts \
             (medusa distill)"
        )
    })
}

fn heads_lines(shortest: &Recipe, choice: &Choice) -> Vec<Line> {
    let mut lines = vec![
        (format!("medusa_num_heads = {}", shortest.heads.medusa_num_heads), "tokens guessed beyond the next one"),
        (format!("medusa_num_layers = {}", shortest.heads.medusa_num_layers), ""),
    ];
    if let Some(architecture) = shortest.heads.architecture.heads()
        && architecture != HeadsArchitecture::Medusa
    {
        let name = quoted(architecture.name());
        lines.insert(0, (format!("architecture = {name}"), "heads that read the guesses before theirs"));
    }
    if shortest.heads.shared_w2 && !choice.savings.shared_lm_head {
        lines.push(("shared_w2 = true".into(), "one projection to the vocabulary for all"));
    }
    if !choice.savings.shared_lm_head {
        let size = |size| (format!("draft_vocab_size = {size}"), "the most frequent tokens");
        lines.extend(choice.guessed.map(size));
    }
    if choice.savings.shared_lm_head {
        lines.push(("shared_lm_head = true".into(), "no projections of their own, to fit"));
    }
    lines
}

fn optimizer_lines(shortest: &Recipe, choice: &Choice) -> Vec<Line> {
    let mut lines = vec![(format!("learning_rate = {}", choice.learning_rate), "peak rate")];
    if let Some(multiplier) = shortest.optimizer.medusa_lr_multiplier {
        let comment = "the heads' rate ÷ the adapters'";
        lines.push((format!("medusa_lr_multiplier = {:?}", multiplier.get()), comment));
    }
    if choice.savings.eight_bit_moments {
        lines.insert(0, ("name = \"adamw8bit\"".into(), "a quarter of the memory of \"adamw\""));
    }
    lines
}

fn lora_lines(lora: &LoraConfig) -> [Line; 3] {
    [
        (format!("rank = {}", lora.rank), "adapters on all linear layers"),
        (format!("alpha = {:?}", lora.alpha.get()), ""),
        (format!("dropout = {LORA_DROPOUT}"), ""),
    ]
}

/// With two digits.
fn learning_rate(tokens_of_a_step: f64, hidden_size: i64) -> f64 {
    let by_tokens = LEARNING_RATE * (tokens_of_a_step / TOKENS_OF_LEARNING_RATE).sqrt();
    let most = PAPER_LEARNING_RATE * (PAPER_HIDDEN_SIZE / hidden_size as f64).max(1.0);
    format!("{:.1e}", by_tokens.min(most)).parse().expect("a number")
}

/// Part of the rows that is held out for evaluations, with one digit.
fn held_out(rows: usize) -> Option<f64> {
    let part = (VALIDATION_ROWS / rows as f64).min(0.1);
    (rows >= FEWEST_TO_SPLIT).then(|| format!("{part:.0e}").parse().expect("a number"))
}

impl RunLength {
    /// `held_out`: the part that is not trained on. `by_tokens`: epochs with the aimed tokens.
    fn of(sequences: usize, held_out: f64, by_tokens: usize) -> Self {
        let training = (sequences as f64 * (1.0 - held_out)).ceil() as usize;
        let batch = 1 << (training / STEPS_OF_AN_EPOCH).clamp(1, LARGEST_BATCH).ilog2();
        let steps_per_epoch = training.div_ceil(batch).max(1);
        let by_tokens = by_tokens.min(MOST_EPOCHS_BY_TOKENS);
        let epochs = STEPS_OF_A_RUN.div_ceil(steps_per_epoch).max(by_tokens).clamp(2, MOST_EPOCHS);
        let steps = epochs * steps_per_epoch;
        let tenth = steps.div_ceil(EVALUATIONS);
        Self {
            batch,
            epochs,
            has_long_warmup: tenth > LONGEST_WARMUP,
            eval_every: tenth,
            save_every: tenth.min(SAVE_EVERY),
        }
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_and_epochs_follow_the_number_of_sequences() {
        let length = |rows, sequences, tokens| {
            let part = held_out(rows);
            let RunLength { batch, epochs, has_long_warmup, eval_every, save_every } =
                RunLength::of(sequences, part.unwrap_or(0.0), TOKENS_OF_A_RUN.div_ceil(tokens));
            (batch, epochs, has_long_warmup, eval_every, save_every, part)
        };
        assert_eq!(length(1_000_000, 1_000_000, 250_000_000), (64, 2, true, 3125, 200, Some(0.0001)));
        assert_eq!(length(60_000, 20_000, 15_000_000), (64, 2, true, 63, 63, Some(0.002)));
        assert_eq!(length(2_000, 450, 1_000_000), (4, 2, false, 22, 22, Some(0.05)));
        assert_eq!(
            length(2_000, 225, 300_000),
            (2, 4, true, 43, 43, Some(0.05)),
            "so many epochs as reach the aimed tokens"
        );
        assert_eq!(length(100, 30, 500_000), (1, 8, false, 22, 22, Some(0.1)));
        assert_eq!(length(3, 1, 500), (1, 20, false, 2, 2, None));
    }

    #[test]
    fn learning_rates_go_by_the_tokens_of_a_step_up_to_the_papers() {
        let rates = [(1024.0, 576), (2048.0, 576), (4096.0, 576), (16384.0, 576), (131_072.0, 576), (131_072.0, 4096)];
        let rates = rates.map(|(tokens, hidden_size)| learning_rate(tokens, hidden_size));
        assert_eq!(rates, [1e-3, 1.4e-3, 2e-3, 4e-3, 7.1e-3, 1e-3]);
        assert_eq!(learning_rate(131_072.0, 8192), 1e-3);
    }

    #[test]
    fn only_medusa_2_recomputes() {
        let medusa1 = StarterStage::Medusa1.ladder();
        assert_eq!(medusa1.len(), 4, "nothing of a frozen backbone is recomputed");
        assert!(medusa1.iter().all(|savings| !savings.recompute));
        let medusa2 = StarterStage::Medusa2.ladder();
        assert!(medusa2.len() == 5 && medusa2[3..].iter().all(|savings| savings.nf4 && savings.recompute));
    }
}
