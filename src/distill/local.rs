//! The backbone in this process answers: many conversations in a batch, or one at a time with the CUDA engine.

use super::answer::{Answered, Answerer, Question, WrittenAnswer};
use super::error::{AnswerError, DistillError};
use crate::decode::request::{Generation, Request};
use crate::decode::texts::TextDecoder;
use crate::engine::sample::Sampling;

/// Answers with a backbone.
#[derive(Debug)]
pub struct BackboneAnswerer<'a> {
    sampling: Sampling,
    decoder: Box<dyn TextDecoder + 'a>,
}

impl<'a> BackboneAnswerer<'a> {
    /// Samples each answer with its question's stream.
    pub fn new(decoder: Box<dyn TextDecoder + 'a>, sampling: Sampling) -> Self {
        Self { sampling, decoder }
    }
}

impl Answerer for BackboneAnswerer<'_> {
    fn has_room(&self) -> bool {
        self.decoder.has_room()
    }

    fn is_idle(&self) -> bool {
        self.decoder.is_idle()
    }

    fn batch_size(&self) -> usize {
        self.decoder.size().get()
    }

    fn tokens(&self) -> usize {
        self.decoder.tokens()
    }

    fn enter(&mut self, question: Question) -> Result<(), AnswerError> {
        let request = Request {
            sampling: self.sampling,
            stream: question.stream,
            end_mark: &question.end_mark,
            ..Request::greedy(&question.prompt.ids, question.max_new_tokens.get())
        };
        Ok(self.decoder.enter(question.conversation, &request)?)
    }

    fn step(&mut self) -> Result<Vec<Answered>, DistillError> {
        let answered = |(conversation, generation): (usize, Result<Generation, _>)| {
            (conversation, generation.map(WrittenAnswer::from).map_err(AnswerError::from))
        };
        Ok(self.decoder.step()?.into_iter().map(answered).collect())
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
    use crate::decode::batch::SequenceBatch;
    use crate::decode::host_loop::HostLoop;
    use crate::decode::request::FinishReason;
    use crate::decode::texts::SerialDecoder;
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
        let greedy = Sampling::with_temperature(NonNegative::ZERO);
        let answer = |end_mark: Vec<i64>, prompt: i64| {
            let max_new_tokens = NonZeroUsize::new(30).unwrap();
            let stream = Stream::default();
            let prompt = Rendered { text: String::new(), ids: vec![prompt] };
            let input = PromptInput::Ids(vec![]);
            let question = Question { conversation: 3, input, prompt, max_new_tokens, end_mark, stream };
            let batch = SequenceBatch::new(Box::new(TchEngine::for_batches(&llama)), None, NonZeroUsize::MIN);
            let drafter: Box<dyn Drafter> = Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap());
            let with_heads = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, Acceptance::Greedy)));
            let answerers = [
                BackboneAnswerer::new(Box::new(batch), greedy),
                BackboneAnswerer::new(Box::new(SerialDecoder::new(Box::new(with_heads)).with_resets()), greedy),
            ];
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
