//! One step of decoding, for one text or many: propose, run the backbone over all guesses in one pass, accept, commit. Every step
//! commits the root, which is the backbone's own token, and the accepted path below it; plain decoding is the step without guesses.
//!
//! A node behind the context's end or `max_new_tokens` is computed with the others and never becomes text.

// N new tokens, H hidden, V vocabulary
use tch::Tensor;

use super::sequence::Sequence;
use super::verify::{Verdict, first_root, verify};
use crate::draft::memory::Memory;
use crate::draft::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::engine::prefill::{PREFILL_CHUNK, prefill, prefill_several};
use crate::engine::sample::{Chosen, Sampler, next_of_each};
use crate::engine::{Engine, PromptPass, RowTokens};
use crate::model::kv_cache::KvCache;
use crate::model::llama::NO_TOKEN;
use crate::model::new_tokens::NewTokens;
use crate::torch::{memory, upload};
use crate::tree::accept::Acceptance;

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
    /// Of each row, the number of tokens that a drafter that follows the rows was told of: none while another one drafts.
    seen: Vec<usize>,
    /// A token behind the cache.
    one: NewTokens,
}

impl<'a> Stepper<'a> {
    /// Of an engine, with a drafter if there is one.
    pub fn new(engine: Box<dyn Engine + 'a>, drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>) -> Self {
        let backbone = engine.backbone();
        let one = NewTokens::chain(1, &backbone.config, backbone.kind(), backbone.device());
        let cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
        Self { engine, cache, drafter, seen: vec![], one }
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

    /// Whether there is a drafter.
    pub(super) fn drafts(&self) -> bool {
        self.drafter.is_some()
    }

    /// Allocates the cache for so many rows of so many tokens each, unless it has that room.
    pub(super) fn reserve(&mut self, rows: usize, tokens: usize) {
        self.cache.reserve(rows as i64, tokens as i64);
    }

    /// Drops all rows and returns their memory to the device.
    pub(super) fn drop_rows(&mut self) {
        let backbone = self.engine.backbone();
        self.cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
        self.seen.clear();
        memory::release_cached(self.engine.backbone().device());
    }

    /// The drafter forgets what the texts so far have taught it.
    pub(super) fn forget(&mut self) {
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.forget());
    }

    /// Adds an empty row.
    pub(super) fn push_row(&mut self) {
        self.cache.push();
        self.seen.push(0);
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.push_row());
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

    /// Removes the rows from `rows` on.
    pub(super) fn truncate_rows(&mut self, rows: usize) {
        (rows..self.seen.len()).rev().for_each(|row| self.swap_remove(row));
    }

    /// Computes what a row of the cache lacks of a sequence's prompt, its last token in any case, and chooses the token after it.
    pub(super) fn begin(&mut self, sequence: &mut Sequence, row: usize, drafting: Drafting) {
        if drafting == Drafting::On {
            self.begin_text(sequence, row);
        }
        let hidden_1h = self.prefill(sequence, row, drafting);
        let logits_1v = self.engine.logits(&hidden_1h);
        let root = match &self.drafter {
            Some((_, acceptance)) if drafting == Drafting::On => first_root(*acceptance, &logits_1v, sequence),
            _ => sequence.sampler.next(&sequence.penalty.of_text(&logits_1v)),
        };
        sequence.begin(root, hidden_1h);
    }

    /// Computes sequences that were not begun, or whose keys and values were dropped; sequence i is in row `first + i`. A new one gets its
    /// first token, one that goes on keeps its root and is otherwise as after its last step.
    pub(super) fn begin_all(&mut self, sequences: &mut [Sequence], first: usize) {
        let tokens = match self.engine.prompt_pass() {
            PromptPass::OfSeveral { tokens } if self.drafter.is_none() => tokens,
            _ => {
                return sequences
                    .iter_mut()
                    .zip(first..)
                    .for_each(|(sequence, row)| self.begin_or_go_on(sequence, row));
            }
        };
        let mut begun = 0;
        while begun < sequences.len() {
            let count = fitting(&sequences[begun..], tokens);
            self.begin_pass(&mut sequences[begun..begun + count], first + begun, tokens);
            begun += count;
        }
    }

    fn begin_or_go_on(&mut self, sequence: &mut Sequence, row: usize) {
        if sequence.has_begun() {
            let _ = self.prefill(sequence, row, Drafting::Off);
        } else {
            self.begin(sequence, row, Drafting::On);
        }
    }

    /// [`Stepper::begin_all`] of sequences that fit one pass, or of one that needs several.
    fn begin_pass(&mut self, sequences: &mut [Sequence], first: usize, tokens: usize) {
        let prompts: Vec<&[i64]> = sequences.iter().map(Sequence::computed).collect();
        let hidden_bh = match prompts[..] {
            [one] => prefill(tokens, &*self.engine, (&mut self.cache, first), one, &mut |_, _| {}),
            _ => prefill_several(&*self.engine, (&mut self.cache, first), &prompts),
        };
        let is_new = |(at, sequence): (usize, &Sequence)| (!sequence.has_begun()).then_some(at as i64);
        let new: Vec<i64> = sequences.iter().enumerate().filter_map(is_new).collect();
        if new.is_empty() {
            return;
        }
        let hidden_nh = hidden_bh.index_select(0, &upload(&new, hidden_bh.device()));
        let logits_nv = self.engine.logits(&hidden_nh);
        let mut beginning: Vec<&mut Sequence> = sequences.iter_mut().filter(|sequence| !sequence.has_begun()).collect();
        let roots = next_roots(&logits_nv, &mut beginning);
        for ((sequence, root), row) in beginning.into_iter().zip(roots).zip(0..) {
            sequence.begin(root, hidden_nh.narrow(0, row, 1));
        }
    }

    /// Tells a drafter that remembers texts of a new one. If the text would depend on what it remembers, it learns the whole prompt anew.
    fn begin_text(&mut self, sequence: &Sequence, row: usize) {
        let Some((_, acceptance)) = self.drafter.as_ref().filter(|(drafter, _)| drafter.remembers()) else { return };
        let temperature = sequence.sampler.sampling().temperature.get();
        let memory = if acceptance.depends_on_guesses(temperature) { Memory::OfText } else { Memory::Common };
        if memory == Memory::OfText {
            self.truncate(row, 0);
        }
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.begin_text(row, memory));
    }

    /// Runs what a row lacks of a prompt, and returns the last token's hidden state, `[1, H]`.
    fn prefill(&mut self, sequence: &Sequence, row: usize, drafting: Drafting) -> Tensor {
        let Self { engine, cache, drafter, seen, .. } = self;
        let following = drafter.as_mut().filter(|(drafter, _)| drafting == Drafting::On && drafter.follows());
        if following.is_some() {
            cache.truncate(row, seen[row] as i64); // a text without guesses was committed without the drafter
        }
        let cached = cache.len(row).unsigned_abs() as usize;
        let mut following = following.map(|(drafter, _)| drafter);
        let mut tell = |ids: &[i64], hidden_nh: Tensor| {
            if let Some(drafter) = &mut following {
                drafter.committed(row, &CommittedTokens { ids, hidden_nh });
                seen[row] += ids.len();
            }
        };
        prefill(PREFILL_CHUNK, &**engine, (cache, row), &sequence.computed()[cached..], &mut tell)
    }

    /// One step of sequences that have begun; sequence i is in row i of the cache.
    pub(super) fn step(&mut self, sequences: &mut [Sequence], drafting: Drafting) {
        match drafting {
            Drafting::On if self.drafter.is_some() => self.drafted_step(sequences),
            _ => self.plain_step(sequences),
        }
    }

    fn plain_step(&mut self, sequences: &mut [Sequence]) {
        let roots_b = match &*sequences {
            [one] => one.root().on_device(self.engine.backbone().device()),
            all => {
                let roots: Vec<i64> = all.iter().map(|sequence| sequence.root().id).collect();
                upload(&roots, self.engine.backbone().device())
            }
        };
        let hidden_bh = self.engine.extend_all(&mut self.cache, &roots_b, &self.one);
        let logits_bv = self.engine.logits(&hidden_bh);
        sequences.iter_mut().for_each(Sequence::see_root);
        let next = next_roots(&logits_bv, &mut sequences.iter_mut().collect::<Vec<_>>());
        // Only now: a step that runs out of memory before can be repeated.
        for (row, (sequence, next)) in sequences.iter_mut().zip(next).enumerate() {
            self.cache.commit(row, 1);
            sequence.go_on(&[sequence.root().id], next, None);
        }
    }

    fn drafted_step(&mut self, sequences: &mut [Sequence]) {
        let texts: Vec<TextSoFar> = sequences.iter().map(Sequence::text_so_far).collect();
        let (drafter, _) = self.drafter.as_mut().expect("asked before");
        let proposals = drafter.propose(&texts);
        let rows: Vec<RowTokens> =
            proposals.iter().zip(0..).map(|(proposal, row)| RowTokens { row, nodes: &proposal.tree.nodes }).collect();
        let hidden_nh = self.engine.extend(&mut self.cache, &tokens_of(&proposals), &rows);
        let logits_nv = self.engine.logits(&read_of(&hidden_nh, &proposals));
        let (mut nodes, mut read) = (Slices::of(&hidden_nh), Slices::of(&logits_nv));
        for (row, (sequence, proposal)) in sequences.iter_mut().zip(&proposals).enumerate() {
            let hidden_nh = nodes.next(proposal.tree.nodes.len());
            let logits_nv = read.next(proposal.tree.read().count() as i64);
            self.settle(row, sequence, proposal, [&hidden_nh, &logits_nv]);
        }
    }

    /// Verifies a row's proposal and commits the accepted path, given its nodes' hidden states and logits.
    fn settle(
        &mut self,
        row: usize,
        sequence: &mut Sequence,
        proposal: &Proposal,
        [hidden_nh, logits_nv]: [&Tensor; 2],
    ) {
        let (drafter, acceptance) = self.drafter.as_mut().expect("asked before");
        let sampler = sequence.sampler.clone();
        let Verdict { path, accepted, next } = verify(*acceptance, proposal, logits_nv, sequence);
        if next.id == NO_TOKEN {
            sequence.sampler = sampler;
            return self.step_alone(row, sequence);
        }
        self.cache.commit_path(row, &path);
        if drafter.follows() {
            let accepted = CommittedTokens { ids: &accepted, hidden_nh: rows_of(hidden_nh, &path) };
            drafter.verified(row, &VerifiedTree { proposal, logits_nv, path: &path, accepted });
            self.seen[row] += path.len();
        }
        let last = path.last().map_or(0, |&node| node as i64);
        sequence.go_on(&accepted, next, Some(hidden_nh.narrow(0, last, 1)));
    }

    /// One step of a sequence without guesses. A guess with NaN among its keys or values spoils its whole tree, and may be one that plain
    /// decoding never comes to.
    fn step_alone(&mut self, row: usize, sequence: &mut Sequence) {
        let (drafter, acceptance) = self.drafter.as_mut().expect("asked before");
        let root_1 = sequence.root().on_device(self.engine.backbone().device());
        let hidden_nh = self.engine.extend(&mut self.cache, &root_1, &[RowTokens { row, nodes: &self.one }]);
        let hidden_1h = hidden_nh.narrow(0, 0, 1);
        let logits_1v = self.engine.logits(&hidden_1h);
        self.cache.commit(row, 1);
        if drafter.follows() {
            let tokens = CommittedTokens { ids: &[sequence.root().id], hidden_nh: hidden_1h.shallow_clone() };
            drafter.committed(row, &tokens);
            self.seen[row] += 1;
        }
        sequence.see_root();
        let next = first_root(*acceptance, &logits_1v, sequence);
        sequence.go_on(&[sequence.root().id], next, Some(hidden_1h));
    }
}

/// Of hidden states `[N, H]` of all proposals, those whose logits are needed; without windows, all.
fn read_of(hidden_nh: &Tensor, proposals: &[Proposal]) -> Tensor {
    if proposals.iter().all(|proposal| proposal.tree.window.is_none()) {
        return hidden_nh.shallow_clone();
    }
    let mut end = 0;
    let read = proposals.iter().flat_map(|proposal| {
        let first = end;
        end += proposal.tree.nodes.len();
        proposal.tree.read().map(move |node| first + node)
    });
    hidden_nh.index_select(0, &Tensor::from_slice(&read.collect::<Vec<i64>>()).to_device(hidden_nh.device()))
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
fn rows_of(hidden_nh: &Tensor, nodes: &[usize]) -> Tensor {
    let nodes: Vec<i64> = nodes.iter().map(|&node| node as i64).collect();
    hidden_nh.index_select(0, &Tensor::from_slice(&nodes).to_device(hidden_nh.device()))
}

/// `[N]`: the tokens of all proposals, one after the other.
fn tokens_of(proposals: &[Proposal]) -> Tensor {
    match proposals {
        [one] => one.tokens_n.shallow_clone(),
        all => Tensor::cat(&all.iter().map(|proposal| &proposal.tokens_n).collect::<Vec<_>>(), 0),
    }
}

/// How many of the first sequences fit a pass of so many tokens; at least one.
fn fitting(sequences: &[Sequence], tokens: usize) -> usize {
    let mut sum = 0;
    let fits = |sequence: &&Sequence| {
        sum += sequence.computed().len();
        sum <= tokens
    };
    sequences.iter().take_while(fits).count().max(1)
}

/// The token after each sequence's last, of logits `[B, V]`; spare rows may follow.
fn next_roots(logits_bv: &Tensor, sequences: &mut [&mut Sequence]) -> Vec<Chosen> {
    let samplings_differ = sequences.windows(2).any(|two| two[0].sampler.sampling() != two[1].sampler.sampling());
    let any_penalty = sequences.iter().any(|sequence| !sequence.penalty.is_off());
    if sequences.len() == 1 || samplings_differ || any_penalty {
        let next = |(sequence, row): (&mut &mut Sequence, i64)| {
            sequence.sampler.next(&sequence.penalty.of_text(&logits_bv.narrow(0, row, 1)))
        };
        return sequences.iter_mut().zip(0..).map(next).collect();
    }
    let logits_bv = logits_bv.narrow(0, 0, sequences.len() as i64);
    let mut samplers: Vec<&mut Sampler> = sequences.iter_mut().map(|sequence| &mut sequence.sampler).collect();
    next_of_each(&logits_bv, &mut samplers).into_iter().map(Chosen::on_host).collect()
}

#[cfg(test)]
mod tests;
