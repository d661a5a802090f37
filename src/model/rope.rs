//! Rotary position embeddings (Su et al. 2021), as transformers computes them: halves are rotated, not pairs of neighbours.

use tch::{Device, Kind, Tensor};

use crate::fused::pass;
use crate::model::block_spec::{LayerKinds, RopeScaling, RotarySpec};

/// The rotary embeddings of each kind of layer; `None` where a kind has none.
#[derive(Debug)]
pub struct Ropes(Vec<Option<Rope>>);

/// Rotations of some positions for each kind of layer; `None` where a kind has none.
#[derive(Debug)]
pub struct RotationsByKind(Vec<Option<Rotation>>);

/// Rotary embeddings of one kind of layer.
#[derive(Debug)]
pub struct Rope {
    /// `[R]`, float32: the frequencies twice, negated in the first half. Since sin is odd and cos even, this yields the
    /// signs of the rotation without another product.
    signed_frequencies_r: Tensor,
    frequencies: Frequencies,
    kind: Kind,
}

/// What the rotation of a position is computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct Frequencies {
    /// R/2 inverse wavelengths in radians a token, float32 as in transformers.
    pub each: Vec<f32>,
    /// Factor of cosines and sines.
    pub magnitude: f64,
}

/// Cosines and signed sines of some positions, `[…, 1, R]`: broadcast over heads.
#[derive(Debug)]
pub struct Rotation {
    cos: Tensor,
    signed_sin: Tensor,
}

impl Ropes {
    /// Rotations come out in `kind` on `device`.
    pub fn new(layers: &LayerKinds, kind: Kind, device: Device) -> Self {
        let rope = |rotary: &RotarySpec| Rope::new(rotary, kind, device);
        Self(layers.kinds().iter().map(|layer| layer.rotary.as_ref().map(rope)).collect())
    }

    /// Rotations of `positions` (float32, any shape `[…]`).
    pub fn at(&self, positions: &Tensor) -> RotationsByKind {
        RotationsByKind(self.0.iter().map(|rope| rope.as_ref().map(|rope| rope.at(positions))).collect())
    }

    /// What the rotations of a kind of layers are computed from.
    pub fn frequencies(&self, kind: usize) -> Option<&Frequencies> {
        self.0[kind].as_ref().map(|rope| &rope.frequencies)
    }
}

impl RotationsByKind {
    /// Of the layers of one kind.
    pub fn of(&self, kind: usize) -> Option<&Rotation> {
        self.0[kind].as_ref()
    }
}

impl Rope {
    /// Rotations come out in `kind` on `device`.
    pub fn new(rotary: &RotarySpec, kind: Kind, device: Device) -> Self {
        let frequencies = Frequencies::new(rotary);
        let signed: Vec<f32> = frequencies.each.iter().map(|f| -f).chain(frequencies.each.iter().copied()).collect();
        Self { signed_frequencies_r: Tensor::from_slice(&signed).to_device(device), frequencies, kind }
    }

    /// Rotations of `positions` (float32, any shape `[…]`).
    pub fn at(&self, positions: &Tensor) -> Rotation {
        let angles = positions.unsqueeze(-1).unsqueeze(-1) * &self.signed_frequencies_r;
        let scaled = |x: Tensor| if self.frequencies.magnitude == 1.0 { x } else { x * self.frequencies.magnitude };
        Rotation { cos: scaled(angles.cos()).to_kind(self.kind), signed_sin: scaled(angles.sin()).to_kind(self.kind) }
    }
}

impl Rotation {
    /// Rotates the first R numbers of heads, `[…, heads, D]`.
    pub fn apply(&self, x: &Tensor) -> Tensor {
        pass::rotated(x, &self.cos, &self.signed_sin)
            .unwrap_or_else(|| pass::without_kernel("rotate", x, || self.apply_by_libtorch(x)))
    }

    /// As [`Rotation::apply`], by libtorch's calls, which autograd follows.
    fn apply_by_libtorch(&self, x: &Tensor) -> Tensor {
        let (r, d) = (self.cos.size()[self.cos.dim() - 1], x.size()[x.dim() - 1]);
        if r < d {
            return Tensor::cat(&[self.apply_by_libtorch(&x.narrow(-1, 0, r)), x.narrow(-1, r, d - r)], -1);
        }
        (x * &self.cos).addcmul(&x.roll([r / 2], [-1]), &self.signed_sin)
    }

    /// As [`Rotation::apply`], in place; `x` may be a view.
    pub fn apply_(&self, x: &Tensor) {
        if pass::rotate_in_place(x, &self.cos, &self.signed_sin) {
            return;
        }
        let (r, d) = (self.cos.size()[self.cos.dim() - 1], x.size()[x.dim() - 1]);
        if r < d {
            return self.apply_(&x.narrow(-1, 0, r));
        }
        let rolled = x.roll([r / 2], [-1]);
        let _ = (x * &self.cos).addcmul_out(x, &rolled, &self.signed_sin);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "float32 is what transformers computes in")]
impl Frequencies {
    fn new(rotary: &RotarySpec) -> Self {
        let theta = rotary.theta as f32;
        let plain = || powers(theta, rotary.size).map(f32::recip);
        let scaled = |each: Vec<f32>, magnitude| Self { each, magnitude };
        match &rotary.scaling {
            RopeScaling::Default => scaled(plain().collect(), 1.0),
            RopeScaling::Linear { factor } => scaled(plain().map(|f| f / *factor as f32).collect(), 1.0),
            RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
                let theta = grown_theta(rotary, *factor, *original_max_position_embeddings as f64) as f32;
                scaled(powers(theta, rotary.size).map(f32::recip).collect(), 1.0)
            }
            // Llama 3.1's stretch: long waves are slowed by the factor, short ones kept, a linear ramp in wavelengths per context between.
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let stretched = |frequency: f32| {
                    let frequency = f64::from(frequency);
                    let waves = original_max_position_embeddings / (2.0 * std::f64::consts::PI / frequency);
                    let keep = ((waves - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    ((1.0 - keep) * (frequency / factor) + keep * frequency) as f32
                };
                scaled(plain().map(stretched).collect(), 1.0)
            }
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                let [first, last] = yarn_ramp(rotary);
                let stretched = |(pair, frequency): (usize, f32)| {
                    let keep = 1.0 - ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    let frequency = f64::from(frequency);
                    ((1.0 - keep) * (frequency / factor) + keep * frequency) as f32
                };
                scaled(plain().enumerate().map(stretched).collect(), *attention_factor)
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                original_max_position_embeddings,
                attention_factor,
                ..
            } => {
                let is_long = rotary.context > *original_max_position_embeddings;
                let divisors = if is_long { long_factor } else { short_factor };
                let divided = |(power, divisor): (f32, &f64)| (*divisor as f32 * power).recip();
                scaled(powers(theta, rotary.size).zip(divisors).map(divided).collect(), *attention_factor)
            }
        }
    }
}

/// theta^(2i/R) for each rotated pair i.
fn powers(theta: f32, size: i64) -> impl Iterator<Item = f32> {
    let pairs = size / 2;
    (0..pairs).map(move |i| theta.powf(i as f32 / pairs as f32))
}

/// The base of `dynamic` scaling at the context: theta up to the context of pre-training.
fn grown_theta(rotary: &RotarySpec, factor: f64, original: f64) -> f64 {
    let (context, size) = ((rotary.context as f64).max(original), rotary.size as f64);
    rotary.theta * (factor * context / original - (factor - 1.0)).powf(size / (size - 2.0))
}

/// The pairs between which YaRN's ramp runs: from the last that turns `beta_fast` times in the context of pre-training to the first that turns
/// `beta_slow` times.
fn yarn_ramp(rotary: &RotarySpec) -> [f64; 2] {
    let RopeScaling::Yarn { beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } = rotary.scaling
    else {
        panic!("of yarn only");
    };
    let (context, size) = (original_max_position_embeddings as f64, rotary.size as f64);
    let pair_of = |turns: f64| size * (context / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * rotary.theta.ln());
    let (mut first, mut last) = (pair_of(beta_fast), pair_of(beta_slow));
    if truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, last) = (first.max(0.0), last.min(size - 1.0));
    [first, if first == last { last + 0.001 } else { last }]
}
