//! Plain decoding of several prompts together: a step reads the weights once for all of them. A row leaves as it ends, and
//! another one enters. At temperature 0 each text is [`plain`](super::generate::plain)'s, up to rounding between equally
//! probable tokens; what a row makes does not depend on the others.

// B rows, V vocabulary
use std::num::NonZeroUsize;

use tch::{Tensor, no_grad};

use super::request::{DecodeError, FinishReason, check_prompt};
use super::session::prefill;
use crate::engine::sample::{Sampler, Sampling, next_of_each};
use crate::model::batch_cache::BatchCache;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::guard;

/// What a row shall make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRequest {
    /// Handed back with what came of it.
    pub key: usize,
    /// Token ids, BOS among them.
    pub prompt: Vec<i64>,
    /// Stop after this many, or where the context is full.
    pub max_new_tokens: NonZeroUsize,
    /// Tokens that end the text as an EOS does; none = only an EOS does.
    pub end_mark: Vec<i64>,
    /// Of what is drawn.
    pub stream: [u64; 3],
}

/// What came of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowEnded {
    /// The request's.
    pub key: usize,
    /// The new tokens, before what ended them.
    pub new_ids: Vec<i64>,
    /// The EOS or the end mark; empty where the length ended the text.
    pub end: Vec<i64>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// Rows that are decoded together.
#[derive(Debug)]
pub struct Batch<'a> {
    backbone: &'a Llama,
    sampling: Sampling,
    size: NonZeroUsize,
    cache: BatchCache,
    /// In the order of the cache's rows.
    rows: Vec<Row>,
    /// Ended by their first token.
    ended: Vec<RowEnded>,
    tokens: usize,
}

#[derive(Debug)]
struct Row {
    key: usize,
    new_ids: Vec<i64>,
    limit: usize,
    end_mark: Vec<i64>,
    sampler: Sampler,
}

impl<'a> Batch<'a> {
    /// Without rows.
    pub fn new(backbone: &'a Llama, sampling: Sampling, size: NonZeroUsize) -> Self {
        let cache = BatchCache::new(&backbone.config, backbone.kind(), backbone.device());
        Self { backbone, sampling, size, cache, rows: vec![], ended: vec![], tokens: 0 }
    }

    /// Whether another row can enter.
    pub fn has_room(&self) -> bool {
        self.rows.len() + self.ended.len() < self.size.get()
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.rows.is_empty() && self.ended.is_empty()
    }

    /// New tokens of all rows so far, also of those that are still being made.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Runs the prompt on its own, as plain decoding does, and takes the row in.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    pub fn enter(&mut self, request: RowRequest) -> Result<(), DecodeError> {
        check_prompt(self.backbone, &request.prompt)?;
        let context = usize::try_from(self.backbone.config.max_position_embeddings).unwrap_or(0);
        let mut row = Row {
            key: request.key,
            new_ids: vec![],
            limit: request.max_new_tokens.get().min(context - request.prompt.len()),
            end_mark: request.end_mark,
            sampler: Sampler::of_stream(self.sampling, request.stream),
        };
        guard("the pass over a prompt", || {
            no_grad(|| {
                let mut prompt = KvCache::new(&self.backbone.config, self.backbone.kind(), self.backbone.device());
                let hidden_1h = prefill(self.backbone, &request.prompt, &mut prompt);
                self.tokens += 1;
                let first = row.sampler.next(&self.backbone.logits(&hidden_1h, Adapters::Off)).id;
                match row.take(first, self.backbone) {
                    Some(finish_reason) => self.ended.push(row.end(finish_reason, first)),
                    None => {
                        self.cache.push(&prompt);
                        self.rows.push(row);
                    }
                }
            });
        })?;
        Ok(())
    }

    /// A token more for every row; returns the rows that ended, which have left.
    ///
    /// # Errors
    /// [`DecodeError::Torch`].
    pub fn step(&mut self) -> Result<Vec<RowEnded>, DecodeError> {
        let mut ended = std::mem::take(&mut self.ended);
        if self.rows.is_empty() {
            return Ok(ended);
        }
        let next = guard("decoding a batch", || no_grad(|| self.next()))?;
        self.tokens += next.len();
        // From the last row on, so that the row that takes a left one's place has been looked at.
        for (at, &token) in next.iter().enumerate().rev() {
            if let Some(finish_reason) = self.rows[at].take(token, self.backbone) {
                self.cache.swap_remove(at);
                ended.push(self.rows.swap_remove(at).end(finish_reason, token));
            }
        }
        Ok(ended)
    }

    fn next(&mut self) -> Vec<i64> {
        let last: Vec<i64> = self.rows.iter().map(|row| row.new_ids[row.new_ids.len() - 1]).collect();
        let tokens_b = Tensor::from_slice(&last).to_device(self.backbone.device());
        let logits_bv = self.backbone.extend_batch(&tokens_b, &mut self.cache);
        let mut samplers: Vec<&mut Sampler> = self.rows.iter_mut().map(|row| &mut row.sampler).collect();
        next_of_each(&logits_bv, &mut samplers)
    }
}

impl Row {
    /// Takes a token; says so if it ends the text.
    fn take(&mut self, token: i64, backbone: &Llama) -> Option<FinishReason> {
        if backbone.config.eos_token_ids.contains(&token) {
            return Some(FinishReason::Eos);
        }
        self.new_ids.push(token);
        if !self.end_mark.is_empty() && self.new_ids.ends_with(&self.end_mark) {
            return Some(FinishReason::Eos);
        }
        (self.new_ids.len() == self.limit).then_some(FinishReason::Length)
    }

    /// `last`: the token that ended it.
    fn end(mut self, finish_reason: FinishReason, last: i64) -> RowEnded {
        let marked = !self.end_mark.is_empty() && self.new_ids.ends_with(&self.end_mark);
        let end = match finish_reason {
            FinishReason::Eos if marked => self.new_ids.split_off(self.new_ids.len() - self.end_mark.len()),
            FinishReason::Eos => vec![last],
            FinishReason::Length | FinishReason::Stop | FinishReason::Stopped => vec![],
        };
        RowEnded { key: self.key, new_ids: self.new_ids, end, finish_reason }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tch::{Device, Kind};

    use super::super::generate::{Request, plain};
    use super::*;
    use crate::model::config::LlamaConfig;
    use crate::numbers::{NonNegative, Positive, Probability};

    /// Weights large enough that attention matters and the text does not settle on one token.
    fn backbone(sliding_window: Option<i64>, eos_token_ids: Vec<i64>, seed: u64) -> Llama {
        tch::set_num_threads(1);
        let config = LlamaConfig { sliding_window, eos_token_ids, ..LlamaConfig::tiny() };
        let llama = Llama::random(config, Kind::Double, Device::Cpu, seed);
        for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
            let _ = weight.shallow_clone().g_mul_scalar_(8.0);
        }
        llama
    }

    fn sampling(temperature: f64) -> Sampling {
        Sampling { temperature: NonNegative::new(temperature).unwrap(), top_p: Probability::new(0.9).unwrap() }
    }

    fn request(key: usize, max_new_tokens: usize) -> RowRequest {
        let length = 1 + key * 7 % 23;
        let prompt = (0..length).map(|i| ((i * i + 5 * key) % 50) as i64).collect();
        let max_new_tokens = NonZeroUsize::new(max_new_tokens).unwrap();
        RowRequest { key, prompt, max_new_tokens, end_mark: vec![], stream: [7, key as u64, 0] }
    }

    /// All requests through a batch of this size, in order of their keys.
    fn decode(llama: &Llama, temperature: f64, size: usize, requests: &[RowRequest]) -> Vec<RowEnded> {
        let mut batch = Batch::new(llama, sampling(temperature), NonZeroUsize::new(size).unwrap());
        let (mut waiting, mut ended) = (requests.iter(), vec![]);
        loop {
            while batch.has_room() {
                let Some(request) = waiting.next() else { break };
                batch.enter(request.clone()).unwrap();
            }
            if batch.is_idle() {
                ended.sort_by_key(|row: &RowEnded| row.key);
                return ended;
            }
            ended.extend(batch.step().unwrap());
        }
    }

    #[test]
    fn each_greedy_text_is_plain_decodings() {
        let (mut by_eos, mut by_length) = (0, 0);
        for (seed, window) in [(0, None), (1, Some(5)), (2, None)] {
            let llama = backbone(window, vec![11, 12], seed);
            let requests: Vec<RowRequest> = (0..20).map(|key| request(key, 1 + key * 13 % 60)).collect();
            for size in [1, 3, 20] {
                for (row, request) in decode(&llama, 0.0, size, &requests).iter().zip(&requests) {
                    let (prompt, max_new_tokens) = (&request.prompt[..], request.max_new_tokens.get());
                    let request = Request {
                        prompt,
                        max_new_tokens,
                        sampling: sampling(0.0),
                        repetition_penalty: Positive::ONE,
                        seed: 0,
                    };
                    let alone = plain(&llama, &request, &mut |_: &[i64]| ControlFlow::Continue(())).unwrap();
                    assert_eq!((&row.new_ids, row.finish_reason), (&alone.new_ids, alone.finish_reason));
                    assert_eq!(row.end, alone.eos.into_iter().collect::<Vec<_>>());
                    by_eos += u32::from(row.finish_reason == FinishReason::Eos);
                    by_length += u32::from(row.finish_reason == FinishReason::Length);
                }
            }
        }
        assert!(by_eos > 20 && by_length > 20, "{by_eos} ended by an EOS, {by_length} by the length");
    }

    #[test]
    fn what_is_drawn_does_not_depend_on_the_batch() {
        let llama = backbone(None, vec![11], 3);
        let requests: Vec<RowRequest> = (0..12).map(|key| request(key, 40)).collect();
        let one_by_one = decode(&llama, 0.8, 1, &requests);
        assert_eq!(decode(&llama, 0.8, 5, &requests), one_by_one);
        let backwards: Vec<RowRequest> = requests.iter().rev().cloned().collect();
        assert_eq!(decode(&llama, 0.8, 12, &backwards), one_by_one);
        assert_ne!(decode(&llama, 0.0, 5, &requests), one_by_one);
    }

    #[test]
    fn an_end_mark_ends_a_text_and_is_not_part_of_it() {
        let llama = backbone(None, vec![], 4);
        let whole = decode(&llama, 0.0, 1, &[request(3, 30)]).remove(0);
        let mark = whole.new_ids[10..12].to_vec();
        let first = whole.new_ids.windows(2).position(|pair| pair == mark).expect("it is there");
        let marked = RowRequest { end_mark: mark.clone(), ..request(3, 30) };
        let row = decode(&llama, 0.0, 1, &[marked]).remove(0);
        assert_eq!((&row.new_ids[..], row.end), (&whole.new_ids[..first], mark));
        assert_eq!(row.finish_reason, FinishReason::Eos);
    }
}
