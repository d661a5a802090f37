//! `medusa init`: writes a starter recipe that fits the machine.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;
use tch::Device;

use super::downloads::observed;
use super::reading::{check_data, watched};
use super::served::chat_template;
use super::{CommonFlags, UsageError, outputs, print_json, print_line};
use crate::data::chat_template::TemplateChoice;
use crate::data::column_names::ColumnNames;
use crate::draft::heads::layout::HeadsArchitecture;
use crate::files::{Claim, write_atomic};
use crate::formats::run_folder::{CALIBRATION, FINAL, LATENCY, TREE};
use crate::hub::id;
use crate::nvidia::device::Gpu;
use crate::plural::{counted, gibibytes, mebibytes};
use crate::recipe::expectation::Expectation;
use crate::recipe::starter::{self, FittedRecipe, StarterMachine, StarterRecipe, StarterStage};
use crate::recipe::{LoadedRecipe, Recipe, RecipeError, WrittenRecipe};
use crate::report::shell::quoted;
use crate::session::drafter::spec::DrafterName;
use crate::session::opened::OpenedBackbone;
use crate::torch::shared_gpus::SharedGpus;
use crate::torch::{DeviceChoice, device_name, memory};
use crate::train::checked::CheckedRun;
use crate::train::own_answers::wrote_rows;
use crate::train::plan::TrainPlan;
use crate::train::run_folder::check_output_dir;

const EXAMPLE: &str = "Example:\n  medusa init --backbone B --data chats.jsonl --out first.toml";

/// In the run's folder: prompts to decode, which the printed commands write.
const PROMPTS: &str = "prompts.jsonl";
const TEXT_PROMPT: &str = r#"{"prompt": "Once upon a time"}"#;
const CHAT_PROMPT: &str = r#"{"messages": [{"role": "user", "content": "Who are you?"}]}"#;

/// Write a commented recipe that fits this machine.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub struct InitArgs {
    /// Backbone: a folder, a GGUF file or a Hub id.
    #[arg(long, value_name = "B")]
    pub backbone: String,
    /// Training data: files, folders, globs or Hub data sets (owner/name); JSONL, JSON, CSV, TSV, text, Parquet or Arrow.
    #[arg(long, value_name = "F", required = true, num_args = 1..)]
    pub data: Vec<String>,
    /// Rows to evaluate and calibrate on, which training does not see. Without them a part of --data is held out for both.
    #[arg(long, value_name = "F", num_args = 1..)]
    pub validation: Vec<String>,
    /// Columns that rows are made of, if they have other names: prompt=question,completion=answer; also text=…, messages=…, or
    /// instruction=…,output=….
    #[arg(long, value_name = "KEY=COLUMN,…")]
    pub columns: Option<ColumnNames>,
    /// Skip and count malformed rows; the printed commands do the same.
    #[arg(long)]
    pub skip_bad_rows: bool,
    /// What to train: heads (medusa1), or first heads and then heads and adapters of the backbone (medusa2: two recipes).
    #[arg(long, value_enum, value_name = "STAGE", default_value = "medusa1")]
    pub stage: StageName,
    /// What guesses: Hydra heads, which read the guesses before theirs; they guess better, and no other server loads
    /// them. Or Medusa heads, which vLLM loads.
    #[arg(long, value_enum, value_name = "HEADS", default_value = "hydra")]
    pub drafter: HeadsName,
    /// Chat template for conversations: "tokenizer" (the backbone's own), a built-in name (vicuna, zephyr, llama-2, llama-3, chatml,
    /// mistral) or a .jinja file.
    #[arg(long, value_name = "TEMPLATE", default_value = "tokenizer", value_parser = chat_template)]
    pub chat_template: TemplateChoice,
    /// The recipe to write.
    #[arg(long, value_name = "FILE", default_value = "recipe.toml")]
    pub out: PathBuf,
}

/// `--stage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StageName {
    Medusa1,
    Medusa2,
}

/// `--drafter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HeadsName {
    Medusa,
    Hydra,
    #[value(name = "hydra++")]
    HydraPlusPlus,
}

/// Reads the rows, writes the recipe, for Medusa-2 also that of the heads which it starts from, and prints what comes next.
///
/// # Errors
/// An error in the backbone or the data, or a machine that is too small.
pub fn run(args: &InitArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let heads_out = (args.stage == StageName::Medusa2).then(|| heads_recipe(&args.out));
    let _claims = check_arguments(args, heads_out.as_deref(), common)?;
    let machine = machine(common)?;
    let plan = |out: &Path, stage| PlannedRecipe::new(args, out, stage, &machine, common);
    let heads = heads_out.as_deref().map(|out| plan(out, StarterStage::Medusa1)).transpose()?;
    let stage = if heads.is_some() { StarterStage::Medusa2 } else { StarterStage::Medusa1 };
    let planned = plan(&args.out, stage)?;
    let text = match &heads {
        Some(heads) => starter::from_heads(&planned.fitted.text, &heads.run.join(FINAL)),
        None => planned.fitted.text.clone(),
    };
    heads.iter().try_for_each(|heads| write(&heads.out, &heads.fitted.text))?;
    write(&args.out, &text)?;
    let next = next_commands(args, common, heads.as_ref(), &planned);
    let heads_expectation = heads.as_ref().map(|heads| heads.expectation(&machine, common)).transpose()?;
    let expectation = planned.expectation(&machine, common)?;
    if common.json {
        return print_json(
            &json!({"recipe": args.out, "heads_recipe": heads_out, "steps": planned.checked.total_steps,
            "expected_seconds": expectation.seconds, "expected": expectation.tokens_per_step,
            "peak_bytes": planned.fitted.peak_bytes, "free_bytes": machine.free_bytes, "device": device_name(machine.device),
            "next": next}),
        );
    }
    heads.iter().zip(&heads_expectation).for_each(|(heads, expectation)| heads.report(expectation, &machine, common));
    planned.report(&expectation, &machine, common);
    common.say("\nnext:");
    print_line(next.iter().map(|command| wrapped(command)).collect::<Vec<_>>().join("\n"))?;
    common.say("\nbench and generate read prompts.jsonl: replace its prompt by your own");
    if planned.checked.held_out().is_none() {
        common.say(
            "too few rows to hold any out, so calibrate measures on the training data; give others by --validation",
        );
    }
    Ok(())
}

/// The recipe of the heads that a recipe of Medusa-2 starts from.
fn heads_recipe(out: &Path) -> PathBuf {
    out.with_file_name(format!("{}_heads.toml", out.file_stem().unwrap_or_default().to_string_lossy()))
}

fn write(out: &Path, text: &str) -> anyhow::Result<()> {
    write_atomic(out, |file| file.write_all(text.as_bytes())).with_context(|| format!("cannot write {}", out.display()))
}

/// A recipe that was checked as `--check` would.
struct PlannedRecipe {
    out: PathBuf,
    /// The folder of its run.
    run: PathBuf,
    fitted: FittedRecipe,
    checked: CheckedRun,
    heads: HeadsArchitecture,
    /// The backbone wrote its rows, and Medusa-2 learns from the backbone.
    distils: bool,
}

impl PlannedRecipe {
    fn new(
        args: &InitArgs,
        out: &Path,
        stage: StarterStage,
        machine: &StarterMachine,
        common: &CommonFlags,
    ) -> anyhow::Result<Self> {
        let mut starter = starter(args, out, stage, common);
        check_run_folder(out, &starter, machine.device)?;
        let read = |text| checked(args, out, text, machine.device, common);
        let (mut shortest, mut rows) = read(starter.shortest(machine.device))?;
        if stage == StarterStage::Medusa2 && wrote_rows(&rows)? {
            starter.self_distillation = true;
            (shortest, rows) = read(starter.shortest(machine.device))?;
        }
        let fitted = starter.fitted(out, &shortest.recipe, &rows, machine)?;
        drop(rows);
        let (recipe, checked) = read(fitted.text.clone())?;
        let (run, heads, distils) = (recipe.recipe.train.output_dir, starter.heads, starter.self_distillation);
        Ok(Self { out: out.into(), run, fitted, checked, heads, distils })
    }

    fn expectation(&self, machine: &StarterMachine, common: &CommonFlags) -> anyhow::Result<Expectation> {
        if self.checked.has_weights {
            common.say(format_args!("timing {} on the backbone's first layers", self.out.display()));
        }
        Ok(Expectation::of(&self.checked, self.heads, machine.device)?)
    }

    fn report(&self, expectation: &Expectation, machine: &StarterMachine, common: &CommonFlags) {
        let (out, steps) = (self.out.display(), counted(self.checked.total_steps, "optimizer step"));
        let free = machine.free_bytes.map_or_else(String::new, |free| format!(" of {} free", gibibytes(free)));
        let (peak, name) = (mebibytes(self.fitted.peak_bytes), &machine.name);
        common.say(format_args!("wrote {out}: {steps}; planned peak {peak}{free} on {name}"));
        common.say(format_args!("expected: {expectation}"));
        for note in self.fitted.dtype_note.iter().chain(&self.fitted.few_tokens_note) {
            common.say(note);
        }
        if self.distils {
            common.say(
                "self_distillation = true: this backbone wrote the rows, so the adapters learn to keep what it says",
            );
        }
        let reports = self.checked.reports().map(|report| &report.counts.others);
        for others in reports.filter(|others| !others.not_read.is_empty()) {
            common.say(format_args!("not read: {others}"));
        }
    }
}

fn starter(args: &InitArgs, out: &Path, stage: StarterStage, common: &CommonFlags) -> StarterRecipe {
    StarterRecipe {
        backbone: args.backbone.clone(),
        data: args.data.clone(),
        validation: args.validation.clone(),
        columns: args.columns.clone(),
        chat_template: args.chat_template.clone(),
        stage,
        self_distillation: false,
        heads: match args.drafter {
            HeadsName::Medusa => HeadsArchitecture::Medusa,
            HeadsName::Hydra => HeadsArchitecture::Hydra,
            HeadsName::HydraPlusPlus => HeadsArchitecture::HydraPlusPlus,
        },
        train_command: train_command(args, out, common),
    }
}

/// A command in lines of at most 80 columns where its flags allow it, as a shell reads them.
fn wrapped(command: &str) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for (at, part) in command.split(" --").enumerate() {
        let part = if at == 0 { part.to_owned() } else { format!(" --{part}") };
        if column > 0 && column + part.len() > 78 {
            lines.push_str(" \\\n   ");
            column = 3;
        }
        column += part.len();
        lines.push_str(&part);
    }
    lines
}

/// Refuses what cannot become a recipe, before any download, and claims the recipes' files: `--out`, and one more.
fn check_arguments(args: &InitArgs, more: Option<&Path>, common: &CommonFlags) -> anyhow::Result<Vec<Claim>> {
    if args.out.to_string_lossy().contains(char::is_control) {
        return Err(
            UsageError(format!("--out {:?}: a file name without control characters is expected", args.out)).into()
        );
    }
    let data = [args.data.as_slice(), &args.validation].concat();
    let claim = |out| {
        outputs::check_is_no_data("--out", out, &data)?;
        outputs::claim("--out", out, common)
    };
    let claims = [Some(args.out.as_path()), more].into_iter().flatten().map(claim).collect::<anyhow::Result<_>>()?;
    if id::model(&args.backbone).is_none() {
        OpenedBackbone::open(Path::new(&args.backbone))?;
    }
    check_data("--data: ", &args.data)?;
    check_data("--validation: ", &args.validation)?;
    match &args.chat_template {
        TemplateChoice::File(path) if !path.is_file() => {
            let path = path.display();
            Err(UsageError(format!("--chat-template {path} does not exist; give a .jinja file or a built-in name"))
                .into())
        }
        _ => Ok(claims),
    }
}

/// The run's folder has the recipe's name: it must be free, too.
fn check_run_folder(out: &Path, starter: &StarterRecipe, device: Device) -> anyhow::Result<()> {
    let run = Recipe::parse(out, &starter.shortest(device))?.train.output_dir;
    let (out, shown) = (out.display(), run.display());
    let taken =
        |_| UsageError(format!("--out {out}: its run would be in {shown}, which holds another run; name another file"));
    Ok(check_output_dir(&run, false).map_err(taken)?)
}

fn machine(common: &CommonFlags) -> anyhow::Result<StarterMachine> {
    let device = common.device.resolve()?;
    let free_bytes = match device {
        Device::Cpu => memory::machine().map(|(_, available)| available),
        gpu => match Gpu::open(gpu).and_then(|gpu| gpu.free_bytes()) {
            Ok(free) => Some(free),
            Err(error) => {
                common
                    .say(format_args!("the GPU's free memory is unknown ({error}): the recipe does not reduce memory"));
                None
            }
        },
    };
    Ok(StarterMachine { device, name: device_name(device), free_bytes })
}

/// Reads a recipe's text and its rows.
fn checked(
    args: &InitArgs,
    out: &Path,
    text: String,
    device: Device,
    common: &CommonFlags,
) -> anyhow::Result<(LoadedRecipe, CheckedRun)> {
    let written = WrittenRecipe::parse(out, text)?;
    let loaded = observed(common, |watch| written.fetch(device, SharedGpus::alone(device), watch)).map_err(as_flag)?;
    let plan = TrainPlan { skip_bad_rows: args.skip_bad_rows, ..loaded.plan(device) };
    let checked = watched(common, |watch| CheckedRun::load(plan, watch))?;
    Ok((loaded, checked))
}

/// An error of the Hub names the flag: the recipe that it points into is not written yet.
fn as_flag(error: RecipeError) -> anyhow::Error {
    let RecipeError::Hub { key, error, .. } = error else { return error.into() };
    let flag = match key {
        "data.train" => "--data",
        "data.validation" => "--validation",
        _ => "--backbone",
    };
    let text = format!("{flag}: {error}");
    anyhow::Error::from(*error).context(text)
}

/// `medusa-train` with the recipe and the flags that were typed.
fn train_command(args: &InitArgs, out: &Path, common: &CommonFlags) -> String {
    let skip = if args.skip_bad_rows { " --skip-bad-rows" } else { "" };
    format!("medusa-train {}{}{skip}", quoted(&out.to_string_lossy()), machine_flags(common))
}

/// `--device` and `--threads`, if they were typed: the recipe fits the machine with them.
fn machine_flags(common: &CommonFlags) -> String {
    let device = match common.device {
        DeviceChoice::Auto => String::new(),
        DeviceChoice::Cpu => " --device cpu".into(),
        DeviceChoice::Cuda(index) => format!(" --device cuda:{index}"),
    };
    device + &common.threads.map_or_else(String::new, |threads| format!(" --threads {threads}"))
}

/// The commands from the recipe to text, one a line.
fn next_commands(
    args: &InitArgs,
    common: &CommonFlags,
    heads_first: Option<&PlannedRecipe>,
    planned: &PlannedRecipe,
) -> Vec<String> {
    let train = |planned: &PlannedRecipe| train_command(args, &planned.out, common);
    let (backbone, flags) = (quoted(&args.backbone), machine_flags(common));
    let file = |name: &str| quoted(&planned.run.join(name).to_string_lossy());
    let [heads, calibration, latency, tree, prompts] = [FINAL, CALIBRATION, LATENCY, TREE, PROMPTS].map(file);
    let data = match planned.checked.held_out() {
        Some(_) => String::new(), // calibrate finds them by the run
        None => training_data(args),
    };
    let prompt = if planned.checked.has_chat_template() { CHAT_PROMPT } else { TEXT_PROMPT };
    let drafter = drafter_flag(planned);
    let decode = format!("--backbone {backbone} --heads {heads} --tree {tree}{drafter}{flags}");
    let (first, train) = (heads_first.map(train), train(planned));
    let training = first.into_iter().chain([format!("{train} --check"), train]);
    let after = [
        format!("medusa calibrate --backbone {backbone} --heads {heads}{data} --out {calibration}{flags}"),
        format!(
            "medusa tree --calibration {calibration} --latency {latency} --backbone {backbone} --heads {heads} --out {tree}{flags}"
        ),
        format!("echo '{prompt}' \\\n    > {prompts}"),
        format!("medusa generate {decode} --prompts {prompts}"),
        format!("medusa bench {decode} --prompts {prompts}"),
    ];
    training.chain(after).collect()
}

/// Joins the heads with prompt lookup, which was faster in every category of the proving ground; the CUDA engine has no joined drafters.
fn drafter_flag(planned: &PlannedRecipe) -> String {
    match planned.checked.plan.device {
        Device::Cpu => format!(" --drafter {}+{}", planned.heads.name(), DrafterName::Ngram.text()),
        _ => String::new(),
    }
}

/// Flags of `medusa calibrate` for the rows of training.
fn training_data(args: &InitArgs) -> String {
    let files = args.data.iter().map(|file| quoted(file)).collect::<Vec<_>>().join(" ");
    let columns = args.columns.as_ref().map(|columns| format!(" --columns {}", quoted(&columns.to_string())));
    let skip = if args.skip_bad_rows { " --skip-bad-rows" } else { "" };
    format!(" --data {files}{}{skip}", columns.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_commands_are_broken_before_a_flag() {
        assert_eq!(wrapped("medusa-train r.toml --check"), "medusa-train r.toml --check");
        let long = format!("medusa a --b {} --c {} --d e", "b".repeat(40), "c".repeat(40));
        let lines = wrapped(&long);
        assert_eq!(lines.lines().count(), 2);
        assert!(lines.lines().all(|line| line.len() <= 80), "{lines}");
        assert_eq!(lines.replace(" \\\n   ", ""), long);
    }
}
