//! One step of decoding, for one text or many: propose, run the backbone over all guesses in one pass, accept, commit. Every step
//! commits the root, which is the backbone's own token, and the accepted path below it; plain decoding is the step without guesses.
//!
//! A node behind the context's end or `max_new_tokens` is computed with the others and never becomes text.

// N new tokens, W a token's states (see [`crate::model::taps`]), V vocabulary
use std::rc::Rc;

use tch::Tensor;

use super::sequence::{Sequence, SequenceStep};
use super::verify::together::verify_batch;
use super::verify::{Verdict, first_root};
use crate::draft::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::engine::prefix_cache::PrefixCache;
use crate::engine::sample::{Chosen, Sampler, next_of_each};
use crate::engine::{Engine, RowTokens};
use crate::model::kv_cache::KvCache;
use crate::model::llama::NO_TOKEN;
use crate::model::new_tokens::NewTokens;
use crate::torch::{memory, upload};
use crate::tree::accept::Acceptance;

mod prompts;

/// Whether a text is decoded with the drafter's guesses, where there is a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafting {
    /// A token a step.
    Off,
    /// Several.
    On,
}

/// Who computes, who guesses, and which guesses are accepted.
#[derive(Debug)]
pub struct Stepper<'a> {
    engine: Box<dyn Engine + 'a>,
    cache: KvCache,
    drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>,
    /// Of each row, the number of tokens that a drafter that follows the rows was notified of: none while another one drafts.
    seen: Vec<usize>,
    /// A token behind the cache.
    one: NewTokens,
    /// The tokens of the last piece of a prompt.
    chain: Option<Rc<NewTokens>>,
    /// Beginnings of earlier texts.
    prefixes: Option<PrefixCache>,
    /// Tokens of prompts that were taken from there.
    reused: usize,
    /// Whether no step succeeded since all rows were dropped. Until then nothing is kept: whoever dropped them lacks memory.
    is_bare: bool,
}

impl<'a> Stepper<'a> {
    /// Of an engine, with a drafter if there is one.
    pub fn new(engine: Box<dyn Engine + 'a>, drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>) -> Self {
        let backbone = engine.backbone();
        let one = NewTokens::chain(1, &backbone.config, backbone.kind(), backbone.device());
        let cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
        Self { engine, cache, drafter, seen: vec![], one, chain: None, prefixes: None, reused: 0, is_bare: false }
    }

    /// Keeps the beginnings of texts, in at most so many bytes, for [`Stepper::run_prompts`]. A drafter that follows the rows needs the hidden
    /// state of every token: with one, nothing is kept.
    pub(super) fn keep_prefixes(&mut self, most_bytes: usize) {
        let follows = self.drafter.as_ref().is_some_and(|(drafter, _)| drafter.follows());
        self.prefixes = (!follows).then(|| PrefixCache::new(most_bytes));
    }

    /// Tokens of prompts that were not computed, because earlier texts began with them.
    pub(super) fn reused(&self) -> usize {
        self.reused
    }

    /// Memory of the beginnings of texts.
    pub(super) fn prefix_bytes(&self) -> usize {
        self.prefixes.as_ref().map_or(0, PrefixCache::bytes)
    }

    /// Who computes.
    pub fn engine(&self) -> &(dyn Engine + 'a) {
        &*self.engine
    }

    /// Keys and values of the sequences.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// As [`Stepper::cache`].
    #[cfg(test)]
    pub(super) fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// Allocates the cache for so many rows of so many tokens each, unless it has that room.
    pub(super) fn reserve(&mut self, rows: usize, tokens: usize) {
        self.cache.reserve(rows as i64, tokens as i64);
    }

    /// Drops all rows and beginnings of texts, and returns their memory to the device. Allocates nothing, and is right after any error: even if
    /// the cache has a row that the drafter lacks.
    pub(super) fn drop_rows(&mut self) {
        self.seen.clear();
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.drop_rows());
        self.prefixes.iter_mut().for_each(PrefixCache::clear);
        self.chain = None;
        let backbone = self.engine.backbone();
        self.cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
        memory::release_cached(backbone.device());
        self.is_bare = true;
    }

    /// Whether no step succeeded since all rows were dropped.
    pub(super) fn is_bare(&self) -> bool {
        self.is_bare
    }

    /// The drafter forgets what the texts so far have taught it.
    pub(super) fn forget(&mut self) {
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.forget());
    }

    /// Adds an empty row; returns its index. After an error here, only [`Stepper::drop_rows`] brings cache and drafter together again.
    pub(super) fn push_row(&mut self) -> usize {
        let row = self.cache.push();
        self.seen.push(0);
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.push_row());
        row
    }

    /// Keeps only the first `tokens` tokens of a row.
    pub(super) fn truncate(&mut self, row: usize, tokens: usize) {
        self.cache.truncate(row, tokens as i64);
        let seen = &mut self.seen[row];
        *seen = tokens.min(*seen);
        if let Some((drafter, _)) = &mut self.drafter {
            drafter.truncate(row, if drafter.follows() { *seen } else { tokens });
        }
    }

    /// Removes a row; the last row takes its place.
    pub(super) fn swap_remove(&mut self, row: usize) {
        self.cache.swap_remove(row);
        self.seen.swap_remove(row);
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.swap_remove(row));
    }

    /// Whether a row lacks nothing of its sequence: it holds all keys and values that a step needs, or the text has ended.
    fn is_computed(&self, sequence: &Sequence, row: usize) -> bool {
        let all = || self.cache.len(row) == sequence.computed().len() as i64;
        sequence.has_begun() && (sequence.text.has_ended() || all())
    }

    /// One step of all sequences whose prompts are computed and whose texts have not ended; sequence i is in row i of the cache.
    pub(super) fn step(&mut self, sequences: &mut [Sequence], drafting: Drafting) {
        let is_in = |(row, sequence): (usize, &Sequence)| {
            (self.is_computed(sequence, row) && !sequence.text.has_ended()).then_some(row)
        };
        let rows: Vec<usize> = sequences.iter().enumerate().filter_map(is_in).collect();
        match drafting {
            _ if rows.is_empty() => return,
            Drafting::On if self.guesses(sequences, &rows) => self.drafted_step(sequences, &rows),
            _ => self.plain_step(sequences, &rows, drafting),
        }
        self.is_bare = false;
    }

    /// Whether a step of these rows is more than one of plain decoding: the drafter guesses, or a text chooses its tokens in another way.
    fn guesses(&mut self, sequences: &[Sequence], rows: &[usize]) -> bool {
        let Some((drafter, default)) = &mut self.drafter else { return false };
        !drafter.rests(rows.len()) || !rows.iter().all(|&row| sequences[row].chooses_as_plain(*default))
    }

    fn plain_step(&mut self, sequences: &mut [Sequence], rows: &[usize], drafting: Drafting) {
        // A drafter that rests now may guess from them at the next step.
        let keeps_state = drafting == Drafting::On && self.drafter.is_some();
        let mut stepping = at_rows(sequences, rows);
        let roots_b = match &stepping[..] {
            [one] => one.root().on_device(self.engine.backbone().device()),
            all => {
                let roots: Vec<i64> = all.iter().map(|sequence| sequence.root().id).collect();
                upload(&roots, self.engine.backbone().device())
            }
        };
        let states_bw = self.engine.extend_each(&mut self.cache, &roots_b, rows, &self.one);
        let logits_bv = self.engine.logits(&states_bw);
        let next = next_roots(&logits_bv, &mut stepping);
        let decoded = |((sequence, next), at): ((&&mut Sequence, Chosen), i64)| {
            let scored = sequence.scored(&[next.id], || logits_bv.narrow(0, at, 1));
            let state_1w = keeps_state.then(|| states_bw.narrow(0, at, 1));
            SequenceStep { accepted: vec![sequence.root().id], next, state_1w, proposed: 0, scored }
        };
        let steps: Vec<SequenceStep> = stepping.iter().zip(next).zip(0..).map(decoded).collect();
        // Only now: a step that runs out of memory before can be repeated.
        for ((sequence, step), &row) in stepping.into_iter().zip(steps).zip(rows) {
            self.cache.commit(row, 1);
            sequence.go_on(step);
        }
    }

    fn drafted_step(&mut self, sequences: &mut [Sequence], rows: &[usize]) {
        let (drafter, default) = self.drafter.as_mut().expect("asked before");
        let texts: Vec<TextSoFar> = rows.iter().map(|&row| sequences[row].text_so_far(row, *default)).collect();
        let proposals = drafter.propose(&texts);
        let states_nw = self.extend(&proposals, rows);
        let logits_nv = self.engine.logits(&read_of(&states_nw, &proposals));
        let mut stepping = at_rows(sequences, rows);
        let samplers: Vec<Sampler> = stepping.iter().map(|sequence| sequence.sampler.clone()).collect();
        let verdicts = verify_batch(self.acceptance(), &proposals, &logits_nv, &mut stepping);
        let (mut nodes, mut read) = (Slices::of(&states_nw), Slices::of(&logits_nv));
        let all = proposals.iter().zip(verdicts).zip(stepping).zip(samplers).zip(rows);
        for ((((proposal, verdict), sequence), sampler), &row) in all {
            let states_nw = nodes.next(proposal.tree.nodes.len());
            let logits_nv = read.next(proposal.tree.read().count() as i64);
            if verdict.next.id == NO_TOKEN {
                sequence.sampler = sampler;
                self.step_alone(row, sequence, proposal.guesses());
            } else {
                self.settle(row, sequence, (proposal, verdict), [&states_nw, &logits_nv]);
            }
        }
    }

    /// Runs the backbone over proposals: `[N, H]`. Roots alone are a step of plain decoding, with its speed.
    fn extend(&mut self, proposals: &[Proposal], rows: &[usize]) -> Tensor {
        let tokens_n = tokens_of(proposals);
        if proposals.iter().all(|proposal| proposal.tree.nodes.len() == 1) {
            let states_bw = self.engine.extend_each(&mut self.cache, &tokens_n, rows, &self.one);
            return states_bw.narrow(0, 0, rows.len() as i64); // spare rows may follow
        }
        let batch: Vec<RowTokens> =
            proposals.iter().zip(rows).map(|(proposal, &row)| RowTokens { row, nodes: &proposal.tree.nodes }).collect();
        self.engine.extend(&mut self.cache, &tokens_n, &batch)
    }

    /// How guesses are accepted where a text has no rule of its own.
    fn acceptance(&self) -> Acceptance {
        self.drafter.as_ref().expect("asked before").1
    }

    /// Commits the accepted path of a row's proposal, given its nodes' states and logits.
    fn settle(
        &mut self,
        row: usize,
        sequence: &mut Sequence,
        (proposal, verdict): (&Proposal, Verdict),
        [states_nw, logits_nv]: [&Tensor; 2],
    ) {
        let (drafter, _) = self.drafter.as_mut().expect("asked before");
        let Verdict { path, accepted, next } = verdict;
        let scored = sequence.scored(&[&accepted[1..], &[next.id]].concat(), || rows_of(logits_nv, &path));
        self.cache.commit_path(row, &path);
        if drafter.follows() {
            let committed = CommittedTokens { ids: &accepted, states_nw: rows_of(states_nw, &path) };
            drafter.verified(row, &VerifiedTree { proposal, logits_nv, path: &path, accepted: committed });
            self.seen[row] += path.len();
        }
        let last = path.last().map_or(0, |&node| node as i64);
        let state_1w = Some(states_nw.narrow(0, last, 1));
        sequence.go_on(SequenceStep { accepted, next, state_1w, proposed: proposal.guesses(), scored });
    }

    /// One step of a sequence without its `refused` guesses. A guess with NaN among its keys or values spoils its whole tree, and may be one that plain
    /// decoding never comes to.
    fn step_alone(&mut self, row: usize, sequence: &mut Sequence, refused: usize) {
        let (drafter, default) = self.drafter.as_mut().expect("asked before");
        let root_1 = sequence.root().on_device(self.engine.backbone().device());
        let states_nw = self.engine.extend(&mut self.cache, &root_1, &[RowTokens { row, nodes: &self.one }]);
        let state_1w = states_nw.narrow(0, 0, 1);
        let logits_1v = self.engine.logits(&state_1w);
        self.cache.commit(row, 1);
        if drafter.follows() {
            let tokens = CommittedTokens { ids: &[sequence.root().id], states_nw: state_1w.shallow_clone() };
            drafter.committed(row, &tokens);
            self.seen[row] += 1;
        }
        let next = first_root(*default, &logits_1v, sequence);
        let scored = sequence.scored(&[next.id], || logits_1v);
        let accepted = vec![sequence.root().id];
        sequence.go_on(SequenceStep { accepted, next, state_1w: Some(state_1w), proposed: refused, scored });
    }
}

/// Of states `[N, W]` of all proposals, those whose logits are needed; without windows, all.
fn read_of(states_nw: &Tensor, proposals: &[Proposal]) -> Tensor {
    if proposals.iter().all(|proposal| proposal.tree.window.is_none()) {
        return states_nw.shallow_clone();
    }
    let mut end = 0;
    let read = proposals.iter().flat_map(|proposal| {
        let first = end;
        end += proposal.tree.nodes.len();
        proposal.tree.read().map(move |node| first + node)
    });
    states_nw.index_select(0, &upload(&read.collect::<Vec<i64>>(), states_nw.device()))
}

/// Hands out the rows of a tensor, from the first one on.
struct Slices<'t> {
    all: &'t Tensor,
    end: i64,
}

impl<'t> Slices<'t> {
    fn of(all: &'t Tensor) -> Self {
        Self { all, end: 0 }
    }

    /// The next `rows` rows.
    fn next(&mut self, rows: i64) -> Tensor {
        self.end += rows;
        self.all.narrow(0, self.end - rows, rows)
    }
}

/// The rows `nodes` of `[N, H]`.
fn rows_of(states_nw: &Tensor, nodes: &[usize]) -> Tensor {
    let nodes: Vec<i64> = nodes.iter().map(|&node| node as i64).collect();
    states_nw.index_select(0, &upload(&nodes, states_nw.device()))
}

/// `[N]`: the tokens of all proposals, one after the other.
fn tokens_of(proposals: &[Proposal]) -> Tensor {
    match proposals {
        [one] => one.tokens_n.shallow_clone(),
        all => Tensor::cat(&all.iter().map(|proposal| &proposal.tokens_n).collect::<Vec<_>>(), 0),
    }
}

/// The sequences in these rows, which ascend; sequence i is in row i.
fn at_rows<'s>(sequences: &'s mut [Sequence], rows: &[usize]) -> Vec<&'s mut Sequence> {
    let is_in = |(row, _): &(usize, &mut Sequence)| rows.binary_search(row).is_ok();
    sequences.iter_mut().enumerate().filter(is_in).map(|(_, sequence)| sequence).collect()
}

/// The token after each sequence's last, of logits `[B, V]`; spare rows may follow.
fn next_roots(logits_bv: &Tensor, sequences: &mut [&mut Sequence]) -> Vec<Chosen> {
    if let [one] = sequences {
        let logits_1v = one.penalised(&logits_bv.narrow(0, 0, 1));
        return vec![one.sampler.next(&logits_1v)];
    }
    let logits_bv = if sequences.iter().all(|sequence| sequence.penalty.is_off()) {
        logits_bv.narrow(0, 0, sequences.len() as i64)
    } else {
        let penalised = |(sequence, row): (&&mut Sequence, i64)| sequence.penalised(&logits_bv.narrow(0, row, 1));
        Tensor::cat(&sequences.iter().zip(0..).map(penalised).collect::<Vec<_>>(), 0)
    };
    let mut samplers: Vec<&mut Sampler> = sequences.iter_mut().map(|sequence| &mut sequence.sampler).collect();
    next_of_each(&logits_bv, &mut samplers).into_iter().map(Chosen::on_host).collect()
}

#[cfg(test)]
mod tests;
