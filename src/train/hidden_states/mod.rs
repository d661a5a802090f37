//! The frozen backbone's hidden states, the heads' input: computed per batch, or cached on disk across epochs and runs
//! (`train.hidden_state_cache`).

mod batch;
mod error;
mod file;
mod kept;
mod layout;
#[cfg(test)]
mod tests;

pub use batch::{hidden_states, of_every_position};
pub use error::HiddenStatesError;
pub use kept::{CacheSettings, KeptStates, StatesPlace, StatesReader};
pub use layout::file_bytes;
