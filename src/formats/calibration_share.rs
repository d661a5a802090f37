//! What `medusa calibrate --shard i/n` counted on its share of the rows. All shares together are a calibration.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::calibration::{DynamicTrace, JointPath, RankTrace};
use super::error::{self, FormatError};
use super::hit_counts::HitCounts;
use super::invalid_field::{InvalidField, invalid_field};
use super::sealed::sealed;
use super::share::Share;
use super::trained_prompts::MeasuredPrompts;

const WHAT: &str = "share of a calibration";
const EXPECTED: &str =
    "is no share of a calibration; expected {\"share\":\"1/4\",…} as `medusa calibrate --shard` writes it";

/// Counts on a share of the rows. Other than in a calibration, no count is left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationShare {
    pub share: Share,
    /// What all shares must have in common.
    #[serde(flatten)]
    pub of: CalibratedWork,
    /// Input tokens of this share's rows.
    pub tokens: u64,
    /// `[h][i]`: how often guess i of head h was the target.
    pub hits: Vec<Vec<u64>>,
    /// Targets of each head.
    pub totals: Vec<u64>,
    /// Positions where every head has a target.
    pub joint_total: u64,
    /// Every path of guesses that were right together.
    pub paths: Vec<JointPath>,
    /// The rows of which ranks are kept, in order.
    pub rows_with_ranks: Vec<RanksOfRow>,
}

/// Heads, backbone and rows of a calibration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibratedWork {
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: String,
    /// Of the backbone's weights.
    pub backbone_fingerprint: String,
    /// Compute dtype.
    pub dtype: String,
    /// `cpu` or `cuda`: another kind of device rounds differently.
    pub device: String,
    /// `nf4` or `int8`.
    pub quantization: Option<String>,
    /// Rows of all shares.
    pub rows: usize,
    /// Hash of the tokens and labels of all rows.
    pub rows_sha256: String,
    /// Absent if the heads do not say what they were trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<MeasuredPrompts>,
    /// `--top-k`.
    pub top_k: usize,
    /// Guesses of each node of trees that are chosen at each step.
    pub dynamic_top_k: usize,
    /// The backbone's path or name, as it was given; it may differ from machine to machine.
    pub backbone: String,
}

/// The ranks of right guesses in one row, as [`JointStatistics`](super::calibration::JointStatistics) and
/// [`DynamicRanks`](super::calibration::DynamicRanks) hold them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RanksOfRow {
    /// Index among the rows of all shares.
    pub row: usize,
    pub runs: Vec<RankTrace>,
    pub dynamic: Vec<DynamicTrace>,
}

impl CalibrationShare {
    /// Reads a share.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let share = error::read(path, WHAT, EXPECTED)?;
        check(&share).map_err(|invalid_field| FormatError::invalid_field(path, invalid_field))?;
        Ok(share)
    }

    /// Writes a share atomically.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        let json = serde_json::to_string(self).expect("numbers and texts are JSON");
        error::write(path, WHAT, &sealed(&json))
    }
}

/// Checks that the numbers can be those of one measurement.
fn check(of: &CalibrationShare) -> Result<(), InvalidField> {
    if of.hits.len() != of.totals.len() {
        let expected = format!("{}, one for each head in hits", of.hits.len());
        return invalid_field("totals", expected, format!("{} numbers", of.totals.len()));
    }
    let hits = of.hits.iter().map(|hits| &hits[..]).collect();
    let counts = HitCounts { hits, totals: of.totals.clone(), names: ["hits", "hits", "totals"] };
    counts.check_counts()?;
    if counts.width() != of.of.top_k {
        return invalid_field("top_k", format!("{}, the width of hits", counts.width()), of.of.top_k);
    }
    let paths: Vec<(&[usize], u64)> = of.paths.iter().map(|of| (&of.path[..], of.count)).collect();
    counts.check_paths(of.joint_total, &paths, ["joint_total", "paths"])?;
    let mut first = 0;
    for (at, ranks) in of.rows_with_ranks.iter().enumerate() {
        if !(first..of.of.rows).contains(&ranks.row) {
            let expected = format!("a row of {} behind those before it", of.of.rows);
            return invalid_field(format!("rows_with_ranks[{at}].row"), expected, ranks.row);
        }
        first = ranks.row + 1;
    }
    let all_runs: Vec<RankTrace> = of.rows_with_ranks.iter().flat_map(|row| row.runs.iter().cloned()).collect();
    counts.check_runs(&all_runs, "rows_with_ranks, runs")?;
    of.rows_with_ranks.iter().try_for_each(|row| counts.check_dynamic(&row.dynamic, "rows_with_ranks, dynamic"))
}
