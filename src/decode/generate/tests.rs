//! The oracle at work: whatever heads and tree, greedy Medusa text is greedy plain text. In float64, where no two logits tie.

mod draft_model;
mod levels;
mod not_finite;
mod training_free;

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::decode::request::FinishReason;
use crate::draft::heads::{Heads, HeadsShape};
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::ngram::NgramDrafter;
use crate::engine::cpu::CpuEngine;
use crate::engine::sample::{Sampling, Stream};
use crate::model::attention::RowMask;
use crate::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use crate::model::lora::Adapters;
use crate::numbers::{Finite, NonNegative, Positive, Probability};
use crate::tree::accept::{Acceptance, TypicalAcceptance};
use crate::tree::sparse_tree::SparseTree;
use crate::tree::sparse_tree::strategy::trees;

pub(in crate::decode) const VOCABULARY: i64 = 12;
pub(in crate::decode) const CONTEXT: i64 = 64;
const TOP_K: usize = 6; // half of the vocabulary: even random heads are often right

pub(in crate::decode) fn config(
    num_key_value_heads: i64,
    sliding_window: Option<i64>,
    eos_token_ids: Vec<i64>,
) -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads,
        head_dim: 6,
        vocab_size: VOCABULARY,
        max_position_embeddings: CONTEXT,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window,
        tie_word_embeddings: false,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        eos_token_ids,
    }
}

/// Weights large enough that attention matters and the text does not settle on one token.
pub(in crate::decode) fn backbone(config: LlamaConfig, seed: u64) -> Llama {
    tch::set_num_threads(1); // tests run side by side: threads that wait for each other would take most of the time
    let llama = Llama::random(config, Kind::Double, Device::Cpu, seed);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(8.0);
    }
    llama
}

pub(in crate::decode) fn heads(num_heads: usize, seed: u64) -> Heads {
    random_heads(num_heads, 32, VOCABULARY, seed)
}

fn random_heads(medusa_num_heads: usize, hidden_size: i64, vocab_size: i64, seed: u64) -> Heads {
    let shape = HeadsShape { medusa_num_heads, medusa_num_layers: 1, hidden_size, vocab_size, ..HeadsShape::default() };
    Heads::random(shape, Kind::Double, Device::Cpu, seed)
}

pub(in crate::decode) fn request(prompt: &[i64], max_new_tokens: usize, temperature: f64) -> Request<'_> {
    let sampling = Sampling::with_temperature(NonNegative::new(temperature).expect("at least 0"));
    Request { sampling, ..Request::greedy(prompt, max_new_tokens) }
}

/// Heads and tree laid out, and which guesses are accepted.
pub(in crate::decode) fn prepare<'a>(
    llama: &'a Llama,
    heads: &'a Heads,
    tree: &'a SparseTree,
    acceptance: Acceptance,
) -> Result<(MedusaDrafter<'a>, Acceptance), Box<dyn std::error::Error>> {
    let acceptance = match acceptance {
        Acceptance::Forced { rate } => Acceptance::at_rate(rate, tree)?,
        other => other,
    };
    Ok((MedusaDrafter::new(llama, heads, tree)?, acceptance))
}

fn seeded(seed: u64) -> Stream {
    Stream { seed, ..Stream::default() }
}

/// [`drafted`], with heads.
pub(in crate::decode) fn medusa(
    llama: &Llama,
    (drafter, acceptance): &(MedusaDrafter, Acceptance),
    request: &Request,
    on_tokens: &mut OnTokens,
) -> Result<Generation, DecodeError> {
    drafted(llama, drafter.clone(), *acceptance, request, on_tokens)
}

pub(in crate::decode) fn go_on() -> impl FnMut(&[i64]) -> ControlFlow<()> {
    |_| ControlFlow::Continue(())
}

/// Whatever two heads guess, the right tokens are among it.
pub(in crate::decode) fn every_pair_of_guesses() -> SparseTree {
    SparseTree::cartesian(&[VOCABULARY as usize; 2]).unwrap()
}

fn steps_are_consistent(generation: &Generation, limit: usize) {
    assert_eq!(generation.accept_lengths.iter().sum::<usize>(), generation.new_ids.len());
    assert!(generation.accept_lengths.iter().all(|&length| length >= 1) && generation.new_ids.len() <= limit);
}

/// One random world to decode in.
#[derive(Debug, Clone)]
struct Case {
    tree: SparseTree,
    key_value_heads: i64,
    window: Option<i64>,
    eos: Vec<i64>,
    prompt: Vec<i64>,
    max_new_tokens: usize,
    acceptance: Acceptance,
    repetition_penalty: Positive,
    frequency_penalty: Finite,
    presence_penalty: Finite,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let prompt = prop_oneof![1usize..12, 50..CONTEXT as usize]; // the second kind reaches the context's end
    let prompt = prompt.prop_flat_map(|length| proptest::collection::vec(0..VOCABULARY, length));
    let eos = prop_oneof![1 => Just(vec![]), 3 => proptest::collection::vec(0..VOCABULARY, 1..3)];
    let backbone = (prop_oneof![Just(1i64), Just(2), Just(4)], prop_oneof![Just(None), (1i64..10).prop_map(Some)]);
    let penalty = prop_oneof![2 => Just(1.0), 1 => 0.5f64..0.9, 2 => 1.1f64..2.0];
    let subtracted = || prop_oneof![2 => Just(0.0), 1 => -1.0f64..2.0].prop_map(|by| Finite::new(by).expect("finite"));
    let request = (prompt, 0usize..40, acceptances(), (penalty, subtracted(), subtracted()));
    (trees(20, 4, TOP_K), backbone, eos, request, 0u64..1000).prop_map(
        |(tree, (key_value_heads, window), eos, (prompt, max_new_tokens, acceptance, penalties), seed)| Case {
            tree,
            key_value_heads,
            window,
            eos,
            prompt,
            max_new_tokens,
            acceptance,
            repetition_penalty: Positive::new(penalties.0).expect("above 0"),
            frequency_penalty: penalties.1,
            presence_penalty: penalties.2,
            seed,
        },
    )
}

/// At temperature 0 they are all the same.
fn acceptances() -> impl Strategy<Value = Acceptance> {
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    prop_oneof![2 => Just(Acceptance::Greedy), 1 => Just(typical), 1 => Just(Acceptance::Nucleus), 1 => Just(Acceptance::Rejection)]
}

#[test]
fn greedy_tree_equals_greedy_plain() {
    let (runs_with_several, penalised_runs_with_several) = (Cell::new(0), Cell::new(0));
    let (runs_to_eos, runs_to_the_context, lookups_with_several) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let guessed_ends = Cell::new(0);
    let count = |counter: &Cell<u32>, yes: bool| counter.set(counter.get() + u32::from(yes));
    let mut runner = TestRunner::new(Config { cases: 160, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&cases(), |case| {
        let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        let heads = heads(4, case.seed + 1);
        let prepared = prepare(&llama, &heads, &case.tree, case.acceptance).unwrap();
        let (frequency_penalty, presence_penalty) = (case.frequency_penalty, case.presence_penalty);
        let request = Request {
            repetition_penalty: case.repetition_penalty,
            frequency_penalty,
            presence_penalty,
            ..request(&case.prompt, case.max_new_tokens, 0.0)
        };
        let slow = plain(&llama, &request, &mut go_on()).unwrap();
        let mut streamed = Vec::new();
        let fast = medusa(&llama, &prepared, &request, &mut |ids: &[i64]| {
            streamed.extend_from_slice(ids);
            ControlFlow::Continue(())
        })
        .unwrap();
        prop_assert_eq!(&fast.new_ids, &slow.new_ids);
        prop_assert_eq!(&streamed, &fast.new_ids);
        let looked_up = drafted(&llama, NgramDrafter::new(&llama), case.acceptance, &request, &mut go_on()).unwrap();
        prop_assert_eq!((&looked_up.new_ids, looked_up.finish_reason), (&slow.new_ids, slow.finish_reason));
        steps_are_consistent(&looked_up, case.max_new_tokens);
        count(&lookups_with_several, looked_up.accept_lengths.iter().any(|&length| length > 1));
        prop_assert_eq!(fast.finish_reason, slow.finish_reason);
        prop_assert!(slow.accept_lengths.iter().all(|&length| length == 1));
        steps_are_consistent(&fast, case.max_new_tokens);
        steps_are_consistent(&slow, case.max_new_tokens);
        prop_assert_eq!((slow.generated().accepted(), slow.generated().tokens), (0, fast.generated().tokens));
        prop_assert!(fast.generated().accepted() <= fast.proposed);
        let guessed_end = |text: &Generation| !text.end.is_empty() && text.end_steps == 0;
        count(&guessed_ends, guessed_end(&fast) || guessed_end(&looked_up));
        let counted = frequency_penalty != Finite::ZERO || presence_penalty != Finite::ZERO;
        let penalised = case.repetition_penalty != Positive::ONE && counted;
        count(&penalised_runs_with_several, penalised && fast.accept_lengths.iter().any(|&length| length > 1));
        count(&runs_with_several, fast.accept_lengths.iter().any(|&length| length > 1));
        count(&runs_to_eos, fast.finish_reason == FinishReason::Eos);
        count(&runs_to_the_context, case.prompt.len() + fast.new_ids.len() == CONTEXT as usize);
        Ok(())
    });
    outcome.unwrap();
    let reached =
        [&runs_with_several, &penalised_runs_with_several, &lookups_with_several, &runs_to_eos, &runs_to_the_context]
            .map(Cell::get);
    assert!(guessed_ends.get() > 0, "no EOS was an accepted guess");
    assert!(reached.iter().all(|&runs| runs >= 5), "the cases hardly test anything: {reached:?}");
}

/// The distribution after each token of a text, by one plain pass over it; penalised by hand.
fn distributions(llama: &Llama, text: &[i64], temperature: f64, penalty: f64) -> Vec<Vec<f64>> {
    let rows = RowMask::causal(text.len() as i64, &llama.config, Device::Cpu);
    let hidden_th = llama.hidden_states(&Tensor::from_slice(text).unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
    let mut logits: Vec<Vec<f64>> =
        Vec::try_from(llama.logits(&hidden_th, Adapters::Off)).expect("two axes of float64");
    for (at, row) in logits.iter_mut().enumerate() {
        for (_, logit) in row.iter_mut().enumerate().filter(|(token, _)| text[..=at].contains(&(*token as i64))) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        let powers: Vec<f64> = row.iter().map(|logit| (logit / temperature).exp()).collect();
        *row = powers.iter().map(|power| power / powers.iter().sum::<f64>()).collect();
    }
    logits
}

/// Every token of a typical run, judged by one plain pass over the whole text.
#[test]
fn typical_decoding_keeps_only_what_the_rule_accepts() {
    let (rule, temperature) = (TypicalAcceptance { posterior_threshold: 0.2, posterior_alpha: 0.5 }, 0.7);
    let (mut roots, mut others, mut not_the_best) = (0, 0, 0);
    for (seed, penalty) in (0..12).zip([1.0, 1.3].into_iter().cycle()) {
        let llama = backbone(config(2, None, vec![]), seed);
        let (heads, tree) = (heads(2, seed), every_pair_of_guesses());
        let prepared = prepare(&llama, &heads, &tree, Acceptance::Typical(rule)).unwrap();
        let prompt = [1, 2, 3, 4];
        let repetition_penalty = Positive::new(penalty).unwrap();
        let request = Request { repetition_penalty, ..request(&prompt, 40, temperature) };
        let run = medusa(&llama, &prepared, &request, &mut go_on()).unwrap();
        steps_are_consistent(&run, 40);
        let text: Vec<i64> = prompt.iter().chain(&run.new_ids).copied().collect();
        let p_t = distributions(&llama, &text, temperature, penalty);
        let mut at = prompt.len();
        for &length in &run.accept_lengths {
            for below_root in 0..length {
                let p = &p_t[at - 1];
                let (chosen, largest) = (p[text[at] as usize], p.iter().copied().fold(0.0, f64::max));
                let entropy = -p.iter().map(|x| x * x.ln()).sum::<f64>();
                if below_root == 0 {
                    assert_eq!(chosen, largest, "the root is the most probable token");
                    roots += 1;
                } else {
                    assert!(chosen > rule.threshold(entropy) - 1e-6, "{chosen} at entropy {entropy}");
                    others += 1;
                    not_the_best += usize::from(chosen < largest);
                }
                at += 1;
            }
        }
    }
    assert!(roots > 100 && others > 20 && not_the_best > 5, "{roots} {others} {not_the_best}");
}

/// Every token of a nucleus run, roots too, judged by one plain pass over the whole text.
#[test]
fn nucleus_decoding_stays_in_the_nucleus_and_draws_its_roots_there() {
    let (top_p, temperature) = (0.6, 1.3);
    let unlimited = Sampling::with_temperature(NonNegative::new(temperature).unwrap());
    let penalty = 1.2;
    let repetition_penalty = Positive::new(penalty).unwrap();
    let (mut roots, mut others) = ([0, 0], [0, 0]); // all of them, and those that are not the most probable token
    for seed in 0..12 {
        let llama = backbone(config(2, None, vec![]), seed);
        let (heads, tree) = (heads(2, seed), SparseTree::cartesian(&[6, 4]).unwrap());
        let prepared = prepare(&llama, &heads, &tree, Acceptance::Nucleus).unwrap();
        let prompt = [1, 2, 3, 4];
        let top_k = NonZeroUsize::new(if seed % 3 == 0 { 4 } else { 0 });
        let sampling = Sampling { top_k, top_p: Probability::new(top_p).unwrap(), ..unlimited };
        let request =
            Request { sampling, repetition_penalty, stream: seeded(seed), ..request(&prompt, 40, temperature) };
        let run = medusa(&llama, &prepared, &request, &mut go_on()).unwrap();
        steps_are_consistent(&run, 40);
        let text: Vec<i64> = prompt.iter().chain(&run.new_ids).copied().collect();
        let p_t = distributions(&llama, &text, temperature, penalty);
        let mut at = prompt.len();
        for &length in &run.accept_lengths {
            for below_root in 0..length {
                let (p, token) = (&p_t[at - 1], text[at] as usize);
                let mut sorted = p.clone();
                sorted.sort_unstable_by(|a, b| b.total_cmp(a));
                sorted.truncate(top_k.map_or(p.len(), NonZeroUsize::get));
                assert!(p[token] >= sorted[sorted.len() - 1] - 1e-6, "top-k");
                let more_probable =
                    p.iter().filter(|&&other| other > p[token]).sum::<f64>() / sorted.iter().sum::<f64>();
                assert!(more_probable < top_p + 1e-6, "{more_probable}");
                let counts = if below_root == 0 { &mut roots } else { &mut others };
                counts[0] += 1;
                counts[1] += usize::from(more_probable > 0.0);
                at += 1;
            }
        }
    }
    assert!(roots[1] > 20 && others[0] > 100 && others[1] > 20, "{roots:?} {others:?}");
}

/// A draw a token, in the order of the text: what heads and tree guess does not change what is drawn.
#[test]
fn rejection_with_a_seed_is_plain_decoding_with_that_seed() {
    let (mut tokens, mut steps) = (0, 0);
    for (seed, (temperature, top_p, penalty)) in (0..60)
        .zip([(0.7, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.9, 1.0), (0.7, 0.9, 1.4), (1.0, 1.0, 0.8)].into_iter().cycle())
    {
        let llama = backbone(config(2, (seed % 2 == 1).then_some(5), vec![3]), seed / 5);
        let heads = heads(3, seed);
        let tree = SparseTree::cartesian(&[6, 4, 3]).unwrap();
        let prepared = prepare(&llama, &heads, &tree, Acceptance::Rejection).unwrap();
        let top_k = NonZeroUsize::new(if seed % 3 == 0 { 5 } else { 0 });
        let (temperature, top_p) = (NonNegative::new(temperature).unwrap(), Probability::new(top_p).unwrap());
        let sampling = Sampling { temperature, top_k, top_p };
        let repetition_penalty = Positive::new(penalty).unwrap();
        let frequency_penalty = Finite::new(if seed % 4 == 0 { 0.6 } else { 0.0 }).unwrap();
        let request = Request { frequency_penalty, sampling, repetition_penalty, ..request(&[1, 2, 1], 50, 0.0) };
        let request = Request { stream: seeded(seed), ..request };
        let slow = plain(&llama, &request, &mut go_on()).unwrap();
        let fast = medusa(&llama, &prepared, &request, &mut go_on()).unwrap();
        let looked_up =
            drafted(&llama, NgramDrafter::new(&llama), Acceptance::Rejection, &request, &mut go_on()).unwrap();
        assert_eq!((&looked_up.new_ids, looked_up.finish_reason), (&slow.new_ids, slow.finish_reason), "seed {seed}");
        assert_eq!((fast.new_ids, fast.finish_reason), (slow.new_ids, slow.finish_reason), "seed {seed}");
        tokens += slow.accept_lengths.len();
        steps += fast.accept_lengths.len();
    }
    assert!(tokens > 400 && tokens > steps * 3 / 2, "{tokens} tokens in {steps} steps");
}

/// Beyond any difference between logits, no token comes twice, and the prompt's may come.
#[test]
fn a_presence_penalty_keeps_tokens_of_the_text_from_coming_again_and_leaves_the_prompts() {
    let llama = backbone(config(2, None, vec![]), 12);
    let prompt: Vec<i64> = (0..VOCABULARY).collect();
    let by = Finite::new(1e6).unwrap();
    for request in [
        Request { presence_penalty: by, ..request(&prompt, VOCABULARY as usize, 0.0) },
        Request { frequency_penalty: by, ..request(&prompt, VOCABULARY as usize, 1.0) },
    ] {
        let mut ids = plain(&llama, &request, &mut go_on()).unwrap().new_ids;
        ids.sort_unstable();
        assert_eq!(ids, prompt);
    }
}

#[test]
fn a_repetition_penalty_keeps_a_text_from_repeating_itself() {
    let llama = backbone(config(2, None, vec![]), 12);
    let text = |penalty: f64, temperature: f64| {
        let repetition_penalty = Positive::new(penalty).unwrap();
        plain(&llama, &Request { repetition_penalty, ..request(&[1], 10, temperature) }, &mut go_on()).unwrap().new_ids
    };
    let different = |ids: Vec<i64>| ids.iter().collect::<std::collections::HashSet<_>>().len();
    let [often, unpenalised, never] = [1e-6, 1.0, 1e6].map(|penalty| different(text(penalty, 0.0)));
    assert!(often < unpenalised && unpenalised < never, "{often} {unpenalised} {never}");
    assert_ne!(text(1.0, 1.0), text(1.3, 1.0), "what is drawn follows the penalised distribution");
}

#[test]
fn forced_steps_commit_their_rate_whatever_the_backbone_says() {
    let llama = backbone(config(2, None, vec![]), 13);
    let (heads, tree) =
        (heads(3, 13), SparseTree::new(vec![vec![0], vec![1], vec![0, 0], vec![0, 1], vec![1, 0]]).unwrap());
    let at_rate = |rate| prepare(&llama, &heads, &tree, Acceptance::Forced { rate });
    for (rate, temperature, steps) in [(1.0, 0.0, 48), (1.5, 0.7, 32), (2.4, 0.0, 20), (3.0, 1.0, 16)] {
        let run = medusa(&llama, &at_rate(rate).unwrap(), &request(&[1, 2], 48, temperature), &mut go_on()).unwrap();
        assert_eq!((run.new_ids.len(), run.accept_lengths.len()), (48, steps), "{rate}: {:?}", run.accept_lengths);
    }
    for rate in [0.9, 3.1, f64::NAN] {
        let refused = at_rate(rate).unwrap_err().to_string();
        assert!(
            refused.starts_with(&format!(
                "an acceptance rate of {rate} tokens per step cannot be forced; expected 1 to 3"
            )),
            "{refused}"
        );
    }
}

#[test]
fn a_full_context_ends_either_decoding_by_its_length() {
    let llama = backbone(config(2, None, vec![]), 14);
    let (heads, tree) = (heads(2, 14), every_pair_of_guesses());
    let prepared = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
    for length in [CONTEXT as usize - 1, CONTEXT as usize - 2, 30] {
        let prompt: Vec<i64> = (0..length as i64).map(|i| i * i % VOCABULARY).collect();
        let request = request(&prompt, 1000, 0.0);
        let slow = plain(&llama, &request, &mut go_on()).unwrap();
        let fast = medusa(&llama, &prepared, &request, &mut go_on()).unwrap();
        assert_eq!((slow.new_ids.len(), slow.finish_reason), (CONTEXT as usize - length, FinishReason::Length));
        assert_eq!((fast.new_ids, fast.finish_reason), (slow.new_ids, FinishReason::Length));
    }
}

#[test]
fn a_threshold_that_nothing_exceeds_leaves_the_roots_which_are_greedy() {
    let llama = backbone(config(2, None, vec![]), 7);
    let (heads, tree) = (heads(2, 7), SparseTree::cartesian(&[6, 6]).unwrap());
    let never = TypicalAcceptance { posterior_threshold: 1.0, posterior_alpha: f64::INFINITY };
    let prepared = prepare(&llama, &heads, &tree, Acceptance::Typical(never)).unwrap();
    let run = medusa(&llama, &prepared, &request(&[5, 6], 20, 1.0), &mut go_on()).unwrap();
    let greedy = plain(&llama, &request(&[5, 6], 20, 0.0), &mut go_on()).unwrap();
    assert_eq!((run.new_ids, run.accept_lengths), (greedy.new_ids, vec![1; 20]));
}

#[test]
fn sampling_follows_the_seed_and_the_temperature() {
    let llama = backbone(config(2, None, vec![]), 8);
    let sample = |seed, temperature| {
        let request = Request { stream: seeded(seed), ..request(&[5, 6], 30, temperature) };
        plain(&llama, &request, &mut go_on()).unwrap().new_ids
    };
    assert_eq!(sample(1, 1.0), sample(1, 1.0));
    assert_ne!(sample(1, 1.0), sample(2, 1.0));
    for cold in [1e-4, 1e-38, 1e-320] {
        assert_eq!(sample(1, cold), sample(2, 0.0), "a cold sample is the most probable token");
    }
}

#[test]
fn the_caller_can_stop_after_any_step() {
    let llama = backbone(config(2, None, vec![]), 9);
    let mut heard = 0;
    let run = plain(&llama, &request(&[1], 30, 0.0), &mut |_: &[i64]| {
        heard += 1;
        if heard == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let run = run.unwrap();
    assert_eq!((run.new_ids.len(), run.finish_reason), (3, FinishReason::Stopped));
}

#[test]
fn what_cannot_be_decoded_is_refused_with_its_reason() {
    let llama = backbone(config(2, None, vec![]), 10);
    let refused = |prompt: &[i64]| plain(&llama, &request(prompt, 5, 0.0), &mut go_on()).unwrap_err().to_string();
    assert!(refused(&[]).starts_with("the prompt has no tokens"));
    assert_eq!(refused(&[0, 12]), "prompt token 1 is id 12; expected 0 to 11");
    assert!(refused(&[0, -1]).contains("is id -1"));
    assert!(refused(&[0; CONTEXT as usize]).starts_with("the prompt has 64 tokens, but the backbone's context is 64"));
    let tree = SparseTree::chain(3).unwrap();
    let new = |heads: &Heads| prepare(&llama, heads, &tree, Acceptance::Greedy).unwrap_err().to_string();
    assert!(new(&heads(2, 0)).starts_with("tree choice [0, 0, 0] needs 3 heads, but there are 2"));
    let other = |hidden, vocabulary| random_heads(3, hidden, vocabulary, 0);
    assert!(new(&other(16, VOCABULARY)).starts_with("the heads have hidden size 16, the backbone has 32"));
    assert!(new(&other(32, 50)).starts_with("the heads have vocabulary 50, the backbone has 12"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn a_generation_ends_where_a_longer_one_goes_on(prompt in proptest::collection::vec(0..VOCABULARY, 1..10), cut in any::<Index>()) {
        let llama = backbone(config(2, None, vec![]), 11);
        let (heads, tree) = (heads(2, 11), SparseTree::cartesian(&[5, 4]).unwrap());
        let prepared = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
        let long = medusa(&llama, &prepared, &request(&prompt, 30, 0.0), &mut go_on()).unwrap();
        let short = cut.index(30);
        let run = medusa(&llama, &prepared, &request(&prompt, short, 0.0), &mut go_on()).unwrap();
        prop_assert_eq!(&run.new_ids[..], &long.new_ids[..short]);
    }
}
