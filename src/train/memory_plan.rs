//! Predicts a run's memory from its shape before anything is loaded. Pure arithmetic; `tests/memory_plan.rs` compares
//! it with measurements.

// L decoder layers, N positions of a micro batch, T positions of a row, H hidden, Q query width, G key/value width, F width of the
// MLP, I inputs and O outputs of a linear layer, V vocabulary, R rank, e bytes of a number in the backbone's dtype
use serde::Serialize;

use crate::draft::medusa::fused_loss::chunk_rows;
use crate::draft::medusa::heads::HeadsShape;
use crate::model::attention::CAPPED_BLOCK;
use crate::model::block_spec::{BlockLinears, LinearSpec, NormKind, NormPlaces, NormSpec};
use crate::model::config::LlamaConfig;
use crate::model::loading::OutputPart;
use crate::model::lora::LoraConfig;
use crate::model::prefix_layer::PrefixLayer;
use crate::model::stored::{Quantization, stored_format};
use crate::torch::accelerator;
use crate::torch::memory::KEPT_BLOCK;
use crate::torch::optim::{OptimizerName, ZeroStage};
use crate::train::plan::BackboneTraining;

/// Bytes of a float32.
const F32: u64 = 4;
/// A run of the smallest model, without libtorch_cuda: libtorch's pages, its threads' memory, compiled products and files. Measured on Linux:
/// 195 to 205 MiB, of which 130 are pages of the program's files.
const PROGRAM: u64 = 195 << 20;
/// glibc's heap leaves holes between freed tensors that aligned ones do not fit into: the tensors that a pass keeps, in
/// blocks that stay in the process (see [`crate::torch::memory::keep_freed_blocks`]), took 1.7 to 1.9 times their size
/// when measured.
const HEAP_HOLES: f64 = 1.75;

/// Where rows have very different lengths, tensors come in many sizes, for which the heap has more holes. Of four small models, measured peaks of
/// Medusa-1 were higher by 26 to 78 % of the temporaries, of which [`PROGRAM`] has a part.
const HOLES_OF_SIZES: f64 = 0.5;

/// How the prefix layer of Hydra++ heads is trained.
static TRAINED_ITSELF: BackboneTraining = BackboneTraining::Full;

/// The shape of a run.
#[derive(Debug, Clone, Copy)]
pub struct Workload<'w> {
    pub config: &'w LlamaConfig,
    /// Bytes per number in the backbone's compute dtype.
    pub element: u64,
    /// Quantization of its linear layers.
    pub quantization: Option<Quantization>,
    pub heads: HeadsShape,
    /// Heads are trained with dropout.
    pub heads_drop: bool,
    pub trained: &'w BackboneTraining,
    /// The part of the backbone that is planned, with what is trained on it.
    pub stage: StageShape,
    /// The LM head teaches the heads.
    pub soft_targets: bool,
    pub optimizer: OptimizerName,
    pub world: WorldPlan,
    /// Keep only the inputs of decoder layers for the backward pass.
    pub recompute: bool,
    /// Rows per micro batch.
    pub rows: u64,
    /// Tokens of the longest row.
    pub length: u64,
    /// Some row has less than half as many tokens as the longest.
    pub unequal: bool,
    /// Some row packs several texts, so attention needs a mask.
    pub masked: bool,
    /// Attention is flash attention, which has no masks.
    pub flash: bool,
    /// The frozen backbone's hidden states are cached on disk.
    pub cached: bool,
    /// The part of the backbone that is loaded for hidden states of a server; `None`: all of it.
    pub loaded: Option<OutputPart>,
    /// Training runs on the CPU, so the program shares the memory and glibc allocates it.
    pub on_host: bool,
}

/// The part of a backbone that lies on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageShape {
    /// Decoder layers.
    pub layers: usize,
    /// Has the embedding.
    pub is_first: bool,
    /// Has the final norm, the LM head, the heads and all losses.
    pub is_last: bool,
}

impl StageShape {
    /// A backbone of so many layers on one device.
    pub fn whole(layers: usize) -> Self {
        Self { layers, is_first: true, is_last: true }
    }

    /// Stages with so many layers each.
    pub fn all(counts: &[usize]) -> Vec<Self> {
        let last = counts.len().saturating_sub(1);
        counts.iter().enumerate().map(|(at, &layers)| Self { layers, is_first: at == 0, is_last: at == last }).collect()
    }
}

/// The processes of a run, of which the plan is for one.
#[derive(Debug, Clone, Copy)]
pub struct WorldPlan {
    /// Processes.
    pub size: usize,
    pub zero_stage: ZeroStage,
}

impl WorldPlan {
    /// A run of one process.
    pub const ALONE: Self = Self { size: 1, zero_stage: ZeroStage::Zero };

    /// Whether each process has only its part of the moments.
    fn shares_moments(self) -> bool {
        self.size > 1 && self.zero_stage == ZeroStage::One
    }

    /// This process's part of all moments, at most: shares are equal up to a block.
    fn share_of(self, bytes: u64) -> u64 {
        if self.shares_moments() { bytes.div_ceil(self.size as u64) } else { bytes }
    }
}

/// The memory of the parameters of the backbone, the heads or the adapters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryGroup {
    /// `backbone`, `heads` or `adapters`.
    pub name: &'static str,
    pub parameters: u64,
    pub trained: bool,
    /// Weights in their dtype or quantized; master weights of trained parameters.
    pub weight_bytes: u64,
    /// 0 for frozen parameters.
    pub gradient_bytes: u64,
    /// The optimizer's moments.
    pub optimizer_bytes: u64,
}

/// A run's memory at its peak; [`MemoryPlan::peak_bytes`] is the sum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Parameters, gradients and moments.
    pub groups: Vec<MemoryGroup>,
    /// Activations kept between the forward and the backward pass of a micro batch.
    pub activation_bytes: u64,
    /// Hidden states, their gradient, and the teacher's hidden states.
    pub hidden_state_bytes: u64,
    /// The largest temporary: a chunk of logits, a layer's gradients, the embedding's gradient, or what processes gather.
    pub working_bytes: u64,
    /// The program itself; 0 on a device with its own memory.
    pub program_bytes: u64,
    /// Processes that train together. The plan is of one of them.
    pub world_size: usize,
    /// What a process sends in an optimizer step; it receives as much. 0 for one process.
    pub sent_bytes: u64,
}

impl MemoryGroup {
    /// Total bytes of the group.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.weight_bytes += other.weight_bytes;
        self.gradient_bytes += other.gradient_bytes;
        self.optimizer_bytes += other.optimizer_bytes;
    }

    /// A frozen backbone.
    fn frozen(parameters: u64, weight_bytes: u64) -> Self {
        Self { name: "backbone", parameters, trained: false, weight_bytes, gradient_bytes: 0, optimizer_bytes: 0 }
    }

    /// Master weights, gradients and moments of tensors of the given sizes.
    fn trained(name: &'static str, tensors: &[u64], work: &Workload) -> Self {
        let parameters: u64 = tensors.iter().sum();
        let optimizer_bytes =
            work.world.share_of(tensors.iter().map(|&numbers| work.optimizer.moment_bytes(numbers, work.wide())).sum());
        let (weight_bytes, gradient_bytes) = (work.wide() * parameters, work.wide() * parameters);
        Self { name, parameters, trained: true, weight_bytes, gradient_bytes, optimizer_bytes }
    }
}

impl MemoryPlan {
    /// Plans a run of this shape.
    pub fn of(work: &Workload) -> Self {
        let mut groups = vec![work.backbone()];
        if work.stage.is_last {
            groups.push(MemoryGroup::trained("heads", &work.of_heads(), work));
        }
        if let Some(lora) = work.trained.lora() {
            groups.push(MemoryGroup::trained("adapters", &work.adapters(lora), work));
        }
        let activation_bytes = work.activations();
        let hidden_state_bytes = work.hidden_states();
        let saving = work.saving().max(work.gathered_moment()).saturating_sub(activation_bytes + hidden_state_bytes);
        let of_prefix = work.prefix_layer().map_or(0, |layer| layer.layer_at_once());
        let phases = [
            if work.stage.is_last { work.logits() } else { 0 },
            work.logits_of_lm_head(),
            work.layer_at_once(),
            of_prefix,
            work.embedding_gradient(),
            saving,
        ];
        let largest = phases.into_iter().max().unwrap_or(0);
        let holes = if work.on_host && work.unequal { scaled(largest + hidden_state_bytes, HOLES_OF_SIZES) } else { 0 };
        let working_bytes = largest + holes + work.gathered_values(&groups);
        let program_bytes = if work.on_host { PROGRAM + accelerator::opened_bytes() } else { 0 };
        let (world_size, sent_bytes) = (work.world.size, sent_bytes(&groups, work));
        Self { groups, activation_bytes, hidden_state_bytes, working_bytes, program_bytes, world_size, sent_bytes }
    }

    /// The predicted peak on the device.
    pub fn peak_bytes(&self) -> u64 {
        let parameters: u64 = self.groups.iter().map(MemoryGroup::bytes).sum();
        parameters + self.activation_bytes + self.hidden_state_bytes + self.working_bytes + self.program_bytes
    }

    /// With another stage on the same device: their temporaries do not exist at the same time.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let working_bytes = self.working_bytes.max(other.working_bytes);
        let program_bytes = self.program_bytes.max(other.program_bytes);
        Self { working_bytes, program_bytes, ..self.beside(other) }
    }

    /// With what is on another device.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        // The last stage has all groups, and in order.
        let [mut all, fewer] = if self.groups.len() < other.groups.len() { [other, self] } else { [self, other] };
        for group in &fewer.groups {
            all.groups.iter_mut().filter(|ours| ours.name == group.name).for_each(|ours| ours.add(group));
        }
        all.activation_bytes += fewer.activation_bytes;
        all.hidden_state_bytes += fewer.hidden_state_bytes;
        all.working_bytes += fewer.working_bytes;
        all.program_bytes += fewer.program_bytes;
        all.sent_bytes += fewer.sent_bytes;
        all
    }
}

/// Tensors that a layer keeps: their count, and the bytes of each.
type KeptTensors = Vec<(u64, u64)>;

impl Workload<'_> {
    /// Bytes of a number in master weights, gradients, moments and losses: see [`crate::torch::wide`].
    fn wide(&self) -> u64 {
        F32.max(self.element)
    }

    fn positions(&self) -> u64 {
        self.rows * self.length
    }

    /// H, Q, G, F, V.
    fn widths(&self) -> [u64; 5] {
        let c = self.config;
        [c.hidden_size, c.query_size(), c.key_value_size(), c.intermediate_size, c.vocab_size].map(i64::unsigned_abs)
    }

    fn query_heads(&self) -> u64 {
        self.config.num_attention_heads.unsigned_abs()
    }

    fn layers(&self) -> u64 {
        self.stage.layers as u64
    }

    fn is_joint(&self) -> bool {
        !self.trained.is_frozen()
    }

    /// The whole backbone is trained.
    fn is_direct(&self) -> bool {
        *self.trained == BackboneTraining::Full
    }

    /// The linear layers of one decoder layer.
    fn linears(&self) -> BlockLinears {
        self.config.block().linears()
    }

    /// Weights in the linear layers of one decoder layer.
    fn in_linears(&self) -> u64 {
        self.linears().all().map(LinearSpec::numel).sum()
    }

    /// The size of each adapter tensor.
    fn adapters(&self, lora: &LoraConfig) -> Vec<u64> {
        let of_layer = self.adapters_of_layer(lora);
        let lm_head = self.stage.is_last.then(|| adapter(self.config.lm_head(), lora));
        (0..self.layers()).flat_map(|_| of_layer.clone()).chain(lm_head.into_iter().flatten()).collect()
    }

    fn adapters_of_layer(&self, lora: &LoraConfig) -> Vec<u64> {
        self.linears().all().flat_map(|linear| adapter(linear, lora)).collect()
    }

    /// Weights of this stage.
    fn parameters(&self) -> u64 {
        let ([h, _, _, _, v], StageShape { is_first, is_last, .. }) = (self.widths(), self.stage);
        let of_layer: i64 = self.config.block().tensors().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
        let embedding = if is_first { v * h } else { 0 };
        let lm_head = if is_last && !self.config.tie_word_embeddings { v * h } else { 0 };
        let norm = if is_last { h } else { 0 };
        embedding + of_layer.unsigned_abs() * self.layers() + norm + lm_head
    }

    /// Weights of a tied LM head that is a copy of the embedding, which lies on another stage.
    fn copied_embedding(&self) -> u64 {
        let ([h, _, _, _, v], StageShape { is_first, is_last, .. }) = (self.widths(), self.stage);
        if self.config.tie_word_embeddings && is_last && !is_first { v * h } else { 0 }
    }

    fn backbone(&self) -> MemoryGroup {
        if let Some(part) = self.loaded {
            return self.backbone_output(part);
        }
        let (parameters, copied) = (self.parameters(), self.copied_embedding());
        if self.is_direct() {
            let in_linears = self.in_linears() * self.layers();
            // 8-bit optimizers keep the moments of norms in float32: less than a page in all.
            let tensors = [in_linears, parameters - in_linears];
            let mut group = MemoryGroup::trained("backbone", &tensors, self);
            group.weight_bytes += self.wide() * copied;
            group.gradient_bytes += self.wide() * copied;
            return group;
        }
        let stored = stored_format(self.quantization, self.element);
        let of_linears: u64 =
            self.linears().all().map(|linear| stored.bytes(linear.size.map(i64::unsigned_abs))).sum();
        let rest = parameters - self.in_linears() * self.layers();
        let weight_bytes = (rest + copied) * self.element + of_linears * self.layers();
        MemoryGroup::frozen(parameters, weight_bytes)
    }

    /// Without decoder layers.
    fn backbone_output(&self, part: OutputPart) -> MemoryGroup {
        let wanted = part.tensors(self.config);
        let tensors = self.config.tensors().into_iter().filter(|(name, _)| wanted.contains(&name.as_str()));
        let parameters = tensors.map(|(_, shape)| shape.iter().product::<i64>().unsigned_abs()).sum();
        let weight_bytes = parameters * self.element;
        MemoryGroup::frozen(parameters, weight_bytes)
    }

    /// The size of each tensor of the heads.
    fn of_heads(&self) -> Vec<u64> {
        let numel = |shape: &[i64]| shape.iter().product::<i64>().unsigned_abs();
        let of_prefix = self.prefix_layer().map(|_| PrefixLayer::tensors(self.config)).into_iter().flatten();
        let tensors = self.heads.tensors().into_iter().chain(of_prefix);
        tensors.map(|(_, shape)| numel(&shape)).collect()
    }

    /// Numbers of the largest trained tensor.
    fn largest_trained(&self) -> u64 {
        let heads = if self.stage.is_last { self.of_heads() } else { vec![] };
        let adapters = self.trained.lora().map_or_else(Vec::new, |lora| self.adapters(lora));
        let backbone = if self.is_direct() { self.largest_of_backbone() } else { 0 };
        heads.into_iter().chain(adapters).max().unwrap_or(0).max(backbone)
    }

    /// Numbers of the largest weight of this stage.
    fn largest_of_backbone(&self) -> u64 {
        let ([h, _, _, _, v], StageShape { is_first, is_last, .. }) = (self.widths(), self.stage);
        let of_layer = self.linears().all().map(LinearSpec::numel).max().unwrap_or(0);
        let has_vocabulary = is_first || (is_last && !self.config.tie_word_embeddings);
        of_layer.max(if has_vocabulary { v * h } else { 0 })
    }

    /// The heads' prefix layer, if they have one, as a layer of a backbone that is trained itself.
    fn prefix_layer(&self) -> Option<Workload<'_>> {
        let alone = Workload { trained: &TRAINED_ITSELF, quantization: None, recompute: false, loaded: None, ..*self };
        (self.stage.is_last && self.heads.architecture.has_prefix()).then_some(alone)
    }

    /// Memory of tensors, given as (count, bytes of each), with the allocator's overhead.
    fn allocated(&self, tensors: impl IntoIterator<Item = (u64, u64)>) -> u64 {
        let of_one = |bytes: u64| if self.on_host && bytes < KEPT_BLOCK { with_holes(bytes) } else { bytes };
        tensors.into_iter().map(|(count, bytes)| count * of_one(bytes)).sum()
    }

    /// Tensors that autograd keeps for one decoder layer, including its input, as in
    /// `model/{decoder_layer,attention,lora}.rs`.
    fn kept_of_layer(&self) -> KeptTensors {
        let (n, e, [h, q, _, f, _]) = (self.positions(), self.element, self.widths());
        // The residual stream before attention and before the MLP; attention's q, k, v and output; the MLP's gate,
        // SiLU(gate) and up.
        let mut kept = vec![(2, n * h * e), (4, n * q * e), (3, n * f * e)];
        kept.extend(self.kept_of_norms());
        // tanh(scores), the softmax in float32, and its cast.
        let scores = self.capped_scores();
        kept.extend(scores.iter().flat_map(|&block| [(2, block * e), (u64::from(e < F32), block * F32)]));
        match self.trained.lora() {
            Some(lora) => kept.extend(self.kept_of_adapters(lora)),
            // Inputs of the linear layers, and of the products with the norms' weights.
            None => kept.extend([(4, n * h * e), (1, n * q * e), (1, n * f * e)]),
        }
        kept.push((1, self.casts_of_layer()));
        kept
    }

    /// Inputs of norms that are not kept for something else, and the float32 copies of those that are computed in it.
    fn kept_of_norms(&self) -> KeptTensors {
        let (n, e, [h, q, g, ..]) = (self.positions(), self.element, self.widths());
        let NormSpec { kind, places, query_key, .. } = self.config.block().norms;
        let wide = u64::from(e < F32 && (kind == NormKind::RmsPlusOne || self.on_host || self.is_direct()));
        let in_stream = if places == NormPlaces::InputsAndOutputs { [2, 4] } else { [0, 2] };
        let query_key = u64::from(query_key.is_some());
        let mut kept = vec![(in_stream[0], n * h * e), (wide * in_stream[1], n * h * F32)];
        kept.extend(
            [q, g].into_iter().flat_map(|width| [(query_key, n * width * e), (query_key * wide, n * width * F32)]),
        );
        kept
    }

    /// The scores of each block of queries of capped attention, which no fused kernel computes.
    fn capped_scores(&self) -> Vec<u64> {
        if self.config.block().heads.softcap.is_none() {
            return vec![];
        }
        let block = CAPPED_BLOCK.unsigned_abs();
        let of_block = |from: u64| {
            let end = self.length.min(from + block);
            self.rows * self.query_heads() * (end - from) * end
        };
        (0..self.length.div_ceil(block)).map(|index| of_block(index * block)).collect()
    }

    /// Masks of capped attention, for each kind of layer.
    fn capped_masks(&self) -> u64 {
        let rows = if self.masked { self.rows } else { 1 };
        let kinds = self.config.layer_kinds().windows().len() as u64;
        self.capped_scores().iter().sum::<u64>() / (self.rows * self.query_heads()).max(1) * rows * kinds * self.element
    }

    /// Masks of packed rows and of windows that cut, for each kind of layer. Flash attention has none, and capped attention its own.
    fn masks(&self) -> u64 {
        if self.config.block().heads.softcap.is_some() || self.flash {
            return 0;
        }
        // On a GPU they are copied into rows that begin at multiples of 16 bytes.
        let copies = if self.on_host { 1 } else { 2 };
        let cuts = |window: &Option<i64>| window.is_some_and(|window| window.unsigned_abs() < self.length);
        let windows = self.config.layer_kinds().windows();
        let [rows, kinds] = if self.masked {
            [self.rows, windows.len() as u64]
        } else {
            [1, windows.iter().filter(|w| cuts(w)).count() as u64]
        };
        copies * rows * kinds * self.length * self.length * self.element
    }

    fn kept_of_adapters(&self, lora: &LoraConfig) -> KeptTensors {
        let (n, e) = (self.positions(), self.element);
        let drops = lora.dropout.get() > 0.0;
        let linears = self.linears();
        let mut kept = vec![];
        // Linear layers with the same input. If all of them have an adapter, they share its dropout.
        for group in linears.groups() {
            let adapted = group.iter().filter(|linear| lora.target_modules.includes(linear.part)).count() as u64;
            let inputs = group[0].size[1].unsigned_abs();
            let reads = if adapted == group.len() as u64 || !drops { adapted.min(1) } else { adapted };
            kept.push((adapted, n * lora.rank.get() as u64 * e));
            // The input after dropout, and the dropout mask: in the input's dtype on the CPU, as booleans elsewhere.
            kept.push((reads, n * inputs * e));
            kept.push((if drops { reads } else { 0 }, n * inputs * if self.on_host { e } else { 1 }));
        }
        kept
    }

    /// Weights that a layer creates for its products and keeps for the backward pass: dequantized, or cast from master
    /// weights.
    fn casts_of_layer(&self) -> u64 {
        let of_adapters = |lora| self.adapters_of_layer(lora).iter().sum::<u64>();
        let cast = self.element < F32;
        let whole = if self.quantization.is_some() || (self.is_direct() && cast) {
            self.in_linears() * self.element
        } else {
            0
        };
        whole + self.trained.lora().filter(|_| cast).map_or(0, |lora| of_adapters(lora) * self.element)
    }

    /// Activations kept between the forward and the backward pass.
    fn activations(&self) -> u64 {
        self.activations_of_backbone() + self.prefix_layer().map_or(0, |layer| layer.allocated(layer.kept_of_layer()))
    }

    fn activations_of_backbone(&self) -> u64 {
        if !self.is_joint() {
            return 0;
        }
        let [h, ..] = self.widths();
        let input = self.positions() * h * self.element;
        if self.recompute {
            return self.allocated([(self.layers() + u64::from(self.stage.is_last), input)]);
        }
        let of_layers = self.kept_of_layer().into_iter().map(|(count, bytes)| (count * self.layers(), bytes));
        self.allocated(of_layers.chain([(u64::from(self.stage.is_last), input)]))
    }

    fn hidden_states(&self) -> u64 {
        let (n, [h, ..]) = (self.positions(), self.widths());
        let teacher = self.trained.has_teacher();
        let gradient = if self.is_joint() { n * h * self.wide() } else { 0 };
        if !self.stage.is_last {
            return self.allocated([(1, n * h * self.element), (1, gradient)]); // on their way to the next stage and back
        }
        // The output of a prefix layer and its gradient.
        let prefix = u64::from(self.heads.architecture.has_prefix());
        // The next micro batch's are read while the states of this one are used; on a GPU they wait in the memory of the host.
        let read_ahead = u64::from((self.cached || self.loaded.is_some()) && self.on_host);
        // A server's states before the final norm; their dtype is at most float32.
        let before_norm = u64::from(self.loaded.is_some()) * F32.div_ceil(self.element);
        let states = 1 + u64::from(teacher) + prefix + read_ahead + before_norm;
        self.allocated([(states, n * h * self.element), (1, gradient), (prefix, n * h * self.wide())])
    }

    /// The largest tensors of one head's loss that exist at the same time.
    fn logits(&self) -> u64 {
        let (n, e, [h, ..], v) = (self.positions(), self.element, self.widths(), self.draft_vocabulary());
        let chunk = chunk_rows(v.cast_signed(), self.on_host).unsigned_abs().clamp(1, n.max(1)) * v;
        let teacher = self.trained.has_teacher() || self.soft_targets;
        // Logits and a comparison with the target's logit; for a teacher also its logits and the logarithm of the
        // ratio.
        let wide = if teacher { 4 } else { 2 };
        let cast = e < F32;
        // The comparison also has a mask of a byte per logit. In 16 bits: the product and the gradient; a GPU stores the product in float32.
        let in_16_bits = if self.on_host { 2 } else { 1 };
        let chunks = [(wide, chunk * self.wide()), (1, chunk), (if cast { in_16_bits } else { 0 }, chunk * e)];
        // Selected states, the blocks' output, its gradient, and the tensors that autograd keeps for a block.
        let layers = self.heads.medusa_num_layers as u64;
        let rows = [(3 + 3 * layers, n * h * e), (if self.heads_drop { 2 * layers } else { 0 }, n * h * e)];
        // The weight that is trained: W2, or the LM head of a backbone that is trained itself.
        let is_trained = self.heads.vocab_size > 0 || self.is_direct();
        let inner = if self.heads.w2_rank > 0 { self.heads.w2_rank.unsigned_abs() } else { h };
        // That weight in the backbone's dtype, and on the CPU its gradient of one chunk before and after the cast.
        let of_chunk = if self.on_host { e + F32 } else { 0 };
        let trained_weight = if is_trained && cast { v * inner * (e + of_chunk) } else { 0 };
        // The teacher's copy of trained weights, or of the rows of a truncated vocabulary.
        let copied = (self.is_direct() && cast) || self.is_truncated();
        let teacher_weight = if self.soft_targets && copied { v * h * e } else { 0 };
        // oneDNN reorders W2, or the teacher's weight, for many rows: measured for 131, but not for 15.
        let widest = if teacher { h } else { inner };
        let reordered = if self.on_host && chunk / v >= 64 { v * widest * e } else { 0 };
        let input = self.input_of_sequential_head();
        self.allocated(chunks.into_iter().chain(rows).chain(input)) + trained_weight + teacher_weight + reordered
    }

    /// Outputs of a head.
    fn draft_vocabulary(&self) -> u64 {
        let [.., v] = self.widths();
        if self.heads.vocab_size > 0 { self.heads.vocab_size.unsigned_abs() } else { v }
    }

    fn is_truncated(&self) -> bool {
        let [.., v] = self.widths();
        self.draft_vocabulary() < v
    }

    /// The largest tensors of the LM head's own loss.
    fn logits_of_lm_head(&self) -> u64 {
        if !self.is_joint() || !self.stage.is_last {
            return 0;
        }
        let whole = HeadsShape { vocab_size: 0, w2_rank: 0, medusa_num_layers: 0, ..self.heads };
        Workload { heads: whole, soft_targets: false, ..*self }.logits()
    }

    /// Of the last head, which reads the most: its input, and the gradients of the two layers that read it.
    fn input_of_sequential_head(&self) -> KeptTensors {
        if !self.heads.architecture.is_sequential() {
            return vec![];
        }
        let (n, e, [h, ..]) = (self.positions(), self.element, self.widths());
        let inputs = self.heads.inputs(self.heads.medusa_num_heads - 1, 0).unsigned_abs();
        // With the dropout mask and what is left, and in Medusa-2 the gradients of both layers' input.
        let copies = 1 + if self.heads_drop { 2 } else { 0 } + if self.is_joint() { 2 } else { 0 };
        let trained = self.wide() + if e < F32 { 2 * e } else { 0 };
        vec![(copies, n * inputs * e), (1, n * (inputs - h) * e), (1, n * h * e), (2, inputs * h * trained)]
    }

    /// Temporaries of one layer: in a forward pass that keeps nothing, and in the backward pass.
    fn layer_at_once(&self) -> u64 {
        if self.loaded.is_some() {
            return 0;
        }
        let passing = self.passing() + self.capped_masks() + self.masks();
        if !self.is_joint() {
            let largest = self.linears().all().map(LinearSpec::numel).max().unwrap_or(0);
            let dequantised = if self.quantization.is_some() { largest * self.element } else { 0 };
            return passing + dequantised;
        }
        let again = if self.recompute { self.allocated(self.kept_of_layer()) } else { 0 };
        let trained: u64 = match self.trained.lora() {
            Some(lora) => self.adapters_of_layer(lora).iter().sum(),
            None => self.in_linears(),
        };
        again + passing + trained * self.wide() + self.casts_of_layer()
    }

    /// Temporaries of attention and of the MLP. They do not exist at the same time, but the allocator rarely finds room for one kind in what
    /// the other leaves.
    fn passing(&self) -> u64 {
        let (n, e, [h, q, _, f, _]) = (self.positions(), self.element, self.widths());
        let scores = self.capped_scores().into_iter().max().unwrap_or(0);
        let capped = [(3, scores * e), (u64::from(e < F32), scores * F32)];
        // A norm's input, quotients and output in float32.
        let wide_norm = if e < F32 && self.config.block().norms.kind == NormKind::RmsPlusOne { 3 } else { 0 };
        let llama = [(2, n * h * e), (3, n * q * e), (3, n * f * e)];
        self.allocated(llama.into_iter().chain(capped).chain([(wide_norm, n * h * F32)]))
    }

    /// libtorch computes a dense gradient for the embedding of a fully trained backbone.
    fn embedding_gradient(&self) -> u64 {
        let [h, _, _, _, v] = self.widths();
        if self.is_direct() && self.stage.is_first { v * h * self.wide() } else { 0 }
    }

    /// Where processes share the moments, gloo gathers the new values of all parameters in a buffer of its own. It is beside what a pass has
    /// freed, since the heap keeps that.
    fn gathered_values(&self, groups: &[MemoryGroup]) -> u64 {
        let gathers = self.on_host && self.world.shares_moments();
        if gathers { groups.iter().map(|group| group.gradient_bytes).sum() } else { 0 }
    }

    /// Where processes share the moments, a checkpoint gathers them whole in all of them, one after another. On a CPU this is less than
    /// [`Workload::gathered_values`], at another time.
    fn gathered_moment(&self) -> u64 {
        let gathers = !self.on_host && self.world.shares_moments();
        if gathers { self.optimizer.moment_bytes(self.largest_trained(), self.wide()) / 2 } else { 0 }
    }

    /// `final/` stores a trained backbone in its compute dtype: a copy if the master weights have another.
    fn saving(&self) -> u64 {
        let copies = self.is_direct() && self.element != self.wide();
        if copies { self.parameters() * self.element } else { 0 }
    }
}

/// Each process sends (W - 1) / W of all gradients around a ring so that they are summed, and as much again so that all processes get the sums
/// or, with ZeRO-1, the updated values. gloo, on a CPU, scatters sums only after all processes got them.
fn sent_bytes(groups: &[MemoryGroup], work: &Workload) -> u64 {
    let WorldPlan { size, zero_stage } = work.world;
    let rounds = if work.on_host && zero_stage == ZeroStage::One { 3 } else { 2 };
    let gradients: u64 = groups.iter().map(|group| group.gradient_bytes).sum();
    rounds * (gradients - gradients / size as u64)
}

/// Sizes of A and B of a layer's adapter; empty if it has none.
fn adapter(LinearSpec { part, size, .. }: LinearSpec, lora: &LoraConfig) -> Vec<u64> {
    let [outputs, inputs] = size.map(|size| lora.rank.get() as u64 * size.unsigned_abs());
    if lora.target_modules.includes(part) { vec![inputs, outputs] } else { vec![] }
}

fn with_holes(bytes: u64) -> u64 {
    scaled(bytes, HEAP_HOLES)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "far below 2^52, and positive")]
fn scaled(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor) as u64
}
