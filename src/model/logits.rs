//! From the LM head's products to logits, and the way back.

use tch::Tensor;

use crate::model::block_spec::LogitSpec;

/// The logits of products `[…, V]`.
pub fn logits_of(products: Tensor, spec: LogitSpec) -> Tensor {
    let LogitSpec { divisor, softcap } = spec;
    let quotients = if divisor == 1.0 { products } else { products / divisor };
    softcap.map_or_else(|| quotients.shallow_clone(), |cap| (&quotients / cap).tanh() * cap)
}
