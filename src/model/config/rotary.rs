//! Rotary position embeddings as `config.json` describes them, in the spellings of transformers 4 and 5.

use std::ops::RangeInclusive;
use std::path::Path;

use super::error::{ConfigError, above_zero, bad, two_sources, within};
use super::family::Family;
use super::keys::{ConfigKeys, RopeKeys};
use crate::model::block_spec::RopeScaling;

/// The rotary embeddings of a backbone, and the context that they allow.
#[derive(Debug, PartialEq)]
pub(super) struct Rotary {
    pub theta: f64,
    pub scaling: RopeScaling,
    /// Base of sliding layers where it is another.
    pub local_theta: Option<f64>,
    /// Rotated numbers of a head where they are fewer than all.
    pub size: Option<i64>,
    /// Default context in tokens.
    pub context: i64,
}

/// Reads the keys of a config whose heads have `head_dim` numbers. `rope_scaling` takes the place of `rope_parameters`, as in transformers, where they
/// do not contradict each other.
pub(super) fn resolve(
    path: &Path,
    written: &ConfigKeys,
    family: &Family,
    head_dim: i64,
) -> Result<Rotary, ConfigError> {
    let parameters = family.rope_parameters(path, written)?;
    let mut scaling = written.rope_scaling.clone().filter(|scaling| *scaling != RopeKeys::default());
    if let (Some(scaling), Some(full), true) = (&mut scaling, parameters.full, family.local_rope_theta.is_some()) {
        scaling.rope_theta = scaling.rope_theta.or(full.rope_theta); // transformers changes full_attention by rope_scaling
    }
    let rotations = |full: Option<&RopeKeys>| {
        let rope = full.cloned().unwrap_or_default();
        rotary(path, written, family, head_dim, [rope, parameters.sliding.cloned().unwrap_or_default()])
    };
    let (Some(scaling), Some(full)) = (&scaling, parameters.full) else {
        return rotations(scaling.as_ref().or(parameters.full));
    };
    let [rotary, other] = [rotations(Some(scaling))?, rotations(Some(full))?];
    if rotary != other {
        return Err(two_sources(path, ["rope_scaling", "rope_parameters"], "their rotary embeddings differ"));
    }
    Ok(rotary)
}

fn rotary(
    path: &Path,
    written: &ConfigKeys,
    family: &Family,
    head_dim: i64,
    [rope, sliding]: [RopeKeys; 2],
) -> Result<Rotary, ConfigError> {
    let theta = rope.rope_theta.or(written.rope_theta).unwrap_or(family.rope_theta);
    let sliding_theta = sliding.rope_theta.or(written.rope_local_base_freq);
    let local_theta = family.local_rope_theta.map(|default| sliding_theta.unwrap_or(default));
    for theta in [Some(theta), local_theta].into_iter().flatten() {
        within(path, "rope_theta", theta, 1.0..=1e15)?;
    }
    if let Some(kind) = sliding.kind().filter(|kind| *kind != "default") {
        return Err(bad(path, "rope_parameters.sliding_attention", "rope_type default", kind));
    }
    let size = match family.rotates_parts {
        true => rope.partial_rotary_factor.or(written.partial_rotary_factor),
        false => family.refuse_partial_rotary(path, [&rope, &sliding]).map(|()| None)?,
    };
    let size = size.map(|part| rotated(path, head_dim, part)).transpose()?;
    let reader = Reader { path, written, family, rope, theta, size: size.unwrap_or(head_dim) };
    let scaling = reader.scaling()?;
    let context = reader.context(&scaling);
    Ok(Rotary { theta, scaling, local_theta, size: size.filter(|size| *size != head_dim), context })
}

fn rotated(path: &Path, head_dim: i64, part: f64) -> Result<i64, ConfigError> {
    #[expect(clippy::cast_possible_truncation, reason = "at most head_dim")]
    let size = (head_dim as f64 * part) as i64;
    if part > 1.0 || size < 2 || size % 2 != 0 {
        let expected = format!("a part of head_dim = {head_dim} that is an even number");
        return Err(bad(path, "partial_rotary_factor", expected, part));
    }
    Ok(size)
}

/// Of what divides frequencies, or scales the attention.
const FACTORS: RangeInclusive<f64> = 1e-3..=1e6;

struct Reader<'c> {
    path: &'c Path,
    written: &'c ConfigKeys,
    family: &'c Family,
    rope: RopeKeys,
    theta: f64,
    /// Rotated numbers of a head.
    size: i64,
}

impl Reader<'_> {
    fn scaling(&self) -> Result<RopeScaling, ConfigError> {
        let known = self.family.rope_types;
        if let Some(other) = self.rope.kind().filter(|kind| !known.contains(kind)) {
            let expected = format!("rope_type {} beside `model_type` {}", known.join(", "), self.family.model_type);
            return Err(bad(self.path, "rope_scaling", expected, other));
        }
        Ok(match self.rope.kind() {
            None if self.rope.factor.is_some() => {
                return Err(bad(self.path, "rope_scaling", "a rope_type beside its factor", "none"));
            }
            Some("linear") => RopeScaling::Linear { factor: self.factor()? },
            Some("dynamic") if self.size == 2 => {
                return Err(bad(self.path, "head_dim", "more than 2 rotated numbers for rope_type dynamic", self.size));
            }
            Some("dynamic") => RopeScaling::Dynamic {
                factor: self.factor()?,
                original_max_position_embeddings: self.written.max_position_embeddings,
            },
            Some("llama3") => self.llama3()?,
            Some("yarn") => self.yarn()?,
            Some("longrope" | "su") => self.longrope()?,
            _ => RopeScaling::Default,
        })
    }

    fn need(&self, key: &'static str, value: Option<f64>) -> Result<f64, ConfigError> {
        let value = value.ok_or_else(|| bad(self.path, key, "a number in rope_scaling", "nothing"))?;
        above_zero(self.path, key, value)
    }

    fn factor(&self) -> Result<f64, ConfigError> {
        within(self.path, "factor", self.need("factor", self.rope.factor)?, FACTORS)
    }

    /// The context of pre-training. The key beside `rope_scaling` counts before the one in it, as in transformers.
    fn original(&self) -> Result<f64, ConfigError> {
        let in_scaling = self.rope.original_max_position_embeddings;
        let beside = self.written.original_max_position_embeddings;
        let original = match (beside, in_scaling, self.family.original_context) {
            (Some(beside), ..) => beside,
            (None, Some(in_scaling), Some(default)) if in_scaling != default => {
                let reason = format!(
                    "{} takes {default} where the key is not beside rope_scaling, in which it is {in_scaling}",
                    self.family.model_type
                );
                return Err(two_sources(self.path, ["original_max_position_embeddings", "rope_scaling"], reason));
            }
            (None, in_scaling, default) => {
                in_scaling.or(default).unwrap_or(self.written.max_position_embeddings as f64)
            }
        };
        above_zero(self.path, "original_max_position_embeddings", original)
    }

    fn original_tokens(&self) -> Result<i64, ConfigError> {
        #[expect(clippy::cast_possible_truncation, reason = "tokens of a context")]
        self.original().map(|tokens| tokens as i64)
    }

    /// A key that has a default.
    fn or(&self, key: &'static str, value: Option<f64>, default: f64) -> Result<f64, ConfigError> {
        above_zero(self.path, key, value.unwrap_or(default))
    }

    fn llama3(&self) -> Result<RopeScaling, ConfigError> {
        let low_freq_factor = self.need("low_freq_factor", self.rope.low_freq_factor)?;
        let high_freq_factor = self.need("high_freq_factor", self.rope.high_freq_factor)?;
        if high_freq_factor <= low_freq_factor {
            let expected = format!("a number above low_freq_factor = {low_freq_factor}");
            return Err(bad(self.path, "high_freq_factor", expected, high_freq_factor));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.factor()?,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: self.original()?,
        })
    }

    fn yarn(&self) -> Result<RopeScaling, ConfigError> {
        let factor = self.factor()?;
        if self.theta == 1.0 {
            return Err(bad(self.path, "rope_theta", "another number than 1 for rope_type yarn", self.theta));
        }
        let grown = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let by_default = match (self.rope.mscale, self.rope.mscale_all_dim) {
            (Some(some), Some(all)) if some != 0.0 && all != 0.0 => grown(some) / grown(all),
            _ => grown(1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.or("beta_fast", self.rope.beta_fast, 32.0)?,
            beta_slow: self.or("beta_slow", self.rope.beta_slow, 1.0)?,
            truncate: self.rope.truncate.unwrap_or(true),
            original_max_position_embeddings: self.original_tokens()?,
            attention_factor: self.attention_factor(by_default)?,
        })
    }

    fn attention_factor(&self, default: f64) -> Result<f64, ConfigError> {
        within(self.path, "attention_factor", self.rope.attention_factor.unwrap_or(default), FACTORS)
    }

    fn longrope(&self) -> Result<RopeScaling, ConfigError> {
        let (original, longest) = (self.original_tokens()?, self.written.max_position_embeddings);
        // As transformers 5; version 4 ignores `factor` where the context of pre-training is known.
        let factor = self.rope.factor.unwrap_or(longest as f64 / original as f64);
        let factor = within(self.path, "factor", factor, FACTORS)?;
        let by_default = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        Ok(RopeScaling::LongRope {
            short_factor: self.divisors("short_factor", self.rope.short_factor.as_ref())?,
            long_factor: self.divisors("long_factor", self.rope.long_factor.as_ref())?,
            original_max_position_embeddings: original,
            longest,
            attention_factor: self.attention_factor(by_default)?,
        })
    }

    fn divisors(&self, key: &'static str, written: Option<&Vec<f64>>) -> Result<Vec<f64>, ConfigError> {
        let (least, most) = (FACTORS.start(), FACTORS.end());
        let expected = || format!("{} numbers from {least} to {most}, one per rotated pair", self.size / 2);
        let all = written.ok_or_else(|| bad(self.path, key, expected(), "nothing"))?;
        if all.len() as i64 != self.size / 2 || !all.iter().all(|divisor| FACTORS.contains(divisor)) {
            let odd = all
                .iter()
                .find(|divisor| !FACTORS.contains(divisor))
                .map_or_else(String::new, |odd| format!(", with {odd}"));
            return Err(bad(self.path, key, expected(), format!("{} numbers{odd}", all.len())));
        }
        Ok(all.clone())
    }

    /// As vLLM derives it: `linear` and `yarn` stretch the context of pre-training. Where a longer context changes the frequencies of short
    /// texts as well (`dynamic`, `longrope`), the default is the context of pre-training.
    fn context(&self, scaling: &RopeScaling) -> i64 {
        let written = self.written.max_position_embeddings;
        #[expect(clippy::cast_possible_truncation, reason = "tokens of a context")]
        let stretched = |tokens: i64, factor: f64| (tokens as f64 * factor) as i64;
        match *scaling {
            RopeScaling::Linear { factor } if !self.family.context_is_scaled => stretched(written, factor),
            RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
                written.max(stretched(original_max_position_embeddings, factor))
            }
            RopeScaling::LongRope { original_max_position_embeddings, longest, .. } => {
                original_max_position_embeddings.min(longest)
            }
            RopeScaling::Default
            | RopeScaling::Linear { .. }
            | RopeScaling::Dynamic { .. }
            | RopeScaling::Llama3 { .. } => written,
        }
    }
}
