//! An axis of a plot: range, linear or logarithmic scale, ticks.

/// Approximate number of ticks.
const TICKS: f64 = 5.0;
/// A free axis is logarithmic from this ratio of the largest to the smallest value.
const DECADE: f64 = 10.0;
/// A logarithmic axis omits values of 0 or less, if they are fewer than one in this many.
const LEFT_OUT: usize = 20;

/// Least distance of two ticks at values, as a part of the axis: room for numbers of three digits.
const CLOSEST: f64 = 0.055;

/// The range of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Range {
    /// From the first value to the last: optimizer steps.
    Tight,
    /// Round numbers around the values; logarithmic if they span a decade. A logarithmic axis omits a few zeros, such
    /// as the first loss of a self-distillation.
    Free,
    /// From 0 to a round number above the values.
    FromZero,
    /// Logarithmic from the first value to the last, with ticks at values: numbers above 0 that were chosen, such as 1, 2, 4, 8.
    Chosen,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) logarithmic: bool,
    pub(super) ticks: Vec<f64>,
}

impl Axis {
    /// The axis for these values; from 0 to 1 if there are none.
    pub(super) fn of(values: impl Iterator<Item = f64>, range: Range) -> Self {
        let values: Vec<f64> = values.collect();
        let Some((low, high)) = bounds(values.iter().copied()) else { return Self::linear(0.0, 1.0) };
        let positive = || values.iter().copied().filter(|&value| value > 0.0);
        let is_nearly_all = LEFT_OUT * (values.len() - positive().count()) < values.len();
        match (range, bounds(positive())) {
            (Range::Free, Some((least, _))) if is_nearly_all && high >= DECADE * least => {
                Self::logarithmic(least, high)
            }
            (Range::Free, _) => Self::linear(low, high),
            (Range::Tight, _) => Self::tight(low, high),
            (Range::FromZero, _) => Self::linear(low.min(0.0), high),
            (Range::Chosen, _) => Self::chosen(values, low, high),
        }
    }

    /// Whether a value can be shown on the axis.
    pub(super) fn takes(&self, value: f64) -> bool {
        !self.logarithmic || value > 0.0
    }

    fn tight(low: f64, high: f64) -> Self {
        let (low, high) = apart(low, high);
        let ticks = Self::linear(low, high).ticks.into_iter().filter(|tick| (low..=high).contains(tick)).collect();
        Self { low, high, logarithmic: false, ticks }
    }

    fn linear(low: f64, high: f64) -> Self {
        let (low, high) = apart(low, high);
        let step = round_step((high - low) / TICKS);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let ticks: Vec<f64> = (0..=(last - first) as usize).map(|tick| (first + tick as f64) * step).collect();
        Self { low: first * step, high: last * step, logarithmic: false, ticks }
    }

    fn logarithmic(low: f64, high: f64) -> Self {
        let room = (high / low).powf(0.04);
        let (low, high) = (low / room, high * room);
        let decades = (high / low).log10();
        let digits: &[f64] = if decades < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = (decades / (TICKS + 2.0)).ceil() as usize;
        let powers = (low.log10().floor() as i32..=high.log10().ceil() as i32).step_by(every);
        let candidates = powers.flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
        let ticks = candidates.filter(|tick| (low..=high).contains(tick)).collect();
        Self { low, high, logarithmic: true, ticks }
    }

    fn chosen(mut values: Vec<f64>, low: f64, high: f64) -> Self {
        let (low, high) = apart(low, high);
        values.sort_by(f64::total_cmp);
        let mut axis = Self { low, high, logarithmic: true, ticks: vec![] };
        for value in values {
            if axis.ticks.last().is_none_or(|&last| axis.part(value) - axis.part(last) >= CLOSEST) {
                axis.ticks.push(value);
            }
        }
        axis
    }

    /// Position of a value between the ends: 0 to 1.
    pub(super) fn part(&self, value: f64) -> f64 {
        if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }
}

/// The smallest and the largest value.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |bounds, value| {
        let (low, high) = bounds.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

/// Widens the range if both ends are equal.
fn apart(low: f64, high: f64) -> (f64, f64) {
    let room = if low == 0.0 { 1.0 } else { 0.1 * low.abs() };
    if high > low { (low, high) } else { (low - room, low + room) }
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round_step(about: f64) -> f64 {
    let power = 10f64.powf(about.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= about * (1.0 - 1e-9));
    digit.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_value_and_several_ticks_stand_on_the_axis(
            values in prop::collection::vec(prop_oneof![-1e6f64..1e6, 1e-9f64..1e-3, Just(0.0)], 1..40),
            range in prop_oneof![Just(Range::Tight), Just(Range::Free), Just(Range::FromZero)],
        ) {
            let axis = Axis::of(values.iter().copied(), range);
            for &value in values.iter().chain(&axis.ticks).filter(|&&value| axis.takes(value)) {
                prop_assert!((-1e-9..=1.0 + 1e-9).contains(&axis.part(value)), "{value} on {axis:?}");
            }
            let ends = if range == Range::Tight { 1..=12 } else { 2..=12 };
            prop_assert!(ends.contains(&axis.ticks.len()), "{axis:?}");
        }
    }

    #[test]
    fn ends_are_round_and_decades_are_logarithmic() {
        let linear = Axis::of([0.12, 0.94].into_iter(), Range::Free);
        assert_eq!((linear.low, linear.high, linear.logarithmic), (0.0, 1.0, false));
        let loss = Axis::of([45.8, 2.7].into_iter(), Range::Free);
        assert_eq!((loss.logarithmic, loss.ticks), (true, vec![5.0, 10.0, 20.0, 50.0]));
        let with_a_zero = Axis::of((0..30).map(f64::from), Range::Free);
        assert!(with_a_zero.logarithmic && with_a_zero.takes(1.0) && !with_a_zero.takes(0.0), "{with_a_zero:?}");
        assert!(!Axis::of([0.0, 1.0, 20.0].into_iter(), Range::Free).logarithmic, "a third of all values is not a few");
        let decades = Axis::of([1e-9, 1e6].into_iter(), Range::Free);
        assert!(decades.logarithmic && decades.ticks.len() < 9, "{decades:?}");
        let steps = Axis::of([1.0, 200.0].into_iter(), Range::Tight);
        assert_eq!((steps.low, steps.high, steps.ticks), (1.0, 200.0, vec![50.0, 100.0, 150.0, 200.0]));
        let doubled = Axis::of([4.0, 1.0, 2.0, 128.0, 1.0, 126.0].into_iter(), Range::Chosen);
        assert_eq!(
            (doubled.low, doubled.high, &doubled.ticks[..]),
            (1.0, 128.0, &[1.0, 2.0, 4.0, 126.0][..]),
            "no two overlap"
        );
        assert!((doubled.part(2.0) - 1.0 / 7.0).abs() < 1e-9);
        let one = Axis::of([8.0].into_iter(), Range::Chosen);
        assert!(one.ticks == [8.0] && (0.4..0.6).contains(&one.part(8.0)), "{one:?}");
        assert_eq!(Axis::of([0.0, 0.0].into_iter(), Range::FromZero).part(0.0), 0.5);
        assert_eq!(Axis::of(std::iter::empty(), Range::Free).ticks.len(), 6);
    }
}
