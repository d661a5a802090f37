//! `calibration.json`: how often each guess of each head is right, alone and jointly.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{self, FormatError};
use super::hit_counts::HitCounts;
use super::invalid_field::{InvalidField, invalid_field};
use super::sealed::{CHECKSUM, sealed};
use super::share::Share;
use super::trained_prompts::MeasuredPrompts;

const WHAT: &str = "calibration";
const EXPECTED: &str = "is no calibration; expected {\"heads\":[{\"counts\":…,\"total\":…,\"accuracy\":…}], …} as `medusa calibrate` writes it";

/// `calibration.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// One entry per head.
    pub heads: Vec<HeadAccuracy>,
    /// Which guesses are right at the same position.
    pub joint: JointStatistics,
    /// Where the right guesses stand among all candidates of trees that are chosen at each step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<DynamicRanks>,
    /// The backbone's path or name, as it was given.
    pub backbone: String,
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: String,
    /// Input tokens read.
    pub tokens: u64,
    /// Absent if the heads do not say what they were trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<MeasuredPrompts>,
    /// Only in the calibration of an export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exported_from: Option<ExportedFrom>,
    /// Unknown keys, which are preserved.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Accuracy of one head's guesses, over the head's own targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadAccuracy {
    /// How often guess 1, 2, … was the target.
    pub counts: Vec<u64>,
    /// Targets of this head.
    pub total: u64,
    /// `counts` ÷ `total`.
    pub accuracy: Vec<f64>,
}

/// Which guesses were right at the same position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JointStatistics {
    /// Positions where every head has a target.
    pub total: u64,
    /// Paths of guesses that were right together, most frequent first; every prefix of a counted path is counted too.
    pub paths: Vec<JointPath>,
    /// The ranks of right guesses at every position of the texts, as decoding steps would find them. At most 200,000
    /// positions; empty in older calibrations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<RankTrace>,
}

/// `[0, 2]`: head 1's best guess and head 2's third guess were both right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JointPath {
    /// 0-based guesses, head 1 first.
    pub path: Vec<usize>,
    pub count: u64,
}

/// The ranks of one text's right guesses, token by token. Entry s belongs to a step whose root is token s: 0-based
/// ranks of the right guesses of heads 1, 2, … up to the first head that misses the token or would look past the text's
/// end.
pub type RankTrace = Vec<Vec<usize>>;

/// The right guesses among the candidates of trees that are chosen at each step, likeliest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DynamicRanks {
    /// [`DynamicTree::top_k`](super::tree::DynamicTree::top_k) of the trees.
    pub top_k: usize,
    /// Of at most 20,000 positions.
    pub runs: Vec<DynamicTrace>,
}

/// One text: `trace[s][d][e]` is the rank of a right guess. The root of the step is token s, and the guess is right at level d + 1. Its rank is
/// the number of candidates that are likelier in a tree of at most d + 1 + e levels: a tree of N nodes holds the guess if the rank is below N. A
/// step's levels end before the first right token that is no candidate, or at the end of the text.
pub type DynamicTrace = Vec<Vec<Vec<usize>>>;

/// The measured heads and the calibration that an export comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedFrom {
    /// Hash of the measured heads.
    pub heads_sha256: String,
    /// Hash of the original calibration.
    pub calibration_sha256: String,
}

impl Calibration {
    /// Reads `calibration.json`.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let mut calibration: Self =
            error::read(path, WHAT, EXPECTED).map_err(|error| share_error(path).unwrap_or(error))?;
        calibration.other.shift_remove(CHECKSUM);
        if let Some(at) = calibration.heads.iter().position(|head| head.total == 0) {
            return Err(FormatError::NoTargets { path: path.into(), head: at + 1 });
        }
        check(&calibration).map_err(|invalid_field| FormatError::invalid_field(path, invalid_field))?;
        Ok(calibration)
    }

    /// Writes `calibration.json` atomically.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        error::write(path, WHAT, &self.to_json())
    }

    /// The text of `calibration.json` without a final newline.
    pub fn to_json(&self) -> String {
        sealed(&serde_json::to_string(self).expect("numbers, lists and texts are JSON"))
    }

    /// `[h][i]`: the accuracy of guess i of head h.
    pub fn accuracies(&self) -> Vec<Vec<f64>> {
        self.heads.iter().map(|head| head.accuracy.clone()).collect()
    }

    /// Whether it records which guesses were right together.
    pub fn knows_joint(&self) -> bool {
        !(self.joint.runs.is_empty() && self.joint.paths.is_empty())
    }

    /// Mean length of the calibrated texts; `None` in files of earlier versions.
    pub fn tokens_per_text(&self) -> Option<f64> {
        let tokens: usize = self.joint.runs.iter().map(Vec::len).sum();
        (tokens > 0).then(|| tokens as f64 / self.joint.runs.len() as f64)
    }

    /// Hash of the measured heads, even after several exports.
    pub fn measured_sha256(&self) -> &str {
        self.exported_from.as_ref().map_or(&self.heads_sha256, |from| &from.heads_sha256)
    }

    /// Assigns the calibration to exported heads with the hash `heads_sha256`; `calibration_sha256` is the hash of the
    /// current file.
    pub fn export_to(&mut self, heads_sha256: String, calibration_sha256: String) {
        let measured = std::mem::replace(&mut self.heads_sha256, heads_sha256);
        self.exported_from.get_or_insert(ExportedFrom { heads_sha256: measured, calibration_sha256 });
    }

    /// Removes later heads: their accuracies, longer paths, and the ends of all lists of ranks.
    pub fn keep_first(&mut self, heads: usize) {
        self.heads.truncate(heads);
        self.joint.paths.retain(|path| path.path.len() <= heads);
        self.joint.runs.iter_mut().flatten().for_each(|ranks| ranks.truncate(heads));
        for right in self.dynamic.iter_mut().flat_map(|dynamic| &mut dynamic.runs).flatten() {
            right.truncate(heads);
            right.iter_mut().enumerate().for_each(|(depth, ranks)| ranks.truncate(heads - depth));
        }
    }
}

/// Accuracies are written with all their digits; other programs may write fewer.
const ACCURACY_TOLERANCE: f64 = 1e-6;

/// Checks that the numbers can be those of one measurement.
fn check(of: &Calibration) -> Result<(), InvalidField> {
    let hits = of.heads.iter().map(|head| &head.counts[..]).collect();
    let totals = of.heads.iter().map(|head| head.total).collect();
    let counts = HitCounts { hits, totals, names: ["heads", "counts", "total"] };
    counts.check_counts()?;
    of.heads.iter().enumerate().try_for_each(|(head, of)| check_accuracies(head, of))?;
    let paths: Vec<(&[usize], u64)> = of.joint.paths.iter().map(|of| (&of.path[..], of.count)).collect();
    counts.check_paths(of.joint.total, &paths, ["joint.total", "joint.paths"])?;
    counts.check_runs(&of.joint.runs, "joint.runs")?;
    match &of.dynamic {
        Some(dynamic) if dynamic.top_k == 0 => invalid_field("dynamic.top_k", "a number above 0", 0),
        Some(dynamic) => counts.check_dynamic(&dynamic.runs, "dynamic.runs"),
        None => Ok(()),
    }
}

fn check_accuracies(head: usize, of: &HeadAccuracy) -> Result<(), InvalidField> {
    if of.accuracy.len() != of.counts.len() {
        let expected = format!("{} numbers, as counts has", of.counts.len());
        return invalid_field(format!("heads[{head}].accuracy"), expected, of.accuracy.len());
    }
    for (guess, (accuracy, count)) in of.accuracy.iter().zip(&of.counts).enumerate() {
        let expected = *count as f64 / of.total as f64;
        if (accuracy - expected).is_nan() || (accuracy - expected).abs() > ACCURACY_TOLERANCE {
            let expected = format!("{expected}, which is {count} of {} targets", of.total);
            return invalid_field(format!("heads[{head}].accuracy[{guess}]"), expected, accuracy);
        }
    }
    Ok(())
}

/// The error of a file that holds only a share.
fn share_error(path: &Path) -> Option<FormatError> {
    #[derive(Deserialize)]
    struct ShareKey {
        share: Share,
    }
    let ShareKey { share } = error::read(path, WHAT, EXPECTED).ok()?;
    Some(FormatError::IsShare { path: path.into(), share })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_saved_calibration_comes_back_with_what_others_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let text = r#"{"heads":[{"counts":[0,1],"total":1,"accuracy":[0.0,1.0]}],"joint":{"total":1,"paths":[{"path":[1],"count":1}]},"backbone":"tiny","heads_sha256":"ab","tokens":0,"by":"me"}"#;
        let calibration: Calibration = serde_json::from_str(text).unwrap();
        calibration.save(&path).unwrap();
        assert_eq!(Calibration::load(&path).unwrap(), calibration);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), sealed(text) + "\n");
        assert!(Calibration::load(dir.path()).unwrap_err().to_string().starts_with("cannot read the calibration"));
    }

    #[test]
    fn however_often_it_is_exported_it_says_whose_numbers_it_has() {
        let text = r#"{"heads":[],"joint":{"total":1,"paths":[{"path":[1],"count":1},{"path":[1,0],"count":1}],"runs":[[[1,0],[]]]},
            "backbone":"","heads_sha256":"ab","tokens":0}"#;
        let mut calibration: Calibration = serde_json::from_str(text).unwrap();
        calibration.export_to("cd".into(), "1".into());
        calibration.export_to("ef".into(), "2".into());
        assert_eq!((calibration.measured_sha256(), calibration.heads_sha256.as_str()), ("ab", "ef"));
        assert_eq!(calibration.exported_from.as_ref().unwrap().calibration_sha256, "1");
        calibration.keep_first(1);
        assert_eq!((calibration.joint.paths.len(), &calibration.joint.runs[0]), (1, &vec![vec![1], vec![]]));
    }

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

    fn misfit_of(key: &str, value: Value) -> Option<InvalidField> {
        let mut changed = whole();
        *changed.pointer_mut(key).unwrap_or_else(|| panic!("{key} is there")) = value;
        check(&serde_json::from_value(changed).expect("a calibration")).err()
    }

    #[test]
    fn damaged_numbers_are_reported_with_their_key() {
        assert_eq!(check(&serde_json::from_value(whole()).expect("a calibration")), Ok(()));
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
