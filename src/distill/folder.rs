//! What the shares in a folder make together: which of them are whole, unfinished or missing, and whether a conversation is there twice.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Serialize;
use serde_json::{Map, Value};

use super::DistillError;
use super::journal::Journal;
use super::output;
use super::provenance::{NOT_COMPARED, are_alike};
use super::refused_file;
use crate::files;
use crate::formats::provenance::DistillProvenance;
use crate::formats::share::Share;

/// A folder of `medusa distill`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DistilledFolder {
    /// Of all shares.
    pub conversations: usize,
    /// Of these, those that are in shards or in a journal.
    pub kept: usize,
    /// Questions that a server refused to answer.
    pub refused: usize,
    pub shares: Vec<DistilledShare>,
}

/// A share of the prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DistilledShare {
    pub share: Share,
    pub conversations: usize,
    pub kept: usize,
    pub refused: usize,
    pub state: ShareState,
}

/// How far a share is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareState {
    /// All its conversations are in shards, or refused.
    Whole,
    /// `--resume` goes on.
    Unfinished,
    /// No machine has begun it, or its files are elsewhere.
    Missing,
}

impl DistilledFolder {
    /// Reads a folder; `None` if no distillation was begun there.
    ///
    /// # Errors
    /// Files that cannot be read, shares of several distillations, a conversation that is there twice.
    pub fn read(folder: &Path) -> Result<Option<Self>, DistillError> {
        let begun = begun_shares(folder)?;
        let Some((first, (first_path, keys))) = begun.iter().next() else { return Ok(None) };
        for (share, (path, others)) in &begun {
            let differs = difference((*first, keys), (*share, others));
            if let Some((key, expected, got)) = differs {
                return Err(DistillError::OtherDistillation {
                    path: path.clone(),
                    first: first_path.clone(),
                    key,
                    expected,
                    got,
                });
            }
        }
        let conversations = keys.get("conversations").and_then(Value::as_u64).unwrap_or(0) as usize;
        let mut seen = HashMap::new();
        let shares = first.all().map(|share| {
            if begun.contains_key(&share) {
                begun_share(folder, share, conversations, &mut seen)
            } else {
                Ok(missing(share, conversations))
            }
        });
        let shares = shares.collect::<Result<Vec<_>, _>>()?;
        let kept = shares.iter().map(|share| share.kept).sum();
        let refused = shares.iter().map(|share| share.refused).sum();
        Ok(Some(Self { conversations, kept, refused, shares }))
    }
}

/// Shares, each with its distill.json.
type BegunShares = BTreeMap<Share, (PathBuf, Map<String, Value>)>;

fn begun_shares(folder: &Path) -> Result<BegunShares, DistillError> {
    let failed = |source: io::Error| DistillError::Io { path: folder.into(), source };
    let mut begun = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if let Some(share) = output::share_of_provenance(&name) {
            let path = folder.join(name);
            begun.insert(share, (path.clone(), DistillProvenance::entries(&path)?));
        }
    }
    Ok(begun)
}

/// The first key in which two shares are of different distillations.
fn difference(
    (first, a): (Share, &Map<String, Value>),
    (share, b): (Share, &Map<String, Value>),
) -> Option<(String, String, String)> {
    if first.of() != share.of() {
        return Some(("number of shares".to_owned(), first.of().to_string(), share.of().to_string()));
    }
    let is_compared = |key: &str| key != "share" && !NOT_COMPARED.contains(&key);
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))).filter(|key| is_compared(key));
    let value = |map: &Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
    let mut different = keys.filter(|key| !are_alike(key, &value(a, key), &value(b, key)));
    different.next().map(|key| (key.clone(), value(a, key).to_string(), value(b, key).to_string()))
}

fn missing(share: Share, conversations: usize) -> DistilledShare {
    let conversations = share.ids(conversations).count();
    DistilledShare { share, conversations, kept: 0, refused: 0, state: ShareState::Missing }
}

fn begun_share(
    folder: &Path,
    share: Share,
    all: usize,
    seen: &mut HashMap<i64, PathBuf>,
) -> Result<DistilledShare, DistillError> {
    let conversations = share.ids(all).count();
    let (mut shards, mut in_shards) = (0, 0);
    for path in output::shard_files(folder, share) {
        shards += 1;
        for index in indices(&path)? {
            in_shards += 1;
            if let Some(first) = seen.insert(index, path.clone()) {
                return Err(DistillError::DoubleConversation { index, first, second: path });
            }
        }
    }
    let refused = output::refused_in_shards(folder, share, shards)?;
    let without_row = refused.iter().filter(|question| question.has_no_row()).count();
    let is_whole = in_shards + without_row >= conversations;
    let state = if is_whole { ShareState::Whole } else { ShareState::Unfinished };
    let later = output::journalled(folder, share, shards)?;
    let kept = in_shards + later.iter().filter(|finished| finished.is_row()).count();
    let refused = refused.len() + later.iter().filter(|finished| finished.refused.is_some()).count();
    Ok(DistilledShare { share, conversations, kept, refused, state })
}

/// Compares the lines of a journal with their checksums.
///
/// # Errors
/// [`DistillError::DamagedLines`], or an error of reading.
pub fn check_journal(path: &Path) -> Result<(), DistillError> {
    let lines = Journal::damaged(path)?;
    if lines == 0 { Ok(()) } else { Err(DistillError::DamagedLines { lines }) }
}

/// Compares the lines of refused.jsonl with their checksums.
///
/// # Errors
/// The first damaged line, or an error of reading.
pub fn check_refused(path: &Path) -> Result<(), DistillError> {
    refused_file::read(path).map(drop)
}

/// Whether a file is the shard behind the last one of its share, whose checksum may be written already while the journal has its rows.
pub fn is_next_shard(folder: &Path, name: &str) -> bool {
    let shares = begun_shares(folder).unwrap_or_default();
    shares
        .keys()
        .any(|&share| output::next_shard(folder, share) == folder.join(name) && output::holds_next_shard(folder, share))
}

/// The column `index` of a shard.
fn indices(path: &Path) -> Result<Vec<i64>, DistillError> {
    let file = files::open_regular(path).map_err(|source| DistillError::Io { path: path.into(), source })?;
    let bad = |problem: String| DistillError::Shard { path: path.into(), problem };
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|why| bad(why.to_string()))?;
    let only = ProjectionMask::columns(builder.parquet_schema(), ["index"]);
    let mut indices = vec![];
    for batch in builder.with_projection(only).build().map_err(|why| bad(why.to_string()))? {
        let batch = batch.map_err(|why| bad(why.to_string()))?;
        let column = batch.column_by_name("index").and_then(|column| column.as_primitive_opt::<Int64Type>());
        indices.extend(column.ok_or_else(|| bad("it has no column index of 64-bit integers".to_owned()))?.values());
    }
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shares_of_several_gpus_are_one_distillation() {
        let share = |text: &str| text.parse::<Share>().unwrap();
        let facts =
            |device: &str| json!({"device": device, "rows": 3, "backbone": device}).as_object().unwrap().clone();
        let between = |other: &str| difference((share("1/2"), &facts("cuda:0")), (share("2/2"), &facts(other)));
        assert_eq!(between("cuda:1"), None);
        let differs = ("device".to_owned(), "\"cuda:0\"".to_owned(), "\"cpu\"".to_owned());
        assert_eq!(between("cpu"), Some(differs));
    }
}
