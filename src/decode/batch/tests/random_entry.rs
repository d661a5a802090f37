//! Texts that enter at random times, with prompts in pieces and beginnings in common, some of them cancelled: on the CPU's kernels, each is the text
//! that is decoded alone, greedy and by seed.

use std::collections::HashMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::decode::DecodeLoop;
use crate::decode::host_loop::HostLoop;
use crate::decode::request::EmittedTokens;
use crate::draft::by_load::LoadDrafter;
use crate::dtype::DraftDtype;
use crate::engine::cpu::CpuEngine;
use crate::tree::by_load::{AtLoad, ByLoad};

/// What a text is, and when it comes and goes.
struct Visit {
    wanted: Wanted,
    temperature: f64,
    /// The step before which it enters.
    enters: usize,
    /// Cancelled so many steps later.
    stays: Option<usize>,
}

impl Visit {
    fn random(key: usize, rng: &mut ChaCha8Rng) -> Self {
        // Every other one has a beginning in common.
        let common = (0..if rng.random_bool(0.5) { 70 } else { 0 }).map(|at| at * at % 50);
        let own: Vec<i64> = (0..rng.random_range(1..50)).map(|_| rng.random_range(0..50)).collect();
        let prompt: Vec<i64> = common.chain(own).collect();
        let wanted = Wanted { key, prompt, max_new_tokens: rng.random_range(1..40), end_mark: vec![] };
        let temperature = if rng.random_bool(0.5) { 0.0 } else { 0.8 };
        let stays = rng.random_bool(0.15).then(|| rng.random_range(0..12));
        Self { wanted, temperature, enters: rng.random_range(0..30), stays }
    }
}

/// Weights as those of [`backbone`], for the kernels: `in_blocks` of 8 bits, or in `kind`, which is that of the cache.
fn on_kernels(seed: u64, (kind, in_blocks): (Kind, bool)) -> Llama {
    let tiny = LlamaConfig { eos_token_ids: vec![11], max_position_embeddings: 160, ..LlamaConfig::tiny() };
    // Attention in bfloat16 is on tiles for heads of 32.
    let head_dim = if kind == Kind::BFloat16 { 32 } else { tiny.head_dim };
    let llama = Llama::random(LlamaConfig { head_dim, ..tiny }, kind, Device::Cpu, seed);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(8.0);
    }
    if in_blocks { llama.for_guesses(DraftDtype::Int8) } else { llama.for_decoding() }
}

/// All visits through a batch. The tokens that are emitted are those of the generation, whenever it ends.
fn visit(batch: &mut SequenceBatch, visits: &[Visit]) -> HashMap<usize, Generation> {
    let mut heard: HashMap<usize, Vec<i64>> = HashMap::new();
    let mut texts = HashMap::new();
    for step in 0.. {
        for Visit { wanted, temperature, .. } in visits.iter().filter(|visit| visit.enters == step) {
            batch.enter(wanted.key, &wanted.request(*temperature)).unwrap();
        }
        for visit in visits.iter().filter(|visit| visit.stays.is_some_and(|steps| visit.enters + steps == step)) {
            if let Some(text) = batch.cancel(visit.wanted.key) {
                texts.insert(visit.wanted.key, text.unwrap());
            }
        }
        let mut listen = |key: usize, emitted: EmittedTokens| {
            heard.entry(key).or_default().extend(emitted.ids);
            ControlFlow::Continue(())
        };
        texts.extend(batch.step_with(&mut listen).unwrap().into_iter().map(|(key, text)| (key, text.unwrap())));
        if batch.is_idle() && visits.iter().all(|visit| visit.enters <= step) {
            break;
        }
    }
    for (key, text) in &texts {
        assert_eq!(heard.get(key).map_or(&[][..], |ids| &ids[..]), text.new_ids, "text {key}");
    }
    texts
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn each_text_is_the_one_that_is_decoded_alone() {
    each_is_the_one_decoded_alone((Kind::Float, false));
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn each_text_in_bfloat16_is_the_one_that_is_decoded_alone() {
    each_is_the_one_decoded_alone((Kind::BFloat16, false));
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn each_text_on_weights_in_blocks_is_the_one_that_is_decoded_alone() {
    each_is_the_one_decoded_alone((Kind::BFloat16, true));
}

fn each_is_the_one_decoded_alone(weights: (Kind, bool)) {
    let (mut ended, mut cancelled, mut accepted, mut reused) = (0, 0, 0, 0);
    for (seed, count) in [1, 2, 7, 32].into_iter().enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(seed as u64);
        let llama = on_kernels(seed as u64, weights);
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size: 32,
            vocab_size: 50,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, weights.0, Device::Cpu, seed as u64).for_decoding(DraftDtype::default());
        let (tree, small) = (SparseTree::cartesian(&[12, 2]).unwrap(), SparseTree::chain(2).unwrap());
        let visits: Vec<Visit> = (0..count).map(|key| Visit::random(key, &mut rng)).collect();
        let mut alone = HostLoop::new(Box::new(CpuEngine::new(&llama).expect("kernels")), None);
        for drafts in ["nothing", "a tree", "a tree by the number of texts"] {
            let medusa = |tree| MedusaDrafter::new(&llama, &heads, tree).unwrap();
            let drafter: Option<Box<dyn Drafter>> = match drafts {
                "nothing" => None,
                "a tree" => Some(Box::new(medusa(&tree))),
                _ => {
                    let at_load = |texts, tree: Option<_>| AtLoad {
                        texts,
                        tree: tree.map(|tree| Box::new(medusa(tree)) as Box<dyn Drafter>),
                    };
                    let parts =
                        ByLoad::new(vec![at_load(1, Some(&tree)), at_load(3, Some(&small)), at_load(8, None)]).unwrap();
                    Some(Box::new(LoadDrafter::new(&llama, parts)))
                }
            };
            let drafter = drafter.map(|drafter| (drafter, Acceptance::Rejection));
            let size = NonZeroUsize::new(rng.random_range(1..=count)).unwrap();
            let pieces = NonZeroUsize::new(rng.random_range(1..100)).unwrap();
            let engine = Box::new(CpuEngine::new(&llama).expect("kernels"));
            // Some 20 blocks of 16 tokens.
            let prefixes = 20 * 16 * 2 * llama.config.num_hidden_layers * llama.config.key_value_size() as usize * 4;
            let mut batch =
                SequenceBatch::new(engine, drafter, size).with_prompt_tokens(pieces).with_prefix_cache(prefixes);
            let texts = visit(&mut batch, &visits);
            reused += batch.reused_tokens();
            for (key, text) in texts {
                let Visit { wanted, temperature, .. } = &visits[key];
                alone.reset();
                let go_on = &mut |_: &[i64]| ControlFlow::Continue(());
                let whole = alone.decode(Drafting::Off, &wanted.request(*temperature), go_on).unwrap();
                accepted += text.accept_lengths.iter().filter(|&&length| length > 1).count();
                if text.finish_reason == FinishReason::Stopped {
                    assert!(whole.new_ids.starts_with(&text.new_ids), "text {key}");
                    cancelled += 1;
                } else {
                    assert_eq!(facts(&[text]), facts(&[whole]), "text {key} of {count}, drafting {drafts}");
                    ended += 1;
                }
            }
        }
    }
    assert!(ended > 60 && cancelled > 2 && accepted > 50, "{ended} ended, {cancelled} cancelled, {accepted} accepted");
    assert!(reused > 500, "{reused} tokens reused");
}

/// On engines that run one prompt at a time, and on those that run several.
#[test]
fn a_text_counts_the_tokens_of_its_prompt_that_were_not_computed() {
    let config = LlamaConfig { max_position_embeddings: 160, ..LlamaConfig::tiny() };
    let llama = Llama::random(config, Kind::Double, Device::Cpu, 3);
    let prompt = |own: i64| (0..70).map(|at| at * at % 50).chain([own; 9]).collect::<Vec<i64>>();
    let texts = [prompt(7), prompt(8), prompt(7), prompt(7)[..64].to_vec(), vec![9; 40]];
    for together in [None, NonZeroUsize::new(4096)] {
        let engine = together.into_iter().fold(TchEngine::for_batches(&llama), TchEngine::with_prompts_together);
        let size = NonZeroUsize::new(4).unwrap();
        let mut batch = SequenceBatch::new(Box::new(engine), None, size).with_prefix_cache(1 << 30);
        let mut cached = |keys: std::ops::Range<usize>| -> Vec<usize> {
            keys.clone().for_each(|key| batch.enter(key, &Request::greedy(&texts[key], 5)).unwrap());
            let mut ended = vec![];
            while !batch.is_idle() {
                ended.extend(batch.step().unwrap());
            }
            ended.sort_by_key(|(key, _)| *key);
            ended.into_iter().map(|(_, text): Ended| text.unwrap().cached).collect()
        };
        assert_eq!(cached(0..1), [0]);
        // Whole blocks of 16, and never a prompt's last token.
        assert_eq!(cached(1..5), [64, 64, 48, 0], "{together:?}");
        assert_eq!(batch.reused_tokens(), 176);
    }
}

/// A step at a load without guesses is one of plain decoding.
#[test]
fn a_load_without_guesses_steps_as_plain_decoding_does() {
    let llama = backbone(None, vec![], 4);
    let wanted: Vec<Wanted> = (0..3).map(|key| Wanted::new(key, 20)).collect();
    let drafter: Box<dyn Drafter> = {
        let ngram: Box<dyn Drafter> = Box::new(NgramDrafter::new(&llama));
        let parts = vec![AtLoad { texts: 1, tree: Some(ngram) }, AtLoad { texts: 2, tree: None }];
        Box::new(LoadDrafter::new(&llama, ByLoad::new(parts).unwrap()))
    };
    let engine =
        Counted { engine: Box::new(TchEngine::for_batches(&llama)), passes: Cell::new(0), steps: Cell::new(0) };
    let size = NonZeroUsize::new(3).unwrap();
    let mut batch = SequenceBatch::new(Box::new(&engine), Some((drafter, Acceptance::Greedy)), size);
    assert_eq!(facts(&run(&mut batch, 0.0, &wanted)), facts(&decode(&llama, 0.0, 3, &wanted)));
    assert_eq!((engine.passes.get(), engine.steps.get()), (3, 19), "a pass over each prompt, and steps");
}

/// A listener ends a text, and the others go on.
#[test]
fn a_listener_can_end_a_text() {
    let llama = backbone(None, vec![], 4);
    let wanted: Vec<Wanted> = (0..3).map(|key| Wanted::new(key, 20)).collect();
    let whole = decode(&llama, 0.8, 3, &wanted);
    let mut batch = SequenceBatch::new(Box::new(TchEngine::for_batches(&llama)), None, NonZeroUsize::new(3).unwrap());
    wanted.iter().for_each(|text| batch.enter(text.key, &text.request(0.8)).unwrap());
    let (mut heard, mut texts) = ([0; 3], vec![]);
    while !batch.is_idle() {
        let mut listen = |key: usize, emitted: EmittedTokens| {
            heard[key] += emitted.ids.len();
            if key == 1 && heard[1] >= 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        texts.extend(batch.step_with(&mut listen).unwrap());
    }
    texts.sort_by_key(|(key, _)| *key);
    let texts: Vec<Generation> = texts.into_iter().map(|(_, text)| text.unwrap()).collect();
    assert_eq!((&texts[1].new_ids[..], texts[1].finish_reason), (&whole[1].new_ids[..5], FinishReason::Stopped));
    assert_eq!([facts(&texts[..1]), facts(&texts[2..])], [facts(&whole[..1]), facts(&whole[2..])]);
}

/// While a long prompt is computed, the others get a token a step.
#[test]
fn nobody_waits_for_anothers_prompt() {
    let llama = backbone(None, vec![], 4);
    let engine = Box::new(TchEngine::for_batches(&llama));
    let mut batch = SequenceBatch::new(engine, None, NonZeroUsize::new(2).unwrap())
        .with_prompt_tokens(NonZeroUsize::new(4).unwrap());
    batch.enter(0, &Wanted::new(0, 20).request(0.0)).unwrap();
    assert!(batch.step().unwrap().is_empty());
    let long: Vec<i64> = (0..30).map(|i| i % 50).collect();
    batch.enter(1, &Request::greedy(&long, 9)).unwrap();
    let mut emitted_by_text = [vec![], vec![]];
    for _ in 0..9 {
        let mut new = [0; 2];
        let mut listen = |key: usize, emitted: EmittedTokens| {
            new[key] = emitted.ids.len();
            ControlFlow::Continue(())
        };
        batch.step_with(&mut listen).unwrap();
        (0..2).for_each(|key| emitted_by_text[key].push(new[key]));
    }
    assert_eq!(emitted_by_text[0], [1; 9]);
    assert_eq!(emitted_by_text[1], [0, 0, 0, 0, 0, 0, 0, 2, 1], "30 tokens in pieces of 4");
}
