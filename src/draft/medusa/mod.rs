//! Medusa heads and their losses (arXiv 2401.10774).

pub mod drafter;
pub mod fused_loss;
pub mod heads;
pub mod levels;
pub mod loss;
pub mod target_weights;
