//! Texts of a batch are those of each text alone.

mod out_of_memory;
mod per_text;
mod random_entry;

use std::cell::Cell;
use std::ops::ControlFlow;

use tch::{Device, Kind, Tensor};

use super::*;
use crate::decode::generate::plain;
use crate::decode::request::FinishReason;
use crate::draft::heads::{Heads, HeadsShape};
use crate::draft::joined::JoinedDrafter;
use crate::draft::levels::LevelDrafter;
use crate::draft::lookahead::{LookaheadDrafter, LookaheadSize};
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::medusa::levels::MedusaLevels;
use crate::draft::model::{Guessing, ModelGuesser};
use crate::draft::ngram::NgramDrafter;
use crate::draft::recycling::RecyclingDrafter;
use crate::engine::RowTokens;
use crate::engine::cpu::CpuEngine;
use crate::engine::sample::{Sampling, Stream};
use crate::engine::tch::TchEngine;
use crate::formats::tree::DynamicTree;
use crate::model::config::LlamaConfig;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::new_tokens::NewTokens;
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
        ..Sampling::with_temperature(NonNegative::new(temperature).unwrap())
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
    run(&mut SequenceBatch::new(engine, drafter, NonZeroUsize::new(size).unwrap()), temperature, wanted)
}

/// All texts through a batch, in order of their keys.
fn run(batch: &mut SequenceBatch, temperature: f64, wanted: &[Wanted]) -> Vec<Generation> {
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
fn facts(texts: &[Generation]) -> Vec<(&[i64], &[i64], FinishReason)> {
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
                assert_eq!(facts(std::slice::from_ref(text)), facts(&[alone]));
                by_eos += u32::from(text.finish_reason == FinishReason::Eos);
                by_length += u32::from(text.finish_reason == FinishReason::Length);
            }
        }
    }
    assert!(by_eos > 20 && by_length > 20, "{by_eos} ended by an EOS, {by_length} by the length");
}

/// Whatever the length of a pass, and where a prompt is longer than one.
#[test]
fn prompts_that_run_together_make_the_same_texts() {
    for (seed, window) in [(0, None), (1, Some(5))] {
        let llama = backbone(window, vec![11, 12], seed);
        let wanted: Vec<Wanted> = (0..20).map(|key| Wanted::new(key, 1 + key * 13 % 40)).collect();
        for temperature in [0.0, 0.8] {
            let one_by_one = decode(&llama, temperature, 6, &wanted);
            for tokens in [1, 9, 30, 4096] {
                let tokens = NonZeroUsize::new(tokens).unwrap();
                let engine = Box::new(TchEngine::for_batches(&llama).with_prompts_together(tokens));
                let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(6).unwrap()).with_room(tokens);
                assert_eq!(facts(&run(&mut batch, temperature, &wanted)), facts(&one_by_one), "passes of {tokens}");
            }
        }
    }
}

/// Rows that become free one by one are filled in groups, and the last texts do not wait.
#[test]
fn prompts_wait_for_each_other_while_there_are_more() {
    let llama = backbone(None, vec![], 4);
    let wanted: Vec<Wanted> = (0..80).map(|key| Wanted::new(key, 1 + key * 13 % 40)).collect();
    let whole = decode(&llama, 0.8, 6, &wanted);
    let engine = TchEngine::for_batches(&llama).with_prompts_together(NonZeroUsize::new(4096).unwrap());
    let engine = Counted { engine: Box::new(engine), passes: Cell::new(0), steps: Cell::new(0) };
    let mut batch = SequenceBatch::new(Box::new(&engine), None, NonZeroUsize::new(24).unwrap());
    assert_eq!(facts(&run(&mut batch, 0.8, &wanted)), facts(&whole));
    let (passes, steps) = (engine.passes.get(), engine.steps.get());
    let fewest = whole.iter().map(|text| text.new_ids.len()).sum::<usize>().div_ceil(24);
    assert!((4..=20).contains(&passes), "{passes} passes over 80 prompts");
    assert!(steps < 2 * fewest, "{steps} steps, at least {fewest}");
}

/// Counts its passes.
#[derive(Debug)]
struct Counted<'a> {
    engine: Box<dyn Engine + 'a>,
    /// Over prompts.
    passes: Cell<usize>,
    steps: Cell<usize>,
}

impl Engine for &Counted<'_> {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn backbone(&self) -> &Llama {
        self.engine.backbone()
    }

    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        self.passes.set(self.passes.get() + 1);
        self.engine.extend(cache, tokens_n, batch)
    }

    fn extend_each(&self, cache: &mut KvCache, tokens_b: &Tensor, rows: &[usize], token: &NewTokens) -> Tensor {
        self.steps.set(self.steps.get() + 1);
        self.engine.extend_each(cache, tokens_b, rows, token)
    }

    fn prompt_pass(&self) -> PromptPass {
        self.engine.prompt_pass()
    }

    fn same_bits_in_any_pass(&self) -> bool {
        self.engine.same_bits_in_any_pass()
    }

    fn logits(&self, hidden_nh: &Tensor) -> Tensor {
        self.engine.logits(hidden_nh)
    }
}

/// Each reads the weights once for all of them.
#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn the_last_tokens_of_prompts_run_together_where_no_pass_changes_bits() {
    let config = LlamaConfig { max_position_embeddings: 160, ..LlamaConfig::tiny() };
    let llama = Llama::random(config, Kind::Float, Device::Cpu, 8).for_decoding();
    let prompt = |last: i64| -> Vec<i64> { (0..70).map(|at| at * at % 50).chain([last; 9]).collect() };
    let engine = Counted {
        engine: Box::new(CpuEngine::new(&llama).expect("kernels")),
        passes: Cell::new(0),
        steps: Cell::new(0),
    };
    let mut batch =
        SequenceBatch::new(Box::new(&engine), None, NonZeroUsize::new(4).unwrap()).with_prefix_cache(1 << 30);
    let mut texts_of = |last: [i64; 4]| -> Vec<(usize, Vec<i64>, usize)> {
        let before = engine.passes.get();
        last.iter().enumerate().for_each(|(key, &last)| batch.enter(key, &Request::greedy(&prompt(last), 1)).unwrap());
        let mut ended = vec![];
        while !batch.is_idle() {
            ended.extend(batch.step().unwrap());
        }
        let text = |(key, text): Ended| text.map(|text| (key, text.new_ids, engine.passes.get() - before)).unwrap();
        let mut texts: Vec<_> = ended.into_iter().map(text).collect();
        texts.sort();
        texts
    };
    let first = texts_of([1, 2, 3, 4]);
    assert_eq!(first[0].2, 2, "the first prompt, then the rests of the three that share its beginning");
    let again = texts_of([4, 3, 2, 1]);
    assert_eq!(again[0].2, 1, "four rests");
    for ((_, text, _), (_, other, _)) in first.iter().zip(again.iter().rev()) {
        assert_eq!(text, other);
    }
}

/// Even in float32, and where the last piece of a prompt is a single token, as in a step.
#[test]
fn a_prompts_bits_do_not_depend_on_the_batch() {
    tch::set_num_threads(1);
    let config = LlamaConfig { hidden_size: 128, head_dim: 32, max_position_embeddings: 600, ..LlamaConfig::tiny() };
    let llama = Llama::random(config, Kind::Float, Device::Cpu, 8).for_decoding();
    let prompt: Vec<i64> = (0..513).map(|i| i * i % 50).collect();
    let keys_and_values_behind = |others: usize| {
        let engine = Box::new(TchEngine::for_batches(&llama));
        let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(4).unwrap());
        for key in 0..others {
            batch.enter(key, &Request::greedy(&[7, 3, 9], 20)).unwrap();
        }
        batch.enter(others, &Request::greedy(&prompt, 20)).unwrap();
        batch.admit().unwrap();
        no_grad(|| batch.stepper.run_prompts(&mut batch.sequences, usize::MAX));
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
            assert_eq!(facts(&fast), facts(&slow), "heads, temperature {temperature}");
            assert!(more_than_one(&fast));
            for (text, plain) in fast.iter().zip(&slow) {
                // 25 + 25 · 4 guesses a step. The last root may have no step of its own.
                let (steps, rest) = (text.proposed / 125, text.proposed % 125);
                assert!(rest == 0 && (steps..=steps + 1).contains(&text.accept_lengths.len()), "{text:?}");
                assert_eq!(plain.proposed, 0);
            }
            let limits = DynamicTree { nodes: 60, depth: 2, top_k: 25 };
            let levels = Box::new(MedusaLevels::new(&llama, &heads, limits));
            let dynamic: Box<dyn Drafter> = Box::new(LevelDrafter::dynamic(&llama, levels, limits));
            let fast = drafted(&llama, Some((dynamic, acceptance)), temperature, 4, &wanted);
            assert_eq!(facts(&fast), facts(&slow), "trees chosen at each step, temperature {temperature}");
            assert!(more_than_one(&fast));
            let draft = backbone(None, vec![], seed + 20);
            let model_drafter = |size| {
                let guesser = ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, Guessing::Drawn);
                let model: Box<dyn Drafter> = Box::new(LevelDrafter::for_tree(&llama, Box::new(guesser), &tree));
                drafted(&llama, Some((model, acceptance)), temperature, size, &wanted)
            };
            let alone = if temperature == 0.0 { &slow } else { &model_drafter(1) };
            let fast = model_drafter(4);
            assert_eq!(facts(&fast), facts(alone), "a draft model, temperature {temperature}");
            assert!(more_than_one(&fast));
            let ngram: Box<dyn Drafter> = Box::new(NgramDrafter::new(&llama));
            let fast = drafted(&llama, Some((ngram, acceptance)), temperature, 4, &wanted);
            assert_eq!(facts(&fast), facts(&slow), "prompt lookup, temperature {temperature}");
            assert!(more_than_one(&fast));
            let recycling = || -> Box<dyn Drafter> { Box::new(RecyclingDrafter::new(&llama)) };
            let lookahead =
                || -> Box<dyn Drafter> { Box::new(LookaheadDrafter::new(&llama, LookaheadSize::PUBLISHED)) };
            let guesser = ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, Guessing::Best);
            let model: Box<dyn Drafter> = Box::new(LevelDrafter::for_tree(&llama, Box::new(guesser), &tree));
            let parts = vec![recycling(), lookahead(), model];
            let joined: Box<dyn Drafter> = Box::new(JoinedDrafter::new(&llama, parts, 30));
            for (name, drafter) in [("recycling", recycling()), ("lookahead", lookahead()), ("joined", joined)] {
                let fast = drafted(&llama, Some((drafter, acceptance)), temperature, 4, &wanted);
                assert_eq!(facts(&fast), facts(&slow), "{name}, temperature {temperature}");
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
    assert_eq!(facts(&decode(&llama, 0.8, 5, &wanted)), facts(&one_by_one));
    let backwards: Vec<Wanted> = wanted.iter().rev().cloned().collect();
    assert_eq!(facts(&decode(&llama, 0.8, 12, &backwards)), facts(&one_by_one));
    assert_ne!(facts(&decode(&llama, 0.0, 5, &wanted)), facts(&one_by_one));
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
