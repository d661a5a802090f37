//! Decodes several texts at a time (continuous batching): a text leaves the batch when it ends, and another one enters. Without a
//! drafter, a step of [`TchEngine::for_batches`](crate::engine::tch::TchEngine::for_batches) reads the weights once for all texts;
//! trees and the CPU's kernels run one text after the other.
//!
//! At temperature 0 each text equals the one that [`HostLoop`](super::host_loop::HostLoop) decodes, up to rounding between equally
//! probable tokens. Sampled texts do not depend on the rest of the batch.

use std::num::NonZeroUsize;

use tch::no_grad;

use super::error::{DecodeError, check_prompt};
use super::request::{Generation, Request};
use super::sequence::Sequence;
use super::step::{Drafting, Stepper};
use crate::draft::Drafter;
use crate::engine::Engine;
use crate::torch::guard;
use crate::tree::accept::Acceptance;

/// A text's key, and what came of it: [`DecodeError::NotFinite`] where no token could be chosen.
pub type Ended = (usize, Result<Generation, DecodeError>);

/// A batch of texts.
#[derive(Debug)]
pub struct SequenceBatch<'a> {
    stepper: Stepper<'a>,
    size: NonZeroUsize,
    /// In the order of the cache's rows.
    sequences: Vec<Sequence>,
    /// The sequences' keys, in the same order.
    keys: Vec<usize>,
    /// Texts that ended with their first token; the next step returns them.
    ended: Vec<Ended>,
    /// New tokens of texts that have left.
    left: usize,
}

impl<'a> SequenceBatch<'a> {
    /// A batch of at most `size` texts.
    pub fn new(
        engine: Box<dyn Engine + 'a>,
        drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>,
        size: NonZeroUsize,
    ) -> Self {
        Self { stepper: Stepper::new(engine, drafter), size, sequences: vec![], keys: vec![], ended: vec![], left: 0 }
    }

    /// Whether another text can enter.
    pub fn has_room(&self) -> bool {
        self.sequences.len() + self.ended.len() < self.size.get()
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.ended.is_empty()
    }

    /// New tokens so far, unfinished texts included.
    pub fn tokens(&self) -> usize {
        self.left + self.sequences.iter().map(|sequence| sequence.text.new_ids().len()).sum::<usize>()
    }

    /// Runs the prompt and adds the text to the batch; [`SequenceBatch::step`] returns its result under `key`.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    pub fn enter(&mut self, key: usize, request: &Request) -> Result<(), DecodeError> {
        let config = &self.stepper.engine().backbone().config;
        check_prompt(config, request.prompt)?;
        let mut sequence = Sequence::new(request, config);
        let row = self.sequences.len();
        let begun = guard("the pass over a prompt", || {
            self.stepper.push_row();
            no_grad(|| self.stepper.begin(&mut sequence, row, Drafting::On));
        });
        if let Err(panic) = begun {
            self.stepper.truncate_rows(row);
            return Err(panic.into());
        }
        self.sequences.push(sequence);
        self.keys.push(key);
        if self.sequences[row].text.has_ended() {
            let ended = self.leave(row);
            self.ended.push(ended);
        }
        Ok(())
    }

    /// Returns the texts that ended with their first token; if there are none, runs one step for every text and returns the texts that
    /// ended. They leave the batch.
    ///
    /// # Errors
    /// [`DecodeError::Torch`].
    pub fn step(&mut self) -> Result<Vec<Ended>, DecodeError> {
        let mut ended = std::mem::take(&mut self.ended);
        if self.sequences.is_empty() || !ended.is_empty() {
            return Ok(ended); // a step that fails would lose them
        }
        guard("decoding a batch", || no_grad(|| self.stepper.step(&mut self.sequences, Drafting::On)))?;
        // Last row first: `swap_remove` then only moves rows that were already checked.
        for row in (0..self.sequences.len()).rev() {
            if self.sequences[row].text.has_ended() {
                ended.push(self.leave(row));
            }
        }
        Ok(ended)
    }

    fn leave(&mut self, row: usize) -> Ended {
        self.stepper.swap_remove(row);
        let generation = self.sequences.swap_remove(row).finish();
        self.left += generation.as_ref().map_or(0, |text| text.new_ids.len() + text.end.len());
        (self.keys.swap_remove(row), generation)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tch::{Device, Kind};

    use super::super::generate::plain;
    use super::super::request::FinishReason;
    use super::*;
    use crate::draft::joined::JoinedDrafter;
    use crate::draft::levels::LevelDrafter;
    use crate::draft::lookahead::{LookaheadDrafter, LookaheadSize};
    use crate::draft::medusa::drafter::MedusaDrafter;
    use crate::draft::medusa::heads::{Heads, HeadsShape};
    use crate::draft::medusa::levels::MedusaLevels;
    use crate::draft::model::{Guessing, ModelGuesser};
    use crate::draft::ngram::NgramDrafter;
    use crate::draft::recycling::RecyclingDrafter;
    use crate::engine::sample::{Sampling, Stream};
    use crate::engine::tch::TchEngine;
    use crate::formats::tree::DynamicTree;
    use crate::model::config::LlamaConfig;
    use crate::model::llama::Llama;
    use crate::numbers::{NonNegative, Probability};
    use crate::tree::sparse_tree::SparseTree;

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
        Sampling {
            top_p: Probability::new(0.9).unwrap(),
            ..Sampling::of_temperature(NonNegative::new(temperature).unwrap())
        }
    }

    /// A text that somebody wants.
    #[derive(Debug, Clone)]
    struct Wanted {
        key: usize,
        prompt: Vec<i64>,
        max_new_tokens: usize,
        end_mark: Vec<i64>,
    }

    impl Wanted {
        fn new(key: usize, max_new_tokens: usize) -> Self {
            let length = 1 + key * 7 % 23;
            let prompt = (0..length).map(|i| ((i * i + 5 * key) % 50) as i64).collect();
            Self { key, prompt, max_new_tokens, end_mark: vec![] }
        }

        fn request(&self, temperature: f64) -> Request<'_> {
            let stream = Stream { seed: 7, index: self.key as u64, ..Stream::default() };
            let greedy = Request::greedy(&self.prompt, self.max_new_tokens);
            Request { sampling: sampling(temperature), stream, end_mark: &self.end_mark, ..greedy }
        }
    }

    /// All texts through a batch of this size, in order of their keys.
    fn decode(llama: &Llama, temperature: f64, size: usize, wanted: &[Wanted]) -> Vec<Generation> {
        drafted(llama, None, temperature, size, wanted)
    }

    fn drafted<'a>(
        llama: &'a Llama,
        drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>,
        temperature: f64,
        size: usize,
        wanted: &[Wanted],
    ) -> Vec<Generation> {
        let engine = Box::new(TchEngine::for_batches(llama));
        let mut batch = SequenceBatch::new(engine, drafter, NonZeroUsize::new(size).unwrap());
        let (mut waiting, mut ended) = (wanted.iter(), vec![]);
        loop {
            while batch.has_room() {
                let Some(next) = waiting.next() else { break };
                batch.enter(next.key, &next.request(temperature)).unwrap();
            }
            if batch.is_idle() {
                ended.sort_by_key(|(key, _)| *key);
                return ended.into_iter().map(|(_, text): Ended| text.unwrap()).collect();
            }
            ended.extend(batch.step().unwrap());
        }
    }

    /// What does not depend on the clock.
    fn told(texts: &[Generation]) -> Vec<(&[i64], &[i64], FinishReason)> {
        texts.iter().map(|text| (&text.new_ids[..], &text.end[..], text.finish_reason)).collect()
    }

    #[test]
    fn each_greedy_text_is_plain_decodings() {
        let (mut by_eos, mut by_length) = (0, 0);
        for (seed, window) in [(0, None), (1, Some(5)), (2, None)] {
            let llama = backbone(window, vec![11, 12], seed);
            let wanted: Vec<Wanted> = (0..20).map(|key| Wanted::new(key, 1 + key * 13 % 60)).collect();
            for size in [1, 3, 20] {
                for (text, wanted) in decode(&llama, 0.0, size, &wanted).iter().zip(&wanted) {
                    let go_on = &mut |_: &[i64]| ControlFlow::Continue(());
                    let alone = plain(&llama, &wanted.request(0.0), go_on).unwrap();
                    assert_eq!(told(std::slice::from_ref(text)), told(&[alone]));
                    by_eos += u32::from(text.finish_reason == FinishReason::Eos);
                    by_length += u32::from(text.finish_reason == FinishReason::Length);
                }
            }
        }
        assert!(by_eos > 20 && by_length > 20, "{by_eos} ended by an EOS, {by_length} by the length");
    }

    /// Even in float32, and where the last piece of a prompt is a single token, as in a step.
    #[test]
    fn a_prompts_bits_do_not_depend_on_the_batch() {
        tch::set_num_threads(1);
        let config =
            LlamaConfig { hidden_size: 128, head_dim: 32, max_position_embeddings: 600, ..LlamaConfig::tiny() };
        let llama = Llama::random(config, Kind::Float, Device::Cpu, 8).for_decoding();
        let prompt: Vec<i64> = (0..513).map(|i| i * i % 50).collect();
        let keys_and_values_behind = |others: usize| {
            let engine = Box::new(TchEngine::for_batches(&llama));
            let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(4).unwrap());
            for key in 0..others {
                batch.enter(key, &Request::greedy(&[7, 3, 9], 20)).unwrap();
            }
            batch.enter(others, &Request::greedy(&prompt, 20)).unwrap();
            batch.stepper.cache().committed(others)
        };
        assert_eq!(keys_and_values_behind(0), keys_and_values_behind(2));
    }

    #[test]
    fn texts_of_different_temperatures_share_a_batch() {
        let llama = backbone(None, vec![11], 3);
        let wanted: Vec<Wanted> = (0..2).map(|key| Wanted::new(key, 20)).collect();
        let alone = [0.0, 0.9].map(|temperature| decode(&llama, temperature, 1, &wanted));
        let engine = Box::new(TchEngine::for_batches(&llama));
        let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(2).unwrap());
        for (text, temperature) in wanted.iter().zip([0.0, 0.9]) {
            batch.enter(text.key, &text.request(temperature)).unwrap();
        }
        let mut ended = vec![];
        while !batch.is_idle() {
            ended.extend(batch.step().unwrap());
        }
        ended.sort_by_key(|(key, _)| *key);
        for (key, text) in ended {
            assert_eq!(text.unwrap().new_ids, alone[key][key].new_ids);
        }
    }

    /// Several texts, each with its tree, in one step.
    #[test]
    fn a_batch_with_a_drafter_makes_the_texts_of_one_without() {
        let more_than_one = |texts: &[Generation]| texts.iter().any(|text| text.accept_lengths.iter().any(|&n| n > 1));
        for (seed, window) in [(5, None), (6, Some(5))] {
            let llama = backbone(window, vec![11], seed);
            let shape = HeadsShape {
                medusa_num_heads: 2,
                medusa_num_layers: 1,
                hidden_size: 32,
                vocab_size: 50,
                ..HeadsShape::default()
            };
            let heads = Heads::random(shape, Kind::Double, Device::Cpu, seed);
            let tree = SparseTree::cartesian(&[25, 4]).unwrap(); // often right, whatever it guesses
            let wanted: Vec<Wanted> = (0..9).map(|key| Wanted::new(key, 30)).collect();
            for (temperature, acceptance) in [(0.0, Acceptance::Greedy), (0.8, Acceptance::Rejection)] {
                let slow = decode(&llama, temperature, 4, &wanted);
                let medusa: Box<dyn Drafter> = Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap());
                let fast = drafted(&llama, Some((medusa, acceptance)), temperature, 4, &wanted);
                assert_eq!(told(&fast), told(&slow), "heads, temperature {temperature}");
                assert!(more_than_one(&fast));
                let limits = DynamicTree { nodes: 60, depth: 2, top_k: 25 };
                let levels = Box::new(MedusaLevels::new(&llama, &heads, limits));
                let dynamic: Box<dyn Drafter> = Box::new(LevelDrafter::dynamic(&llama, levels, limits));
                let fast = drafted(&llama, Some((dynamic, acceptance)), temperature, 4, &wanted);
                assert_eq!(told(&fast), told(&slow), "trees chosen at each step, temperature {temperature}");
                assert!(more_than_one(&fast));
                let draft = backbone(None, vec![], seed + 20);
                let of_model = |size| {
                    let guesser = ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, Guessing::Drawn);
                    let model: Box<dyn Drafter> = Box::new(LevelDrafter::of_tree(&llama, Box::new(guesser), &tree));
                    drafted(&llama, Some((model, acceptance)), temperature, size, &wanted)
                };
                let alone = if temperature == 0.0 { &slow } else { &of_model(1) };
                let fast = of_model(4);
                assert_eq!(told(&fast), told(alone), "a draft model, temperature {temperature}");
                assert!(more_than_one(&fast));
                let ngram: Box<dyn Drafter> = Box::new(NgramDrafter::new(&llama));
                let fast = drafted(&llama, Some((ngram, acceptance)), temperature, 4, &wanted);
                assert_eq!(told(&fast), told(&slow), "prompt lookup, temperature {temperature}");
                assert!(more_than_one(&fast));
                let recycling = || -> Box<dyn Drafter> { Box::new(RecyclingDrafter::new(&llama)) };
                let lookahead =
                    || -> Box<dyn Drafter> { Box::new(LookaheadDrafter::new(&llama, LookaheadSize::PUBLISHED)) };
                let guesser = ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, Guessing::Best);
                let model: Box<dyn Drafter> = Box::new(LevelDrafter::of_tree(&llama, Box::new(guesser), &tree));
                let parts = vec![recycling(), lookahead(), model];
                let joined: Box<dyn Drafter> = Box::new(JoinedDrafter::new(&llama, parts, 30));
                for (name, drafter) in [("recycling", recycling()), ("lookahead", lookahead()), ("joined", joined)] {
                    let fast = drafted(&llama, Some((drafter, acceptance)), temperature, 4, &wanted);
                    assert_eq!(told(&fast), told(&slow), "{name}, temperature {temperature}");
                    assert!(more_than_one(&fast), "{name}, temperature {temperature}");
                }
            }
        }
    }

    #[test]
    fn what_is_drawn_does_not_depend_on_the_batch() {
        let llama = backbone(None, vec![11], 3);
        let wanted: Vec<Wanted> = (0..12).map(|key| Wanted::new(key, 40)).collect();
        let one_by_one = decode(&llama, 0.8, 1, &wanted);
        assert_eq!(told(&decode(&llama, 0.8, 5, &wanted)), told(&one_by_one));
        let backwards: Vec<Wanted> = wanted.iter().rev().cloned().collect();
        assert_eq!(told(&decode(&llama, 0.8, 12, &backwards)), told(&one_by_one));
        assert_ne!(told(&decode(&llama, 0.0, 5, &wanted)), told(&one_by_one));
    }

    #[test]
    fn logits_with_nan_fail_their_text_and_no_other() {
        let llama = backbone(None, vec![], 3);
        let wanted: Vec<Wanted> = (0..4).map(|key| Wanted::new(key, 20)).collect();
        let whole = decode(&llama, 0.0, 1, &wanted);
        // A token whose embedding is NaN: from the pass over it on, no token can be chosen.
        let bad = *whole[2].new_ids.iter().find(|id| !wanted[2].prompt.contains(id)).expect("a new token");
        let weights = llama.weights();
        let (_, embed_vh) = weights.iter().find(|(name, _)| name.contains("embed")).expect("an embedding");
        let _ = embed_vh.select(0, bad).fill_(f64::NAN);
        for temperature in [0.0, 0.8] {
            let engine = Box::new(TchEngine::for_batches(&llama));
            let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(4).unwrap());
            wanted.iter().for_each(|text| batch.enter(text.key, &text.request(temperature)).unwrap());
            let (mut ended, mut failed) = (vec![], 0);
            while !batch.is_idle() {
                ended.extend(batch.step().unwrap());
            }
            assert_eq!(ended.len(), 4);
            for (key, text) in ended {
                match text {
                    Ok(text) => assert!(!text.new_ids.contains(&bad) && !wanted[key].prompt.contains(&bad)),
                    Err(DecodeError::NotFinite { token }) if temperature == 0.0 => {
                        let first = whole[key].new_ids.iter().position(|&id| id == bad).map_or(0, |at| at + 1);
                        assert_eq!(token, if wanted[key].prompt.contains(&bad) { 1 } else { first + 1 });
                        failed += 1;
                    }
                    Err(DecodeError::NotFinite { .. }) => failed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(failed > 0 || temperature > 0.0);
        }
    }

    #[test]
    fn an_end_mark_ends_a_text_and_is_not_part_of_it() {
        let llama = backbone(None, vec![], 4);
        let whole = decode(&llama, 0.0, 1, &[Wanted::new(3, 30)]).remove(0);
        let mark = whole.new_ids[10..12].to_vec();
        let first = whole.new_ids.windows(2).position(|pair| pair == mark).expect("it is there");
        let marked = Wanted { end_mark: mark.clone(), ..Wanted::new(3, 30) };
        let text = decode(&llama, 0.0, 1, &[marked]).remove(0);
        assert_eq!((&text.new_ids[..], text.end), (&whole.new_ids[..first], mark));
        assert_eq!(text.finish_reason, FinishReason::Eos);
    }
}
