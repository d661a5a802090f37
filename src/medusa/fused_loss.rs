//! The head loss as it trains. Positions without a target are dropped before the W2 product; the rest goes through in chunks
//! that yield loss and gradients together, so the logits of K heads are never in memory. `loss` is its oracle.

// N positions, M targets of one head, C targets of one chunk, H hidden, V vocabulary
use tch::{Kind, Tensor};

use crate::medusa::heads::Head;
use crate::medusa::loss::Targets;
use crate::torch::onednn;

/// Guesses whose accuracy is counted: top-1 … top-5.
pub const TOP: usize = 5;

/// Logits of one chunk, at most this many: 16 MiB in float32. Blocks of 32 MiB and more are returned to the system each time
/// they are freed, and cleared page by page when they come back.
const CHUNK_LOGITS: i64 = 4 << 20;

/// What one head did on one micro batch; on the device until it is read.
#[derive(Debug)]
pub struct HeadSums {
    /// Summed cross-entropy, float64 scalar.
    pub loss: Tensor,
    /// `[TOP]` int64: how often the target was among the first 1, 2, … guesses. A tie with the target counts for it.
    pub hits: Tensor,
}

/// Where the gradients of one head go; all float32, added to.
#[derive(Debug)]
pub struct HeadGradients<'g> {
    /// Of W1 and b1 of every block, in the order of [`Head::block_parameters`].
    pub blocks: Vec<&'g Tensor>,
    /// Of W2 `[V, H]`; absent where the head goes through the backbone's frozen lm_head.
    pub w2: Option<&'g Tensor>,
}

/// Loss and hits of one head, and, where `gradients` are wanted, their gradients times `scale` (λk ÷ targets of the whole
/// optimizer step) added to them.
/// - `hidden_nh`: `[N, H]`, after the final norm, in the backbone's dtype, without autograd
/// - `w2_vh`: `[V, H]`, the head's own W2 or the backbone's lm_head
pub fn head_loss(
    head: &Head,
    w2_vh: &Tensor,
    hidden_nh: &Tensor,
    targets: &Targets,
    gradients: Option<(&HeadGradients, f64)>,
) -> HeadSums {
    let selected_mh = hidden_nh.index_select(0, &targets.positions_m);
    let Some((gradients, scale)) = gradients else {
        let x_mh = tch::no_grad(|| head.hidden(&selected_mh));
        return tch::no_grad(|| vocabulary_loss(&x_mh, w2_vh, &targets.tokens_m, None));
    };
    let x_mh = head.hidden(&selected_mh);
    let dx_mh = x_mh.zeros_like().set_requires_grad(false);
    let into = IntoGradients { dx_mh: &dx_mh, dw2_vh: gradients.w2, scale };
    let sums = tch::no_grad(|| vocabulary_loss(&x_mh.detach(), w2_vh, &targets.tokens_m, Some(&into)));
    // tch has no backward with a given output gradient: that of Σ x·dx is dx.
    let surrogate = (&x_mh * &dx_mh).sum(Kind::Float);
    let of_blocks = Tensor::run_backward(&[surrogate], &head.block_parameters(), false, false);
    for (sum, gradient) in gradients.blocks.iter().zip(&of_blocks) {
        let _ = sum.shallow_clone().g_add_(&gradient.to_kind(Kind::Float));
    }
    sums
}

/// Where the gradients of the product with W2 go.
struct IntoGradients<'g> {
    /// `[M, H]`, overwritten.
    dx_mh: &'g Tensor,
    /// `[V, H]` float32, added to.
    dw2_vh: Option<&'g Tensor>,
    scale: f64,
}

fn vocabulary_loss(x_mh: &Tensor, w2_vh: &Tensor, tokens_m: &Tensor, into: Option<&IntoGradients>) -> HeadSums {
    let (m, v) = (x_mh.size()[0], w2_vh.size()[0]);
    let w2_vh = w2_vh.to_kind(x_mh.kind());
    let loss = Tensor::zeros([], (Kind::Double, x_mh.device()));
    let hits = Tensor::zeros([TOP as i64], (Kind::Int64, x_mh.device()));
    let chunk = (CHUNK_LOGITS / v).max(1);
    for from in (0..m).step_by(usize::try_from(chunk).expect("a chunk is above 0")) {
        let c = chunk.min(m - from);
        let (x_ch, tokens_c1) = (x_mh.narrow(0, from, c), tokens_m.narrow(0, from, c).unsqueeze(1));
        let chunk = Chunk::forward(&x_ch, &w2_vh, &tokens_c1);
        let _ = loss.shallow_clone().g_add_(&chunk.loss());
        let _ = hits.shallow_clone().g_add_(&chunk.hits());
        if let Some(into) = into {
            chunk.backward(&x_ch, &w2_vh, into, from);
        }
    }
    HeadSums { loss, hits }
}

/// Softmax of one chunk's logits.
struct Chunk {
    /// `[C, V]`, float32.
    probabilities_cv: Tensor,
    tokens_c1: Tensor,
    /// `[C, 1]`, cross-entropy of each target.
    losses_c1: Tensor,
    /// `[C]`, float32: how many logits are above the target's.
    rank_c: Tensor,
}

impl Chunk {
    fn forward(x_ch: &Tensor, w2_vh: &Tensor, tokens_c1: &Tensor) -> Self {
        let logits_cv = onednn::linear(x_ch, w2_vh).to_kind(Kind::Float);
        let target_c1 = logits_cv.gather(1, tokens_c1, false);
        let rank_c = count_above(&logits_cv, &target_c1);
        let largest_c1 = logits_cv.amax(1, true);
        let probabilities_cv = logits_cv.internal_softmax_out(&logits_cv, 1, false); // in place: each row is read before it is written
        // log Σ exp(logits) = largest logit - log of its probability, which never underflows: it is at least 1/V.
        let log_sum_c1 = &largest_c1 - probabilities_cv.amax(1, true).log();
        Self { probabilities_cv, tokens_c1: tokens_c1.shallow_clone(), losses_c1: log_sum_c1 - target_c1, rank_c }
    }

    fn loss(&self) -> Tensor {
        self.losses_c1.sum(Kind::Double)
    }

    fn hits(&self) -> Tensor {
        let guesses = Tensor::arange(TOP as i64, (Kind::Int64, self.rank_c.device()));
        self.rank_c.unsqueeze(1).le_tensor(&guesses).sum_dim_intlist(0, false, Kind::Int64)
    }

    /// d loss / d logits = probabilities - one-hot of the target.
    fn backward(mut self, x_ch: &Tensor, w2_vh: &Tensor, into: &IntoGradients, from: i64) {
        let minus_one_c1 = Tensor::full_like(&self.losses_c1, -1.0);
        let dlogits_cv = self.probabilities_cv.scatter_add_(1, &self.tokens_c1, &minus_one_c1).to_kind(x_ch.kind());
        let dx_ch = dlogits_cv.matmul(w2_vh) * into.scale;
        into.dx_mh.narrow(0, from, dx_ch.size()[0]).copy_(&dx_ch);
        if let Some(dw2_vh) = into.dw2_vh {
            add_product(dw2_vh, &dlogits_cv.tr(), &(x_ch * into.scale));
        }
    }
}

/// How many logits of each row are above the target's, `[C]`. Counted in float32: a sum of booleans is ten times slower.
fn count_above(logits_cv: &Tensor, target_c1: &Tensor) -> Tensor {
    let above_cv = logits_cv.empty_like();
    let _ = logits_cv.gt_tensor_out(&above_cv, target_c1);
    above_cv.sum_dim_intlist(1, false, Kind::Float)
}

/// `sum += a·b`, in float32 whatever the factors' dtype.
fn add_product(sum: &Tensor, a: &Tensor, b: &Tensor) {
    let mut sum = sum.shallow_clone();
    let _ = if a.kind() == sum.kind() { sum.addmm_(a, b) } else { sum.g_add_(&a.matmul(b).to_kind(Kind::Float)) };
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tch::Device;

    use super::*;
    use crate::medusa::heads::{Heads, HeadsConfig};
    use crate::medusa::loss::cross_entropy_sum;
    use crate::model::config::{LlamaConfig, RopeScaling};
    use crate::model::llama::Llama;

    fn backbone() -> Llama {
        let config = LlamaConfig {
            model_type: "llama".into(),
            hidden_size: 24,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 12,
            vocab_size: 40_000,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            sliding_window: None,
            tie_word_embeddings: true,
            attention_bias: false,
            mlp_bias: false,
            bos_token_id: None,
            eos_token_ids: vec![],
        };
        Llama::random(config, Kind::Float, Device::Cpu, 5)
    }

    fn heads(layers: usize, shared_lm_head: bool, backbone: &Llama) -> Heads {
        let number = |n| NonZeroUsize::new(n).unwrap();
        let (medusa_num_heads, medusa_num_layers) = (number(2), number(layers));
        let config = HeadsConfig { medusa_num_heads, medusa_num_layers, init_from: None, shared_lm_head };
        let heads = Heads::new(&config, backbone.lm_head_weight().unwrap());
        for (_, tensor) in heads.parameters() {
            let _ = tch::no_grad(|| tensor.shallow_clone().g_add_(&(tensor.randn_like() * 0.05)));
        }
        heads
    }

    /// 600 targets are six chunks of 40,000 logits.
    fn targets() -> Targets {
        let positions_m = Tensor::randperm(700, (Kind::Int64, Device::Cpu)).narrow(0, 0, 600);
        Targets { positions_m, tokens_m: Tensor::randint(40_000, [600], (Kind::Int64, Device::Cpu)) }
    }

    #[test]
    fn the_fused_loss_and_its_gradients_equal_the_plain_ones() {
        let backbone = backbone();
        let hidden = Tensor::randn([700, 24], (Kind::Float, Device::Cpu));
        for (layers, shared) in [(1, false), (2, false), (1, true)] {
            let (heads, targets) = (heads(layers, shared, &backbone), targets());
            let head = heads.head(1);
            let parameters: Vec<&Tensor> = head.block_parameters().into_iter().chain(head.w2()).collect();
            for parameter in &parameters {
                let _ = parameter.set_requires_grad(true);
            }
            let plain = cross_entropy_sum(&heads, 1, &hidden, &targets, &backbone);
            let expected = Tensor::run_backward(&[&plain * 0.01], &parameters, false, false);
            let got: Vec<Tensor> = parameters.iter().map(|p| p.zeros_like().set_requires_grad(false)).collect();
            let blocks = head.block_parameters().len();
            let into = HeadGradients { blocks: got[..blocks].iter().collect(), w2: got.get(blocks) };
            let w2 = head.w2().unwrap_or_else(|| backbone.lm_head_weight().unwrap());
            let sums = head_loss(head, w2, &hidden, &targets, Some((&into, 0.01)));
            let (loss, oracle) = (sums.loss.double_value(&[]), plain.double_value(&[]));
            assert!((loss - oracle).abs() / oracle < 1e-6, "{loss} {oracle}");
            for (expected, got) in expected.iter().zip(&got) {
                let difference = (expected - got).abs().max().double_value(&[]);
                let largest = expected.abs().max().double_value(&[]);
                assert!(difference < 1e-5 * largest, "{:?}: {difference} of {largest}", expected.size());
            }
        }
    }

    #[test]
    fn hits_equal_those_of_top_k() {
        let backbone = backbone();
        let heads = heads(1, true, &backbone);
        let hidden = Tensor::randn([700, 24], (Kind::Float, Device::Cpu)) * 5.0;
        let positions_m = Tensor::arange(700, (Kind::Int64, Device::Cpu));
        let logits = heads.logits(0, &hidden, &backbone);
        // targets that are the 1st, 2nd … 7th guess in turn
        let guesses = logits.topk(7, 1, true, true).1;
        let tokens_m = guesses.gather(1, &positions_m.remainder(7).unsqueeze(1), false).squeeze_dim(1);
        let sums = head_loss(
            heads.head(0),
            backbone.lm_head_weight().unwrap(),
            &hidden,
            &Targets { positions_m, tokens_m },
            None,
        );
        assert_eq!(Vec::<i64>::try_from(&sums.hits).unwrap(), [100, 200, 300, 400, 500]);
    }
}
