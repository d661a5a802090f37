//! The command line of `medusa tree`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::super::numbers::above_zero;
use super::super::served::QuantizationName;
use crate::session::engine::EngineName;

/// Search the tree with the most expected tokens per step (paper section 2.3.3), or per second.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("size").required(true),
    after_help = "Example:\n  medusa tree --calibration calibration.json --nodes 63 --out tree.json\n  medusa tree --calibration calibration.json --nodes 63 --dynamic \\
    --out tree.json\n  medusa tree --calibration calibration.json --latency latency.json \\\n    --backbone B --heads checkpoints/first --out tree.json"
)]
pub struct TreeArgs {
    /// Calibration from `medusa calibrate`.
    #[arg(long, value_name = "C")]
    pub calibration: PathBuf,
    /// Number of nodes without the root: guesses verified per step.
    #[arg(long, value_name = "N", group = "size", value_parser = above_zero::<NonZeroUsize>)]
    pub nodes: Option<NonZeroUsize>,
    /// With --nodes: write a tree that is chosen at each step from the likeliest guesses, in place of a static one.
    #[arg(long, conflicts_with_all = ["latency", "independent", "svg"])]
    pub dynamic: bool,
    /// Instead of --nodes: choose the fastest size and kind of tree from the step times in this file. If it does not exist, the times are measured
    /// with --backbone and --heads and saved to it.
    #[arg(long, value_name = "L", group = "size")]
    pub latency: Option<PathBuf>,
    /// Backbone to time for --latency.
    #[arg(
        long,
        help_heading = "For this machine (--latency)",
        value_name = "B",
        requires = "heads",
        conflicts_with = "nodes"
    )]
    pub backbone: Option<PathBuf>,
    /// Heads to time for --latency.
    #[arg(
        long,
        help_heading = "For this machine (--latency)",
        value_name = "H",
        requires = "backbone",
        conflicts_with = "nodes"
    )]
    pub heads: Option<PathBuf>,
    /// Engine to time for --latency: the one that `medusa generate` will use.
    #[arg(long, help_heading = "For this machine (--latency)", value_enum, value_name = "ENGINE", default_value_t = EngineName::Auto, conflicts_with = "nodes")]
    pub engine: EngineName,
    /// Quantise the backbone's linear layers to time for --latency [default: as in the heads' training].
    #[arg(long, help_heading = "For this machine (--latency)", value_enum, value_name = "Q", conflicts_with = "nodes")]
    pub quantization: Option<QuantizationName>,
    /// Context length of the timed steps [default: 256, at most half the backbone's context].
    #[arg(long, help_heading = "For this machine (--latency)", value_name = "N", conflicts_with = "nodes", value_parser = above_zero::<NonZeroUsize>)]
    pub context: Option<NonZeroUsize>,
    /// Largest tree to time or choose [default: 64; all sizes of an existing --latency file].
    #[arg(long, help_heading = "For this machine (--latency)", value_name = "N", conflicts_with = "nodes", value_parser = above_zero::<NonZeroUsize>)]
    pub max_nodes: Option<NonZeroUsize>,
    /// Also time steps of so many texts at a time and choose a tree for each number, as in 4,16: for `medusa distill`, which takes the tree of the
    /// nearest number.
    #[arg(long, help_heading = "For this machine (--latency)", value_name = "N,…", value_delimiter = ',', conflicts_with = "nodes", value_parser = above_zero::<NonZeroUsize>)]
    pub sequences: Vec<NonZeroUsize>,
    /// Assume independent heads, as the paper does, instead of using the joint hits of the calibration.
    #[arg(long)]
    pub independent: bool,
    /// Make an error of a calibration on prompts that the heads were trained on, whose accuracies are too good.
    #[arg(long)]
    pub strict: bool,
    /// Output file [default: stdout].
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also draw the tree as SVG.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub svg: Option<PathBuf>,
}
