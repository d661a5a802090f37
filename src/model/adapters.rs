//! LoRA adapters on a whole backbone: attached, listed, merged into its weights.

use crate::model::block_spec::names;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::lora::{Adapter, LoraConfig};
use crate::model::stored::table::TokenTable;
use crate::torch::Generator;

impl Llama {
    /// Every adapter with the name of its layer.
    pub fn adapters(&self) -> Vec<(String, &Adapter)> {
        let mut all = vec![];
        let table = self.block.linears();
        for (i, layer) in self.layers.iter().enumerate() {
            let named = table.all().zip(layer.linears());
            all.extend(named.filter_map(|(spec, linear)| Some((names::in_layer(i, spec.part), linear.adapter()?))));
        }
        all.extend(self.lm_head.adapter().map(|adapter| (names::LM_HEAD.to_owned(), adapter)));
        all
    }

    /// Every linear layer with its name, lm_head last.
    pub(super) fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let mut all = vec![];
        let table = self.block.linears();
        for (i, layer) in self.layers.iter_mut().enumerate() {
            all.extend(table.all().map(|spec| names::in_layer(i, spec.part)).zip(layer.linears_mut()));
        }
        all.push((names::LM_HEAD.to_owned(), &mut self.lm_head));
        all
    }

    /// Merges the adapters into the weights. A tied lm_head with an adapter is untied.
    #[must_use]
    pub fn merged(mut self) -> Self {
        let lm_head_changes = self.lm_head.adapter().is_some();
        self.config.tie_word_embeddings &= !lm_head_changes;
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.merge());
        if lm_head_changes {
            self.lm_head_table = TokenTable::Dense(self.lm_head_weight());
        }
        self
    }
}

/// Attaches new adapters, initialised from `seed`, to the layers that `config` names. The backbone must be loaded for training.
pub fn attach_new(backbone: &mut Llama, config: &LoraConfig, seed: u64) {
    // Each GPU has a generator of its own with the same seed: all are drawn on one, so that no two layers draw the same.
    let (mut generator, draws_on) = (Generator::seeded(seed), backbone.stages().first());
    for (stream, (name, linear)) in (0..).zip(backbone.linears_mut()) {
        if config.target_modules.includes(&name) {
            let (size, options) = linear.shape();
            linear.adapt(Adapter::new(size, options, config, stream, (&mut generator, draws_on)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::model::attention::RowMask;
    use crate::model::backward::Keep;
    use crate::model::config::LlamaConfig;
    use crate::model::lora::{Adapters, TargetModules};
    use crate::model::stages::Stages;
    use crate::numbers::{Fraction, Positive};

    fn adapted(dropout: f64, kind: Kind) -> Llama {
        adapt(Llama::random(LlamaConfig::tiny(), kind, Device::Cpu, 0), dropout, 0.3)
    }

    fn adapt(mut llama: Llama, dropout: f64, deviation: f64) -> Llama {
        let dropout = Fraction::new(dropout).unwrap();
        let (rank, alpha) = (NonZeroUsize::new(3).unwrap(), Positive::new(8.0).unwrap());
        let config = LoraConfig { rank, alpha, dropout, target_modules: TargetModules::AllLinear, init_from: None };
        attach_new(&mut llama, &config, 1);
        let mut generator = Generator::seeded(2);
        for (_, Adapter { b_or, .. }) in llama.adapters() {
            tch::no_grad(|| b_or.shallow_clone().copy_(&(generator.normal_like(b_or) * deviation)));
        }
        llama
    }

    fn tokens() -> Tensor {
        Tensor::from_slice(&(0..22).map(|t| (t * t * 7 + 3) % 50).collect::<Vec<i64>>()).view([2, 11])
    }

    fn gradients(llama: &Llama, keep: Keep, adapters: Adapters) -> (Tensor, Vec<Vec<Tensor>>) {
        gradients_of(1.0, llama, keep, adapters)
    }

    /// Given a gradient of the hidden states up to `size`.
    fn gradients_of(size: f64, llama: &Llama, keep: Keep, adapters: Adapters) -> (Tensor, Vec<Vec<Tensor>>) {
        gradients_on(llama.causal_rows(11), size, llama, keep, adapters)
    }

    fn gradients_on(
        rows: RowMask,
        size: f64,
        llama: &Llama,
        keep: Keep,
        adapters: Adapters,
    ) -> (Tensor, Vec<Vec<Tensor>>) {
        let (hidden, tape) = llama.forward_kept(&tokens(), rows, adapters, keep);
        let kind = if hidden.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let dhidden = Tensor::arange(hidden.numel() as i64, (kind, Device::Cpu)).sin().view_as(&hidden) * size;
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

    /// Of adapters and of all weights, given hidden states' gradients as λ0 = 0.01 and 2·10^5 targets make them.
    #[test]
    fn gradients_of_16_bits_are_those_of_float32() {
        let in_kind = |kind| {
            let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 0).for_fine_tuning(kind);
            let llama = adapt(llama, 0.0, 0.02);
            let names: Vec<String> = (0..llama.parts()).flat_map(|part| llama.trained_in(part)).map(|p| p.0).collect();
            let (_, sums) = gradients_of(4e-8, &llama, Keep::Everything, Adapters::On);
            names.into_iter().zip(sums.into_iter().flatten()).collect::<Vec<_>>()
        };
        let expected = in_kind(Kind::Float);
        for (kind, most) in [(Kind::Half, 0.01), (Kind::BFloat16, 0.05)] {
            for ((name, expected), (_, got)) in expected.iter().zip(in_kind(kind)) {
                let off = ((got - expected).norm() / expected.norm()).double_value(&[]);
                assert!(off < most, "{kind:?}: {name} is off by {off}");
            }
        }
    }

    #[test]
    fn recomputing_changes_no_bit_even_with_dropout() {
        let llama = adapted(0.3, Kind::Float);
        let run = |keep, seed| gradients(&llama, keep, Adapters::Training { seed });
        let (kept, recomputed) = (run(Keep::Everything, 5), run(Keep::Inputs, 5));
        assert_eq!(kept, recomputed);
        assert_ne!(kept.0, run(Keep::Everything, 6).0, "another seed drops other inputs");
    }

    #[test]
    fn a_pass_has_one_copy_at_each_border_each_way_and_the_same_bits() {
        let five = || LlamaConfig { num_hidden_layers: 5, ..LlamaConfig::tiny() };
        let on = |counts: &[usize], adapts: bool| {
            let stages = counts.iter().map(|&count| (Device::Cpu, NonZeroUsize::new(count).unwrap()));
            let llama = Llama::random_on(five(), Kind::Float, Stages::new(stages), 0);
            if adapts { adapt(llama, 0.3, 0.3) } else { llama.for_fine_tuning(Kind::Float) }
        };
        for (adapts, keep) in [(true, Keep::Everything), (true, Keep::Inputs), (false, Keep::Everything)] {
            let run = |counts: &[usize]| {
                let llama = on(counts, adapts);
                let rows = llama.packed_rows(&[vec![11], vec![7, 3]], 11);
                let computed = gradients_on(rows, 1.0, &llama, keep, Adapters::Training { seed: 5 });
                (computed, llama.borders().copies())
            };
            let (expected, [0, 0]) = run(&[5]) else { panic!("one stage has no border") };
            for counts in [&[2, 3][..], &[1, 1, 3], &[1, 1, 1, 1, 1]] {
                let (got, copies) = run(counts);
                assert_eq!(copies, [counts.len() as u64 - 1; 2], "{counts:?}");
                assert!(got == expected, "{counts:?}, adapters: {adapts}, {keep:?}");
            }
        }
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
}
