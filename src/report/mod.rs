//! A run as one HTML page: what was trained, its curves, what its heads reach, how fast they decode, and where the numbers come from.
//! Several runs lie over each other in the same plots.
//!
//! The page holds all that it shows and asks the network for nothing. This room reads what other rooms wrote and measures nothing itself.

use std::io;
use std::path::PathBuf;

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

impl From<MetricsError> for ReportError {
    fn from(error: MetricsError) -> Self {
        match error {
            MetricsError::Io { path, source } => Self::Io { path, source },
            MetricsError::Line { path, line, source } => Self::MetricsLine { path, line, source },
        }
    }
}

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
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The disk's words.
        source: io::Error,
    },
    /// A line of metrics.jsonl, other than a last one that is still being written.
    #[error(
        "{}, line {line}: {source}; expected one object a logged step, as medusa-train writes it: remove or mend the line",
        path.display()
    )]
    MetricsLine {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
        /// Where in the line, and why.
        source: serde_json::Error,
    },
    /// Another file of the run.
    #[error("{}: {source}; expected what {writer} writes: make it again, or remove it from the run's folder", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The command that makes it.
        writer: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },
    /// calibration.json, latency.json or bench.json.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// tree.json.
    #[error(transparent)]
    Tree(#[from] TreeFileError),
}
