//! The state of a run: heads, adapters or backbone, gradients, optimizer and step.

use tch::Tensor;

use crate::draft::medusa::fused_loss::{HeadGradients, OutputGradients};
use crate::draft::medusa::heads::Heads;
use crate::fused::optim;
use crate::model::llama::Llama;
use crate::torch::optim::adamw::{AdamW, Parameter};
use crate::train::patience::BestSoFar;
use crate::train::plan::{ParameterGroup, TrainPlan};

/// The state of a run. It has no frozen parameters.
#[derive(Debug)]
pub struct TrainState {
    /// Their tensors are values of `parameters`.
    pub heads: Heads,
    /// In the order of [`Heads::parameters`], then the trained parts of the backbone in order, lm_head last.
    pub parameters: Vec<TrainedParameter>,
    backbone_parts: usize,
    /// A tied LM head adds its gradient to the embedding's.
    lm_head_group: ParameterGroup,
    pub optimizer: AdamW,
    /// The best evaluation so far, with `train.keep_best`.
    pub best: Option<BestSoFar>,
    /// Finished optimizer steps.
    pub step: usize,
    /// Input tokens seen.
    pub tokens: u64,
}

/// A parameter and its group.
#[derive(Debug)]
pub struct TrainedParameter {
    /// Selects the gradient.
    pub group: ParameterGroup,
    pub parameter: Parameter,
}

impl TrainState {
    /// The state at step 0 for `heads` and the parameters of `backbone` that require a gradient.
    pub fn new(heads: Heads, backbone: &Llama, plan: &TrainPlan) -> Self {
        let trained = |group: ParameterGroup, (name, value): (String, &Tensor)| TrainedParameter {
            group,
            parameter: Parameter::new(name, value).at_rate(plan.rate_factor(group)),
        };
        let shape = heads.shape();
        let of_places = shape.places().into_iter().map(|place| match shape.is_shared(place) {
            true => ParameterGroup::SharedW2,
            false => ParameterGroup::Head(place.head),
        });
        let groups_of_heads = of_places.chain(std::iter::repeat(ParameterGroup::Prefix));
        let of_heads = groups_of_heads.zip(heads.parameters());
        let of_part =
            |part| backbone.trained_in(part).into_iter().map(move |p| (ParameterGroup::BackbonePart(part), p));
        let of_lm_head = backbone.trained_in_lm_head().into_iter().map(|p| (ParameterGroup::LmHead, p));
        let all = of_heads.chain((0..backbone.parts()).flat_map(of_part)).chain(of_lm_head);
        let parameters: Vec<_> = all.map(|(group, parameter)| trained(group, parameter)).collect();
        let is_tied = backbone.config.tie_word_embeddings && backbone.lm_head().adapter().is_none();
        Self {
            optimizer: AdamW::new(plan.optimizer, parameters.iter().map(|p| &p.parameter)),
            backbone_parts: backbone.parts(),
            lm_head_group: if is_tied { ParameterGroup::BackbonePart(0) } else { ParameterGroup::LmHead },
            heads,
            parameters,
            best: None,
            step: 0,
            tokens: 0,
        }
    }

    /// Updates all parameters at learning rate `rate` with gradients multiplied by `scale`, then zeroes the gradients.
    pub fn update(&mut self, rate: f64, scale: f64) {
        let mut parameters: Vec<&mut Parameter> = self.parameters.iter_mut().map(|p| &mut p.parameter).collect();
        optim::step(&mut self.optimizer, &mut parameters, rate, scale);
    }

    /// All parameters, in order.
    pub fn all(&self) -> Vec<&Parameter> {
        self.parameters.iter().map(|p| &p.parameter).collect()
    }

    /// Parameters of the groups for which `are_wanted` is true.
    pub fn parameters_of(&self, are_wanted: fn(ParameterGroup) -> bool) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(move |p| are_wanted(p.group)).map(|p| &p.parameter)
    }

    /// The gradient tensors of head `head` (0-based); those of a shared W2 sum over the heads. `dhidden_nh` receives the gradient of the
    /// hidden states.
    pub fn gradients_of<'g>(&'g self, head: usize, dhidden_nh: Option<&'g Tensor>) -> HeadGradients<'g> {
        let mut blocks = self.gradients(ParameterGroup::Head(head));
        blocks.extend(self.gradients(ParameterGroup::SharedW2));
        let own = blocks.split_off(self.heads.head(head).block_parameters().len());
        let output = match own[..] {
            [] => self.lm_head_gradients(),
            _ => OutputGradients { weight_vh: own.first().copied(), bias_v: own.get(1).copied(), adapter: None },
        };
        HeadGradients { blocks, output, hidden_nh: dhidden_nh }
    }

    /// The gradient tensors of the LM head's loss.
    pub fn lm_gradients<'g>(&'g self, dhidden_nh: &'g Tensor) -> HeadGradients<'g> {
        HeadGradients { blocks: vec![], output: self.lm_head_gradients(), hidden_nh: Some(dhidden_nh) }
    }

    /// The gradient tensors of the prefix layer.
    pub fn prefix_gradients(&self) -> Vec<&Tensor> {
        self.gradients(ParameterGroup::Prefix)
    }

    /// The gradient tensors of the backbone's backward pass, by part.
    pub fn backbone_gradients(&self) -> Vec<Vec<&Tensor>> {
        (0..self.backbone_parts).map(|part| self.gradients(ParameterGroup::BackbonePart(part))).collect()
    }

    fn lm_head_gradients(&self) -> OutputGradients<'_> {
        match self.gradients(self.lm_head_group)[..] {
            [a_rh, b_vr] => OutputGradients { adapter: Some([a_rh, b_vr]), ..OutputGradients::default() },
            [weight_vh] => OutputGradients { weight_vh: Some(weight_vh), ..OutputGradients::default() },
            _ => OutputGradients::default(),
        }
    }

    fn gradients(&self, group: ParameterGroup) -> Vec<&Tensor> {
        self.parameters.iter().filter(|p| p.group == group).map(|p| &p.parameter.gradient).collect()
    }
}
