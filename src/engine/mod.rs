//! Engines: who runs the backbone over new tokens.

pub mod cuda;
pub mod sample;
