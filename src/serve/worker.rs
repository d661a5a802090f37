//! The thread that decodes: takes jobs as they come, runs a step of all open texts, and sends each text's events.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::mpsc::Receiver;

use super::job::Job;
use super::metrics::ServerMetrics;
use super::open_text::{OpenText, failure};
use crate::data::tokenize::TextTokenizer;
use crate::decode::error::DecodeError;
use crate::decode::request::Generation;
use crate::decode::texts::TextDecoder;

/// Decodes the jobs of a server.
#[derive(Debug)]
pub struct Worker<'a> {
    decoder: Box<dyn TextDecoder + 'a>,
    tokenizer: &'a TextTokenizer,
    metrics: ServerMetrics,
    /// In the order in which they came.
    open: BTreeMap<usize, OpenText<'a>>,
    next_key: usize,
}

impl<'a> Worker<'a> {
    /// Without texts.
    pub fn new(decoder: Box<dyn TextDecoder + 'a>, tokenizer: &'a TextTokenizer, metrics: ServerMetrics) -> Self {
        Self { decoder, tokenizer, metrics, open: BTreeMap::new(), next_key: 0 }
    }

    /// Decodes until nobody can send jobs any more.
    pub fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            if self.open.is_empty() {
                let Ok(job) = jobs.recv() else { return };
                self.enter(job);
            }
            jobs.try_iter().for_each(|job| self.enter(job));
            self.let_abandoned_go();
            self.gauge();
            self.step();
            self.gauge();
        }
    }

    fn enter(&mut self, job: Job) {
        let key = self.next_key;
        self.next_key += 1;
        match self.decoder.enter(key, &job.text.request()) {
            Ok(()) => {
                self.open.insert(key, OpenText::new(job, self.tokenizer));
            }
            Err(error) => {
                job.send(failure(&error));
            }
        }
    }

    /// Texts whose clients have gone leave at once.
    fn let_abandoned_go(&mut self) {
        let abandoned = self.open.iter().filter(|(_, text)| text.job.events.is_closed()).map(|(key, _)| *key);
        for key in abandoned.collect::<Vec<_>>() {
            let text = self.open.remove(&key);
            if let (Some(text), Some(Ok(generation))) = (text, self.decoder.cancel(key)) {
                text.count(&generation, &self.metrics);
            }
        }
    }

    fn step(&mut self) {
        let (open, metrics) = (&mut self.open, &self.metrics);
        let stepped = self.decoder.step_with(&mut |key, emitted| match open.get_mut(&key) {
            Some(text) if !text.job.events.is_closed() => text.take(emitted, metrics),
            _ => ControlFlow::Break(()),
        });
        match stepped {
            Ok(ended) => ended.into_iter().for_each(|(key, generation)| self.end(key, generation)),
            Err(error) => self.fail(&error),
        }
    }

    fn end(&mut self, key: usize, generation: Result<Generation, DecodeError>) {
        let Some(text) = self.open.remove(&key) else { return };
        if let Ok(generation) = &generation {
            text.count(generation, &self.metrics);
        }
        text.end(generation);
    }

    /// A step that failed: all its texts fail, and the next ones begin anew.
    fn fail(&mut self, error: &DecodeError) {
        self.decoder.clear();
        for text in std::mem::take(&mut self.open).into_values() {
            text.job.send(failure(error));
        }
    }

    fn gauge(&self) {
        let (running, _) = self.decoder.running_and_waiting();
        let gauges = [
            (&self.metrics.running, running),
            (&self.metrics.waiting, self.open.len() - running),
            (&self.metrics.prefix_bytes, self.decoder.prefix_bytes()),
        ];
        gauges.into_iter().for_each(|(gauge, value)| gauge.set(i64::try_from(value).unwrap_or(i64::MAX)));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::num::NonZeroUsize;
    use std::path::Path;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::Instant;

    use tch::{Device, Kind, Tensor};
    use tokio::sync::Semaphore;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::super::job::{TextEvent, TextSettings, WantedText};
    use super::*;
    use crate::decode::batch::SequenceBatch;
    use crate::engine::sample::{Sampling, Stream};
    use crate::engine::tch::TchEngine;
    use crate::engine::{Engine, RowTokens};
    use crate::model::config::LlamaConfig;
    use crate::model::kv_cache::KvCache;
    use crate::model::llama::Llama;
    use crate::numbers::{Finite, NonNegative, Positive};
    use crate::torch::raise;

    /// Fails once where it is asked to, and runs out of memory above so many tokens of a text.
    #[derive(Debug)]
    struct Failing<'a> {
        engine: TchEngine<'a>,
        fails: Rc<Cell<bool>>,
        most_tokens: i64,
    }

    impl Engine for Failing<'_> {
        fn name(&self) -> &'static str {
            self.engine.name()
        }

        fn backbone(&self) -> &Llama {
            self.engine.backbone()
        }

        fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
            if self.fails.take() {
                raise("a kernel failed on the GPU: CUDA_ERROR_ILLEGAL_ADDRESS");
            }
            if batch.iter().any(|new| cache.len(new.row) + new.nodes.len() > self.most_tokens) {
                raise("CUDA out of memory");
            }
            self.engine.extend(cache, tokens_n, batch)
        }

        fn logits(&self, states_nw: &Tensor) -> Tensor {
            self.engine.logits(states_nw)
        }
    }

    type Events = UnboundedReceiver<(usize, TextEvent)>;

    fn job(prompt: &[i64], max_new_tokens: usize) -> (Job, Events) {
        let settings = TextSettings {
            max_new_tokens,
            sampling: Sampling::with_temperature(NonNegative::ZERO),
            repetition_penalty: Positive::ONE,
            frequency_penalty: Finite::ZERO,
            presence_penalty: Finite::ZERO,
            stop: vec![],
            logprobs: None,
            acceptance: None,
        };
        let text = WantedText { prompt: prompt.into(), settings: settings.into(), stream: Stream::default() };
        let (events, heard) = unbounded_channel();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("a place");
        (Job { text, choice: 0, events, place, since: Instant::now() }, heard)
    }

    /// The ids of a text that ended, or why it failed.
    fn outcome(heard: &mut Events) -> Result<Vec<i64>, String> {
        let mut ids = vec![];
        while let Ok((_, event)) = heard.try_recv() {
            match event {
                TextEvent::Piece(piece) => ids.extend(piece.ids),
                TextEvent::Ended(piece, _) => return Ok([ids, piece.ids].concat()),
                TextEvent::Failed(why) | TextEvent::Refused(why) => return Err(why),
            }
        }
        panic!("it has neither ended nor failed, after {ids:?}")
    }

    fn answer(worker: &mut Worker, jobs: Vec<Job>) {
        jobs.into_iter().for_each(|job| worker.enter(job));
        while !worker.open.is_empty() {
            worker.step();
        }
    }

    /// Decodes with a worker whose engine fails when the cell is set.
    fn with_worker(check: impl FnOnce(Worker, &Cell<bool>)) {
        tch::set_num_threads(1);
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Double, Device::Cpu, 3);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let tokenizer = TextTokenizer::load(&folder).expect("a tokenizer");
        let fails = Rc::new(Cell::new(false));
        let engine = Failing { engine: TchEngine::for_batches(&llama), fails: fails.clone(), most_tokens: 40 };
        let batch = SequenceBatch::new(Box::new(engine), None, NonZeroUsize::new(4).expect("above 0"));
        let decoding = Box::new(batch.with_prefix_cache(1 << 20));
        check(Worker::new(decoding, &tokenizer, ServerMetrics::new().expect("metrics")), &fails);
    }

    #[test]
    fn a_text_that_does_not_fit_fails_alone() {
        with_worker(|mut worker, _| {
            let length = |text: i64| if text == 2 { 30 } else { 5 + text };
            let prompt = |text| (0..length(text)).map(|at| (at * at + text) % 50).collect();
            let prompts: Vec<Vec<i64>> = (0..6).map(prompt).collect();
            let mut texts = |most: [usize; 6]| -> Vec<Result<Vec<i64>, String>> {
                let (jobs, mut heard): (Vec<_>, Vec<_>) =
                    prompts.iter().zip(most).map(|(ids, most)| job(ids, most)).unzip();
                answer(&mut worker, jobs);
                heard.iter_mut().map(outcome).collect()
            };
            let all = texts([20, 20, 8, 20, 20, 20]);
            assert!(
                all.iter()
                    .zip([20, 20, 8, 20, 20, 20])
                    .all(|(text, most)| text.as_ref().is_ok_and(|ids| ids.len() == most))
            );
            let mut but_one = texts([20, 20, 30, 20, 20, 20]);
            let why = std::mem::replace(&mut but_one[2], all[2].clone()).expect_err("it does not fit");
            assert!(why.contains("does not fit the memory") && why.contains("fewer new tokens"), "{why}");
            assert_eq!(but_one, all);
        });
    }

    #[test]
    fn after_an_error_all_texts_fail_and_the_next_ones_are_answered() {
        with_worker(|mut worker, fails| {
            let texts = |worker: &mut Worker| -> Vec<Result<Vec<i64>, String>> {
                let (jobs, mut heard): (Vec<_>, Vec<_>) = (1..6).map(|id| job(&[id, 7, 9], 12)).unzip();
                answer(worker, jobs);
                heard.iter_mut().map(outcome).collect()
            };
            let before = texts(&mut worker);
            fails.set(true);
            for text in texts(&mut worker) {
                assert!(text.expect_err("the engine failed").contains("CUDA_ERROR_ILLEGAL_ADDRESS"));
            }
            assert!(before.iter().all(Result::is_ok));
            assert_eq!(texts(&mut worker), before);
        });
    }
}
