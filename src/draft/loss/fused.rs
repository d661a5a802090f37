//! The losses used in training, fused with the output layer. Positions without a target are dropped first. The others are
//! multiplied with the vocabulary in chunks that yield loss and gradients together, so the logits of K heads, or of a teacher,
//! are never held in memory. The oracle is [`super`].

// N positions, M targets of one head, C targets of one chunk, H hidden, V vocabulary, R rank of the LM head's adapter
use tch::{Device, Kind, Tensor};

use crate::draft::loss::Targets;
use crate::model::block_spec::LogitSpec;
use crate::model::llama::Llama;
use crate::model::logits::{logits_of, slope_of};
use crate::model::lora::{Adapter, Adapters};
use crate::torch::loss_scale::LossScale;
use crate::torch::products::Float32Products;
use crate::torch::{rehearsal, wide};
use crate::tree::cross_validation::TOP_K;

/// Accuracies are counted for the top 1 to the top 5 guesses.
pub const TOP: usize = 5;

/// Rows whose logits over a vocabulary are computed at once. On the CPU: logits of 16 MiB in float32, because blocks of 32 MiB and more are
/// returned to the system whenever they are freed, and zeroed page by page when they are allocated again; but not fewer rows than make up for
/// reading the weights and adding to their gradients. On a GPU: logits of 1 GiB.
pub fn chunk_rows(vocabulary: i64, on_host: bool) -> i64 {
    let [logits, fewest] = if on_host { [4 << 20, 256] } else { [1 << 28, 1] };
    (logits / vocabulary.max(1)).max(fewest)
}

/// Logits that are read twice while they are in a core's cache: 256 KiB in float32.
const CACHED_LOGITS: i64 = 1 << 16;

/// Scale of the logits' gradients in float16. They are differences of two distributions, so the absolute values of a row sum to at most 2:
/// products with weights below 31 cannot overflow, and gradients above 6e-11 do not vanish.
const DLOGITS_SCALE: f64 = 1024.0;

/// Losses and hits of one head on one micro batch; on the device until read.
#[derive(Debug)]
pub struct LevelSums {
    /// Summed cross-entropy of the labels, float64 scalar.
    pub loss: Tensor,
    /// Summed divergence from the LM head, float64 scalar; 0 without soft targets.
    pub divergence: Tensor,
    /// `[TOP]` int64: how often the target was among the first 1, 2, … guesses. Among equal logits the lower token comes first.
    pub hits: Tensor,
    /// `[M]` float32: see [`ranks`]; exact below [`TOP`], without gradients below [`TOP_K`].
    pub ranks_m: Tensor,
}

impl LevelSums {
    /// Zero sums.
    pub fn zero(device: Device) -> Self {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let scalar = || zeros(&[], Kind::Double);
        Self {
            loss: scalar(),
            divergence: scalar(),
            hits: zeros(&[TOP as i64], Kind::Int64),
            ranks_m: zeros(&[0], Kind::Float),
        }
    }

    /// Adds the losses and hits of another chunk or micro batch.
    pub fn add(&mut self, other: &Self) {
        self.loss += &other.loss;
        self.divergence += &other.divergence;
        self.hits += &other.hits;
    }
}

/// The layers between the hidden states and the output layer of one level.
pub trait LevelBlocks {
    /// Those that are trained, in the order of [`LevelGradients::blocks`].
    fn parameters(&self) -> Vec<&Tensor>;

    /// The input of the output layer, `[M, H]` (`[M, R]` of a low-rank one), from the hidden states `[M, H]` of the targets. With autograd.
    fn forward(&self, selected_mh: &Tensor, targets: &Targets) -> Tensor;
}

/// The layer that computes logits from hidden states: a drafter's own, or the LM head.
#[derive(Debug, Clone, Copy)]
pub struct OutputLayer<'m> {
    weight_vh: &'m Tensor,
    bias_v: Option<&'m Tensor>,
    adapter: Option<(&'m Adapter, Adapters)>,
    logits: LogitSpec,
    /// The tokens that have logits, `[N]` int64; `None` for all.
    tokens_n: Option<&'m Tensor>,
    products: Float32Products,
}

impl<'m> OutputLayer<'m> {
    /// A weight `[V, H]` without an adapter.
    pub fn plain(weight_vh: &'m Tensor) -> Self {
        let products = Float32Products::on(weight_vh.device());
        Self { weight_vh, bias_v: None, adapter: None, logits: LogitSpec::default(), tokens_n: None, products }
    }

    /// The same layer with a bias `[V]`, if there is one, and this way from products to logits.
    #[must_use]
    pub fn with(self, bias_v: Option<&'m Tensor>, logits: LogitSpec) -> Self {
        Self { bias_v, logits, ..self }
    }

    /// The LM head, with or without its adapter.
    ///
    /// # Panics
    /// If the layer is packed for decoding.
    pub fn lm_head(backbone: &'m Llama, adapters: Adapters) -> Self {
        let lm_head = backbone.lm_head();
        let weight_vh = lm_head.dense_weight().expect("a backbone loaded for training has a plain lm_head");
        let adapter = lm_head.adapter().filter(|_| adapters != Adapters::Off);
        let adapter = adapter.map(|adapter| (adapter, adapters));
        Self { adapter, logits: backbone.config.family.logits, ..Self::plain(weight_vh) }
    }

    /// The same layer, as a teacher with the logits of these tokens only.
    #[must_use]
    pub fn with_tokens(self, tokens_n: Option<&'m Tensor>) -> Self {
        Self { tokens_n, ..self }
    }

    /// `[C, V]`, float32 (float64 of float64), of its inputs `[C, H]` and, for the adapter's B, `[C, R]`.
    fn logits(&self, weights: &CastWeights, x_ch: &Tensor, down_cr: Option<&Tensor>) -> Tensor {
        let adapted = down_cr.zip(weights.b_vr.as_ref()).map(|(down_cr, b_vr)| [down_cr, b_vr]);
        let mut logits_cv = self.products.linear([x_ch, &weights.weight_vh], adapted);
        if let Some(bias_v) = &weights.bias_v {
            logits_cv += bias_v;
        }
        logits_of(logits_cv, self.logits)
    }
}

/// Accumulators for the gradients of an [`OutputLayer`]; `None` if frozen.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputGradients<'g> {
    /// `[V, H]`.
    pub weight_vh: Option<&'g Tensor>,
    /// `[V]`.
    pub bias_v: Option<&'g Tensor>,
    /// A `[R, H]` and B `[V, R]`.
    pub adapter: Option<[&'g Tensor; 2]>,
}

/// Accumulators for the gradients of one loss, all in the dtype of the master weights.
#[derive(Debug)]
pub struct LevelGradients<'g> {
    /// In the order of [`LevelBlocks::parameters`]; empty for the LM head.
    pub blocks: Vec<&'g Tensor>,
    pub output: OutputGradients<'g>,
    /// Hidden states, `[N, H]`; `None` if the backbone is frozen.
    pub hidden_nh: Option<&'g Tensor>,
}

/// Loss and hits of one head, or of the LM head, which has no blocks. If `gradients` is given, adds the gradients, multiplied by
/// its scale (λ0·λk ÷ targets of the whole optimizer step).
/// - `output`: the head's own W2 or the backbone's lm_head
/// - `hidden_nh`: `[N, H]`, after the final norm, in the backbone's dtype, without autograd
pub fn level_loss(
    blocks: Option<&dyn LevelBlocks>,
    output: OutputLayer,
    hidden_nh: &Tensor,
    targets: &Targets,
    gradients: Option<(&LevelGradients, f64)>,
) -> LevelSums {
    let parameters = blocks.map_or_else(Vec::new, LevelBlocks::parameters);
    let projection = Projection::new(blocks, output, hidden_nh, targets, gradients);
    let sums = tch::no_grad(|| projection.cross_entropy(&targets.tokens_m, gradients));
    projection.backward(&parameters, gradients);
    sums
}

/// Self-distillation (paper section 2.3.2): KL(teacher ‖ student) of the LM head at temperature 1, summed over the positions that
/// predict a target, a float64 scalar. `teacher_nh` are the hidden states of the same tokens without adapters; the teacher's LM
/// head has no adapter either.
pub fn distillation_loss(
    output: OutputLayer,
    [hidden_nh, teacher_nh]: [&Tensor; 2],
    targets: &Targets,
    gradients: Option<(&LevelGradients, f64)>,
) -> Tensor {
    let projection = Projection::new(None, output, hidden_nh, targets, gradients);
    let teacher_mh = teacher_nh.index_select(0, &padded(&targets.positions_m));
    let loss = tch::no_grad(|| projection.divergence(&teacher_mh, gradients));
    projection.backward(&[], gradients);
    loss
}

/// Inputs of the product with the vocabulary, and their gradients.
struct Projection<'m> {
    output: OutputLayer<'m>,
    /// Rows that are targets; the others are padding, which has no loss and no gradient.
    counted: i64,
    /// `[M]`.
    positions_m: Tensor,
    /// `[M, H]`, hidden states of the backbone.
    selected_mh: Tensor,
    /// `[M, H]`, the input of the weight.
    x_mh: Tensor,
    /// `[M, R]`, the input of the adapter's B.
    down_mr: Option<Tensor>,
    /// Float32 if `x_mh` is float16, where it would underflow.
    dx_mh: Tensor,
    ddown_mr: Option<Tensor>,
}

impl<'m> Projection<'m> {
    /// Runs `blocks`, if there are any; with autograd if gradients are wanted, which includes the hidden states if theirs is.
    fn new(
        blocks: Option<&dyn LevelBlocks>,
        output: OutputLayer<'m>,
        hidden_nh: &Tensor,
        targets: &Targets,
        gradients: Option<(&LevelGradients, f64)>,
    ) -> Self {
        let counted = targets.positions_m.size()[0];
        let targets = Targets {
            positions_m: padded(&targets.positions_m),
            tokens_m: targets.tokens_m.shallow_clone(),
            previous_mj: targets.previous_mj.as_ref().map(padded),
        };
        let selected_mh = hidden_nh.index_select(0, &targets.positions_m);
        let to_hidden = gradients.is_some_and(|(gradients, _)| gradients.hidden_nh.is_some());
        let selected_mh = if to_hidden { selected_mh.set_requires_grad(true) } else { selected_mh };
        let through = || {
            let x_mh =
                blocks.map_or_else(|| selected_mh.shallow_clone(), |blocks| blocks.forward(&selected_mh, &targets));
            let down_mr = output.adapter.map(|(adapter, adapters)| adapter.down(&x_mh, adapters));
            (x_mh, down_mr)
        };
        let (x_mh, down_mr) = if gradients.is_some() { through() } else { tch::no_grad(through) };
        let kind = if x_mh.kind() == Kind::Half { Kind::Float } else { x_mh.kind() };
        let zeros = |tensor: &Tensor| Tensor::zeros(tensor.size(), (kind, tensor.device()));
        let (dx_mh, ddown_mr) = (zeros(&x_mh), down_mr.as_ref().map(zeros));
        Self { output, counted, positions_m: targets.positions_m, selected_mh, x_mh, down_mr, dx_mh, ddown_mr }
    }

    fn cross_entropy(&self, tokens_m: &Tensor, gradients: Option<(&LevelGradients, f64)>) -> LevelSums {
        let mut sums = LevelSums::zero(self.x_mh.device());
        let (tokens_m, mut ranks) = (padded(tokens_m), vec![]);
        let top = exact_ranks(gradients.is_some());
        self.for_each_chunk(|chunk, weights| {
            let logits_cv = chunk.logits(weights);
            let slope = gradients.map(|_| slope_of(&logits_cv, self.output.logits));
            let softmax = CrossEntropy::new(logits_cv, &chunk.rows(&tokens_m).unsqueeze(1), top);
            let rank_c = chunk.counted(&softmax.labels.rank_c);
            let _ = sums.loss.shallow_clone().g_add_(&chunk.counted(&softmax.losses()).sum(Kind::Double));
            let _ = sums.hits.shallow_clone().g_add_(&hits(&rank_c));
            ranks.push(rank_c);
            if let (Some((gradients, scale)), Some(slope)) = (gradients, slope) {
                chunk.backward(&slope.times(softmax.dlogits()), weights, &gradients.output, scale);
            }
        });
        if !ranks.is_empty() {
            sums.ranks_m = Tensor::cat(&ranks, 0);
        }
        sums
    }

    fn divergence(&self, teacher_mh: &Tensor, gradients: Option<(&LevelGradients, f64)>) -> Tensor {
        let loss = Tensor::zeros([], (Kind::Double, self.x_mh.device()));
        self.for_each_chunk(|chunk, weights| {
            let teacher_cv = self.output.logits(weights, &chunk.rows(teacher_mh), None);
            let logits_cv = chunk.logits(weights);
            let slope = gradients.map(|_| slope_of(&logits_cv, self.output.logits));
            let divergence = Divergence::new(logits_cv, teacher_cv);
            let _ = loss.shallow_clone().g_add_(&chunk.counted(&divergence.losses_c).sum(Kind::Double));
            if let (Some((gradients, scale)), Some(slope)) = (gradients, slope) {
                chunk.backward(&slope.times(divergence.dlogits()), weights, &gradients.output, scale);
            }
        });
        loss
    }

    fn for_each_chunk(&self, mut work: impl FnMut(&Chunk, &CastWeights)) {
        let (rows, v) = (self.x_mh.size()[0], self.output.weight_vh.size()[0]);
        let weights = CastWeights::new(&self.output, self.x_mh.kind());
        let count = chunk_rows(v, self.x_mh.device() == Device::Cpu);
        for from in (0..self.counted).step_by(usize::try_from(count).expect("a chunk is above 0")) {
            work(&Chunk { of: self, from, count: count.min(rows - from) }, &weights);
        }
    }

    /// Backpropagates through everything before the product: the blocks, the adapter's A, and down to the hidden states.
    fn backward(self, blocks: &[&Tensor], gradients: Option<(&LevelGradients, f64)>) {
        let Some((gradients, _)) = gradients else { return };
        let mut trained: Vec<(&Tensor, &Tensor)> =
            blocks.iter().copied().zip(gradients.blocks.iter().copied()).collect();
        if let (Some((adapter, _)), Some([da_rh, _])) = (self.output.adapter, gradients.output.adapter) {
            trained.push((adapter.parameters()[0], da_rh));
        }
        let mut inputs: Vec<&Tensor> = trained.iter().map(|(value, _)| *value).collect();
        inputs.extend(gradients.hidden_nh.map(|_| &self.selected_mh));
        if inputs.is_empty() {
            return;
        }
        let scale = self.loss_scale();
        // tch cannot start a backward pass from a given output gradient dx, but the gradient of Σ x·dx with respect to x is dx.
        let kind = wide(self.x_mh.kind());
        let mut surrogate = (&self.x_mh * scale.cast(&self.dx_mh)).sum(kind);
        if let (Some(down_mr), Some(ddown_mr)) = (&self.down_mr, &self.ddown_mr) {
            surrogate += (down_mr * scale.cast(ddown_mr)).sum(kind);
        }
        let by_input = Tensor::run_backward(&[surrogate], &inputs, false, false);
        let mut by_input = by_input.into_iter().map(|gradient| scale.undo(gradient));
        for ((_, sum), gradient) in trained.iter().zip(&mut by_input) {
            let _ = sum.shallow_clone().g_add_(&gradient.to_kind(sum.kind()));
        }
        if let (Some(dhidden_nh), Some(gradient_mh)) = (gradients.hidden_nh, by_input.next()) {
            let gradient_mh = gradient_mh.to_kind(dhidden_nh.kind());
            let _ = dhidden_nh.shallow_clone().index_add_(0, &self.positions_m, &gradient_mh);
        }
    }

    /// For the backward pass through the blocks, whose gradients are sums over the rows.
    fn loss_scale(&self) -> LossScale {
        let all: Vec<&Tensor> = [&self.dx_mh].into_iter().chain(&self.ddown_mr).collect();
        LossScale::for_sums(self.x_mh.kind(), &all, self.x_mh.size()[0], &self.x_mh)
    }
}

/// Weights of an [`OutputLayer`] in the dtype of the product, cast once for all chunks.
struct CastWeights {
    weight_vh: Tensor,
    /// In the products' dtype: it is added to them.
    bias_v: Option<Tensor>,
    b_vr: Option<Tensor>,
}

impl CastWeights {
    fn new(output: &OutputLayer, kind: Kind) -> Self {
        let rows = |weight: &Tensor| {
            output.tokens_n.map_or(weight.shallow_clone(), |tokens_n| weight.index_select(0, tokens_n))
        };
        let b_vr = output.adapter.map(|(adapter, _)| rows(adapter.b()).to_kind(kind));
        let bias_v = output.bias_v.map(|bias_v| bias_v.to_kind(wide(kind)));
        Self { weight_vh: rows(output.weight_vh).to_kind(kind), bias_v, b_vr }
    }
}

/// A range of rows of a [`Projection`].
struct Chunk<'p> {
    of: &'p Projection<'p>,
    from: i64,
    count: i64,
}

impl Chunk<'_> {
    fn rows(&self, x_m: &Tensor) -> Tensor {
        x_m.narrow(0, self.from, self.count)
    }

    /// Without padding.
    fn counted(&self, x_c: &Tensor) -> Tensor {
        let counted = self.of.counted - self.from;
        if counted < self.count { x_c.narrow(0, 0, counted) } else { x_c.shallow_clone() }
    }

    /// `[C, V]`, as of [`OutputLayer::logits`].
    fn logits(&self, weights: &CastWeights) -> Tensor {
        let down_cr = self.of.down_mr.as_ref().map(|down_mr| self.rows(down_mr));
        self.of.output.logits(weights, &self.rows(&self.of.x_mh), down_cr.as_ref())
    }

    /// From the gradient of the products `[C, V]`, which this overwrites where it is padding.
    fn backward(&self, dlogits_cv: &Tensor, weights: &CastWeights, into: &OutputGradients, scale: f64) {
        let counted = self.of.counted - self.from;
        if counted < self.count {
            let _ = dlogits_cv.narrow(0, counted, self.count - counted).zero_();
        }
        let x_ch = self.rows(&self.of.x_mh);
        if let Some(dbias_v) = into.bias_v {
            let _ = dbias_v.shallow_clone().g_add_(&(dlogits_cv.sum_dim_intlist(0, false, dlogits_cv.kind()) * scale));
        }
        let logits_scale = LossScale::fixed(x_ch.kind(), DLOGITS_SCALE, dlogits_cv);
        let dlogits_cv = logits_scale.cast(dlogits_cv);
        let through = |weight: &Tensor| logits_scale.undo(dlogits_cv.matmul(weight)) * scale;
        let products = self.of.output.products;
        let add_to = |sum: &Tensor, input: &Tensor| match input.kind() {
            Kind::Half => add_scaled_product(products, sum, (&dlogits_cv.tr(), &logits_scale), input, scale),
            _ => products.add(sum, &dlogits_cv.tr(), &(input * scale)),
        };
        self.rows(&self.of.dx_mh).copy_(&through(&weights.weight_vh));
        if let Some(dw_vh) = into.weight_vh {
            add_to(dw_vh, &x_ch);
        }
        if let (Some(down_mr), Some(ddown_mr), Some(b_vr)) = (&self.of.down_mr, &self.of.ddown_mr, &weights.b_vr) {
            self.rows(ddown_mr).copy_(&through(b_vr));
            if let Some([_, db_vr]) = into.adapter {
                add_to(db_vr, &self.rows(down_mr));
            }
        }
    }
}

/// Softmax of one chunk's logits, with the targets.
struct CrossEntropy {
    /// `[C, V]`.
    probabilities_cv: Tensor,
    log_sum_c1: Tensor,
    labels: Labels,
}

impl CrossEntropy {
    fn new(logits_cv: Tensor, tokens_c1: &Tensor, top: usize) -> Self {
        let labels = Labels::new(&logits_cv, tokens_c1, top);
        let (probabilities_cv, log_sum_c1) = softmax(logits_cv);
        Self { probabilities_cv, log_sum_c1, labels }
    }

    /// `[C, 1]`.
    fn losses(&self) -> Tensor {
        self.labels.losses(&self.log_sum_c1)
    }

    /// d loss / d logits = probabilities - one-hot of the target.
    fn dlogits(mut self) -> Tensor {
        let minus_one_c1 = Tensor::full_like(&self.log_sum_c1, -1.0);
        self.probabilities_cv.scatter_add_(1, &self.labels.tokens_c1, &minus_one_c1)
    }
}

/// Ranks below this are exact.
fn exact_ranks(in_training: bool) -> usize {
    if in_training { TOP } else { TOP_K.max(TOP) }
}

/// The target of each row, and what its logit says about it.
struct Labels {
    tokens_c1: Tensor,
    logits_c1: Tensor,
    /// `[C]`, float32: see [`ranks`].
    rank_c: Tensor,
}

impl Labels {
    fn new(logits_cv: &Tensor, tokens_c1: &Tensor, top: usize) -> Self {
        let target_c1 = logits_cv.gather(1, tokens_c1, false);
        let rank_c = ranks(logits_cv, &target_c1, tokens_c1, top);
        Self { tokens_c1: tokens_c1.shallow_clone(), logits_c1: target_c1, rank_c }
    }

    /// Cross-entropy of each target, `[C, 1]`.
    fn losses(&self, log_sum_c1: &Tensor) -> Tensor {
        log_sum_c1 - &self.logits_c1
    }
}

/// How many ranks are below 1, 2, … [`TOP`].
fn hits(rank_c: &Tensor) -> Tensor {
    let guesses = Tensor::arange(TOP as i64, (Kind::Int64, rank_c.device()));
    rank_c.unsqueeze(1).le_tensor(&guesses).sum_dim_intlist(0, false, Kind::Int64)
}

/// KL(teacher ‖ student) of one chunk's logits.
struct Divergence {
    /// `[C]`.
    losses_c: Tensor,
    /// Probabilities `[C, V]`.
    student_cv: Tensor,
    teacher_cv: Tensor,
    student_log_sum_c1: Tensor,
}

impl Divergence {
    fn new(student_cv: Tensor, teacher_cv: Tensor) -> Self {
        let mut log_ratio_cv = &teacher_cv - &student_cv;
        let (student_cv, student_log_sum_c1) = softmax(student_cv);
        let (teacher_cv, teacher_log_sum_c1) = softmax(teacher_cv);
        log_ratio_cv -= teacher_log_sum_c1 - &student_log_sum_c1;
        let kl_cv = log_ratio_cv.g_mul_(&teacher_cv);
        let losses_c = kl_cv.sum_dim_intlist(1, false, kl_cv.kind());
        Self { losses_c, student_cv, teacher_cv, student_log_sum_c1 }
    }

    /// d loss / d logits of the student = student - teacher probabilities.
    fn dlogits(mut self) -> Tensor {
        self.student_cv -= self.teacher_cv;
        self.student_cv
    }
}

/// Probabilities, computed in place of the logits `[C, V]`, and log Σ exp(logits), `[C, 1]`.
fn softmax(logits_cv: Tensor) -> (Tensor, Tensor) {
    let largest_c1 = logits_cv.amax(1, true);
    let probabilities_cv = logits_cv.internal_softmax_out(&logits_cv, 1, false); // each row is read before it is written
    // log Σ exp(logits) = largest logit - log of its probability, which is at least 1/V and cannot underflow.
    let log_sum_c1 = largest_c1 - probabilities_cv.amax(1, true).log();
    (probabilities_cv, log_sum_c1)
}

/// Rank of each row's target among its logits, `[C]` float32, 0 for the best guess; exact below `top`, and at least `top` elsewhere. Among
/// equal logits, which are common after rounding to 16 bits, the lower token comes first, as in argmax.
pub fn ranks(logits_cv: &Tensor, target_c1: &Tensor, tokens_c1: &Tensor, top: usize) -> Tensor {
    if rehearsal::is_gpu(logits_cv.device()) {
        return ranks_of_all(logits_cv, target_c1, tokens_c1); // reading which targets are tied would wait for the device
    }
    let [above_c, at_or_above_c] = counts(logits_cv, target_c1);
    let is_tied = at_or_above_c.gt_tensor(&(&above_c + 1)).logical_and(&above_c.lt(top as f64));
    let tied = is_tied.nonzero().squeeze_dim(1);
    if tied.numel() == 0 {
        return above_c;
    }
    let [logits, target, tokens] = [logits_cv, target_c1, tokens_c1].map(|x| x.index_select(0, &tied));
    above_c.index_copy(0, &tied, &ranks_of_all(&logits, &target, &tokens))
}

/// How many logits of each row are above its target's, and how many are at least that; `[C]` each. Counted in float32: summing booleans is
/// ten times slower.
fn counts(logits_cv: &Tensor, target_c1: &Tensor) -> [Tensor; 2] {
    let rows = (CACHED_LOGITS / logits_cv.size()[1]).max(1);
    let split_counts = |(logits, target): (Tensor, Tensor)| {
        let mask = logits.empty_like();
        let count = |mask: Tensor| mask.sum_dim_intlist(1, false, Kind::Float);
        [count(logits.gt_tensor_out(&mask, &target)), count(logits.ge_tensor_out(&mask, &target))]
    };
    let counts: Vec<_> = logits_cv.split(rows, 0).into_iter().zip(target_c1.split(rows, 0)).map(split_counts).collect();
    [0, 1].map(|which| Tensor::cat(&counts.iter().map(|count| &count[which]).collect::<Vec<_>>(), 0))
}

/// The oracle of [`ranks`], exact everywhere.
fn ranks_of_all(logits_cv: &Tensor, target_c1: &Tensor, tokens_c1: &Tensor) -> Tensor {
    // A lower token comes first also with an equal logit, which is above the next smaller number.
    let below_c1 = target_c1.nextafter(&Tensor::full_like(target_c1, f64::NEG_INFINITY));
    let tokens_v = Tensor::arange(logits_cv.size()[1], (Kind::Int64, logits_cv.device()));
    let threshold_cv = below_c1.where_self(&tokens_v.lt_tensor(tokens_c1), target_c1);
    logits_cv.gt_tensor_out(&threshold_cv, &threshold_cv).sum_dim_intlist(1, false, Kind::Float)
}

/// `sum += scale·a·b` in float16: the product cannot overflow, and `scale` is applied in float32.
fn add_scaled_product(
    products: Float32Products,
    sum: &Tensor,
    (a_vc, a_scale): (&Tensor, &LossScale),
    b_ch: &Tensor,
    scale: f64,
) {
    let largest_a = Tensor::from(DLOGITS_SCALE as f32);
    let b_scale = LossScale::for_sums(Kind::Half, &[b_ch], b_ch.size()[0], &largest_a);
    let product = b_scale.undo(a_scale.undo(products.of(a_vc, &b_scale.cast(b_ch))));
    let _ = sum.shallow_clone().g_add_(&(product * scale));
}

mod padding;
mod soft;
use padding::padded;
pub use soft::{SoftObjective, soft_level_loss};

#[cfg(test)]
mod tests;
