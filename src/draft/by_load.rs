//! A drafter whose tree depends on how many texts are decoded together, down to no guesses at all.

use super::tree_cache::TreeCache;
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::model::llama::Llama;
use crate::tree::by_load::ByLoad;
use crate::tree::token_tree::TokenTree;

/// Lets one of several drafters with heads propose, by the number of texts of the step. Those that follow the rows are all notified of them.
#[derive(Debug)]
pub struct LoadDrafter<'a> {
    parts: ByLoad<Box<dyn Drafter + 'a>>,
    roots: TreeCache<'a>,
}

impl<'a> LoadDrafter<'a> {
    /// Where there is no drafter, a text's root is proposed alone.
    pub fn new(backbone: &'a Llama, parts: ByLoad<Box<dyn Drafter + 'a>>) -> Self {
        Self { parts, roots: TreeCache::new(backbone) }
    }

    fn each(&mut self, mut apply: impl FnMut(&mut dyn Drafter)) {
        self.parts.trees_mut().for_each(|part| apply(&mut **part));
    }

    fn followers(&mut self, mut apply: impl FnMut(&mut dyn Drafter)) {
        self.each(|part| {
            if part.follows() {
                apply(part);
            }
        });
    }
}

impl Drafter for LoadDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        match self.parts.at_mut(batch.len()) {
            Some(part) => part.propose(batch),
            None => batch.iter().map(|text| self.roots.proposal(&TokenTree::new(text.root.id))).collect(),
        }
    }

    fn rests(&mut self, texts: usize) -> bool {
        self.parts.at(texts).is_none() && !self.follows()
    }

    fn follows(&self) -> bool {
        self.parts.choices().iter().filter_map(|choice| choice.tree.as_ref()).any(|part| part.follows())
    }

    fn push_row(&mut self) {
        self.each(|part| part.push_row());
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.followers(|part| part.committed(row, tokens));
    }

    /// Another one may have proposed the tree: they are notified of its accepted tokens only.
    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.committed(row, &verified.accepted);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.each(|part| part.truncate(row, tokens));
    }

    fn swap_remove(&mut self, row: usize) {
        self.each(|part| part.swap_remove(row));
    }

    fn drop_rows(&mut self) {
        self.each(|part| part.drop_rows());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::engine::sample::{Chosen, Sampling, Stream};
    use crate::model::config::LlamaConfig;
    use crate::numbers::NonNegative;
    use crate::tree::by_load::AtLoad;

    type Log = Rc<RefCell<Vec<String>>>;

    /// Logs its calls; guesses token 7 below each root.
    #[derive(Debug)]
    struct Recorder<'a> {
        name: &'static str,
        follows: bool,
        trees: TreeCache<'a>,
        log: Log,
    }

    impl Recorder<'_> {
        fn note(&self, what: &str) {
            self.log.borrow_mut().push(format!("{} {what}", self.name));
        }
    }

    impl Drafter for Recorder<'_> {
        fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
            self.note(&format!("proposes for {}", batch.len()));
            let tree = |text: &TextSoFar| {
                let mut tree = TokenTree::new(text.root.id);
                tree.add(0, 7);
                tree
            };
            batch.iter().map(|text| self.trees.proposal(&tree(text))).collect()
        }

        fn follows(&self) -> bool {
            self.follows
        }

        fn push_row(&mut self) {
            self.note("has a row more");
        }

        fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
            self.note(&format!("hears {:?} in row {row}", tokens.ids));
        }

        fn truncate(&mut self, row: usize, tokens: usize) {
            self.note(&format!("keeps {tokens} of row {row}"));
        }

        fn swap_remove(&mut self, row: usize) {
            self.note(&format!("removes row {row}"));
        }

        fn drop_rows(&mut self) {
            self.note("drops its rows");
        }
    }

    /// `a` for a text, `b` for two, nothing for four, and `c`, which does not follow, for eight.
    fn drafter<'a>(llama: &'a Llama, log: &Log) -> LoadDrafter<'a> {
        drafter_of(llama, log, &[(1, Some("a")), (2, Some("b")), (4, None), (8, Some("c"))])
    }

    fn drafter_of<'a>(llama: &'a Llama, log: &Log, parts: &[(usize, Option<&'static str>)]) -> LoadDrafter<'a> {
        let part = |texts, name: Option<&'static str>| AtLoad {
            texts,
            tree: name.map(|name| {
                let trees = TreeCache::new(llama);
                Box::new(Recorder { name, follows: name != "c", trees, log: log.clone() }) as Box<dyn Drafter>
            }),
        };
        let parts = parts.iter().map(|&(texts, name)| part(texts, name)).collect();
        LoadDrafter::new(llama, ByLoad::new(parts).unwrap())
    }

    #[test]
    fn a_load_without_guesses_is_plain_decoding_unless_a_part_has_to_hear_of_it() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let rests = |parts: &[(usize, Option<&'static str>)]| {
            let mut drafter = drafter_of(&llama, &Log::default(), parts);
            [1, 4, 9].map(|texts| drafter.rests(texts))
        };
        assert_eq!(rests(&[(1, Some("c")), (4, None)]), [false, true, true]);
        assert_eq!(rests(&[(1, Some("a")), (4, None)]), [false; 3]);
    }

    #[test]
    fn one_proposes_and_all_that_follow_hear_what_was_accepted() {
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let log = Log::default();
        let mut drafter = drafter(&llama, &log);
        let logged = || std::mem::take(&mut *log.borrow_mut());
        assert!(drafter.follows());
        drafter.push_row();
        assert_eq!(logged(), ["a has a row more", "b has a row more", "c has a row more"]);
        let hidden = |tokens: i64| Tensor::zeros([tokens, 32], (Kind::Float, Device::Cpu));
        drafter.committed(0, &CommittedTokens { ids: &[5, 6], states_nw: hidden(2) });
        assert_eq!(logged(), ["a hears [5, 6] in row 0", "b hears [5, 6] in row 0"]);
        let (root, hidden_1h) = (Chosen::on_host(9), hidden(1));
        let sampling = Sampling::with_temperature(NonNegative::ZERO);
        let text = TextSoFar {
            row: 0,
            ids: &[5, 6, 9],
            root: &root,
            state_1w: &hidden_1h,
            sampling,
            stream: Stream::default(),
            may_draw: false,
        };
        for (texts, who, nodes) in [(1, Some("a"), 2), (2, Some("b"), 2), (4, None, 1), (9, Some("c"), 2)] {
            let proposals = drafter.propose(&vec![text; texts]);
            assert_eq!(logged(), who.map(|who| format!("{who} proposes for {texts}")).into_iter().collect::<Vec<_>>());
            assert_eq!(proposals.len(), texts);
            assert!(
                proposals.iter().all(|proposal| Vec::<i64>::try_from(&proposal.tokens_n).unwrap() == [9, 7][..nodes])
            );
            let accepted = CommittedTokens { ids: &[9], states_nw: hidden(1) };
            let logits_nv = Tensor::zeros([nodes as i64, 50], (Kind::Float, Device::Cpu));
            let verified = VerifiedTree { proposal: &proposals[0], logits_nv: &logits_nv, path: &[0], accepted };
            drafter.verified(0, &verified);
            assert_eq!(logged(), ["a hears [9] in row 0", "b hears [9] in row 0"], "whoever proposed");
        }
        drafter.truncate(0, 1);
        drafter.swap_remove(0);
        drafter.drop_rows();
        let all = |what: &str| ["a", "b", "c"].map(|part| format!("{part} {what}"));
        assert_eq!(logged(), [all("keeps 1 of row 0"), all("removes row 0"), all("drops its rows")].concat());
    }
}
