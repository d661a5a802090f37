//! What a starter recipe brings: how good heads became on the proving ground (`scripts/smollm2`) with as many tokens, and how long the run takes.

use std::fmt;

use tch::Device;

use crate::draft::heads::layout::HeadsArchitecture;
use crate::plural::duration;
use crate::train::checked::CheckedRun;
use crate::train::error::TrainError;
use crate::train::plan::BackboneTraining;

/// How good heads of SmolLM2-135M-Instruct became (benches/results/cpu-2026-11-29-smollm2.md).
struct MeasuredHeads {
    /// Tokens of the rows with a loss, and tokens per step.
    points: &'static [(f64, f64)],
    /// How they decoded, in words.
    decoding: &'static str,
}

/// The best tree, on answers that were held out from the same rows.
const WITH_63_NODES: &str = "with 63 nodes";
const HYDRA: MeasuredHeads = MeasuredHeads { points: &[(30_000.0, 2.15), (875_000.0, 2.74)], decoding: WITH_63_NODES };
const MEDUSA: MeasuredHeads = MeasuredHeads { points: &[(30_000.0, 1.92)], decoding: WITH_63_NODES };
/// Of two heads, decoded as the commands of `medusa init` do on a CPU: those of `scripts/smollm2`, and of data/smollm2 (W2 of rank 192, soft
/// targets).
const JOINED_HYDRA: MeasuredHeads = MeasuredHeads {
    points: &[(30_000.0, 1.94), (875_000.0, 2.11)],
    decoding: "joined with prompt lookup in bfloat16 on MT-bench (1.4 to 1.8 on quantised weights, whose trees are smaller)",
};

/// What to expect of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expectation {
    /// `None` where the backbone has no weights to time.
    pub seconds: Option<f64>,
    /// `None` for what was not measured.
    pub tokens_per_step: Option<MeasuredTokens>,
}

/// Tokens per step on the proving ground.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct MeasuredTokens {
    pub tokens_per_step: f64,
    /// So many tokens with a loss reached it; there may be more of them here.
    pub measured_tokens: f64,
    /// How they decoded, in words.
    pub decoding: &'static str,
}

impl Expectation {
    /// Times the run on the backbone's first layers.
    ///
    /// # Errors
    /// [`TrainError`], as the run would fail.
    pub fn of(checked: &CheckedRun, heads: HeadsArchitecture, device: Device) -> Result<Self, TrainError> {
        let frozen = checked.plan.trained == BackboneTraining::Frozen;
        let tokens = checked.train_report.counts.tokens_with_loss as f64;
        Ok(Self {
            seconds: checked.expected_seconds()?,
            tokens_per_step: measured(heads, device).filter(|_| frozen).and_then(|heads| heads.at(tokens)),
        })
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if let Some(MeasuredTokens { tokens_per_step, measured_tokens, decoding }) = self.tokens_per_step {
            let thousands = measured_tokens / 1e3;
            write!(
                f,
                "{tokens_per_step:.1} tokens per step {decoding}, as SmolLM2-135M's heads of {thousands:.0} thousand tokens; "
            )?;
        }
        match self.seconds {
            Some(seconds) => write!(f, "about {} of training", duration(seconds)),
            None => write!(f, "the time is unknown: the backbone's folder has no weights"),
        }
    }
}

fn measured(heads: HeadsArchitecture, device: Device) -> Option<MeasuredHeads> {
    match (heads, device) {
        (HeadsArchitecture::Medusa, _) => Some(MEDUSA),
        (HeadsArchitecture::Hydra, Device::Cpu) => Some(JOINED_HYDRA),
        (HeadsArchitecture::Hydra, _) => Some(HYDRA),
        (HeadsArchitecture::HydraPlusPlus, _) => None,
    }
}

impl MeasuredHeads {
    /// Linear in the logarithm of the tokens; `None` for fewer than were measured, and the last value for more.
    fn at(&self, tokens: f64) -> Option<MeasuredTokens> {
        let above = self.points.partition_point(|&(at, _)| at <= tokens);
        let &(from, low) = self.points[..above].last()?;
        let (to, high) = self.points.get(above).copied().unwrap_or((from, low));
        let measured_tokens = tokens.min(to);
        let part = if to > from { (measured_tokens / from).ln() / (to / from).ln() } else { 0.0 };
        Some(MeasuredTokens { tokens_per_step: low + part * (high - low), measured_tokens, decoding: self.decoding })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_step_lie_between_the_measured_ones() {
        let measured = MeasuredHeads { points: &[(10.0, 1.5), (1000.0, 2.5)], decoding: WITH_63_NODES };
        let expected = |tokens| measured.at(tokens).map(|found| (found.tokens_per_step, found.measured_tokens));
        assert_eq!((expected(9.0), expected(10.0)), (None, Some((1.5, 10.0))));
        assert_eq!((expected(1000.0), expected(1e9)), (Some((2.5, 1000.0)), Some((2.5, 1000.0))));
        let (middle, at) = expected(100.0).unwrap();
        assert!((middle - 2.0).abs() < 1e-12 && at == 100.0, "{middle}");
    }

    #[test]
    fn more_data_is_better() {
        for MeasuredHeads { points, .. } in [HYDRA, JOINED_HYDRA, MEDUSA] {
            assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1), "{points:?}");
        }
    }
}
