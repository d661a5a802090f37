//! Hidden states that a server captured (`data.hidden_states`), for the rows of a run.

// M kept positions, H hidden
use std::collections::HashSet;
use std::sync::Arc;

use tch::Device;

use super::error::HiddenStatesError;
use super::positions::RowPositions;
use crate::data::DataError;
use crate::data::captured::CapturedSet;
use crate::data::store::RowStore;
use crate::formats::captured_states::CapturedFile;
use crate::formats::metrics::MetricsSplit;
use crate::torch::transfer::HostTensor;
use crate::train::target_rule::TargetRule;

/// The files of some rows. Clones share them.
#[derive(Debug, Clone)]
pub struct CapturedRows {
    set: Arc<CapturedSet>,
    /// Of each row of the [`RowStore`].
    file_of_row: Arc<[u32]>,
}

/// The hidden states of a server.
#[derive(Debug, Clone)]
pub struct CapturedSplits {
    /// Of the training rows.
    pub train: CapturedRows,
    /// Of the validation rows, if there are any.
    pub validation: Option<CapturedRows>,
}

/// Reads the states of rows, on any thread.
#[derive(Debug, Clone)]
pub struct CapturedReader {
    rows: CapturedRows,
    pub(super) rule: TargetRule,
    hidden_size: i64,
    /// Where the states are needed.
    device: Device,
}

impl CapturedSplits {
    /// Files whose tokens are those of no row.
    pub fn files_of_no_row(&self) -> usize {
        let rows = [Some(&self.train), self.validation.as_ref()].into_iter().flatten();
        let used: HashSet<u32> = rows.flat_map(|rows| rows.file_of_row.iter().copied()).collect();
        let repeated = self.train.set.repeated().map_or(0, |repeated| repeated.rows);
        self.train.set.files().len() - used.len() - repeated
    }

    /// Those of the training or the validation rows.
    pub fn of(&self, split: MetricsSplit) -> Option<&CapturedRows> {
        match split {
            MetricsSplit::Train => Some(&self.train),
            MetricsSplit::Validation => self.validation.as_ref(),
        }
    }
}

impl CapturedRows {
    /// The files of all `rows`, each of which has one.
    ///
    /// # Errors
    /// A damaged token cache.
    pub fn new(set: &Arc<CapturedSet>, rows: &RowStore) -> Result<Self, DataError> {
        Ok(Self { set: Arc::clone(set), file_of_row: set.files_of(rows)?.into() })
    }

    /// The files of these and other rows.
    pub fn set(&self) -> &CapturedSet {
        &self.set
    }

    /// Reads the states that `rule` needs, for a backbone of this width on `device`.
    pub fn reader(&self, rule: TargetRule, hidden_size: i64, device: Device) -> CapturedReader {
        CapturedReader { rows: self.clone(), rule, hidden_size, device }
    }

    fn file(&self, row: usize) -> &CapturedFile {
        &self.set.files()[self.file_of_row[row] as usize]
    }
}

impl CapturedReader {
    /// The last layer's states of `rows`, one after another: `[M, H]`, before the final norm, in the dtype of the files.
    ///
    /// # Errors
    /// [`HiddenStatesError::Captured`].
    pub fn read(&self, rows: &[RowPositions]) -> Result<HostTensor, HiddenStatesError> {
        self.read_layer(self.layers() - 1, rows)
    }

    /// How many layers each file has.
    pub fn layers(&self) -> usize {
        self.rows.set.files()[0].layers // all have as many
    }

    /// As [`CapturedReader::read`], of a layer in the files.
    ///
    /// # Errors
    /// [`HiddenStatesError::Captured`].
    pub fn read_layer(&self, layer: usize, rows: &[RowPositions]) -> Result<HostTensor, HiddenStatesError> {
        let kept: usize = rows.iter().map(|row| row.positions.len()).sum();
        let kind = self.rows.set.files()[0].dtype.kind(); // all have the same
        let fill = |mut rest: &mut [u8]| {
            for RowPositions { id, positions } in rows {
                let file = self.rows.file(*id);
                let (states, later) = rest.split_at_mut(positions.len() * file.state_bytes());
                file.read_states(layer, positions, states)?;
                rest = later;
            }
            Ok(())
        };
        HostTensor::filled(&[kept as i64, self.hidden_size], kind, self.device, fill)
    }
}
