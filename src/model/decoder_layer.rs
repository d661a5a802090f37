//! One decoder layer on libtorch: the block that a [`BlockSpec`] describes, built from a source of tensors.

// H hidden
use tch::Tensor;

use crate::model::attention::Attention;
use crate::model::block_spec::{Activation, BlockSpec, LinearSpec, NormKind, NormPlaces, NormSpec, names};
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::Adapters;
use crate::model::quantization::Quantizer;
use crate::model::weights::WeightsError;

/// Weights of a block.
#[derive(Debug)]
pub(super) struct DecoderLayer {
    /// As [`names::NORMS`].
    pub(super) norms_h: [Tensor; 2],
    pub(super) attention: Attention,
    pub(super) gate_up: LinearGroup,
    pub(super) down: Linear,
}

/// Where a backbone's tensors come from: name and shape to tensor.
pub(super) type TensorSource<'s> = dyn FnMut(&str, &[i64]) -> Result<Tensor, WeightsError> + 's;

impl DecoderLayer {
    /// Layer `index`, its linear layers quantised where there is a quantizer.
    pub(super) fn build(
        block: &BlockSpec,
        index: usize,
        quantizer: Option<&Quantizer>,
        source: &mut TensorSource,
    ) -> Result<Self, WeightsError> {
        let table = block.linears();
        let mut linear = |spec: &LinearSpec| build_linear(source, &names::in_layer(index, spec.part), spec, quantizer);
        let qkv = LinearGroup::separate(table.qkv.iter().map(&mut linear).collect::<Result<_, _>>()?);
        let o = linear(&table.o)?;
        let gate_up = LinearGroup::separate(table.gate_up.iter().map(&mut linear).collect::<Result<_, _>>()?);
        let down = linear(&table.down)?;
        let mut norm = |part: &str| source(&names::in_layer(index, part), &[block.hidden_size]);
        let [before_attention, before_mlp] = names::NORMS;
        let norms_h = [norm(before_attention)?, norm(before_mlp)?];
        Ok(Self { norms_h, attention: Attention { qkv, o, shape: block.heads }, gate_up, down })
    }

    /// q, k, v and gate, up merged, and all products as `prepare` makes them.
    pub(super) fn prepared(self, prepare: &mut impl FnMut(Linear) -> Linear) -> Self {
        let Attention { qkv, o, shape } = self.attention;
        let attention = Attention { qkv: qkv.merged(&mut *prepare), o: prepare(o), shape };
        Self { attention, gate_up: self.gate_up.merged(&mut *prepare), down: prepare(self.down), ..self }
    }

    /// The residual stream `x` (`[…, H]`) through attention, which `attend` runs, and the MLP.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        block: &BlockSpec,
        adapters: Adapters,
        attend: impl Fn(&Tensor, &Attention) -> Tensor,
    ) -> Tensor {
        let (NormPlaces::Inputs, [before_attention, before_mlp]) = (block.norms.places, &self.norms_h);
        let x = x + attend(&norm(x, before_attention, block.norms), &self.attention);
        let mlp = self.mlp(&norm(&x, before_mlp, block.norms), block, adapters);
        x + mlp
    }

    fn mlp(&self, x: &Tensor, block: &BlockSpec, adapters: Adapters) -> Tensor {
        let [gate, up] = self.gate_up.each(x, [block.mlp.width; 2], adapters);
        let gate = match block.mlp.activation {
            Activation::Silu => gate.silu(),
        };
        self.down.forward(&(gate * up), adapters)
    }

    /// Its linear layers in the table's order.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let attention = self.attention.qkv.layers().iter().chain([&self.attention.o]);
        attention.chain(self.gate_up.layers()).chain([&self.down])
    }

    /// As [`DecoderLayer::linears`], to be changed.
    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let attention = self.attention.qkv.layers_mut().iter_mut().chain([&mut self.attention.o]);
        attention.chain(self.gate_up.layers_mut()).chain([&mut self.down])
    }

    /// Weights, biases and norms of layer `index` by the names in their file, as [`BlockSpec::tensors`] lists them. What is quantised is left out.
    pub(super) fn weights(&self, block: &BlockSpec, index: usize) -> Vec<(String, &Tensor)> {
        let mut all = vec![];
        for (LinearSpec { part, .. }, linear) in block.linears().all().zip(self.linears()) {
            all.extend(linear.unpacked().map(|weight| (format!("{part}.weight"), weight)));
            all.extend(linear.bias().map(|bias| (format!("{part}.bias"), bias)));
        }
        all.extend(names::NORMS.map(str::to_owned).into_iter().zip(&self.norms_h));
        all.into_iter().map(|(part, tensor)| (names::in_layer(index, &part), tensor)).collect()
    }
}

/// The linear layer of this name, its weight quantised where there is a quantizer.
pub(super) fn build_linear(
    source: &mut TensorSource,
    name: &str,
    spec: &LinearSpec,
    quantizer: Option<&Quantizer>,
) -> Result<Linear, WeightsError> {
    let weight = source(&format!("{name}.weight"), &spec.size)?;
    let bias = spec.bias.then(|| source(&format!("{name}.bias"), &spec.size[..1])).transpose()?;
    Ok(match quantizer {
        Some(quantizer) => Linear::quantized(quantizer.quantize(&weight), bias),
        None => Linear::dense(weight, bias),
    })
}

/// A norm over the last axis; statistics in float32, as transformers computes them.
pub(super) fn norm(x: &Tensor, weight_h: &Tensor, NormSpec { kind, eps, .. }: NormSpec) -> Tensor {
    let NormKind::Rms = kind;
    if weight_h.kind() == x.kind() {
        return x.rms_norm(weight_h.size(), Some(weight_h), eps);
    }
    x.rms_norm(weight_h.size(), Some(weight_h.to_kind(x.kind())), eps)
}
