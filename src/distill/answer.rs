//! Who answers: plain decoding of many conversations together, or Medusa decoding, one at a time.

use std::ops::ControlFlow;

use crate::decode::batch::{Batch, RowEnded, RowRequest};
use crate::decode::generate::{DecodeError, FinishReason, Generation, Medusa, Request};
use crate::decode::loops::Loop;
use crate::engine::sample::Sampling;
use crate::numbers::{NonNegative, Positive};

/// Takes requests, and hands back what was said.
#[derive(Debug)]
pub enum Answerer<'a> {
    /// Plain decoding, several requests together.
    Together(Box<Batch<'a>>),
    /// Medusa decoding.
    OneByOne(OneByOne<'a>),
}

/// Medusa decoding of one request at a time.
#[derive(Debug)]
pub struct OneByOne<'a> {
    decoding: Loop<'a>,
    medusa: &'a Medusa<'a>,
    temperature: NonNegative,
    ended: Option<RowEnded>,
    tokens: usize,
}

impl<'a> OneByOne<'a> {
    /// Above temperature 0, the acceptance of `medusa` decides; nothing is drawn.
    pub fn new(decoding: Loop<'a>, medusa: &'a Medusa<'a>, temperature: NonNegative) -> Self {
        Self { decoding, medusa, temperature, ended: None, tokens: 0 }
    }

    fn enter(&mut self, request: &RowRequest) -> Result<(), DecodeError> {
        let (prompt, max_new_tokens) = (&request.prompt[..], request.max_new_tokens.get());
        let single = Request {
            prompt,
            max_new_tokens,
            sampling: Sampling::of_temperature(self.temperature),
            repetition_penalty: Positive::ONE,
            seed: 0,
        };
        let mut new_ids = vec![];
        let mark = &request.end_mark;
        self.decoding.reset();
        let generation = self.decoding.decode(Some(self.medusa), &single, &mut |ids| {
            new_ids.extend_from_slice(ids);
            if place_of(mark, &new_ids).is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        self.tokens += generation.new_ids.len();
        self.ended = Some(ended(request, generation));
        Ok(())
    }
}

/// A step may commit tokens behind the end mark: they are dropped.
fn ended(request: &RowRequest, generation: Generation) -> RowEnded {
    let (key, mut new_ids) = (request.key, generation.new_ids);
    match place_of(&request.end_mark, &new_ids) {
        Some(at) => {
            new_ids.truncate(at);
            RowEnded { key, new_ids, end: request.end_mark.clone(), finish_reason: FinishReason::Eos }
        }
        None => {
            let end = generation.eos.into_iter().collect();
            RowEnded { key, new_ids, end, finish_reason: generation.finish_reason }
        }
    }
}

/// Where an end mark begins; an empty one is nowhere.
fn place_of(mark: &[i64], ids: &[i64]) -> Option<usize> {
    if mark.is_empty() { None } else { ids.windows(mark.len()).position(|window| window == mark) }
}

impl Answerer<'_> {
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Together(batch) => batch.has_room(),
            Self::OneByOne(one) => one.ended.is_none(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        match self {
            Self::Together(batch) => batch.is_idle(),
            Self::OneByOne(one) => one.ended.is_none(),
        }
    }

    /// New tokens so far.
    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Together(batch) => batch.tokens(),
            Self::OneByOne(one) => one.tokens,
        }
    }

    pub(super) fn enter(&mut self, request: RowRequest) -> Result<(), DecodeError> {
        match self {
            Self::Together(batch) => batch.enter(request),
            Self::OneByOne(one) => one.enter(&request),
        }
    }

    /// Goes on; returns what was said to its end.
    pub(super) fn step(&mut self) -> Result<Vec<RowEnded>, DecodeError> {
        match self {
            Self::Together(batch) => batch.step(),
            Self::OneByOne(one) => Ok(one.ended.take().into_iter().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tch::{Device, Kind};

    use super::*;
    use crate::decode::session::Session;
    use crate::draft::medusa::heads::{Heads, HeadsShape};
    use crate::model::config::LlamaConfig;
    use crate::model::llama::Llama;
    use crate::tree::accept::Acceptance;
    use crate::tree::sparse_tree::SparseTree;

    #[test]
    fn heads_end_a_text_where_the_batch_does() {
        tch::set_num_threads(1);
        let config = LlamaConfig { eos_token_ids: vec![7], ..LlamaConfig::tiny() };
        let llama = Llama::random(config, Kind::Double, Device::Cpu, 4);
        for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
            let _ = weight.shallow_clone().g_mul_scalar_(8.0);
        }
        let shape = HeadsShape { medusa_num_heads: 2, medusa_num_layers: 1, hidden_size: 32, vocab_size: 50 };
        let heads = Heads::random(shape, Kind::Double, Device::Cpu, 5);
        let tree = SparseTree::cartesian(&[25, 8]).unwrap(); // often right, whatever it guesses
        let medusa = Medusa::new(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
        let greedy = NonNegative::new(0.0).unwrap();
        let answer = |end_mark: Vec<i64>, prompt: i64| {
            let max_new_tokens = NonZeroUsize::new(30).unwrap();
            let request = RowRequest { key: 3, prompt: vec![prompt], max_new_tokens, end_mark, stream: [0; 3] };
            let batch = Batch::new(&llama, Sampling::of_temperature(greedy), NonZeroUsize::MIN);
            let together = Answerer::Together(Box::new(batch));
            let [slow, fast] =
                [together, Answerer::OneByOne(OneByOne::new(Loop::Torch(Session::new(&llama)), &medusa, greedy))].map(
                    |mut one| {
                        one.enter(request.clone()).unwrap();
                        loop {
                            if let Some(said) = one.step().unwrap().pop() {
                                return said;
                            }
                        }
                    },
                );
            assert_eq!(fast, slow);
            slow
        };
        let mut marked = 0;
        for prompt in 0..12 {
            let whole = answer(vec![], prompt);
            for at in 1..whole.new_ids.len().min(9) {
                let said = answer(whole.new_ids[at - 1..=at].to_vec(), prompt);
                assert_eq!((said.end.len(), said.finish_reason), (2, FinishReason::Eos));
                marked += 1;
            }
        }
        assert!(marked > 30, "{marked}");
    }
}
