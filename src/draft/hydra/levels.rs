//! Sequential heads as a [`LevelGuesser`].

// B texts, N nodes of a level, H hidden, K levels
use tch::{Device, Kind, Tensor};

use crate::cpu::rows::largest;
use crate::cpu::team::Team;
use crate::draft::heads::guesses::{likeliest, likeliest_of_rows};
use crate::draft::heads::sequential::{FirstBlockSums, SequentialLayout};
use crate::draft::heads::{HeadInput, Heads};
use crate::draft::hydra::prefix::PrefixRows;
use crate::draft::levels::LevelGuesser;
use crate::draft::{CommittedTokens, TextSoFar};
use crate::model::llama::Llama;
use crate::model::prefix_layer::PrefixLayer;
use crate::torch::{bytes, upload};
use crate::tree::dynamic::{FrontierNode, LikelyToken};

/// Guesses of sequential heads.
#[derive(Debug)]
pub struct HydraLevels<'a> {
    backbone: &'a Llama,
    heads: &'a Heads,
    /// K, of the trees to fill.
    depth: usize,
    /// The next level, which is the head that guesses it.
    level: usize,
    state: LevelState,
    /// Of Hydra++ heads that follow the rows.
    prefix: Option<(&'a PrefixLayer, PrefixRows)>,
}

/// What the next level needs of the last one.
#[derive(Debug)]
enum LevelState {
    /// Of each node, its path from the root on; `hidden_bh` is `[B, H]`, and `texts` says of each node whose it is.
    Paths { hidden_bh: Tensor, texts: Vec<i64>, paths: Vec<Vec<i64>> },
    /// On the CPU kernels.
    Sums(FirstBlockSums),
}

impl<'a> HydraLevels<'a> {
    /// For trees of at most `depth` levels below the texts of a batch.
    pub fn new(backbone: &'a Llama, heads: &'a Heads, depth: usize) -> Self {
        let prefix = heads.prefix().map(|layer| (layer, PrefixRows::new(layer)));
        Self { prefix, ..Self::with_states(backbone, heads, depth) }
    }

    /// As [`HydraLevels::new`], for texts whose hidden states are those that the heads read, after any prefix layer.
    pub fn with_states(backbone: &'a Llama, heads: &'a Heads, depth: usize) -> Self {
        let state = LevelState::Sums(FirstBlockSums::default());
        Self { backbone, heads, depth, level: 0, state, prefix: None }
    }

    /// What the heads read of each text, `[B, H]`.
    fn states(&self, batch: &[TextSoFar]) -> Tensor {
        let state = |text: &TextSoFar| match &self.prefix {
            Some((_, rows)) => rows.state(text.row).shallow_clone(),
            None => self.backbone.last_of(text.state_1w),
        };
        match batch {
            [text] => state(text),
            _ => Tensor::cat(&batch.iter().map(state).collect::<Vec<_>>(), 0),
        }
    }

    /// The kernels' layout, if they run these heads.
    fn kernels(&self) -> Option<&'a SequentialLayout> {
        self.heads.sequential().filter(|_| self.backbone.device() == Device::Cpu)
    }

    fn guess_by_paths(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken> {
        let LevelState::Paths { hidden_bh, texts, paths } = &mut self.state else { unreachable!("see `begin`") };
        let path = |node: &FrontierNode| [&paths[node.parent][..], &[node.token]].concat();
        (*texts, *paths) = frontier.iter().map(|node| (texts[node.parent], path(node))).unzip();
        let device = hidden_bh.device();
        let hidden_nh = hidden_bh.index_select(0, &upload(texts, device));
        let size = [frontier.len() as i64, self.level as i64 + 1];
        let previous_nj = upload(&paths.concat(), device).view(size);
        let input = HeadInput { hidden_nh: &hidden_nh, previous_nj: Some(&previous_nj) };
        let logits_nv = self.heads.logits(self.level, &input, self.backbone);
        self.level += 1;
        self.heads.to_tokens(likeliest(&logits_nv, top_k))
    }

    /// Logits of the next level, `[N, V]`.
    fn logits_by_sums(&mut self, kernels: &SequentialLayout, frontier: &[FrontierNode]) -> Vec<f32> {
        let LevelState::Sums(sums) = &mut self.state else { unreachable!("see `begin`") };
        let team = Team::shared();
        *sums = kernels.grow(self.level, sums, frontier, |tokens| self.backbone.embed_numbers(tokens), team);
        let logits_nv = self.heads.logits_behind_first(self.level, kernels.output(sums), self.backbone, team);
        self.level += 1;
        logits_nv.expect("heads with a layout are for the kernels")
    }
}

impl LevelGuesser for HydraLevels<'_> {
    fn begin(&mut self, batch: &[TextSoFar]) {
        let hidden_bh = self.states(batch);
        self.level = 0;
        self.state = match self.kernels() {
            Some(kernels) => {
                let hidden_bh = hidden_bh.to_kind(Kind::Float).contiguous();
                LevelState::Sums(kernels.begin(bytes::numbers(&hidden_bh), self.depth, Team::shared()))
            }
            None => LevelState::Paths {
                hidden_bh,
                texts: (0..batch.len() as i64).collect(),
                paths: vec![vec![]; batch.len()],
            },
        };
    }

    fn guess(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken> {
        let Some(kernels) = self.kernels() else { return self.guess_by_paths(frontier, top_k) };
        let logits_nv = self.logits_by_sums(kernels, frontier);
        let likeliest = likeliest_of_rows(&logits_nv, logits_nv.len() / frontier.len(), top_k, Team::shared());
        self.heads.to_tokens(likeliest)
    }

    fn guess_tokens(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<i64> {
        let Some(kernels) = self.kernels() else {
            return self.guess_by_paths(frontier, top_k).into_iter().map(|guess| guess.token).collect();
        };
        let logits_nv = self.logits_by_sums(kernels, frontier);
        let rows = logits_nv.chunks_exact(logits_nv.len() / frontier.len());
        rows.flat_map(|logits_v| largest(logits_v, top_k)).map(|output| self.heads.token_of(output)).collect()
    }

    fn follows(&self) -> bool {
        self.prefix.is_some()
    }

    fn push_row(&mut self) {
        self.prefix.iter_mut().for_each(|(_, rows)| rows.push());
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.prefix
            .iter_mut()
            .for_each(|(layer, rows)| rows.commit(layer, row, &self.backbone.last_of(&tokens.states_nw)));
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.prefix.iter_mut().for_each(|(_, rows)| rows.truncate(row, tokens));
    }

    fn swap_remove(&mut self, row: usize) {
        self.prefix.iter_mut().for_each(|(_, rows)| rows.swap_remove(row));
    }

    fn drop_rows(&mut self) {
        self.prefix.iter_mut().for_each(|(layer, rows)| *rows = PrefixRows::new(layer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::heads::{HeadsArchitecture, HeadsShape};
    use crate::dtype::DraftDtype;
    use crate::engine::sample::{Chosen, Sampling, Stream};
    use crate::model::config::LlamaConfig;
    use crate::numbers::NonNegative;
    use crate::torch::Generator;

    /// Three levels for two texts: two children below each root, then two below each of these, and so on. Returns the log-probabilities.
    fn levels(guesser: &mut HydraLevels, hidden_bh: &Tensor) -> Vec<f32> {
        let roots = [3, 7].map(Chosen::on_host);
        let hidden: Vec<Tensor> = (0..2).map(|text| hidden_bh.narrow(0, text, 1)).collect();
        let batch: Vec<TextSoFar> = (roots.iter().zip(&hidden))
            .enumerate()
            .map(|(row, (root, state_1w))| TextSoFar {
                row,
                ids: &[],
                root,
                state_1w,
                sampling: Sampling::with_temperature(NonNegative::ZERO),
                stream: Stream::default(),
                may_draw: false,
            })
            .collect();
        let below_roots: Vec<FrontierNode> =
            [3, 7].into_iter().zip(0..).map(|(token, parent)| FrontierNode { parent, token }).collect();
        // The tokens are not the guessed ones: near ties may swap places.
        let below = |frontier: &[FrontierNode], level: i64| -> Vec<FrontierNode> {
            let node = |at: usize| FrontierNode { parent: at / 2, token: (11 * at as i64 + level) % 50 };
            (0..2 * frontier.len()).map(node).collect()
        };
        guesser.begin(&batch);
        let mut frontier = below_roots.clone();
        let tokens_alone: Vec<Vec<i64>> = (0..3)
            .map(|level| {
                let tokens = guesser.guess_tokens(&frontier, 4);
                frontier = below(&frontier, level);
                tokens
            })
            .collect();
        guesser.begin(&batch);
        let (mut frontier, mut all) = (below_roots, vec![]);
        for level in 0..3 {
            let guesses = guesser.guess(&frontier, 4);
            assert_eq!(tokens_alone[level as usize], guesses.iter().map(|guess| guess.token).collect::<Vec<_>>());
            assert_eq!(guesses.len(), 4 * frontier.len());
            all.extend(guesses.iter().map(|guess| guess.log_p));
            frontier = below(&frontier, level);
        }
        all
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn own_kernels_guess_what_libtorch_does() {
        let cases =
            [(50, 1, false, 3, false), (50, 3, true, 4, false), (0, 2, false, 3, false), (50, 1, false, 3, true)];
        for (vocab_size, medusa_num_layers, w2_bias, medusa_num_heads, shared_w2) in cases {
            let config = LlamaConfig::tiny();
            let hidden_size = config.hidden_size;
            let architecture = HeadsArchitecture::Hydra;
            let shape = HeadsShape {
                architecture,
                medusa_num_heads,
                medusa_num_layers,
                hidden_size,
                vocab_size,
                w2_bias,
                shared_w2,
                w2_rank: if shared_w2 { 5 } else { 0 },
            };
            // Values that are exact in bfloat16; activations are rounded between layers.
            let exact = |tensor: Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
            let heads = || {
                Heads::random(shape, Kind::BFloat16, Device::Cpu, 1)
                    .with_vocabulary(config.vocab_size)
                    .for_training(Kind::Float)
            };
            let backbone = || Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
            let hidden_bh = exact(Generator::seeded(3).normal(&[2, hidden_size], (Kind::Float, Device::Cpu)));
            let oracle = levels(&mut HydraLevels::new(&backbone(), &heads(), 3), &hidden_bh);
            let (fast, backbone) = (heads().for_decoding(DraftDtype::BFloat16), backbone().for_decoding());
            assert!(fast.sequential().is_some());
            let ours = levels(&mut HydraLevels::new(&backbone, &fast, 3), &hidden_bh);
            let off = oracle.iter().zip(&ours).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 2e-2 && ours.len() == 4 * (2 + 4 + 8), "{off}");
            let rounded = heads().for_decoding(DraftDtype::Int8);
            let rounded = levels(&mut HydraLevels::new(&backbone, &rounded, 3), &hidden_bh);
            let off = oracle.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 5e-2, "in 8 bits: {off}");
        }
    }
}
