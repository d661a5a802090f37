//! Linear layers: dense, quantised, or packed for products of few rows on the CPU, each with an optional LoRA adapter; and groups of layers
//! that read the same input.

// O outputs, I inputs, N rows of a product
use tch::{Device, Kind, Tensor};

use crate::cpu;
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::cpu::team::Team;
use crate::dtype::DraftDtype;
use crate::model::lora::{self, Adapter, Adapters};
use crate::model::stored::QuantizedWeight;
use crate::model::stored::dense::{draft_matrix, matrix_of};
use crate::torch::bytes;
use crate::torch::onednn::PackedWeight;

/// Below this many weights oneDNN's call (about 10 µs) costs more than its product gains over libtorch's.
const WORTH_PACKING: usize = 1 << 17;
const FOR_DECODING: &str = "weights were merged or packed for decoding; load the backbone for training";

/// `x·Wᵀ + b`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias_o: Option<Tensor>,
    outputs: i64,
    adapter: Option<Adapter>,
}

#[derive(Debug)]
enum Weight {
    /// `[O, I]`.
    Dense(Tensor),
    /// `[I, O]`, a view of the dense one: `x·Wᵀ` in one call instead of the three that libtorch's linear makes.
    Transposed(Tensor),
    /// For the CPU's own kernels.
    Matrix(Matrix),
    Packed(PackedWeight),
    /// Dequantised for each product.
    Quantized(QuantizedWeight),
}

impl Linear {
    /// From `weight_oi` `[O, I]` and an optional bias `[O]`.
    pub fn dense(weight_oi: Tensor, bias_o: Option<Tensor>) -> Self {
        Self { outputs: weight_oi.size()[0], weight: Weight::Dense(weight_oi), bias_o, adapter: None }
    }

    /// From a quantised weight and an optional bias `[O]`.
    pub fn quantized(weight: QuantizedWeight, bias_o: Option<Tensor>) -> Self {
        Self { outputs: weight.size()[0], weight: Weight::Quantized(weight), bias_o, adapter: None }
    }

    /// The same layer for passes of few rows: for the kernels of [`crate::cpu`] where the CPU has what they need, with a dense
    /// weight in `kind` then, else as for batches. Adapters must be merged before.
    #[must_use]
    pub fn for_few_rows(self, kind: Kind, arena: &mut Arena) -> Self {
        self.laid_out(|weight_oi, arena| matrix_of(&weight_oi.to_kind(kind), arena), arena)
    }

    /// As [`Linear::for_few_rows`], of a drafter.
    #[must_use]
    pub fn for_guesses(self, dtype: DraftDtype, arena: &mut Arena) -> Self {
        self.laid_out(|weight_oi, arena| draft_matrix(weight_oi, dtype, arena), arena)
    }

    fn laid_out(self, dense: impl FnOnce(&Tensor, &mut Arena) -> Option<Matrix>, arena: &mut Arena) -> Self {
        let matrix = match &self.weight {
            Weight::Dense(weight_oi) => dense(weight_oi, arena),
            Weight::Quantized(weight) => weight.matrix(arena),
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) => return self,
        };
        match matrix {
            Some(matrix) => Self { weight: Weight::Matrix(matrix), ..self },
            None => self.packed(),
        }
    }

    /// The same layer for batches: packed where that pays, else transposed. Adapters must be merged before.
    #[must_use]
    pub fn packed(self) -> Self {
        let Weight::Dense(weight_oi) = &self.weight else { return self };
        let packed = if weight_oi.numel() >= WORTH_PACKING { PackedWeight::pack(weight_oi) } else { None };
        let weight = packed.map_or_else(|| Weight::Transposed(weight_oi.tr()), Weight::Packed);
        Self { weight, ..self }
    }

    /// `[…, I]` to `[…, O]`. Weights of another dtype than `x`'s are cast: float32 masters that compute in bfloat16.
    pub fn forward(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        match &self.adapter {
            Some(adapter) if adapters != Adapters::Off => {
                let x_ni = as_rows(x);
                like_rows(&adapter.add_to(self.base(&x_ni), &adapter.down(&x_ni, adapters)), x)
            }
            _ => self.base(x),
        }
    }

    /// The layer without its adapter.
    fn base(&self, x: &Tensor) -> Tensor {
        match &self.weight {
            Weight::Dense(weight_oi) if weight_oi.kind() != x.kind() => {
                x.linear(&weight_oi.to_kind(x.kind()), self.bias_o.as_ref().map(|bias| bias.to_kind(x.kind())))
            }
            Weight::Dense(weight_oi) => x.linear(weight_oi, self.bias_o.as_ref()),
            Weight::Transposed(weight_io) => match &self.bias_o {
                Some(bias_o) => product(x, weight_io) + bias_o,
                None => product(x, weight_io),
            },
            Weight::Matrix(matrix) => {
                let y = times(x, matrix);
                self.bias_o.as_ref().map_or_else(|| y.shallow_clone(), |bias_o| &y + bias_o)
            }
            Weight::Packed(packed) => packed.linear(x, self.bias_o.as_ref()),
            Weight::Quantized(weight) => x.linear(&weight.dequantize(x.kind()), self.bias_o.as_ref()),
        }
    }

    /// `[O]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias_o.as_ref()
    }

    /// `[O, I]`, unless quantised or made for decoding.
    pub fn dense_weight(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::Dense(weight) => Some(weight),
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) | Weight::Quantized(_) => None,
        }
    }

    /// `[O, I]` as it lies in memory, row after row: a view. `None` where it is quantised, packed or for the CPU's own kernels.
    pub fn in_rows(&self) -> Option<Tensor> {
        match &self.weight {
            Weight::Dense(weight_oi) => Some(weight_oi.shallow_clone()),
            Weight::Transposed(weight_io) => Some(weight_io.tr()),
            Weight::Matrix(_) | Weight::Packed(_) | Weight::Quantized(_) => None,
        }
    }

    /// The weight where it is for the CPU's own kernels.
    pub fn matrix(&self) -> Option<&Matrix> {
        match &self.weight {
            Weight::Matrix(matrix) => Some(matrix),
            _ => None,
        }
    }

    fn into_matrix(self) -> Option<Matrix> {
        match self.weight {
            Weight::Matrix(matrix) => Some(matrix),
            _ => None,
        }
    }

    /// The weight where it is quantised.
    pub fn quantized_weight(&self) -> Option<&QuantizedWeight> {
        match &self.weight {
            Weight::Quantized(weight) => Some(weight),
            _ => None,
        }
    }

    /// `[O, I]`; `None` where it is quantised.
    ///
    /// # Panics
    /// If the layer was made for decoding, as do those below.
    pub(super) fn unpacked(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::Dense(weight_oi) => Some(weight_oi),
            Weight::Quantized(_) => None,
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) => panic!("{FOR_DECODING}"),
        }
    }

    /// `[O, I]` as numbers, and the weight's dtype and device.
    pub(super) fn shape(&self) -> ([i64; 2], (Kind, Device)) {
        match &self.weight {
            Weight::Dense(weight_oi) => ([self.outputs, weight_oi.size()[1]], (weight_oi.kind(), weight_oi.device())),
            Weight::Quantized(weight) => (weight.size(), (weight.kind(), weight.device())),
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) => panic!("{FOR_DECODING}"),
        }
    }

    /// Its adapter, if it has one.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Gives it an adapter, of its own shape.
    pub(super) fn adapt(&mut self, adapter: Adapter) {
        self.adapter = Some(adapter);
    }

    /// The adapter, if there is one, becomes part of the weight: a copy, in the weight's dtype. A quantised weight is dense then.
    pub(super) fn merge(&mut self) {
        let Some(adapter) = &self.adapter else { return };
        self.weight = match &self.weight {
            Weight::Dense(weight_oi) => Weight::Dense(adapter.merged(weight_oi)),
            Weight::Quantized(weight) => Weight::Dense(adapter.merged(&weight.dequantize(weight.kind()))),
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) => panic!("{FOR_DECODING}"),
        };
        self.adapter = None;
    }

    /// Copies of weight and bias in `kind` in place of what may be views of a file.
    pub(super) fn own(&mut self, kind: Kind) {
        let own = |tensor: &Tensor| tensor.to_kind(kind).copy();
        match &self.weight {
            Weight::Dense(weight_oi) => self.weight = Weight::Dense(own(weight_oi)),
            Weight::Quantized(weight) => self.weight = Weight::Dense(weight.dequantize(kind)),
            Weight::Transposed(_) | Weight::Matrix(_) | Weight::Packed(_) => panic!("{FOR_DECODING}"),
        }
        self.bias_o = self.bias_o.as_ref().map(own);
    }
}

/// Layers that read the same input (q, k, v; gate, up). Merged into one product they save a read of the input and two calls.
#[derive(Debug)]
pub struct LinearGroup {
    /// One layer when merged, or where the file has them as one.
    layers: Vec<Linear>,
    is_merged: bool,
}

impl LinearGroup {
    /// Each layer stays its own product.
    pub fn separate(layers: Vec<Linear>) -> Self {
        Self { layers, is_merged: false }
    }

    /// One product for all, as `prepare` makes it. Copies the weights; a layer without a bias beside one with a bias gets zeros. Quantised
    /// layers that `prepare` does not lay out for the CPU's own kernels stay separate.
    ///
    /// # Panics
    /// If a layer has an adapter.
    #[must_use]
    pub fn merged(self, mut prepare: impl FnMut(Linear) -> Linear) -> Self {
        assert!(self.layers.iter().all(|layer| layer.adapter.is_none()), "adapters are merged before layers are");
        if self.is_merged {
            return self;
        }
        let (bias_o, outputs) = (self.bias(), self.outputs());
        let weights: Option<Vec<&Tensor>> = self.layers.iter().map(Linear::dense_weight).collect();
        if let Some(weights) = weights {
            let weight_oi = if let [one] = weights[..] { one.shallow_clone() } else { Tensor::cat(&weights, 0) };
            return Self { layers: vec![prepare(Linear::dense(weight_oi, bias_o))], is_merged: true };
        }
        let all_in_blocks =
            self.layers.iter().all(|layer| layer.quantized_weight().is_some_and(QuantizedWeight::is_in_blocks));
        // Then `prepare` makes matrices of all of them, whose bias is that of the group.
        let layers = if all_in_blocks && cpu::available() { joined(self.layers) } else { self.layers };
        let layers: Vec<Linear> = layers.into_iter().map(prepare).collect();
        if !layers.iter().all(|layer| layer.matrix().is_some()) {
            return Self { layers, is_merged: false };
        }
        let weight = layers.into_iter().filter_map(Linear::into_matrix).reduce(Matrix::above).map(Weight::Matrix);
        let weight = weight.expect("a group has layers");
        Self { layers: vec![Linear { weight, bias_o, outputs, adapter: None }], is_merged: true }
    }

    /// The layer that all are merged into, if they are.
    pub(super) fn merged_layer(&self) -> Option<&Linear> {
        self.layers.first().filter(|_| self.is_merged)
    }

    /// `[…, I]` to `[…, O₁ + O₂ + …]`.
    pub fn forward(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        match self.layers.as_slice() {
            [one] => one.forward(x, adapters),
            layers => Tensor::cat(&layers.iter().map(|layer| layer.forward(x, adapters)).collect::<Vec<_>>(), -1),
        }
    }

    /// `[…, I]` to `[…, Oᵢ]` for each of `widths`: no copy, whether merged or separate.
    pub fn each<const M: usize>(&self, x: &Tensor, widths: [i64; M], adapters: Adapters) -> [Tensor; M] {
        if let [one] = self.layers.as_slice() {
            let all = one.forward(x, adapters);
            let mut end = 0;
            return widths.map(|width| {
                end += width;
                all.narrow(-1, end - width, width)
            });
        }
        let all: Option<Vec<&Adapter>> = self.layers.iter().map(Linear::adapter).collect();
        let Some(all) = all.filter(|_| adapters != Adapters::Off) else {
            return std::array::from_fn(|layer| self.layers[layer].forward(x, adapters));
        };
        let x_ni = as_rows(x);
        let downs = lora::down_together(&all, &x_ni, adapters);
        std::array::from_fn(|layer| like_rows(&all[layer].add_to(self.layers[layer].base(&x_ni), &downs[layer]), x))
    }

    /// All layers' weights below each other, `[O₁ + O₂ + …, I]`: a view when merged, else a copy. `None` as of [`Linear::in_rows`].
    pub(super) fn in_rows(&self) -> Option<Tensor> {
        let weights: Vec<Tensor> = self.layers.iter().map(Linear::in_rows).collect::<Option<_>>()?;
        Some(if weights.len() == 1 { weights[0].shallow_clone() } else { Tensor::cat(&weights, 0) })
    }

    /// All layers' biases one after another, `[O₁ + O₂ + …]`, with zeros for a layer without one. `None` where no layer has one.
    pub(super) fn bias(&self) -> Option<Tensor> {
        if let [one] = self.layers.as_slice() {
            return one.bias_o.as_ref().map(Tensor::shallow_clone);
        }
        let has_bias = self.layers.iter().any(|layer| layer.bias_o.is_some());
        let bias = |layer: &Linear| {
            layer.bias_o.as_ref().map_or_else(|| Tensor::zeros([layer.outputs], layer.shape().1), Tensor::shallow_clone)
        };
        has_bias.then(|| Tensor::cat(&self.layers.iter().map(bias).collect::<Vec<_>>(), 0))
    }

    /// The layers.
    ///
    /// # Panics
    /// If they were merged.
    pub(super) fn layers(&self) -> &[Linear] {
        assert!(!self.is_merged, "{FOR_DECODING}");
        &self.layers
    }

    /// The layers, to be changed.
    ///
    /// # Panics
    /// If they were merged.
    pub(super) fn layers_mut(&mut self) -> &mut [Linear] {
        assert!(!self.is_merged, "{FOR_DECODING}");
        &mut self.layers
    }

    /// Width of the output.
    pub fn outputs(&self) -> i64 {
        self.layers.iter().map(|layer| layer.outputs).sum()
    }
}

/// The layers, with neighbours in blocks of one type as one; their biases are left out.
fn joined(layers: Vec<Linear>) -> Vec<Linear> {
    let mut all: Vec<Linear> = vec![];
    for layer in layers {
        let last = all.pop();
        let both = last.as_ref().and_then(Linear::quantized_weight).zip(layer.quantized_weight());
        match (both.and_then(|(last, next)| last.above(next)), last) {
            (Some(weight), _) => all.push(Linear::quantized(weight, None)),
            (None, last) => all.extend(last.into_iter().chain([layer])),
        }
    }
    all
}

/// `[…, I]` as `[N, I]`.
fn as_rows(x: &Tensor) -> Tensor {
    x.view([-1, x.size()[x.dim() - 1]])
}

/// `[N, O]` as `[…, O]`, with the other axes of `like`.
fn like_rows(y_no: &Tensor, like: &Tensor) -> Tensor {
    let mut size = like.size();
    size[like.dim() - 1] = y_no.size()[1];
    y_no.view(size.as_slice())
}

/// `x·Wᵀ`, `[…, I]` to `[…, O]`, in x's dtype.
fn times(x: &Tensor, matrix: &Matrix) -> Tensor {
    let x_f32 = x.to_kind(Kind::Float).contiguous();
    let mut size = x.size();
    size[x.dim() - 1] = matrix.outputs() as i64;
    let y = bytes::filled(&size, |y| matrix.multiply(bytes::numbers(&x_f32), y, Team::shared()));
    y.to_kind(x.kind())
}

/// A matrix by a matrix is one call; matmul looks at the shapes first.
fn product(x: &Tensor, weight_io: &Tensor) -> Tensor {
    if x.dim() == 2 { x.mm(weight_io) } else { x.matmul(weight_io) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Generator;

    fn linear(outputs: i64, has_bias: bool) -> Linear {
        let mut generator = Generator::seeded(outputs.unsigned_abs());
        let mut tensor = |shape: &[i64]| generator.normal(shape, (Kind::Double, Device::Cpu));
        Linear::dense(tensor(&[outputs, 4]), has_bias.then(|| tensor(&[outputs])))
    }

    fn adapted(mut linear: Linear) -> Linear {
        let zeros = |shape: [i64; 2]| Tensor::zeros(shape, (Kind::Double, Device::Cpu));
        let [o, i] = linear.shape().0;
        linear.adapt(Adapter { a_ri: zeros([2, i]), b_or: zeros([o, 2]), alpha: 4.0, dropout: 0.0, stream: 0 });
        linear
    }

    #[test]
    fn a_merged_group_keeps_the_biases_that_some_layers_have() {
        let group = || LinearGroup::separate(vec![linear(3, true), linear(5, false), linear(2, true)]);
        let x_ni = Generator::seeded(1).normal(&[6, 4], (Kind::Double, Device::Cpu));
        let [separate, merged] =
            [group(), group().merged(Linear::packed)].map(|group| group.forward(&x_ni, Adapters::Off));
        assert!((separate - merged).abs().max().double_value(&[]) < 1e-12);
    }

    #[test]
    #[should_panic(expected = "adapters are merged before layers are")]
    fn layers_with_adapters_are_not_merged() {
        let _ = LinearGroup::separate(vec![linear(3, false), adapted(linear(5, false))]).merged(Linear::packed);
    }

    #[test]
    #[should_panic(expected = "load the backbone for training")]
    fn an_adapter_does_not_merge_into_a_packed_weight() {
        adapted(linear(3, false)).packed().merge();
    }

    /// oneDNN configures AMX's tiles, too.
    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX with bfloat16")]
    fn own_products_and_onednns_do_not_disturb_each_other_in_one_thread() {
        let mut generator = Generator::seeded(1);
        let mut random = |shape: &[i64]| generator.normal(shape, (Kind::BFloat16, Device::Cpu));
        let (x, weight) = (random(&[7, 320]), random(&[640, 320]));
        let own = matrix_of(&weight, &mut Arena::default()).expect("kernels");
        let packed = PackedWeight::pack(&weight).expect("oneDNN");
        let product = || [packed.linear(&x, None), times(&x, &own)];
        let first = product();
        let exact = x.to_kind(Kind::Double).matmul(&weight.to_kind(Kind::Double).tr());
        for y in &first {
            let off = (y.to_kind(Kind::Double) - &exact).abs().max().double_value(&[]);
            assert!(off < 0.3, "half a unit in the last place of sums below 64, and rounding: {off}");
        }
        for _ in 0..3 {
            assert_eq!(product(), first);
        }
    }
}
