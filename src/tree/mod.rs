//! The sparse tree of guesses: its shape, the search for it, and the acceptance of its nodes. No tensors here.

pub mod accept;
pub mod by_load;
mod calibrated;
pub mod calibration_shares;
pub mod cross_validation;
pub mod drawing;
pub mod dynamic;
pub mod expected;
pub mod guess_tree;
pub mod merged;
pub mod path_counts;
pub mod rank_counts;
pub mod rejection;
pub mod replay;
pub mod row_times;
pub mod search;
pub mod sparse_tree;
pub mod token_tree;
