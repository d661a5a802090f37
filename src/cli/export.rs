//! `medusa export`: what a run trained, in the layouts that others load.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::decoder::own_dtype;
use super::downloads::{self, Place};
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::export;
use crate::model::peft::ADAPTER_CONFIG;

const EXAMPLE: &str =
    "Example:\n  medusa export --heads checkpoints/tiny_stage2/final --format merged --out tiny_merged";

/// Write what a run trained in a layout that others load.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub struct ExportArgs {
    /// A run's final/.
    #[arg(long, value_name = "FOLDER")]
    pub heads: PathBuf,
    /// The layout.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Format,
    /// The new folder.
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// The backbone that the heads were trained on [default: as their config.json says].
    #[arg(long, value_name = "FOLDER")]
    pub backbone: Option<PathBuf>,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One Hugging Face folder: the backbone with the adapter merged into its weights, and the heads beside it.
    Merged,
}

/// Writes the folder, reads it back, and prints its path.
///
/// # Errors
/// What is missing or does not fit; nothing is left then.
pub fn run(args: &ExportArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let Format::Merged = args.format;
    if !args.heads.join(ADAPTER_CONFIG).exists() {
        let heads = args.heads.display();
        let text = format!(
            "--format merged: {heads} has no {ADAPTER_CONFIG}, so no adapter to merge; give a Medusa-2 run's final/"
        );
        return Err(UsageError(text).into());
    }
    let base = args.backbone.clone().or_else(|| export::base_of(&args.heads));
    let mut base =
        base.ok_or_else(|| UsageError("these heads do not say their backbone: give --backbone FOLDER".into()))?;
    downloads::fetch(vec![Place::backbone(&mut base)], common)?; // the config.json of heads may name an id of the Hub
    let dtype = common.dtype.map_or_else(|| own_dtype(&base), Ok)?;
    export::merged(&base, &args.heads, dtype.kind(), &args.out)?;
    if common.json { print_json(&json!({"out": args.out, "format": "merged"})) } else { print_line(args.out.display()) }
}
