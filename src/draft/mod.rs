//! Drafters: who guesses tokens for the backbone to verify.

pub mod medusa;
