//! The command line, one file per verb. Only this module turns errors into text and exit codes.
//!
//! Users start `medusa` and `medusa-train`, which [`launcher`] implements; [`in_process`] has the same commands for a process that has
//! loaded libtorch.
//!
//! Results go to stdout, messages to stderr. Exit status: 0 success; 1 failure: a damaged file, an unreachable Hub, a full disk; 2 a wrong
//! command line or recipe, also if it names a path that does not exist; 130 interrupted.

use std::env;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::downloads::HubArgument;
use self::exit::{INTERRUPTED, STDOUT_CLOSED, SUCCESS, refuse, report, status};
use crate::files::Claim;
use crate::hub::{DataSplit, Wanted};
use crate::session::drafter::spec::DrafterSpec;

mod api_key;
pub mod bench;
pub mod calibrate;
pub mod chat;
mod columns;
pub mod data;
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
mod held_out;
pub mod in_process;
pub mod init;
pub mod inspect;
pub mod launcher;
mod load_table;
mod named_files;
mod numbers;
mod outputs;
mod print;
mod products;
mod progress;
mod prompts;
pub mod push;
mod reading;
pub mod report;
mod run_heads;
mod same_build;
pub mod serve;
pub mod served;
mod signals;
mod threads;
pub mod train;
mod trained_on;
pub mod tree;
mod trusted;
mod unused_flags;
mod wrap;

pub use exit::{Interrupted, end};
pub use flags::CommonFlags;
pub use in_process::finish;
use print::{StdoutClosed, print_text, write_out};
pub use print::{print_json, print_line};
pub use same_build::run_if_same_build;
pub use signals::{interrupted, interrupted_to_save};

use crate::session::UsageError;

/// Train Medusa heads for Llama-family models, and decode with them.
#[derive(Debug, Parser)]
#[command(name = "medusa", version, arg_required_else_help = true, after_help = MEDUSA_EXAMPLE)]
pub struct MedusaCommand {
    #[command(flatten)]
    common: CommonFlags,
    #[command(subcommand)]
    verb: Verb,
}

/// Train Medusa heads from a recipe (same as `medusa train`).
#[derive(Debug, Parser)]
#[command(name = "medusa-train", version, arg_required_else_help = true)]
pub struct MedusaTrainCommand {
    #[command(flatten)]
    args: train::TrainArgs,
    #[command(flatten)] // last, because clap applies its heading to all later flags
    common: CommonFlags,
}

const MEDUSA_EXAMPLE: &str =
    "Example:\n  medusa init --backbone B --data chats.jsonl --out first.toml\n  medusa train first.toml";

#[derive(Debug, Subcommand)]
enum Verb {
    Init(init::InitArgs),
    Train(train::TrainArgs),
    Data(data::DataArgs),
    Inspect(inspect::InspectArgs),
    Distill(distill::DistillArgs),
    Calibrate(calibrate::CalibrateArgs),
    Tree(tree::TreeArgs),
    Generate(generate::GenerateArgs),
    Chat(chat::ChatArgs),
    Serve(serve::ServeArgs),
    Bench(Box<bench::BenchArgs>),
    Export(export::ExportArgs),
    Push(push::PushArgs),
    Report(report::ReportArgs),
    Doctor(doctor::DoctorArgs),
}

/// A command with its arguments, ready to run.
type LightVerb<'a> = Box<dyn FnOnce(&CommonFlags) -> anyhow::Result<()> + 'a>;

impl Verb {
    /// Arguments that may be Hub ids, in download order: the largest last, so that errors in the others come first.
    fn places(&mut self) -> Vec<HubArgument<'_>> {
        let places = match self {
            Verb::Distill(args) => {
                let asks_server = args.server.endpoint.is_some();
                let wanted = if asks_server { Wanted::BackboneWithoutWeights } else { Wanted::Backbone };
                vec![
                    Some(HubArgument::File(&mut args.prompts)),
                    args.heads.as_mut().map(HubArgument::heads),
                    args.backbone.as_mut().map(|backbone| HubArgument::Model(backbone, wanted)),
                ]
            }
            Verb::Generate(args) => {
                hub_inputs(args.prompts.as_mut(), &mut args.heads, args.drafter.drafter.as_mut(), &mut args.backbone)
            }
            Verb::Chat(args) => hub_inputs(None, &mut args.heads, args.drafter.drafter.as_mut(), &mut args.backbone),
            Verb::Serve(args) => hub_inputs(None, &mut args.heads, args.drafter.drafter.as_mut(), &mut args.backbone),
            Verb::Bench(args) => {
                let drafters = args.drafters.iter_mut().chain(args.drafter.drafter.as_mut());
                hub_inputs(args.prompts.as_mut(), &mut args.heads, drafters, args.backbone.as_mut())
            }
            Verb::Calibrate(args) => vec![
                args.prompts.as_mut().map(HubArgument::File),
                Some(HubArgument::Data(&args.data, &mut args.fetched, DataSplit::HeldOut)),
                args.heads.as_mut().map(HubArgument::heads),
                args.backbone.as_mut().map(HubArgument::backbone),
            ],
            Verb::Data(args) => {
                let backbone = HubArgument::Model(&mut args.backbone, Wanted::BackboneWithoutWeights);
                vec![Some(HubArgument::Data(&args.files, &mut args.fetched, DataSplit::Train)), Some(backbone)]
            }
            Verb::Tree(args) => {
                vec![args.heads.as_mut().map(HubArgument::heads), args.backbone.as_mut().map(HubArgument::backbone)]
            }
            Verb::Export(args) => vec![args.heads.as_mut().map(HubArgument::heads)], // the heads determine how much of the backbone is needed
            // Recipes fetch their own ids.
            Verb::Init(_) | Verb::Train(_) | Verb::Inspect(_) | Verb::Push(_) | Verb::Report(_) | Verb::Doctor(_) => {
                Vec::new()
            }
        };
        places.into_iter().flatten().collect()
    }

    /// Checks the files that the command line names, claims those that will be written, as long as the returned value lives, and downloads
    /// the Hub ids, before the work.
    fn prepare(&mut self, common: &CommonFlags) -> anyhow::Result<Vec<Claim>> {
        if let Some(notice) = &common.without_effect {
            common.say(notice);
        }
        let claims = self.claim_outputs(common)?;
        run_heads::enter(self.places(), common)?;
        downloads::fetch(self.places(), common)?;
        downloads::find_gguf(self.places(), common)?;
        self.check_inputs()?;
        trusted::verify(self.places())?;
        Ok(claims)
    }

    /// Runs the command without libtorch; `None` if the command needs it. The launcher is linked to all that these functions can
    /// reach, so none of it may call tch.
    fn without_libtorch(&self) -> Option<LightVerb<'_>> {
        Some(match self {
            Verb::Data(args) => Box::new(|common| data::run(args, common)),
            Verb::Inspect(args) => Box::new(|common| inspect::run(args, common)),
            Verb::Report(args) => Box::new(|common| report::run(args, common)),
            Verb::Calibrate(args) if !args.merge.is_empty() => Box::new(|common| calibrate::merge(args, common)),
            Verb::Distill(args) if args.server.endpoint.is_some() => {
                Box::new(|common| distill::server::run(args, common))
            }
            Verb::Bench(args) if args.load.endpoint.is_some() => Box::new(|common| bench::endpoint::run(args, common)),
            Verb::Tree(args) if args.latency.is_none() => Box::new(|common| tree::run_without_latency(args, common)),
            _ => return None,
        })
    }

    fn run(&self, common: &CommonFlags) -> anyhow::Result<()> {
        match self {
            Verb::Init(args) => init::run(args, common),
            Verb::Train(args) => train::run(args, common),
            Verb::Data(args) => data::run(args, common),
            Verb::Inspect(args) => inspect::run(args, common),
            Verb::Report(args) => report::run(args, common),
            Verb::Distill(args) => distill::run(args, common),
            Verb::Calibrate(args) => calibrate::run(args, common),
            Verb::Tree(args) => tree::run(args, common),
            Verb::Generate(args) => generate::run(args, common),
            Verb::Chat(args) => chat::run(args, common),
            Verb::Serve(args) => serve::run(args, common),
            Verb::Bench(args) => bench::run(args, common),
            Verb::Export(args) => export::run(args, common),
            Verb::Push(args) => push::run(args, common),
            Verb::Doctor(args) => doctor::run(args, common),
        }
    }
}

/// The arguments of decoding verbs that may be Hub ids.
fn hub_inputs<'a>(
    prompts: Option<&'a mut PathBuf>,
    heads: &'a mut Option<PathBuf>,
    drafters: impl IntoIterator<Item = &'a mut DrafterSpec>,
    backbone: impl Into<Option<&'a mut PathBuf>>,
) -> Vec<Option<HubArgument<'a>>> {
    let drafters = drafters.into_iter().flat_map(DrafterSpec::parts_mut).filter_map(HubArgument::drafter).map(Some);
    let heads = heads.as_mut().map(HubArgument::heads);
    let first = [prompts.map(HubArgument::File), heads].into_iter();
    first.chain(drafters).chain([backbone.into().map(HubArgument::backbone)]).collect()
}

fn medusa_arguments() -> (CommonFlags, Verb) {
    let (MedusaCommand { common, verb }, matches) = parse::<MedusaCommand>();
    (with_typed_flags(common, &matches), verb)
}

/// Parses the command line, or exits like clap: 0 after help, 2 for an invalid command line.
fn parse<P: CommandFactory + FromArgMatches>() -> (P, ArgMatches) {
    if let Some(argument) = env::args_os().skip(1).find(|argument| argument.to_str().is_none()) {
        let why = format!("{argument:?} is not UTF-8, as recipes, logs and results are; rename the file");
        refuse(&P::command().error(clap::error::ErrorKind::InvalidUtf8, why));
    }
    let matches = unused_flags::hide(P::command()).try_get_matches();
    let matches = matches.unwrap_or_else(|error| refuse(&error));
    let parsed = P::from_arg_matches(&matches).unwrap_or_else(|error| refuse(&error.format(&mut P::command())));
    (parsed, matches)
}

fn with_typed_flags(common: CommonFlags, matches: &ArgMatches) -> CommonFlags {
    let seed_was_given = matches.value_source("seed") == Some(ValueSource::CommandLine);
    CommonFlags { seed_was_given, without_effect: unused_flags::notice(matches), ..common }
}

/// Installs signal handlers, runs a verb and reports its error. Returns the exit status.
fn finish_without_libtorch(common: &CommonFlags, verb: impl FnOnce() -> anyhow::Result<()>) -> u8 {
    let ready = threads::check_environment().map_err(|why| UsageError(why).into());
    if common.quiet {
        signals::set_last_words("");
    }
    let ready = ready.and_then(|()| signals::watch()).and_then(|()| threads::start_tokenisers(common.threads));
    match ready.and_then(|()| verb()) {
        Ok(()) => SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            common.say(error);
            INTERRUPTED
        }
        Err(error) if error.is::<StdoutClosed>() => STDOUT_CLOSED,
        Err(error) => {
            report(&error);
            status(&error)
        }
    }
}
