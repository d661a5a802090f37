//! EAGLE-3 (arXiv 2503.01840): one decoder layer drafts token after token. It reads hidden states of several layers of the backbone, and behind the text its
//! own outputs; training unrolls it over its own guesses' places (training-time test).

pub mod drafter;
pub mod file;
mod known_text;
pub mod levels;
pub mod planned;
mod training;
pub mod weights;

#[cfg(test)]
mod tests;
