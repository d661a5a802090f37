//! Schedules of the learning rate (warm-up, then cosine, linear or constant) and of λ0.

use serde::{Deserialize, Serialize};

use crate::numbers::Fraction;

/// `[schedule]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The shape after warm-up.
    pub name: ScheduleName,
    /// Optimizer steps of linear rise from 0. Exactly one of `warmup_steps` and `warmup_ratio` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<usize>,
    /// The part of the run's steps that rise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_ratio: Option<Fraction>,
    /// The last rate ÷ the peak: where `cosine` and `linear` end.
    #[serde(default = "down_to_zero")]
    pub min_ratio: Fraction,
}

fn down_to_zero() -> Fraction {
    Fraction::ZERO
}

/// Shapes of the schedule, with transformers' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleName {
    /// Half a cosine down to `min_ratio`.
    Cosine,
    /// A straight line down to `min_ratio`.
    Linear,
    /// The peak rate to the end.
    Constant,
}

/// λ0, the factor of the heads' loss, over a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadsCoefficient {
    pub peak: f64,
    pub scheduler: MedusaScheduler,
}

/// Shapes of λ0 over the run, with the axolotl fork's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MedusaScheduler {
    /// λ0 from the first step.
    #[default]
    Constant,
    /// A straight line from 0.
    Linear,
    /// A quarter of a sine from 0: the paper's one-stage training.
    Sine,
}

impl HeadsCoefficient {
    /// λ0 of the update after `step` finished updates out of `total`: λ0, λ0·s/S or λ0·sin(π/2·s/S).
    pub fn at(&self, step: usize, total: usize) -> f64 {
        let (step, total) = (step as f64, total.max(1) as f64);
        self.peak
            * match self.scheduler {
                MedusaScheduler::Constant => 1.0,
                MedusaScheduler::Linear => step / total,
                MedusaScheduler::Sine => (std::f64::consts::FRAC_PI_2 * step / total).sin(),
            }
    }
}

impl ScheduleConfig {
    /// The factor on the peak rate for the update after `step` (0-based) finished updates out of `total`, as in
    /// transformers' `get_{cosine,linear,constant}_schedule_with_warmup`, but down to m = `min_ratio`, as Hydra's trainer does: the factor f
    /// between 1 and 0 becomes m + (1 - m)·f.
    pub fn factor(&self, step: usize, total: usize) -> f64 {
        let warmup = self.warmup(total);
        if step < warmup {
            return step as f64 / warmup as f64;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let progress = ((step - warmup) as f64 / span).min(1.0);
        let falling = match self.name {
            ScheduleName::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            ScheduleName::Linear => 1.0 - progress,
            ScheduleName::Constant => 1.0,
        };
        self.min_ratio.get() + (1.0 - self.min_ratio.get()) * falling
    }

    /// Steps of the warm-up in a run of `total` steps; a ratio is rounded up, as in transformers.
    fn warmup(&self, total: usize) -> usize {
        let from_ratio = |ratio: Fraction| (ratio.get() * total as f64).ceil() as usize;
        self.warmup_steps.or(self.warmup_ratio.map(from_ratio)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_the_steps_is_rounded_up() {
        let schedule = |ratio| ScheduleConfig {
            warmup_steps: None,
            warmup_ratio: Fraction::new(ratio),
            ..schedule(ScheduleName::Cosine)
        };
        assert_eq!([5, 10, 11].map(|total| schedule(0.1).warmup(total)), [1, 1, 2]);
        assert_eq!(
            (schedule(0.0).warmup(100), schedule(0.1).factor(5, 100), schedule(0.1).factor(10, 100)),
            (0, 0.5, 1.0)
        );
    }

    #[test]
    fn lambda0_follows_its_schedule() {
        let at = |scheduler| [0, 5, 10].map(|step| HeadsCoefficient { peak: 0.5, scheduler }.at(step, 10));
        assert_eq!(at(MedusaScheduler::Constant), [0.5, 0.5, 0.5]);
        assert_eq!(at(MedusaScheduler::Linear), [0.0, 0.25, 0.5]);
        let [start, middle, end] = at(MedusaScheduler::Sine);
        assert!(start == 0.0 && (middle - 0.5 * 0.5f64.sqrt()).abs() < 1e-12 && (end - 0.5).abs() < 1e-12);
    }

    fn schedule(name: ScheduleName) -> ScheduleConfig {
        ScheduleConfig { name, warmup_steps: Some(10), warmup_ratio: None, min_ratio: down_to_zero() }
    }

    #[test]
    fn warm_up_rises_from_zero_to_the_peak() {
        for name in [ScheduleName::Cosine, ScheduleName::Linear, ScheduleName::Constant] {
            let factors: Vec<f64> = (0..=10).map(|s| schedule(name).factor(s, 110)).collect();
            assert_eq!((factors[0], factors[5], factors[10]), (0.0, 0.5, 1.0));
        }
    }

    #[test]
    fn rates_end_at_the_smallest_and_not_below() {
        let at =
            |name, step| ScheduleConfig { min_ratio: Fraction::new(0.33).unwrap(), ..schedule(name) }.factor(step, 110);
        for name in [ScheduleName::Cosine, ScheduleName::Linear] {
            assert!((at(name, 60) - 0.665).abs() < 1e-12 && (at(name, 110) - 0.33).abs() < 1e-12);
        }
        assert_eq!([at(ScheduleName::Constant, 110), at(ScheduleName::Cosine, 5)], [1.0, 0.5]);
    }

    #[test]
    fn cosine_and_linear_end_at_zero() {
        assert!((schedule(ScheduleName::Cosine).factor(60, 110) - 0.5).abs() < 1e-12);
        assert!(schedule(ScheduleName::Cosine).factor(110, 110).abs() < 1e-12);
        assert!((schedule(ScheduleName::Linear).factor(35, 110) - 0.75).abs() < 1e-12);
        assert_eq!(schedule(ScheduleName::Constant).factor(109, 110), 1.0);
    }
}
