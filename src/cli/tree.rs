//! `medusa tree`: the sparse tree with the largest expected acceptance length, or the fastest one on this machine.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Context;

use super::{CommonFlags, print_line};
use crate::data::report::counted;
use crate::files;
use crate::formats::calibration::Calibration;
use crate::formats::tree::TreeFile;
use crate::tree::drawing;
use crate::tree::search::{self, SearchedTree};
use crate::tree::sparse_tree::SparseTree;

mod args;
mod machine;

pub use args::TreeArgs;

/// Searches a tree and writes or prints it.
///
/// # Errors
/// An unreadable calibration or latency file, an impossible tree, or an output file that cannot be written.
pub fn run(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let mut calibration = Calibration::load(&args.calibration)?;
    if args.independent {
        calibration.forget_joint();
    }
    let calibration_sha256 = Some(files::sha256(&args.calibration)?);
    let (tree, file) = match (&args.latency, args.nodes) {
        (Some(path), _) => {
            let latency = machine::latency(args, path, &calibration, common)?;
            let (found, tokens_per_second) = machine::choose(args, &latency, &calibration, common)?;
            let (tree, file) = file_of(found);
            let latency_sha256 = Some(files::sha256(path)?);
            (tree, TreeFile { latency_sha256, expected_tokens_per_second: Some(tokens_per_second), ..file })
        }
        (None, nodes) => file_of(calibration.best_tree(nodes.map_or(0, NonZeroUsize::get), calibration.heads.len())?),
    };
    let file = TreeFile { calibration_sha256, ..file };
    let expected = file.expected_tokens_per_step.unwrap_or(1.0);
    say_what_is_expected(&tree, expected, &calibration, common);
    if let Some(path) = &args.svg {
        draw(&tree, expected, &calibration, path)?;
    }
    match &args.out {
        Some(path) => file.save(path)?,
        None => return print_line(file.to_json()),
    }
    if common.json { print_line(file.to_json()) } else { Ok(()) }
}

fn file_of(SearchedTree { tree, expected_tokens_per_step }: SearchedTree) -> (SparseTree, TreeFile) {
    let file = TreeFile::new(tree.choices().to_vec(), expected_tokens_per_step);
    (tree, file)
}

fn say_what_is_expected(tree: &SparseTree, expected: f64, calibration: &Calibration, common: &CommonFlags) {
    let (nodes, heads) = (counted(tree.choices().len(), "node"), counted(tree.max_depth(), "head"));
    let sizes = format!("{nodes} over {heads}: {expected:.3} expected tokens per step");
    if calibration.knows_joint() {
        let independent = search::expected_tokens_per_step(tree, &calibration.independent());
        common.say(format_args!("{sizes} ({independent:.3} if heads were independent)"));
    } else {
        common.say(format_args!("{sizes}, assuming independent heads"));
    }
}

fn draw(tree: &SparseTree, expected: f64, calibration: &Calibration, path: &Path) -> anyhow::Result<()> {
    let probabilities = search::node_probabilities(tree, &calibration.counts_for(tree));
    let svg = drawing::draw(tree, &probabilities, expected);
    files::write_atomic(path, |out| out.write_all(svg.as_bytes()))
        .with_context(|| format!("cannot write the picture {}", path.display()))
}
