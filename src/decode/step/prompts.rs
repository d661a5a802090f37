//! Prompts of texts: in pieces, so that what attention takes of memory is bounded, and several in a pass where the engine can.

// N tokens of a pass, W a token's states, V vocabulary
use std::rc::Rc;

use tch::Tensor;

use super::{Drafting, Stepper, next_roots, rows_of};
use crate::decode::sequence::Sequence;
use crate::decode::verify::first_root;
use crate::draft::CommittedTokens;
use crate::draft::memory::Memory;
use crate::engine::prefill::PREFILL_CHUNK;
use crate::engine::prefix_cache::BLOCK_TOKENS;
use crate::engine::sample::Chosen;
use crate::engine::{PromptPass, RowTokens};
use crate::model::new_tokens::NewTokens;
use crate::torch::upload;

/// A prompt that lacks at most so many tokens shares its pass with others. It could not have taken another block from them: a block has as many
/// tokens, and a prompt's last token is always computed.
const REST_TOKENS: usize = BLOCK_TOKENS;

/// The next tokens of a text whose keys and values are computed.
#[derive(Debug, Clone, Copy)]
struct PromptPiece {
    row: usize,
    tokens: usize,
}

impl Stepper<'_> {
    /// Computes what a row of the cache lacks of a sequence's prompt, its last token in any case, and chooses the token after it.
    pub(in crate::decode) fn begin(&mut self, sequence: &mut Sequence, row: usize, drafting: Drafting) {
        if drafting == Drafting::On {
            self.begin_text(sequence, row);
            if self.drafter.as_ref().is_some_and(|(drafter, _)| drafter.follows()) {
                let seen = self.seen[row];
                self.cache.truncate(row, seen as i64); // a text without guesses was committed without the drafter
            }
        }
        let sequences = std::slice::from_mut(sequence);
        while !self.is_computed(&sequences[0], row) {
            let tokens = self.lacking(&sequences[0], row).min(PREFILL_CHUNK);
            self.run_pieces(sequences, row, &[PromptPiece { row, tokens }], drafting);
        }
    }

    /// Adds an empty row for a sequence that was not begun, or whose keys and values were dropped.
    pub(in crate::decode) fn enter(&mut self, sequence: &Sequence) {
        let row = self.push_row();
        self.begin_text(sequence, row);
    }

    /// Computes up to `tokens` tokens of prompts, those of the texts that came first before others, and chooses the token after each prompt that is
    /// whole; sequence i is in row i. A sequence that had begun before its keys and values were dropped keeps its root, and is otherwise as
    /// after its last step. On engines that run one prompt at a time, a piece has [`PREFILL_CHUNK`] tokens, or `tokens` if that is less, and
    /// the last one is finished: so the bits of a prompt do not depend on the others. Where no pass changes bits, the last tokens of several prompts
    /// run together.
    pub(in crate::decode) fn run_prompts(&mut self, sequences: &mut [Sequence], tokens: usize) {
        let mut done = 0;
        while done < tokens {
            self.take_prefixes(sequences);
            let pieces = match self.engine.prompt_pass() {
                PromptPass::OfOne => self.rests_or_oldest(sequences, PREFILL_CHUNK.min(tokens)),
                PromptPass::OfSeveral { tokens: most } => self.pieces(sequences, most.min(tokens - done)),
            };
            if pieces.is_empty() {
                return;
            }
            done += pieces.iter().map(|piece| piece.tokens).sum::<usize>();
            self.run_pieces(sequences, 0, &pieces, Drafting::On);
        }
    }

    /// Copies the beginnings of prompts that earlier texts had, to rows that are empty: up to the oldest text that lacks more than what runs
    /// beside others, or for all where they run together.
    fn take_prefixes(&mut self, sequences: &mut [Sequence]) {
        let beside_others = match self.engine.prompt_pass() {
            PromptPass::OfSeveral { .. } => usize::MAX,
            PromptPass::OfOne if self.engine.same_bits_in_any_pass() => REST_TOKENS,
            PromptPass::OfOne => 0,
        };
        for row in self.waiting(sequences) {
            if self.cache.len(row) == 0 {
                self.take_prefix(&mut sequences[row], row);
            }
            if !self.is_computed(&sequences[row], row) && self.lacking(&sequences[row], row) > beside_others {
                return;
            }
        }
    }

    fn take_prefix(&mut self, sequence: &mut Sequence, row: usize) {
        let Some(prefixes) = &mut self.prefixes else { return };
        self.cache.append(row, &prefixes.longest(sequence.computed(), needed(sequence)));
        let taken = self.cache.len(row).unsigned_abs() as usize;
        self.reused += taken;
        sequence.text.came_with(taken);
    }

    /// Keeps the beginning of a row's text for later prompts, unless memory has just run out.
    pub(in crate::decode) fn keep_prefix(&mut self, row: usize, ids: &[i64]) {
        if self.is_bare {
            return;
        }
        let (cache, computed) = (&self.cache, self.cache.len(row).unsigned_abs() as usize);
        let Some(prefixes) = &mut self.prefixes else { return };
        prefixes.keep(&ids[..computed.min(ids.len())], |from| cache.copied(row, from, BLOCK_TOKENS));
    }

    /// The rows that lack tokens, those of the oldest texts first.
    fn waiting(&self, sequences: &[Sequence]) -> Vec<usize> {
        let mut waiting: Vec<usize> =
            (0..sequences.len()).filter(|&row| !self.is_computed(&sequences[row], row)).collect();
        waiting.sort_by_key(|&row| sequences[row].text.started());
        waiting
    }

    /// The last tokens of several prompts, or else the next ones of the oldest prompt: at most `tokens`.
    fn rests_or_oldest(&self, sequences: &[Sequence], tokens: usize) -> Vec<PromptPiece> {
        if !self.engine.same_bits_in_any_pass() {
            return self.piece_of_oldest(sequences, tokens);
        }
        let mut left = tokens;
        let piece = |row| PromptPiece { row, tokens: self.lacking(&sequences[row], row) };
        let fits = |piece: &PromptPiece| {
            let fits = piece.tokens <= REST_TOKENS.min(left);
            left -= if fits { piece.tokens } else { 0 };
            fits
        };
        let mut rests: Vec<PromptPiece> = self.waiting(sequences).into_iter().map(piece).take_while(fits).collect();
        if rests.len() < 2 {
            return self.piece_of_oldest(sequences, tokens);
        }
        rests.sort_by_key(|piece| piece.row);
        rests
    }

    /// What a pass over one prompt runs: at most `tokens` tokens of the oldest text.
    fn piece_of_oldest(&self, sequences: &[Sequence], tokens: usize) -> Vec<PromptPiece> {
        let oldest = self.waiting(sequences).into_iter().take(1);
        oldest.map(|row| PromptPiece { row, tokens: self.lacking(&sequences[row], row).min(tokens) }).collect()
    }

    /// What a pass over several prompts runs: at most `tokens` tokens, those of the oldest texts, in the order of their rows.
    fn pieces(&self, sequences: &[Sequence], tokens: usize) -> Vec<PromptPiece> {
        let mut left = tokens;
        let piece = |row| {
            let tokens = self.lacking(&sequences[row], row).min(left);
            left -= tokens;
            PromptPiece { row, tokens }
        };
        let mut pieces: Vec<PromptPiece> = self.waiting(sequences).into_iter().map(piece).collect();
        pieces.retain(|piece| piece.tokens > 0);
        pieces.sort_by_key(|piece| piece.row);
        pieces
    }

    /// Tokens that a row lacks of a sequence.
    fn lacking(&self, sequence: &Sequence, row: usize) -> usize {
        sequence.computed().len() - self.cache.len(row).unsigned_abs() as usize
    }

    /// Runs pieces in one pass; sequence i is in row `first + i`.
    fn run_pieces(&mut self, sequences: &mut [Sequence], first: usize, pieces: &[PromptPiece], drafting: Drafting) {
        let ids: Vec<Vec<i64>> = (pieces.iter())
            .map(|piece| {
                let from = self.cache.len(piece.row).unsigned_abs() as usize;
                sequences[piece.row - first].computed()[from..from + piece.tokens].to_vec()
            })
            .collect();
        let chains: Vec<Rc<NewTokens>> = pieces.iter().map(|piece| self.chain(piece.tokens)).collect();
        let rows = pieces.iter().zip(&chains).map(|(piece, nodes)| RowTokens { row: piece.row, nodes });
        let tokens_n = upload(&ids.concat(), self.engine.backbone().device());
        let states_nw = self.engine.extend(&mut self.cache, &tokens_n, &rows.collect::<Vec<_>>());
        let mut end = 0;
        let mut complete = vec![];
        for (piece, ids) in pieces.iter().zip(&ids) {
            self.cache.commit(piece.row, piece.tokens as i64);
            end += piece.tokens;
            if drafting == Drafting::On {
                self.notify_committed(piece.row, ids, || {
                    states_nw.narrow(0, (end - ids.len()) as i64, ids.len() as i64)
                });
            }
            let sequence = &sequences[piece.row - first];
            if !sequence.has_begun() && self.lacking(sequence, piece.row) == 0 {
                complete.push((piece.row - first, end - 1));
                self.keep_prefix(piece.row, sequence.computed());
            }
        }
        self.choose_first(sequences, &complete, &states_nw, drafting);
    }

    /// Chooses the first tokens of sequences; each comes with the row of its prompt's last token in `[N, H]`.
    fn choose_first(
        &mut self,
        sequences: &mut [Sequence],
        complete: &[(usize, usize)],
        states_nw: &Tensor,
        drafting: Drafting,
    ) {
        if complete.is_empty() {
            return;
        }
        let states_bw = rows_of(states_nw, &complete.iter().map(|(_, last)| *last).collect::<Vec<_>>());
        let logits_bv = self.engine.logits(&states_bw);
        let is_complete = |at: usize| complete.iter().any(|(sequence, _)| *sequence == at);
        let mut new: Vec<&mut Sequence> =
            sequences.iter_mut().enumerate().filter(|(at, _)| is_complete(*at)).map(|(_, sequence)| sequence).collect();
        let roots: Vec<Chosen> = match &self.drafter {
            Some((_, default)) if drafting == Drafting::On => new
                .iter_mut()
                .zip(0..)
                .map(|(sequence, row)| first_root(*default, &logits_bv.narrow(0, row, 1), sequence))
                .collect(),
            _ => next_roots(&logits_bv, &mut new),
        };
        for ((sequence, root), row) in new.into_iter().zip(roots).zip(0..) {
            let scored = sequence.scored(&[root.id], || logits_bv.narrow(0, row, 1));
            sequence.begin(root, states_bw.narrow(0, row, 1), scored);
        }
    }

    /// So many tokens one after the other. The last chain is kept: its mask grows with the prompt.
    fn chain(&mut self, tokens: usize) -> Rc<NewTokens> {
        let backbone = self.engine.backbone();
        match &self.chain {
            Some(chain) if chain.len() == tokens as i64 => chain.clone(),
            _ => {
                let chain = NewTokens::chain(tokens as i64, &backbone.config, backbone.kind(), backbone.device());
                self.chain.insert(Rc::new(chain)).clone()
            }
        }
    }

    /// Notifies a drafter that follows the rows of tokens that no proposal held.
    fn notify_committed(&mut self, row: usize, ids: &[i64], states_nw: impl FnOnce() -> Tensor) {
        if let Some((drafter, _)) = self.drafter.as_mut().filter(|(drafter, _)| drafter.follows()) {
            drafter.committed(row, &CommittedTokens { ids, states_nw: states_nw() });
            self.seen[row] += ids.len();
        }
    }

    /// Notifies a drafter that remembers texts of a new one. If the text would depend on what it remembers, it learns the prompt anew.
    fn begin_text(&mut self, sequence: &Sequence, row: usize) {
        let Some((_, default)) = self.drafter.as_ref().filter(|(drafter, _)| drafter.remembers()) else { return };
        let acceptance = sequence.acceptance(*default);
        let temperature = sequence.sampler.sampling().temperature.get();
        let memory = if acceptance.depends_on_guesses(temperature) { Memory::OfText } else { Memory::Common };
        if memory == Memory::OfText {
            self.truncate(row, 0);
        }
        self.drafter.iter_mut().for_each(|(drafter, _)| drafter.begin_text(row, memory));
    }
}

/// The most tokens that a sequence's row can hold before the next pass: the logits after a prompt's last token are needed.
fn needed(sequence: &Sequence) -> usize {
    sequence.computed().len() - usize::from(!sequence.has_begun())
}
