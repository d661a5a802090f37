//! Decodes prompts with a number of texts in flight, plainly and with drafters: a text enters when one leaves.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Context;
use tch::Device;

use super::super::drafters::DrafterFacts;
use super::flags::LoadLevel;
use super::output::LoadOutput;
use super::timeline::{LevelRun, RequestTimeline, TokenCounts};
use crate::cli::CommonFlags;
use crate::cli::decoding::DecodingFlags;
use crate::cli::progress::Counter;
use crate::decode::batch::SequenceBatch;
use crate::decode::request::Request;
use crate::decode::stats::GeneratedTokens;
use crate::decode::texts::TextDecoder;
use crate::dtype::Dtype;
use crate::engine::sample::Stream;
use crate::formats::bench::PLAIN;
use crate::formats::load::{LoadResult, LoadSource};
use crate::session::Decoder;
use crate::session::drafter::Drafts;
use crate::session::drafter::loaded::LoadedDrafter;
use crate::session::engine::EngineOptions;
use crate::torch::device_name;

/// New tokens of each text of the unmeasured run that warms up caches and threads.
const WARM_UP_TOKENS: usize = 8;

/// Everything that the levels have in common.
pub(in crate::cli::bench) struct LoadBench<'a> {
    pub(in crate::cli::bench) decoder: &'a Decoder,
    /// Of the decoder's drafters.
    pub(in crate::cli::bench) facts: &'a [DrafterFacts],
    pub(in crate::cli::bench) engine: EngineOptions,
    pub(in crate::cli::bench) decoding: &'a DecodingFlags,
    /// Token ids, each prompt with its index in its file.
    pub(in crate::cli::bench) prompts: Vec<(usize, Vec<i64>)>,
    pub(in crate::cli::bench) common: &'a CommonFlags,
}

/// New token ids of each request.
type LoadTexts = Vec<Vec<i64>>;

/// A batch, and the name of its engine.
type NamedBatch<'a> = (SequenceBatch<'a>, &'static str);

impl<'a> LoadBench<'a> {
    /// Measures every level, and reports each as soon as it is measured.
    ///
    /// # Errors
    /// A drafter that cannot decode this, a text without an answer, an output that cannot be written.
    pub(in crate::cli::bench) fn run(&self, levels: &[LoadLevel], output: &mut LoadOutput) -> anyhow::Result<()> {
        levels.iter().try_for_each(|level| {
            let found = self.level(*level).with_context(|| format!("--concurrency {}", level.concurrency))?;
            output.add(found)
        })
    }

    /// Plain decoding, then each drafter.
    fn level(&self, level: LoadLevel) -> anyhow::Result<Vec<LoadResult>> {
        let (plain, texts) = self.contender(level, None)?;
        let mut found = vec![plain];
        for drafter in self.decoder.drafters.iter().zip(self.facts) {
            let (result, own) = self.contender(level, Some(drafter))?;
            let identical = (self.decoding.temperature.get() == 0.0).then(|| own == texts);
            found.push(LoadResult { identical, ..result });
        }
        Ok(found)
    }

    /// Measures one way of decoding, after a warm-up.
    fn contender(
        &self,
        level: LoadLevel,
        drafter: Option<(&'a LoadedDrafter, &DrafterFacts)>,
    ) -> anyhow::Result<(LoadResult, LoadTexts)> {
        let (mut batch, engine) = self.batch(drafter.map(|(drafter, _)| drafter), level.concurrency)?;
        let facts = drafter
            .map_or_else(|| DrafterFacts { name: PLAIN.into(), ..DrafterFacts::default() }, |(_, facts)| facts.clone());
        let max_new_tokens = self.decoding.max_new_tokens;
        let warm_up = LoadLevel { requests: level.concurrency.get(), ..level };
        self.measure(&mut batch, warm_up, max_new_tokens.min(WARM_UP_TOKENS), &mut |_| {})?;
        let counter = Counter::new(level.requests, 0, "requests", self.common);
        let note = format!("{} in flight, {}", level.concurrency, facts.name);
        let (run, answers) = self.measure(&mut batch, level, max_new_tokens, &mut |done| counter.set(done, &note))?;
        drop(counter);
        let backbone = &self.decoder.backbone;
        let source = LoadSource::Process {
            drafter: facts.name,
            weights: facts.weights,
            device: device_name(backbone.device()),
            dtype: Dtype::of(backbone.kind()).to_string(),
            quantization: backbone.quantization().map(|quantization| quantization.to_string()),
            engine: engine.into(),
        };
        Ok((run.result(level.concurrency.get(), source), answers))
    }

    /// A batch with the tree that the drafter chooses by the number of texts.
    fn batch(&self, drafter: Option<&'a LoadedDrafter>, size: NonZeroUsize) -> anyhow::Result<NamedBatch<'a>> {
        let backbone = &self.decoder.backbone;
        let rule = self.decoding.acceptance()?;
        let drafts = drafter.map(|drafter| Drafts::for_batches(backbone, drafter, rule)).transpose()?;
        let guesses = drafts.as_ref().map_or(0, |(_, guesses)| *guesses);
        let engine = self.engine.for_batches(self.decoder)?;
        let name = engine.name();
        let batch = SequenceBatch::new(engine, drafts.map(|(drafter, _)| (drafter, rule)), size);
        let batch = match backbone.device() {
            Device::Cpu => batch,
            _ => batch.with_room(self.longest()?.saturating_add(guesses)), // a cache that grows takes the memory of two
        };
        Ok((batch, name))
    }

    /// Tokens of the longest text.
    fn longest(&self) -> anyhow::Result<NonZeroUsize> {
        let context = usize::try_from(self.decoder.backbone.config.max_position_embeddings)?;
        let prompt = self.prompts.iter().map(|(_, ids)| ids.len()).max().unwrap_or(0);
        let longest = prompt.saturating_add(self.decoding.max_new_tokens).min(context);
        NonZeroUsize::new(longest).context("the prompts have no tokens")
    }

    /// Decodes the requests of a level. `on_end` learns how many are answered.
    fn measure(
        &self,
        batch: &mut SequenceBatch,
        level: LoadLevel,
        max_new_tokens: usize,
        on_end: &mut dyn FnMut(usize),
    ) -> anyhow::Result<(LevelRun, LoadTexts)> {
        let began = Instant::now();
        let mut timelines: Vec<RequestTimeline> = Vec::with_capacity(level.requests);
        let (mut run, mut answers) = (LevelRun::default(), vec![vec![]; level.requests]);
        while run.answered.len() < level.requests {
            while batch.has_room() && timelines.len() < level.requests {
                let key = timelines.len();
                timelines.push(RequestTimeline::begin(Instant::now()));
                batch.enter(key, &self.request(key, max_new_tokens))?;
            }
            let ended = batch.step_with(&mut |key, _| {
                timelines[key].arrive(Instant::now());
                ControlFlow::Continue(())
            })?;
            anyhow::ensure!(
                batch.size() == level.concurrency,
                "out of memory: only {} fit; lower --concurrency or --max-new-tokens",
                batch.size()
            );
            for (key, text) in ended {
                let text = text.with_context(|| format!("prompt {}", self.prompt(key).0 + 1))?;
                let GeneratedTokens { tokens, steps } = text.generated();
                let counts = TokenCounts { prompt: self.prompt(key).1.len(), new: tokens, steps: Some(steps) };
                run.answered.push(timelines[key].clone().end(Instant::now(), counts));
                answers[key] = text.new_ids;
                on_end(run.answered.len());
            }
        }
        run.elapsed = began.elapsed();
        Ok((run, answers))
    }

    fn prompt(&self, request: usize) -> &(usize, Vec<i64>) {
        &self.prompts[request % self.prompts.len()]
    }

    /// Each repetition of a prompt draws from a stream of its own.
    fn request(&self, request: usize, max_new_tokens: usize) -> Request<'_> {
        let (index, ids) = self.prompt(request);
        let sample = (request / self.prompts.len()) as u64;
        let stream = Stream { seed: self.common.seed, index: *index as u64, turn: 0, sample };
        Request { max_new_tokens, ..self.decoding.request(ids, stream) }
    }
}
