//! Decoding with a draft model.

use super::*;
use crate::draft::levels::LevelDrafter;
use crate::draft::model::{Guessing, ModelGuesser};
use crate::engine::tch::TchEngine;
use crate::formats::tree::DynamicTree;

/// Never guesses the last token, as if it padded the vocabulary.
fn guesser(draft: &Llama, depth: usize) -> Box<ModelGuesser<'_>> {
    let engine = Box::new(TchEngine::for_batches(draft));
    Box::new(ModelGuesser::new(engine, VOCABULARY as usize - 1, depth, Guessing::Drawn))
}

#[test]
fn greedy_texts_are_plain_decodings() {
    let several = Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(cases(), any::<bool>()), |(case, is_dynamic)| {
        let config = config(case.key_value_heads, case.window, case.eos.clone());
        let llama = backbone(config.clone(), case.seed);
        // Every other time the backbone drafts for itself.
        let draft = backbone(LlamaConfig { sliding_window: None, ..config }, case.seed + case.seed % 2);
        let request = request(&case.prompt, case.max_new_tokens, 0.0);
        let slow = plain(&llama, &request, &mut go_on()).unwrap();
        let limits = DynamicTree { nodes: 9, depth: 3, top_k: 4 };
        let drafter = match is_dynamic {
            true => LevelDrafter::dynamic(&llama, guesser(&draft, limits.depth), limits),
            false => LevelDrafter::for_tree(&llama, guesser(&draft, case.tree.max_depth()), &case.tree),
        };
        let fast = drafted(&llama, drafter, case.acceptance, &request, &mut go_on()).unwrap();
        prop_assert_eq!((&fast.new_ids, fast.finish_reason), (&slow.new_ids, slow.finish_reason));
        steps_are_consistent(&fast, case.max_new_tokens);
        several.set(several.get() + u32::from(fast.accept_lengths.iter().any(|&length| length > 1)));
        Ok(())
    });
    outcome.unwrap();
    assert!(several.get() >= 10, "the cases hardly test anything: {several:?}");
}

#[test]
fn a_model_that_drafts_for_itself_is_always_right() {
    let llama = backbone(config(2, None, vec![]), 7);
    let chain = SparseTree::chain(4).unwrap();
    for temperature in [0.0, 0.8] {
        let guesser = ModelGuesser::new(Box::new(TchEngine::new(&llama)), VOCABULARY as usize, 4, Guessing::Drawn);
        let drafter = LevelDrafter::for_tree(&llama, Box::new(guesser), &chain);
        let request = Request { stream: seeded(3), ..request(&[1, 2, 3], 26, temperature) };
        let text = drafted(&llama, drafter, Acceptance::Rejection, &request, &mut go_on()).unwrap();
        assert!(text.accept_lengths[..4].iter().all(|&length| length == 5), "{:?}", text.accept_lengths);
    }
}

#[test]
fn every_rule_decodes_and_the_same_seed_gives_the_same_text() {
    let (llama, draft) = (backbone(config(2, None, vec![]), 3), backbone(config(2, None, vec![]), 4));
    let tree = SparseTree::cartesian(&[3, 2]).unwrap();
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    for acceptance in [Acceptance::Greedy, typical, Acceptance::Nucleus, Acceptance::Rejection] {
        let text = |seed| {
            let drafter = LevelDrafter::for_tree(&llama, guesser(&draft, 2), &tree);
            let request = Request { stream: seeded(seed), ..request(&[1, 2, 3], 30, 0.9) };
            drafted(&llama, drafter, acceptance, &request, &mut go_on()).unwrap()
        };
        let (one, again) = (text(1), text(1));
        assert_eq!((&one.new_ids, &one.accept_lengths), (&again.new_ids, &again.accept_lengths));
        assert_eq!(one.new_ids.len(), 30);
        match acceptance {
            // Its guesses are drawn for rejection only.
            Acceptance::Greedy | Acceptance::Typical(_) => assert_eq!(one.new_ids, text(2).new_ids),
            _ => assert_ne!(one.new_ids, text(2).new_ids, "{acceptance:?}"),
        }
    }
}

#[test]
fn a_text_beyond_the_draft_models_context_goes_on_without_guesses() {
    let llama = backbone(config(2, None, vec![]), 7);
    let draft = backbone(LlamaConfig { max_position_embeddings: 20, ..config(2, None, vec![]) }, 7);
    let (chain, limits) = (SparseTree::chain(3).unwrap(), DynamicTree { nodes: 9, depth: 3, top_k: 4 });
    let drafters = || {
        [
            LevelDrafter::for_tree(&llama, guesser(&draft, 3), &chain),
            LevelDrafter::dynamic(&llama, guesser(&draft, 3), limits),
        ]
    };
    for prompt in [vec![1, 2, 3], (0..30).map(|at| at % 9).collect()] {
        let request = request(&prompt, 30, 0.0);
        let slow = plain(&llama, &request, &mut go_on()).unwrap();
        for drafter in drafters() {
            let fast = drafted(&llama, drafter, Acceptance::Greedy, &request, &mut go_on()).unwrap();
            assert_eq!(fast.new_ids, slow.new_ids);
            assert_eq!(fast.accept_lengths[0] > 1, prompt.len() == 3, "it drafts for itself");
            let mut length = prompt.len();
            for accepted in fast.accept_lengths {
                assert!(length + 1 + 3 <= 20 || accepted == 1, "{accepted} tokens behind {length}");
                length += accepted;
            }
        }
    }
}
