//! Flags that every verb takes.

use std::fmt::Display;
use std::io::{self, Write};

use clap::Args;

use crate::dtype::Dtype;
use crate::torch::DeviceChoice;

/// Flags that every verb takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Common flags")]
pub struct CommonFlags {
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// What to compute in: float32, bfloat16 or float16 [default: the backbone's own].
    #[arg(long, global = true, value_name = "DTYPE")]
    pub dtype: Option<Dtype>,
    /// Seeds everything that is drawn.
    #[arg(long, global = true, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// One JSON object a line on stdout, and nothing else there.
    #[arg(long, global = true)]
    pub json: bool,
    /// No text on stderr but errors.
    #[arg(long, global = true)]
    pub quiet: bool,
    /// Whether `--seed` was typed: training refuses it, its seed is the recipe's.
    #[arg(skip)]
    pub seed_was_given: bool,
}

impl CommonFlags {
    /// A line for people, on stderr; nothing with `--quiet`.
    pub fn say(&self, line: impl Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{line}"); // a closed stderr is no reason to stop
        }
    }
}
