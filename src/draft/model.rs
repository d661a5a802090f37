//! A draft model: a smaller backbone with the same vocabulary guesses the tokens (Leviathan et al. 2023; Chen et al. 2023; in trees:
//! SpecInfer, Miao et al. 2024). It has a KV cache of its own, with the same rows as the backbone's.
//!
//! At temperature 0 its guesses are the most probable tokens. Above, with [`Guessing::Drawn`], they are drawn from its distribution at the
//! text's temperature and top-p, siblings without replacement, and [`Proposal::drawn`] says so. A node's place in a tree depends on the
//! sorted probabilities at its parent and not on the token that was drawn: [`next_token`](crate::tree::rejection::next_token) relies on it.

// N tokens, F nodes of a frontier, H hidden size, V vocabulary
use tch::Tensor;

pub use self::guessed_text::Guessing;
use self::guessed_text::{GuessedText, Part};
use super::heads::guesses::likeliest;
use super::levels::LevelGuesser;
use super::{CommittedTokens, Proposal, TextSoFar, VerifiedTree};
use crate::engine::prefill::{PREFILL_CHUNK, prefill};
use crate::engine::{Engine, RowTokens};
use crate::model::kv_cache::KvCache;
use crate::model::new_tokens::NewTokens;
use crate::torch::upload;
use crate::tree::dynamic::{FrontierNode, LikelyToken};
use crate::tree::rejection::DrawnChildren;

mod guessed_text;

/// A draft model as a [`LevelGuesser`].
#[derive(Debug)]
pub struct ModelGuesser<'a> {
    engine: Box<dyn Engine + 'a>,
    cache: KvCache,
    rows: Vec<DraftRow>,
    /// Ids below this may be guessed.
    vocabulary: i64,
    /// Most levels of a tree below its root.
    depth: usize,
    guessing: Guessing,
    /// A token behind the cache.
    one: NewTokens,
    /// `[F, H]`: the hidden states of the roots, before the first level is guessed.
    roots_fh: Option<Tensor>,
    texts: Vec<GuessedText>,
    /// Text and node of each node of the last frontier.
    frontier: Vec<(usize, usize)>,
}

/// A text, and how much of it a row of the cache holds.
#[derive(Debug, Default)]
struct DraftRow {
    /// What the backbone has committed. The backbone may choose a token that only it has, such as one that pads its vocabulary; here it is 0.
    text: Vec<i64>,
    /// The number of its first tokens that are in the cache.
    cached: usize,
    /// What the cache holds behind them: the root and, while they form a chain, the guesses below it.
    guessed: Vec<i64>,
}

impl<'a> ModelGuesser<'a> {
    /// For a draft model that an engine runs. It guesses ids below `vocabulary`, in trees of at most `depth` levels below the root.
    pub fn new(engine: Box<dyn Engine + 'a>, vocabulary: usize, depth: usize, guessing: Guessing) -> Self {
        let model = engine.backbone();
        let (config, kind, device) = (&model.config, model.kind(), model.device());
        Self {
            cache: KvCache::new(config, kind, device),
            rows: vec![],
            vocabulary: config.vocab_size.min(vocabulary as i64),
            depth,
            guessing,
            one: NewTokens::chain(1, config, kind, device),
            roots_fh: None,
            texts: vec![],
            frontier: vec![],
            engine,
        }
    }

    /// A token of the backbone as the draft model knows it.
    fn known(&self, id: i64) -> i64 {
        if id < self.engine.backbone().config.vocab_size { id } else { 0 }
    }

    /// Whether the draft model's context has room for so long a text and a tree below its last token.
    fn fits(&self, tokens: usize) -> bool {
        (tokens + self.depth) as i64 <= self.engine.backbone().config.max_position_embeddings
    }

    /// Removes a row's guesses from the cache; returns the tokens that it lacks of the row's text.
    fn rewind(&mut self, row: usize) -> Vec<i64> {
        let DraftRow { text, cached, guessed } = &mut self.rows[row];
        guessed.clear();
        self.cache.truncate(row, *cached as i64);
        text[*cached..].to_vec()
    }

    /// Computes what the cache lacks of a row's text.
    fn catch_up(&mut self, row: usize) {
        let rest = self.rewind(row);
        let cached = &mut self.rows[row].cached;
        let mut count = |ids: &[i64], _| *cached += ids.len();
        let _ = prefill(PREFILL_CHUNK, &*self.engine, (&mut self.cache, row), &rest, &mut count);
    }

    /// Computes a row's root, behind what the cache lacks of its text; returns its hidden state, `[1, H]`.
    fn run_root(&mut self, text: &TextSoFar) -> Tensor {
        let row = text.row;
        debug_assert_eq!(self.rows[row].text.len() + 1, text.ids.len());
        let root = self.known(text.root.id);
        let rest = [self.rewind(row), vec![root]].concat();
        let hidden_1h = if let [_] = rest[..] {
            let root_1 = upload(&rest, self.engine.backbone().device());
            let hidden_nh = self.engine.extend(&mut self.cache, &root_1, &[RowTokens { row, nodes: &self.one }]);
            self.cache.commit(row, 1);
            hidden_nh.narrow(0, 0, 1)
        } else {
            prefill(PREFILL_CHUNK, &*self.engine, (&mut self.cache, row), &rest, &mut |_, _| {})
        };
        let DraftRow { text, cached, guessed } = &mut self.rows[row];
        *cached = text.len();
        guessed.push(root);
        hidden_1h
    }

    /// Runs the nodes of a frontier: `[F, H]`.
    fn run(&mut self, frontier: &[FrontierNode]) -> Tensor {
        let parts = self.parts(frontier);
        let tokens: Vec<i64> = parts.iter().flat_map(|part| part.tokens.iter().copied()).collect();
        let tokens_n = upload(&tokens, self.engine.backbone().device());
        let hidden_nh = if parts.iter().all(|part| part.forest.is_none()) {
            let rows: Vec<usize> = parts.iter().map(|part| part.row).collect();
            self.engine.extend_each(&mut self.cache, &tokens_n, &rows, &self.one)
        } else {
            let rows =
                parts.iter().map(|part| RowTokens { row: part.row, nodes: part.forest.as_ref().unwrap_or(&self.one) });
            self.engine.extend(&mut self.cache, &tokens_n, &rows.collect::<Vec<_>>())
        };
        for part in parts.iter().filter(|part| part.forest.is_none()) {
            self.cache.commit(part.row, 1);
            self.rows[part.row].guessed.extend(&part.tokens);
        }
        hidden_nh.index_select(0, &upload(&asked(&parts), hidden_nh.device()))
    }

    /// Adds the nodes of a frontier to their texts' trees.
    fn parts(&mut self, frontier: &[FrontierNode]) -> Vec<Part> {
        let before = std::mem::take(&mut self.frontier);
        let mut parts = vec![];
        for (at, text) in self.texts.iter_mut().enumerate() {
            let first = text.len();
            let own = frontier.iter().filter(|node| before[node.parent].0 == at);
            if !text.fits {
                self.frontier.extend(own.map(|_| (at, 0)));
                continue;
            }
            for node in own {
                let parent = before[node.parent].1;
                text.add(parent, node.token);
            }
            let asked = text.len() - first;
            self.frontier.extend((first..text.len()).map(|node| (at, node)));
            if asked > 0 {
                parts.push(text.part(asked, &*self.engine));
            }
        }
        parts
    }
}

impl DraftRow {
    /// Adds what the backbone accepted, root first; guesses that it begins with stay in the cache.
    fn accept(&mut self, accepted: &[i64]) {
        let same = self.guessed.iter().zip(accepted).take_while(|(guessed, accepted)| guessed == accepted).count();
        self.cached += same;
        self.guessed.clear();
        self.text.extend(accepted);
    }

    fn truncate(&mut self, tokens: usize) {
        self.text.truncate(tokens);
        self.cached = self.cached.min(tokens);
        self.guessed.clear();
    }
}

impl LevelGuesser for ModelGuesser<'_> {
    fn begin(&mut self, batch: &[TextSoFar]) {
        let text = |text: &TextSoFar| GuessedText::new(text, self.guessing, self.fits(text.ids.len()));
        self.texts = batch.iter().map(text).collect();
        self.frontier = (0..batch.len()).map(|text| (text, 0)).collect();
        let fits: Vec<bool> = self.texts.iter().map(|text| text.fits).collect();
        let fitting = batch.iter().zip(fits).filter(|(_, fits)| *fits);
        let hidden: Vec<Tensor> = fitting.map(|(text, _)| self.run_root(text)).collect();
        self.roots_fh = (!hidden.is_empty()).then(|| Tensor::cat(&hidden, 0));
    }

    fn guess(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken> {
        if !self.texts.iter().any(|text| text.fits) {
            return vec![LikelyToken::NONE; frontier.len() * top_k];
        }
        let hidden_fh = self.roots_fh.take().unwrap_or_else(|| self.run(frontier));
        let logits_fv = self.engine.logits(&hidden_fh).narrow(1, 0, self.vocabulary);
        if self.texts.iter().all(|text| text.fits && text.sampler.is_none()) {
            return likeliest(&logits_fv, top_k);
        }
        let mut guesses = vec![];
        let mut row = 0;
        for &(text, node) in &self.frontier {
            let text = &mut self.texts[text];
            if text.fits {
                guesses.extend(text.guess(node, &logits_fv.narrow(0, row, 1), top_k));
                row += 1;
            } else {
                guesses.extend(vec![LikelyToken::NONE; top_k]);
            }
        }
        guesses
    }

    fn guesses_for(&self, text: usize) -> bool {
        self.texts[text].fits
    }

    fn drawn(&self, text: usize, proposal: &Proposal) -> Option<Vec<DrawnChildren>> {
        let text = &self.texts[text];
        text.sampler.as_ref()?;
        let tokens: Vec<i64> = Vec::try_from(&proposal.tokens_n).expect("one axis of int64");
        Some(text.drawn(&proposal.tree.tree, &tokens))
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.cache.push();
        self.rows.push(DraftRow::default());
    }

    /// The draft model's own pass over a prompt.
    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        let known: Vec<i64> = tokens.ids.iter().map(|&id| self.known(id)).collect();
        self.rows[row].text.extend(known);
        if self.fits(self.rows[row].text.len()) {
            self.catch_up(row);
        }
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        let accepted: Vec<i64> = verified.accepted.ids.iter().map(|&id| self.known(id)).collect();
        self.rows[row].accept(&accepted);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.rows[row].truncate(tokens);
        self.cache.truncate(row, self.rows[row].cached as i64);
    }

    fn swap_remove(&mut self, row: usize) {
        self.cache.swap_remove(row);
        self.rows.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        let model = self.engine.backbone();
        self.cache = KvCache::new(&model.config, model.kind(), model.device());
        self.rows.clear();
    }
}

/// Of a pass over all parts, the rows whose guesses are asked for.
fn asked(parts: &[Part]) -> Vec<i64> {
    let mut end = 0;
    let rows = parts.iter().flat_map(|part| {
        end += part.tokens.len();
        end - part.asked..end
    });
    rows.map(|row| row as i64).collect()
}

#[cfg(test)]
mod tests;
