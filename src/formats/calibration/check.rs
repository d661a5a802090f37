//! What the numbers of a calibration must be to each other. A file that was damaged or edited is refused before a tree is searched from it.

use std::collections::HashMap;

use super::{Calibration, DynamicTrace, HeadAccuracy, JointPath, RankTrace};
use crate::formats::calibration_share::CalibrationShare;

/// A number that does not fit the others.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::formats) struct Misfit {
    pub key: String,
    pub expected: String,
    pub got: String,
}

type Checked = Result<(), Misfit>;

fn misfit(key: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Checked {
    Err(Misfit { key: key.into(), expected: expected.into(), got: got.to_string() })
}

/// Counts above this are no longer exact as floating-point numbers.
const MOST_TARGETS: u64 = 1 << 53;

/// Accuracies are written with all their digits; other programs may write fewer.
const ACCURACY_TOLERANCE: f64 = 1e-6;

pub(super) fn calibration(of: &Calibration) -> Checked {
    let hits: Vec<&[u64]> = of.heads.iter().map(|head| &head.counts[..]).collect();
    let totals: Vec<u64> = of.heads.iter().map(|head| head.total).collect();
    let measured = Measured { hits, totals, names: ["heads", "counts", "total"] };
    measured.check_counts()?;
    of.heads.iter().enumerate().try_for_each(|(head, of)| accuracies(head, of))?;
    measured.check_paths(of.joint.total, &of.joint.paths, ["joint.total", "joint.paths"])?;
    measured.check_runs(&of.joint.runs, "joint.runs")?;
    let Some(dynamic) = &of.dynamic else { return Ok(()) };
    if dynamic.top_k == 0 {
        return misfit("dynamic.top_k", "a number above 0", 0);
    }
    measured.check_dynamic(&dynamic.runs, "dynamic.runs")
}

pub(in crate::formats) fn share(of: &CalibrationShare) -> Checked {
    if of.hits.len() != of.totals.len() {
        let expected = format!("{}, one for each head in hits", of.hits.len());
        return misfit("totals", expected, format!("{} numbers", of.totals.len()));
    }
    let hits = of.hits.iter().map(|hits| &hits[..]).collect();
    let measured = Measured { hits, totals: of.totals.clone(), names: ["hits", "hits", "totals"] };
    measured.check_counts()?;
    if measured.width() != of.of.top_k {
        return misfit("top_k", format!("{}, the width of hits", measured.width()), of.of.top_k);
    }
    measured.check_paths(of.joint_total, &of.paths, ["joint_total", "paths"])?;
    let mut first = 0;
    for (at, ranks) in of.rows_with_ranks.iter().enumerate() {
        if !(first..of.of.rows).contains(&ranks.row) {
            let expected = format!("a row of {} behind those before it", of.of.rows);
            return misfit(format!("rows_with_ranks[{at}].row"), expected, ranks.row);
        }
        first = ranks.row + 1;
    }
    let all_runs: Vec<RankTrace> = of.rows_with_ranks.iter().flat_map(|row| row.runs.iter().cloned()).collect();
    measured.check_runs(&all_runs, "rows_with_ranks, runs")?;
    of.rows_with_ranks.iter().try_for_each(|row| measured.check_dynamic(&row.dynamic, "rows_with_ranks, dynamic"))
}

fn accuracies(head: usize, of: &HeadAccuracy) -> Checked {
    if of.accuracy.len() != of.counts.len() {
        let expected = format!("{} numbers, as counts has", of.counts.len());
        return misfit(format!("heads[{head}].accuracy"), expected, of.accuracy.len());
    }
    for (guess, (accuracy, count)) in of.accuracy.iter().zip(&of.counts).enumerate() {
        let expected = *count as f64 / of.total as f64;
        if (accuracy - expected).is_nan() || (accuracy - expected).abs() > ACCURACY_TOLERANCE {
            let expected = format!("{expected}, which is {count} of {} targets", of.total);
            return misfit(format!("heads[{head}].accuracy[{guess}]"), expected, accuracy);
        }
    }
    Ok(())
}

/// How often each guess of each head was right, and the keys under which the file has that.
struct Measured<'c> {
    hits: Vec<&'c [u64]>,
    totals: Vec<u64>,
    names: [&'static str; 3],
}

impl Measured<'_> {
    /// Guesses of each head.
    fn width(&self) -> usize {
        self.hits.first().map_or(0, |hits| hits.len())
    }

    fn check_counts(&self) -> Checked {
        let [heads, counts, total] = self.names;
        if self.width() == 0 {
            return misfit(heads, "at least one head with one guess", "none");
        }
        for (head, (hits, &targets)) in self.hits.iter().zip(&self.totals).enumerate() {
            let key = |part: &str| {
                if part == heads { format!("{part}[{head}]") } else { format!("{part} of head {}", head + 1) }
            };
            if hits.len() != self.width() {
                return misfit(key(counts), format!("{} numbers, as head 1 has", self.width()), hits.len());
            }
            if targets > MOST_TARGETS {
                return misfit(key(total), "at most 2^53 targets", targets);
            }
            let right = hits.iter().fold(0u64, |sum, hits| sum.saturating_add(*hits));
            if right > targets {
                let expected = format!("at most {targets} right guesses, one for each target");
                return misfit(key(counts), expected, right);
            }
        }
        Ok(())
    }

    fn check_paths(&self, total: u64, paths: &[JointPath], [total_key, paths_key]: [&str; 2]) -> Checked {
        let least = self.totals.iter().copied().min().unwrap_or(0);
        if total > least {
            return misfit(total_key, format!("at most {least}, the targets of the head with the fewest"), total);
        }
        let mut counts = HashMap::from([(&[][..], total)]);
        for (at, JointPath { path, count }) in paths.iter().enumerate() {
            self.check_path(path, || format!("{paths_key}[{at}].path"))?;
            if path.is_empty() || counts.insert(path, *count).is_some() {
                return misfit(
                    format!("{paths_key}[{at}].path"),
                    "each path once, of one guess at least",
                    format!("{path:?}"),
                );
            }
        }
        let mut behind: HashMap<&[usize], u64> = HashMap::new();
        let mut right: HashMap<(usize, usize), u64> = HashMap::new();
        for (at, JointPath { path, count }) in paths.iter().enumerate() {
            let (&last, parent) = path.split_last().expect("checked above");
            let Some(&of_parent) = counts.get(parent) else {
                return misfit(
                    format!("{paths_key}[{at}].path"),
                    format!("the path {parent:?} as well"),
                    format!("{path:?}"),
                );
            };
            let of_head = self.hits[parent.len()][last];
            for (sum, most, what) in [
                (behind.entry(parent).or_default(), of_parent, "of the path without its last guess"),
                (right.entry((parent.len(), last)).or_default(), of_head, "of that guess of the head"),
            ] {
                *sum = sum.saturating_add(*count);
                if *sum > most {
                    let expected = format!("no more than the {most} {what}, together with paths like it");
                    return misfit(format!("{paths_key}[{at}].count"), expected, *sum);
                }
            }
        }
        Ok(())
    }

    fn check_path(&self, path: &[usize], key: impl Fn() -> String) -> Checked {
        if path.len() > self.hits.len() || path.iter().any(|guess| *guess >= self.width()) {
            let (heads, width) = (self.hits.len(), self.width());
            return misfit(key(), format!("guesses 0 to {} of at most {heads} heads", width - 1), format!("{path:?}"));
        }
        Ok(())
    }

    /// The positions of texts are among those that were counted.
    fn check_runs(&self, runs: &[RankTrace], key: &str) -> Checked {
        let mut seen = vec![vec![0u64; self.width()]; self.hits.len()];
        for (at, run) in runs.iter().enumerate() {
            if run.is_empty() {
                return misfit(format!("{key}[{at}]"), "a text of one token at least", "none");
            }
            for (token, ranks) in run.iter().enumerate() {
                self.check_path(ranks, || format!("{key}[{at}][{token}]"))?;
                ranks.iter().enumerate().for_each(|(head, &rank)| seen[head][rank] += 1);
            }
        }
        for (head, (seen, hits)) in seen.iter().zip(&self.hits).enumerate() {
            if let Some(guess) = (0..self.width()).find(|&guess| seen[guess] > hits[guess]) {
                let expected = format!("guess {guess} of head {} at most {} times, as counted", head + 1, hits[guess]);
                return misfit(key, expected, seen[guess]);
            }
        }
        Ok(())
    }

    fn check_dynamic(&self, runs: &[DynamicTrace], key: &str) -> Checked {
        let heads = self.hits.len();
        for (at, run) in runs.iter().enumerate() {
            if run.is_empty() {
                return misfit(format!("{key}[{at}]"), "a text of one token at least", "none");
            }
            for (token, levels) in run.iter().enumerate() {
                let fits = |(level, ranks): (usize, &Vec<usize>)| {
                    (1..=heads.saturating_sub(level)).contains(&ranks.len()) && ranks.is_sorted()
                };
                if !levels.iter().enumerate().all(fits) {
                    let expected = format!("ascending ranks of at most {heads} levels, from each level to the last");
                    return misfit(format!("{key}[{at}][{token}]"), expected, format!("{levels:?}"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn whole() -> Value {
        json!({
            "heads": [
                {"counts": [5, 2], "total": 10, "accuracy": [0.5, 0.2]},
                {"counts": [3, 0], "total": 8, "accuracy": [0.375, 0.0]}
            ],
            "joint": {
                "total": 8,
                "paths": [{"path": [0], "count": 4}, {"path": [0, 0], "count": 3}, {"path": [1], "count": 2}],
                "runs": [[[0, 0], [], [1]], [[0]]]
            },
            "dynamic": {"top_k": 2, "runs": [[[[0, 1], [3]], [], [[1, 1]]]]},
            "backbone": "b", "heads_sha256": "ab", "tokens": 20
        })
    }

    fn misfit_of(key: &str, value: Value) -> Option<Misfit> {
        let mut changed = whole();
        *changed.pointer_mut(key).unwrap_or_else(|| panic!("{key} is there")) = value;
        calibration(&serde_json::from_value(changed).expect("a calibration")).err()
    }

    #[test]
    fn damaged_numbers_are_told_by_their_key() {
        assert_eq!(calibration(&serde_json::from_value(whole()).expect("a calibration")), Ok(()));
        for (key, value, named, expected) in [
            ("/heads", json!([]), "heads", "at least one head"),
            ("/heads/0/accuracy", json!([0.0, 0.0]), "heads[0].accuracy[0]", "0.5, which is 5 of 10 targets"),
            ("/heads/0/accuracy", json!([0.5]), "heads[0].accuracy", "2 numbers"),
            ("/heads/0/counts/0", json!(9), "counts of head 1", "at most 10 right guesses"),
            ("/heads/1/counts", json!([3]), "counts of head 2", "2 numbers, as head 1 has"),
            ("/heads/0/total", json!(1u64 << 63), "total of head 1", "at most 2^53 targets"),
            ("/joint/total", json!(9), "joint.total", "at most 8"),
            ("/joint/paths/0/count", json!(1u64 << 63), "joint.paths[0].count", "no more than the 8"),
            ("/joint/paths/1/count", json!(5), "joint.paths[1].count", "no more than the 4 of the path"),
            ("/joint/paths/2/path", json!([0]), "joint.paths[2].path", "each path once"),
            ("/joint/paths/2/path", json!([]), "joint.paths[2].path", "each path once"),
            ("/joint/paths/2/path", json!([1, 0]), "joint.paths[2].path", "the path [1] as well"),
            ("/joint/paths/2/path", json!([2]), "joint.paths[2].path", "guesses 0 to 1 of at most 2 heads"),
            ("/joint/runs", json!([[]]), "joint.runs[0]", "a text of one token"),
            ("/joint/runs/1/0", json!([0, 0, 0]), "joint.runs[1][0]", "guesses 0 to 1"),
            ("/joint/runs/1", json!([[1], [1]]), "joint.runs", "guess 1 of head 1 at most 2 times"),
            ("/dynamic/top_k", json!(0), "dynamic.top_k", "above 0"),
            ("/dynamic/runs/0/0/0", json!([2, 1]), "dynamic.runs[0][0]", "ascending ranks"),
            ("/dynamic/runs/0/0/1", json!([3, 4]), "dynamic.runs[0][0]", "ascending ranks"),
            ("/dynamic/runs", json!([[]]), "dynamic.runs[0]", "a text of one token"),
        ] {
            let found = misfit_of(key, value).unwrap_or_else(|| panic!("{key} is accepted"));
            assert_eq!(found.key, named, "{found:?}");
            assert!(found.expected.contains(expected), "{found:?}");
        }
    }
}
