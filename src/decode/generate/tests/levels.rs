//! Trees that are filled level by level, and trees that are chosen at each step.

use super::*;
use crate::draft::levels::LevelDrafter;
use crate::draft::medusa::levels::MedusaLevels;
use crate::formats::tree::DynamicTree;

fn limits() -> impl Strategy<Value = DynamicTree> {
    (1usize..25, 1usize..4, 1usize..TOP_K).prop_map(|(nodes, depth, top_k)| DynamicTree { nodes, depth, top_k })
}

fn chosen_each_step<'a>(llama: &'a Llama, heads: &'a Heads, limits: DynamicTree) -> LevelDrafter<'a> {
    LevelDrafter::dynamic(llama, Box::new(MedusaLevels::new(llama, heads, limits)), limits)
}

#[test]
fn texts_with_trees_chosen_at_each_step_are_plain_decodings() {
    let several = [Cell::new(0), Cell::new(0)];
    let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(cases(), limits()), |(case, limits)| {
        let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        let heads = heads(3, case.seed + 1);
        for (several, temperature) in several.iter().zip([0.0, 0.9]) {
            let stream = seeded(case.seed);
            let request = Request { stream, ..request(&case.prompt, case.max_new_tokens, temperature) };
            let slow = plain(&llama, &request, &mut go_on()).unwrap();
            let drafter = chosen_each_step(&llama, &heads, limits);
            let fast = drafted(&llama, drafter, Acceptance::Rejection, &request, &mut go_on()).unwrap();
            prop_assert_eq!((&fast.new_ids, fast.finish_reason), (&slow.new_ids, slow.finish_reason));
            steps_are_consistent(&fast, case.max_new_tokens);
            several.set(several.get() + u32::from(fast.accept_lengths.iter().any(|&length| length > 1)));
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(several.iter().all(|runs| runs.get() >= 10), "the cases hardly test anything: {several:?}");
}

#[test]
fn a_static_tree_filled_level_by_level_holds_the_same_guesses() {
    let mut runner = TestRunner::new(Config { cases: 32, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&cases(), |case| {
        let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        let heads = heads(4, case.seed + 1);
        let request = request(&case.prompt, case.max_new_tokens, 0.0);
        let limits = DynamicTree { nodes: 20, depth: 4, top_k: TOP_K };
        let guesser = Box::new(MedusaLevels::new(&llama, &heads, limits));
        let by_level = LevelDrafter::of_tree(&llama, guesser, &case.tree);
        let by_level = drafted(&llama, by_level, Acceptance::Greedy, &request, &mut go_on()).unwrap();
        let at_once = MedusaDrafter::new(&llama, &heads, &case.tree).unwrap();
        let at_once = drafted(&llama, at_once, Acceptance::Greedy, &request, &mut go_on()).unwrap();
        prop_assert_eq!((by_level.new_ids, by_level.accept_lengths), (at_once.new_ids, at_once.accept_lengths));
        Ok(())
    });
    outcome.unwrap();
}
