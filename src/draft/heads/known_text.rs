//! What heads guess in a text whose tokens are known.

// T tokens of the text, N positions, H hidden
use tch::Tensor;

use super::{HeadInput, Heads};
use crate::draft::TextSoFar;
use crate::draft::hydra::levels::HydraLevels;
use crate::draft::levels::LevelGuesser;
use crate::draft::medusa::levels::MedusaLevels;
use crate::draft::trained::KnownText;
use crate::engine::sample::{Chosen, Sampling, Stream};
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::numbers::NonNegative;

/// A text, and what the heads read at its positions.
#[derive(Debug)]
pub(super) struct HeadsText<'a> {
    backbone: &'a Llama,
    heads: &'a Heads,
    ids: Vec<i64>,
    hidden_th: Tensor,
}

impl<'a> HeadsText<'a> {
    pub(super) fn new(heads: &'a Heads, backbone: &'a Llama, ids: &[i64]) -> Self {
        let tokens_bt = Tensor::from_slice(ids).unsqueeze(0).to_device(backbone.stages().first());
        let mask = backbone.causal_rows(ids.len() as i64);
        let hidden_1th = backbone.last_of(&backbone.hidden_states(&tokens_bt, &mask, Adapters::Off));
        let hidden_th = heads.states_of_rows(&hidden_1th, &[vec![ids.len()]]).squeeze_dim(0);
        Self { backbone, heads, ids: ids.to_vec(), hidden_th }
    }

    /// The `count` tokens after each position, `[N, count]`; `None` if a head reads none. Those behind the end are 0: nothing is predicted from
    /// them.
    fn previous_tokens(&self, positions: &[i64], count: usize) -> Option<Tensor> {
        let at = |position: usize| self.ids.get(position).copied().unwrap_or(0);
        let after = |&position: &i64| (1..=count).map(move |j| at(position as usize + j));
        let tokens: Vec<i64> = positions.iter().flat_map(after).collect();
        (count > 0).then(|| Tensor::from_slice(&tokens).view([-1, count as i64]).to_device(self.backbone.device()))
    }

    /// `[N, H]`: what the heads read at positions.
    fn states(&self, positions: &[i64]) -> Tensor {
        self.hidden_th.index_select(0, &Tensor::from_slice(positions).to_device(self.backbone.device()))
    }
}

impl KnownText for HeadsText<'_> {
    fn logits(&self, level: usize, positions: &[i64]) -> Tensor {
        let previous_nj = self.previous_tokens(positions, self.heads.shape().reads().tokens_of(level));
        let input = HeadInput { hidden_nh: &self.states(positions), previous_nj: previous_nj.as_ref() };
        self.heads.logits(level, &input, self.backbone)
    }

    fn begin_at(&self, positions: &[i64], limits: DynamicTree) -> Box<dyn LevelGuesser + '_> {
        let Self { backbone, heads, ids, .. } = self;
        let states = self.states(positions).split(1, 0);
        let roots: Vec<Chosen> =
            positions.iter().map(|&position| Chosen::on_host(ids[position as usize + 1])).collect();
        let text = |(row, (root, state_1w))| TextSoFar {
            row,
            ids: &[],
            root,
            state_1w,
            sampling: Sampling::with_temperature(NonNegative::ZERO),
            stream: Stream::default(),
            may_draw: false,
        };
        let mut guesser: Box<dyn LevelGuesser> = match heads.architecture().is_sequential() {
            false => Box::new(MedusaLevels::new(backbone, heads, limits)),
            true => Box::new(HydraLevels::with_states(backbone, heads, limits.depth)),
        };
        guesser.begin(&roots.iter().zip(&states).enumerate().map(text).collect::<Vec<_>>());
        guesser
    }
}
