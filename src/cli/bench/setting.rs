//! The settings to measure, one per value of `--sweep`. All checks of their flags are here.

use std::num::NonZeroUsize;

use anyhow::Context;

use super::args::BenchArgs;
use super::sweep::SweepFlag;
use crate::cli::UsageError;
use crate::cli::decoding::{AcceptanceName, DecodingFlags};
use crate::formats::bench::SweptValue;
use crate::numbers::Positive;
use crate::session::drafter::spec::DrafterSpec;
use crate::session::engine::EngineName;
use crate::session::setup::ModelSetup;

/// How to decode for one result: the flags, except the swept one.
#[derive(Debug, Clone)]
pub(super) struct BenchSetting {
    pub(super) swept: Option<SweptValue>,
    pub(super) decoding: DecodingFlags,
    /// Size of the tree to search for every drafter with heads; `None`: they keep their trees.
    pub(super) nodes: Option<NonZeroUsize>,
    /// Length to which each prompt is cut or repeated.
    pub(super) context: Option<usize>,
    /// Tokens per step, independent of the guesses.
    pub(super) forced: Option<Positive>,
}

/// The settings of a command line: one per value of the sweep, or one without a sweep.
///
/// # Errors
/// [`UsageError`] for conflicting flags and unusable values, or an unreadable calibration.
pub(super) fn settings(args: &BenchArgs) -> anyhow::Result<Vec<BenchSetting>> {
    let forced = args.force_acceptance_rate;
    if args.calibration.is_some() && args.nodes_flag().is_none() {
        return refused(
            "--calibration is what --nodes and --sweep nodes=… make their trees from; without one of them, drop it",
        );
    }
    check_without_heads(args)?;
    check_forced(args)?;
    let base = BenchSetting { swept: None, decoding: args.decoding.clone(), nodes: args.nodes, context: None, forced };
    match &args.sweep {
        None => Ok(vec![base]),
        Some(sweep) => {
            check_sweep(args, sweep)?;
            Ok(swept(sweep, &base))
        }
    }
}

/// Checks the flags of measuring under load, and those that need a load or a sweep.
///
/// # Errors
/// [`UsageError`].
pub(super) fn check_load(args: &BenchArgs) -> anyhow::Result<()> {
    let load = &args.load;
    // Checked here, since clap requires nothing that conflicts with a flag that was given, such as --heads.
    let server_flags = [("--model", load.model.is_some()), ("--api-key-file", load.api_key_file.is_some())];
    if let Some((flag, _)) = server_flags.iter().find(|(_, is_given)| *is_given && load.endpoint.is_none()) {
        return refused(&format!("{flag} is for a server; give it --endpoint URL"));
    }
    if !load.is_set() {
        if load.requests.is_some() {
            return refused(
                "--requests is the number of requests under load; give it --concurrency N,N… or --endpoint URL",
            );
        }
        if args.svg.is_some() && args.sweep.is_none() {
            return refused(
                "--svg draws a sweep or a load: give it --sweep NAME=V,V…, --concurrency N,N… or --endpoint URL",
            );
        }
        return Ok(());
    }
    if args.engine.engine == EngineName::Cuda {
        return refused("--engine cuda decodes one text at a time; --concurrency needs --engine tch or cpu");
    }
    Ok(load.check(args.decoding.max_new_tokens)?)
}

/// A setting for each value of the sweep.
fn swept(sweep: &SweepFlag, base: &BenchSetting) -> Vec<BenchSetting> {
    let with = |decoding| BenchSetting { decoding, ..base.clone() };
    let settings: Vec<BenchSetting> = match sweep {
        SweepFlag::Nodes(sizes) => {
            sizes.iter().map(|&nodes| BenchSetting { nodes: Some(nodes), ..base.clone() }).collect()
        }
        SweepFlag::PosteriorThreshold(thresholds) => {
            let flags = |&epsilon| DecodingFlags { posterior_threshold: Some(epsilon), ..base.decoding.clone() };
            thresholds.iter().map(flags).map(with).collect()
        }
        SweepFlag::Context(lengths) => {
            lengths.iter().map(|length| BenchSetting { context: Some(length.get()), ..base.clone() }).collect()
        }
        SweepFlag::Temperature(temperatures) => {
            let flags = |&temperature| DecodingFlags { temperature, ..base.decoding.clone() };
            temperatures.iter().map(flags).map(with).collect()
        }
    };
    let named = |(setting, swept)| BenchSetting { swept: Some(swept), ..setting };
    settings.into_iter().zip(sweep.values()).map(named).collect()
}

impl BenchSetting {
    /// The prompt to decode from. The first token (BOS) and the end, which has the question, are kept; the middle is
    /// cut or repeated from the left.
    pub(super) fn prompt(&self, ids: &[i64]) -> Vec<i64> {
        let (Some(length), [first, rest @ ..]) = (self.context, ids) else { return ids.to_vec() };
        let rest = if rest.is_empty() { ids } else { rest };
        let from_the_end = rest.iter().rev().cycle().take(length - 1).chain([first]);
        let mut prompt: Vec<i64> = from_the_end.copied().collect();
        prompt.reverse();
        prompt
    }

    /// Names the value of the sweep in an error.
    pub(super) fn named<T>(&self, measured: anyhow::Result<T>) -> anyhow::Result<T> {
        match &self.swept {
            Some(SweptValue { name, value }) => measured.with_context(|| format!("--sweep {name}={value}")),
            None => measured,
        }
    }

    /// The setting as progress shows it; empty without a sweep.
    pub(super) fn label(&self) -> String {
        self.swept.as_ref().map_or_else(String::new, |swept| format!("{} {}", swept.name, swept.value))
    }
}

/// Trees are searched for heads; other drafters make their own.
fn check_without_heads(args: &BenchArgs) -> anyhow::Result<()> {
    let Some(spec) = args.specs().next().filter(|_| args.specs().all(|spec| spec.heads().is_none())) else {
        return Ok(());
    };
    match args.nodes_flag() {
        Some(flag) => refused(&format!("{flag}=… makes trees for heads; --drafter {spec} makes its own at every step")),
        None => Ok(()),
    }
}

/// A forced rate is a path in a known tree.
fn check_forced(args: &BenchArgs) -> anyhow::Result<()> {
    let varies = |spec: &&DrafterSpec| !spec.may_have_fixed_tree();
    match args.specs().find(varies).filter(|_| args.force_acceptance_rate.is_some()) {
        Some(spec) => Err(no_fixed_tree(spec).into()),
        None => Ok(()),
    }
}

/// Why `--force-acceptance-rate` is refused for a drafter.
pub(super) fn no_fixed_tree(spec: &DrafterSpec) -> UsageError {
    UsageError(format!(
        "--force-acceptance-rate accepts a path in a tree that is the same at every step; --drafter {spec} makes a new tree at every step"
    ))
}

fn check_sweep(args: &BenchArgs, sweep: &SweepFlag) -> anyhow::Result<()> {
    match sweep {
        SweepFlag::Nodes(_) => check_sizes(args),
        SweepFlag::PosteriorThreshold(_) => check_typical(args),
        SweepFlag::Context(_) | SweepFlag::Temperature(_) => Ok(()),
    }
}

fn check_sizes(args: &BenchArgs) -> anyhow::Result<()> {
    match args.tree {
        Some(_) => refused("--sweep nodes=… makes its own trees; drop --tree"),
        None => Ok(()),
    }
}

fn check_typical(args: &BenchArgs) -> anyhow::Result<()> {
    if args.force_acceptance_rate.is_some() {
        return refused(
            "--sweep posterior-threshold=… varies what --force-acceptance-rate disregards; drop one of them",
        );
    }
    if args.decoding.rule() != AcceptanceName::Typical {
        return refused("--sweep posterior-threshold=… is of typical acceptance: use --acceptance typical");
    }
    if args.decoding.temperature.get() == 0.0 {
        return refused(
            "--sweep posterior-threshold=… needs --temperature above 0: at 0 decoding is greedy, whatever the threshold",
        );
    }
    Ok(())
}

/// Checks the values of `--sweep context=…` with the backbone's context. Answers have the same maximum length at every value: truncated ones
/// would measure something else.
///
/// # Errors
/// [`UsageError`] for a value that leaves no room for the answers.
pub(super) fn check_contexts(args: &BenchArgs, setup: &ModelSetup) -> anyhow::Result<()> {
    let Some(SweepFlag::Context(lengths)) = &args.sweep else { return Ok(()) };
    let context = usize::try_from(args.engine.options().context(&setup.backbone.config, setup.context)?)?;
    lengths.iter().try_for_each(|length| check_context(&args.decoding, length.get(), context))
}

fn check_context(decoding: &DecodingFlags, length: usize, context: usize) -> anyhow::Result<()> {
    let needed = length.saturating_add(decoding.max_new_tokens);
    if needed > context {
        return refused(&format!(
            "--sweep context={length}: with --max-new-tokens {} that is {needed} tokens, but the backbone's context is \
             {context}; lower one of them",
            decoding.max_new_tokens
        ));
    }
    Ok(())
}

fn refused<T>(why: &str) -> anyhow::Result<T> {
    Err(UsageError(why.into()).into())
}

#[cfg(test)]
pub(super) mod examples {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: BenchArgs,
    }

    /// A command line with more flags than the required ones.
    pub(in crate::cli::bench) fn args(more: &[&str]) -> BenchArgs {
        let flags = ["bench", "--backbone", "b", "--heads", "h", "--prompts", "p"];
        Command::try_parse_from(flags.iter().chain(more)).expect("a command line").args
    }

    /// The settings of that command line.
    pub(in crate::cli::bench) fn sweep(more: &[&str]) -> Vec<BenchSetting> {
        settings(&args(more)).expect("settings that can be")
    }
}

#[cfg(test)]
mod tests {
    use super::examples::{args, sweep};
    use super::*;

    #[test]
    fn each_value_changes_one_thing() {
        let plain = sweep(&["--temperature", "0.5"]);
        assert_eq!((plain.len(), &plain[0].swept, plain[0].label().as_str()), (1, &None, ""));
        let swept = sweep(&["--temperature", "0.5", "--sweep", "posterior-threshold=0.01, 0.2"]);
        let epsilons: Vec<_> =
            swept.iter().map(|setting| setting.decoding.posterior_threshold.map(|epsilon| epsilon.get())).collect();
        assert_eq!(epsilons, [Some(0.01), Some(0.2)]);
        assert!(swept.iter().all(|setting| setting.decoding.temperature.get() == 0.5));
        assert_eq!(swept[1].label(), "posterior-threshold 0.2");
        let swept = sweep(&["--sweep", "temperature=0,1"]);
        assert_eq!([0, 1].map(|at: usize| swept[at].decoding.temperature.get()), [0.0, 1.0]);
    }

    #[test]
    fn a_prompt_of_another_length_keeps_its_first_token_and_its_end() {
        let swept = |context| BenchSetting { context, ..settings(&args(&[])).expect("one setting").remove(0) };
        assert_eq!(swept(None).prompt(&[1, 2, 3]), [1, 2, 3]);
        assert_eq!(swept(Some(3)).prompt(&[1, 2, 3, 4, 5]), [1, 4, 5]);
        assert_eq!(swept(Some(7)).prompt(&[1, 2, 3, 4]), [1, 2, 3, 4, 2, 3, 4]);
        assert_eq!(swept(Some(6)).prompt(&[1, 2, 3, 4]), [1, 3, 4, 2, 3, 4]);
        assert_eq!(swept(Some(3)).prompt(&[1]), [1, 1, 1]);
        assert_eq!(swept(Some(1)).prompt(&[1, 2]), [1]);
    }
}
