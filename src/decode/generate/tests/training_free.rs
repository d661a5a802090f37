//! Drafters without training, and joined ones.

use std::num::NonZeroUsize;
use std::rc::Rc;

use super::*;
use crate::decode::DecodeLoop;
use crate::decode::batch::SequenceBatch;
use crate::decode::step::Drafting;
use crate::decode::texts::TextDecoder;
use crate::draft::joined::JoinedDrafter;
use crate::draft::lookahead::{LookaheadDrafter, LookaheadSize};
use crate::draft::memory::Memory;
use crate::draft::recycling::RecyclingDrafter;
use crate::draft::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::engine::Engine;
use crate::engine::tch::TchEngine;

const SMALL: LookaheadSize = LookaheadSize { columns: 3, ngram: 4, guesses: 3 };

type Boxed<'a> = Box<dyn Drafter + 'a>;

/// Each drafter that is tested, with its name.
pub(super) fn drafters<'a>(llama: &'a Llama, heads: &'a Heads, tree: &'a SparseTree) -> Vec<(&'static str, Boxed<'a>)> {
    let recycling = || -> Boxed<'a> { Box::new(RecyclingDrafter::new(llama)) };
    let lookahead = |size| -> Boxed<'a> { Box::new(LookaheadDrafter::new(llama, size)) };
    let ngram = || -> Boxed<'a> { Box::new(NgramDrafter::new(llama)) };
    let medusa = || -> Boxed<'a> { Box::new(MedusaDrafter::new(llama, heads, tree).unwrap()) };
    let joined = |parts, nodes| -> Boxed<'a> { Box::new(JoinedDrafter::new(llama, parts, nodes)) };
    vec![
        ("recycling", recycling()),
        ("lookahead", lookahead(LookaheadSize::PUBLISHED)),
        ("a small lookahead", lookahead(SMALL)),
        ("the best of recycling", joined(vec![recycling()], 5)),
        ("medusa+ngram", joined(vec![medusa(), ngram()], tree.choices().len())),
        ("ngram+recycling+lookahead", joined(vec![ngram(), recycling(), lookahead(SMALL)], 12)),
    ]
}

#[test]
fn every_drafter_keeps_the_text_of_plain_decoding() {
    let several = Cell::new([[0; 2]; 6]);
    let mut runner = TestRunner::new(Config { cases: 48, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&cases(), |case| {
        let llama = backbone(config(case.key_value_heads, case.window, case.eos.clone()), case.seed);
        let heads = heads(4, case.seed + 1);
        for (at, temperature) in [0.0, 0.9].into_iter().enumerate() {
            let (repetition_penalty, stream) = (case.repetition_penalty, seeded(case.seed));
            let request =
                Request { repetition_penalty, stream, ..request(&case.prompt, case.max_new_tokens, temperature) };
            let slow = plain(&llama, &request, &mut go_on()).unwrap();
            let acceptance = if temperature == 0.0 { case.acceptance } else { Acceptance::Rejection };
            for (which, (name, drafter)) in drafters(&llama, &heads, &case.tree).into_iter().enumerate() {
                let mut decoding = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, acceptance)));
                let fast = decoding.decode(Drafting::On, &request, &mut go_on()).unwrap();
                prop_assert_eq!((&fast.new_ids, fast.finish_reason), (&slow.new_ids, slow.finish_reason), "{}", name);
                steps_are_consistent(&fast, case.max_new_tokens);
                let mut counts = several.get();
                counts[which][at] += u32::from(fast.accept_lengths.iter().any(|&length| length > 1));
                several.set(counts);
            }
        }
        Ok(())
    });
    outcome.unwrap();
    let several = several.get();
    assert!(several.iter().flatten().all(|&runs| runs >= 8), "the cases hardly test anything: {several:?}");
}

/// The drafters keep what they know from turn to turn and from text to text; plain decoding in between changes rows without them.
#[test]
fn every_turn_of_a_conversation_is_plain_decodings() {
    for (seed, window) in [(21, None), (22, Some(6))] {
        let llama = backbone(config(2, window, vec![3]), seed);
        let (heads, tree) = (heads(2, seed), SparseTree::cartesian(&[4, 3]).unwrap());
        for (name, drafter) in drafters(&llama, &heads, &tree) {
            let mut decoding = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, Acceptance::Greedy)));
            let (mut prompt, mut accepted) = (vec![1, 5, 9], 0);
            for (turn, drafting) in
                [Drafting::On, Drafting::On, Drafting::Off, Drafting::On, Drafting::On].into_iter().enumerate()
            {
                let request = request(&prompt, 9, 0.0);
                let slow = plain(&llama, &request, &mut go_on()).unwrap();
                let fast = decoding.decode(drafting, &request, &mut go_on()).unwrap();
                assert_eq!(fast.new_ids, slow.new_ids, "{name}, turn {turn}");
                accepted += fast.new_ids.len() - fast.accept_lengths.len().min(fast.new_ids.len());
                prompt.extend(fast.new_ids);
                prompt.extend([7, 8]);
                if turn == 3 {
                    prompt = vec![2, 1, 2, 1, 2]; // another text in the same row
                }
            }
            assert!(accepted > 0, "{name}");
        }
    }
}

/// A drafter that learns from all texts, whatever [`Memory`] says: what the two tests below forbid.
#[derive(Debug)]
struct Unrestricted<'a>(Boxed<'a>);

impl Drafter for Unrestricted<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        self.0.propose(batch)
    }

    fn follows(&self) -> bool {
        self.0.follows()
    }

    fn remembers(&self) -> bool {
        self.0.remembers()
    }

    fn begin_text(&mut self, row: usize, _memory: Memory) {
        self.0.begin_text(row, Memory::Common);
    }

    fn push_row(&mut self) {
        self.0.push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.0.committed(row, tokens);
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.0.verified(row, verified);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.0.truncate(row, tokens);
    }

    fn swap_remove(&mut self, row: usize) {
        self.0.swap_remove(row);
    }
}

/// Rules that accept guesses which the backbone would not have chosen: what earlier texts, turns and samples have taught must not matter.
#[test]
fn a_text_that_depends_on_its_guesses_depends_on_no_other_text() {
    let llama = backbone(config(2, None, vec![]), 23);
    let (heads, tree) = (heads(2, 23), SparseTree::cartesian(&[4, 3]).unwrap());
    let mut would_differ = 0;
    for acceptance in [Acceptance::Typical(TypicalAcceptance::with_threshold(0.01)), Acceptance::Nucleus] {
        for which in 0..drafters(&llama, &heads, &tree).len() {
            let decoding = || {
                let (name, drafter) = drafters(&llama, &heads, &tree).swap_remove(which);
                (name, HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, acceptance))))
            };
            let decoding_unrestricted = || {
                let drafter: Boxed = Box::new(Unrestricted(drafters(&llama, &heads, &tree).swap_remove(which).1));
                HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, acceptance)))
            };
            let prompts = [vec![1, 5, 9], vec![1, 5, 9], vec![1, 5, 9, 4, 2], vec![2, 1, 2], vec![1, 5, 9, 4]];
            let (mut together, mut unrestricted) = (decoding().1, decoding_unrestricted());
            for (turn, prompt) in prompts.iter().enumerate() {
                let (stream, sampling) = (seeded(3), sampling_within(0.95));
                let request = Request { stream, sampling, ..request(prompt, 20, 0.9) };
                let (name, mut fresh) = decoding();
                let alone = fresh.decode(Drafting::On, &request, &mut go_on()).unwrap();
                let text = together.decode(Drafting::On, &request, &mut go_on()).unwrap();
                let outcome = |text: &Generation| (text.new_ids.clone(), text.accept_lengths.clone());
                assert_eq!(outcome(&text), outcome(&alone), "{name}, {acceptance:?}, prompt {turn}");
                let taught = unrestricted.decode(Drafting::On, &request, &mut go_on()).unwrap();
                would_differ += usize::from(taught.new_ids != alone.new_ids);
            }
        }
    }
    assert!(would_differ > 10, "other texts hardly ever matter: {would_differ}");
}

fn sampling_within(top_p: f64) -> Sampling {
    Sampling { top_p: Probability::new(top_p).unwrap(), ..Sampling::with_temperature(NonNegative::new(0.9).unwrap()) }
}

/// Texts that are decoded together teach each other nothing where the rule may accept any guess.
#[test]
fn a_text_that_depends_on_its_guesses_does_not_depend_on_the_batch() {
    let llama = backbone(config(2, None, vec![]), 24);
    let (heads, tree) = (heads(2, 24), SparseTree::cartesian(&[4, 3]).unwrap());
    let prompts: Vec<Vec<i64>> = (0..6).map(|key| (0..4 + key).map(|i| (i * i + key) % VOCABULARY).collect()).collect();
    let typical = Acceptance::Typical(TypicalAcceptance::with_threshold(0.01));
    let mut would_differ = 0;
    for which in 0..drafters(&llama, &heads, &tree).len() {
        let texts = |size: usize, restricted: bool| {
            let (name, drafter) = drafters(&llama, &heads, &tree).swap_remove(which);
            let drafter: Boxed = if restricted { drafter } else { Box::new(Unrestricted(drafter)) };
            let engine = Box::new(TchEngine::for_batches(&llama));
            let mut batch = SequenceBatch::new(engine, Some((drafter, typical)), NonZeroUsize::new(size).unwrap());
            let (mut waiting, mut ended) = (prompts.iter().enumerate(), vec![]);
            while ended.len() < prompts.len() {
                while batch.has_room() {
                    let Some((key, prompt)) = waiting.next() else { break };
                    batch.enter(key, &request(prompt, 12 + 3 * key, 0.9)).unwrap();
                }
                ended.extend(batch.step().unwrap());
            }
            ended.sort_by_key(|(key, _)| *key);
            (name, ended.into_iter().map(|(_, text)| text.unwrap().new_ids).collect::<Vec<_>>())
        };
        let alone = texts(1, true);
        assert_eq!(texts(3, true), alone);
        would_differ += texts(3, false).1.iter().zip(&alone.1).filter(|(taught, alone)| taught != alone).count();
    }
    assert!(would_differ > 10, "the other texts of a batch hardly ever matter: {would_differ}");
}

/// Lookahead, each of whose window's logits are compared with those of a plain pass over what the node sees.
#[derive(Debug)]
struct Watched<'a> {
    drafter: LookaheadDrafter<'a>,
    llama: &'a Llama,
    text: Vec<i64>,
    tolerance: f64,
    compared: Rc<Cell<usize>>,
}

impl Watched<'_> {
    /// The logits after the last of `text`, `[V]`.
    fn after(&self, text: &[i64]) -> Tensor {
        let rows = RowMask::causal(text.len() as i64, &self.llama.config, Device::Cpu);
        let hidden_1th = self.llama.hidden_states(&Tensor::from_slice(text).unsqueeze(0), &rows, Adapters::Off);
        let last_1h = hidden_1th.squeeze_dim(0).narrow(0, text.len() as i64 - 1, 1);
        self.llama.logits(&last_1h, Adapters::Off).squeeze_dim(0)
    }
}

impl Drafter for Watched<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        self.text = batch[0].ids.to_vec();
        self.drafter.propose(batch)
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.drafter.push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.drafter.committed(row, tokens);
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        let tree = &verified.proposal.tree;
        let window = tree.window.as_ref().expect("lookahead has a window");
        let tokens: Vec<i64> = Vec::try_from(&verified.proposal.tokens_n).unwrap();
        let window_tokens = &tokens[tree.tree.len()..];
        for (read, node) in (window.offsets.len() - window.read..window.offsets.len()).enumerate() {
            let seen = window.sees[node].iter().map(|&seen| window_tokens[seen]);
            let text: Vec<i64> = self.text.iter().copied().chain(seen).collect();
            assert_eq!(text.len() - self.text.len(), window.offsets[node] as usize, "no gap between positions");
            let logits_v = verified.logits_nv.get((tree.tree.len() + read) as i64);
            let off = (logits_v - self.after(&text)).abs().max().double_value(&[]);
            assert!(off < self.tolerance, "node {node} of the window: {off}");
            self.compared.set(self.compared.get() + 1);
        }
        self.drafter.verified(row, verified);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.drafter.truncate(row, tokens);
    }
}

/// Decodes with every node of the window compared; returns how many there were.
fn compare_windows(oracle: &Llama, engine: Box<dyn Engine + '_>, size: LookaheadSize, tolerance: f64) -> usize {
    let (compared, prompt) = (Rc::new(Cell::new(0)), [1, 4, 1, 4, 2]);
    let drafter = LookaheadDrafter::new(oracle, size);
    let watched = Watched { drafter, llama: oracle, text: vec![], tolerance, compared: compared.clone() };
    let mut decoding = HostLoop::new(engine, Some((Box::new(watched), Acceptance::Greedy)));
    decoding.decode(Drafting::On, &request(&prompt, 24, 0.0), &mut go_on()).unwrap();
    compared.get()
}

#[test]
fn the_window_sees_what_the_paper_says() {
    for (seed, window) in [(31, None), (32, Some(5))] {
        let llama = backbone(config(2, window, vec![]), seed);
        for size in [SMALL, LookaheadSize::PUBLISHED, LookaheadSize { columns: 2, ngram: 3, guesses: 1 }] {
            let compared = compare_windows(&llama, Box::new(TchEngine::new(&llama)), size, 1e-9);
            assert!(compared >= 8 * size.columns, "{size:?}: {compared}");
        }
    }
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn the_window_sees_the_same_in_the_cpus_kernels() {
    let llama = || Llama::random(config(2, Some(9), vec![]), Kind::Float, Device::Cpu, 33);
    let (oracle, ours) = (llama(), llama().for_decoding());
    let engine = Box::new(CpuEngine::new(&ours).unwrap());
    assert!(compare_windows(&oracle, engine, LookaheadSize::PUBLISHED, 1e-3) > 50);
}
