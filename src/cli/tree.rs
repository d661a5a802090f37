//! `medusa tree`: the sparse tree with the largest expected acceptance length, or the one that is fastest on this machine.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use super::{CommonFlags, print_line};
use crate::calibrate::Calibration;
use crate::files;
use crate::tree::drawing;
use crate::tree::file::{Origin, TreeFile};
use crate::tree::search::{self, Found};

mod machine;

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

/// Searches, and writes or prints the tree.
///
/// # Errors
/// When the calibration or the times cannot be read, there is no such tree, or a file cannot be written.
pub fn run(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let mut calibration = Calibration::load(&args.calibration)?;
    if args.independent {
        calibration.forget_joint();
    }
    let calibration_sha256 = Some(files::sha256(&args.calibration)?);
    let file = match (&args.latency, args.nodes) {
        (Some(path), _) => {
            let latency = machine::latency(args, path, &calibration, common)?;
            let (found, tokens_per_second) = machine::choose(args, &latency, &calibration, common)?;
            let latency_sha256 = Some(files::sha256(path)?);
            let origin =
                Origin { latency_sha256, expected_tokens_per_second: Some(tokens_per_second), ..Origin::default() };
            file_of(found, Origin { calibration_sha256, ..origin })
        }
        (None, nodes) => {
            let found = calibration.best_tree(nodes.map_or(0, NonZeroUsize::get), calibration.heads.len())?;
            file_of(found, Origin { calibration_sha256, ..Origin::default() })
        }
    };
    say_what_is_expected(&file, &calibration, common);
    if let Some(path) = &args.svg {
        draw(&file, &calibration, path)?;
    }
    match &args.out {
        Some(path) => file.save(path)?,
        None => return print_line(file.to_json()),
    }
    if common.json { print_line(file.to_json()) } else { Ok(()) }
}

fn file_of(found: Found, origin: Origin) -> TreeFile {
    let expected_tokens_per_step = Some(found.expected_tokens_per_step);
    TreeFile { tree: found.tree, origin: Origin { expected_tokens_per_step, ..origin } }
}

fn say_what_is_expected(file: &TreeFile, calibration: &Calibration, common: &CommonFlags) {
    let (tree, expected) = (&file.tree, file.origin.expected_tokens_per_step.unwrap_or(1.0));
    let sizes =
        format!("{} nodes over {} heads: {expected:.3} tokens a step expected", tree.choices().len(), tree.max_depth());
    if calibration.knows_joint() {
        let independent = search::expected_tokens_per_step(tree, &calibration.independent());
        common.say(format_args!("{sizes} ({independent:.3} if heads were right independently of each other)"));
    } else {
        common.say(format_args!("{sizes}, as if heads were right independently of each other"));
    }
}

fn draw(file: &TreeFile, calibration: &Calibration, path: &Path) -> anyhow::Result<()> {
    let probabilities = search::node_probabilities(&file.tree, &calibration.counts_for(&file.tree));
    let svg = drawing::draw(&file.tree, &probabilities, file.origin.expected_tokens_per_step.unwrap_or(1.0));
    files::write_atomic(path, |out| out.write_all(svg.as_bytes()))
        .with_context(|| format!("cannot write the picture {}", path.display()))
}
