//! Trees that are filled level by level, and trees that are chosen at each step.

use super::*;
use crate::draft::eagle::weights::Eagle;
use crate::draft::heads::HeadsArchitecture;
use crate::draft::hydra::levels::HydraLevels;
use crate::draft::hydra::prefix::PrefixRows;
use crate::draft::levels::{LevelDrafter, LevelGuesser};
use crate::draft::medusa::levels::MedusaLevels;
use crate::draft::token_map::TokenMap;
use crate::draft::trained::TrainedDrafter;
use crate::draft::{CommittedTokens, Proposal, TextSoFar};
use crate::engine::tch::TchEngine;
use crate::formats::tree::DynamicTree;
use crate::model::taps::Taps;
use crate::tree::guess_tree::GuessTree;

fn limits() -> impl Strategy<Value = DynamicTree> {
    (1usize..25, 1usize..4, 1usize..TOP_K).prop_map(|(nodes, depth, top_k)| DynamicTree { nodes, depth, top_k })
}

/// Heads whose guesses depend on the guesses before them.
fn hydra_heads(architecture: HeadsArchitecture, medusa_num_heads: usize, llama: &Llama, seed: u64) -> Heads {
    let (hidden_size, vocab_size) = (32, VOCABULARY);
    let shape = HeadsShape {
        medusa_num_heads,
        medusa_num_layers: 1,
        hidden_size,
        vocab_size,
        architecture,
        w2_bias: true,
        ..HeadsShape::default()
    };
    Heads::random(shape, Kind::Double, Device::Cpu, seed).with_new_prefix(llama, seed)
}

fn guesser<'a>(llama: &'a Llama, heads: &'a Heads, limits: DynamicTree) -> Box<dyn LevelGuesser + 'a> {
    match heads.architecture() {
        HeadsArchitecture::Medusa => Box::new(MedusaLevels::new(llama, heads, limits)),
        _ => Box::new(HydraLevels::new(llama, heads, limits.depth)),
    }
}

#[test]
fn texts_with_trees_chosen_at_each_step_are_plain_decodings() {
    let several = [const { Cell::new(0) }; 8];
    let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(cases(), limits()), |(case, limits)| {
        let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        let sequential = |architecture| hydra_heads(architecture, 4, &llama, case.seed + 1);
        let [hydra, with_prefix] = [HeadsArchitecture::Hydra, HeadsArchitecture::HydraPlusPlus].map(sequential);
        let medusa = heads(3, case.seed + 1);
        let mut several = several.iter();
        for temperature in [0.0, 0.9] {
            let stream = seeded(case.seed);
            let request = Request { stream, ..request(&case.prompt, case.max_new_tokens, temperature) };
            let slow = plain(&llama, &request, &mut go_on()).unwrap();
            let dynamic = |heads| LevelDrafter::dynamic(&llama, guesser(&llama, heads, limits), limits);
            let fixed = LevelDrafter::for_tree(&llama, Box::new(HydraLevels::new(&llama, &hydra, 4)), &case.tree);
            for drafter in [dynamic(&medusa), dynamic(&hydra), dynamic(&with_prefix), fixed] {
                let fast = drafted(&llama, drafter, Acceptance::Rejection, &request, &mut go_on()).unwrap();
                prop_assert_eq!((&fast.new_ids, fast.finish_reason), (&slow.new_ids, slow.finish_reason));
                steps_are_consistent(&fast, case.max_new_tokens);
                let several = several.next().unwrap();
                several.set(several.get() + u32::from(fast.accept_lengths.iter().any(|&length| length > 1)));
            }
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(several.iter().all(|runs| runs.get() >= 10), "the cases hardly test anything: {several:?}");
}

#[test]
fn texts_with_an_eagle_drafter_are_plain_decodings() {
    let several = [const { Cell::new(0) }; 4];
    let mut runner = TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(cases(), limits()), |(case, limits)| {
        let mut llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        llama.set_taps(Taps::new([0, 1, 2]));
        let eagle = Eagle::untrained(&llama, None, (llama.taps().clone(), 4), case.seed + 1);
        let trees = [GuessTree::Static(case.tree.clone()), GuessTree::Dynamic(limits)];
        let mut several = several.iter();
        for temperature in [0.0, 0.9] {
            let stream = seeded(case.seed);
            let request = Request { stream, ..request(&case.prompt, case.max_new_tokens, temperature) };
            let slow = plain(&llama, &request, &mut go_on()).unwrap();
            for tree in &trees {
                let drafter = Some((eagle.drafter(&llama, tree).unwrap(), Acceptance::Rejection));
                let fast =
                    HostLoop::new(fastest(&llama), drafter).decode(Drafting::On, &request, &mut go_on()).unwrap();
                prop_assert_eq!((&fast.new_ids, fast.finish_reason), (&slow.new_ids, slow.finish_reason));
                steps_are_consistent(&fast, case.max_new_tokens);
                let several = several.next().unwrap();
                several.set(several.get() + u32::from(fast.accept_lengths.iter().any(|&length| length > 1)));
            }
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(several.iter().all(|runs| runs.get() >= 10), "the cases hardly test anything: {several:?}");
}

/// Heads that cannot guess every third token, and heads with the same weights to which these tokens are impossible.
fn truncated_heads(shape: HeadsShape, llama: &Llama, seed: u64) -> [Heads; 2] {
    let tokens: Vec<i64> = (0..VOCABULARY).filter(|token| token % 3 != 1).collect();
    let shape = HeadsShape { vocab_size: tokens.len() as i64, w2_bias: true, ..shape };
    let tokens_n = Tensor::from_slice(&tokens);
    let truncated = Heads::random(shape, Kind::Double, Device::Cpu, seed);
    let whole = |tensor: &Tensor| {
        let impossible = if tensor.dim() == 1 { -1e4 } else { 0.0 };
        let all = Tensor::full([&[VOCABULARY], &tensor.size()[1..]].concat(), impossible, (Kind::Double, Device::Cpu));
        if tensor.size()[0] == shape.vocab_size { all.index_copy(0, &tokens_n, tensor) } else { tensor.copy() }
    };
    let tensors = truncated.parameters().into_iter().map(|(_, tensor)| whole(tensor)).collect();
    let whole = Heads::from_tensors(HeadsShape { vocab_size: VOCABULARY, ..shape }, tensors, VOCABULARY);
    let truncated = truncated.with_token_map(TokenMap::new(tokens, Device::Cpu), VOCABULARY);
    [truncated, whole].map(|heads| heads.with_new_prefix(llama, seed))
}

#[test]
fn heads_with_a_truncated_vocabulary_guess_as_if_the_other_tokens_were_impossible() {
    let (several, other_steps) = ([const { Cell::new(0) }; 5], Cell::new(0));
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let outcome =
        runner.run(&(cases(), limits(), 0i64..4, proptest::bool::ANY), |(case, limits, w2_rank, shared_w2)| {
            let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
            let heads = |architecture| {
                let (medusa_num_heads, hidden_size) = (4, 32);
                let shape = HeadsShape {
                    architecture,
                    medusa_num_heads,
                    medusa_num_layers: 1,
                    hidden_size,
                    w2_rank,
                    shared_w2,
                    ..HeadsShape::default()
                };
                truncated_heads(shape, &llama, case.seed + 1)
            };
            let [medusa, hydra, with_prefix] =
                [HeadsArchitecture::Medusa, HeadsArchitecture::Hydra, HeadsArchitecture::HydraPlusPlus].map(heads);
            let request = request(&case.prompt, case.max_new_tokens, 0.0);
            let slow = plain(&llama, &request, &mut go_on()).unwrap();
            let (tree, dynamic) = (GuessTree::Static(case.tree.clone()), GuessTree::Dynamic(limits));
            let all =
                [(&medusa, &tree), (&medusa, &dynamic), (&hydra, &tree), (&hydra, &dynamic), (&with_prefix, &dynamic)];
            for ((heads, tree), several) in all.into_iter().zip(&several) {
                let decode = |heads: &Heads| {
                    let drafter = Some((heads.drafter(&llama, tree).unwrap(), Acceptance::Greedy));
                    HostLoop::new(fastest(&llama), drafter).decode(Drafting::On, &request, &mut go_on()).unwrap()
                };
                let [truncated, whole] = [&heads[0], &heads[1]].map(decode);
                prop_assert_eq!(&truncated.new_ids, &slow.new_ids);
                other_steps.set(other_steps.get() + u32::from(truncated.accept_lengths != whole.accept_lengths));
                several.set(several.get() + u32::from(truncated.accept_lengths.iter().any(|&length| length > 1)));
            }
            Ok(())
        });
    outcome.unwrap();
    // Softmax over fewer tokens rounds otherwise, so that two guesses of almost the same probability may change places.
    assert!(other_steps.get() <= 1, "{} of 120 texts took other steps", other_steps.get());
    assert!(several.iter().all(|runs| runs.get() >= 2), "the cases hardly test anything: {several:?}");
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
        let by_level = LevelDrafter::for_tree(&llama, guesser, &case.tree);
        let by_level = drafted(&llama, by_level, Acceptance::Greedy, &request, &mut go_on()).unwrap();
        let at_once = MedusaDrafter::new(&llama, &heads, &case.tree).unwrap();
        let at_once = drafted(&llama, at_once, Acceptance::Greedy, &request, &mut go_on()).unwrap();
        prop_assert_eq!((by_level.new_ids, by_level.accept_lengths), (at_once.new_ids, at_once.accept_lengths));
        Ok(())
    });
    outcome.unwrap();
}

/// A drafter with a prefix layer, notified of every change to the rows, that compares each state with the layer over the whole text.
#[derive(Debug)]
struct Compared<'a> {
    drafter: LevelDrafter<'a>,
    llama: &'a Llama,
    heads: &'a Heads,
    rows: PrefixRows,
}

impl Drafter for Compared<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        for (row, text) in batch.iter().enumerate() {
            let tokens = text.ids.len() as i64 - 1; // the backbone has not run the root
            let tokens_1t = Tensor::from_slice(text.ids).narrow(0, 0, tokens).unsqueeze(0);
            let mask = RowMask::causal(tokens, &self.llama.config, Device::Cpu);
            let hidden_1th = self.llama.hidden_states(&tokens_1t, &mask, Adapters::Off);
            let whole_1th = self.heads.states_of_rows(&hidden_1th, &[vec![text.ids.len() - 1]]);
            let difference = (self.rows.state(row) - whole_1th.select(1, tokens - 1)).abs().max().double_value(&[]);
            assert!(difference < 1e-9, "{difference}");
        }
        self.drafter.propose(batch)
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.rows.push();
        self.drafter.push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.rows.commit(self.heads.prefix().unwrap(), row, &tokens.states_nw);
        self.drafter.committed(row, tokens);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.rows.truncate(row, tokens);
        self.drafter.truncate(row, tokens);
    }

    fn swap_remove(&mut self, row: usize) {
        self.rows.swap_remove(row);
        self.drafter.swap_remove(row);
    }
}

/// Turns of a conversation: later prompts begin with earlier ones, so that rows are truncated.
#[test]
fn the_prefix_layer_follows_the_text_through_turns() {
    tch::set_num_threads(1);
    let llama = backbone(config(2, None, vec![]), 5);
    let heads = hydra_heads(HeadsArchitecture::HydraPlusPlus, 3, &llama, 6);
    let limits = DynamicTree { nodes: 12, depth: 3, top_k: 4 };
    let drafter = LevelDrafter::dynamic(&llama, guesser(&llama, &heads, limits), limits);
    let rows = PrefixRows::new(heads.prefix().unwrap());
    let drafter = Compared { drafter, llama: &llama, heads: &heads, rows };
    let engine = Box::new(TchEngine::new(&llama));
    let mut several = HostLoop::new(engine, Some((Box::new(drafter), Acceptance::Greedy)));
    for prompt in [&[1, 5, 9][..], &[1, 5, 9, 4, 4, 11], &[1, 5, 2], &[7]] {
        let request = request(prompt, 12, 0.0);
        let fast = several.decode(Drafting::On, &request, &mut go_on()).unwrap();
        assert_eq!(fast.new_ids, plain(&llama, &request, &mut go_on()).unwrap().new_ids);
    }
}
