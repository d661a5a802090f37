//! `medusa tree`: the sparse tree with the largest expected acceptance length, or the fastest one on this machine.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Context;

use super::{CommonFlags, UsageError, print_line, trained_on};
use crate::bounds::TREE_NODES;
use crate::files;
use crate::formats::calibration::Calibration;
use crate::formats::tree::TreeFile;
use crate::plural::counted;
use crate::tree::drawing;
use crate::tree::expected::ExpectedTokens;
use crate::tree::guess_tree::GuessTree;
use crate::tree::search::{self, SearchError, SearchedTree};
use crate::tree::sparse_tree::SparseTree;

mod args;
mod machine;
mod sequences;

pub use args::TreeArgs;

/// Searches a tree and writes or prints it.
///
/// # Errors
/// An unreadable calibration or latency file, an impossible tree, or an output file that cannot be written.
pub fn run(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let Some(path) = &args.latency else { return run_without_latency(args, common) };
    let calibration = calibration(args, common)?;
    let latency = machine::latency(args, path, &calibration, common)?;
    let chosen = machine::choose(args, &latency, &calibration, common)?;
    let slowdown = latency.slowdown.unwrap_or_default();
    let expected_tokens_per_second = Some(chosen.tokens_per_second() / slowdown.trees);
    let expected = ExpectedTokens { per_step: chosen.tokens_per_step, interval: chosen.interval };
    let (tree, file) = file_of(chosen.tree, expected);
    let max_nodes = args.max_nodes.map_or(usize::MAX, Into::into);
    let by_sequences = sequences::choose(&latency, &calibration, max_nodes, common)?;
    let latency_sha256 = Some(files::sha256(path)?);
    let file = TreeFile { latency_sha256, expected_tokens_per_second, by_sequences, ..file };
    write(args, &tree, file, &calibration, common)
}

/// As [`run`], of `--nodes`: measures nothing, so libtorch is not needed.
///
/// # Errors
/// As [`run`].
pub fn run_without_latency(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let calibration = calibration(args, common)?;
    let (tree, file) = tree_of_size(args, &calibration)?;
    write(args, &tree, file, &calibration, common)
}

fn calibration(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<Calibration> {
    let mut calibration = Calibration::load(&args.calibration)?;
    trained_on::report(calibration.prompts, "the calibrated heads", args.strict, common)?;
    if args.independent {
        calibration.forget_joint();
    }
    Ok(calibration)
}

/// Writes or prints the tree, and draws it.
fn write(
    args: &TreeArgs,
    tree: &GuessTree,
    file: TreeFile,
    calibration: &Calibration,
    common: &CommonFlags,
) -> anyhow::Result<()> {
    let calibration_sha256 = Some(files::sha256(&args.calibration)?);
    let file = TreeFile { calibration_sha256, ..file };
    let expected = file.expected_tokens_per_step.unwrap_or(1.0);
    say_what_is_expected(tree, &file, calibration, common);
    if let Some(path) = &args.svg {
        match tree.as_static() {
            Some(tree) => draw(tree, expected, calibration, path)?,
            None => common.say(format_args!(
                "no picture in {}: the fastest tree is chosen at each step, and --svg draws static trees",
                path.display()
            )),
        }
    }
    match &args.out {
        Some(path) => file.save(path)?,
        None => return print_line(file.to_json()),
    }
    if common.json { print_line(file.to_json()) } else { Ok(()) }
}

/// The tree of --nodes.
fn tree_of_size(args: &TreeArgs, calibration: &Calibration) -> anyhow::Result<(GuessTree, TreeFile)> {
    let nodes = args.nodes.map_or(0, NonZeroUsize::get);
    if !args.dynamic {
        let found = calibration.cross_validated_tree(nodes, calibration.heads.len());
        let SearchedTree { tree, expected_tokens_per_step: per_step, interval } =
            found.with_context(|| format!("no tree from {}", args.calibration.display()))?;
        return Ok(file_of(GuessTree::Static(tree), ExpectedTokens { per_step, interval }));
    }
    if nodes > TREE_NODES {
        return Err(SearchError::BadNodes { asked: nodes }.into());
    }
    let with_depth = |depth: usize| calibration.dynamic_tree(nodes, depth);
    let best =
        (1..=calibration.heads.len()).rev().filter_map(with_depth).max_by(|a, b| a.1.per_step.total_cmp(&b.1.per_step));
    let (limits, expected) = best.ok_or_else(|| {
        let path = args.calibration.display();
        UsageError(format!(
            "{path} does not know trees that are chosen at each step; measure it anew with `medusa calibrate`"
        ))
    })?;
    Ok(file_of(GuessTree::Dynamic(limits), expected))
}

fn file_of(tree: GuessTree, ExpectedTokens { per_step, interval }: ExpectedTokens) -> (GuessTree, TreeFile) {
    let file = match &tree {
        GuessTree::Static(tree) => TreeFile::new(tree.choices().to_vec(), per_step),
        GuessTree::Dynamic(limits) => TreeFile::chosen_at_each_step(*limits),
    };
    (tree, TreeFile { expected_tokens_per_step: Some(per_step), expected_interval: interval, ..file })
}

fn say_what_is_expected(tree: &GuessTree, file: &TreeFile, calibration: &Calibration, common: &CommonFlags) {
    let (nodes, heads) = (counted(tree.nodes(), "node"), heads_note(tree.depth(), calibration));
    let when = if tree.as_static().is_some() { "" } else { ", chosen at each step" };
    let expected = file.expected_tokens_per_step.unwrap_or(1.0);
    let how = match tree.as_static() {
        Some(tree) if calibration.knows_joint() => {
            let independent = search::expected_tokens_per_step(tree, &calibration.independent());
            format!(" ({independent:.3} if heads were independent)")
        }
        Some(_) => ", assuming independent heads".to_owned(),
        None => String::new(),
    };
    common.say(format_args!("{nodes} over {heads}{when}: {expected:.3} expected tokens per step{how}"));
    common.say(in_words(file.expected_interval, calibration.joint.runs.len()));
}

/// How much the expected tokens per step say of other texts.
fn in_words(interval: Option<[f64; 2]>, texts: usize) -> String {
    let texts = counted(texts, "text");
    match interval {
        Some([low, high]) => format!(
            "calibrated on {texts}: on as many other texts of the same kind, {low:.2} to {high:.2} tokens per step are expected (95 %)"
        ),
        None => format!(
            "calibrated on {texts}, too few to tell what to expect on others: the expected tokens per step are those of the same texts"
        ),
    }
}

/// The heads whose guesses a tree of this depth has.
fn heads_note(depth: usize, calibration: &Calibration) -> String {
    let all = counted(calibration.heads.len(), "head");
    if depth == calibration.heads.len() { all } else { format!("the first {depth} of {all}") }
}

fn draw(tree: &SparseTree, expected: f64, calibration: &Calibration, path: &Path) -> anyhow::Result<()> {
    let probabilities = search::node_probabilities(tree, &calibration.counts_for(tree));
    let svg = drawing::draw(tree, &probabilities, expected);
    files::write_atomic(path, |out| out.write_all(svg.as_bytes()))
        .with_context(|| format!("cannot write the picture {}", path.display()))
}
