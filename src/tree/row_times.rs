//! How long a step takes by the tokens that it computes, and how many guesses are worth that time. No tensors here.

use crate::formats::latency::{Latency, StepTime};

/// The least expected speedup for which guesses are made: estimates err, and guesses cost time outside the pass.
const MIN_SPEEDUP: f64 = 1.05;

/// Times of steps by their rows, the tokens of all texts together: at least that of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowTimes {
    /// Rows and milliseconds, both rising.
    known: Vec<(usize, f64)>,
}

/// The rows of a step beside its guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRows {
    /// Texts that are decoded together, each with its root.
    pub texts: usize,
    /// Of each text, the tokens that are computed in every step with guesses, as a window of lookahead decoding.
    pub beside: usize,
}

impl StepRows {
    /// One text and its guesses.
    pub const OF_ONE: Self = Self { texts: 1, beside: 0 };
}

impl RowTimes {
    /// Of measured steps of one text.
    pub fn of(latency: &Latency) -> Self {
        let mut known = vec![(1, latency.plain_step_ms)];
        let steps = latency.steps.iter().map(|&StepTime { nodes, step_ms, .. }| (nodes + 1, step_ms));
        let mut steps: Vec<(usize, f64)> = steps.filter(|&(rows, _)| rows > 1).collect();
        steps.sort_by_key(|&(rows, _)| rows);
        for (rows, ms) in steps {
            let before = known.last().map_or(0.0, |&(_, ms)| ms);
            known.push((rows, ms.max(before))); // more rows are never faster: that was another program
        }
        Self { known }
    }

    /// The time of a step: measured, or on a line between two measured ones, or on the last one's line.
    pub fn ms(&self, rows: usize) -> f64 {
        let above = self.known.partition_point(|&(known, _)| known < rows).min(self.known.len() - 1).max(1);
        let Some(&[(below, from), (above, to)]) = self.known.get(above - 1..=above) else {
            return self.known[0].1 * rows as f64; // only one row was measured
        };
        from + (to - from) * (rows as f64 - below as f64) / (above - below) as f64
    }

    /// How many guesses make the most tokens per second, given the probability that each becomes text, the likeliest first.
    pub fn fastest(&self, step: StepRows, probabilities: impl IntoIterator<Item = f64>) -> usize {
        self.fastest_with_speed(step, probabilities).0
    }

    /// As [`RowTimes::fastest`], and how many times as fast as a step without guesses that is expected to be; 1 for no guesses.
    pub fn fastest_with_speed(&self, step: StepRows, probabilities: impl IntoIterator<Item = f64>) -> (usize, f64) {
        let StepRows { texts, beside } = step;
        let plain = self.ms(texts);
        let (mut tokens, mut best, mut fastest) = (1.0, (0, 1.0), MIN_SPEEDUP);
        for (guesses, probability) in (1..).zip(probabilities) {
            tokens += probability;
            let speed = tokens * plain / self.ms(texts * (1 + beside + guesses));
            if speed > fastest {
                (best, fastest) = ((guesses, speed), speed);
            }
        }
        best
    }
}

#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    /// Milliseconds by rows.
    pub(crate) fn row_times(known: &[(usize, f64)]) -> RowTimes {
        RowTimes { known: known.to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::examples::row_times;
    use super::*;
    use crate::formats::latency::examples::latency;

    #[test]
    fn times_lie_on_lines_and_never_fall() {
        let times = RowTimes::of(&latency(&[(7, 1, 6.0), (3, 1, 4.0), (15, 1, 5.0)]));
        assert_eq!(times, row_times(&[(1, 2.0), (4, 4.0), (8, 6.0), (16, 6.0)]));
        let times = row_times(&[(1, 2.0), (3, 4.0), (5, 10.0)]);
        assert_eq!([1, 2, 3, 4, 5, 6, 15].map(|rows| times.ms(rows)), [2.0, 3.0, 4.0, 7.0, 10.0, 13.0, 40.0]);
        assert_eq!(row_times(&[(1, 2.0)]).ms(3), 6.0);
    }

    #[test]
    fn guesses_are_taken_while_they_pay_for_their_rows() {
        let guesses = [0.5, 0.25, 0.125, 0.06, 0.03];
        let fastest =
            |per_row: f64| row_times(&[(1, 1.0), (9, 1.0 + 8.0 * per_row)]).fastest(StepRows::OF_ONE, guesses);
        assert_eq!(fastest(0.0), 5, "rows that cost nothing");
        assert_eq!([0.1, 0.2, 0.3, 0.5, 1.0].map(fastest), [2, 1, 1, 0, 0]);
        let times = row_times(&[(1, 1.0), (8, 1.0), (16, 2.0), (64, 8.0)]);
        assert_eq!(times.fastest(StepRows { texts: 8, beside: 0 }, guesses), 0, "eight texts fill the free rows");
        assert_eq!(times.fastest(StepRows { texts: 1, beside: 30 }, guesses), 0, "so does a window");
    }
}
