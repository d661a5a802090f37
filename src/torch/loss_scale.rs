//! Loss scaling for float16, which holds no positive number below 6e-8 and none above 65504. Gradients are multiplied by a power of two
//! before they are cast, and the result of their product is divided by it in float32. PyTorch's `GradScaler` finds one power for all
//! gradients by trial, and skips the step if that power was too large. Here the power is computed for each product from its factors. No step
//! is skipped, and a checkpoint holds no scale.

use tch::{Kind, Tensor};

/// Bound of the sums: half of float16's largest number, because they are rounded.
const LARGEST: f64 = 32768.0;
/// Bound for gradients that are all 0.
const SMALLEST: f64 = 1e-18;

/// A power of two for some gradients; none in other dtypes than float16.
#[derive(Debug)]
pub struct LossScale {
    kind: Kind,
    /// Float32 scalar, on the gradients' device.
    factor: Option<Tensor>,
}

impl LossScale {
    /// For `gradients` that are cast to `kind`: the largest power with which a sum over `rows` of their products with `inputs`, or with
    /// numbers up to `inputs`, cannot overflow.
    pub fn for_sums(kind: Kind, gradients: &[&Tensor], rows: i64, inputs: &Tensor) -> Self {
        let factor = || {
            let largest_of_all = gradients.iter().map(|gradient| largest(gradient)).reduce(|a, b| a.maximum(&b));
            let sums = largest_of_all.expect("a gradient") * largest(inputs) * rows as f64;
            (sums.clamp_min(SMALLEST).reciprocal() * LARGEST).log2().floor().exp2()
        };
        Self { kind, factor: (kind == Kind::Half).then(|| tch::no_grad(factor)) }
    }

    /// A given power, on the device of `gradient`.
    pub fn fixed(kind: Kind, power: f64, gradient: &Tensor) -> Self {
        let factor = || Tensor::full([], power, (Kind::Float, gradient.device()));
        Self { kind, factor: (kind == Kind::Half).then(factor) }
    }

    /// A gradient times the power, in the dtype.
    pub fn cast(&self, gradient: &Tensor) -> Tensor {
        match &self.factor {
            Some(factor) => (gradient.to_kind(Kind::Float) * factor).to_kind(self.kind),
            None => gradient.to_kind(self.kind),
        }
    }

    /// The result of a scaled gradient's product divided by the power, in float32; unchanged without a scale.
    pub fn undo(&self, computed: Tensor) -> Tensor {
        match &self.factor {
            Some(factor) => computed.to_kind(Kind::Float) / factor,
            None => computed,
        }
    }
}

/// The largest absolute value, a float32 scalar; NaN if one element is, so that the checks of a step find it.
fn largest(tensor: &Tensor) -> Tensor {
    if tensor.numel() == 0 {
        return Tensor::from(0f32);
    }
    // In one pass and without a tensor of absolute values.
    let (least, most) = tensor.detach().aminmax(None, false);
    most.maximum(&-least).to_kind(Kind::Float)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn scale(gradients: &[f32], kind: Kind) -> (LossScale, Tensor) {
        let gradients = Tensor::from_slice(gradients);
        (LossScale::for_sums(kind, &[&gradients], 2048, &Tensor::from(4.0f32)), gradients)
    }

    #[test]
    fn what_float16_cannot_hold_comes_back_to_11_bits() {
        for size in [1e-12, 3e-8, 1.0, 1e6] {
            let (scale, gradients) = scale(&[size, -size / 7.0, 0.0], Kind::Half);
            let cast = scale.cast(&gradients);
            assert_eq!(cast.kind(), Kind::Half);
            let sum = cast.to_kind(Kind::Double).abs().max().double_value(&[]) * 2048.0 * 4.0;
            assert!((LARGEST / 2.0..=LARGEST).contains(&sum), "{size}: {sum}");
            let off = (scale.undo(cast) - &gradients).abs().max().double_value(&[]);
            assert!(off <= f64::from(size) / 2048.0, "{size}: {off}");
        }
    }

    #[test]
    fn zeros_stay_zeros_and_infinities_do_not_vanish() {
        let back = |gradients: &[f32]| {
            let (scale, gradients) = scale(gradients, Kind::Half);
            Vec::<f32>::try_from(scale.undo(scale.cast(&gradients))).unwrap()
        };
        assert_eq!(back(&[0.0, 0.0]), [0.0, 0.0]);
        assert_eq!(back(&[]), [0f32; 0]);
        for broken in [f32::INFINITY, f32::NAN] {
            assert!(back(&[1.0, broken]).iter().any(|x| !x.is_finite()), "{broken}");
        }
    }

    #[test]
    fn other_dtypes_are_only_cast() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let (scale, gradients) = scale(&[3e-8, 1e6], kind);
            assert_eq!(scale.undo(scale.cast(&gradients)), gradients.to_kind(kind));
            let fixed = LossScale::fixed(kind, 1024.0, &gradients);
            assert_eq!(fixed.cast(&gradients), gradients.to_kind(kind));
        }
        let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
        assert_eq!(LossScale::fixed(Kind::Half, 1024.0, &ones).cast(&ones), (&ones * 1024).to_kind(Kind::Half));
    }
}
