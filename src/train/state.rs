//! What a run trains, and how far it is: heads, adapters or backbone, their gradients, the optimizer, the step.

use std::ops::Range;

use tch::Tensor;

use crate::draft::medusa::fused_loss::{HeadGradients, OutputGradients};
use crate::draft::medusa::heads::Heads;
use crate::model::llama::Llama;
use crate::torch::optim::OptimizerConfig;
use crate::torch::optim::adamw::{AdamW, Parameter};

/// The state of a run. What is frozen is not part of it.
#[derive(Debug)]
pub struct TrainState {
    /// The heads; their tensors are the first parameters' values.
    pub heads: Heads,
    /// In the order of [`Heads::parameters`], then what is trained of the backbone, part by part, lm_head last.
    pub parameters: Vec<Parameter>,
    /// Where the backbone's parameters are.
    backbone: BackboneParameters,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Finished optimizer steps.
    pub step: usize,
    /// Input tokens seen.
    pub tokens: u64,
}

#[derive(Debug, Default)]
struct BackboneParameters {
    /// By part of [`Llama::trained_in`].
    parts: Vec<Range<usize>>,
    lm_head: LmHeadParameters,
}

/// Indices of what the LM head trains.
#[derive(Debug, Default)]
enum LmHeadParameters {
    #[default]
    Frozen,
    Weight(usize),
    Adapter([usize; 2]),
}

impl TrainState {
    /// At step 0 of training heads alone.
    pub fn new(heads: Heads, optimizer: OptimizerConfig) -> Self {
        let parameters: Vec<Parameter> = heads.parameters().iter().map(|(name, t)| Parameter::new(name, t)).collect();
        Self {
            optimizer: AdamW::new(optimizer, &parameters),
            backbone: BackboneParameters::default(),
            heads,
            parameters,
            step: 0,
            tokens: 0,
        }
    }

    /// At step 0 of training heads, at `heads_rate` times the learning rate, and what requires a gradient in `backbone`.
    pub fn joint(heads: Heads, heads_rate: f64, backbone: &Llama, optimizer: OptimizerConfig) -> Self {
        let of_heads = heads.parameters().into_iter().map(|(name, t)| Parameter::new(name, t).at_rate(heads_rate));
        let mut parameters: Vec<Parameter> = of_heads.collect();
        let mut add = |trained: Vec<(String, &Tensor)>| {
            let from = parameters.len();
            parameters.extend(trained.into_iter().map(|(name, tensor)| Parameter::new(name, tensor)));
            from..parameters.len()
        };
        let parts: Vec<Range<usize>> = (0..backbone.parts()).map(|part| add(backbone.trained_in(part))).collect();
        let lm_head = add(backbone.trained_in_lm_head());
        let embedding = parts[0].clone();
        let lm_head = match (lm_head.len(), embedding.is_empty()) {
            (2, _) => LmHeadParameters::Adapter([lm_head.start, lm_head.start + 1]),
            (1, _) => LmHeadParameters::Weight(lm_head.start),
            (_, false) if backbone.config.tie_word_embeddings => LmHeadParameters::Weight(embedding.start),
            _ => LmHeadParameters::Frozen,
        };
        let optimizer = AdamW::new(optimizer, &parameters);
        Self { heads, parameters, backbone: BackboneParameters { parts, lm_head }, optimizer, step: 0, tokens: 0 }
    }

    /// Parameters of the heads, and those of the backbone.
    pub fn by_owner(&self) -> (&[Parameter], &[Parameter]) {
        self.parameters.split_at(self.heads.parameters().len())
    }

    /// Where head `head` (0-based) adds its gradients; `dhidden_nh` where it adds that of the hidden states.
    pub fn gradients_of<'g>(&'g self, head: usize, dhidden_nh: Option<&'g Tensor>) -> HeadGradients<'g> {
        let blocks = 2 * self.heads.shape().medusa_num_layers;
        let of_heads = self.by_owner().0;
        let a_head = of_heads.len() / self.heads.num_heads();
        let mine = &of_heads[head * a_head..(head + 1) * a_head];
        let output = match mine.get(blocks) {
            Some(w2) => OutputGradients { weight_vh: Some(&w2.gradient), adapter: None },
            None => self.lm_head_gradients(),
        };
        let of_blocks = mine[..blocks].iter().map(|p| &p.gradient).collect();
        HeadGradients { blocks: of_blocks, output, hidden_nh: dhidden_nh }
    }

    /// Where the LM head's loss adds its gradients.
    pub fn lm_gradients<'g>(&'g self, dhidden_nh: &'g Tensor) -> HeadGradients<'g> {
        HeadGradients { blocks: vec![], output: self.lm_head_gradients(), hidden_nh: Some(dhidden_nh) }
    }

    /// Where the backbone's backward pass adds its gradients, by part.
    pub fn backbone_gradients(&self) -> Vec<Vec<&Tensor>> {
        let of_part = |part: &Range<usize>| self.parameters[part.clone()].iter().map(|p| &p.gradient).collect();
        self.backbone.parts.iter().map(of_part).collect()
    }

    fn lm_head_gradients(&self) -> OutputGradients<'_> {
        let gradient = |at: usize| &self.parameters[at].gradient;
        match self.backbone.lm_head {
            LmHeadParameters::Frozen => OutputGradients::default(),
            LmHeadParameters::Weight(at) => OutputGradients { weight_vh: Some(gradient(at)), adapter: None },
            LmHeadParameters::Adapter(at) => OutputGradients { weight_vh: None, adapter: Some(at.map(gradient)) },
        }
    }
}
