//! Notices a run whose loss rises above that of its first step.

use std::collections::VecDeque;

use crate::formats::metrics::MetricsLine;

/// Steps whose mean is compared with the first one.
const STEPS: usize = 10;
/// How far a loss rises before that is reported. A divergence from the original backbone starts at 0.
const FACTOR: f64 = 1.5;
const MARGIN: f64 = 1.0;

/// A loss far above that of the first step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RisenLoss {
    /// `loss`, `LM loss` or `heads loss`.
    pub name: &'static str,
    pub first: f64,
    /// Mean of the last steps.
    pub mean: f64,
}

/// The losses of a run's steps, from the first of this process on.
#[derive(Debug, Default)]
pub(super) struct LossWatch {
    lm: Option<LossHistory>,
    heads: Option<LossHistory>,
    is_reported: bool,
}

#[derive(Debug)]
struct LossHistory {
    first: f64,
    last: VecDeque<f64>,
}

impl LossWatch {
    /// Adds a step. Returns a loss that has risen, but only the first time.
    pub(super) fn after(&mut self, line: &MetricsLine) -> Option<RisenLoss> {
        let lm = line.lm_loss.and_then(|loss| LossHistory::add(&mut self.lm, loss));
        let heads = line.heads_loss.and_then(|loss| LossHistory::add(&mut self.heads, loss));
        let name = if line.lm_loss.is_some() { "heads loss" } else { "loss" };
        let risen = [("LM loss", lm), (name, heads)].into_iter().find_map(|(name, risen)| {
            let [first, mean] = risen?;
            Some(RisenLoss { name, first, mean })
        });
        let is_reported = self.is_reported;
        self.is_reported |= risen.is_some();
        risen.filter(|_| !is_reported)
    }
}

impl LossHistory {
    /// The first loss and the mean of the last ones, if that is far above.
    fn add(history: &mut Option<Self>, loss: f64) -> Option<[f64; 2]> {
        let Self { first, last } = history.get_or_insert_with(|| Self { first: loss, last: VecDeque::new() });
        last.push_back(loss);
        if last.len() > STEPS {
            last.pop_front();
        }
        let mean = last.iter().sum::<f64>() / STEPS as f64;
        (last.len() == STEPS && mean > FACTOR * *first + MARGIN).then_some([*first, mean])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps, counted from 1, after which a loss was reported to have risen.
    fn risen_losses(losses: impl IntoIterator<Item = (Option<f64>, f64)>) -> Vec<(usize, RisenLoss)> {
        let mut watch = LossWatch::default();
        let line = |(lm_loss, heads_loss): (Option<f64>, f64)| MetricsLine {
            lm_loss,
            heads_loss: Some(heads_loss),
            ..MetricsLine::parse(br#"{"split": "train", "step": 1}"#).unwrap()
        };
        let risen = losses.into_iter().map(line).zip(1..).filter_map(|(line, step)| Some((step, watch.after(&line)?)));
        risen.collect()
    }

    #[test]
    fn a_loss_that_stays_high_above_the_first_is_reported_once() {
        let rising = (0..60).map(|step| (None, 20.0 + f64::from(step)));
        let risen = RisenLoss { name: "loss", first: 20.0, mean: 31.5 };
        assert_eq!(risen_losses(rising), [(17, risen)]);
        let far = (0..60).map(|step| (None, if step == 0 { 29.0 } else { 5000.0 }));
        assert_eq!(risen_losses(far)[0].0, 10);
    }

    #[test]
    fn noise_and_a_loss_that_does_not_fall_are_not_reported() {
        let noise = (0..100).map(|step| (None, if step % 10 == 9 { 90.0 } else { 20.0 }));
        assert_eq!(risen_losses(noise), []);
        assert_eq!(risen_losses((0..100).map(|_| (Some(2.0), 20.0))), []);
    }

    #[test]
    fn the_two_losses_of_medusa_2_are_distinguished() {
        let name = |lm: f64, heads: f64| {
            risen_losses((0..20).map(|step| if step == 0 { (Some(0.0), 20.0) } else { (Some(lm), heads) }))[0].1.name
        };
        assert_eq!(name(2.0, 19.0), "LM loss", "a divergence that starts at 0");
        assert_eq!(name(0.1, 60.0), "heads loss");
    }
}
