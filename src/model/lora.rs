//! LoRA (Hu et al. 2021): low-rank adapters on linear layers. `peft` reads and writes them.
//!
//! `y = x·Wᵀ + (alpha / rank) · dropout(x)·Aᵀ·Bᵀ`, A `[R, I]`, B `[O, R]`, as PEFT computes it. The weights stay as they are, so
//! the same backbone with [`Adapters::Off`] is the teacher of self-distillation.

// R rank, O outputs, I inputs, N rows of a product
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::model::llama::Llama;
use crate::model::weights::names;
use crate::numbers::{Fraction, Positive};
use crate::torch::{self, dropout::dropout};

/// `[stage.medusa2.lora]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// R.
    pub rank: NonZeroUsize,
    /// The product of A and B counts alpha / rank.
    pub alpha: Positive,
    /// Part of the inputs of A that is left out at random while training; the rest is scaled up.
    #[serde(default = "no_dropout")]
    pub dropout: Fraction,
    /// Which layers: "all-linear" (lm_head included, unlike PEFT's word), or a list of names.
    #[serde(default)]
    pub target_modules: TargetModules,
    /// A PEFT adapter folder to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
}

fn no_dropout() -> Fraction {
    Fraction::new(0.0).expect("a constant")
}

/// Layers that an adapter can go on, by the last part of their names.
pub const MODULES: [&str; 8] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", names::LM_HEAD];

/// Which layers get an adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ModulesAsWritten", into = "ModulesAsWritten")]
pub enum TargetModules {
    /// Every linear layer, lm_head included.
    #[default]
    AllLinear,
    /// These, some of [`MODULES`].
    Named(BTreeSet<String>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"all-linear\" or a list of layer names")]
enum ModulesAsWritten {
    Word(String),
    List(Vec<String>),
}

impl TryFrom<ModulesAsWritten> for TargetModules {
    type Error = String;

    fn try_from(written: ModulesAsWritten) -> Result<Self, String> {
        let list = match written {
            ModulesAsWritten::Word(word) if word == "all-linear" => return Ok(Self::AllLinear),
            ModulesAsWritten::Word(word) => {
                return Err(format!("expected \"all-linear\" or a list of layer names, got {word:?}"));
            }
            ModulesAsWritten::List(list) => list,
        };
        if let Some(unknown) = list.iter().find(|name| !MODULES.contains(&name.as_str())) {
            return Err(format!("unknown layer {unknown:?}, expected some of {}", MODULES.join(", ")));
        }
        if list.is_empty() {
            Err("expected at least one layer name".into())
        } else {
            Ok(Self::Named(list.into_iter().collect()))
        }
    }
}

impl From<TargetModules> for ModulesAsWritten {
    fn from(modules: TargetModules) -> Self {
        match modules {
            TargetModules::AllLinear => Self::Word("all-linear".into()),
            TargetModules::Named(names) => Self::List(names.into_iter().collect()),
        }
    }
}

impl TargetModules {
    /// Whether the layer of this full name gets an adapter.
    pub fn includes(&self, layer: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Named(names) => names.contains(module_of(layer)),
        }
    }
}

/// The last part of a layer's name.
pub(super) fn module_of(layer: &str) -> &str {
    layer.rsplit('.').next().unwrap_or(layer)
}

/// Whether adapters take part in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adapters {
    /// The backbone as it was loaded: the teacher.
    Off,
    /// With adapters, without dropout.
    On,
    /// With dropout, drawn from this seed: the same pass again draws the same.
    Training {
        /// Of the pass.
        seed: u64,
    },
}

/// The adapter of one linear layer.
#[derive(Debug)]
pub struct Adapter {
    pub(super) a_ri: Tensor,
    pub(super) b_or: Tensor,
    pub(super) alpha: f64,
    pub(super) dropout: f64,
    /// Its number in the backbone: what its dropout is drawn from, beside the pass.
    pub(super) stream: u64,
}

impl Adapter {
    /// As PEFT begins: A uniform within ±1/√I, B zero, so the layer is as it was. Draws from libtorch's generator.
    fn new([o, i]: [i64; 2], (kind, device): (Kind, Device), config: &LoraConfig, stream: u64) -> Self {
        let (r, options) = (config.rank.get() as i64, (master_kind(kind), device));
        let bound = (i as f64).sqrt().recip();
        let a_ri = Tensor::empty([r, i], options).uniform_(-bound, bound);
        let b_or = Tensor::zeros([o, r], options);
        Self { a_ri, b_or, alpha: config.alpha.get(), dropout: config.dropout.get(), stream }.trained()
    }

    pub(super) fn trained(self) -> Self {
        for tensor in self.parameters() {
            let _ = tensor.set_requires_grad(true);
        }
        self
    }

    /// A and B, as they are trained.
    pub fn parameters(&self) -> [&Tensor; 2] {
        [&self.a_ri, &self.b_or]
    }

    /// B `[O, R]`.
    pub fn b(&self) -> &Tensor {
        &self.b_or
    }

    /// `(alpha / rank) · dropout(x)·Aᵀ`: `[…, I]` to `[…, R]`, in `x`'s dtype.
    pub fn down(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        self.dropped(x, adapters).linear::<Tensor>(&(&self.a_ri * self.scale()).to_kind(x.kind()), None)
    }

    /// What A sees of `x`.
    fn dropped(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        match adapters {
            Adapters::Training { seed } if self.dropout > 0.0 => dropout(x, self.dropout, seed, self.stream),
            _ => x.shallow_clone(),
        }
    }

    fn scale(&self) -> f64 {
        self.alpha / self.a_ri.size()[0] as f64
    }

    /// Adds `down` `[N, R]` through B to `base_no` `[N, O]`, in its place.
    pub(super) fn add_to(&self, mut base_no: Tensor, down_nr: &Tensor) -> Tensor {
        base_no.addmm_(down_nr, &self.b_or.to_kind(down_nr.kind()).tr())
    }

    /// `W + (alpha / rank)·B·A` in the dtype of `weight_oi`; computed in float32 or better.
    pub(super) fn merged(&self, weight_oi: &Tensor) -> Tensor {
        let kind = master_kind(weight_oi.kind());
        tch::no_grad(|| {
            let delta_oi = self.b_or.to_kind(kind).matmul(&(self.a_ri.to_kind(kind) * self.scale()));
            (weight_oi.to_kind(kind) + delta_oi).to_kind(weight_oi.kind())
        })
    }
}

/// What layers that read the same input multiply with their B's: one product with all their A's. They share their dropout, drawn
/// for the first of them, where PEFT draws for each: a deviation that no layer can tell by itself.
pub(super) fn down_together(adapters: &[&Adapter], x: &Tensor, mode: Adapters) -> Vec<Tensor> {
    let all_ri =
        Tensor::cat(&adapters.iter().map(|adapter| &adapter.a_ri).collect::<Vec<_>>(), 0) * adapters[0].scale();
    let down = adapters[0].dropped(x, mode).linear::<Tensor>(&all_ri.to_kind(x.kind()), None);
    down.split(adapters[0].a_ri.size()[0], -1)
}

/// Of what is trained: float32, or float64 where the backbone is.
fn master_kind(weight: Kind) -> Kind {
    if weight == Kind::Double { Kind::Double } else { Kind::Float }
}

/// New adapters on the layers that `config` names, drawn from `seed`.
pub fn attach_new(backbone: &mut Llama, config: &LoraConfig, seed: u64) {
    torch::seed(seed);
    for (stream, (name, linear)) in (0..).zip(backbone.linears_mut()) {
        if let (Some(size), Some(options)) = (linear.size(), linear.options())
            && config.target_modules.includes(&name)
        {
            linear.adapt(Adapter::new(size, options, config, stream));
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::model::attention::RowMask;
    use crate::model::backward::Keep;
    use crate::model::config::LlamaConfig;

    fn adapted(dropout: f64, kind: Kind) -> Llama {
        let mut llama = Llama::random(LlamaConfig::tiny(), kind, Device::Cpu, 0);
        let dropout = Fraction::new(dropout).unwrap();
        let (rank, alpha) = (NonZeroUsize::new(3).unwrap(), Positive::new(8.0).unwrap());
        let config = LoraConfig { rank, alpha, dropout, target_modules: TargetModules::AllLinear, init_from: None };
        attach_new(&mut llama, &config, 1);
        for (_, adapter) in llama.adapters() {
            let _ = tch::no_grad(|| adapter.b_or.shallow_clone().normal_(0.0, 0.3));
        }
        llama
    }

    fn tokens() -> Tensor {
        Tensor::from_slice(&(0..22).map(|t| (t * t * 7 + 3) % 50).collect::<Vec<i64>>()).view([2, 11])
    }

    fn gradients(llama: &Llama, keep: Keep, adapters: Adapters) -> (Tensor, Vec<Vec<Tensor>>) {
        let rows = RowMask::causal(11, &llama.config, Device::Cpu);
        let (hidden, tape) = llama.forward_kept(&tokens(), rows, adapters, keep);
        let dhidden = Tensor::arange(hidden.numel() as i64, (hidden.kind(), Device::Cpu)).sin().view_as(&hidden);
        let zeros = |part| llama.trained_in(part).iter().map(|(_, t)| t.detach().zeros_like()).collect();
        let sums: Vec<Vec<Tensor>> = (0..llama.parts()).map(zeros).collect();
        tape.backward(&dhidden, &sums.iter().map(|part| part.iter().collect()).collect::<Vec<_>>());
        ((&hidden * dhidden).sum(Kind::Double), sums)
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let llama = adapted(0.0, Kind::Double);
        let (_, sums) = gradients(&llama, Keep::Everything, Adapters::On);
        for (part, sums) in sums.iter().enumerate() {
            for ((name, tensor), gradient) in llama.trained_in(part).iter().zip(sums) {
                let mut at = tensor.detach().view([-1]).narrow(0, tensor.numel() as i64 / 2, 1);
                let loss = |llama: &Llama| gradients(llama, Keep::Everything, Adapters::On).0.double_value(&[]);
                let _ = at.g_add_scalar_(1e-5);
                let above = loss(&llama);
                let _ = at.g_add_scalar_(-2e-5);
                let below = loss(&llama);
                let _ = at.g_add_scalar_(1e-5);
                let (expected, got) =
                    ((above - below) / 2e-5, gradient.view([-1]).double_value(&[tensor.numel() as i64 / 2]));
                assert!(
                    (expected - got).abs() < 1e-6 * expected.abs().max(1.0),
                    "{name}: {got}, differences say {expected}"
                );
            }
        }
        assert_eq!(sums.iter().map(Vec::len).collect::<Vec<_>>(), [0, 14, 14, 0]);
    }

    #[test]
    fn recomputing_changes_no_bit_even_with_dropout() {
        let llama = adapted(0.3, Kind::Float);
        let of = |keep, seed| gradients(&llama, keep, Adapters::Training { seed });
        let (kept, recomputed) = (of(Keep::Everything, 5), of(Keep::Inputs, 5));
        assert_eq!(kept, recomputed);
        assert_ne!(kept.0, of(Keep::Everything, 6).0, "another seed drops other inputs");
    }

    #[test]
    fn merged_weights_compute_what_adapters_do() {
        let llama = adapted(0.0, Kind::Double);
        let rows = RowMask::causal(11, &llama.config, Device::Cpu);
        let logits = |llama: &Llama, adapters| llama.logits(&llama.hidden_states(&tokens(), &rows, adapters), adapters);
        let (off, on) = (logits(&llama, Adapters::Off), logits(&llama, Adapters::On));
        let difference = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]);
        assert!(difference(&off, &on) > 1e-2, "the adapters do something");
        assert!(difference(&logits(&llama.merged(), Adapters::Off), &on) < 1e-12);
    }

    #[test]
    fn target_modules_are_a_word_or_known_names() {
        let read = |text: &str| serde_json::from_str::<TargetModules>(text);
        assert_eq!(read("\"all-linear\"").unwrap(), TargetModules::AllLinear);
        let some = read("[\"q_proj\", \"lm_head\"]").unwrap();
        assert!(some.includes("model.layers.3.self_attn.q_proj") && some.includes("lm_head"));
        assert!(!some.includes("model.layers.3.self_attn.k_proj"));
        assert!(read("[\"query\"]").unwrap_err().to_string().contains("expected some of q_proj"));
        assert!(read("\"all\"").unwrap_err().to_string().contains("all-linear"));
        assert!(read("[]").is_err());
    }
}
