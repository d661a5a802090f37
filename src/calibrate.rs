//! How often each guess of each head is right: what the tree search needs (paper section 2.3.3).

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::data::IGNORE;
use crate::data::rows::TokenRow;
use crate::files;
use crate::medusa::heads::Heads;
use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::{TorchPanic, guard};

/// Logits of one head are computed for so many positions at a time that they stay below this.
const MAX_LOGITS_BYTES: i64 = 64 << 20;

/// Most joint paths that are written.
const MAX_PATHS: usize = 4096;

/// Heads cannot be calibrated, or a calibration cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// Heads and backbone do not belong together.
    #[error(
        "the heads have {what} {heads}, the backbone has {backbone}; use the backbone that the heads were trained on"
    )]
    Mismatch {
        /// `hidden size` or `vocabulary`.
        what: &'static str,
        /// The heads'.
        heads: i64,
        /// The backbone's.
        backbone: i64,
    },
    /// More guesses than tokens, or none.
    #[error("top-k is {top_k}; expected 1 to the vocabulary's {vocab_size}")]
    BadTopK {
        /// What was asked for.
        top_k: usize,
        /// The backbone's.
        vocab_size: i64,
    },
    /// A row is longer than the backbone's context.
    #[error("row {row} has {length} tokens, but the backbone's context is {context}; cut the rows")]
    RowTooLong {
        /// 1-based.
        row: usize,
        /// Its tokens.
        length: usize,
        /// `max_position_embeddings`.
        context: i64,
    },
    /// A token id outside of the vocabulary.
    #[error("row {row}: token id {id} at position {position}; expected 0 to {}", vocab_size - 1)]
    TokenOutOfRange {
        /// 1-based.
        row: usize,
        /// 0-based.
        position: usize,
        /// The id.
        id: i32,
        /// The backbone's.
        vocab_size: i64,
    },
    /// A head whose accuracy cannot be known.
    #[error("no row has a target for head {head}; it needs rows of at least {} tokens whose labels are not all {IGNORE}", head + 2)]
    NoTargets {
        /// 1-based.
        head: usize,
    },
    /// libtorch gave up.
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    /// The disk said no.
    #[error("cannot {action} the calibration {}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The disk's words.
        source: io::Error,
    },
    /// Not a calibration.
    #[error("{} is no calibration; expected {{\"heads\":[{{\"counts\":…,\"total\":…,\"accuracy\":…}}], …}} as `medusa calibrate` writes it", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: serde_json::Error,
    },
}

/// `calibration.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// One entry a head.
    pub heads: Vec<HeadAccuracy>,
    /// Which guesses are right together.
    pub joint: Joint,
    /// The backbone, as it was named.
    pub backbone: String,
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: String,
    /// Input tokens read.
    pub tokens: u64,
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

/// Paths of guesses that were right together, over positions where every head has a target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Joint {
    /// Such positions.
    pub total: u64,
    /// Most frequent first; every prefix of a counted path is counted too.
    pub paths: Vec<JointPath>,
}

/// `[0, 2]`: head 1's best guess and head 2's third guess were both right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JointPath {
    /// 0-based guesses, head 1 first.
    pub path: Vec<usize>,
    /// How often.
    pub count: u64,
}

impl Calibration {
    /// Reads `calibration.json`.
    ///
    /// # Errors
    /// [`CalibrationError`] names the file.
    pub fn load(path: &Path) -> Result<Self, CalibrationError> {
        let text = fs::read_to_string(path).map_err(|source| io_error("read", path, source))?;
        serde_json::from_str(&text).map_err(|source| CalibrationError::Json { path: path.to_owned(), source })
    }

    /// Writes `calibration.json`, whole or not at all.
    ///
    /// # Errors
    /// [`CalibrationError`] names the file.
    pub fn save(&self, path: &Path) -> Result<(), CalibrationError> {
        files::write_atomic(path, |out| {
            serde_json::to_writer(&mut *out, self)?;
            writeln!(out)
        })
        .map_err(|source| io_error("write", path, source))
    }

    /// What the tree search takes: `[h][i]`, the accuracy of guess i of head h.
    pub fn accuracies(&self) -> Vec<Vec<f64>> {
        self.heads.iter().map(|head| head.accuracy.clone()).collect()
    }
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> CalibrationError {
    CalibrationError::Io { action, path: path.to_owned(), source }
}

/// What [`calibrate`] counted, before it is signed with names and hashes.
#[derive(Debug, Clone, PartialEq)]
pub struct Counts {
    top_k: usize,
    hits: Vec<Vec<u64>>,
    totals: Vec<u64>,
    paths: HashMap<Vec<usize>, u64>,
    joint_total: u64,
    tokens: u64,
}

impl Counts {
    fn new(num_heads: usize, top_k: usize) -> Self {
        let hits = vec![vec![0; top_k]; num_heads];
        Self { top_k, hits, totals: vec![0; num_heads], paths: HashMap::new(), joint_total: 0, tokens: 0 }
    }

    /// One position: each head's guesses, best first, and what it should have guessed.
    fn add(&mut self, guesses: &[&[i64]], targets: &[Option<i64>]) {
        let mut path = Vec::with_capacity(targets.len());
        let joint = targets.iter().all(Option::is_some);
        let mut unbroken = joint;
        self.joint_total += u64::from(joint);
        for (head, target) in targets.iter().enumerate() {
            let Some(target) = target else { continue };
            self.totals[head] += 1;
            let rank = guesses[head].iter().position(|guess| guess == target);
            if let Some(rank) = rank {
                self.hits[head][rank] += 1;
                path.push(rank);
            }
            unbroken &= rank.is_some();
            if unbroken {
                *self.paths.entry(path.clone()).or_default() += 1;
            }
        }
    }

    /// The calibration that these counts mean.
    ///
    /// # Errors
    /// [`CalibrationError::NoTargets`] for a head that was never asked.
    pub fn sign(&self, backbone: String, heads_sha256: String) -> Result<Calibration, CalibrationError> {
        if let Some(head) = self.totals.iter().position(|&total| total == 0) {
            return Err(CalibrationError::NoTargets { head: head + 1 });
        }
        let heads = self.hits.iter().zip(&self.totals).map(|(counts, &total)| HeadAccuracy {
            counts: counts.clone(),
            total,
            accuracy: counts.iter().map(|&hits| hits as f64 / total as f64).collect(),
        });
        let joint = Joint { total: self.joint_total, paths: self.most_frequent_paths() };
        Ok(Calibration { heads: heads.collect(), joint, backbone, heads_sha256, tokens: self.tokens })
    }

    fn most_frequent_paths(&self) -> Vec<JointPath> {
        let mut paths: Vec<_> =
            self.paths.iter().map(|(path, &count)| JointPath { path: path.clone(), count }).collect();
        paths.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| (a.path.len(), &a.path).cmp(&(b.path.len(), &b.path))));
        paths.truncate(MAX_PATHS);
        paths
    }
}

/// Runs the heads over `rows` and counts which of their `top_k` guesses is the target. Head h (0-based) at position t is asked
/// for token t + h + 2, if that token's label is not [`IGNORE`]. `on_row` hears how many rows are done.
///
/// # Errors
/// [`CalibrationError`] names what is wrong with the heads or the rows.
pub fn calibrate(
    backbone: &Llama,
    heads: &Heads,
    rows: &[TokenRow],
    top_k: usize,
    mut on_row: impl FnMut(usize),
) -> Result<Counts, CalibrationError> {
    check(backbone, heads, rows, top_k)?;
    let mut counts = Counts::new(heads.num_heads(), top_k);
    for (done, row) in rows.iter().enumerate() {
        guard("calibrating", || tch::no_grad(|| count_row(backbone, heads, row, &mut counts)))?;
        on_row(done + 1);
    }
    Ok(counts)
}

fn check(backbone: &Llama, heads: &Heads, rows: &[TokenRow], top_k: usize) -> Result<(), CalibrationError> {
    let config = &backbone.config;
    for (what, heads, backbone) in [
        ("hidden size", heads.hidden_size(), config.hidden_size),
        ("vocabulary", heads.vocab_size(), config.vocab_size),
    ] {
        if heads != backbone {
            return Err(CalibrationError::Mismatch { what, heads, backbone });
        }
    }
    let (vocab_size, context) = (config.vocab_size, config.max_position_embeddings);
    if top_k == 0 || top_k as i64 > vocab_size {
        return Err(CalibrationError::BadTopK { top_k, vocab_size });
    }
    for (row, tokens) in rows.iter().enumerate() {
        let (row, length) = (row + 1, tokens.input_ids.len());
        if length as i64 > context {
            return Err(CalibrationError::RowTooLong { row, length, context });
        }
        let bad = tokens.input_ids.iter().position(|&id| !(0..vocab_size).contains(&i64::from(id)));
        if let Some(position) = bad {
            return Err(CalibrationError::TokenOutOfRange {
                row,
                position,
                id: tokens.input_ids[position],
                vocab_size,
            });
        }
    }
    Ok(())
}

/// What each head should guess at each position: `[position]`, and the targets of all heads there. Positions that ask no head are left out.
fn targets_of(row: &TokenRow, num_heads: usize) -> Vec<(i64, Vec<Option<i64>>)> {
    let target = |at: usize| row.labels.get(at).filter(|&&label| label != IGNORE).map(|&label| i64::from(label));
    let positions = (0..row.input_ids.len()).map(|t| (t as i64, (0..num_heads).map(|h| target(t + h + 2)).collect()));
    positions.filter(|(_, targets): &(i64, Vec<_>)| targets.iter().any(Option::is_some)).collect()
}

fn count_row(backbone: &Llama, heads: &Heads, row: &TokenRow, counts: &mut Counts) {
    counts.tokens += row.input_ids.len() as u64;
    let asked = targets_of(row, heads.num_heads());
    if asked.is_empty() {
        return;
    }
    let ids: Vec<i64> = row.input_ids.iter().map(|&id| i64::from(id)).collect();
    let tokens_bt = Tensor::from_slice(&ids).unsqueeze(0).to_device(backbone.device());
    let mask = RowMask::causal(ids.len() as i64, &backbone.config, backbone.device());
    let hidden_th = backbone.hidden_states(&tokens_bt, &mask, Adapters::Off).squeeze_dim(0);
    let chunk = (MAX_LOGITS_BYTES / (4 * backbone.config.vocab_size)).max(1) as usize;
    for asked in asked.chunks(chunk) {
        let positions: Vec<i64> = asked.iter().map(|(position, _)| *position).collect();
        let hidden_nh = hidden_th.index_select(0, &Tensor::from_slice(&positions).to_device(backbone.device()));
        let guesses = guesses_of(backbone, heads, &hidden_nh, counts.top_k);
        for (at, (_, targets)) in asked.iter().enumerate() {
            let here = at * counts.top_k..(at + 1) * counts.top_k;
            let guesses: Vec<&[i64]> = guesses.iter().map(|of_head| &of_head[here.clone()]).collect();
            counts.add(&guesses, targets);
        }
    }
}

/// Each head's `top_k` guesses at every row, best first: `[head][row * top_k + rank]`.
fn guesses_of(backbone: &Llama, heads: &Heads, hidden_nh: &Tensor, top_k: usize) -> Vec<Vec<i64>> {
    let of_head = |head| {
        let (_, guesses_nk) = heads.logits(head, hidden_nh, backbone).topk(top_k as i64, -1, true, true);
        Vec::try_from(guesses_nk.contiguous().view([-1])).expect("token ids are int64")
    };
    (0..heads.num_heads()).map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_lie_two_tokens_on_and_ignored_labels_ask_nobody() {
        let row = TokenRow { input_ids: vec![1, 2, 3, 4, 5], labels: vec![IGNORE, 2, IGNORE, 4, 5] };
        let expected = vec![(0, vec![None, Some(4)]), (1, vec![Some(4), Some(5)]), (2, vec![Some(5), None])];
        assert_eq!(targets_of(&row, 2), expected);
    }

    #[test]
    fn counts_are_per_head_and_paths_are_cumulated_over_prefixes() {
        let mut counts = Counts::new(2, 2);
        counts.add(&[&[7, 8], &[1, 2]], &[Some(7), Some(2)]); // path [0, 1]
        counts.add(&[&[7, 8], &[1, 2]], &[Some(7), Some(9)]); // path [0], then a miss
        counts.add(&[&[7, 8], &[1, 2]], &[Some(9), Some(1)]); // a miss, then a hit that no path reaches
        counts.add(&[&[7, 8], &[1, 2]], &[Some(8), None]); // head 2 has no target: not joint
        let calibration = counts.sign("b".into(), "00".into()).unwrap();
        assert_eq!(calibration.heads[0].counts, [2, 1]);
        assert_eq!((calibration.heads[0].total, calibration.heads[1].total), (4, 3));
        assert_eq!(calibration.heads[1].accuracy, [1.0 / 3.0, 1.0 / 3.0]);
        let path = |path: &[usize], count| JointPath { path: path.to_vec(), count };
        assert_eq!(calibration.joint, Joint { total: 3, paths: vec![path(&[0], 2), path(&[0, 1], 1)] });
    }

    #[test]
    fn a_head_that_was_never_asked_is_an_error_and_not_nan() {
        let mut counts = Counts::new(2, 1);
        counts.add(&[&[7], &[1]], &[Some(7), None]);
        let error = counts.sign("b".into(), "00".into()).unwrap_err();
        assert!(error.to_string().starts_with("no row has a target for head 2; it needs rows of at least 4 tokens"));
    }

    #[test]
    fn a_saved_calibration_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let mut counts = Counts::new(1, 2);
        counts.add(&[&[7, 8]], &[Some(8)]);
        let calibration = counts.sign("tiny".into(), "ab".into()).unwrap();
        calibration.save(&path).unwrap();
        assert_eq!(Calibration::load(&path).unwrap(), calibration);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"heads":[{"counts":[0,1],"total":1,"accuracy":[0.0,1.0]}],"joint":{"total":1,"paths":[{"path":[1],"count":1}]},"backbone":"tiny","heads_sha256":"ab","tokens":0}"#), "{text}");
        assert!(Calibration::load(dir.path()).unwrap_err().to_string().starts_with("cannot read the calibration"));
    }
}
