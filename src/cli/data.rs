//! `medusa data`: a preview of the training set.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::numbers::{above_zero, positive};
use super::reading::watched;
use super::served::chat_template;
use super::{CommonFlags, UsageError, print_json, print_line, print_text};
use crate::data::cache::TokenCache;
use crate::data::chat::LossOn;
use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::data::column_names::ColumnNames;
use crate::data::long_rows::LongRows;
use crate::data::mask::{self, TokenPiece};
use crate::data::store::RowStore;
use crate::data::tokenize::TextTokenizer;
use crate::data::{self, DataFile, LoadReport, LoadSettings, pack};
use crate::files;
use crate::gguf;
use crate::numbers::Positive;
use crate::plural::counted;
use crate::session::opened::OpenedBackbone;

/// Preview a training set: rows kept and dropped, packing, loss mask.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa data chats.jsonl --backbone B\n  medusa data chats.json --backbone B --chat-template vicuna --row 3 \\\n    --svg mask.svg"
)]
pub struct DataArgs {
    /// Files, folders, globs or Hub data sets (owner/name, owner/name/file or owner/name:config:split), as in a recipe's data.train.
    #[arg(required = true, value_name = "F")]
    pub files: Vec<String>,
    /// The local files of each entry of `files`, once Hub data sets are downloaded.
    #[arg(skip)]
    pub(super) fetched: Vec<Vec<String>>,
    /// Backbone (a folder, a GGUF file or a Hub id), for its tokenizer, chat template and config.
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// Chat template for conversations: "tokenizer" (the backbone's own), a built-in name (vicuna, zephyr, llama-2, llama-3, chatml,
    /// mistral) or a .jinja file.
    #[arg(long, value_name = "TEMPLATE", default_value = "tokenizer", value_parser = chat_template)]
    pub chat_template: TemplateChoice,
    /// Columns that rows are made of, if they have other names: prompt=question,completion=answer; also text=…, messages=…, or
    /// instruction=…,output=….
    #[arg(long, value_name = "KEY=COLUMN,…")]
    pub columns: Option<ColumnNames>,
    /// Which tokens of a conversation carry loss.
    #[arg(long, value_enum, value_name = "WHAT", default_value = "assistant")]
    pub loss_on: LossOn,
    /// Tokens of the longest row [default: the backbone's context].
    #[arg(long, value_name = "TOKENS", value_parser = above_zero::<NonZeroUsize>)]
    pub max_length: Option<NonZeroUsize>,
    /// What becomes of longer rows.
    #[arg(long, value_enum, value_name = "WHAT", default_value = "split")]
    pub long_rows: LongRows,
    /// Read at most this many rows of each of the files, globs or data sets.
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub limit: Option<NonZeroUsize>,
    /// Weights of the files, globs or data sets: each gives this share of the tokens.
    #[arg(long, value_name = "W,W,…", value_delimiter = ',', value_parser = positive, conflicts_with = "row")]
    pub mix: Vec<Positive>,
    /// Skip and count malformed rows instead of stopping at the first, as medusa-train does with this flag.
    #[arg(long)]
    pub skip_bad_rows: bool,
    /// Print row N (1-based, of the rows kept); tokens that carry loss are green, or between ⟦ and ⟧.
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub row: Option<NonZeroUsize>,
    /// Also draw the loss mask of that row as SVG.
    #[arg(long, value_name = "FILE", requires = "row")]
    pub svg: Option<PathBuf>,
}

/// Reads the rows and prints the report or one row.
///
/// # Errors
/// An error in the backbone's files or the rows, a row number that is too large, or a file that cannot be written.
pub fn run(args: &DataArgs, common: &CommonFlags) -> anyhow::Result<()> {
    check_mix(args)?;
    // Rows of token ids need no tokenizer; rows of text report a missing one.
    let tokenizer = TextTokenizer::load_if_there(&args.backbone)?;
    let (vocab_size, max_length) = limits(args, tokenizer.as_ref())?;
    let template = ChatTemplate::choose(&args.chat_template, &args.backbone)?;
    let cache = TokenCache::for_user();
    let settings = LoadSettings {
        tokenizer: tokenizer.as_ref(),
        long_rows: args.long_rows,
        limit: args.limit,
        cache: cache.as_ref(),
        columns: args.columns.as_ref(),
        template: template.as_ref(),
        loss_on: args.loss_on,
        skip_bad_rows: args.skip_bad_rows,
        ..LoadSettings::new(vocab_size, max_length)
    };
    let entries = data::entries(&args.files, &args.fetched);
    let (rows, report) = watched(common, |watch| data::load_entries(&entries, &LoadSettings { watch, ..settings }))?;
    match args.row {
        Some(row) => show(args, row, &rows, tokenizer.as_ref(), common),
        None => print_report(args, rows, &report, max_length, common),
    }
}

fn check_mix(args: &DataArgs) -> Result<(), UsageError> {
    let (weights, files) = (args.mix.len(), args.files.len());
    if weights == 0 || weights == files {
        return Ok(());
    }
    let (weights, files) = (counted(weights, "weight"), counted(files, "file, glob or data set"));
    Err(UsageError(format!("--mix: expected a weight for each file, glob or data set, got {weights} for {files}")))
}

/// The vocabulary size and the maximum length: from config.json, or, for a folder with only a tokenizer, from the
/// tokenizer and `--max-length`.
fn limits(args: &DataArgs, tokenizer: Option<&TextTokenizer>) -> anyhow::Result<(usize, NonZeroUsize)> {
    let has_config = gguf::folder::exists(&args.backbone.join("config.json"));
    if let (false, Some(tokenizer), Some(max_length)) = (has_config, tokenizer, args.max_length) {
        return Ok((tokenizer.vocab_size(), max_length));
    }
    if let (false, Some(_)) = (has_config, tokenizer) {
        let folder = args.backbone.display();
        return Err(UsageError(format!("{folder} has no config.json, so no context: give --max-length TOKENS")).into());
    }
    let config = OpenedBackbone::open(&args.backbone)?.config;
    let context = usize::try_from(config.max_position_embeddings)?.try_into()?;
    Ok((usize::try_from(config.vocab_size)?, args.max_length.unwrap_or(context)))
}

fn print_report(
    args: &DataArgs,
    rows: RowStore,
    report: &LoadReport,
    max_length: NonZeroUsize,
    common: &CommonFlags,
) -> anyhow::Result<()> {
    let (packed, shares) = match args.mix.as_slice() {
        [] => (pack::pack(rows, max_length.get()).1, vec![]),
        weights => {
            let mix = data::mixed(rows, &report.rows_of_entries, weights, &args.files, Some(max_length.get()))?;
            (mix.report(max_length.get()), mix.shares())
        }
    };
    if common.json {
        let packing = json!({"max_length": max_length, "sequences": packed.sequences, "fill_rate": packed.fill_rate()});
        let mut line = json!({"data": report, "packing": packing});
        if !shares.is_empty() {
            line["mix"] = json!(shares);
        }
        return print_json(&line);
    }
    let mut files = &report.files[..];
    for (entry, count) in args.files.iter().zip(&report.files_of_entries) {
        let (entry_files, rest) = files.split_at(*count);
        files = rest;
        print_text(rows_of(entry, entry_files))?;
    }
    print_text(report)?;
    if let Some(took) = &report.tokenised {
        common.say(format_args!("tokenised {took}"));
    }
    for (entry, share) in args.files.iter().zip(&shares) {
        print_text(format_args!("mix: {entry}: {share}"))?;
    }
    let (sequences, fill) = (counted(packed.sequences, "sequence"), 100.0 * packed.fill_rate());
    print_text(format_args!("packed: {sequences} of {max_length} tokens, {fill:.1} % full"))
}

/// The rows of an entry; of several files only those that lost rows are named.
fn rows_of(entry: &str, files: &[DataFile]) -> String {
    let rows = counted(files.iter().map(|file| file.rows).sum(), "row");
    let number = if let [_] = files { String::new() } else { format!("{}, ", counted(files.len(), "file")) };
    let mut text = format!("{entry}: {number}{rows}");
    for DataFile { path, rows, left_out, .. } in files.iter().filter(|file| files.len() > 1 && file.left_out > 0) {
        let _ = write!(text, "\n  {}: {left_out} of {} left out", path.display(), counted(*rows, "row")); // a String takes any text
    }
    text
}

fn show(
    args: &DataArgs,
    row: NonZeroUsize,
    rows: &RowStore,
    tokenizer: Option<&TextTokenizer>,
    common: &CommonFlags,
) -> anyhow::Result<()> {
    let tokenizer = tokenizer.with_context(|| {
        format!("--row shows text, and {} has no tokenizer.json or tokenizer.model", args.backbone.display())
    })?;
    let kept = rows.len();
    if row.get() > kept {
        return Err(UsageError(format!("--row: expected a row from 1 to {kept}, the rows kept, got {row}")).into());
    }
    let pieces = mask::pieces(&rows.row(row.get() - 1)?, tokenizer)?;
    if let Some(path) = &args.svg {
        write_picture(path, &pieces)?;
        common.say(format_args!("wrote {}", path.display()));
    }
    if common.json {
        return print_json(&json!({"row": row, "tokens": pieces}));
    }
    print_line(mask::text(&pieces, io::stdout().is_terminal()))
}

fn write_picture(path: &Path, pieces: &[TokenPiece]) -> anyhow::Result<()> {
    let svg = mask::draw(pieces);
    files::write_atomic(path, |out| out.write_all(svg.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
