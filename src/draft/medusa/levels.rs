//! Medusa heads as a [`LevelGuesser`]: a head's guesses are the same below every node of its level.

use tch::Tensor;

use crate::draft::TextSoFar;
use crate::draft::heads::Heads;
use crate::draft::levels::LevelGuesser;
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::tree::dynamic::{FrontierNode, LikelyToken};

/// Guesses of Medusa heads.
#[derive(Debug)]
pub struct MedusaLevels<'a> {
    backbone: &'a Llama,
    heads: &'a Heads,
    /// Of the trees to fill.
    limits: DynamicTree,
    /// Of each text: head after head, best guesses first.
    guesses: Vec<Vec<LikelyToken>>,
    /// The next level.
    level: usize,
    /// The text of each node of the last frontier.
    texts: Vec<usize>,
}

impl<'a> MedusaLevels<'a> {
    /// For trees within these limits.
    pub fn new(backbone: &'a Llama, heads: &'a Heads, limits: DynamicTree) -> Self {
        Self { backbone, heads, limits, guesses: vec![], level: 0, texts: vec![] }
    }
}

impl LevelGuesser for MedusaLevels<'_> {
    fn begin(&mut self, batch: &[TextSoFar]) {
        let DynamicTree { depth, top_k, .. } = self.limits;
        let hidden = batch.iter().map(|text| self.backbone.last_of(text.state_1w));
        let hidden_bh = Tensor::cat(&hidden.collect::<Vec<_>>(), 0);
        let guesses = self.heads.likeliest(depth, top_k, &hidden_bh, self.backbone);
        self.guesses = guesses.chunks_exact(depth * top_k).map(<[LikelyToken]>::to_vec).collect();
        self.texts = (0..batch.len()).collect();
        self.level = 0;
    }

    fn guess(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken> {
        self.texts = frontier.iter().map(|node| self.texts[node.parent]).collect();
        let first = self.level * self.limits.top_k;
        self.level += 1;
        self.texts.iter().flat_map(|&text| self.guesses[text][first..first + top_k].iter().copied()).collect()
    }
}
