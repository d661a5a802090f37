//! From the LM head's products to logits, and the way back.

use tch::Tensor;

use crate::model::block_spec::LogitSpec;

/// The derivatives of logits with respect to products.
#[derive(Debug)]
pub enum Slope {
    /// The logits are the products.
    One,
    /// Without a cap: one divided by the divisor.
    Constant(f64),
    /// With a cap, `[…, V]`.
    Each(Tensor),
}

/// The logits of products `[…, V]`.
pub fn logits_of(products: Tensor, spec: LogitSpec) -> Tensor {
    let LogitSpec { divisor, softcap } = spec;
    let quotients = if divisor == 1.0 { products } else { products / divisor };
    match softcap {
        None => quotients,
        Some(cap) => (quotients / cap).tanh() * cap,
    }
}

/// [`logits_of`], in place.
pub fn make_logits(products: &mut [f32], spec: LogitSpec) {
    let divisor = spec.divisor as f32;
    if divisor != 1.0 {
        products.iter_mut().for_each(|product| *product /= divisor);
    }
    if let Some(cap) = spec.softcap {
        let cap = cap as f32;
        products.iter_mut().for_each(|quotient| *quotient = (*quotient / cap).tanh() * cap);
    }
}

/// The derivatives of `logits` `[…, V]`, which [`logits_of`] made.
pub fn slope_of(logits: &Tensor, spec: LogitSpec) -> Slope {
    let LogitSpec { divisor, softcap } = spec;
    match softcap {
        None if divisor == 1.0 => Slope::One,
        None => Slope::Constant(divisor.recip()),
        // c·tanh(z / c) has the derivative 1 - tanh²(z / c).
        Some(cap) => Slope::Each(((logits / cap).square() - 1.0) / -divisor),
    }
}

impl Slope {
    /// From gradients of logits to gradients of products.
    pub fn times(&self, dlogits: Tensor) -> Tensor {
        match self {
            Self::One => dlogits,
            Self::Constant(slope) => dlogits * *slope,
            Self::Each(slope) => dlogits * slope,
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::torch::Generator;

    #[test]
    fn slopes_are_autograds() {
        for (divisor, softcap) in [(1.0, None), (8.0, None), (1.0, Some(1.5)), (2.0, Some(3.0))] {
            let spec = LogitSpec { divisor, softcap };
            let products = Generator::seeded(1).normal(&[3, 5], (Kind::Double, Device::Cpu)) * 4.0;
            let products = products.set_requires_grad(true);
            let logits = logits_of(products.shallow_clone(), spec);
            let dlogits = Generator::seeded(2).normal(&[3, 5], (Kind::Double, Device::Cpu));
            let expected = Tensor::run_backward(&[(&logits * &dlogits).sum(Kind::Double)], &[&products], false, false);
            let got = slope_of(&logits.detach(), spec).times(dlogits);
            assert!((got - &expected[0]).abs().max().double_value(&[]) < 1e-12, "{spec:?}");
        }
    }
}
