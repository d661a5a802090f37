//! The flags common to all verbs.

use std::fmt::Display;
use std::io::{self, Write};
use std::num::NonZeroUsize;

use clap::Args;
use console::Term;

use super::print::visible;
use super::{threads, wrap};
use crate::dtype::{DraftDtype, Dtype};
use crate::session::reporter::LoadContext;
use crate::torch::DeviceChoice;

/// The flags common to all verbs; `parse` hides those that a verb ignores from its help.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Common flags")]
pub struct CommonFlags {
    /// Compute device: auto, cpu, cuda or cuda:N.
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// Compute dtype: float32, bfloat16 or float16 [default: that of the backbone's weights; on a CPU never float16].
    #[arg(long, global = true, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Weights of heads and draft models on the CPU's kernels: int8, bfloat16 or float32; rounding changes how many guesses are right [auto: int8].
    #[arg(long, global = true, value_name = "DTYPE", default_value_t)]
    pub draft_dtype: DraftDtype,
    /// CPU threads [default: `OMP_NUM_THREADS`, else one per core].
    #[arg(long, global = true, value_name = "N", value_parser = threads::count)]
    pub threads: Option<NonZeroUsize>,
    /// Random seed.
    #[arg(long, global = true, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Print results as JSON, one object per line.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print no progress and no notices, only errors.
    #[arg(long, global = true)]
    pub quiet: bool,
    /// Whether `--seed` was given: training refuses it, since the recipe has `train.seed`.
    #[arg(skip)]
    pub seed_was_given: bool,
    /// A notice about a flag that was given although the verb has no use for it.
    #[arg(skip)]
    pub without_effect: Option<String>,
}

impl CommonFlags {
    /// Where a session computes, and who hears of it.
    pub fn context(&self) -> LoadContext<'_> {
        LoadContext { device: self.device, dtype: self.dtype, draft_dtype: self.draft_dtype, reporter: self }
    }

    /// Prints a line to stderr, unless `--quiet`.
    pub fn say(&self, line: impl Display) {
        if !self.quiet {
            Self::print(visible(&line.to_string()));
        }
    }

    /// Prints a line to stderr, broken between words where stderr is a terminal.
    pub(super) fn print(line: impl Display) {
        let line = wrap::wrapped(&line.to_string(), wrap::columns(&Term::stderr()));
        // In one write, since several processes may share it; a closed stderr is no reason to stop.
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}
