//! What `medusa calibrate --shard i/n` counted on its share of the rows. All shares together are a calibration.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::calibration::{DynamicTrace, JointPath, RankTrace, check};
use super::error::{self, FormatError};
use super::sealed::sealed;
use super::share::Share;

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
        check::share(&share).map_err(|misfit| FormatError::misfit(path, misfit))?;
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
