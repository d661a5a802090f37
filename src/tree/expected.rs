//! Tokens per step to expect on other texts than those of a calibration. No tensors here.

use super::replay::Replay;

/// The fewest texts of which a spread is estimated.
pub const MIN_TEXTS: usize = 3;
/// The standard normal distribution's 97.5 % quantile.
const Z: f64 = 1.959_964;

/// Tokens per step, and how far other texts may be from that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpectedTokens {
    pub per_step: f64,
    /// The mean of 95 % of the sets of as many other texts lies in it; `None` where there are too few texts for an interval.
    pub interval: Option<[f64; 2]>,
}

impl ExpectedTokens {
    /// From the replay of each text with a tree of at most `depth` levels: all tokens ÷ all steps. The standard error is that of a ratio of
    /// means (Cochran, Sampling Techniques, section 2.11); that of a difference between two sets is √2 times as large.
    pub fn new(replays: &[Replay], depth: usize) -> Self {
        let sum = |pick: fn(&Replay) -> usize| replays.iter().map(pick).sum::<usize>() as f64;
        let (steps, texts) = (sum(|replay| replay.steps), replays.len() as f64);
        let per_step = if steps > 0.0 { sum(|replay| replay.tokens) / steps } else { 0.0 };
        let residual = |replay: &Replay| replay.tokens as f64 - per_step * replay.steps as f64;
        let squares: f64 = replays.iter().map(|replay| residual(replay).powi(2)).sum();
        let has_spread = replays.len() >= MIN_TEXTS && steps > 0.0;
        let interval = has_spread.then(|| {
            let half = t_quantile(texts - 1.0) * (2.0 * squares * texts / (texts - 1.0)).sqrt() / steps;
            [per_step - half, per_step + half].map(|end| end.clamp(1.0, 1.0 + depth as f64))
        });
        Self { per_step, interval }
    }
}

/// The 97.5 % quantile of Student's t distribution with at least 2 degrees of freedom, by its expansion around the normal distribution
/// (Abramowitz and Stegun, 26.7.5).
fn t_quantile(degrees: f64) -> f64 {
    let [z3, z5, z7, z9] = [3, 5, 7, 9].map(|power| Z.powi(power));
    let terms = [
        (z3 + Z) / 4.0,
        (5.0 * z5 + 16.0 * z3 + 3.0 * Z) / 96.0,
        (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * Z) / 384.0,
        (79.0 * z9 + 776.0 * z7 + 1482.0 * z5 - 1920.0 * z3 - 945.0 * Z) / 92160.0,
    ];
    Z + terms.iter().zip(1..).map(|(term, power)| term / degrees.powi(power)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (degrees, table) in [(2.0, 4.303), (5.0, 2.571), (39.0, 2.023), (1e6, 1.960)] {
            assert!((t_quantile(degrees) / table - 1.0).abs() < 0.01, "{degrees}: {}", t_quantile(degrees));
        }
    }

    #[test]
    fn an_interval_holds_the_mean_of_another_set_of_as_many_texts() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut set = |texts: usize| -> Vec<Replay> {
            let text = |_| {
                let steps = rng.random_range(10..40);
                let ease = rng.random_range(0.0..1.0); // the texts differ
                let tokens = (0..steps).map(|_| if rng.random_bool(ease) { 4 } else { 1 }).sum();
                Replay { tokens, steps }
            };
            (0..texts).map(text).collect()
        };
        for texts in [6, 40] {
            let mut held = 0;
            for _ in 0..1000 {
                let (one, other) = (ExpectedTokens::new(&set(texts), 3), ExpectedTokens::new(&set(texts), 3));
                held += usize::from(one.interval.is_some_and(|[low, high]| (low..=high).contains(&other.per_step)));
            }
            assert!((920..=980).contains(&held), "{held} of 1000 sets of {texts} texts");
        }
    }

    #[test]
    fn few_texts_have_no_interval() {
        let text = Replay { tokens: 9, steps: 3 };
        assert_eq!(ExpectedTokens::new(&[text; 2], 5), ExpectedTokens { per_step: 3.0, interval: None });
        assert_eq!(ExpectedTokens::new(&[text; 3], 5).interval, Some([3.0, 3.0]));
        assert_eq!(ExpectedTokens::new(&[], 5), ExpectedTokens { per_step: 0.0, interval: None });
    }
}
