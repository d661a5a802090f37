//! Hidden states that a server captured (`data.hidden_states`), for the rows of a run.

// M kept positions, H hidden, L = 1 + number of taps
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
use crate::model::llama::Llama;
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
    /// How many layers before the last one are read, too.
    taps: usize,
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

    /// Reads the states that `rule` and the taps of `backbone` need: of the last layers in the files, in ascending order.
    ///
    /// # Panics
    /// If the files have fewer layers.
    pub fn reader(&self, rule: TargetRule, backbone: &Llama) -> CapturedReader {
        let (hidden_size, taps, device) =
            (backbone.config.hidden_size, backbone.taps().layers().len(), backbone.device());
        assert!(taps < self.set.layers(), "the taps were checked");
        CapturedReader { rows: self.clone(), rule, hidden_size, taps, device }
    }

    fn file(&self, row: usize) -> &CapturedFile {
        &self.set.files()[self.file_of_row[row] as usize]
    }
}

impl CapturedReader {
    /// The states of `rows`, one after another: `[L, M, H]`, those of the last layer first, before the final norm, then those of the taps. In
    /// the dtype of the files.
    ///
    /// # Errors
    /// [`HiddenStatesError::Captured`].
    pub fn read(&self, rows: &[RowPositions]) -> Result<HostTensor, HiddenStatesError> {
        let last = self.layers() - 1;
        self.read_layers(&[&[last], &Vec::from_iter(last - self.taps..last)[..]].concat(), rows)
    }

    /// How many layers each file has.
    pub fn layers(&self) -> usize {
        self.rows.set.layers()
    }

    /// As [`CapturedReader::read`], of these layers of the files.
    ///
    /// # Errors
    /// [`HiddenStatesError::Captured`].
    pub fn read_layers(&self, layers: &[usize], rows: &[RowPositions]) -> Result<HostTensor, HiddenStatesError> {
        let kept: usize = rows.iter().map(|row| row.positions.len()).sum();
        let kind = self.rows.set.files()[0].dtype.kind(); // all have the same
        let layer_rows = layers.iter().flat_map(|&layer| rows.iter().map(move |row| (layer, row)));
        let fill = |mut rest: &mut [u8]| {
            for (layer, RowPositions { id, positions }) in layer_rows {
                let file = self.rows.file(*id);
                let (states, later) = rest.split_at_mut(positions.len() * file.state_bytes());
                file.read_states(layer, positions, states)?;
                rest = later;
            }
            Ok(())
        };
        HostTensor::filled(&[layers.len() as i64, kept as i64, self.hidden_size], kind, self.device, fill)
    }
}
