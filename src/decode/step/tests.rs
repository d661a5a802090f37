//! A drafter that follows the rows sees exactly the tokens of each text, with their hidden states.

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::rc::Rc;

use tch::{Device, Kind};

use super::super::DecodeLoop;
use super::super::batch::SequenceBatch;
use super::super::host_loop::HostLoop;
use super::super::request::Request;
use super::super::texts::TextDecoder;
use super::*;
use crate::draft::ngram::NgramDrafter;
use crate::engine::tch::TchEngine;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;

/// Prompt lookup, with a copy of every row; each proposal compares the copies with the texts.
#[derive(Debug)]
struct Follower<'a> {
    guesses: NgramDrafter<'a>,
    rows: Vec<Vec<(i64, Tensor)>>,
    /// Proposals, and guesses that were accepted.
    counts: Rc<RefCell<[usize; 2]>>,
    /// Runs out of memory when it is notified of so many accepted guesses.
    fails_at: usize,
}

impl<'a> Follower<'a> {
    fn boxed(llama: &'a Llama) -> (Box<dyn Drafter + 'a>, Rc<RefCell<[usize; 2]>>) {
        let counts = Rc::new(RefCell::new([0; 2]));
        let (guesses, counts_of_it) = (NgramDrafter::new(llama), counts.clone());
        (Box::new(Self { guesses, rows: vec![], counts: counts_of_it, fails_at: usize::MAX }), counts)
    }
}

impl Drafter for Follower<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        assert_eq!(batch.len(), self.rows.len());
        for (text, row) in batch.iter().zip(&self.rows) {
            let ids: Vec<i64> = row.iter().map(|(id, _)| *id).collect();
            let (root, before) = text.ids.split_last().expect("a root");
            assert_eq!((&ids[..], text.root.id), (before, *root));
            let last = row.last().map(|(_, hidden_h)| hidden_h.shallow_clone()).expect("a prompt");
            assert!((last - text.state_1w.squeeze_dim(0)).abs().max().double_value(&[]) < 1e-12);
        }
        self.counts.borrow_mut()[0] += batch.len();
        self.guesses.propose(batch)
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.rows.push(vec![]);
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        let states = (0..tokens.ids.len() as i64).map(|n| tokens.states_nw.get(n));
        self.rows[row].extend(tokens.ids.iter().copied().zip(states));
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        if verified.path.len() > self.fails_at {
            self.fails_at = usize::MAX;
            let _ = Tensor::ones([1 << 55], (Kind::Float, Device::Cpu)); // libtorch's own error
        }
        self.committed(row, &verified.accepted);
        assert_eq!(verified.logits_nv.size()[0], verified.proposal.tokens_n.size()[0]);
        self.counts.borrow_mut()[1] += verified.path.len() - 1;
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.rows[row].truncate(tokens);
    }

    fn swap_remove(&mut self, row: usize) {
        self.rows.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        self.rows.clear();
    }
}

fn backbone() -> Llama {
    tch::set_num_threads(1);
    Llama::random(LlamaConfig::tiny(), Kind::Double, Device::Cpu, 4)
}

#[test]
fn a_follower_sees_every_turn_of_a_conversation_even_after_plain_decoding() {
    let llama = backbone();
    let (drafter, counts) = Follower::boxed(&llama);
    let engine = Box::new(TchEngine::new(&llama));
    let mut decoding = HostLoop::new(engine, Some((drafter, Acceptance::Greedy)));
    let mut prompt: Vec<i64> = vec![1, 5, 9, 5, 9, 5];
    for drafting in [Drafting::On, Drafting::Off, Drafting::On, Drafting::On, Drafting::Off] {
        let request = Request { ends_at_eos: false, ..Request::greedy(&prompt, 12) };
        let text = decoding.decode(drafting, &request, &mut |_| ControlFlow::Continue(())).unwrap();
        let kept = if drafting == Drafting::On { text.new_ids.len() - 3 } else { text.new_ids.len() };
        prompt.extend(&text.new_ids[..kept]);
        prompt.extend([7, 8]);
    }
    let [proposals, accepted] = *counts.borrow();
    assert!(proposals > 3 && accepted > 0, "{proposals} proposals, {accepted} guesses accepted");
}

#[test]
fn a_follower_keeps_its_rows_in_the_order_of_a_batch() {
    let llama = backbone();
    let (drafter, counts) = Follower::boxed(&llama);
    let engine = Box::new(TchEngine::for_batches(&llama));
    let mut batch =
        SequenceBatch::new(engine, Some((drafter, Acceptance::Greedy)), NonZeroUsize::new(3).expect("above 0"));
    let prompts: Vec<Vec<i64>> = (0..7).map(|key| (0..4 + key).map(|i| (i * i + key) % 50).collect()).collect();
    let mut waiting = prompts.iter().enumerate();
    let mut ended = 0;
    while ended < prompts.len() {
        while batch.has_room() {
            let Some((key, prompt)) = waiting.next() else { break };
            let request = Request { ends_at_eos: false, ..Request::greedy(prompt, 5 + 4 * (key % 3)) };
            batch.enter(key, &request).unwrap();
        }
        ended += batch.step().unwrap().len();
    }
    assert!(counts.borrow()[0] > prompts.len());
}

/// The cache has the accepted path then, and the text does not.
#[test]
fn a_step_that_fails_after_it_committed_a_path_is_repeated() {
    let llama = backbone();
    let text = |fails_at: usize| {
        let (guesses, counts) = (NgramDrafter::new(&llama), Rc::default());
        let drafter = Follower { guesses, rows: vec![], counts, fails_at };
        let engine = Box::new(TchEngine::for_batches(&llama));
        let mut batch = SequenceBatch::new(engine, Some((Box::new(drafter), Acceptance::Greedy)), NonZeroUsize::MIN);
        let request = Request { ends_at_eos: false, ..Request::greedy(&[1, 5, 9, 5, 9, 5], 40) };
        batch.enter(0, &request).unwrap();
        let steps = (0..60).find_map(|step| Some((step, batch.step().unwrap().pop()?)));
        let (steps, (_, text)) = steps.expect("40 tokens take at most 40 steps");
        (text.unwrap().new_ids, steps)
    };
    let (whole, steps) = text(usize::MAX);
    assert_eq!(text(1), (whole, steps + 1));
}

/// Does not follow the rows, and records how they were truncated.
#[derive(Debug)]
struct Truncated<'a> {
    guesses: NgramDrafter<'a>,
    truncations: Rc<RefCell<Vec<(usize, usize)>>>,
}

impl Drafter for Truncated<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        self.guesses.propose(batch)
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.truncations.borrow_mut().push((row, tokens));
    }
}

#[test]
fn a_drafter_that_does_not_follow_gets_truncations() {
    let (llama, truncations) = (backbone(), Rc::new(RefCell::new(vec![])));
    let drafter = Truncated { guesses: NgramDrafter::new(&llama), truncations: truncations.clone() };
    let mut decoding = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((Box::new(drafter), Acceptance::Greedy)));
    let request = Request { ends_at_eos: false, ..Request::greedy(&[1, 5, 9], 6) };
    decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    decoding.reset();
    assert_eq!(truncations.borrow().last(), Some(&(0, 0)));
    decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    decoding
        .decode(Drafting::On, &Request { prompt: &[1, 5, 7], ..request }, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert!(truncations.borrow().contains(&(0, 2)), "{truncations:?}");
}
