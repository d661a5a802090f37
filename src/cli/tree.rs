//! `medusa tree`: the sparse tree with the largest expected acceptance length, or the one that is fastest on this machine.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Context;

use super::{CommonFlags, print_line};
use crate::calibrate::Calibration;
use crate::files;
use crate::tree::drawing;
use crate::tree::file::{Origin, TreeFile};
use crate::tree::search::{self, Found};

mod args;
mod machine;

pub use args::TreeArgs;

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
