//! The frozen backbone's hidden states, the heads' input: computed per batch, cached on disk across epochs and runs
//! (`train.hidden_state_cache`), or captured by a server (`data.hidden_states`).

mod batch;
mod captured;
mod error;
mod file;
mod kept;
mod layout;
mod positions;
mod reader;
#[cfg(test)]
mod tests;

pub use batch::{at_every_position, hidden_states};
pub use captured::{CapturedReader, CapturedRows, CapturedSplits};
pub use error::HiddenStatesError;
pub use kept::{CacheSettings, KeptStates, StatesPlace};
pub use layout::file_bytes;
pub use positions::RowPositions;
pub use reader::{ReadStates, StatesReader};
