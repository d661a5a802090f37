//! A run as one HTML page: what was trained, its curves, what its heads reach, how fast they decode, and where the numbers come from.
//! Several runs lie over each other in the same plots.
//!
//! The page holds all that it shows and asks the network for nothing. This room reads what other rooms wrote and measures nothing itself.

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
    #[error("{} is no run's folder: {missing}; give the folder that a recipe names as train.output_dir", path.display())]
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
        MetricsError::Line { .. } => {
            "; expected one object a logged step, as medusa-train writes it: remove or mend the line"
        }
        MetricsError::File(_) => "",
    }
}
