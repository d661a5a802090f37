//! The state of a run: drafter, adapters or backbone, gradients, optimizer and step.

use tch::Tensor;

use crate::draft::loss::fused::{LevelGradients, OutputGradients};
use crate::draft::trained::{DrafterGradients, TrainedDrafter};
use crate::fused::optim;
use crate::model::llama::Llama;
use crate::torch::optim::ZeroStage;
use crate::torch::optim::adamw::{AdamW, Parameter, StateTensor};
use crate::torch::optim::flat_gradients::{FlatGradients, ParameterPiece};
use crate::train::patience::BestSoFar;
use crate::train::plan::{ParameterGroup, TrainPlan};
use crate::train::ranks::{Ranks, RanksError};

/// The state of a run. It has no frozen parameters.
#[derive(Debug)]
pub struct TrainState {
    /// Their tensors are values of `parameters`.
    pub drafter: Box<dyn TrainedDrafter>,
    /// In the order of [`TrainedDrafter::parameters`], then the trained parts of the backbone in order, lm_head last.
    pub parameters: Vec<TrainedParameter>,
    /// Those of `parameters` are views of it.
    gradients: FlatGradients,
    /// What this process updates, if the processes share the optimizer's state.
    own: Option<OwnPieces>,
    backbone_parts: usize,
    /// A tied LM head adds its gradient to the embedding's.
    lm_head_group: ParameterGroup,
    /// Over `parameters`, or over the pieces of this process.
    pub optimizer: AdamW,
    copied_embedding: Option<CopiedEmbedding>,
    /// The best evaluation so far, with `train.keep_best`.
    pub best: Option<BestSoFar>,
    /// Finished optimizer steps.
    pub step: usize,
    /// Input tokens seen.
    pub tokens: u64,
}

/// The LM head of a trained backbone that is tied to an embedding on another stage: a copy, with a gradient of its own.
#[derive(Debug)]
struct CopiedEmbedding {
    /// `[V, H]`, on the LM head's device.
    weight_vh: Tensor,
    /// `[V, H]`.
    gradient_vh: Tensor,
}

/// A parameter and its group.
#[derive(Debug)]
pub struct TrainedParameter {
    /// Selects the gradient.
    pub group: ParameterGroup,
    pub parameter: Parameter,
}

/// The pieces of parameters in a process's share (ZeRO-1).
#[derive(Debug)]
struct OwnPieces {
    /// Of all processes, in the order of the parameters.
    all: Vec<ParameterPiece>,
    /// Those of this process, in the same order, as parameters.
    parameters: Vec<Parameter>,
    /// The share of this process.
    share: usize,
}

/// A tensor of the optimizer's state of one parameter.
#[derive(Debug)]
pub struct SavedMoment {
    /// The parameter's place in [`TrainState::parameters`].
    parameter: usize,
    /// Its place among the tensors of that parameter.
    place: usize,
    /// Of the whole parameter.
    pub tensor: StateTensor,
}

impl TrainState {
    /// The state at step 0 for `drafter` and the parameters of `backbone` that require a gradient, in a run of one process.
    pub fn new(drafter: Box<dyn TrainedDrafter>, backbone: &Llama, plan: &TrainPlan) -> Self {
        Self::for_rank(drafter, backbone, plan, Ranks::alone())
    }

    /// As [`TrainState::new`], in a process of `ranks`.
    pub fn for_rank(drafter: Box<dyn TrainedDrafter>, backbone: &Llama, plan: &TrainPlan, ranks: Ranks) -> Self {
        let in_drafter = drafter.parameters().into_iter().map(|p| (ParameterGroup::Drafter, p));
        let in_part =
            |part| backbone.trained_in(part).into_iter().map(move |p| (ParameterGroup::BackbonePart(part), p));
        let in_lm_head = backbone.trained_in_lm_head().into_iter().map(|p| (ParameterGroup::LmHead, p));
        let all: Vec<_> = in_drafter.chain((0..backbone.parts()).flat_map(in_part)).chain(in_lm_head).collect();
        let values: Vec<&Tensor> = all.iter().map(|(_, (_, value))| *value).collect();
        let gradients = FlatGradients::zeros(&values, ranks.world_size());
        let trained = |(at, (group, (name, value))): (usize, (ParameterGroup, (String, &Tensor)))| TrainedParameter {
            group,
            parameter: Parameter::accumulating(name, value, gradients.of(at, &value.size()))
                .at_rate(plan.rate_factor(group)),
        };
        let parameters: Vec<_> = all.into_iter().enumerate().map(trained).collect();
        let shares_state = plan.zero_stage == ZeroStage::One && !ranks.is_alone();
        let own = shares_state.then(|| OwnPieces::of(&gradients, &parameters, ranks.rank()));
        let optimizer = match &own {
            Some(own) => AdamW::new(plan.optimizer, &own.parameters),
            None => AdamW::new(plan.optimizer, parameters.iter().map(|p| &p.parameter)),
        };
        let is_tied = backbone.config.tie_word_embeddings && backbone.lm_head().adapter().is_none();
        Self {
            optimizer,
            gradients,
            own,
            backbone_parts: backbone.parts(),
            lm_head_group: if is_tied { ParameterGroup::BackbonePart(0) } else { ParameterGroup::LmHead },
            copied_embedding: backbone.copied_embedding().map(|weight_vh| CopiedEmbedding {
                weight_vh: weight_vh.shallow_clone(),
                gradient_vh: weight_vh.zeros_like(),
            }),
            drafter,
            parameters,
            best: None,
            step: 0,
            tokens: 0,
        }
    }

    /// Updates this process's parameters at learning rate `rate` with gradients multiplied by `scale`, then zeroes their gradients:
    /// all of them, or its share, which [`TrainState::exchange_values`] then gives to the others.
    pub fn update_own(&mut self, rate: f64, scale: f64) {
        let mut parameters: Vec<&mut Parameter> = match &mut self.own {
            Some(own) => own.parameters.iter_mut().collect(),
            None => self.parameters.iter_mut().map(|p| &mut p.parameter).collect(),
        };
        optim::step(&mut self.optimizer, &mut parameters, rate, scale);
        match &self.own {
            // The gradients' buffers carry the values.
            Some(own) => tch::no_grad(|| {
                own.parameters.iter().for_each(|piece| piece.gradient.shallow_clone().copy_(&piece.value));
            }),
            None => self.copy_embedding(),
        }
    }

    /// Adds the gradient of a tied LM head on another stage to the embedding's. Called once a step, before the norm is measured.
    pub fn join_tied_gradients(&self) {
        let [embedding_vh] = self.gradients(ParameterGroup::BackbonePart(0))[..] else { return };
        if let Some(CopiedEmbedding { gradient_vh, .. }) = &self.copied_embedding {
            let _ = embedding_vh.shallow_clone().g_add_(&gradient_vh.to_device(embedding_vh.device()));
            let _ = gradient_vh.shallow_clone().zero_();
        }
    }

    /// Copies the embedding to a tied LM head on another stage, after the embedding has changed.
    pub fn copy_embedding(&self) {
        let mut embedding = self.parameters_of(|group| group == ParameterGroup::BackbonePart(0));
        if let (Some(copied), Some(embedding)) = (&self.copied_embedding, embedding.next()) {
            tch::no_grad(|| copied.weight_vh.shallow_clone().copy_(&embedding.value));
        }
    }

    /// Copies the values that each process updated to all others, by way of the gradients' buffers, which are zeroed. Where each process updates
    /// all, nothing is to be done.
    ///
    /// # Errors
    /// [`RanksError::Collective`]; the parameters are then undefined.
    pub fn exchange_values(&self, ranks: Ranks) -> Result<(), RanksError> {
        if self.own.is_none() {
            return Ok(());
        }
        tch::no_grad(|| {
            for buffer_wn in self.gradients.buffers_wn() {
                ranks.collective().all_gather(buffer_wn)?;
            }
            for parameter in self.all() {
                parameter.value.shallow_clone().copy_(&parameter.gradient);
            }
            for buffer_wn in self.gradients.buffers_wn() {
                let _ = buffer_wn.shallow_clone().zero_();
            }
            self.copy_embedding();
            Ok(())
        })
    }

    /// Sums the gradients over all processes; where they share the optimizer's state, each gets its share of the sum.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    pub fn reduce_gradients(&self, ranks: Ranks) -> Result<(), RanksError> {
        for buffer_wn in self.gradients.buffers_wn() {
            match self.own {
                Some(_) => ranks.collective().reduce_scatter(buffer_wn)?,
                None => ranks.collective().all_reduce(buffer_wn)?,
            }
        }
        Ok(())
    }

    /// The Euclidean norm of the gradients after [`TrainState::reduce_gradients`], `[1]` float64 on their device: of all of them, or of this
    /// process's share.
    pub fn gradient_norm(&self) -> Tensor {
        match &self.own {
            // A process may have no piece, and its norm then no device.
            Some(own) => optim::gradient_norm(&own.parameters.iter().collect::<Vec<_>>())
                .to_device(self.gradients.buffers_wn()[0].device()),
            None => optim::gradient_norm(&self.all()),
        }
    }

    /// Whether this process updates only its share of the parameters.
    pub fn is_shared(&self) -> bool {
        self.own.is_some()
    }

    /// Copies the values of all parameters from rank 0 to the others.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    pub fn take_values_of_first(&self, ranks: Ranks) -> Result<(), RanksError> {
        for parameter in self.all() {
            ranks.collective().broadcast(&parameter.value.detach(), 0)?;
        }
        self.copy_embedding();
        Ok(())
    }

    /// The tensors of the optimizer's state of whole parameters, in the order in which they are saved.
    pub fn moments(&self) -> Vec<SavedMoment> {
        let moments = |(parameter, p): (usize, &TrainedParameter)| {
            let tensors = self.optimizer.tensors_of(&p.parameter);
            let moment = move |(place, tensor)| SavedMoment { parameter, place, tensor };
            tensors.into_iter().enumerate().map(moment)
        };
        self.parameters.iter().enumerate().flat_map(moments).collect()
    }

    /// The whole tensor of a moment, of which each process may have a part.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    pub fn moment(&self, moment: &SavedMoment, ranks: Ranks) -> Result<Tensor, RanksError> {
        let Some(own) = &self.own else {
            return Ok(self.optimizer.tensor(moment.parameter, moment.place).shallow_clone());
        };
        let StateTensor { shape, kind, .. } = &moment.tensor;
        let whole =
            Tensor::zeros(shape.as_slice(), (*kind, self.parameters[moment.parameter].parameter.value.device()));
        for piece in own.all.iter().filter(|piece| piece.parameter == moment.parameter) {
            let place = moment.tensor.part(&whole, piece.from, piece.count);
            if let Some(at) = own.place_of(piece) {
                place.shallow_clone().copy_(&self.optimizer.tensor(at, moment.place).view(-1));
            }
            ranks.collective().broadcast(&place, piece.share)?;
        }
        Ok(whole)
    }

    /// Restores this process's part of a moment from the whole tensor.
    pub fn restore_moment(&mut self, moment: &SavedMoment, whole: &Tensor) {
        let Some(own) = &self.own else {
            return self.optimizer.tensor(moment.parameter, moment.place).shallow_clone().copy_(whole);
        };
        for piece in own.all.iter().filter(|piece| piece.parameter == moment.parameter) {
            if let Some(at) = own.place_of(piece) {
                let part = moment.tensor.part(whole, piece.from, piece.count);
                self.optimizer.tensor(at, moment.place).view(-1).copy_(&part);
            }
        }
    }

    /// All parameters, in order.
    pub fn all(&self) -> Vec<&Parameter> {
        self.parameters.iter().map(|p| &p.parameter).collect()
    }

    /// Parameters of the groups for which `are_wanted` is true.
    pub fn parameters_of(&self, are_wanted: fn(ParameterGroup) -> bool) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(move |p| are_wanted(p.group)).map(|p| &p.parameter)
    }

    /// The gradient tensors of the drafter's losses. `dhidden_nh` receives the gradient of the hidden states.
    pub fn drafter_gradients<'g>(&'g self, dhidden_nh: Option<&'g Tensor>) -> DrafterGradients<'g> {
        let own = self.gradients(ParameterGroup::Drafter);
        DrafterGradients { own, lm_head: self.lm_head_gradients(), hidden_nh: dhidden_nh }
    }

    /// The gradient tensors of the LM head's loss.
    pub fn lm_gradients<'g>(&'g self, dhidden_nh: &'g Tensor) -> LevelGradients<'g> {
        LevelGradients { blocks: vec![], output: self.lm_head_gradients(), hidden_nh: Some(dhidden_nh) }
    }

    /// The gradient tensors of the backbone's backward pass, by part.
    pub fn backbone_gradients(&self) -> Vec<Vec<&Tensor>> {
        (0..self.backbone_parts).map(|part| self.gradients(ParameterGroup::BackbonePart(part))).collect()
    }

    fn lm_head_gradients(&self) -> OutputGradients<'_> {
        if let Some(CopiedEmbedding { gradient_vh, .. }) = &self.copied_embedding {
            return OutputGradients { weight_vh: Some(gradient_vh), ..OutputGradients::default() };
        }
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

impl OwnPieces {
    fn of(gradients: &FlatGradients, parameters: &[TrainedParameter], share: usize) -> Self {
        let all = gradients.pieces();
        let piece = |piece: &ParameterPiece| parameters[piece.parameter].parameter.piece(piece.from, piece.count);
        let own = all.iter().filter(|piece| piece.share == share).map(piece).collect();
        Self { all, parameters: own, share }
    }

    /// The place of a piece among those of this process; `None` if it is another's.
    fn place_of(&self, piece: &ParameterPiece) -> Option<usize> {
        let mut own = self.all.iter().filter(|piece| piece.share == self.share);
        own.position(|own| own == piece)
    }
}
