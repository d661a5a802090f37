//! What a run trains, and how far it is: the heads, their gradients, the optimizer, the step.

use crate::medusa::fused_loss::HeadGradients;
use crate::medusa::heads::Heads;
use crate::torch::optim::OptimizerConfig;
use crate::torch::optim::adamw::{AdamW, Parameter};

/// The state of a run; the frozen backbone is not part of it.
#[derive(Debug)]
pub struct TrainState {
    /// The heads; their tensors are the parameters' values.
    pub heads: Heads,
    /// In the order of [`Heads::parameters`].
    pub parameters: Vec<Parameter>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Finished optimizer steps.
    pub step: usize,
    /// Input tokens seen.
    pub tokens: u64,
}

impl TrainState {
    /// At step 0.
    pub fn new(heads: Heads, optimizer: OptimizerConfig) -> Self {
        let parameters: Vec<Parameter> = heads.parameters().iter().map(|(name, t)| Parameter::new(name, t)).collect();
        Self { optimizer: AdamW::new(optimizer, &parameters), heads, parameters, step: 0, tokens: 0 }
    }

    /// Where head `head` (0-based) adds its gradients.
    pub fn gradients_of(&self, head: usize) -> HeadGradients<'_> {
        let blocks = 2 * self.heads.shape().medusa_num_layers;
        let a_head = self.parameters.len() / self.heads.num_heads();
        let mine = &self.parameters[head * a_head..(head + 1) * a_head];
        let of_blocks = mine[..blocks].iter().map(|p| &p.gradient).collect();
        HeadGradients { blocks: of_blocks, w2: mine.get(blocks).map(|p| &p.gradient) }
    }
}
