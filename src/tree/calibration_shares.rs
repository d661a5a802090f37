//! Merges the shares of a calibration.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::formats::calibration::{Calibration, DynamicRanks};
use crate::formats::calibration_share::{CalibratedWork, CalibrationShare, RanksOfRow};
use crate::formats::share::Share;
use crate::tree::rank_counts::{NoTargets, RankCounts};

/// Why shares are no whole calibration.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// Two shares of different work.
    #[error("{}: {key}: expected {expected} as in {}, got {got}; all shares are of the same heads, backbone, rows and flags", path.display(), first.display())]
    Different { path: PathBuf, first: PathBuf, key: &'static str, expected: String, got: String },
    /// The same share in two files.
    #[error("share {share} is there twice: {} and {}; give each share once", first.display(), second.display())]
    Double { share: Share, first: PathBuf, second: PathBuf },
    /// Shares that no file holds.
    #[error("{} missing: {}; make each with medusa calibrate --shard", if missing.len() == 1 { "a share is" } else { "shares are" }, listed(missing))]
    Missing { missing: Vec<Share> },
    #[error(transparent)]
    NoTargets(#[from] NoTargets),
}

fn listed(shares: &[Share]) -> String {
    shares.iter().map(Share::to_string).collect::<Vec<_>>().join(", ")
}

/// A share with the file that holds it.
pub type ShareFile = (PathBuf, CalibrationShare);

/// The calibration of all rows: the very file that one machine would have written.
///
/// # Errors
/// [`MergeError`]: shares of different work, double ones, missing ones. A head without a target in any row.
///
/// # Panics
/// Without any share.
pub fn merge(shares: Vec<ShareFile>) -> Result<Calibration, MergeError> {
    let (first_path, first) = shares.first().expect("at least one share");
    let work = first.of.clone();
    for (path, share) in &shares[1..] {
        let difference = difference((first.share, &work), (share.share, &share.of));
        if let Some((key, expected, got)) = difference {
            return Err(MergeError::Different { path: path.clone(), first: first_path.clone(), key, expected, got });
        }
    }
    let any = first.share;
    let mut by_share = BTreeMap::new();
    for (path, share) in shares {
        let key = share.share;
        if let Some((first, _)) = by_share.get(&key) {
            return Err(MergeError::Double { share: key, first: PathBuf::clone(first), second: path });
        }
        by_share.insert(key, (path, share));
    }
    let missing: Vec<Share> = any.all().filter(|share| !by_share.contains_key(share)).collect();
    if !missing.is_empty() {
        return Err(MergeError::Missing { missing });
    }
    let mut counts = RankCounts::new(by_share.values().next().map_or(0, |(_, share)| share.hits.len()), work.top_k);
    let mut rows: Vec<RanksOfRow> = vec![];
    for (_, share) in by_share.into_values() {
        counts.add_share(&share);
        rows.extend(share.rows_with_ranks);
    }
    rows.sort_by_key(|row| row.row);
    let mut dynamic = DynamicRanks { top_k: work.dynamic_top_k, runs: vec![] };
    for row in rows {
        counts.add_kept_runs(row.runs);
        dynamic.runs.extend(row.dynamic);
    }
    let calibration = counts.sign(work.backbone, work.heads_sha256)?;
    Ok(Calibration { dynamic: Some(dynamic), prompts: work.prompts, ..calibration })
}

/// The first key in which two shares are of different work.
fn difference(
    (share, a): (Share, &CalibratedWork),
    (other, b): (Share, &CalibratedWork),
) -> Option<(&'static str, String, String)> {
    let prompts = |of: &CalibratedWork| of.prompts.map_or_else(|| "unknown".to_owned(), |prompts| prompts.to_string());
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "none".to_owned());
    let keys = [
        ("heads_sha256", a.heads_sha256.clone(), b.heads_sha256.clone()),
        ("backbone_fingerprint", a.backbone_fingerprint.clone(), b.backbone_fingerprint.clone()),
        ("dtype", a.dtype.clone(), b.dtype.clone()),
        ("device", a.device.clone(), b.device.clone()),
        ("quantization", name(&a.quantization), name(&b.quantization)),
        ("rows", a.rows.to_string(), b.rows.to_string()),
        ("rows_sha256", a.rows_sha256.clone(), b.rows_sha256.clone()),
        ("prompts that were trained on", prompts(a), prompts(b)),
        ("top_k", a.top_k.to_string(), b.top_k.to_string()),
        ("dynamic_top_k", a.dynamic_top_k.to_string(), b.dynamic_top_k.to_string()),
        ("number of shares", share.of().to_string(), other.of().to_string()),
    ];
    keys.into_iter().find(|(_, a, b)| a != b)
}
