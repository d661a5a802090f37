//! Reduces the points of a curve without changing its look.

/// Reduces `points` to at most `most`, in order: the first, the last, and the lowest and highest of equal buckets
/// between them. Unlike means or every n-th point, this keeps all spikes.
pub(super) fn thinned(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let (first, between, last) = match points {
        [first, between @ .., last] if points.len() > most.max(4) => (*first, between, *last),
        _ => return points.to_vec(),
    };
    let buckets = (most.max(4) - 2) / 2;
    let mut kept = vec![first];
    for bucket in between.chunks(between.len().div_ceil(buckets)) {
        let by_value = |&(at, _): &(usize, &(f64, f64)), &(other, _): &(usize, &(f64, f64))| {
            bucket[at].1.total_cmp(&bucket[other].1)
        };
        let lowest = bucket.iter().enumerate().min_by(by_value).map(|(at, _)| at);
        let highest = bucket.iter().enumerate().max_by(by_value).map(|(at, _)| at);
        let mut extremes: Vec<usize> = lowest.into_iter().chain(highest).collect();
        extremes.sort_unstable();
        extremes.dedup();
        kept.extend(extremes.into_iter().map(|at| bucket[at]));
    }
    kept.push(last);
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ends_and_extremes_stay_and_the_order_too(values in prop::collection::vec(-1e3f64..1e3, 0..400), most in 4usize..60) {
            let points: Vec<(f64, f64)> = values.iter().enumerate().map(|(at, &value)| (at as f64, value)).collect();
            let few = thinned(&points, most);
            prop_assert!(few.len() <= most.max(4).min(points.len()), "{} of {}", few.len(), points.len());
            prop_assert!(few.iter().all(|point| points.contains(point)) && few.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert_eq!((few.first(), few.last()), (points.first(), points.last()));
            let bounds = |points: &[(f64, f64)]| points.iter().fold((0.0f64, 0.0f64), |(low, high), p| (low.min(p.1), high.max(p.1)));
            prop_assert_eq!(bounds(&few), bounds(&points));
        }
    }

    #[test]
    fn few_points_are_left_alone() {
        let points = [(1.0, 5.0), (2.0, 1.0), (3.0, 4.0)];
        assert_eq!(thinned(&points, 3), points);
        assert_eq!(thinned(&[], 10), []);
    }
}
