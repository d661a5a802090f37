//! The backbone in this process answers: many conversations in a batch, or one at a time with the CUDA engine.

use std::ops::ControlFlow;

use super::answer::{Answered, Answerer, Question, WrittenAnswer};
use super::error::{AnswerError, DistillError};
use crate::decode::DecodeLoop;
use crate::decode::batch::SequenceBatch;
use crate::decode::request::{Generation, Request};
use crate::decode::step::Drafting;
use crate::engine::sample::Sampling;

/// Answers with a backbone.
#[derive(Debug)]
pub struct BackboneAnswerer<'a> {
    sampling: Sampling,
    decoding: Decoding<'a>,
}

#[derive(Debug)]
enum Decoding<'a> {
    Together(Box<SequenceBatch<'a>>),
    OneByOne { decoding: Box<dyn DecodeLoop + 'a>, answered: Option<(usize, Generation)>, tokens: usize },
}

impl<'a> BackboneAnswerer<'a> {
    /// Answers many conversations in a batch.
    pub fn together(batch: SequenceBatch<'a>, sampling: Sampling) -> Self {
        Self { sampling, decoding: Decoding::Together(Box::new(batch)) }
    }

    /// Answers one conversation at a time, with the loop's drafter.
    pub fn one_by_one(decoding: Box<dyn DecodeLoop + 'a>, sampling: Sampling) -> Self {
        Self { sampling, decoding: Decoding::OneByOne { decoding, answered: None, tokens: 0 } }
    }
}

impl Answerer for BackboneAnswerer<'_> {
    fn has_room(&self) -> bool {
        match &self.decoding {
            Decoding::Together(batch) => batch.has_room(),
            Decoding::OneByOne { answered, .. } => answered.is_none(),
        }
    }

    fn is_idle(&self) -> bool {
        match &self.decoding {
            Decoding::Together(batch) => batch.is_idle(),
            Decoding::OneByOne { answered, .. } => answered.is_none(),
        }
    }

    fn batch_size(&self) -> usize {
        match &self.decoding {
            Decoding::Together(batch) => batch.size().get(),
            Decoding::OneByOne { .. } => 1,
        }
    }

    fn tokens(&self) -> usize {
        match &self.decoding {
            Decoding::Together(batch) => batch.tokens(),
            Decoding::OneByOne { tokens, .. } => *tokens,
        }
    }

    fn enter(&mut self, question: Question) -> Result<(), AnswerError> {
        let request = Request {
            sampling: self.sampling,
            stream: question.stream,
            end_mark: &question.end_mark,
            ..Request::greedy(&question.prompt.ids, question.max_new_tokens.get())
        };
        match &mut self.decoding {
            Decoding::Together(batch) => Ok(batch.enter(question.conversation, &request)?),
            Decoding::OneByOne { decoding, answered, tokens } => {
                decoding.reset();
                let answer = decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(()))?;
                *tokens += answer.new_ids.len();
                *answered = Some((question.conversation, answer));
                Ok(())
            }
        }
    }

    fn step(&mut self) -> Result<Vec<Answered>, DistillError> {
        let ended = match &mut self.decoding {
            Decoding::Together(batch) => batch.step()?,
            Decoding::OneByOne { answered, .. } => {
                answered.take().map(|(conversation, answer)| (conversation, Ok(answer))).into_iter().collect()
            }
        };
        let answered = |(conversation, generation): (usize, Result<Generation, _>)| {
            (conversation, generation.map(WrittenAnswer::from).map_err(AnswerError::from))
        };
        Ok(ended.into_iter().map(answered).collect())
    }

    /// Answers that are not whole cannot be kept.
    fn last_answers(&mut self) -> Vec<Answered> {
        vec![]
    }
}

impl From<Generation> for WrittenAnswer {
    fn from(said: Generation) -> Self {
        Self { text: None, new_ids: said.new_ids, end: said.end, finish_reason: said.finish_reason }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tch::{Device, Kind};

    use super::*;
    use crate::data::prompts::PromptInput;
    use crate::decode::host_loop::HostLoop;
    use crate::decode::request::FinishReason;
    use crate::distill::render::Rendered;
    use crate::draft::Drafter;
    use crate::draft::heads::{Heads, HeadsShape};
    use crate::draft::medusa::drafter::MedusaDrafter;
    use crate::engine::sample::Stream;
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
            let prompt = Rendered { text: String::new(), ids: vec![prompt] };
            let input = PromptInput::Ids(vec![]);
            let question = Question { conversation: 3, input, prompt, max_new_tokens, end_mark, stream };
            let batch = SequenceBatch::new(Box::new(TchEngine::for_batches(&llama)), None, NonZeroUsize::MIN);
            let drafter: Box<dyn Drafter> = Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap());
            let with_heads = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, Acceptance::Greedy)));
            let answerers =
                [BackboneAnswerer::together(batch, greedy), BackboneAnswerer::one_by_one(Box::new(with_heads), greedy)];
            let [slow, fast] = answerers.map(|mut answerer| {
                answerer.enter(question.clone()).unwrap();
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
