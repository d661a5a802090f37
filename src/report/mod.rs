//! An HTML report of one or more runs: curves, accuracies, tree, decoding speed, recipe and provenance. Several runs share the plots.
//!
//! The page is self-contained and loads nothing from the network. This module reads files and measures nothing itself.

use std::path::PathBuf;

use crate::files::FileError;
use crate::formats::FormatError;
use crate::formats::metrics::MetricsError;
use crate::tree::sparse_tree::TreeFileError;

mod axis;
mod curves;
mod key_figures;
mod load;
mod metrics;
mod page;
mod picture;
mod plot;
mod readable;
mod recipe_text;
mod run;
mod sections;
pub mod shell;
mod sweep;
mod thinned;

pub use page::render;
pub use picture::{draw_load, draw_sweep};
pub use run::Run;

/// Why a run has no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not a folder of `medusa-train`.
    #[error("{} is not a run folder: {why}; give the train.output_dir of a recipe", path.display())]
    NotARun {
        path: PathBuf,
        /// A clause.
        why: String,
    },
    #[error(transparent)]
    File(#[from] FileError),
    /// An invalid metrics.jsonl; an incomplete last line is accepted.
    #[error("{_0}{}", advice(_0))]
    Metrics(#[from] MetricsError),
    /// provenance.json, calibration.json, latency.json, bench.json or load.json.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// tree.json.
    #[error(transparent)]
    Tree(#[from] TreeFileError),
}

/// The remedy for an invalid line.
fn advice(error: &MetricsError) -> &'static str {
    match error {
        MetricsError::Line { .. } => "; expected one object per logged step: fix or remove the line",
        MetricsError::File(_) | MetricsError::Gone { .. } => "",
    }
}
