//! The heads' best guesses after one hidden state: what fills a tree.

// K heads, V vocabulary, H hidden, M guesses a head
use tch::{Device, Kind, Tensor};

use super::{Head, Heads};
use crate::cpu::matrix::Matrix;
use crate::cpu::rows::{add_silu, add_to_each, largest};
use crate::cpu::team::Team;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::torch::bytes;

impl Heads {
    /// The `m` most probable tokens of each of the first `k` heads, best first: hidden state `[1, H]` (after the final norm) to
    /// `[K·M]`, int64, head by head.
    pub fn guesses(&self, k: usize, m: usize, hidden_1h: &Tensor, backbone: &Llama) -> Tensor {
        if let Some(guesses) = self.guesses_on_cpu(k, m, hidden_1h, backbone) {
            return Tensor::from_slice(&guesses);
        }
        let logits: Vec<Tensor> = (0..k).map(|head| self.logits(head, hidden_1h, backbone)).collect();
        let (_, guesses_km) = Tensor::cat(&logits, 0).topk(m as i64, -1, true, true);
        guesses_km.view([-1])
    }

    /// With the CPU's own kernels; `None` where the heads are not laid out for them.
    fn guesses_on_cpu(&self, k: usize, m: usize, hidden_1h: &Tensor, backbone: &Llama) -> Option<Vec<i64>> {
        if hidden_1h.device() != Device::Cpu {
            return None;
        }
        let hidden_1h = hidden_1h.to_kind(Kind::Float).contiguous();
        let hidden_h = bytes::numbers(&hidden_1h);
        let team = Team::of_process();
        let residual: Option<Vec<Vec<f32>>> =
            self.heads[..k].iter().map(|head| head.residual_on_cpu(hidden_h, team)).collect();
        let logits_kv = self.logits_on_cpu(&residual?, backbone, team)?;
        let guesses = logits_kv.chunks_exact(logits_kv.len() / k).flat_map(|logits_v| largest(logits_v, m));
        Some(guesses.map(|token| token as i64).collect())
    }

    /// `[K, V]` of the ResBlocks' outputs. Heads that share the backbone's lm_head go through it together.
    fn logits_on_cpu(&self, residual: &[Vec<f32>], backbone: &Llama, team: &Team) -> Option<Vec<f32>> {
        let own: Option<Vec<&Matrix>> =
            self.heads.iter().map(|head| head.w2.as_ref().and_then(Linear::matrix)).collect();
        let vocabulary = usize::try_from(self.vocab_size).ok()?;
        let mut logits_kv = vec![0.0; residual.len() * vocabulary];
        match own {
            Some(own) => {
                for ((w2, x_h), logits_v) in own.into_iter().zip(residual).zip(logits_kv.chunks_exact_mut(vocabulary)) {
                    w2.multiply(x_h, logits_v, team);
                }
            }
            None if self.heads.iter().all(|head| head.w2.is_none()) => {
                backbone.lm_head().matrix()?.multiply(&residual.concat(), &mut logits_kv, team);
            }
            None => return None,
        }
        Some(logits_kv)
    }
}

impl Head {
    /// The ResBlocks: `x + SiLU(W1·x + b1)` for each, `[H]` to `[H]`.
    fn residual_on_cpu(&self, hidden_h: &[f32], team: &Team) -> Option<Vec<f32>> {
        let mut x_h = hidden_h.to_vec();
        let mut y_h = vec![0.0; x_h.len()];
        for block in &self.blocks {
            block.matrix()?.multiply(&x_h, &mut y_h, team);
            if let Some(bias_h) = block.bias() {
                add_to_each(&mut y_h, bytes::numbers(&bias_h.to_kind(Kind::Float)));
            }
            add_silu(&mut x_h, &y_h);
        }
        Some(x_h)
    }
}

#[cfg(test)]
mod tests {
    use super::super::HeadsShape;
    use super::*;
    use crate::model::config::LlamaConfig;

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    fn guesses_of_own_kernels_are_those_of_libtorch() {
        for (vocab_size, medusa_num_layers) in [(50, 2), (0, 1)] {
            let config = LlamaConfig::tiny();
            let shape =
                HeadsShape { medusa_num_heads: 3, medusa_num_layers, hidden_size: config.hidden_size, vocab_size };
            // Numbers that bfloat16 holds, so that rounding decides nothing.
            let exact = |tensor: Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
            let heads =
                || Heads::random(shape, Kind::BFloat16, Device::Cpu, 1).of_vocabulary(config.vocab_size).for_training();
            let backbone = || Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
            let hidden_1h = exact(Tensor::randn([1, config.hidden_size], (Kind::Float, Device::Cpu)));
            let oracle = heads().guesses(3, 4, &hidden_1h, &backbone());
            assert_eq!(heads().for_decoding().guesses(3, 4, &hidden_1h, &backbone().for_decoding()), oracle);
        }
    }
}
