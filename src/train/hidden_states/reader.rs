//! Reads stored hidden states ahead of the training: those of a cache, or those that a server captured.

use super::captured::CapturedReader;
use super::error::HiddenStatesError;
use super::kept::KeptReader;
use super::positions::{RowPositions, by_row, read_positions};
use crate::data::loader::Batch;
use crate::torch::guard;
use crate::torch::transfer::HostTensor;
use crate::train::target_rule::TargetRule;

/// Reads the states of batches, on any thread.
#[derive(Debug, Clone)]
pub enum StatesReader {
    /// Of a cache, which may lack some.
    Kept(KeptReader),
    Captured(CapturedReader),
}

/// States that were read; `None` if they are not all stored.
pub type ReadStates = Result<Option<HostTensor>, HiddenStatesError>;

impl StatesReader {
    fn rule(&self) -> TargetRule {
        match self {
            Self::Kept(reader) => reader.rule(),
            Self::Captured(reader) => reader.rule,
        }
    }

    /// The positions of a batch whose states are read, flat and in the order of the states.
    pub fn positions(&self, batch: &Batch) -> Vec<i64> {
        read_positions(self.rule(), batch)
    }

    /// The same positions by data row.
    pub fn rows(&self, batch: &Batch) -> Vec<RowPositions> {
        by_row(batch, &self.positions(batch))
    }

    /// The states of these rows; `None` if a cache lacks some, or fails: the run then reads it again, and reports the error.
    ///
    /// # Errors
    /// [`HiddenStatesError::Captured`].
    pub fn read(&self, rows: &[RowPositions]) -> ReadStates {
        const WORK: &str = "reading hidden states";
        match self {
            Self::Kept(reader) => {
                let row_ids: Vec<usize> = rows.iter().map(|row| row.id).collect();
                Ok(guard(WORK, || reader.read(&row_ids)).ok().flatten())
            }
            Self::Captured(reader) => guard(WORK, || reader.read(rows))?.map(Some),
        }
    }
}
