//! Requests one after another in a loop are requests alone, and the cache holds what was said. In float64.

use proptest::prelude::*;
use proptest::sample::Index;
use tch::Tensor;

use super::super::generate;
use super::super::generate::tests::{
    CONTEXT, VOCABULARY, backbone, config, every_pair_of_guesses, go_on, heads, medusa, prepare, request,
};
use super::*;
use crate::decode::likelihood::scored;
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::engine::prefill::prefill;
use crate::engine::tch::TchEngine;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;

/// A loop on libtorch's engine, with heads that accept greedily.
fn conversation<'a>(llama: &'a Llama, drafter: Option<&MedusaDrafter<'a>>) -> HostLoop<'a> {
    let boxed = |drafter: &MedusaDrafter<'a>| -> (Box<dyn Drafter + 'a>, Acceptance) {
        (Box::new(drafter.clone()), Acceptance::Greedy)
    };
    HostLoop::new(Box::new(TchEngine::new(llama)), drafter.map(boxed))
}

/// Committed keys and values of the loop.
fn committed(session: &HostLoop) -> Tensor {
    session.stepper.cache().committed(0)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

/// A cache whose row 0 holds these tokens, computed in one pass, and the last one's hidden state.
fn pass_over(llama: &Llama, ids: &[i64]) -> (KvCache, Tensor) {
    let mut cache = KvCache::with_one_row(&llama.config, llama.kind(), llama.device());
    let hidden_1h = tch::no_grad(|| prefill(ids.len(), &TchEngine::new(llama), (&mut cache, 0), ids, &mut |_, _| {}));
    (cache, hidden_1h)
}

fn cache_of(llama: &Llama, ids: &[i64]) -> Tensor {
    pass_over(llama, ids).0.committed(0)
}

#[test]
fn after_either_decoding_the_cache_is_one_pass_over_the_text() {
    for (seed, window) in [(3, None), (4, Some(5)), (5, None)] {
        let llama = backbone(config(2, window, vec![]), seed);
        let (heads, tree) = (heads(2, seed), every_pair_of_guesses());
        let (drafter, _) = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
        let request = request(&[1, 2, 3], 40, 0.0);
        let (mut slow, mut fast) = (conversation(&llama, None), conversation(&llama, Some(&drafter)));
        let by_plain = slow.decode(Drafting::On, &request, &mut go_on()).unwrap();
        let by_medusa = fast.decode(Drafting::On, &request, &mut go_on()).unwrap();
        let steps: Vec<usize> = [3; 13].into_iter().chain([1]).collect();
        assert_eq!(
            (by_medusa.new_ids, by_medusa.accept_lengths),
            (by_plain.new_ids.clone(), steps),
            "every guess is there"
        );
        let text: Vec<i64> = [1, 2, 3].into_iter().chain(by_plain.new_ids).collect();
        for session in [slow, fast] {
            assert_eq!(session.cached(), &text[..3 + 39], "the last one is not computed");
            let difference = largest_difference(&committed(&session), &cache_of(&llama, session.cached()));
            assert!(difference < 1e-12, "window {window:?}: {difference}");
        }
    }
}

#[test]
fn a_prompt_in_chunks_is_a_prompt_in_one_pass() {
    for window in [None, Some(7)] {
        let llama = backbone(config(2, window, vec![]), 6);
        let prompt: Vec<i64> = (0..CONTEXT - 1).map(|i| i * i % VOCABULARY).collect();
        let (whole, expected_1h) = pass_over(&llama, &prompt);
        for (chunk, cached) in [(1, 0), (5, 0), (21, 0), (62, 0), (9, 30), (64, 62)] {
            let (mut cache, _) = pass_over(&llama, &prompt[..cached.max(1)]);
            cache.truncate(0, cached as i64);
            let hidden_1h = tch::no_grad(|| {
                prefill(chunk, &TchEngine::new(&llama), (&mut cache, 0), &prompt[cached..], &mut |_, _| {})
            });
            assert_eq!(cache.len(0), whole.len(0));
            let off = [
                largest_difference(&hidden_1h, &expected_1h),
                largest_difference(&cache.committed(0), &whole.committed(0)),
            ];
            assert!(off.iter().all(|&off| off < 1e-11), "chunks of {chunk}: {off:?}");
        }
    }
}

/// What a conversation does next: it goes on, or goes back and says something else.
#[derive(Debug, Clone)]
struct Turn {
    /// How much of the text so far the next prompt begins with; all of it where nothing is said.
    kept: Option<Index>,
    said: Vec<i64>,
    max_new_tokens: usize,
    by_medusa: bool,
    resets: bool,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let said = proptest::collection::vec(0..VOCABULARY, 0..4);
    let kept = prop_oneof![3 => Just(None), 1 => any::<Index>().prop_map(Some)];
    let turn = (kept, said, 0usize..9, any::<bool>(), proptest::bool::weighted(0.1));
    let turn = turn.prop_map(|(kept, said, max_new_tokens, by_medusa, resets)| Turn {
        kept,
        said,
        max_new_tokens,
        by_medusa,
        resets,
    });
    proptest::collection::vec(turn, 1..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn turns_of_one_session_are_requests_alone(turns in turns(), window in prop_oneof![Just(None), Just(Some(6))], seed in 0u64..100) {
        let llama = backbone(config(2, window, vec![5]), seed);
        let (heads, tree) = (heads(2, seed), every_pair_of_guesses());
        let prepared = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
        let mut session = conversation(&llama, Some(&prepared.0));
        let mut text = vec![1];
        for turn in turns {
            text.truncate(turn.kept.map_or(text.len(), |kept| kept.index(text.len()) + 1));
            text.extend(&turn.said);
            if turn.resets {
                session.reset();
                prop_assert!(session.cached().is_empty());
            }
            let request = request(&text, turn.max_new_tokens, 0.0);
            let (together, alone) = if turn.by_medusa {
                (session.decode(Drafting::On, &request, &mut go_on()), medusa(&llama, &prepared, &request, &mut go_on()))
            } else {
                (session.decode(Drafting::Off, &request, &mut go_on()), generate::plain(&llama, &request, &mut go_on()))
            };
            let (together, alone) = (together.unwrap(), alone.unwrap());
            prop_assert_eq!(&together.new_ids, &alone.new_ids);
            prop_assert_eq!((together.finish_reason, &together.accept_lengths), (alone.finish_reason, &alone.accept_lengths));
            let before = text.len();
            text.extend(together.new_ids);
            prop_assert!(session.cached().len() >= before && text.starts_with(session.cached()));
            prop_assert!(largest_difference(&committed(&session), &cache_of(&llama, session.cached())) < 1e-11);
        }
    }
}

#[test]
fn only_what_is_not_cached_is_computed() {
    let llama = backbone(config(2, None, vec![]), 7);
    let mut session = conversation(&llama, None);
    let first = session.decode(Drafting::Off, &request(&[1, 2, 3], 4, 0.0), &mut go_on()).unwrap();
    let before = committed(&session).size()[2];
    // A mark in a cached key: it stays where nothing is computed again.
    session.stepper.cache_mut().mark_committed(0, 9.0);
    let prompt: Vec<i64> = [1, 2, 3].into_iter().chain(first.new_ids).chain([0, 0]).collect();
    let _ = session.decode(Drafting::Off, &request(&prompt, 1, 0.0), &mut go_on()).unwrap();
    let after = committed(&session);
    assert_eq!((before, after.size()[2]), (6, 9));
    let marked =
        after.eq(9.0).to_kind(tch::Kind::Int64).sum_dim_intlist([0i64, 1, 3].as_slice(), false, tch::Kind::Int64);
    let per_token = after.numel() as i64 / 9;
    assert_eq!(Vec::<i64>::try_from(marked).unwrap(), [[per_token; 6].as_slice(), &[0; 3]].concat());
}

/// [`scored`] reads the finished text in one pass, and rounds its logits to float32.
#[test]
fn log_probabilities_come_with_the_text() {
    let llama = backbone(config(2, None, vec![]), 3);
    let (heads, tree) = (heads(2, 3), every_pair_of_guesses());
    let (drafter, _) = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
    for (temperature, drafter) in [(0.0, None), (0.7, None), (0.0, Some(&drafter))] {
        let request = Request { logprobs: Some(3), ..request(&[1, 2, 3], 30, temperature) };
        let mut decoding = conversation(&llama, drafter);
        assert!(decoding.scores_tokens());
        let text = decoding.decode(Drafting::On, &request, &mut go_on()).unwrap();
        let expected = scored(&llama, request.prompt, &text.new_ids, 3).unwrap();
        assert_eq!((text.scored.len(), expected.len()), (30, 30));
        for (got, expected) in text.scored.iter().zip(expected) {
            let off = got.likeliest.iter().zip(&expected.likeliest).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f64::max);
            assert!(
                got.id == expected.id && off < 1e-5 && (got.log_p - expected.log_p).abs() < 1e-5,
                "{got:?}, {expected:?}"
            );
        }
    }
}
