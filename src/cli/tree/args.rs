//! The command line of `medusa tree`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

/// Build the tree that is expected to commit the most tokens a step (paper section 2.3.3), or the most tokens a second.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa tree --calibration calibration.json --nodes 63 --out tree.json\n  medusa tree --calibration calibration.json --latency latency.json --out tree.json \\\n    --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final"
)]
pub struct TreeArgs {
    /// What `medusa calibrate` wrote.
    #[arg(long, value_name = "C")]
    pub calibration: PathBuf,
    /// Nodes without the root: guesses verified in one pass.
    #[arg(long, value_name = "N", required_unless_present = "latency", conflicts_with = "latency")]
    pub nodes: Option<NonZeroUsize>,
    /// Instead of --nodes: times of steps on this machine, which choose the size and depth. Without such a file they are
    /// measured with --backbone and --heads, and written to it.
    #[arg(long, value_name = "L")]
    pub latency: Option<PathBuf>,
    /// The backbone's folder, for --latency.
    #[arg(long, value_name = "B", requires = "heads", conflicts_with = "nodes")]
    pub backbone: Option<PathBuf>,
    /// The heads' folder, for --latency.
    #[arg(long, value_name = "H", requires = "backbone", conflicts_with = "nodes")]
    pub heads: Option<PathBuf>,
    /// Tokens before the timed steps [default: 256, or half of the backbone's context].
    #[arg(long, value_name = "N", conflicts_with = "nodes")]
    pub context: Option<NonZeroUsize>,
    /// The largest tree that is timed or chosen [default: 64, or what a file of times has].
    #[arg(long, value_name = "N", conflicts_with = "nodes")]
    pub max_nodes: Option<NonZeroUsize>,
    /// Take heads as right independently of each other, as the paper does, whatever else the calibration knows.
    #[arg(long)]
    pub independent: bool,
    /// The file to write; without it the tree goes to stdout.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// A picture of the tree.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}
