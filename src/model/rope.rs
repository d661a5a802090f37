//! Rotary position embeddings (Su et al. 2021), as transformers computes them: halves are rotated, not pairs of neighbours.

use tch::{Device, Kind, Tensor};

use crate::model::block_spec::{RopeScaling, RotarySpec};

/// The frequencies of a backbone.
#[derive(Debug)]
pub struct Rope {
    /// `[D]`, float32: the frequencies twice, negated in the first half. Since sin is odd and cos even, this yields the
    /// signs of the rotation without another product.
    signed_frequencies_d: Tensor,
    /// `[D/2]`.
    frequencies: Vec<f32>,
    kind: Kind,
}

/// Cosines and signed sines of some positions, `[…, 1, D]`: broadcast over heads.
#[derive(Debug)]
pub struct Rotation {
    cos: Tensor,
    signed_sin: Tensor,
}

impl Rope {
    /// Rotations come out in `kind` on `device`.
    pub fn new(rotary: &RotarySpec, kind: Kind, device: Device) -> Self {
        let frequencies = frequencies(rotary);
        let signed: Vec<f32> = frequencies.iter().map(|f| -f).chain(frequencies.iter().copied()).collect();
        Self { signed_frequencies_d: Tensor::from_slice(&signed).to_device(device), frequencies, kind }
    }

    /// D/2 inverse wavelengths in radians a token.
    pub(super) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Rotations of `positions` (float32, any shape `[…]`).
    pub fn at(&self, positions: &Tensor) -> Rotation {
        let angles = positions.unsqueeze(-1).unsqueeze(-1) * &self.signed_frequencies_d;
        Rotation { cos: angles.cos().to_kind(self.kind), signed_sin: angles.sin().to_kind(self.kind) }
    }
}

impl Rotation {
    /// Rotates `[…, heads, D]`.
    pub fn apply(&self, x: &Tensor) -> Tensor {
        let half = x.size()[x.dim() - 1] / 2;
        (x * &self.cos).addcmul(&x.roll([half], [-1]), &self.signed_sin)
    }

    /// As [`Rotation::apply`], in place; `x` may be a view.
    pub fn apply_(&self, x: &Tensor) {
        let half = x.size()[x.dim() - 1] / 2;
        let rolled = x.roll([half], [-1]);
        let _ = (x * &self.cos).addcmul_out(x, &rolled, &self.signed_sin);
    }
}

/// D/2 inverse wavelengths in radians a token, float32 as in transformers.
#[expect(clippy::cast_possible_truncation, reason = "float32 is what transformers computes in")]
fn frequencies(rotary: &RotarySpec) -> Vec<f32> {
    let pairs = rotary.size / 2;
    let plain = (0..pairs).map(|i| (rotary.theta as f32).powf(i as f32 / pairs as f32).recip());
    match rotary.scaling {
        RopeScaling::Default => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor as f32).collect(),
        // Llama 3.1's stretch: long waves are slowed by the factor, short ones kept, a linear ramp in wavelengths per context between.
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let stretched = |frequency: f32| {
                let frequency = f64::from(frequency);
                let waves = original_max_position_embeddings / (2.0 * std::f64::consts::PI / frequency);
                let keep = ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                ((1.0 - keep) * (frequency / factor) + keep * frequency) as f32
            };
            plain.map(stretched).collect()
        }
    }
}
