//! Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): a window of guesses runs beside the text and is improved by Jacobi iteration, one
//! iteration a step. Its trajectories give n-grams, which a pool keeps by their first token; those that begin with the root are verified in
//! the same pass. Needs no training.
//!
//! The window has N - 1 levels of W columns. Column i of level l stands i + l positions behind the root; the root is column 0 of level 0.
//! Level 0 is a chain. A node of a higher level sees level 0 up to its column, and its own column in the levels between. The most probable
//! tokens after the last level are the next level; each column then is an n-gram of N tokens, and the levels move up by one.

// W columns, N tokens of an n-gram, V vocabulary
use std::collections::HashMap;
use std::rc::Rc;

use super::tree_cache::{TreeCache, WindowTokens};
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree, Window};
use crate::model::llama::{Llama, most_probable};
use crate::tree::token_tree::TokenTree;

/// Sizes of window and pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookaheadSize {
    /// W: columns of the window.
    pub columns: usize,
    /// N: tokens of an n-gram, at least 3.
    pub ngram: usize,
    /// G: n-grams of the pool that begin with the same token; all of them are verified.
    pub guesses: usize,
}

impl LookaheadSize {
    /// As published for models of 7 billion parameters.
    pub const PUBLISHED: Self = Self { columns: 7, ngram: 5, guesses: 7 };
    /// Without a window: the pool has only n-grams of the text, and a step computes no tokens but the root and its guesses.
    pub const WITHOUT_WINDOW: Self = Self { columns: 0, ..Self::PUBLISHED };

    /// Largest number of guesses in a tree.
    pub fn max_nodes(self) -> usize {
        self.guesses * (self.ngram - 1)
    }

    /// Tokens of the window, without the root.
    pub fn window(self) -> usize {
        (self.columns * (self.ngram - 1)).saturating_sub(1)
    }

    /// What is assumed before any text is decoded: the probability that each guess becomes text, the likeliest first. With a window these are
    /// 1.8 tokens per step, as in the paper; the n-grams of the text alone give about 1.3 (prompt lookup in docs/decoding.md).
    pub fn assumed(self) -> impl Iterator<Item = f64> {
        let first = if self.columns > 0 { 0.4 } else { 0.15 };
        (0..self.max_nodes() as i32).map(move |guess| first * 0.5f64.powi(guess))
    }
}

/// Guesses n-grams of the trajectories of its own window, and of the text.
#[derive(Debug)]
pub struct LookaheadDrafter<'a> {
    size: LookaheadSize,
    /// `None` for a size without columns.
    window: Option<Rc<Window>>,
    trees: TreeCache<'a>,
    rows: Vec<LookaheadRow>,
}

/// What is known about a text.
#[derive(Debug, Default)]
struct LookaheadRow {
    pool: NgramPool,
    /// That of the last step; `None` after tokens that no proposal held, since its guesses stand behind another root.
    window: Option<JacobiWindow>,
    /// What was committed.
    text: Vec<i64>,
}

impl<'a> LookaheadDrafter<'a> {
    /// A drafter with an empty pool.
    pub fn new(backbone: &'a Llama, size: LookaheadSize) -> Self {
        let window = (size.columns > 0).then(|| Rc::new(window_of(size)));
        Self { size, window, trees: TreeCache::new(backbone), rows: vec![] }
    }

    /// Sizes of window and pool.
    pub fn size(&self) -> LookaheadSize {
        self.size
    }

    fn proposal(&mut self, text: &TextSoFar) -> Proposal {
        let (row, size, root) = (&mut self.rows[text.row], self.size, text.root.id);
        row.catch_up(text.ids, size);
        let window = self.window.as_ref().map(|window| {
            let own = row.window.get_or_insert_with(|| JacobiWindow::new(size, text.ids));
            WindowTokens { window: window.clone(), tokens: own.tokens() }
        });
        self.trees.with_window(&row.pool.tree(root), window)
    }
}

impl Drafter for LookaheadDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        batch.iter().map(|text| self.proposal(text)).collect()
    }

    fn follows(&self) -> bool {
        true
    }

    /// The pool holds n-grams of earlier turns' windows, and of the texts before; [`LookaheadDrafter::truncate`] empties it.
    fn remembers(&self) -> bool {
        true
    }

    fn forget(&mut self) {
        self.rows.iter_mut().for_each(|row| row.pool = NgramPool::default());
    }

    fn push_row(&mut self) {
        self.rows.push(LookaheadRow::default());
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.rows[row].window = None;
        self.rows[row].add(tokens.ids, self.size);
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        let (row, size) = (&mut self.rows[row], self.size);
        let Some(window) = &mut row.window else { return row.add(verified.accepted.ids, size) };
        let columns = size.columns as i64;
        let window_nv = verified.logits_nv.narrow(0, verified.logits_nv.size()[0] - columns, columns);
        let next: Vec<i64> = Vec::try_from(most_probable(&window_nv).clamp_min(0)).expect("one axis of int64");
        let root = verified.proposal.tokens_n.int64_value(&[0]);
        if window.is_filled() {
            window.ngrams(root, &next).for_each(|ngram| row.pool.insert(&ngram, size.guesses));
        }
        window.advance(next, verified.path.len() - 1, &row.text);
        row.add(verified.accepted.ids, size);
    }

    /// If less than half of a row is kept, another text is assumed to follow, and the pool is emptied.
    fn truncate(&mut self, row: usize, tokens: usize) {
        let row = &mut self.rows[row];
        if 2 * tokens < row.text.len() {
            row.pool = NgramPool::default();
        }
        row.text.truncate(tokens);
        row.window = None;
    }

    fn swap_remove(&mut self, row: usize) {
        self.rows.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        self.rows.clear();
    }
}

impl LookaheadRow {
    /// Adds the tokens of a text that were committed without the drafter; the last one is the root, which is not committed yet.
    fn catch_up(&mut self, ids: &[i64], size: LookaheadSize) {
        let missed = ids.get(self.text.len()..ids.len() - 1).unwrap_or_default();
        if !missed.is_empty() {
            self.window = None;
            self.add(missed, size);
        }
    }

    /// Adds tokens to the text, and the n-grams that end in them to the pool.
    fn add(&mut self, ids: &[i64], size: LookaheadSize) {
        let first = self.text.len().saturating_sub(size.ngram - 1);
        self.text.extend(ids);
        self.text[first..].windows(size.ngram).for_each(|ngram| self.pool.insert(ngram, size.guesses));
    }
}

/// Positions and mask of the nodes, level after level; level 0 lacks the root.
fn window_of(LookaheadSize { columns, ngram, .. }: LookaheadSize) -> Window {
    let levels = ngram - 1;
    // Index of a node: level 0 has one node less.
    let at = |level: usize, column: usize| (level * columns + column).checked_sub(1);
    let seen = |level: usize, column: usize| {
        let chain = (0..=column).filter_map(|column| at(0, column));
        chain.chain((1..=level).filter_map(|level| at(level, column))).collect()
    };
    let nodes = || (0..levels).flat_map(|level| (0..columns).map(move |column| (level, column))).skip(1);
    Window {
        offsets: nodes().map(|(level, column)| (level + column) as i64).collect(),
        sees: nodes().map(|(level, column)| seen(level, column)).collect(),
        read: columns,
    }
}

/// The tokens of a window.
#[derive(Debug)]
struct JacobiWindow {
    /// N - 1 levels; the first one lacks the root: it has W - 1 tokens, the others W.
    levels: Vec<Vec<i64>>,
    /// Steps until no level is left of those that were made up at the start.
    made_up: usize,
    /// State of the random choices.
    random: u64,
}

impl JacobiWindow {
    /// Levels of random tokens of the text.
    fn new(size: LookaheadSize, text: &[i64]) -> Self {
        let mut window = Self { levels: vec![vec![]; size.ngram - 1], made_up: size.ngram - 2, random: 0 };
        for level in 0..window.levels.len() {
            window.fill(level, size.columns - usize::from(level == 0), text);
        }
        window
    }

    /// Fills a level with random tokens of `text`.
    fn fill(&mut self, level: usize, tokens: usize, text: &[i64]) {
        while self.levels[level].len() < tokens {
            // Knuth's MMIX generator: any choice will do, but the same at every run.
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (self.random >> 33) as usize % text.len().max(1);
            self.levels[level].push(text.get(at).copied().unwrap_or(0));
        }
    }

    /// Level after level.
    fn tokens(&self) -> Vec<i64> {
        self.levels.concat()
    }

    /// Whether the backbone has guessed all levels but the first.
    fn is_filled(&self) -> bool {
        self.made_up == 0
    }

    /// The columns, each with the token that the backbone gives after it.
    fn ngrams(&self, root: i64, next: &[i64]) -> impl Iterator<Item = Vec<i64>> {
        (0..next.len()).map(move |column| {
            let first = column.checked_sub(1).map_or(root, |before| self.levels[0][before]);
            let between = self.levels[1..].iter().map(|level| level[column]);
            [first].into_iter().chain(between).chain([next[column]]).collect()
        })
    }

    /// Moves the levels up by one, and all of them forward by the `accepted` guesses; `text` fills the places behind the window.
    fn advance(&mut self, next: Vec<i64>, accepted: usize, text: &[i64]) {
        self.made_up = self.made_up.saturating_sub(1);
        self.levels.remove(0);
        self.levels.push(next);
        let columns = self.levels[0].len();
        for level in 0..self.levels.len() {
            let gone = accepted + usize::from(level == 0); // the root takes a place of the first level
            self.levels[level].drain(..gone.min(columns));
            self.fill(level, columns - usize::from(level == 0), text);
        }
    }
}

/// N-grams by their first token, the last ones last.
#[derive(Debug, Default)]
struct NgramPool(HashMap<i64, Vec<Vec<i64>>>);

impl NgramPool {
    /// Adds an n-gram, or makes it the last one. Of those that begin with the same token, the last `kept` stay.
    fn insert(&mut self, ngram: &[i64], kept: usize) {
        let Some((first, rest)) = ngram.split_first() else { return };
        let known = self.0.entry(*first).or_default();
        known.retain(|other| other != rest);
        known.push(rest.to_vec());
        if known.len() > kept {
            known.remove(0);
        }
    }

    /// The n-grams that begin with the root, the last ones first; equal beginnings share nodes.
    fn tree(&self, root: i64) -> TokenTree {
        let mut tree = TokenTree::new(root);
        for ngram in self.0.get(&root).into_iter().flatten().rev() {
            let mut at = 0;
            for &token in ngram {
                at = tree.child(at, token).unwrap_or_else(|| tree.add(at, token));
            }
        }
        tree
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::engine::sample::{Chosen, Sampling, Stream};
    use crate::model::config::LlamaConfig;
    use crate::numbers::NonNegative;
    use crate::tree::token_tree::LevelNodes;

    fn tokens(ids: &[i64]) -> CommittedTokens<'_> {
        CommittedTokens { ids, states_nw: Tensor::zeros([ids.len() as i64, 1], (Kind::Float, Device::Cpu)) }
    }

    #[test]
    fn a_window_ends_with_its_turn() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let mut drafter = LookaheadDrafter::new(&llama, LookaheadSize { columns: 2, ngram: 3, guesses: 2 });
        drafter.push_row();
        drafter.committed(0, &tokens(&[1, 2, 3]));
        let (root, hidden_1h) = (Chosen::on_host(4), Tensor::zeros([1, 1], (Kind::Float, Device::Cpu)));
        let (sampling, stream) = (Sampling::with_temperature(NonNegative::ZERO), Stream::default());
        let text = TextSoFar {
            row: 0,
            ids: &[1, 2, 3, 4],
            root: &root,
            state_1w: &hidden_1h,
            sampling,
            stream,
            may_draw: false,
        };
        let proposal = drafter.propose(&[text]).remove(0);
        let logits_nv = Tensor::zeros([3, 50], (Kind::Float, Device::Cpu));
        let verified = VerifiedTree { proposal: &proposal, logits_nv: &logits_nv, path: &[0], accepted: tokens(&[4]) };
        drafter.verified(0, &verified);
        assert!(drafter.rows[0].window.as_ref().is_some_and(JacobiWindow::is_filled));
        drafter.committed(0, &tokens(&[5, 6])); // the next turn, right behind
        assert!(drafter.rows[0].window.is_none(), "its guesses stand behind token 4");
        assert_eq!(drafter.rows[0].text, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn what_is_forgotten_is_guessed_no_more() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let mut drafter = LookaheadDrafter::new(&llama, LookaheadSize { columns: 2, ngram: 3, guesses: 2 });
        drafter.push_row();
        drafter.push_row();
        drafter.committed(0, &tokens(&[4, 5, 6]));
        drafter.committed(1, &tokens(&[4, 7, 8]));
        let guesses = |drafter: &LookaheadDrafter| [0, 1].map(|row| drafter.rows[row].pool.tree(4).guesses());
        assert_eq!(guesses(&drafter), [2, 2]);
        drafter.forget();
        assert_eq!(guesses(&drafter), [0, 0]);
    }

    #[test]
    fn a_node_sees_the_chain_up_to_its_column_and_its_column_up_to_its_level() {
        let window = window_of(LookaheadSize { columns: 3, ngram: 4, guesses: 1 });
        // Level 0: columns 1 and 2; levels 1 and 2: columns 0 to 2.
        assert_eq!(window.offsets, [1, 2, 1, 2, 3, 2, 3, 4]);
        let sees: [&[usize]; 8] = [&[0], &[0, 1], &[2], &[0, 3], &[0, 1, 4], &[2, 5], &[0, 3, 6], &[0, 1, 4, 7]];
        assert_eq!((window.sees, window.read), (sees.map(<[usize]>::to_vec).to_vec(), 3));
        let published = window_of(LookaheadSize::PUBLISHED);
        assert_eq!((published.offsets.len(), published.read), (7 * 4 - 1, 7));
    }

    /// The window by absolute positions: no columns move.
    struct Reference {
        /// Of each level, its tokens by position; the root is in level 0.
        levels: Vec<HashMap<usize, i64>>,
        root: usize,
    }

    impl Reference {
        /// Column by column, the tokens along it and the position of the first.
        fn ngram(&self, column: usize, next: i64) -> Option<Vec<i64>> {
            let along = self.levels.iter().enumerate();
            let tokens: Option<Vec<i64>> =
                along.map(|(level, tokens)| tokens.get(&(self.root + column + level)).copied()).collect();
            Some([tokens?, vec![next]].concat())
        }

        fn advance(&mut self, next: &[i64], accepted: usize, root: i64) {
            let behind = self.root + self.levels.len();
            self.levels.remove(0);
            self.levels.push(next.iter().enumerate().map(|(column, &token)| (behind + column, token)).collect());
            self.root += 1 + accepted;
            self.levels[0].insert(self.root, root);
        }
    }

    #[test]
    fn the_windows_ngrams_are_those_of_its_positions() {
        let compared = Cell::new(0);
        let step = (proptest::collection::vec(0..9i64, 6), 0usize..4, 0..9i64);
        let cases = ((2usize..6, 3usize..6), proptest::collection::vec(step, 1..12));
        let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
        let outcome = runner.run(&cases, |((columns, ngram), steps)| {
            let size = LookaheadSize { columns, ngram, guesses: 1 };
            let mut window = JacobiWindow::new(size, &[1, 2, 3]);
            let mut reference = Reference { levels: vec![HashMap::new(); ngram - 1], root: 100 };
            let mut root = 0;
            reference.levels[0].insert(100, root);
            for (step, (next, accepted, next_root)) in steps.into_iter().enumerate() {
                prop_assert_eq!(window.is_filled(), step >= ngram - 2);
                let sizes: Vec<usize> = window.levels.iter().map(Vec::len).collect();
                prop_assert_eq!(&sizes[1..], &vec![columns; ngram - 2]);
                prop_assert_eq!((sizes[0], window.tokens().len()), (columns - 1, columns * (ngram - 1) - 1));
                let next = &next[..columns];
                for (column, ngram) in window.ngrams(root, next).enumerate() {
                    // `None` where a place was filled up with a random token.
                    if let Some(expected) = reference.ngram(column, next[column]) {
                        prop_assert_eq!(ngram, expected);
                        compared.set(compared.get() + 1);
                    }
                }
                window.advance(next.to_vec(), accepted, &[1, 2, 3]);
                reference.advance(next, accepted, next_root);
                root = next_root;
            }
            Ok(())
        });
        outcome.unwrap();
        assert!(compared.get() > 256, "hardly any column is known by its positions: {}", compared.get());
    }

    proptest! {
        /// Against a list of all n-grams ever seen.
        #[test]
        fn the_pool_keeps_the_last_ngrams_of_each_token(
            ngrams in proptest::collection::vec(proptest::collection::vec(0..3i64, 3), 0..40), kept in 1usize..4,
        ) {
            let mut pool = NgramPool::default();
            ngrams.iter().for_each(|ngram| pool.insert(ngram, kept));
            for root in 0..3 {
                let mut last: Vec<&[i64]> = vec![];
                for ngram in ngrams.iter().rev().filter(|ngram| ngram[0] == root) {
                    if last.len() < kept && !last.contains(&&ngram[1..]) {
                        last.push(&ngram[1..]);
                    }
                }
                let LevelNodes { parents, tokens } = pool.tree(root).by_level();
                let mut paths: Vec<Vec<i64>> = vec![vec![]];
                for (&parent, &token) in parents.iter().zip(&tokens[1..]) {
                    paths.push([&paths[parent][..], &[token]].concat());
                }
                let mut found: Vec<&[i64]> = paths.iter().map(Vec::as_slice).filter(|path| path.len() == 2).collect();
                found.sort_unstable();
                last.sort_unstable();
                prop_assert_eq!(found, last);
            }
        }
    }

    #[test]
    fn tokens_that_were_committed_without_the_drafter_are_caught_up_with() {
        let size = LookaheadSize { columns: 2, ngram: 3, guesses: 4 };
        let mut row = LookaheadRow { window: Some(JacobiWindow::new(size, &[1, 2])), ..LookaheadRow::default() };
        row.add(&[1, 2], size);
        row.catch_up(&[1, 2, 3], size);
        assert!(row.window.is_some(), "3 is the root, which is not committed yet");
        row.catch_up(&[1, 2, 3, 4, 5], size);
        assert_eq!((&row.text[..], row.window.is_some()), (&[1, 2, 3, 4][..], false));
        let guesses = |root| row.pool.tree(root).by_level().tokens;
        assert_eq!((guesses(1), guesses(2)), (vec![1, 2, 3], vec![2, 3, 4]));
    }
}
