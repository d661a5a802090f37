//! The command line, one file a verb. Errors become text and exit codes here and nowhere else.
//!
//! Results go to stdout, text for people to stderr. Exit status: 0 done; 1 failed; 2 the command line or the recipe is
//! wrong; 130 interrupted.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::downloads::HubArgument;
use self::exit::{INTERRUPTED, report, status};
use crate::hub::{DataSplit, Wanted};
use crate::torch;

pub mod bench;
pub mod calibrate;
pub mod chat;
pub mod data;
pub mod decoder;
pub mod decoding;
pub mod distill;
pub mod doctor;
mod downloads;
pub mod drafter;
pub mod engine;
mod exit;
pub mod export;
mod flags;
pub mod generate;
pub mod inspect;
mod outputs;
mod print;
pub mod push;
mod reading;
pub mod report;
mod signals;
pub mod train;
pub mod tree;

pub use exit::{Interrupted, UsageError};
pub use flags::CommonFlags;
pub use print::{gibibytes, mebibytes, print_json, print_line};
pub use signals::interrupted;

/// Train Medusa heads for Llama-family models, measure them, search their tree, decode with them.
#[derive(Debug, Parser)]
#[command(name = "medusa", version, arg_required_else_help = true, after_help = MEDUSA_EXAMPLE)]
pub struct MedusaCommand {
    #[command(flatten)]
    common: CommonFlags,
    #[command(subcommand)]
    verb: Verb,
}

/// Train Medusa heads as a recipe says; the same as `medusa train`.
#[derive(Debug, Parser)]
#[command(name = "medusa-train", version, arg_required_else_help = true)]
pub struct MedusaTrainCommand {
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
}

impl Verb {
    /// Paths that may be ids of the Hub instead, in the order in which they are brought here: the largest last, so that what is wrong
    /// with the others is told before.
    fn places(&mut self) -> Vec<HubArgument<'_>> {
        let places = match self {
            Verb::Distill(args) => of_decoding(Some(&mut args.prompts), &mut args.heads, &mut args.backbone),
            Verb::Generate(args) => of_decoding(args.prompts.as_mut(), &mut args.heads, &mut args.backbone),
            Verb::Chat(args) => of_decoding(None, &mut args.heads, &mut args.backbone),
            Verb::Bench(args) => of_decoding(Some(&mut args.prompts), &mut args.heads, &mut args.backbone),
            Verb::Calibrate(args) => vec![
                args.prompts.as_mut().map(HubArgument::File),
                Some(HubArgument::Data(&mut args.data, DataSplit::HeldOut)),
                Some(HubArgument::heads(&mut args.heads)),
                Some(HubArgument::backbone(&mut args.backbone)),
            ],
            Verb::Data(args) => {
                let backbone = HubArgument::Model(&mut args.backbone, Wanted::BackboneWithoutWeights);
                vec![Some(HubArgument::Data(&mut args.files, DataSplit::Train)), Some(backbone)]
            }
            Verb::Tree(args) => {
                vec![args.heads.as_mut().map(HubArgument::heads), args.backbone.as_mut().map(HubArgument::backbone)]
            }
            Verb::Export(args) => vec![Some(HubArgument::heads(&mut args.heads))], // these say what of the backbone is needed
            // A recipe is its own matter.
            Verb::Train(_) | Verb::Inspect(_) | Verb::Push(_) | Verb::Report(_) | Verb::Doctor(_) => Vec::new(),
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
        }
    }
}

/// What commands that decode may take from the Hub.
fn of_decoding<'a>(
    prompts: Option<&'a mut PathBuf>,
    heads: &'a mut Option<PathBuf>,
    backbone: &'a mut PathBuf,
) -> Vec<Option<HubArgument<'a>>> {
    let heads = heads.as_mut().map(HubArgument::heads);
    vec![prompts.map(HubArgument::File), heads, Some(HubArgument::backbone(backbone))]
}

/// The program `medusa`: reads the command line, runs the verb, turns errors into text and an exit status.
pub fn medusa() -> ExitCode {
    let (MedusaCommand { common, mut verb }, matches) = parse::<MedusaCommand>();
    let common = with_source_of_seed(common, &matches);
    finish(&common, || {
        verb.outputs().into_iter().try_for_each(|(flag, path)| outputs::check(flag, path))?;
        downloads::fetch(verb.places(), &common)?;
        verb.run(&common)
    })
}

/// The program `medusa-train`: the verb `train` alone.
pub fn medusa_train() -> ExitCode {
    let (command, matches) = parse::<MedusaTrainCommand>();
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
pub fn finish(common: &CommonFlags, verb: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    torch::accelerator::open(); // libtorch keeps its first answer about CUDA: nothing may ask before
    let result = signals::watch().and_then(|()| torch::guard("the command", verb)?);
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
