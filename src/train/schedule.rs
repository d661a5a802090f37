//! The learning rate over a run: warm-up, then cosine, linear or constant.

use serde::{Deserialize, Serialize};

/// `[schedule]` of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The shape after warm-up.
    pub name: ScheduleName,
    /// Optimizer steps of linear rise from 0.
    #[serde(default)]
    pub warmup_steps: usize,
}

/// Shapes of the schedule; the names are transformers'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleName {
    /// Half a cosine down to 0.
    Cosine,
    /// A straight line down to 0.
    Linear,
    /// The peak rate to the end.
    Constant,
}

impl ScheduleConfig {
    /// The factor on the peak rate for the update made after `step` (0-based) finished updates out of `total`,
    /// as transformers' `get_{cosine,linear,constant}_schedule_with_warmup`.
    pub fn factor(&self, step: usize, total: usize) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let span = total.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / span).min(1.0);
        match self.name {
            ScheduleName::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            ScheduleName::Linear => 1.0 - progress,
            ScheduleName::Constant => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(name: ScheduleName) -> ScheduleConfig {
        ScheduleConfig { name, warmup_steps: 10 }
    }

    #[test]
    fn warm_up_rises_from_zero_to_the_peak() {
        for name in [ScheduleName::Cosine, ScheduleName::Linear, ScheduleName::Constant] {
            let factors: Vec<f64> = (0..=10).map(|s| schedule(name).factor(s, 110)).collect();
            assert_eq!((factors[0], factors[5], factors[10]), (0.0, 0.5, 1.0));
        }
    }

    #[test]
    fn cosine_and_linear_end_at_zero() {
        assert!((schedule(ScheduleName::Cosine).factor(60, 110) - 0.5).abs() < 1e-12);
        assert!(schedule(ScheduleName::Cosine).factor(110, 110).abs() < 1e-12);
        assert!((schedule(ScheduleName::Linear).factor(35, 110) - 0.75).abs() < 1e-12);
        assert_eq!(schedule(ScheduleName::Constant).factor(109, 110), 1.0);
    }
}
