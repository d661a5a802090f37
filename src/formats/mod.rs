//! Files that pass between commands. Each has one type, one reader and one writer here, which all other modules import.
//! No tensors here.
//!
//! | file | type |
//! | --- | --- |
//! | metrics.jsonl | [`metrics::MetricsLine`] |
//! | calibration.json | [`calibration::Calibration`] |
//! | a share of calibration.json | [`calibration_share::CalibrationShare`] |
//! | tree.json | [`tree::TreeFile`] |
//! | latency.json | [`latency::Latency`] |
//! | bench.json | [`bench::BenchResult`] |
//! | load.json | [`load::LoadResult`] |
//! | provenance.json | [`provenance::Provenance`] |
//! | prompts.hashes | [`trained_prompts::TrainedPrompts`] |
//! | validation_answers.json | [`validation_answers::ValidationAnswers`] |
//! | distill.json | [`provenance::DistillProvenance`] |
//! | hs_0.safetensors, … of a server | [`captured_states::CapturedFile`], read only |
//! | config.json of heads | [`heads_config::HeadsFolderConfig`], [`heads_config::PublishedHeadsConfig`] |
//!
//! calibration.json, its shares, tree.json, latency.json, provenance.json, validation_answers.json and distill.json are [`sealed`].
//! The names of these files in a run's folder are in [`run_folder`].

pub mod bench;
pub mod best;
pub mod calibration;
pub mod calibration_share;
pub mod captured_states;
mod error;
pub mod heads_config;
mod hit_counts;
mod invalid_field;
pub mod latency;
pub mod load;
pub mod metrics;
pub mod provenance;
pub mod run_folder;
pub mod sealed;
pub mod share;
pub mod trained_prompts;
pub mod tree;
pub mod validation_answers;

pub use error::FormatError;

/// A number that is there twice.
fn twice<T: std::hash::Hash + Eq + Copy>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let mut seen = std::collections::HashSet::new();
    items.find(|item| !seen.insert(*item))
}
