//! `medusa bench`: plain and Medusa decoding of the same prompts in turn, in the paper's terms (appendix B.1).

use std::cell::RefCell;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use self::measure::BenchRun;
use self::setting::Setting;
use super::decoder::{Decoder, read_prompts};
use super::reading::draw_target;
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::decode::generate::{DecodeError, Medusa};
use crate::tree::accept::Acceptance;

mod args;
mod measure;
mod report;
mod setting;
mod sweep;

pub use args::BenchArgs;
pub use sweep::SweepFlag;

const BAR: &str = "{bar:24} {pos}/{len} prompts  {msg}  {eta} left";

/// Decodes every prompt both ways, in every setting, and prints the comparison.
///
/// # Errors
/// What is wrong with the command line, the backbone, the heads, the tree, the calibration or a prompt.
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let settings = setting::settings(args)?;
    let prompts = read_prompts(None, Some(&args.prompts))?;
    // Where a sweep makes the trees, it is of no interest that there is no --tree.
    let loading = CommonFlags { quiet: common.quiet || settings.iter().any(|s| s.tree.is_some()), ..common.clone() };
    let decoder = Decoder::load(&args.backbone, Some(&args.heads), args.tree.as_ref(), &loading)?;
    let decoder = args.engine.limit(decoder);
    let ready = settings.iter().map(|setting| ready(&decoder, setting)).collect::<anyhow::Result<Vec<_>>>()?;
    let bar = progress_bar(settings.len() * args.repeats.get() * prompts.len(), common);
    let mut results = Vec::new();
    for (setting, (medusa, tree_nodes)) in settings.iter().zip(&ready) {
        bar.set_message(setting.label());
        let request = setting.decoding.request(&[], common);
        let decoding = RefCell::new(args.engine.take(&decoder, Some(medusa), &request, common)?);
        let bench = BenchRun { decoder: &decoder, medusa, decoding, setting, prompts: &prompts, common };
        let result = report::result(&bench, *tree_nodes, &bench.run(args.repeats.get(), &bar)?);
        if common.json {
            bar.suspend(|| print_json(&result))?;
        }
        results.push(result);
        if let Some(path) = &args.csv {
            report::write_csv(path, &results).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    bar.finish_and_clear();
    if common.json { Ok(()) } else { print_line(report::table(&results)) }
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
