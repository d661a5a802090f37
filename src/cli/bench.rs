//! `medusa bench`: plain and Medusa decoding of the same prompts in turn, in the paper's terms (appendix B.1).

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use self::measure::Bench;
use self::report::Report;
use self::sweep::{Setting, Sweep};
use super::calibrate::draw_target;
use super::decoder::{Decoder, DecodingFlags, positive, read_prompts};
use super::engine::EngineFlags;
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::decode::generate::{DecodeError, Medusa};
use crate::numbers::Positive;
use crate::tree::accept::Acceptance;

mod measure;
mod report;
mod sweep;

const BAR: &str = "{bar:24} {pos}/{len} prompts  {msg}  {eta} left";

const EXAMPLES: &str = "Example:
  medusa bench --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final \\
    --tree tree.json --prompts data/tiny/prompts.jsonl --json
  medusa bench --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final --prompts data/tiny/prompts.jsonl \\
    --sweep nodes=1,4,8,16,32 --calibration calibration.json --csv nodes.csv

Seconds are those of decoding, after the prompt's own forward pass (prefill_seconds).";

/// Compare plain and Medusa decoding: acceleration rate, overhead, speedup.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// The backbone: its folder, or an id of the Hugging Face Hub (owner/name or owner/name@revision).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// The heads: their folder, a run's `final/`, or an id of the Hub.
    #[arg(long, value_name = "H")]
    pub heads: PathBuf,
    /// The tree of guesses [default: a chain of each head's best].
    #[arg(long, value_name = "T")]
    pub tree: Option<PathBuf>,
    /// JSONL of prompts, MT-bench's as they are; each `category` is reported on its own.
    #[arg(long, value_name = "F")]
    pub prompts: PathBuf,
    /// Passes over all prompts; the medians are reported.
    #[arg(long, value_name = "N", default_value = "3")]
    pub repeats: NonZeroUsize,
    /// One result a value. nodes=8,16,32: the best tree of each size (needs --calibration); posterior-threshold=0.01,0.09:
    /// ε of typical acceptance (needs --temperature); temperature=0,0.7; context=64,128: prompts cut or repeated to so many tokens.
    #[arg(long, value_name = "NAME=V,V…")]
    pub sweep: Option<Sweep>,
    /// What `medusa calibrate` wrote: `--sweep nodes=…` makes its trees from it.
    #[arg(long, value_name = "C")]
    pub calibration: Option<PathBuf>,
    /// Time steps that commit X tokens on average, whatever is guessed: what heads of that acceleration rate would bring. The text is
    /// not the backbone's.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub force_acceptance_rate: Option<Positive>,
    /// Write the results as CSV, too: a row for each category and one for all; of a sweep, for each value.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "the help has the flags themselves")]
    pub decoding: DecodingFlags,
    #[command(flatten)]
    #[expect(missing_docs, reason = "the help has the flags themselves")]
    pub engine: EngineFlags,
}

/// Decodes every prompt both ways, in every setting, and prints the comparison.
///
/// # Errors
/// What is wrong with the command line, the backbone, the heads, the tree, the calibration or a prompt.
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let settings = sweep::settings(args)?;
    let prompts = read_prompts(None, Some(&args.prompts))?;
    // Where a sweep makes the trees, it is of no interest that there is no --tree.
    let loading = CommonFlags { quiet: common.quiet || settings.iter().any(|s| s.tree.is_some()), ..common.clone() };
    let decoder = Decoder::load(&args.backbone, Some(&args.heads), args.tree.as_ref(), &loading)?;
    let decoder = args.engine.limit(decoder);
    let ready = settings.iter().map(|setting| ready(&decoder, setting)).collect::<anyhow::Result<Vec<_>>>()?;
    let bar = progress_bar(settings.len() * args.repeats.get() * prompts.len(), common);
    let mut reports = Vec::new();
    for (setting, (medusa, tree_nodes)) in settings.iter().zip(&ready) {
        bar.set_message(setting.label());
        let request = setting.decoding.request(&[], common);
        let decoding = RefCell::new(args.engine.take(&decoder, Some(medusa), &request, common)?);
        let bench = Bench { decoder: &decoder, medusa, decoding, setting, prompts: &prompts, common };
        let report = Report::new(&bench, *tree_nodes, &bench.run(args.repeats.get(), &bar)?);
        if common.json {
            bar.suspend(|| print_json(&report))?;
        }
        reports.push(report);
        if let Some(path) = &args.csv {
            report::write_csv(path, &reports).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    bar.finish_and_clear();
    if common.json { Ok(()) } else { print_line(report::table(&reports)) }
}

/// Heads laid out for a setting, and the nodes of its tree.
fn ready<'a>(decoder: &'a Decoder, setting: &'a Setting) -> anyhow::Result<(Medusa<'a>, usize)> {
    let (heads, tree) = decoder.medusa.as_ref().ok_or_else(|| UsageError("bench needs --heads".into()))?;
    let tree = setting.tree.as_ref().unwrap_or(tree);
    let acceptance = match setting.forced {
        Some(rate) => Acceptance::Forced { rate: rate.get() },
        None => setting.decoding.acceptance()?,
    };
    match Medusa::new(&decoder.backbone, heads, tree, acceptance) {
        Ok(medusa) => Ok((medusa, tree.choices().len())),
        Err(error @ DecodeError::ForcedRate { .. }) => Err(UsageError(error.to_string()).into()),
        Err(error) => Err(error.into()),
    }
}

fn progress_bar(prompts: usize, common: &CommonFlags) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(prompts as u64), draw_target(common));
    bar.with_style(ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar()))
}
