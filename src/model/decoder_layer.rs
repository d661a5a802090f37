//! One decoder layer on libtorch: the block that a [`BlockSpec`] describes, built from a source of tensors.

// H hidden
use tch::{Kind, Tensor};

use crate::fused::pass;
use crate::model::attention::{Attention, QueryKeyWeights};
use crate::model::block_spec::{Activation, BlockSpec, LinearSpec, MlpSpec, NormPlace, names};
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::Adapters;
use crate::model::norm::{LayerNorms, norm, normed};
use crate::model::stored::{QuantizedWeight, Quantizer};
use crate::model::weights::{WeightFiles, WeightsError};

/// Weights of a block.
#[derive(Debug)]
pub(super) struct DecoderLayer {
    pub(super) norms: LayerNorms,
    pub(super) attention: Attention,
    pub(super) gate_up: LinearGroup,
    pub(super) down: Linear,
}

/// Where a backbone's tensors come from: name and shape to tensor.
pub(super) type TensorSource<'s> = dyn FnMut(&str, &[i64]) -> Result<Tensor, WeightsError> + 's;

impl DecoderLayer {
    /// Layer `index`.
    pub(super) fn build(
        block: &BlockSpec,
        index: usize,
        storage: &LinearStore,
        source: &mut TensorSource,
    ) -> Result<Self, WeightsError> {
        let table = block.linears();
        let mut linear = |spec: &LinearSpec| build_linear(source, &names::in_layer(index, spec.part), spec, storage);
        let qkv = LinearGroup::separate(table.qkv.iter().map(&mut linear).collect::<Result<_, _>>()?);
        let o = linear(&table.o)?;
        let gate_up = LinearGroup::separate(table.gate_up.iter().map(&mut linear).collect::<Result<_, _>>()?);
        let down = linear(&table.down)?;
        let (norms, query_key_norm) = build_norms(block, index, source)?;
        Ok(Self { norms, attention: Attention { qkv, o, shape: block.heads, query_key_norm }, gate_up, down })
    }

    /// q, k, v and gate, up merged, and all products as `prepare` makes them.
    pub(super) fn prepared(self, prepare: &mut impl FnMut(Linear) -> Linear) -> Self {
        let Attention { qkv, o, shape, query_key_norm } = self.attention;
        let attention = Attention { qkv: qkv.merged(&mut *prepare), o: prepare(o), shape, query_key_norm };
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
        let (norms, spec) = (&self.norms, block.norms);
        let residual =
            |part: Tensor| if block.residual_multiplier == 1.0 { part } else { part * block.residual_multiplier };
        let attended = match &norms.attention_input {
            Some(weight_h) => attend(&norm(x, weight_h, spec), &self.attention),
            None => attend(x, &self.attention),
        };
        let x = x + residual(normed(attended, norms.attention_output.as_ref(), spec));
        let mlp = match &norms.mlp_input {
            Some(weight_h) => self.mlp(&norm(&x, weight_h, spec), block, adapters),
            None => self.mlp(&x, block, adapters),
        };
        x + residual(normed(mlp, norms.mlp_output.as_ref(), spec))
    }

    fn mlp(&self, x: &Tensor, block: &BlockSpec, adapters: Adapters) -> Tensor {
        let MlpSpec::Gated { width, activation } = block.mlp;
        let [gate, up] = self.gate_up.each(x, [width; 2], adapters);
        let product = match activation {
            Activation::Silu => {
                pass::gated(&gate, &up).unwrap_or_else(|| pass::without_kernel("silu_up", &gate, || gate.silu() * &up))
            }
            Activation::GeluTanh => gate.gelu("tanh") * up,
        };
        self.down.forward(&product, adapters)
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

    /// The weights of its norms, in the order of [`BlockSpec::norm_weights`].
    pub(super) fn norms(&self) -> impl Iterator<Item = &Tensor> {
        let LayerNorms { attention_input, attention_output, mlp_input, mlp_output } = &self.norms;
        let query_key = self.attention.query_key_norm.as_ref();
        let query_key = query_key.into_iter().flat_map(|norm| [&norm.query, &norm.key]);
        attention_input.iter().chain(query_key).chain(attention_output).chain(mlp_input).chain(mlp_output)
    }

    /// As [`DecoderLayer::norms`], to be changed.
    pub(super) fn norms_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let LayerNorms { attention_input, attention_output, mlp_input, mlp_output } = &mut self.norms;
        let query_key = self.attention.query_key_norm.as_mut();
        let query_key = query_key.into_iter().flat_map(|norm| [&mut norm.query, &mut norm.key]);
        attention_input.iter_mut().chain(query_key).chain(attention_output).chain(mlp_input).chain(mlp_output)
    }

    /// Weights, biases and norms of layer `index` by the names in their file, as [`BlockSpec::tensors`] lists them. What is quantised is left out.
    pub(super) fn weights(&self, block: &BlockSpec, index: usize) -> Vec<(String, &Tensor)> {
        let mut all = vec![];
        for (LinearSpec { part, .. }, linear) in block.linears().all().zip(self.linears()) {
            all.extend(linear.unpacked().map(|weight| (format!("{part}.weight"), weight)));
            all.extend(linear.bias().map(|bias| (format!("{part}.bias"), bias)));
        }
        let norms = block.norm_weights().into_iter().zip(self.norms());
        all.extend(norms.map(|(norm, weight)| (norm.part.to_owned(), weight)));
        all.into_iter().map(|(part, tensor)| (names::in_layer(index, &part), tensor)).collect()
    }
}

/// How the weights of linear layers are held in memory.
pub(super) enum LinearStore<'f> {
    /// Dense.
    Dense,
    /// Quantised when they are read.
    Quantized(Quantizer),
    /// In the blocks that the files have them in, for passes in this dtype; others are dense.
    Blocks(&'f WeightFiles, Kind),
}

/// The linear layer of this name.
pub(super) fn build_linear(
    source: &mut TensorSource,
    name: &str,
    spec: &LinearSpec,
    store: &LinearStore,
) -> Result<Linear, WeightsError> {
    let weight = format!("{name}.weight");
    let bias = spec.bias.then(|| source(&format!("{name}.bias"), &spec.size[..1])).transpose()?;
    if let LinearStore::Blocks(files, kind) = store
        && let Some(blocks) = files.blocks(&weight, &spec.size)?
    {
        return Ok(Linear::quantized(QuantizedWeight::from_blocks(blocks, *kind), bias));
    }
    let weight = source(&weight, &spec.size)?;
    Ok(match store {
        LinearStore::Quantized(quantizer) => Linear::quantized(quantizer.quantize(&weight), bias),
        LinearStore::Dense | LinearStore::Blocks(..) => Linear::dense(weight, bias),
    })
}

fn build_norms(
    block: &BlockSpec,
    index: usize,
    source: &mut TensorSource,
) -> Result<(LayerNorms, Option<QueryKeyWeights>), WeightsError> {
    let mut all = vec![];
    for norm in block.norm_weights() {
        all.push((norm.place, source(&names::in_layer(index, norm.part), &[norm.size])?));
    }
    let mut take = |place: NormPlace| {
        let at = all.iter().position(|(other, _)| *other == place)?;
        Some(all.swap_remove(at).1)
    };
    let query_key = take(NormPlace::Query).zip(take(NormPlace::Key));
    let norms = LayerNorms {
        attention_input: take(NormPlace::AttentionInput),
        attention_output: take(NormPlace::AttentionOutput),
        mlp_input: take(NormPlace::MlpInput),
        mlp_output: take(NormPlace::MlpOutput),
    };
    Ok((norms, query_key.map(|(query, key)| QueryKeyWeights { query, key, spec: block.norms })))
}
