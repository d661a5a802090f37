//! An EAGLE-3 drafter as a [`LevelGuesser`]. Its cache has the rows of the backbone's, and in them the tokens of a text but the last, each computed from
//! the backbone's hidden states; guesses are behind them until the next step.

// N tokens, F nodes of a frontier, H hidden, W a token's states
use tch::Tensor;

use super::weights::Eagle;
use crate::draft::heads::guesses::likeliest;
use crate::draft::levels::LevelGuesser;
use crate::draft::{CommittedTokens, TextSoFar};
use crate::model::eagle_layer::{GuessRows, TextRows};
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::torch::upload;
use crate::tree::dynamic::{FrontierNode, LikelyToken};

/// Of a prompt, so many tokens wait before they are run.
const WAITING: usize = 256;

/// Guesses of an EAGLE-3 drafter.
#[derive(Debug)]
pub struct EagleLevels<'a> {
    backbone: &'a Llama,
    eagle: &'a Eagle,
    cache: KvCache,
    rows: Vec<EagleRow>,
    texts: Vec<DraftedText>,
    frontier: Frontier,
}

/// What is known of a text.
#[derive(Debug, Default)]
struct EagleRow {
    /// How many of its tokens the backbone has committed.
    tokens: usize,
    /// The positions in the text of the tokens in the cache.
    cached: Vec<i64>,
    /// `[N, H]`: features of the last tokens, which are not in the cache.
    waiting_nh: Option<Tensor>,
    /// The tokens behind them, but for that of the last.
    next: Vec<i64>,
    /// Guesses that were run behind its root.
    guesses: usize,
}

/// A text that guesses are made for.
#[derive(Debug, Clone, Copy)]
struct DraftedText {
    row: usize,
    /// How many of the row's tokens in the cache its guesses see.
    sees: i64,
    /// Of its last token that the backbone has run.
    position: i64,
}

/// The nodes that were run last.
#[derive(Debug)]
struct Frontier {
    /// Whether they are the roots, whose outputs are known before they are asked for.
    is_roots: bool,
    nodes: Vec<FrontierPlace>,
    /// `[F, H]`: the layer's output of each.
    outputs_fh: Tensor,
}

#[derive(Debug, Clone)]
struct FrontierPlace {
    text: usize,
    /// The guesses from the root down to it, by their number in the row.
    path: Vec<usize>,
}

impl<'a> EagleLevels<'a> {
    /// Without rows.
    pub fn new(backbone: &'a Llama, eagle: &'a Eagle) -> Self {
        let frontier = Frontier { is_roots: true, nodes: vec![], outputs_fh: Tensor::new() };
        Self { backbone, eagle, cache: eagle.layer.cache(), rows: vec![], texts: vec![], frontier }
    }

    /// With one row that holds a text, and texts that begin with its tokens up to each of these positions; guesses below them are asked for.
    /// `states_nw` are those of the tokens of `ids`.
    pub(super) fn in_text(
        backbone: &'a Llama,
        eagle: &'a Eagle,
        (ids, states_nw): (&[i64], &Tensor),
        positions: &[i64],
    ) -> Self {
        let mut levels = Self::new(backbone, eagle);
        levels.push_row();
        levels.commit(0, ids, states_nw);
        let all_nh = levels.run(&[(0, None)]).expect("a text of several tokens"); // not the last, after which there is none
        levels.texts = positions.iter().map(|&position| DraftedText { row: 0, sees: position + 1, position }).collect();
        levels.begin_at(all_nh.index_select(0, &upload(positions, eagle.device())));
        levels
    }

    /// Adds committed tokens to those of a row that wait.
    fn commit(&mut self, row: usize, ids: &[i64], states_nw: &Tensor) {
        let features_nh = tch::no_grad(|| self.eagle.layer.features(&self.eagle.tapped(states_nw)));
        let row = &mut self.rows[row];
        row.tokens += ids.len();
        row.waiting_nh = Some(match row.waiting_nh.take() {
            Some(before_nh) => {
                row.next.extend(ids);
                Tensor::cat(&[before_nh, features_nh], 0)
            }
            None => {
                row.next.extend(&ids[1..]);
                features_nh
            }
        });
    }

    /// Runs the waiting tokens of rows whose next token is known, the last one's with it. Returns their outputs, row after row; `None` without any.
    fn run(&mut self, rows: &[(usize, Option<i64>)]) -> Option<Tensor> {
        let (mut texts, mut tokens, mut features) = (vec![], vec![], vec![]);
        for &(row, after) in rows {
            let state = &mut self.rows[row];
            let waiting_nh =
                state.waiting_nh.take().expect("the last token of a text is committed before guesses are asked for");
            let waiting = waiting_nh.size()[0];
            state.next.extend(after);
            let ready = state.next.len() as i64;
            let first = state.tokens as i64 - waiting;
            let positions: Vec<i64> = (first..first + ready).collect();
            state.cached.extend(&positions);
            tokens.append(&mut state.next);
            features.push(waiting_nh.narrow(0, 0, ready));
            state.waiting_nh = (ready < waiting).then(|| waiting_nh.narrow(0, ready, waiting - ready).copy());
            texts.push(TextRows { row, positions });
        }
        if tokens.is_empty() {
            return None;
        }
        let embedded_nh = self.embed(&tokens);
        let features_nh = Tensor::cat(&features, 0);
        Some(tch::no_grad(|| self.eagle.layer.extend([&embedded_nh, &features_nh], &texts, &mut self.cache)))
    }

    fn embed(&self, tokens: &[i64]) -> Tensor {
        self.backbone.embed(&upload(tokens, self.eagle.device()))
    }

    /// The outputs of the roots, `[B, H]`, one for each text.
    fn begin_at(&mut self, outputs_fh: Tensor) {
        let place = |text| FrontierPlace { text, path: vec![] };
        self.frontier = Frontier { is_roots: true, nodes: (0..self.texts.len()).map(place).collect(), outputs_fh };
        self.rows.iter_mut().for_each(|row| row.guesses = 0);
    }

    /// Runs the nodes of a frontier.
    fn run_guesses(&mut self, frontier: &[FrontierNode]) {
        let mut nodes: Vec<FrontierPlace> = Vec::with_capacity(frontier.len());
        let (mut parts, mut positions): (Vec<GuessRows>, Vec<i64>) = (vec![], vec![]);
        for node in frontier {
            let FrontierPlace { text, path } = &self.frontier.nodes[node.parent];
            let DraftedText { row, sees, position } = self.texts[*text];
            let state = &mut self.rows[row];
            let path = [&path[..], &[state.guesses]].concat();
            if parts.last().is_none_or(|part| part.row != row) {
                parts.push(GuessRows { row, before: state.guesses, sees: vec![] });
            }
            parts.last_mut().expect("just added").sees.push((sees, path.clone()));
            state.guesses += 1;
            positions.push(position + path.len() as i64);
            nodes.push(FrontierPlace { text: *text, path });
        }
        let parents: Vec<i64> = frontier.iter().map(|node| node.parent as i64).collect();
        let tokens: Vec<i64> = frontier.iter().map(|node| node.token).collect();
        let features_fh = self.frontier.outputs_fh.index_select(0, &upload(&parents, self.eagle.device()));
        let inputs = [&self.embed(&tokens), &features_fh];
        let outputs_fh = tch::no_grad(|| self.eagle.layer.guess(inputs, &positions, &parts, &mut self.cache));
        self.frontier = Frontier { is_roots: false, nodes, outputs_fh };
    }
}

impl LevelGuesser for EagleLevels<'_> {
    fn begin(&mut self, batch: &[TextSoFar]) {
        let asked: Vec<(usize, Option<i64>)> = batch.iter().map(|text| (text.row, Some(text.root.id))).collect();
        let ran: Vec<i64> = batch.iter().map(|text| self.rows[text.row].next.len() as i64 + 1).collect();
        let outputs_nh = self.run(&asked).expect("every text has a root");
        let end_of = |end: &mut i64, ran: &i64| {
            *end += ran;
            Some(*end - 1)
        };
        let lasts: Vec<i64> = ran.iter().scan(0, end_of).collect();
        let text = |text: &TextSoFar| {
            let EagleRow { tokens, cached, .. } = &self.rows[text.row];
            DraftedText { row: text.row, sees: cached.len() as i64, position: *tokens as i64 - 1 }
        };
        self.texts = batch.iter().map(text).collect();
        self.begin_at(outputs_nh.index_select(0, &upload(&lasts, self.eagle.device())));
    }

    fn guess(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken> {
        let outputs_fh = if std::mem::take(&mut self.frontier.is_roots) {
            let parents: Vec<i64> = frontier.iter().map(|node| node.parent as i64).collect();
            let nodes = frontier.iter().map(|node| self.frontier.nodes[node.parent].clone()).collect();
            let outputs_fh = self.frontier.outputs_fh.index_select(0, &upload(&parents, self.eagle.device()));
            self.frontier = Frontier { is_roots: false, nodes, outputs_fh };
            &self.frontier.outputs_fh
        } else {
            self.run_guesses(frontier);
            &self.frontier.outputs_fh
        };
        let mut guesses = likeliest(&tch::no_grad(|| self.eagle.logits(outputs_fh)), top_k);
        if let Some(map) = &self.eagle.token_map {
            guesses.iter_mut().for_each(|guess| guess.token = map.tokens()[guess.token as usize]);
        }
        guesses
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.cache.push();
        self.rows.push(EagleRow::default());
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.commit(row, tokens.ids, &tokens.states_nw);
        if self.rows[row].next.len() >= WAITING {
            let _ = self.run(&[(row, None)]);
        }
    }

    /// The last token that remains is not computed again: what stands behind it is another token now, and its hidden states are gone. Guesses are
    /// made without it.
    fn truncate(&mut self, row: usize, tokens: usize) {
        let state = &mut self.rows[row];
        let kept = state.cached.iter().take_while(|&&position| position + 1 < tokens as i64).count();
        state.cached.truncate(kept);
        state.tokens = tokens;
        (state.waiting_nh, state.next, state.guesses) = (None, vec![], 0);
        self.cache.truncate(row, kept as i64);
    }

    fn swap_remove(&mut self, row: usize) {
        self.cache.swap_remove(row);
        self.rows.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        self.cache = self.eagle.layer.cache();
        self.rows.clear();
    }
}
