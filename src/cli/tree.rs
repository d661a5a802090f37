//! `medusa tree`: the sparse tree with the largest expected acceptance length.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::{CommonFlags, print_line};
use crate::calibrate::Calibration;
use crate::files;
use crate::medusa::tree_file::{Origin, TreeFile};

/// Build the tree that is expected to commit the most tokens a step (paper section 2.3.3).
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  medusa tree --calibration calibration.json --nodes 63 --out tree.json")]
pub struct TreeArgs {
    /// What `medusa calibrate` wrote.
    #[arg(long, value_name = "C")]
    pub calibration: PathBuf,
    /// Nodes without the root: guesses verified in one pass.
    #[arg(long, value_name = "N")]
    pub nodes: NonZeroUsize,
    /// The file to write; without it the tree goes to stdout.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Searches, and writes or prints the tree.
///
/// # Errors
/// When the calibration cannot be read, has no such tree, or the file cannot be written.
pub fn run(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let calibration = Calibration::load(&args.calibration)?;
    let found = calibration.best_tree(args.nodes.get(), calibration.heads.len())?;
    let origin = Origin {
        expected_tokens_per_step: Some(found.expected_tokens_per_step),
        calibration_sha256: Some(files::sha256(&args.calibration)?),
        ..Origin::default()
    };
    let file = TreeFile { tree: found.tree, origin };
    match &args.out {
        Some(path) => file.save(path)?,
        None => return print_line(file.to_json()),
    }
    if common.json { print_line(file.to_json()) } else { Ok(()) }
}
