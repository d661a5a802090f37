//! `medusa report RUN_DIR`: an HTML report of training runs.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::{CommonFlags, UsageError, outputs, print_json, print_line};
use crate::files;
use crate::report::{self, ReportError, Run};

/// Name of the page without --out.
const PAGE: &str = "report.html";

const EXAMPLES: &str = "Example:
  medusa report checkpoints/first
  medusa report checkpoints/first checkpoints/second --out both.html

Includes calibration.json, tree.json, latency.json, bench.json and load.json if they are in the run's folder.";

/// Write an HTML report of one or more runs: curves, accuracies, tree, speed, recipe, provenance.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// Run folders (train.output_dir), finished or not.
    #[arg(value_name = "RUN_DIR", required = true)]
    pub runs: Vec<PathBuf>,
    /// Output file [default: RUN_DIR/report.html; of several runs, report.html in the working directory].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Writes the page, and prints its path.
///
/// # Errors
/// A path that is no run folder, an invalid file in one, or an output file that cannot be written; nothing is left
/// then.
pub fn run(args: &ReportArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let out = out(args);
    let runs = args.runs.iter().map(|folder| Run::read(folder).map_err(as_usage)).collect::<Result<Vec<_>, _>>()?;
    for note in runs.iter().flat_map(Run::notes) {
        common.say(note);
    }
    let claim = || outputs::claim("report:", &out, common);
    let _claim = args.out.is_none().then(claim).transpose()?; // --out was claimed before
    if args.out.is_none() && runs.len() > 1 {
        common.say(format_args!("no --out: writing the page of {} runs to {PAGE}", runs.len()));
    }
    let page = report::render(&runs);
    files::write_atomic(&out, |file| file.write_all(page.as_bytes()))
        .with_context(|| format!("cannot write {}", out.display()))?;
    if common.json { print_json(&json!({"out": out, "runs": args.runs})) } else { print_line(out.display()) }
}

/// A path that is not of a run: exit status 2.
fn as_usage(error: ReportError) -> anyhow::Error {
    match error {
        ReportError::NotARun { .. } => UsageError(error.to_string()).into(),
        other => other.into(),
    }
}

/// The path of the page.
fn out(args: &ReportArgs) -> PathBuf {
    match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.join(PAGE),
        (None, _) => PAGE.into(),
    }
}
