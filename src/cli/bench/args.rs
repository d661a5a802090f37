//! The command line of `medusa bench`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};

use super::load::flags::LoadFlags;
use super::sweep::SweepFlag;
use crate::cli::decoding::DecodingFlags;
use crate::cli::drafter::DrafterFlags;
use crate::cli::engine::EngineFlags;
use crate::cli::numbers::{above_zero, positive};
use crate::cli::prompts::FitFlags;
use crate::cli::served::ServedFlags;
use crate::numbers::Positive;
use crate::session::drafter::spec::DrafterSpec;

const EXAMPLES: &str = "Example:
  medusa bench --backbone B --heads checkpoints/first --tree tree.json \\
    --prompts prompts.jsonl --json
  medusa bench --backbone B --heads checkpoints/first \\
    --calibration calibration.json --prompts prompts.jsonl \\
    --sweep nodes=1,4,8,16,32 --csv nodes.csv --svg nodes.svg
  medusa bench --backbone B --drafter ngram --prompts prompts.jsonl
  medusa bench --backbone B --prompts prompts.jsonl \\
    --drafters plain,ngram,medusa:checkpoints/first/final --csv drafters.csv
  medusa bench --backbone B --heads checkpoints/first --tree tree.json \\
    --prompts prompts.jsonl --concurrency 1,2,4,8 --svg load.svg
  medusa bench --backbone B --products
  medusa bench --endpoint http://127.0.0.1:8000 --prompts prompts.jsonl \\
    --concurrency 1,4,16 --max-new-tokens 128 --csv server.csv

Times exclude the prompt's prefill, which is reported as prefill_seconds;
with --concurrency and --endpoint it is part of the time to first token.";

/// Compare plain and drafted decoding: tokens per step (the paper's acceleration rate), overhead, speedup. Measure throughput and latencies
/// under load, in process or of a server.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group = ArgGroup::new("guesses").required(true).multiple(true).args(["heads", "drafter", "drafters", "concurrency", "endpoint", "products"]))]
pub struct BenchArgs {
    /// Backbone: a folder, a GGUF file or a Hugging Face Hub id (owner/name, owner/name@revision or owner/name:Q4_K_M).
    #[arg(long, value_name = "B", required_unless_present = "endpoint")]
    pub backbone: Option<PathBuf>,
    /// Heads: a folder such as a run's `final/`, or a Hub id.
    #[arg(long, value_name = "H")]
    pub heads: Option<PathBuf>,
    /// Tree of guesses: a file from `medusa tree`, or dynamic:N for the N likeliest guesses of each step [default: a chain of each
    /// head's best guess].
    #[arg(long, value_name = "T")]
    pub tree: Option<PathBuf>,
    /// JSONL of prompts, such as MT-bench's; results are also broken down by `category`. - is stdin.
    #[arg(long, value_name = "F", required_unless_present = "products")]
    pub prompts: Option<PathBuf>,
    #[command(flatten)]
    pub(super) fit: FitFlags,
    /// Passes over all prompts; the median run is reported.
    #[arg(long, help_heading = "Measurement", value_name = "N", default_value = "3", value_parser = above_zero::<NonZeroUsize>)]
    pub repeats: NonZeroUsize,
    /// Measure each value of a parameter: nodes=8,16,32 (the best tree of each size; needs --calibration),
    /// posterior-threshold=0.01,0.09 (needs --temperature), temperature=0,0.7 or context=64,128 (prompts cut or repeated to that
    /// length).
    #[arg(long, help_heading = "Measurement", value_name = "NAME=V,V…")]
    pub sweep: Option<SweepFlag>,
    /// Calibration from `medusa calibrate`, for --nodes and --sweep nodes=…; without it, the calibration.json beside the heads.
    #[arg(long, help_heading = "Measurement", value_name = "C")]
    pub calibration: Option<PathBuf>,
    /// Accept X tokens per step on average, whatever the guesses: the speed that heads with so many would reach. The
    /// output is not the backbone's.
    #[arg(long, help_heading = "Measurement", value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub force_acceptance_rate: Option<Positive>,
    /// Compare several drafters in one table: a list of what --drafter takes, and `plain` for a row of plain decoding itself. For every
    /// prompt they take turns with plain decoding. Heads with a path of their own (NAME:PATH) decode with the tree.json beside them.
    #[arg(long, help_heading = "Measurement", value_name = "D,D…", value_delimiter = ',', conflicts_with = "drafter")]
    pub drafters: Vec<DrafterSpec>,
    /// Guesses per step of all drafters with heads: each decodes with the best tree of N nodes from its own calibration, --calibration or
    /// the calibration.json beside its heads.
    #[arg(long, help_heading = "Measurement", value_name = "N", value_parser = above_zero::<NonZeroUsize>, conflicts_with_all = ["tree", "sweep"])]
    pub nodes: Option<NonZeroUsize>,
    /// Instead of decoding, time the products of the backbone's weights on the CPU's kernels, with 1 to 32 rows of activations, beside
    /// how fast the memory is read.
    #[arg(long, help_heading = "Measurement", conflicts_with_all = ["prompts", "repeats", "tree", "calibration", "drafter", "drafters", "concurrency", "endpoint", "sweep", "nodes", "force_acceptance_rate", "csv", "svg"])]
    pub products: bool,
    #[command(flatten)]
    pub(in crate::cli) load: LoadFlags,
    /// Also write the results as CSV: one row per category and one for all, for each drafter and each value of a sweep; under load one row
    /// per level and drafter.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Also draw a sweep or a load as SVG: tokens per second and tokens per step of each drafter against the swept value, or tokens per
    /// second and latencies against --concurrency.
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub svg: Option<PathBuf>,
    #[command(flatten)]
    pub(in crate::cli) drafter: DrafterFlags,
    #[command(flatten)]
    pub(super) decoding: DecodingFlags,
    #[command(flatten)]
    pub(super) engine: EngineFlags,
    #[command(flatten)]
    pub(super) served: ServedFlags,
}

impl BenchArgs {
    /// The backbone.
    ///
    /// # Panics
    /// With `--endpoint`, which needs none.
    pub(super) fn backbone(&self) -> &Path {
        self.backbone.as_deref().expect("required without --endpoint")
    }

    /// The prompts.
    ///
    /// # Panics
    /// With `--products`, which needs none.
    pub(super) fn prompts(&self) -> &Path {
        self.prompts.as_deref().expect("required without --products")
    }

    /// The flag that asks for trees of given sizes, if there is one.
    pub(super) fn nodes_flag(&self) -> Option<&'static str> {
        match self.sweep {
            Some(SweepFlag::Nodes(_)) => Some("--sweep nodes"),
            _ => self.nodes.map(|_| "--nodes"),
        }
    }

    /// All drafters that are named.
    pub(in crate::cli) fn specs(&self) -> impl Iterator<Item = &DrafterSpec> {
        self.drafters.iter().chain(&self.drafter.drafter)
    }
}
