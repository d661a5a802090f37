//! Measures one setting: passes over all prompts, each decoded plainly and with the drafter in turn.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use anyhow::Context;

use super::progress::BenchProgress;
use super::setting::BenchSetting;
use crate::bench::facts::DrafterFacts;
use crate::cli::CommonFlags;
use crate::cli::prompts::{EndedEarly, FitFlags, IndexedPrompt, each_turn};
use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::likelihood::log_probability;
use crate::decode::request::{Generation, Request};
use crate::decode::stats::Comparison;
use crate::decode::step::Drafting;
use crate::engine::sample::Stream;
use crate::formats::bench::{ChosenToken, FirstDifference};
use crate::session::Decoder;

/// Tokens of the unmeasured run that warms up caches and threads.
const WARM_UP_TOKENS: usize = 32;

/// A drafter in a setting, ready to decode.
pub(super) struct BenchDrafter<'a> {
    pub(super) facts: DrafterFacts,
    /// Maximum number of guesses in a tree.
    pub(super) tree_nodes: usize,
    /// Each request starts with an empty cache.
    pub(super) decoding: RefCell<Box<dyn DecodeLoop + 'a>>,
}

/// A setting and everything that it is measured with.
pub(super) struct BenchRun<'a> {
    pub(super) decoder: &'a Decoder,
    /// At least one.
    pub(super) contestants: Vec<BenchDrafter<'a>>,
    /// The loop of plain decoding; `None`: that of the only contestant.
    pub(super) plain: Option<RefCell<Box<dyn DecodeLoop + 'a>>>,
    pub(super) setting: &'a BenchSetting,
    /// Those that fit.
    pub(super) prompts: &'a [IndexedPrompt],
    /// How many do not.
    pub(super) skipped: usize,
    pub(super) ended_early: &'a RefCell<EndedEarly>,
    pub(super) fit: FitFlags,
    pub(super) common: &'a CommonFlags,
}

/// The relation between the texts decoded with and without guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Texts {
    /// Identical.
    Greedy,
    /// Different; their probabilities show how far apart their distributions are.
    Sampled,
    /// Meaningless, since the acceptance was forced.
    Forced,
}

/// Whether the log-probability of the texts is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scoring {
    Off,
    On,
}

/// New token ids.
type Answer = Vec<i64>;

/// Measurements of some prompts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    pub(super) times: Comparison,
    /// Whether plain and drafted tokens differ.
    pub(super) differ: bool,
    /// Summed over the new tokens, under the backbone; 0 unless the texts are sampled.
    pub(super) log_p: LogProbability,
}

/// Log probabilities of both texts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct LogProbability {
    pub(super) plain: f64,
    pub(super) drafted: f64,
}

/// One pass over all prompts: measurements of all, and by category.
#[derive(Debug, Clone, Default)]
pub(super) struct BenchPass {
    pub(super) all: Measured,
    pub(super) categories: BTreeMap<String, Measured>,
    /// Prompts with a turn that does not fit the context; the turns before it count.
    pub(super) too_long: usize,
    /// Of greedy texts.
    pub(super) first_difference: Option<FirstDifference>,
}

impl Measured {
    fn add(&mut self, other: Measured) {
        self.times.plain.add(other.times.plain);
        self.times.drafted.add(other.times.drafted);
        self.differ |= other.differ;
        self.log_p.plain += other.log_p.plain;
        self.log_p.drafted += other.log_p.drafted;
    }
}

impl BenchRun<'_> {
    /// Warms up, then passes over the prompts `repeats` times; one [`BenchPass`] per contestant of every repeat.
    ///
    /// # Errors
    /// An error in a prompt, or no prompt that fits the backbone's context.
    pub(super) fn run(&self, repeats: usize, progress: &BenchProgress) -> anyhow::Result<Vec<Vec<BenchPass>>> {
        let mut is_warm = false;
        (0..repeats).map(|repeat| self.pass(repeat == 0, &mut is_warm, progress)).collect()
    }

    /// The expected relation between the two texts.
    pub(super) fn texts(&self) -> Texts {
        match self.setting {
            BenchSetting { forced: Some(_), .. } => Texts::Forced,
            setting if setting.decoding.temperature.get() == 0.0 => Texts::Greedy,
            _ => Texts::Sampled,
        }
    }

    fn pass(&self, is_first: bool, is_warm: &mut bool, progress: &BenchProgress) -> anyhow::Result<Vec<BenchPass>> {
        let none = BenchPass { too_long: self.skipped, ..BenchPass::default() };
        let mut passes = vec![none; self.contestants.len()];
        self.forget();
        for (index, prompt) in self.prompts {
            let answer = |turn, ids: &[i64]| {
                let ids = self.setting.prompt(ids);
                let stream = Stream { seed: self.common.seed, index: *index as u64, turn, sample: 0 };
                let request = self.setting.decoding.request(&ids, stream);
                if !std::mem::replace(is_warm, true) {
                    self.warm_up(&request)?;
                }
                let scoring = if is_first && self.texts() == Texts::Sampled { Scoring::On } else { Scoring::Off };
                let (measured, said) = self.each(&request, scoring)?;
                for (pass, (measured, drafted)) in passes.iter_mut().zip(measured) {
                    pass.add(measured, prompt.category.as_deref());
                    if measured.differ && pass.first_difference.is_none() && self.texts() == Texts::Greedy {
                        let (token, [plain, drafted]) = self.difference(request.prompt, [&said, &drafted])?;
                        let (prompt, turn) = (index + 1, turn + 1);
                        pass.first_difference = Some(FirstDifference { prompt, turn, token, plain, drafted });
                    }
                }
                Ok(self.decoder.text(&said)?)
            };
            let answered = each_turn(self.decoder, &prompt.input, answer);
            let answered =
                answered.with_context(|| format!("prompt {} of {}", index + 1, self.prompts.len() + self.skipped));
            if self.ended_early.borrow_mut().note(*index, answered, self.fit)? {
                passes.iter_mut().for_each(|pass| pass.too_long += 1);
            }
            progress.inc();
        }
        self.check_any_fits(&passes)?;
        Ok(passes)
    }

    /// Prompts that are cut to a swept context were not compared with the backbone's before.
    fn check_any_fits(&self, passes: &[BenchPass]) -> anyhow::Result<()> {
        let nothing = passes.iter().any(|pass| pass.all.times.plain.steps == 0 && pass.too_long > 0);
        anyhow::ensure!(
            !nothing,
            "no prompt fits the backbone's context of {} tokens; use shorter prompts",
            self.decoder.backbone.config.max_position_embeddings
        );
        Ok(())
    }

    /// Decodes the start of a request once with everyone, unmeasured.
    fn warm_up(&self, request: &Request) -> anyhow::Result<()> {
        let max_new_tokens = request.max_new_tokens.min(WARM_UP_TOKENS);
        self.each(&Request { max_new_tokens, ..*request }, Scoring::Off)?;
        self.forget();
        Ok(())
    }

    /// No repeat may profit from the ones before.
    fn forget(&self) {
        self.contestants.iter().for_each(|contestant| contestant.decoding.borrow_mut().forget());
    }

    /// The first token (from 1) that two answers do not share, and what each has there.
    fn difference(&self, prompt: &[i64], [plain, drafted]: [&[i64]; 2]) -> anyhow::Result<(usize, [ChosenToken; 2])> {
        let shared = plain.iter().zip(drafted).take_while(|(a, b)| a == b).count();
        let before = [prompt, &plain[..shared]].concat();
        let end = self.decoder.backbone.config.eos_token_ids.first();
        let chosen = |answer: &[i64]| {
            let own = answer.get(shared);
            let id = own.or(end).context("an answer that ended early has an end")?;
            let probability = log_probability(&self.decoder.backbone, &before, &[*id])?.exp();
            Ok(ChosenToken { text: own.map(|id| self.decoder.text(&[*id])).transpose()?, probability })
        };
        let both: anyhow::Result<_> = chosen(plain).and_then(|plain| Ok([plain, chosen(drafted)?]));
        Ok((shared + 1, both?))
    }

    /// Decodes one request plainly, then with each drafter, whose answers are returned. Returns the plain answer too, with which the
    /// conversation continues.
    fn each(&self, request: &Request, scoring: Scoring) -> anyhow::Result<(Vec<(Measured, Answer)>, Answer)> {
        let scored = |new_ids: &[i64]| match scoring {
            Scoring::On => log_probability(&self.decoder.backbone, request.prompt, new_ids),
            Scoring::Off => Ok(0.0),
        };
        let plain = decode(self.plain.as_ref().unwrap_or(&self.contestants[0].decoding), Drafting::Off, request)?;
        let plain_log_p = scored(&plain.new_ids)?;
        let measure = |contestant: &BenchDrafter| {
            let fast = decode(&contestant.decoding, Drafting::On, request)?;
            let log_p = LogProbability { plain: plain_log_p, drafted: scored(&fast.new_ids)? };
            let times = Comparison { plain: plain.tally(), drafted: fast.tally() };
            Ok((Measured { times, differ: plain.new_ids != fast.new_ids, log_p }, fast.new_ids))
        };
        let measured = self.contestants.iter().map(measure).collect::<anyhow::Result<_>>()?;
        Ok((measured, plain.new_ids))
    }
}

/// Decodes a request with an empty cache.
fn decode(
    decoding: &RefCell<Box<dyn DecodeLoop + '_>>,
    drafting: Drafting,
    request: &Request,
) -> Result<Generation, DecodeError> {
    let mut decoding = decoding.borrow_mut();
    decoding.reset();
    decoding.decode(drafting, request, &mut |_| ControlFlow::Continue(()))
}

impl BenchPass {
    fn add(&mut self, measured: Measured, category: Option<&str>) {
        self.all.add(measured);
        if let Some(name) = category {
            self.categories.entry(name.into()).or_default().add(measured);
        }
    }
}
