//! The command line, one file a verb. Errors become text and exit codes here and nowhere else.
//!
//! Results go to stdout, text for people to stderr. Exit status: 0 done; 1 failed; 2 the command line or the recipe is
//! wrong; 130 interrupted.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;

use self::downloads::Place;
use crate::data::chat_template::TemplateError;
use crate::hub::{Split, Wanted};
use crate::recipe::RecipeError;
use crate::torch::{self, DeviceChoice, Dtype};
use crate::train::error::TrainError;

pub mod bench;
pub mod calibrate;
pub mod chat;
pub mod data;
pub mod decoder;
pub mod distill;
pub mod doctor;
mod downloads;
pub mod engine;
pub mod export;
pub mod generate;
pub mod gpu_check;
pub mod inspect;
mod outputs;
pub mod push;
mod reading;
pub mod report;
pub mod train;
pub mod tree;

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;
const INTERRUPTED: u8 = 130; // 128 + SIGINT, as shells report it

/// Flags that every verb takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Common flags")]
pub struct CommonFlags {
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// What to compute in: float32, bfloat16 or float16 [default: the backbone's own].
    #[arg(long, global = true, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Seeds everything that is drawn.
    #[arg(long, global = true, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// One JSON object a line on stdout, and nothing else there.
    #[arg(long, global = true)]
    pub json: bool,
    /// No text on stderr but errors.
    #[arg(long, global = true)]
    pub quiet: bool,
    /// Whether `--seed` was typed: training refuses it, its seed is the recipe's.
    #[arg(skip)]
    pub seed_was_given: bool,
}

impl CommonFlags {
    /// A line for people, on stderr; nothing with `--quiet`.
    pub fn say(&self, line: impl Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{line}"); // a closed stderr is no reason to stop
        }
    }
}

/// Train Medusa heads for Llama-family models, measure them, search their tree, decode with them.
#[derive(Debug, Parser)]
#[command(name = "medusa", version, arg_required_else_help = true, after_help = MEDUSA_EXAMPLE)]
struct Medusa {
    #[command(flatten)]
    common: CommonFlags,
    #[command(subcommand)]
    verb: Verb,
}

/// Train Medusa heads as a recipe says; the same as `medusa train`.
#[derive(Debug, Parser)]
#[command(name = "medusa-train", version, arg_required_else_help = true)]
struct MedusaTrain {
    #[command(flatten)]
    common: CommonFlags,
    #[command(flatten)]
    args: train::TrainArgs,
}

const MEDUSA_EXAMPLE: &str = "Example:\n  medusa train recipes/tiny_stage1.toml";

#[derive(Debug, Subcommand)]
enum Verb {
    Train(train::TrainArgs),
    Data(data::DataArgs),
    Inspect(inspect::InspectArgs),
    Distill(distill::DistillArgs),
    Calibrate(calibrate::CalibrateArgs),
    Tree(tree::TreeArgs),
    Generate(generate::GenerateArgs),
    Chat(chat::ChatArgs),
    Bench(bench::BenchArgs),
    Export(export::ExportArgs),
    Push(push::PushArgs),
    Report(report::ReportArgs),
    Doctor(doctor::DoctorArgs),
    #[command(hide = true)]
    GpuCheck(gpu_check::GpuCheckArgs),
}

impl Verb {
    /// Paths that may be ids of the Hub instead, in the order in which they are brought here: the largest last, so that what is wrong
    /// with the others is told before.
    fn places(&mut self) -> Vec<Place<'_>> {
        let places = match self {
            Verb::Distill(args) => {
                let heads = args.heads.as_mut().map(Place::heads);
                vec![Some(Place::File(&mut args.prompts)), heads, Some(Place::backbone(&mut args.backbone))]
            }
            Verb::Calibrate(args) => vec![
                args.prompts.as_mut().map(Place::File),
                Some(Place::Data(&mut args.data, Split::HeldOut)),
                Some(Place::heads(&mut args.heads)),
                Some(Place::backbone(&mut args.backbone)),
            ],
            Verb::Data(args) => {
                let backbone = Place::Model(&mut args.backbone, Wanted::BackboneWithoutWeights);
                vec![Some(Place::Data(&mut args.files, Split::Train)), Some(backbone)]
            }
            Verb::Tree(args) => {
                vec![args.heads.as_mut().map(Place::heads), args.backbone.as_mut().map(Place::backbone)]
            }
            Verb::Generate(args) => {
                let (prompts, heads) = (args.prompts.as_mut().map(Place::File), args.heads.as_mut().map(Place::heads));
                vec![prompts, heads, Some(Place::backbone(&mut args.backbone))]
            }
            Verb::Chat(args) => {
                vec![args.heads.as_mut().map(Place::heads), Some(Place::backbone(&mut args.backbone))]
            }
            Verb::Bench(args) => {
                let prompts = Some(Place::File(&mut args.prompts));
                vec![prompts, Some(Place::heads(&mut args.heads)), Some(Place::backbone(&mut args.backbone))]
            }
            Verb::Export(args) => vec![Some(Place::heads(&mut args.heads))], // these say what of the backbone is needed
            Verb::Train(_)
            | Verb::Inspect(_)
            | Verb::Push(_)
            | Verb::Report(_)
            | Verb::Doctor(_)
            | Verb::GpuCheck(_) => Vec::new(), // a recipe is its own matter
        };
        places.into_iter().flatten().collect()
    }

    /// Files that the verb will write, and the flags that name them.
    fn outputs(&self) -> Vec<(&'static str, &Path)> {
        let outputs = match self {
            Verb::Calibrate(args) => vec![("--out", Some(&args.out))],
            Verb::Report(args) => vec![("--out", args.out.as_ref())],
            Verb::Tree(args) => {
                let measured = args.latency.as_ref().filter(|path| !path.exists());
                vec![("--out", args.out.as_ref()), ("--svg", args.svg.as_ref()), ("--latency", measured)]
            }
            Verb::Bench(args) => vec![("--csv", args.csv.as_ref())],
            Verb::Data(args) => vec![("--svg", args.svg.as_ref())],
            _ => Vec::new(),
        };
        outputs.into_iter().filter_map(|(flag, path)| Some((flag, path?.as_path()))).collect()
    }

    fn run(&self, common: &CommonFlags) -> anyhow::Result<()> {
        match self {
            Verb::Train(args) => train::run(args, common),
            Verb::Data(args) => data::run(args, common),
            Verb::Inspect(args) => inspect::run(args, common),
            Verb::Distill(args) => distill::run(args, common),
            Verb::Calibrate(args) => calibrate::run(args, common),
            Verb::Tree(args) => tree::run(args, common),
            Verb::Generate(args) => generate::run(args, common),
            Verb::Chat(args) => chat::run(args, common),
            Verb::Bench(args) => bench::run(args, common),
            Verb::Export(args) => export::run(args, common),
            Verb::Push(args) => push::run(args, common),
            Verb::Report(args) => report::run(args, common),
            Verb::Doctor(args) => doctor::run(args, common),
            Verb::GpuCheck(args) => gpu_check::run(args, common),
        }
    }
}

/// The program `medusa`: reads the command line, runs the verb, turns errors into text and an exit status.
pub fn medusa() -> ExitCode {
    let (Medusa { common, mut verb }, matches) = parse::<Medusa>();
    let common = with_source_of_seed(common, &matches);
    finish(&common, || {
        verb.outputs().into_iter().try_for_each(|(flag, path)| outputs::check(flag, path))?;
        downloads::fetch(verb.places(), &common)?;
        verb.run(&common)
    })
}

/// The program `medusa-train`: the verb `train` alone.
pub fn medusa_train() -> ExitCode {
    let (command, matches) = parse::<MedusaTrain>();
    let common = with_source_of_seed(command.common, &matches);
    finish(&common, || train::run(&command.args, &common))
}

/// Parses the command line, or ends the process as clap does: help with 0, a wrong command line with 2.
fn parse<P: CommandFactory + FromArgMatches>() -> (P, ArgMatches) {
    let matches = P::command().get_matches();
    let parsed = P::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut P::command()).exit());
    (parsed, matches)
}

fn with_source_of_seed(common: CommonFlags, matches: &ArgMatches) -> CommonFlags {
    let seed_was_given = matches.value_source("seed") == Some(ValueSource::CommandLine);
    CommonFlags { seed_was_given, ..common }
}

/// Runs a verb with signals watched and the accelerator open, and reports how it went.
fn finish(common: &CommonFlags, verb: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    torch::accelerator::open(); // libtorch keeps its first answer about CUDA: nothing may ask before
    let result = watch_signals().and_then(|()| torch::guard("the command", verb)?);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            common.say(error);
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => {
            report(&error);
            ExitCode::from(status(&error))
        }
    }
}

/// `error: …`, then one `caused by: …` line a cause that is not told yet: many errors quote theirs.
fn report(error: &anyhow::Error) {
    let mut told = format!("error: {error}");
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !told.contains(&cause) {
            told = format!("{told}\ncaused by: {cause}");
        }
    }
    let _ = writeln!(io::stderr(), "{told}"); // nowhere left to report a closed stderr
}

fn status(error: &anyhow::Error) -> u8 {
    let is_mistake = |error: &RecipeError| !matches!(error, RecipeError::Hub { .. }); // no network is nobody's mistake
    let is_usage = |cause: &(dyn Error + 'static)| {
        cause.is::<UsageError>()
            || cause.downcast_ref::<RecipeError>().is_some_and(is_mistake)
            || cause.downcast_ref::<TrainError>().is_some_and(TrainError::is_of_the_recipe)
            || cause.downcast_ref::<TemplateError>().is_some_and(TemplateError::is_no_template)
    };
    if error.chain().any(is_usage) { WRONG_USAGE } else { FAILED }
}

/// The command line asks for something that cannot be: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// The user stopped the work; the text says what was saved and how to go on. Exit status 130.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Interrupted(pub String);

/// Bytes for people.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes as people read many of them.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// A result for people, on stdout.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_line(line: impl Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// A result for programs: one JSON object on a line of stdout.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_json(object: &impl Serialize) -> anyhow::Result<()> {
    print_line(serde_json::to_string(object)?)
}

/// True once the user asked to stop (Ctrl-C, SIGTERM). From the first call on, the caller has to look at it and stop by
/// itself; a second Ctrl-C ends the process at once. Verbs that never call this end at the first.
pub fn interrupted() -> &'static AtomicBool {
    stop().store(false, Ordering::Relaxed);
    stop()
}

/// The next signal ends the process if this is true, and sets it if not; so it starts as true.
fn stop() -> &'static Arc<AtomicBool> {
    static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    STOP.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// Whether SIGTERM came: then a program that goes on after Ctrl-C ends, too.
fn terminated() -> bool {
    terminate().load(Ordering::Relaxed)
}

fn terminate() -> &'static Arc<AtomicBool> {
    static TERMINATE: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    TERMINATE.get_or_init(Arc::default)
}

fn watch_signals() -> anyhow::Result<()> {
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(terminate()))?;
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(stop()))?;
        signal_hook::flag::register(signal, Arc::clone(stop()))?;
    }
    Ok(())
}
