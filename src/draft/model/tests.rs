//! The oracle is the draft model over whole rows, without a cache.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

use tch::{Device, Kind, no_grad};

use super::super::levels::LevelDrafter;
use super::*;
use crate::draft::{Drafter, Proposal};
use crate::engine::sample::{Chosen, Sampling, Stream, distributions};
use crate::engine::tch::TchEngine;
use crate::formats::tree::DynamicTree;
use crate::model::attention::RowMask;
use crate::model::config::LlamaConfig;
use crate::model::llama::{Llama, most_probable};
use crate::model::lora::Adapters;
use crate::numbers::{NonNegative, Probability};
use crate::tree::accept::upwards;
use crate::tree::sparse_tree::SparseTree;

/// Weights large enough that guesses depend on the text.
fn model(config: LlamaConfig, seed: u64) -> Llama {
    tch::set_num_threads(1);
    let llama = Llama::random(config, Kind::Double, Device::Cpu, seed);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(8.0);
    }
    llama
}

fn sampling(temperature: f64, top_p: f64) -> Sampling {
    Sampling {
        top_p: Probability::new(top_p).unwrap(),
        ..Sampling::with_temperature(NonNegative::new(temperature).unwrap())
    }
}

/// Texts in the rows of a drafter.
struct Texts<'a> {
    drafter: LevelDrafter<'a>,
    /// With the number that selects the random numbers.
    texts: Vec<(u64, Vec<i64>)>,
    sampling: Sampling,
}

impl<'a> Texts<'a> {
    fn new(drafter: LevelDrafter<'a>, sampling: Sampling) -> Self {
        Self { drafter, texts: vec![], sampling }
    }

    fn push(&mut self, index: u64, prompt: &[i64]) {
        self.drafter.push_row();
        self.texts.push((index, vec![]));
        self.go_on(self.texts.len() - 1, prompt);
    }

    /// A prompt behind a row's text; its last token is the root.
    fn go_on(&mut self, row: usize, prompt: &[i64]) {
        let (root, ids) = prompt.split_last().unwrap();
        no_grad(|| self.drafter.committed(row, &committed(ids)));
        self.texts[row].1.extend(ids.iter().chain([root]));
    }

    /// Accepts a node of a proposal; `next` is the new root.
    fn accept(&mut self, row: usize, proposal: &Proposal, node: usize, next: i64) {
        let ids = &mut self.texts[row].1;
        let before = ids.len() - 1;
        *ids = path(proposal, ids, node);
        let mut nodes: Vec<usize> = upwards(&proposal.tree.tree, node).collect();
        nodes.reverse();
        let (logits_nv, accepted) = (&Tensor::zeros([1, 1], (Kind::Double, Device::Cpu)), committed(&ids[before..]));
        self.drafter.verified(row, &VerifiedTree { proposal, logits_nv, path: &nodes, accepted });
        ids.push(next);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.drafter.truncate(row, tokens);
        self.texts[row].1.truncate(tokens);
    }

    fn propose(&mut self) -> Vec<Proposal> {
        let hidden_1h = Tensor::zeros([1, 1], (Kind::Double, Device::Cpu));
        let roots: Vec<Chosen> = self.texts.iter().map(|(_, ids)| Chosen::on_host(ids[ids.len() - 1])).collect();
        let hidden_1h = &hidden_1h;
        let batch = self.texts.iter().zip(&roots).enumerate().map(|(row, ((index, ids), root))| {
            let stream = Stream { seed: 3, index: *index, ..Stream::default() };
            TextSoFar { row, ids, root, state_1w: hidden_1h, sampling: self.sampling, stream, may_draw: true }
        });
        let batch: Vec<TextSoFar> = batch.collect();
        no_grad(|| self.drafter.propose(&batch))
    }
}

fn committed(ids: &[i64]) -> CommittedTokens<'_> {
    CommittedTokens { ids, states_nw: Tensor::zeros([ids.len() as i64, 1], (Kind::Double, Device::Cpu)) }
}

fn tokens_of(proposal: &Proposal) -> Vec<i64> {
    Vec::try_from(&proposal.tokens_n).expect("one axis of int64")
}

/// The draft model's logits after a text, over the whole row.
fn logits_after(llama: &Llama, ids: &[i64]) -> Tensor {
    let t = ids.len() as i64;
    let tokens_bt = Tensor::from_slice(ids).view([1, t]);
    let rows = RowMask::causal(t, &llama.config, Device::Cpu);
    let hidden_bth = no_grad(|| llama.hidden_states(&tokens_bt, &rows, Adapters::Off));
    llama.logits(&hidden_bth.select(1, t - 1), Adapters::Off).narrow(1, 0, VOCABULARY)
}

/// The tokens from the text's start to a node.
fn path(proposal: &Proposal, ids: &[i64], node: usize) -> Vec<i64> {
    let tokens = tokens_of(proposal);
    let tree = &proposal.tree.tree;
    let mut path: Vec<i64> = upwards(tree, node).map(|node| tokens[node]).collect();
    path.reverse();
    [&ids[..ids.len() - 1], &path].concat()
}

/// Tokens that may be guessed: the model's last three pad its vocabulary.
const VOCABULARY: i64 = 47;

fn shapes() -> [SparseTree; 3] {
    let sparse = [vec![0], vec![1], vec![2], vec![0, 0], vec![0, 1], vec![1, 0], vec![0, 1, 0], vec![0, 1, 0, 0]];
    [SparseTree::chain(4), SparseTree::cartesian(&[3, 2, 2]), SparseTree::new(sparse.to_vec())].map(Result::unwrap)
}

fn check_greedy(llama: &Llama, proposal: &Proposal, ids: &[i64]) {
    let (tree, tokens) = (&proposal.tree.tree, tokens_of(proposal));
    assert!(proposal.drawn.is_none());
    for node in (0..tree.len()).filter(|&node| !tree.children(node).is_empty()) {
        let expected = likeliest(&logits_after(llama, &path(proposal, ids, node)), 3);
        for child in tree.children(node) {
            assert_eq!(tokens[child], expected[tree.child_index(child).unwrap()].token, "{ids:?}, node {node}");
        }
    }
}

#[test]
fn guesses_are_the_models_best_tokens_whatever_was_in_the_cache_before() {
    for config in [LlamaConfig::tiny(), LlamaConfig { sliding_window: Some(5), ..LlamaConfig::tiny() }] {
        let llama = model(config, 3);
        for shape in shapes() {
            let guesser =
                ModelGuesser::new(Box::new(TchEngine::for_batches(&llama)), VOCABULARY as usize, 4, Guessing::Drawn);
            let drafter = LevelDrafter::for_tree(&llama, Box::new(guesser), &shape);
            let mut texts = Texts::new(drafter, sampling(0.0, 1.0));
            texts.push(0, &[1, 2, 3]);
            for step in 0..9 {
                let proposals = texts.propose();
                for (proposal, (_, ids)) in proposals.iter().zip(&texts.texts) {
                    check_greedy(&llama, proposal, ids);
                }
                // Some guesses are accepted, others not; rows come and go.
                for (row, proposal) in proposals.iter().enumerate() {
                    let tree = &proposal.tree.tree;
                    let at_depth = |&node: &usize| tree.depth(node) == step % tree.max_depth();
                    let nodes: Vec<usize> = (0..tree.len()).filter(at_depth).collect();
                    // The next root may be one that pads the vocabulary.
                    texts.accept(row, proposal, nodes[step % nodes.len()], (7 * step as i64 + 5) % 50);
                }
                match step {
                    1 | 2 => texts.push(step as u64, &[4, step as i64, 6, 7, 8, 9]),
                    4 => {
                        texts.drafter.swap_remove(0);
                        texts.texts.swap_remove(0);
                    }
                    5 => {
                        texts.truncate(1, 2);
                        texts.go_on(1, &[11, 12]);
                    }
                    6 => {
                        texts.truncate(0, texts.texts[0].1.len() - 1);
                        texts.go_on(0, &[13, 14, 15]); // a turn
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn draws_come_from_the_models_distribution_and_do_not_depend_on_the_batch() {
    let llama = model(LlamaConfig::tiny(), 5);
    let sampling = sampling(0.9, 0.8);
    for shape in shapes() {
        let texts = || {
            let guesser =
                ModelGuesser::new(Box::new(TchEngine::for_batches(&llama)), VOCABULARY as usize, 4, Guessing::Drawn);
            Texts::new(LevelDrafter::for_tree(&llama, Box::new(guesser), &shape), sampling)
        };
        let (mut together, prompts) = (texts(), [vec![1, 2, 3], vec![9, 8], vec![5; 7]]);
        prompts.iter().zip(0..).for_each(|(ids, index)| together.push(index, ids));
        for ((proposal, ids), index) in together.propose().iter().zip(&prompts).zip(0..) {
            let mut alone = texts();
            alone.push(index, ids);
            assert_eq!(tokens_of(&alone.propose()[0]), tokens_of(proposal));
            let drawn = proposal.drawn.as_ref().expect("draws");
            let tree = &proposal.tree.tree;
            for node in (0..tree.len()).filter(|&node| !tree.children(node).is_empty()) {
                let logits_1v = logits_after(&llama, &path(proposal, ids, node));
                let q = distributions(&logits_1v, sampling).pop().flatten().expect("no NaN");
                let off = q.iter().zip(drawn[node].sources[0].iter()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off < 1e-6, "node {node}: {off}");
                let tokens: Vec<i64> = tree.children(node).map(|child| tokens_of(proposal)[child]).collect();
                let in_order: Vec<i64> = drawn[node].guesses.iter().map(|draw| draw.token).collect();
                assert!(tokens.starts_with(&in_order) || in_order.starts_with(&tokens), "{tokens:?}, {in_order:?}");
            }
        }
        let other = {
            let mut texts = texts();
            texts.push(77, &prompts[0]);
            texts.propose()
        };
        assert_ne!(tokens_of(&other[0]), tokens_of(&together.propose()[0]), "another text draws other guesses");
    }
}

#[test]
fn the_prompt_is_computed_when_it_is_committed() {
    let llama = model(LlamaConfig::tiny(), 3);
    let mut guesser = ModelGuesser::new(Box::new(TchEngine::new(&llama)), VOCABULARY as usize, 4, Guessing::Best);
    guesser.push_row();
    no_grad(|| guesser.committed(0, &committed(&[1, 2, 3, 49])));
    assert!(guesser.follows());
    assert_eq!((guesser.cache.len(0), guesser.rows[0].cached), (4, 4));
}

/// Runs out of memory in its second pass.
#[derive(Debug)]
struct Failing<'a> {
    engine: TchEngine<'a>,
    passes: Cell<usize>,
}

impl Engine for Failing<'_> {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn backbone(&self) -> &Llama {
        self.engine.backbone()
    }

    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        self.passes.set(self.passes.get() + 1);
        assert_ne!(self.passes.get(), 2, "out of memory");
        self.engine.extend(cache, tokens_n, batch)
    }

    fn logits(&self, states_nw: &Tensor) -> Tensor {
        self.engine.logits(states_nw)
    }
}

#[test]
fn after_a_failure_the_cache_holds_what_the_row_says() {
    let llama = model(LlamaConfig { max_position_embeddings: 600, ..LlamaConfig::tiny() }, 3);
    let engine = Box::new(Failing { engine: TchEngine::new(&llama), passes: Cell::new(0) });
    let mut guesser = ModelGuesser::new(engine, VOCABULARY as usize, 4, Guessing::Best);
    guesser.push_row();
    let prompt: Vec<i64> = (0..550).map(|at| at * at % 47).collect();
    let failed = no_grad(|| std::panic::catch_unwind(AssertUnwindSafe(|| guesser.committed(0, &committed(&prompt)))));
    assert!(failed.is_err());
    assert_eq!((guesser.cache.len(0), guesser.rows[0].cached), (512, 512));
    let chain = SparseTree::chain(3).unwrap();
    let mut texts = Texts::new(LevelDrafter::for_tree(&llama, Box::new(guesser), &chain), sampling(0.0, 1.0));
    texts.texts.push((0, prompt));
    texts.truncate(0, 100);
    texts.go_on(0, &[7, 8, 9]);
    check_greedy(&llama, &texts.propose()[0], &texts.texts[0].1);
}

#[test]
fn in_a_batch_only_texts_within_the_context_get_guesses() {
    let llama = model(LlamaConfig { max_position_embeddings: 16, ..LlamaConfig::tiny() }, 3);
    let limits = DynamicTree { nodes: 9, depth: 3, top_k: 4 };
    let guesser = || ModelGuesser::new(Box::new(TchEngine::new(&llama)), VOCABULARY as usize, 3, Guessing::Best);
    let tree = SparseTree::cartesian(&[3, 2, 2]).unwrap();
    for drafter in [
        LevelDrafter::for_tree(&llama, Box::new(guesser()), &tree),
        LevelDrafter::dynamic(&llama, Box::new(guesser()), limits),
    ] {
        let mut texts = Texts::new(drafter, sampling(0.0, 1.0));
        let prompts: [Vec<i64>; 4] = [vec![1; 14], vec![1, 2, 3], (0..30).collect(), (0..13).collect()];
        prompts.iter().zip(0..).for_each(|(prompt, index)| texts.push(index, prompt));
        let proposals = texts.propose();
        let guesses: Vec<bool> = proposals.iter().map(|proposal| proposal.tree.tree.len() > 1).collect();
        assert_eq!(guesses, [false, true, false, true]);
        for row in [1, 3] {
            let best = most_probable(&logits_after(&llama, &prompts[row])).int64_value(&[0]);
            let first = proposals[row].tree.tree.children(0).next().unwrap();
            assert_eq!(tokens_of(&proposals[row])[first], best);
        }
    }
}
