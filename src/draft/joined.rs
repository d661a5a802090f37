//! Several drafters whose guesses share one tree: the likeliest of all, by measured hits ([`crate::tree::merged`]). They are treated as
//! fixed guesses, which is lossless however they were made.

use std::collections::VecDeque;
use std::sync::Arc;

use super::memory::{Memory, Remembered};
use super::tree_cache::{TreeCache, WindowTokens};
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::model::llama::Llama;
use crate::tree::merged::{MAX_DRAFTERS, MeasuredHits, MergedTree, RankedGuess, RankedTree};
use crate::tree::row_times::{RowTimes, StepRows};

/// Proposes the likeliest guesses of several drafters, or of one.
#[derive(Debug)]
pub struct JoinedDrafter<'a> {
    parts: Vec<Box<dyn Drafter + 'a>>,
    /// Most guesses in a tree.
    nodes: usize,
    trees: TreeCache<'a>,
    hits: Remembered<MeasuredHits>,
    /// Of each row, the guesses that the text has not gone past yet.
    guessed: Vec<VecDeque<Guessed>>,
    pace: Option<Pace>,
}

/// Most steps without guesses, before it is tried whether some are worth their time again.
const LONGEST_REST: usize = 32;

/// Chooses the number of guesses by the time that they take.
#[derive(Debug)]
struct Pace {
    times: Arc<RowTimes>,
    /// Steps without guesses that are still to come.
    left: usize,
    /// How many they were.
    rest: usize,
}

impl Pace {
    /// After a step in which no guess was worth its time, the next ones are plain decoding: more of them each time.
    fn after(&mut self, proposals: &[Proposal]) {
        let has_guesses = proposals.iter().any(|proposal| proposal.guesses() > 0);
        self.rest = if has_guesses { 0 } else { (2 * self.rest).clamp(1, LONGEST_REST) };
        self.left = self.rest;
    }
}

/// The guesses made when the text had this many tokens.
#[derive(Debug)]
struct Guessed {
    tokens: usize,
    merged: MergedTree,
}

impl<'a> JoinedDrafter<'a> {
    /// Of 1 to [`MAX_DRAFTERS`] drafters, at most one of which has a window; trees of up to `nodes` guesses.
    pub fn new(backbone: &'a Llama, parts: Vec<Box<dyn Drafter + 'a>>, nodes: usize) -> Self {
        assert!((1..=MAX_DRAFTERS).contains(&parts.len()), "1 to {MAX_DRAFTERS} drafters");
        Self {
            parts,
            nodes,
            trees: TreeCache::new(backbone),
            hits: Remembered::new(MeasuredHits::default()),
            guessed: vec![],
            pace: None,
        }
    }

    /// With as many guesses at each step, up to the most, as are worth their time on this machine: none if the text so far shows that they are
    /// rarely right.
    #[must_use]
    pub fn with_row_times(self, times: Arc<RowTimes>) -> Self {
        Self { pace: Some(Pace { times, left: 0, rest: 0 }), ..self }
    }

    fn merge(&mut self, text: &TextSoFar, texts: usize, proposals: &[Proposal]) -> Proposal {
        let merged = MergedTree::of(&proposals.iter().map(guesses).collect::<Vec<_>>());
        let window = proposals.iter().find_map(window_tokens);
        // A text that depends on its guesses must not depend on the texts beside it.
        let pace = self.pace.as_ref().filter(|_| self.hits.is_common(text.row));
        let hits = self.hits.of(text.row);
        let tree = match pace {
            Some(Pace { times, .. }) => {
                let beside = window.as_ref().map_or(0, |window| window.tokens.len());
                merged.fastest(self.nodes, hits, times, StepRows { texts, beside })
            }
            None => merged.likeliest(self.nodes, hits),
        };
        self.guessed[text.row].push_back(Guessed { tokens: text.ids.len(), merged });
        self.trees.with_window(&tree, window)
    }

    /// Counts the guesses that a text has gone past.
    fn count_hits(&mut self, row: usize, ids: &[i64]) {
        let guessed = &mut self.guessed[row];
        while let Some(Guessed { tokens, merged }) = guessed.front()
            && tokens + merged.depth() <= ids.len()
        {
            self.hits.of(row).count(merged, &ids[*tokens..]);
            guessed.pop_front();
        }
    }

    fn followers(&mut self) -> impl Iterator<Item = &mut Box<dyn Drafter + 'a>> {
        self.parts.iter_mut().filter(|part| part.follows())
    }
}

impl Drafter for JoinedDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let mut from_parts: Vec<_> = self.parts.iter_mut().map(|part| part.propose(batch).into_iter()).collect();
        let mut join = |text: &TextSoFar| {
            let proposals: Vec<Proposal> = from_parts.iter_mut().filter_map(Iterator::next).collect();
            self.count_hits(text.row, text.ids);
            self.merge(text, batch.len(), &proposals)
        };
        let proposals: Vec<Proposal> = batch.iter().map(&mut join).collect();
        self.pace.iter_mut().for_each(|pace| pace.after(&proposals));
        proposals
    }

    fn rests(&mut self, _texts: usize) -> bool {
        if self.nodes == 0 {
            return true;
        }
        let Some(pace) = self.pace.as_mut().filter(|pace| pace.left > 0) else { return false };
        pace.left -= 1;
        true
    }

    fn follows(&self) -> bool {
        self.nodes > 0
    }

    fn remembers(&self) -> bool {
        true
    }

    fn begin_text(&mut self, row: usize, memory: Memory) {
        self.pace.iter_mut().for_each(|pace| (pace.left, pace.rest) = (0, 0));
        self.hits.begin_text(row, memory);
        self.parts.iter_mut().filter(|part| part.remembers()).for_each(|part| part.begin_text(row, memory));
    }

    fn forget(&mut self) {
        self.hits.forget();
        self.parts.iter_mut().for_each(|part| part.forget());
    }

    fn push_row(&mut self) {
        self.hits.push_row();
        self.guessed.push(VecDeque::new());
        self.parts.iter_mut().for_each(|part| part.push_row());
    }

    /// Nothing is counted along these tokens, which the backbone did not choose.
    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.guessed[row].clear();
        self.followers().for_each(|part| part.committed(row, tokens));
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.followers().for_each(|part| part.verified(row, verified));
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.guessed[row].clear();
        self.parts.iter_mut().for_each(|part| part.truncate(row, tokens));
    }

    fn swap_remove(&mut self, row: usize) {
        self.hits.swap_remove(row);
        self.guessed.swap_remove(row);
        self.parts.iter_mut().for_each(|part| part.swap_remove(row));
    }

    fn drop_rows(&mut self) {
        self.hits.drop_rows();
        self.guessed.clear();
        self.parts.iter_mut().for_each(|part| part.drop_rows());
    }
}

/// A proposal's guesses on the host.
fn guesses(proposal: &Proposal) -> RankedTree {
    let tree = &proposal.tree.tree;
    let tokens = host(proposal);
    let node = |node: usize| RankedGuess {
        parent: tree.parent(node).unwrap_or(0),
        token: tokens[node],
        rank: tree.child_index(node).unwrap_or(0),
    };
    RankedTree { nodes: (0..tree.len()).map(node).collect() }
}

fn window_tokens(proposal: &Proposal) -> Option<WindowTokens> {
    let window = proposal.tree.window.clone()?;
    Some(WindowTokens { window, tokens: host(proposal).split_off(proposal.tree.tree.len()) })
}

fn host(proposal: &Proposal) -> Vec<i64> {
    Vec::try_from(&proposal.tokens_n).expect("one axis of int64")
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::draft::ngram::NgramDrafter;
    use crate::engine::sample::{Chosen, Sampling, Stream};
    use crate::model::config::LlamaConfig;
    use crate::numbers::NonNegative;

    #[test]
    fn a_turns_prompt_is_no_hit_or_miss_of_the_guesses_before() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let mut drafter = JoinedDrafter::new(&llama, vec![Box::new(NgramDrafter::new(&llama))], 12);
        drafter.push_row();
        let hidden_1h = Tensor::zeros([1, 1], (Kind::Float, Device::Cpu));
        let root = Chosen::on_host(1);
        let (sampling, stream) = (Sampling::with_temperature(NonNegative::ZERO), Stream::default());
        let text =
            TextSoFar { row: 0, ids: &[1, 2, 1], root: &root, state_1w: &hidden_1h, sampling, stream, may_draw: false };
        let _ = drafter.propose(&[text]);
        assert_eq!(drafter.guessed[0].len(), 1);
        drafter.committed(0, &CommittedTokens { ids: &[2, 1, 2], states_nw: hidden_1h.shallow_clone() });
        assert!(drafter.guessed[0].is_empty());
    }

    #[test]
    fn steps_without_guesses_become_plain_until_a_text_begins() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let times = Arc::new(crate::tree::row_times::examples::row_times(&[(1, 1.0), (2, 9.0), (64, 99.0)]));
        let parts: Vec<Box<dyn Drafter>> = vec![Box::new(NgramDrafter::new(&llama))];
        let mut drafter = JoinedDrafter::new(&llama, parts, 12).with_row_times(times);
        drafter.push_row();
        drafter.begin_text(0, Memory::Common);
        let hidden_1h = Tensor::zeros([1, 1], (Kind::Float, Device::Cpu));
        let root = Chosen::on_host(1);
        let text = TextSoFar {
            row: 0,
            ids: &[1, 2, 1],
            root: &root,
            state_1w: &hidden_1h,
            sampling: Sampling::with_temperature(NonNegative::ZERO),
            stream: Stream::default(),
            may_draw: false,
        };
        let mut rests = vec![];
        for _ in 0..7 {
            assert_eq!(drafter.propose(&[text])[0].guesses(), 0, "a guess takes nine times as long as a step");
            rests.push(std::iter::repeat_with(|| drafter.rests(1)).take_while(|&rests| rests).count());
        }
        assert_eq!(rests, [1, 2, 4, 8, 16, 32, LONGEST_REST]);
        let _ = drafter.propose(&[text]);
        drafter.begin_text(0, Memory::Common);
        assert!(!drafter.rests(1));
    }
}
