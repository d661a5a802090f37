//! The command line of `medusa bench`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::sweep::SweepFlag;
use crate::cli::decoding::{DecodingFlags, positive};
use crate::cli::drafter::DrafterFlags;
use crate::cli::engine::EngineFlags;
use crate::numbers::Positive;

const EXAMPLES: &str = "Example:
  medusa bench --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final \\
    --tree tree.json --prompts data/tiny/prompts.jsonl --json
  medusa bench --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final --prompts data/tiny/prompts.jsonl \\
    --sweep nodes=1,4,8,16,32 --calibration calibration.json --csv nodes.csv
  medusa bench --backbone data/tiny/backbone --drafter ngram --prompts data/tiny/prompts.jsonl

Seconds are those of decoding, after the prompt's own forward pass (prefill_seconds).";

/// Compare plain decoding with a drafter's: acceleration rate, overhead, speedup.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// The backbone: its folder, or an id of the Hugging Face Hub (owner/name or owner/name@revision).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// The heads: their folder, a run's `final/`, or an id of the Hub.
    #[arg(long, value_name = "H", required_unless_present = "drafter")]
    pub heads: Option<PathBuf>,
    /// The tree of guesses [default: a chain of each head's best].
    #[arg(long, value_name = "T", requires = "heads")]
    pub tree: Option<PathBuf>,
    /// JSONL of prompts, MT-bench's as they are; each `category` is reported on its own.
    #[arg(long, value_name = "F")]
    pub prompts: PathBuf,
    /// Passes over all prompts; the medians are reported.
    #[arg(long, value_name = "N", default_value = "3")]
    pub repeats: NonZeroUsize,
    /// One result a value. nodes=8,16,32: the best tree of each size (needs --calibration); posterior-threshold=0.01,0.09:
    /// ε of typical acceptance (needs --temperature); temperature=0,0.7; context=64,128: prompts cut or repeated to so many tokens.
    #[arg(long, value_name = "NAME=V,V…")]
    pub sweep: Option<SweepFlag>,
    /// What `medusa calibrate` wrote: `--sweep nodes=…` makes its trees from it.
    #[arg(long, value_name = "C")]
    pub calibration: Option<PathBuf>,
    /// Time steps that commit X tokens on average, whatever is guessed: what heads of that acceleration rate would bring. The text is
    /// not the backbone's.
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub force_acceptance_rate: Option<Positive>,
    /// Write the results as CSV, too: a row for each category and one for all; of a sweep, for each value.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    #[command(flatten)]
    pub(super) drafter: DrafterFlags,
    #[command(flatten)]
    pub(super) decoding: DecodingFlags,
    #[command(flatten)]
    pub(super) engine: EngineFlags,
}
