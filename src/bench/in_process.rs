//! Decodes prompts with a number of texts in flight, plainly and with drafters: a text enters when one leaves.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::time::Instant;

use tch::Device;

use super::error::BenchError;
use super::facts::DrafterFacts;
use super::timeline::{LevelRun, LoadLevel, RequestTimeline, TokenCounts};
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
use crate::tree::accept::Acceptance;

/// New tokens of each text of the unmeasured run that warms up caches and threads.
const WARM_UP_TOKENS: usize = 8;

/// Everything that the levels have in common.
pub struct LoadBench<'a> {
    pub decoder: &'a Decoder,
    /// Of the decoder's drafters.
    pub facts: &'a [DrafterFacts],
    pub engine: EngineOptions,
    /// How texts are decoded, whatever their prompts; its stream has the seed.
    pub request: Request<'a>,
    pub acceptance: Acceptance,
    /// Token ids, each prompt with its index in its file.
    pub prompts: &'a [(usize, Vec<i64>)],
    pub begin: &'a NewProgress,
}

/// Shows the progress of so many requests; the text says what is measured. The returned function learns how many ended.
pub type NewProgress = dyn Fn(usize, String) -> Box<dyn FnMut(usize)>;

/// New token ids of each request.
type LoadTexts = Vec<Vec<i64>>;

/// A batch, and the name of its engine.
type NamedBatch<'a> = (SequenceBatch<'a>, &'static str);

impl<'a> LoadBench<'a> {
    /// Measures plain decoding, then each drafter.
    ///
    /// # Errors
    /// A drafter that cannot decode this, or a text without an answer.
    pub fn level(&self, level: LoadLevel) -> Result<Vec<LoadResult>, BenchError> {
        let (plain, texts) = self.contender(level, None)?;
        let mut found = vec![plain];
        for drafter in self.decoder.drafters.iter().zip(self.facts) {
            let (result, own) = self.contender(level, Some(drafter))?;
            let identical = (self.request.sampling.temperature.get() == 0.0).then(|| own == texts);
            found.push(LoadResult { identical, ..result });
        }
        Ok(found)
    }

    /// Measures one way of decoding, after a warm-up.
    fn contender(
        &self,
        level: LoadLevel,
        drafter: Option<(&'a LoadedDrafter, &DrafterFacts)>,
    ) -> Result<(LoadResult, LoadTexts), BenchError> {
        let (mut batch, engine) = self.batch(drafter.map(|(drafter, _)| drafter), level.concurrency)?;
        let facts = drafter
            .map_or_else(|| DrafterFacts { name: PLAIN.into(), ..DrafterFacts::default() }, |(_, facts)| facts.clone());
        let max_new_tokens = self.request.max_new_tokens;
        let warm_up = LoadLevel { requests: level.concurrency.get(), ..level };
        self.measure(&mut batch, warm_up, max_new_tokens.min(WARM_UP_TOKENS), &mut |_| {})?;
        let mut on_end = (self.begin)(level.requests, format!("{} in flight, {}", level.concurrency, facts.name));
        let (run, answers) = self.measure(&mut batch, level, max_new_tokens, &mut on_end)?;
        drop(on_end);
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
    fn batch(&self, drafter: Option<&'a LoadedDrafter>, size: NonZeroUsize) -> Result<NamedBatch<'a>, BenchError> {
        let backbone = &self.decoder.backbone;
        let rule = self.acceptance;
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
    fn longest(&self) -> Result<NonZeroUsize, BenchError> {
        let context = usize::try_from(self.decoder.backbone.config.max_position_embeddings)?;
        let prompt = self.prompts.iter().map(|(_, ids)| ids.len()).max().unwrap_or(0);
        let longest = prompt.saturating_add(self.request.max_new_tokens).min(context);
        NonZeroUsize::new(longest).ok_or(BenchError::NoTokens)
    }

    /// Decodes the requests of a level. `on_end` learns how many are answered.
    fn measure(
        &self,
        batch: &mut SequenceBatch,
        level: LoadLevel,
        max_new_tokens: usize,
        on_end: &mut dyn FnMut(usize),
    ) -> Result<(LevelRun, LoadTexts), BenchError> {
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
            if batch.size() != level.concurrency {
                return Err(BenchError::OutOfMemory { fit: batch.size() });
            }
            for (key, text) in ended {
                let text = text.map_err(|source| BenchError::Text { prompt: self.prompt(key).0 + 1, source })?;
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
        let stream = Stream { seed: self.request.stream.seed, index: *index as u64, turn: 0, sample };
        Request { prompt: ids, max_new_tokens, stream, ..self.request }
    }
}
