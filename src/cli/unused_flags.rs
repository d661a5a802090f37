//! Common flags that a verb has no use for: they are not in its help, and a notice says that they have no effect.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use crate::torch::DeviceChoice;

/// Verbs that have a use for all flags, except with a server.
const ENDPOINTS: [(&str, &str); 2] = [("bench", "bench --endpoint"), ("distill", "distill --endpoint")];

/// The common flags that are of no use in a verb.
fn unused(verb: &str) -> &'static [&'static str] {
    match verb {
        "init" | "train" | "medusa-train" | "doctor" => &["dtype", "draft_dtype", "seed"],
        "data" => &["device", "dtype", "draft_dtype", "seed"],
        "inspect" | "push" | "report" => &["device", "dtype", "draft_dtype", "seed", "threads"],
        "calibrate" | "serve" | "tree" => &["seed"],
        "export" => &["device", "draft_dtype", "seed"],
        "bench --endpoint" => &["device", "dtype", "draft_dtype", "threads"],
        "distill --endpoint" => &["device", "dtype", "draft_dtype"],
        _ => &[],
    }
}

/// Hides from each verb's help the common flags that it has no use for.
pub(super) fn hide(command: Command) -> Command {
    if command.get_name() == "medusa-train" {
        return command.mut_args(|arg| match unused("medusa-train").contains(&arg.get_id().as_str()) {
            true => arg.hide(true),
            false => arg,
        });
    }
    let common: Vec<Arg> = command.get_arguments().cloned().collect();
    command.mut_subcommands(|verb| {
        let unused = unused(verb.get_name());
        // A flag of the verb itself replaces the global one that clap would pass on to it.
        verb.args(common.iter().filter(|arg| unused.contains(&arg.get_id().as_str())).map(|arg| arg.clone().hide(true)))
    })
}

/// A notice about a typed flag that the verb has no use for. Training refuses such flags itself, with the keys to set instead;
/// `--device cpu` is what all others do.
pub(super) fn notice(matches: &ArgMatches) -> Option<String> {
    let (verb, verb_matches) = matches.subcommand().filter(|(verb, _)| *verb != "train")?;
    let is_typed = |flag: &str| {
        let typed = |matches: &ArgMatches| matches.value_source(flag) == Some(ValueSource::CommandLine);
        typed(verb_matches) || typed(matches)
    };
    let device = || [verb_matches, matches].into_iter().find_map(|matches| matches.get_one::<DeviceChoice>("device"));
    let on_cpu = || device().is_some_and(|device| matches!(device, DeviceChoice::Auto | DeviceChoice::Cpu));
    let asking = ENDPOINTS.iter().find(|(name, _)| *name == verb && verb_matches.value_source("endpoint").is_some());
    let verb = asking.map_or(verb, |(_, asking)| *asking);
    let flag = unused(verb).iter().find(|flag| is_typed(flag) && !(**flag == "device" && on_cpu()))?;
    Some(format!("--{} has no effect on `medusa {verb}`", flag.replace('_', "-")))
}
