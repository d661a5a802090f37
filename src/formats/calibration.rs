//! `calibration.json`: how often each guess of each head is right, alone and together.

use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{self, FormatError};

const WHAT: &str = "calibration";
const EXPECTED: &str = "is no calibration; expected {\"heads\":[{\"counts\":…,\"total\":…,\"accuracy\":…}], …} as `medusa calibrate` writes it";

/// `calibration.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// One entry a head.
    pub heads: Vec<HeadAccuracy>,
    /// Which guesses are right together.
    pub joint: JointStatistics,
    /// The backbone, as it was named.
    pub backbone: String,
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: String,
    /// Input tokens read.
    pub tokens: u64,
    /// Of a calibration that went with exported heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exported_from: Option<ExportedFrom>,
    /// What others wrote into it: it stays there.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// One head's guesses, over that head's own targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadAccuracy {
    /// How often guess 1, 2, … was the target.
    pub counts: Vec<u64>,
    /// Targets of this head.
    pub total: u64,
    /// `counts` ÷ `total`.
    pub accuracy: Vec<f64>,
}

/// Which guesses were right together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JointStatistics {
    /// Positions where every head has a target.
    pub total: u64,
    /// Paths of guesses that were right together there, most frequent first; every prefix of a counted path is counted too.
    pub paths: Vec<JointPath>,
    /// The texts themselves, position by position: what steps of decoding would find there. Kept up to 200,000 positions;
    /// older calibrations have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<RankTrace>,
}

/// `[0, 2]`: head 1's best guess and head 2's third guess were both right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JointPath {
    /// 0-based guesses, head 1 first.
    pub path: Vec<usize>,
    /// How often.
    pub count: u64,
}

/// One text, token by token. Entry s belongs to a step whose root is token s: the guesses that are right there, as 0-based ranks of
/// heads 1, 2, … up to the first head that misses it or would look behind the text's end.
pub type RankTrace = Vec<Vec<usize>>;

/// Which heads were measured, where those that the file goes with are exported ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedFrom {
    /// Of the heads that were measured.
    pub heads_sha256: String,
    /// Of the calibration that said so.
    pub calibration_sha256: String,
}

impl Calibration {
    /// Reads `calibration.json`.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let calibration: Self = error::read(path, WHAT, EXPECTED)?;
        match calibration.heads.iter().position(|head| head.total == 0) {
            Some(at) => Err(FormatError::NoTargets { path: path.into(), head: at + 1 }),
            None => Ok(calibration),
        }
    }

    /// Writes `calibration.json`, whole or not at all.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        error::write(path, WHAT, |out| {
            self.write_to(&mut *out)?;
            writeln!(out)
        })
    }

    /// The text of `calibration.json`, without a last newline.
    ///
    /// # Errors
    /// The disk's words.
    pub fn write_to(&self, out: impl Write) -> io::Result<()> {
        Ok(serde_json::to_writer(out, self)?)
    }

    /// `[h][i]`: the accuracy of guess i of head h.
    pub fn accuracies(&self) -> Vec<Vec<f64>> {
        self.heads.iter().map(|head| head.accuracy.clone()).collect()
    }

    /// Whether it knows which guesses were right together.
    pub fn knows_joint(&self) -> bool {
        !(self.joint.runs.is_empty() && self.joint.paths.is_empty())
    }

    /// Of the heads that were measured, however often they were exported since.
    pub fn measured_sha256(&self) -> &str {
        self.exported_from.as_ref().map_or(&self.heads_sha256, |from| &from.heads_sha256)
    }

    /// Goes with exported heads of the hash `heads_sha256` now; `calibration_sha256` is this file's own.
    pub fn export_to(&mut self, heads_sha256: String, calibration_sha256: String) {
        let measured = std::mem::replace(&mut self.heads_sha256, heads_sha256);
        self.exported_from.get_or_insert(ExportedFrom { heads_sha256: measured, calibration_sha256 });
    }

    /// Leaves out what is said of later heads: accuracies, longer paths, and the rest of every rank list.
    pub fn keep_first(&mut self, heads: usize) {
        self.heads.truncate(heads);
        self.joint.paths.retain(|path| path.path.len() <= heads);
        self.joint.runs.iter_mut().flatten().for_each(|ranks| ranks.truncate(heads));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_calibration_comes_back_with_what_others_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let text = r#"{"heads":[{"counts":[0,1],"total":1,"accuracy":[0.0,1.0]}],"joint":{"total":1,"paths":[{"path":[1],"count":1}]},"backbone":"tiny","heads_sha256":"ab","tokens":0,"by":"me"}"#;
        let calibration: Calibration = serde_json::from_str(text).unwrap();
        calibration.save(&path).unwrap();
        assert_eq!(Calibration::load(&path).unwrap(), calibration);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{text}\n"));
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
}
