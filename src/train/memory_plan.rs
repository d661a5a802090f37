//! Predicts a run's memory from its shape before anything is loaded. Pure arithmetic; `tests/memory_plan.rs` compares
//! it with measurements.

// H hidden, N positions of a micro batch
use crate::draft::planned::{PlannedDrafter, Teachers};
use crate::memory::F32;
use crate::memory::heap::holes_of_sizes;
use crate::memory::layer::{LayerPass, TrainedLayers, adapter};
use crate::memory::plan::{MemoryGroup, MemoryPlan, WorldPlan};
use crate::memory::weights::{StageShape, numel};
use crate::model::loading::OutputPart;
use crate::model::lora::LoraConfig;
use crate::model::stored::dense::Dense;
use crate::model::stored::stored_format;
use crate::torch::accelerator;
use crate::torch::optim::OptimizerName;
use crate::train::plan::BackboneTraining;

/// A run of the smallest model, without libtorch_cuda: libtorch's pages, its threads' memory, compiled products and files. Measured on Linux:
/// 195 to 205 MiB, of which 130 are pages of the program's files.
const PROGRAM: u64 = 195 << 20;

/// The shape of a run.
#[derive(Debug, Clone, Copy)]
pub struct Workload<'w> {
    /// The backbone's layers, and a micro batch.
    pub pass: LayerPass<'w>,
    /// The part of the backbone that is planned, with what is trained on it.
    pub stage: StageShape,
    pub drafter: &'w dyn PlannedDrafter,
    pub teachers: Teachers,
    pub optimizer: OptimizerName,
    pub world: WorldPlan,
    /// Some row has less than half as many tokens as the longest.
    pub unequal: bool,
    /// The frozen backbone's hidden states are cached on disk.
    pub cached: bool,
    /// The part of the backbone that is loaded for hidden states of a server; `None`: all of it.
    pub loaded: Option<OutputPart>,
    /// Before the first step a second copy of the backbone answers validation prompts.
    pub answers_twice: bool,
}

impl BackboneTraining {
    /// What of the decoder layers it trains.
    pub fn layers(&self) -> TrainedLayers<'_> {
        match self {
            Self::Frozen => TrainedLayers::Frozen,
            Self::Lora { lora, .. } => TrainedLayers::Adapters(lora),
            Self::Full => TrainedLayers::Whole,
        }
    }
}

impl MemoryPlan {
    /// Plans a run of this shape.
    pub fn of(work: &Workload) -> Self {
        let groups = work.groups();
        let gradients: u64 = groups.iter().map(|group| group.gradient_bytes).sum();
        let on_host = work.pass.on_host;
        let (activation_bytes, hidden_state_bytes) = (work.activations(), work.hidden_states());
        let largest = work.largest_temporary(activation_bytes + hidden_state_bytes);
        let holes = if on_host && work.unequal { holes_of_sizes(largest + hidden_state_bytes) } else { 0 };
        // Where processes share the moments, gloo gathers the new values of all parameters in a buffer of its own. It is beside what a pass has
        // freed, since the heap keeps that.
        let gathered = if on_host && work.world.shares_moments() { gradients } else { 0 };
        let working = largest + holes + gathered;
        // The second copy is freed before the heads are allocated.
        let heads: u64 = groups.iter().filter(|group| group.name == "heads").map(MemoryGroup::bytes).sum();
        let later = heads + activation_bytes + hidden_state_bytes;
        let answering = if work.answers_twice { work.answering_copy().saturating_sub(later) } else { 0 };
        Self {
            groups,
            activation_bytes,
            hidden_state_bytes,
            working_bytes: working.max(answering),
            program_bytes: if on_host { PROGRAM + accelerator::opened_bytes() } else { 0 },
            world_size: work.world.size,
            sent_bytes: work.world.sent_bytes(gradients, on_host),
        }
    }
}

impl<'w> Workload<'w> {
    fn is_joint(&self) -> bool {
        self.pass.trained != TrainedLayers::Frozen
    }

    /// The whole backbone is trained.
    fn is_direct(&self) -> bool {
        self.pass.trained == TrainedLayers::Whole
    }

    fn hidden_size(&self) -> u64 {
        self.pass.widths().h
    }

    /// The second copy of the backbone. Beside an embedding that is no table of blocks it has an LM head.
    fn answering_copy(&self) -> u64 {
        let LayerPass { config, blocks, .. } = self.pass;
        let copies_head = config.tie_word_embeddings && blocks.is_none();
        let lm_head = if copies_head { numel(&config.lm_head().size) * self.pass.element } else { 0 };
        self.backbone().weight_bytes + lm_head
    }

    fn groups(&self) -> Vec<MemoryGroup> {
        let heads = self.stage.is_last.then(|| self.trained("heads", &self.drafter.tensors(self.pass.config)));
        let adapters = self.pass.trained.lora().map(|lora| self.trained("adapters", &self.adapters(lora)));
        [self.backbone()].into_iter().chain(heads).chain(adapters).collect()
    }

    /// Master weights, gradients and moments of tensors of the given sizes.
    fn trained(&self, name: &'static str, tensors: &[u64]) -> MemoryGroup {
        let (parameters, wide) = (tensors.iter().sum::<u64>(), self.pass.wide());
        let moments = tensors.iter().map(|&numbers| self.optimizer.moment_bytes(numbers, wide)).sum();
        let (weight_bytes, gradient_bytes) = (wide * parameters, wide * parameters);
        let optimizer_bytes = self.world.share_of(moments);
        MemoryGroup { name, parameters, trained: true, weight_bytes, gradient_bytes, optimizer_bytes }
    }

    /// The size of each adapter tensor.
    fn adapters(&self, lora: &LoraConfig) -> Vec<u64> {
        let a_layer = self.pass.adapters(lora);
        let lm_head = self.stage.is_last.then(|| adapter(self.pass.config.lm_head(), lora));
        (0..self.stage.layers).flat_map(|_| a_layer.clone()).chain(lm_head.into_iter().flatten()).collect()
    }

    fn backbone(&self) -> MemoryGroup {
        let LayerPass { config, quantization, element, .. } = self.pass;
        if let Some(part) = self.loaded {
            return self.backbone_output(part);
        }
        let parameters = self.stage.parameters(config);
        if self.is_direct() {
            let (in_linears, copied) = (self.stage.in_linears(config), self.stage.copied_embedding(config));
            // 8-bit optimizers keep the moments of norms in float32: less than a page in all.
            let mut group = self.trained("backbone", &[in_linears, parameters - in_linears]);
            group.weight_bytes += self.pass.wide() * copied;
            group.gradient_bytes += self.pass.wide() * copied;
            return group;
        }
        let dense = Dense(element);
        let in_numbers = self.stage.weight_bytes(config, stored_format(quantization, &dense), element);
        let in_blocks = |bytes: u64| {
            let share = bytes * self.stage.layers as u64 / config.num_hidden_layers.max(1) as u64;
            in_numbers - self.stage.in_linears(config) * element + share
        };
        let weight_bytes = self.pass.blocks.map_or(in_numbers, in_blocks);
        MemoryGroup::frozen(parameters, weight_bytes)
    }

    /// Without decoder layers.
    fn backbone_output(&self, part: OutputPart) -> MemoryGroup {
        let wanted = part.tensors(self.pass.config);
        let tensors = self.pass.config.tensors().into_iter().filter(|(name, _)| wanted.contains(&name.as_str()));
        let parameters = tensors.map(|(_, shape)| numel(&shape)).sum();
        MemoryGroup::frozen(parameters, parameters * self.pass.element)
    }

    /// The drafter's decoder layer on the stage that has the drafter.
    fn drafter_layer(&self) -> Option<LayerPass<'w>> {
        self.drafter.layer(&self.pass).filter(|_| self.stage.is_last)
    }

    /// Activations kept between the forward and the backward pass.
    fn activations(&self) -> u64 {
        self.activations_of_backbone() + self.drafter_layer().map_or(0, |layer| layer.allocated(layer.kept()))
    }

    fn activations_of_backbone(&self) -> u64 {
        if !self.is_joint() {
            return 0;
        }
        let (layers, last) = (self.stage.layers as u64, u64::from(self.stage.is_last));
        let input = self.pass.positions() * self.hidden_size() * self.pass.element;
        if self.pass.recompute {
            return self.pass.allocated([(layers + last, input)]);
        }
        let in_layers = self.pass.kept().into_iter().map(|(count, bytes)| (count * layers, bytes));
        self.pass.allocated(in_layers.chain([(last, input)]))
    }

    fn hidden_states(&self) -> u64 {
        let (numbers, LayerPass { element, on_host, .. }) = (self.pass.positions() * self.hidden_size(), self.pass);
        let tapped = self.drafter.taps().layers().len() as u64;
        let gradient = if self.is_joint() { numbers * self.pass.wide() } else { 0 };
        if !self.stage.is_last {
            return self.pass.allocated([(1, numbers * element), (1, gradient)]); // on their way to the next stage and back
        }
        // The output of the drafter's layer and its gradient.
        let own_layer = u64::from(self.drafter_layer().is_some());
        // The next micro batch's are read while the states of this one are used; on a GPU they wait in the memory of the host.
        let read_ahead = u64::from((self.cached || self.loaded.is_some()) && on_host);
        // A server's states before the final norm; their dtype is at most float32.
        let before_norm = u64::from(self.loaded.is_some()) * F32.div_ceil(element);
        let states = (1 + tapped) * (1 + read_ahead + before_norm) + u64::from(self.teachers.for_backbone) + own_layer;
        self.pass.allocated([(states, numbers * element), (1, gradient), (own_layer, numbers * self.pass.wide())])
    }

    /// The largest temporary of a step; `idle` bytes are free while checkpoints are written.
    fn largest_temporary(&self, idle: u64) -> u64 {
        let (drafter, stage) = (self.drafter, self.stage);
        let layers = if self.loaded.is_some() { 0 } else { self.pass.at_once() };
        let own_layer = self.drafter_layer().map_or(0, |layer| layer.at_once());
        let loss = if stage.is_last { drafter.loss_bytes(&self.pass, self.teachers) } else { 0 };
        let trains_lm_head = self.is_joint() && stage.is_last;
        let lm_head = if trains_lm_head { drafter.lm_head_loss_bytes(&self.pass, self.teachers) } else { 0 };
        let saving = self.saving().max(self.gathered_moment()).saturating_sub(idle);
        loss.max(lm_head).max(layers).max(own_layer).max(self.embedding_gradient()).max(saving)
    }

    /// libtorch computes a dense gradient for the embedding of a fully trained backbone.
    fn embedding_gradient(&self) -> u64 {
        let embedding = numel(&self.pass.config.lm_head().size);
        if self.is_direct() && self.stage.is_first { embedding * self.pass.wide() } else { 0 }
    }

    /// Where processes share the moments, a checkpoint gathers them whole in all of them, one after another. On a CPU this is less than
    /// what gloo gathers at another time.
    fn gathered_moment(&self) -> u64 {
        let gathers = !self.pass.on_host && self.world.shares_moments();
        if gathers { self.optimizer.moment_bytes(self.largest_trained(), self.pass.wide()) / 2 } else { 0 }
    }

    /// Numbers of the largest trained tensor.
    fn largest_trained(&self) -> u64 {
        let drafter = if self.stage.is_last { self.drafter.tensors(self.pass.config) } else { vec![] };
        let adapters = self.pass.trained.lora().map_or_else(Vec::new, |lora| self.adapters(lora));
        let backbone = if self.is_direct() { self.stage.largest(self.pass.config) } else { 0 };
        drafter.into_iter().chain(adapters).max().unwrap_or(0).max(backbone)
    }

    /// `final/` stores a trained backbone in its compute dtype: a copy if the master weights have another.
    fn saving(&self) -> u64 {
        let copies = self.is_direct() && self.pass.element != self.pass.wide();
        if copies { self.stage.parameters(self.pass.config) * self.pass.element } else { 0 }
    }
}
