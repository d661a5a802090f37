//! `medusa bench`: plain and drafted decoding of the same prompts, compared in the paper's terms (appendix B.1).

use std::cell::RefCell;

use anyhow::Context;

use self::measure::BenchRun;
use self::setting::Setting;
use super::decoder::{Decoder, read_prompts};
use super::drafter::{Drafts, ReadyDrafter};
use super::reading::Counter;
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::engine::sample::Stream;
use crate::tree::accept::Acceptance;

mod args;
mod measure;
mod report;
mod setting;
mod sweep;

pub use args::BenchArgs;
pub use sweep::SweepFlag;

/// Decodes every prompt plainly and with the drafter in every setting, and prints the comparison.
///
/// # Errors
/// An error in the command line, the backbone, the heads, the tree, the calibration or a prompt.
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let settings = setting::settings(args)?;
    let plan = args.drafter.plan(args.heads.as_deref(), args.tree.as_deref())?;
    let heads = args.drafter.heads(args.heads.as_deref());
    let prompts = read_prompts(None, Some(&args.prompts))?;
    // A sweep that builds its own trees needs no notice about a missing --tree.
    let loading = CommonFlags { quiet: common.quiet || settings.iter().any(|s| s.tree.is_some()), ..common.clone() };
    let served = args.served.resolve(&args.backbone, heads, common)?;
    served.check_template(prompts.iter().map(|prompt| prompt.input.needs_template()), &args.backbone)?;
    let decoder = args.engine.load(&args.backbone, heads, plan.into_iter().collect(), served, &loading)?;
    let ready = settings.iter().map(|setting| ready(&decoder, setting)).collect::<anyhow::Result<Vec<_>>>()?;
    let counter = Counter::new(settings.len() * args.repeats.get() * prompts.len(), 0, "prompts", common);
    let silent = CommonFlags { quiet: true, ..common.clone() };
    let mut results = Vec::new();
    for (setting, drafts) in settings.iter().zip(ready) {
        counter.bar.set_message(setting.label());
        let engine_notice = if results.is_empty() { common } else { &silent }; // once per sweep
        let (drafter, tree_nodes) = (decoder.drafters[0].spec.name(), drafts.drafter.max_nodes());
        let request = setting.decoding.request(&[], Stream::default());
        let decoding = RefCell::new(args.engine.take(&decoder, Some(drafts), &request, engine_notice)?);
        let bench = BenchRun { decoder: &decoder, drafter, tree_nodes, decoding, setting, prompts: &prompts, common };
        let result = report::result(&bench, &bench.run(args.repeats.get(), &counter)?);
        if common.json {
            counter.bar.suspend(|| print_json(&result))?;
        }
        results.push(result);
        if let Some(path) = &args.csv {
            report::write_csv(path, &results).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    counter.bar.finish_and_clear();
    if common.json { Ok(()) } else { print_line(report::table(&results)) }
}

/// The drafter of a setting.
fn ready<'a>(decoder: &'a Decoder, setting: &'a Setting) -> anyhow::Result<Drafts<'a>> {
    let loaded = decoder.drafter().ok_or_else(|| UsageError("bench needs --heads or --drafter".into()))?;
    let drafter = ReadyDrafter::new(&decoder.backbone, loaded, setting.tree.as_ref())?;
    let acceptance = match (setting.forced, drafter.tree()) {
        (None, _) => setting.decoding.acceptance()?,
        (Some(rate), Some(tree)) => Acceptance::at_rate(rate.get(), tree).map_err(|why| UsageError(why.to_string()))?,
        (Some(_), None) => {
            let why = "--force-acceptance-rate needs a tree that is the same at every step";
            return Err(UsageError(format!("{why}, which --drafter {} has not", loaded.spec)).into());
        }
    };
    Ok(Drafts { drafter, acceptance })
}
