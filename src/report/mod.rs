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
mod metrics;
mod page;
mod plot;
mod readable;
mod recipe_text;
mod run;
mod sections;
mod thinned;

pub use page::render;
pub use run::Run;

/// A folder or file that no page can be made of.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Not what `medusa-train` made.
    #[error("{} is not a run folder: {missing}; give the train.output_dir of a recipe", path.display())]
    NotARun {
        /// What was given.
        path: PathBuf,
        /// What it lacks.
        missing: &'static str,
    },
    /// The disk said no.
    #[error(transparent)]
    File(#[from] FileError),
    /// metrics.jsonl, but for a last line that is still being written.
    #[error("{_0}{}", advice(_0))]
    Metrics(#[from] MetricsError),
    /// provenance.json, calibration.json, latency.json or bench.json.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// tree.json.
    #[error(transparent)]
    Tree(#[from] TreeFileError),
}

/// What to do about a line that is not ours.
fn advice(error: &MetricsError) -> &'static str {
    match error {
        MetricsError::Line { .. } => "; expected one object per logged step: fix or remove the line",
        MetricsError::File(_) => "",
    }
}
