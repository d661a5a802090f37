//! What a starter recipe brings: how good heads became on the proving ground (`scripts/smollm2`) with as many tokens, and how long the run takes.

use std::fmt;

use tch::Device;

use crate::draft::heads::layout::HeadsArchitecture;
use crate::plural::duration;
use crate::torch::TorchPanic;
use crate::torch::product_rate::multiply_adds_per_second;
use crate::train::checked::CheckedRun;
use crate::train::plan::BackboneTraining;

/// Tokens of the rows with a loss, and tokens per step with the best tree of 63 nodes on held-out answers: SmolLM2-135M-Instruct's heads by the
/// recipe that `medusa init` proposes (docs/training.md).
type Points = &'static [(f64, f64)];
const HYDRA: Points = &[(30_000.0, 2.15)];
const MEDUSA: Points = &[(30_000.0, 1.92)];

/// The part of the rate of large products that training reaches: packing, attention, the optimizer and files take the rest.
const EFFICIENCY: f64 = 0.5;

/// What to expect of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expectation {
    pub seconds: f64,
    /// With the best tree of 63 nodes, as SmolLM2-135M's heads; `None` for what was not measured there.
    pub tokens_per_step: Option<f64>,
}

impl Expectation {
    /// Times some products on the device.
    ///
    /// # Errors
    /// The device has no memory for them.
    pub fn of(checked: &CheckedRun, heads: HeadsArchitecture, device: Device) -> Result<Self, TorchPanic> {
        let rate = multiply_adds_per_second(device, checked.plan.backbone.dtype.kind(), checked.linear_size())?;
        let frozen = checked.plan.trained == BackboneTraining::Frozen;
        let tokens = checked.train_report.counts.tokens_with_loss as f64;
        let measured = measured(heads).filter(|_| frozen);
        Ok(Self {
            seconds: checked.multiply_adds() / (EFFICIENCY * rate),
            tokens_per_step: measured.and_then(|points| interpolated(points, tokens)),
        })
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if let Some(tokens) = self.tokens_per_step {
            write!(
                f,
                "about {tokens:.1} tokens per step with 63 nodes (SmolLM2-135M's heads, after as many tokens); "
            )?;
        }
        write!(f, "about {} of training", duration(self.seconds))
    }
}

fn measured(heads: HeadsArchitecture) -> Option<Points> {
    match heads {
        HeadsArchitecture::Medusa => Some(MEDUSA),
        HeadsArchitecture::Hydra => Some(HYDRA),
        HeadsArchitecture::HydraPlusPlus => None,
    }
}

/// Linear in the logarithm of the tokens; `None` for fewer than were measured, and the last value for more.
fn interpolated(points: Points, tokens: f64) -> Option<f64> {
    let above = points.partition_point(|&(at, _)| at <= tokens);
    let &(from, low) = points[..above].last()?;
    let Some(&(to, high)) = points.get(above) else { return Some(low) };
    Some(low + (tokens / from).ln() / (to / from).ln() * (high - low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_step_lie_between_the_measured_ones() {
        let points: Points = &[(10.0, 1.5), (1000.0, 2.5)];
        let expected = |tokens| interpolated(points, tokens);
        assert_eq!(
            (expected(9.0), expected(10.0), expected(1000.0), expected(1e9)),
            (None, Some(1.5), Some(2.5), Some(2.5))
        );
        let middle = expected(100.0).unwrap();
        assert!((middle - 2.0).abs() < 1e-12, "{middle}");
    }

    #[test]
    fn more_data_is_better() {
        for points in [HYDRA, MEDUSA] {
            assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1), "{points:?}");
        }
    }
}
