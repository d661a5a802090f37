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

use crate::fused::dropout::dropout;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::numbers::{Fraction, Positive};
use crate::torch::{Generator, wide};

/// `lora` of a recipe's stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// R.
    pub rank: NonZeroUsize,
    /// The product of A and B is scaled by alpha / rank.
    pub alpha: Positive,
    /// Dropout probability of the inputs of A in training.
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
pub fn modules() -> Vec<&'static str> {
    names::LINEARS.into_iter().chain(names::FUSED).chain([names::LM_HEAD]).map(module_of).collect()
}

/// Those that a backbone has.
pub fn modules_of(backbone: &LlamaConfig) -> Vec<&'static str> {
    let linears = backbone.block().linears();
    linears.all().map(|linear| linear.part).chain([names::LM_HEAD]).map(module_of).collect()
}

/// Which layers get an adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ModulesAsWritten", into = "ModulesAsWritten")]
pub enum TargetModules {
    /// Every linear layer, lm_head included.
    #[default]
    AllLinear,
    /// These, some of [`modules`].
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
        match list.iter().find(|name| !modules().contains(&name.as_str())) {
            Some(unknown) => Err(format!("unknown layer {unknown:?}, expected some of {}", modules().join(", "))),
            None if list.is_empty() => Err("expected at least one layer name".into()),
            None => Ok(Self::Named(list.into_iter().collect())),
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
    /// A name that no layer of the backbone has.
    pub fn foreign_to(&self, backbone: &LlamaConfig) -> Option<&str> {
        let Self::Named(names) = self else { return None };
        let known = modules_of(backbone);
        names.iter().map(String::as_str).find(|name| !known.contains(name))
    }

    /// Whether the layer of this full name gets an adapter.
    pub fn includes(&self, layer: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Named(names) => names.contains(module_of(layer)),
        }
    }
}

/// The last part of a layer's name.
pub fn module_of(layer: &str) -> &str {
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
    /// Its number in the backbone: with the pass's seed, it selects the dropout mask.
    pub(super) stream: u64,
}

impl Adapter {
    /// As PEFT begins: A uniform within ±1/√I, B zero, so the layer is as it was.
    pub(super) fn new(
        [o, i]: [i64; 2],
        (kind, device): (Kind, Device),
        config: &LoraConfig,
        stream: u64,
        (generator, draws_on): (&mut Generator, Device),
    ) -> Self {
        let (r, kind) = (config.rank.get() as i64, wide(kind));
        let bound = (i as f64).sqrt().recip();
        let a_ri = generator.uniform(bound, &[r, i], (kind, draws_on)).to_device(device);
        let b_or = Tensor::zeros([o, r], (kind, device));
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
        let kind = wide(weight_oi.kind());
        tch::no_grad(|| {
            let delta_oi = self.b_or.to_kind(kind).matmul(&(self.a_ri.to_kind(kind) * self.scale()));
            (weight_oi.to_kind(kind) + delta_oi).to_kind(weight_oi.kind())
        })
    }
}

/// What layers that read the same input multiply with their B's: one product with all their A's. They share their dropout, drawn
/// for the first of them, where PEFT draws for each: a deviation that no layer can see by itself.
pub(super) fn down_together(adapters: &[&Adapter], x: &Tensor, mode: Adapters) -> Vec<Tensor> {
    let all_ri =
        Tensor::cat(&adapters.iter().map(|adapter| &adapter.a_ri).collect::<Vec<_>>(), 0) * adapters[0].scale();
    let down = adapters[0].dropped(x, mode).linear::<Tensor>(&all_ri.to_kind(x.kind()), None);
    down.split(adapters[0].a_ri.size()[0], -1)
}

#[cfg(test)]
mod tests {
    use super::*;

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
