//! The heads' most probable guesses, which fill the tree.

// B texts, K heads, V vocabulary, H hidden, M guesses per head
use tch::{Device, Kind, Tensor};

use super::sequential::SequentialLayout;
use super::{Head, HeadInput, Heads};
use crate::cpu::rows::{self, add_silu, add_to_each, largest};
use crate::cpu::team::Team;
use crate::model::llama::Llama;
use crate::model::logits::make_logits;
use crate::torch::bytes;
use crate::tree::dynamic::LikelyToken;

impl Heads {
    /// The `m` most probable tokens of each of the first `k` heads, best first: hidden states `[B, H]` (after the final norm) to
    /// `[B, K·M]`, int64, head after head. For Medusa heads: the guesses of sequential heads depend on the guesses before them.
    pub fn guesses(&self, k: usize, m: usize, hidden_bh: &Tensor, backbone: &Llama) -> Tensor {
        let shape = [hidden_bh.size()[0], (k * m) as i64];
        if let Some(guesses) = self.guesses_on_cpu(k, m, hidden_bh, backbone) {
            return Tensor::from_slice(&guesses).view(shape);
        }
        let logits: Vec<Tensor> =
            (0..k).map(|head| self.logits(head, &HeadInput::alone(hidden_bh), backbone)).collect();
        let (_, guesses_bkm) = Tensor::stack(&logits, 1).topk(m as i64, -1, true, true);
        let guesses_bkm =
            self.token_map.as_ref().map_or(guesses_bkm.shallow_clone(), |map| map.tokens_n().take(&guesses_bkm));
        guesses_bkm.view(shape)
    }

    /// Guesses among a head's outputs as guesses of tokens.
    pub(in crate::draft) fn to_tokens(&self, mut guesses: Vec<LikelyToken>) -> Vec<LikelyToken> {
        if let Some(map) = &self.token_map {
            guesses.iter_mut().for_each(|guess| guess.token = map.tokens()[guess.token as usize]);
        }
        guesses
    }

    /// The token that is a head's `output`-th.
    pub(in crate::draft) fn token_of(&self, output: usize) -> i64 {
        self.token_map.as_ref().map_or(output as i64, |map| map.tokens()[output])
    }

    /// The guesses of [`Heads::guesses`] with their log-probabilities, `[B, K, M]`.
    pub fn likeliest(&self, k: usize, m: usize, hidden_bh: &Tensor, backbone: &Llama) -> Vec<LikelyToken> {
        if let Some(rows) = self.rows_on_cpu(k, hidden_bh, backbone) {
            let row_guesses = |logits_v: &[f32]| likeliest_of_rows(logits_v, logits_v.len(), m, Team::shared());
            return self.to_tokens(rows.each().flat_map(row_guesses).collect());
        }
        let logits: Vec<Tensor> =
            (0..k).map(|head| self.logits(head, &HeadInput::alone(hidden_bh), backbone)).collect();
        self.to_tokens(likeliest(&Tensor::stack(&logits, 1), m))
    }

    /// The first blocks, if these are sequential heads for the CPU kernels.
    pub(in crate::draft) fn sequential(&self) -> Option<&SequentialLayout> {
        self.sequential.as_ref()
    }

    /// Logits `[N, V]` of head `head`, of its first block's output `[N, H]`, on the CPU kernels.
    pub(in crate::draft) fn logits_behind_first(
        &self,
        head: usize,
        mut x_nh: Vec<f32>,
        backbone: &Llama,
        team: &Team,
    ) -> Option<Vec<f32>> {
        self.heads[head].run_on_cpu(1, &mut x_nh, team)?;
        self.output_on_cpu(head, &x_nh, backbone, team)
    }

    /// Runs the CPU kernels; `None` if the heads are not laid out for them.
    fn guesses_on_cpu(&self, k: usize, m: usize, hidden_bh: &Tensor, backbone: &Llama) -> Option<Vec<i64>> {
        let rows = self.rows_on_cpu(k, hidden_bh, backbone)?;
        Some(rows.each().flat_map(|logits_v| largest(logits_v, m)).map(|output| self.token_of(output)).collect())
    }

    fn rows_on_cpu(&self, k: usize, hidden_bh: &Tensor, backbone: &Llama) -> Option<HeadRows> {
        if hidden_bh.device() != Device::Cpu {
            return None;
        }
        let hidden_bh = hidden_bh.to_kind(Kind::Float).contiguous();
        let hidden_bh = bytes::numbers(&hidden_bh);
        let team = Team::shared();
        let residual: Option<Vec<Vec<f32>>> =
            self.heads[..k].iter().map(|head| head.residual_on_cpu(hidden_bh, team)).collect();
        let logits_kbv = self.logits_on_cpu(&residual?, backbone, team)?;
        Some(HeadRows { logits_kbv, heads: k, vocabulary: self.draft_vocab_size() })
    }

    /// Logits `[K, B, V]` of the ResBlocks' outputs. Heads that share a W2 or the backbone's lm_head go through it in one product.
    fn logits_on_cpu(&self, residual: &[Vec<f32>], backbone: &Llama, team: &Team) -> Option<Vec<f32>> {
        if self.shape.shared_w2 || self.heads.iter().all(|head| head.w2.is_none()) {
            return self.output_on_cpu(0, &residual.concat(), backbone, team);
        }
        let outputs = residual.iter().enumerate().map(|(head, x_bh)| self.output_on_cpu(head, x_bh, backbone, team));
        Some(outputs.collect::<Option<Vec<_>>>()?.concat())
    }

    /// A head's output layer: `[N, H]` to logits `[N, V]`.
    pub(super) fn output_on_cpu(&self, head: usize, x_nh: &[f32], backbone: &Llama, team: &Team) -> Option<Vec<f32>> {
        let head = self.output_of(head);
        let spec = head.logit_spec(backbone);
        let w2 = head.w2.as_ref().unwrap_or(backbone.lm_head()).matrix()?;
        let rows = x_nh.len() / usize::try_from(self.hidden_size()).ok()?;
        let down_nr = match &head.down {
            None => None,
            Some(down) => {
                let down = down.matrix()?;
                let mut down_nr = vec![0.0; rows * down.outputs()];
                down.multiply(x_nh, &mut down_nr, team);
                Some(down_nr)
            }
        };
        let x_nh = down_nr.as_deref().unwrap_or(x_nh);
        let mut logits_nv = vec![0.0; rows * self.draft_vocab_size()];
        w2.multiply(x_nh, &mut logits_nv, team);
        if let Some(bias_v) = head.w2_bias() {
            add_to_each(&mut logits_nv, bytes::numbers(&bias_v.to_kind(Kind::Float)));
        }
        make_logits(&mut logits_nv, spec);
        Some(logits_nv)
    }
}

/// Logits of several heads.
struct HeadRows {
    logits_kbv: Vec<f32>,
    /// K.
    heads: usize,
    /// V.
    vocabulary: usize,
}

impl HeadRows {
    /// The logits of each text, head after head.
    fn each(&self) -> impl Iterator<Item = &[f32]> {
        let row_logits = |row: usize| &self.logits_kbv[row * self.vocabulary..(row + 1) * self.vocabulary];
        let texts = self.logits_kbv.len() / self.vocabulary / self.heads;
        (0..texts).flat_map(move |text| (0..self.heads).map(move |head| row_logits(head * texts + text)))
    }
}

/// The `m` likeliest tokens of each row of logits `[…, V]`, best first.
pub(in crate::draft) fn likeliest(logits: &Tensor, m: usize) -> Vec<LikelyToken> {
    let (log_p, tokens) = logits.log_softmax(-1, Kind::Float).topk(m as i64, -1, true, true);
    let log_p: Vec<f32> = Vec::try_from(log_p.reshape([-1])).expect("one axis of float32");
    let tokens: Vec<i64> = Vec::try_from(tokens.reshape([-1])).expect("one axis of int64");
    tokens.into_iter().zip(log_p).map(|(token, log_p)| LikelyToken { token, log_p }).collect()
}

/// As [`likeliest`], of logits `[N, V]`, on the CPU kernels.
pub(in crate::draft) fn likeliest_of_rows(logits_nv: &[f32], v: usize, m: usize, team: &Team) -> Vec<LikelyToken> {
    let likely = |(token, log_p)| LikelyToken { token: token as i64, log_p };
    rows::likeliest(logits_nv, v, m, team).into_iter().map(likely).collect()
}

impl Head {
    /// Applies the ResBlocks: `x + SiLU(W1·x + b1)` each, `[B, H]` to `[B, H]`.
    fn residual_on_cpu(&self, hidden_bh: &[f32], team: &Team) -> Option<Vec<f32>> {
        let mut x_bh = hidden_bh.to_vec();
        self.run_on_cpu(0, &mut x_bh, team)?;
        Some(x_bh)
    }

    /// Applies the ResBlocks from block `first` on to `[N, H]`, in place.
    pub(super) fn run_on_cpu(&self, first: usize, x_nh: &mut [f32], team: &Team) -> Option<()> {
        let mut y_nh = vec![0.0; x_nh.len()];
        for block in &self.blocks[first..] {
            block.linear.matrix()?.multiply(x_nh, &mut y_nh, team);
            if let Some(bias_h) = block.linear.bias() {
                add_to_each(&mut y_nh, bytes::numbers(&bias_h.to_kind(Kind::Float)));
            }
            add_silu(x_nh, &y_nh);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::HeadsShape;
    use super::*;
    use crate::draft::token_map::TokenMap;
    use crate::dtype::DraftDtype;
    use crate::model::block_spec::LogitSpec;
    use crate::model::config::{FamilyTraits, LlamaConfig};
    use crate::torch::Generator;

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn guesses_of_own_kernels_are_those_of_libtorch() {
        let gemma = LogitSpec { divisor: 2.0, softcap: Some(1.5) };
        for logits in [LogitSpec::default(), gemma] {
            kernels_guess_as_libtorch(logits);
        }
    }

    fn kernels_guess_as_libtorch(logits: LogitSpec) {
        let config = LlamaConfig::tiny();
        let config = LlamaConfig { family: FamilyTraits { logits, ..config.family }, ..config };
        for (vocab_size, medusa_num_layers, w2_bias, w2_rank, shared_w2) in [
            (50, 2, false, 0, false),
            (50, 1, true, 0, false),
            (0, 1, false, 0, false),
            (50, 1, false, 5, false),
            (50, 2, true, 8, false),
            (50, 1, false, 0, true),
            (50, 2, true, 8, true),
            (30, 1, true, 0, false),
            (30, 1, false, 5, true),
        ] {
            let shape = HeadsShape {
                medusa_num_heads: 3,
                medusa_num_layers,
                hidden_size: config.hidden_size,
                vocab_size,
                w2_bias,
                w2_rank,
                shared_w2,
                ..HeadsShape::default()
            };
            // Values that are exact in bfloat16, so that rounding does not decide the result.
            let exact = |tensor: Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
            let tokens: Vec<i64> = (0..vocab_size).map(|output| output + output / 2).collect();
            let heads = || {
                let heads = Heads::random(shape, Kind::BFloat16, Device::Cpu, 1).with_vocabulary(config.vocab_size);
                let map = || TokenMap::new(tokens.clone(), Device::Cpu);
                let heads = if vocab_size == 30 { heads.with_token_map(map(), config.vocab_size) } else { heads };
                heads.for_training(Kind::Float)
            };
            let backbone = || Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
            let hidden_bh = exact(Generator::seeded(3).normal(&[3, config.hidden_size], (Kind::Float, Device::Cpu)));
            let outputs = |guesses: &Tensor| {
                let tokens: Vec<i64> = Vec::try_from(guesses.view(-1)).unwrap();
                let heads = heads();
                let output = |token: i64| heads.token_map().map_or(token, |map| map.output_of(token).unwrap());
                Tensor::from_slice(&tokens.into_iter().map(output).collect::<Vec<_>>())
            };
            let oracle = outputs(&heads().guesses(3, 4, &hidden_bh, &backbone()));
            let guesses_in =
                |dtype| outputs(&heads().for_decoding(dtype).guesses(3, 4, &hidden_bh, &backbone().for_decoding()));
            // Near ties may swap places, so compare the guesses' logits instead of their ids.
            let logits: Vec<Tensor> =
                (0..3).map(|head| heads().logits(head, &HeadInput::alone(&hidden_bh), &backbone())).collect();
            let probable = |guesses: &Tensor| Tensor::stack(&logits, 1).gather(-1, &guesses.view([3, 3, 4]), false);
            for (dtype, limit) in [(DraftDtype::BFloat16, 1e-3), (DraftDtype::Int8, 2e-2)] {
                let off = (probable(&guesses_in(dtype)) - probable(&oracle)).abs().max().double_value(&[]);
                assert!(off < limit, "{dtype}: {off}");
            }
            let [oracle, ours] =
                [(heads(), backbone()), (heads().for_decoding(DraftDtype::BFloat16), backbone().for_decoding())]
                    .map(|(heads, backbone)| heads.likeliest(3, 4, &hidden_bh, &backbone));
            let off =
                oracle.iter().zip(&ours).map(|(oracle, ours)| (oracle.log_p - ours.log_p).abs()).fold(0.0, f32::max);
            assert!(off < 1e-2 && ours.len() == 3 * 3 * 4, "{off}"); // the kernels round activations to bfloat16
        }
    }
}
