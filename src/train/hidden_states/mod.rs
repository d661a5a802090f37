//! The frozen backbone's hidden states, the heads' input: computed per batch, or cached on disk across epochs and runs
//! (`train.hidden_state_cache`).

mod batch;
mod error;
mod kept;
mod layout;
#[cfg(test)]
mod tests;

pub use batch::{BatchStates, hidden_states, inputs};
pub use error::HiddenStatesError;
pub use kept::KeptStates;
pub use layout::file_bytes;
