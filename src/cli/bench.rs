//! `medusa bench`: plain and drafted decoding of the same prompts, compared in the paper's terms (appendix B.1).

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use console::Term;

use self::drafters::Rows;
use self::load::output::LoadOutput;
use self::measure::{BenchDrafter, BenchRun};
use self::progress::BenchProgress;
use self::setting::{BenchSetting, no_fixed_tree};
use super::progress::Counter;
use super::prompts::{self, EndedEarly, IndexedPrompt};
use super::{CommonFlags, UsageError, print_json, print_text, products, trained_on, wrap};
use crate::bench::facts::DrafterFacts;
use crate::bench::in_process::{LoadBench, NewProgress};
use crate::cpu::team::Team;
use crate::data::chat_template::ChatTemplate;
use crate::data::prompts::{Prompt, to_ids};
use crate::data::tokenize::wide;
use crate::decode::request::Request;
use crate::engine::cpu::CpuEngine;
use crate::engine::sample::Stream;
use crate::files;
use crate::formats::bench::BenchResult;
use crate::formats::trained_prompts::MeasuredPrompts;
use crate::latency::products::ProductSpeeds;
use crate::session::Decoder;
use crate::session::drafter::loaded::LoadedDrafter;
use crate::session::drafter::plan::DrafterPlan;
use crate::session::drafter::{Drafts, ReadyDrafter};
use crate::session::reporter::LoadContext;
use crate::tree::accept::Acceptance;
use crate::tree::guess_tree::GuessTree;

mod args;
mod backbone;
mod drafters;
pub mod endpoint;
mod load;
mod measure;
mod notes;
mod progress;
mod report;
mod rows;
mod setting;
mod sweep;
mod table;

pub use args::BenchArgs;
pub use sweep::SweepFlag;

/// Decodes every prompt plainly and with the drafters in every setting, and prints the comparison.
///
/// # Errors
/// An error in the command line, the backbone, the heads, the tree, the calibration or a prompt.
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    if args.products {
        return run_products(args, common);
    }
    setting::check_load(args)?;
    if args.load.is_set() {
        return if args.load.endpoint.is_some() { endpoint::run(args, common) } else { run_load(args, common) };
    }
    let settings = setting::settings(args)?;
    let rows = drafters::rows(args)?;
    let trees = drafters::searched_trees(args, &settings, &rows)?;
    let unused: Option<Vec<String>> = settings.iter().map(|setting| setting.decoding.unused_sampling(true)).collect();
    let (prompts, decoder, facts) = load(args, &rows, common)?;
    unused.iter().flatten().take(1).for_each(|notice| common.say(notice)); // unless a value of the sweep uses the flags
    let all = prompts.len();
    let prompts = match settings.iter().all(|setting| setting.context.is_some()) {
        true => prompts.into_iter().enumerate().collect(), // cut to a context that `settings` has checked
        false => args.fit.fitting(prompts, &decoder, common)?,
    };
    let mut ready = Vec::new(); // before the first measurement, so that errors come first
    for (setting, trees) in settings.iter().zip(&trees) {
        let drafts = (0..trees.len()).map(|at| drafts(&decoder, setting, trees, at));
        ready.push(drafts.collect::<anyhow::Result<Vec<_>>>()?);
    }
    let progress = BenchProgress::new(&settings, args.repeats, prompts.len(), common);
    let (skipped, ended_early) = (all - prompts.len(), RefCell::default());
    let bench =
        Bench { args, decoder: &decoder, facts: &facts, rows: &rows, prompts: &prompts, skipped, ended_early, common };
    let mut results = Vec::new();
    let ended = settings.iter().zip(ready).try_for_each(|(setting, ready)| {
        let found = setting.named(bench.measure(setting, ready, &progress))?;
        results.extend(found);
        bench.write(&results)
    });
    drop(progress);
    bench.ended_early.borrow().report(common);
    if !common.json && !results.is_empty() {
        print_text(table::table(&results, wrap::columns(&Term::stdout())))?; // also where a later value of a sweep failed
    }
    ended
}

/// What all settings have in common.
struct Bench<'a> {
    args: &'a BenchArgs,
    decoder: &'a Decoder,
    facts: &'a [DrafterFacts],
    rows: &'a Rows,
    /// Those that fit.
    prompts: &'a [IndexedPrompt],
    /// How many others there are.
    skipped: usize,
    ended_early: RefCell<EndedEarly>,
    common: &'a CommonFlags,
}

impl<'a> Bench<'a> {
    /// The results of one setting, which are printed at once with `--json`.
    fn measure(
        &self,
        setting: &BenchSetting,
        ready: Vec<Drafts<'a>>,
        progress: &BenchProgress,
    ) -> anyhow::Result<Vec<BenchResult>> {
        let Self { args, decoder, facts, rows, prompts, skipped, ref ended_early, common } = *self;
        let context = common.context();
        let once = if progress.has_begun() { context.silent() } else { context }; // once per sweep
        let request = setting.decoding.request(&[], Stream::default());
        let contestants = contestants(args, (decoder, facts), ready, &request, once)?;
        let plain = match rows.len() {
            1 => None,
            _ => Some(RefCell::new(args.engine.options().take(decoder, None, &request, context.silent())?)),
        };
        let fit = args.fit;
        let run = BenchRun { decoder, contestants, plain, setting, prompts, skipped, ended_early, fit, common };
        let found = report::results(&run, rows, &run.run(args.repeats.get(), progress)?);
        if common.json {
            progress.progress.above(|| found.iter().try_for_each(print_json))?;
        }
        Ok(found)
    }

    /// Writes `--csv` and `--svg`.
    fn write(&self, results: &[BenchResult]) -> anyhow::Result<()> {
        let failed = |path: &Path| format!("cannot write {}", path.display());
        if let Some(path) = &self.args.csv {
            report::write_csv(path, results).with_context(|| failed(path))?;
        }
        if let Some(path) = &self.args.svg {
            let svg = crate::report::draw_sweep(results);
            files::write_atomic(path, |out| out.write_all(svg.as_bytes())).with_context(|| failed(path))?;
        }
        Ok(())
    }
}

/// Times the products of the backbone.
fn run_products(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let setup = backbone::setup(args, &vec![], common)?;
    let decoder = args.engine.options().load(setup, vec![], common.context())?;
    let progress = |weights: &str| common.say(format_args!("timing {weights}"));
    let refused = |why| UsageError(format!("--products times the CPU kernels, which cannot run this backbone: {why}"));
    CpuEngine::supports(&decoder.backbone).map_err(refused)?;
    let measured = ProductSpeeds::measure_backbone(&decoder.backbone, Team::shared(), progress);
    let measured = measured.expect("the kernels run the backbone");
    if common.json {
        return print_json(&measured);
    }
    let mut text = String::new();
    products::write(&mut text, &measured)?;
    print_text(text.trim_end())
}

/// Measures throughput and latencies with several texts in flight.
fn run_load(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let rows = drafters::rows(args)?;
    let (prompts, decoder, facts) = load(args, &rows, common)?;
    args.decoding.unused_sampling(rows.iter().any(Option::is_some)).iter().for_each(|notice| common.say(notice));
    let prompts = args.fit.fitting(prompts, &decoder, common)?;
    let ids = |(index, prompt): &IndexedPrompt| -> anyhow::Result<_> {
        Ok((*index, wide(&to_ids(&prompt.input, &decoder.tokenizer, decoder.template.as_deref())?)))
    };
    let prompts = prompts.iter().map(ids).collect::<anyhow::Result<Vec<_>>>()?;
    let levels = args.load.levels(prompts.len());
    let (engine, begin) = (args.engine.options(), begin_requests(common));
    let request = args.decoding.request(&[], Stream { seed: common.seed, ..Stream::default() });
    let measure = |level| {
        let (acceptance, prompts, begin) = (args.decoding.acceptance()?, &prompts, &*begin);
        let bench = LoadBench { decoder: &decoder, facts: &facts, engine, request, acceptance, prompts, begin };
        anyhow::Ok(bench.level(level)?)
    };
    let mut output = LoadOutput::new(args, common);
    let ended = levels.iter().try_for_each(|level| {
        output.add(measure(*level).with_context(|| format!("--concurrency {}", level.concurrency))?)
    });
    output.print_table()?; // also where a later level failed
    ended
}

/// Counts requests under load.
fn begin_requests(common: &CommonFlags) -> Box<NewProgress> {
    let common = common.clone();
    Box::new(move |requests: usize, note: String| -> Box<dyn FnMut(usize)> {
        let counter = Counter::new(requests, 0, "requests", &common);
        Box::new(move |done| counter.set(done, &note))
    })
}

/// The prompts, the backbone with all drafters, and their facts.
fn load(
    args: &BenchArgs,
    rows: &Rows,
    common: &CommonFlags,
) -> anyhow::Result<(Vec<Prompt>, Decoder, Vec<DrafterFacts>)> {
    let prompts = prompts::read(args.prompts(), common)?;
    let setup = backbone::setup(args, rows, common)?;
    setting::check_contexts(args, &setup)?;
    setup.check_template(prompts.iter().map(|prompt| prompt.input.needs_template()))?;
    let plans: Vec<DrafterPlan> = rows.iter().flatten().cloned().collect();
    let facts = |plan: &DrafterPlan| {
        let prompts = trained_on(args, plan, &prompts, setup.template.as_ref(), common)?;
        Ok(DrafterFacts { prompts, ..DrafterFacts::of(plan) })
    };
    let facts = plans.iter().map(facts).collect::<anyhow::Result<Vec<_>>>()?;
    // Trees that are searched need no notice about a missing --tree.
    let context = if args.nodes_flag().is_some() { common.context().silent() } else { common.context() };
    let decoder = args.engine.options().load(setup, plans, context)?;
    let with_parameters =
        |(facts, loaded): (DrafterFacts, &LoadedDrafter)| DrafterFacts { parameters: loaded.parameters(), ..facts };
    let facts = facts.into_iter().zip(&decoder.drafters).map(with_parameters).collect();
    Ok((prompts, decoder, facts))
}

/// Which of the prompts the heads of a drafter were trained on.
fn trained_on(
    args: &BenchArgs,
    plan: &DrafterPlan,
    prompts: &[Prompt],
    template: Option<&ChatTemplate>,
    common: &CommonFlags,
) -> anyhow::Result<Option<MeasuredPrompts>> {
    let Some(heads) = &plan.heads else { return Ok(None) };
    let count = |trained| trained_on::count_prompts(&trained, prompts, args.backbone(), template);
    let measured = trained_on::for_heads(&heads.path)?.map(count).transpose()?;
    trained_on::report(measured, &heads.path.display().to_string(), args.fit.strict, common)?;
    Ok(measured)
}

/// Drafter `at` in a setting.
fn drafts<'a>(
    decoder: &'a Decoder,
    setting: &BenchSetting,
    trees: &'a [Option<GuessTree>],
    at: usize,
) -> anyhow::Result<Drafts<'a>> {
    let loaded = &decoder.drafters[at];
    let rule = setting.decoding.acceptance()?;
    let drafter = ReadyDrafter::from_loaded(&decoder.backbone, loaded, trees[at].as_ref(), rule)?;
    let acceptance = match (setting.forced, drafter.tree()) {
        (None, _) => rule,
        (Some(rate), Some(tree)) => Acceptance::at_rate(rate.get(), tree).map_err(|why| UsageError(why.to_string()))?,
        (Some(_), None) => return Err(no_fixed_tree(&loaded.spec).into()),
    };
    Ok(Drafts { drafter, acceptance })
}

/// A decoding loop for each drafter.
fn contestants<'a>(
    args: &BenchArgs,
    (decoder, facts): (&'a Decoder, &[DrafterFacts]),
    drafts: Vec<Drafts<'a>>,
    request: &Request,
    context: LoadContext,
) -> anyhow::Result<Vec<BenchDrafter<'a>>> {
    let contestant = |(drafts, facts): (Drafts<'a>, &DrafterFacts)| {
        let tree_nodes = drafts.drafter.max_nodes();
        let decoding = args.engine.options().take(decoder, Some(drafts), request, context);
        let decoding = decoding.with_context(|| format!("--drafters {}", facts.name))?;
        Ok(BenchDrafter { facts: facts.clone(), tree_nodes, decoding: RefCell::new(decoding) })
    };
    drafts.into_iter().zip(facts).map(contestant).collect()
}
