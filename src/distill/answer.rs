//! Decodes answers: many conversations in a batch without a drafter, or one at a time with a drafter.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use crate::decode::DecodeLoop;
use crate::decode::batch::{Ended, SequenceBatch};
use crate::decode::error::DecodeError;
use crate::decode::request::{Generation, Request};
use crate::decode::step::Drafting;
use crate::engine::sample::{Sampling, Stream};

/// A prompt whose continuation is a turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Index of the conversation.
    pub conversation: usize,
    /// Token ids, including BOS.
    pub prompt: Vec<i64>,
    /// Stops after this many tokens, or when the context is full.
    pub max_new_tokens: NonZeroUsize,
    /// Tokens that end the answer like EOS; if empty, only EOS does.
    pub end_mark: Vec<i64>,
    /// Random stream of the samples.
    pub stream: Stream,
}

/// Takes questions and returns answers.
#[derive(Debug)]
pub struct Answerer<'a> {
    sampling: Sampling,
    decoding: Decoding<'a>,
}

#[derive(Debug)]
enum Decoding<'a> {
    Together(Box<SequenceBatch<'a>>),
    OneByOne { decoding: Box<dyn DecodeLoop + 'a>, answered: Option<(usize, Generation)>, tokens: usize },
}

impl<'a> Answerer<'a> {
    /// Answers many conversations in a batch.
    pub fn together(batch: SequenceBatch<'a>, sampling: Sampling) -> Self {
        Self { sampling, decoding: Decoding::Together(Box::new(batch)) }
    }

    /// Answers one conversation at a time, with the loop's drafter.
    pub fn one_by_one(decoding: Box<dyn DecodeLoop + 'a>, sampling: Sampling) -> Self {
        Self { sampling, decoding: Decoding::OneByOne { decoding, answered: None, tokens: 0 } }
    }

    pub(super) fn has_room(&self) -> bool {
        match &self.decoding {
            Decoding::Together(batch) => batch.has_room(),
            Decoding::OneByOne { answered, .. } => answered.is_none(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        match &self.decoding {
            Decoding::Together(batch) => batch.is_idle(),
            Decoding::OneByOne { answered, .. } => answered.is_none(),
        }
    }

    /// Most conversations that are decoded together.
    pub fn batch_size(&self) -> usize {
        match &self.decoding {
            Decoding::Together(batch) => batch.size().get(),
            Decoding::OneByOne { .. } => 1,
        }
    }

    /// New tokens so far.
    pub(super) fn tokens(&self) -> usize {
        match &self.decoding {
            Decoding::Together(batch) => batch.tokens(),
            Decoding::OneByOne { tokens, .. } => *tokens,
        }
    }

    pub(super) fn enter(&mut self, question: &Question) -> Result<(), DecodeError> {
        let request = Request {
            sampling: self.sampling,
            stream: question.stream,
            end_mark: &question.end_mark,
            ..Request::greedy(&question.prompt, question.max_new_tokens.get())
        };
        match &mut self.decoding {
            Decoding::Together(batch) => batch.enter(question.conversation, &request),
            Decoding::OneByOne { decoding, answered, tokens } => {
                decoding.reset();
                let answer = decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(()))?;
                *tokens += answer.new_ids.len();
                *answered = Some((question.conversation, answer));
                Ok(())
            }
        }
    }

    /// Decodes further and returns the conversations that were answered, each with its answer or an error.
    pub(super) fn step(&mut self) -> Result<Vec<Ended>, DecodeError> {
        match &mut self.decoding {
            Decoding::Together(batch) => batch.step(),
            Decoding::OneByOne { answered, .. } => {
                Ok(answered.take().map(|(conversation, answer)| (conversation, Ok(answer))).into_iter().collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tch::{Device, Kind};

    use super::*;
    use crate::decode::host_loop::HostLoop;
    use crate::decode::request::FinishReason;
    use crate::draft::Drafter;
    use crate::draft::medusa::drafter::MedusaDrafter;
    use crate::draft::medusa::heads::{Heads, HeadsShape};
    use crate::engine::tch::TchEngine;
    use crate::model::config::LlamaConfig;
    use crate::model::llama::Llama;
    use crate::numbers::NonNegative;
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
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size: 32,
            vocab_size: 50,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Double, Device::Cpu, 5);
        let tree = SparseTree::cartesian(&[25, 8]).unwrap(); // often right, whatever it guesses
        let greedy = Sampling::of_temperature(NonNegative::ZERO);
        let answer = |end_mark: Vec<i64>, prompt: i64| {
            let max_new_tokens = NonZeroUsize::new(30).unwrap();
            let stream = Stream::default();
            let question = Question { conversation: 3, prompt: vec![prompt], max_new_tokens, end_mark, stream };
            let batch = SequenceBatch::new(Box::new(TchEngine::for_batches(&llama)), None, NonZeroUsize::MIN);
            let drafter: Box<dyn Drafter> = Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap());
            let with_heads = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, Acceptance::Greedy)));
            let answerers = [Answerer::together(batch, greedy), Answerer::one_by_one(Box::new(with_heads), greedy)];
            let [slow, fast] = answerers.map(|mut answerer| {
                answerer.enter(&question).unwrap();
                loop {
                    if let Some((conversation, answer)) = answerer.step().unwrap().pop() {
                        assert_eq!(conversation, 3);
                        return answer.unwrap();
                    }
                }
            });
            assert_eq!((&fast.new_ids, &fast.end, fast.finish_reason), (&slow.new_ids, &slow.end, slow.finish_reason));
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
