//! `medusa bench`: plain and Medusa decoding of the same prompts in turn, in the paper's terms (appendix B.1).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;

use super::calibrate::draw_target;
use super::decoder::{Decoder, DecodingFlags, dtype_of, read_prompts};
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::decode::generate::{self, Medusa, Request};
use crate::decode::stats::{Comparison, Tally};
use crate::model::llama::Purpose;
use crate::torch::device_name;

/// Tokens of the run that warms caches and threads up; it is not measured.
const WARM_UP_TOKENS: usize = 32;

/// Compare plain and Medusa decoding: acceleration rate, overhead, speedup.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa bench --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final \\\n    --tree tree.json --prompts data/tiny/prompts.jsonl --json\n\nSeconds are those of decoding, after the prompt's own forward pass (prefill_seconds)."
)]
pub struct BenchArgs {
    /// The backbone's folder.
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// The heads' folder, a run's `final/`.
    #[arg(long, value_name = "H")]
    pub heads: PathBuf,
    /// The tree of guesses [default: a chain of each head's best].
    #[arg(long, value_name = "T")]
    pub tree: Option<PathBuf>,
    /// JSONL of prompts; each `category` is reported on its own.
    #[arg(long, value_name = "F")]
    pub prompts: PathBuf,
    #[command(flatten)]
    #[expect(missing_docs, reason = "the help has the flags themselves")]
    pub decoding: DecodingFlags,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    all: Group,
    categories: BTreeMap<String, Group>,
    device: String,
    dtype: String,
    tree_nodes: usize,
}

#[derive(Debug, Serialize)]
struct Group {
    plain: Side,
    medusa: Side,
    acceleration_rate: f64,
    overhead: f64,
    speedup: f64,
    /// At temperature 0: the same tokens. Otherwise they are not expected to be.
    identical: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Side {
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
    step_ms: f64,
    steps: usize,
    prefill_seconds: f64,
}

/// What was measured so far.
#[derive(Debug, Clone, Copy)]
struct Measured {
    times: Comparison,
    identical: bool,
}

impl Default for Measured {
    fn default() -> Self {
        Self { times: Comparison::default(), identical: true }
    }
}

/// Decodes every prompt both ways and prints the comparison.
///
/// # Errors
/// What is wrong with the command line, the backbone, the heads, the tree or a prompt.
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let acceptance = args.decoding.acceptance()?;
    let prompts = read_prompts(None, Some(&args.prompts))?;
    let decoder = Decoder::load(&args.backbone, Some(&args.heads), args.tree.as_ref(), common, Purpose::Decoding)?;
    let medusa = decoder.medusa(acceptance)?.ok_or_else(|| UsageError("bench needs --heads".into()))?;
    let bar = ProgressBar::with_draw_target(Some(prompts.len() as u64), draw_target(common));
    let mut measured = Everything::default();
    for (at, prompt) in prompts.iter().enumerate() {
        let answer = |ids: &[i64]| {
            let request = args.decoding.request(ids, common);
            decoder.text(&measured.measure(&decoder, &medusa, &request, prompt.category.as_deref())?)
        };
        decoder.each_turn(&prompt.input, answer).with_context(|| format!("prompt {} of {}", at + 1, prompts.len()))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let report = measured.report(&decoder, args.decoding.temperature.get() == 0.0);
    if common.json { print_json(&report) } else { print_line(report.table()) }
}

/// All prompts, and those of each category.
#[derive(Debug, Default)]
struct Everything {
    all: Measured,
    categories: BTreeMap<String, Measured>,
    is_warm: bool,
}

impl Everything {
    /// Decodes one request both ways, adds it up, and returns the plain answer: what a conversation goes on with.
    fn measure(
        &mut self,
        decoder: &Decoder,
        medusa: &Medusa,
        request: &Request,
        category: Option<&str>,
    ) -> anyhow::Result<Vec<i64>> {
        if !self.is_warm {
            let max_new_tokens = request.max_new_tokens.min(WARM_UP_TOKENS);
            both(decoder, medusa, &Request { max_new_tokens, ..*request })?;
            self.is_warm = true;
        }
        let (measured, answer) = both(decoder, medusa, request)?;
        self.all.add(measured);
        if let Some(name) = category {
            self.categories.entry(name.into()).or_default().add(measured);
        }
        Ok(answer)
    }

    fn report(&self, decoder: &Decoder, greedy: bool) -> Report {
        Report {
            all: self.all.report(greedy),
            categories: self.categories.iter().map(|(name, group)| (name.clone(), group.report(greedy))).collect(),
            device: device_name(decoder.backbone.device()),
            dtype: dtype_of(decoder.backbone.kind()).to_string(),
            tree_nodes: decoder.medusa.as_ref().map_or(0, |(_, tree)| tree.choices().len()),
        }
    }
}

/// One request, plainly and with heads, and the plain answer.
fn both(decoder: &Decoder, medusa: &Medusa, request: &Request) -> anyhow::Result<(Measured, Vec<i64>)> {
    let go_on = &mut |_: &[i64]| ControlFlow::Continue(());
    let plain = generate::plain(&decoder.backbone, request, go_on)?;
    let fast = generate::medusa(&decoder.backbone, medusa, request, go_on)?;
    let times = Comparison { plain: plain.tally(), medusa: fast.tally() };
    Ok((Measured { times, identical: plain.new_ids == fast.new_ids }, plain.new_ids))
}

impl Measured {
    fn add(&mut self, other: Measured) {
        self.times.plain.add(other.times.plain);
        self.times.medusa.add(other.times.medusa);
        self.identical &= other.identical;
    }

    fn report(&self, greedy: bool) -> Group {
        Group {
            plain: Side::new(self.times.plain),
            medusa: Side::new(self.times.medusa),
            acceleration_rate: self.times.acceleration_rate(),
            overhead: self.times.overhead(),
            speedup: self.times.speedup(),
            identical: greedy.then_some(self.identical),
        }
    }
}

impl Side {
    fn new(tally: Tally) -> Self {
        Self {
            tokens: tally.tokens,
            seconds: tally.decoding.as_secs_f64(),
            tokens_per_second: tally.tokens_per_second(),
            step_ms: tally.step_ms(),
            steps: tally.steps,
            prefill_seconds: tally.prefill.as_secs_f64(),
        }
    }
}

impl Report {
    fn table(&self) -> String {
        let mut text = String::from(
            "                      tokens  tokens/s: plain   medusa   acceleration   overhead   speedup   identical",
        );
        let categories = self.categories.iter().map(|(name, group)| (name.as_str(), group));
        for (name, group) in categories.chain([("all", &self.all)]) {
            let identical = group.identical.map_or("-", |same| if same { "yes" } else { "no" });
            let _ = write!(
                text,
                "\n{name:<20} {:>7} {:>16.1} {:>8.1} {:>14.2} {:>10.2} {:>9.2} {identical:>11}",
                group.medusa.tokens,
                group.plain.tokens_per_second,
                group.medusa.tokens_per_second,
                group.acceleration_rate,
                group.overhead,
                group.speedup,
            ); // a String takes all
        }
        let _ = write!(text, "\n{} on {}, a tree of {} nodes", self.dtype, self.device, self.tree_nodes);
        text
    }
}
