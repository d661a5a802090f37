//! `medusa calibrate`: the accuracy of the i-th guess of every head.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::decoder::{Decoder, chat_template, load_backbone, load_heads};
use super::downloads::shown;
use super::reading::{COUNT, progress_bar, watched};
use super::{CommonFlags, print_json, print_line};
use crate::calibrate;
use crate::data::cache::TokenCache;
use crate::data::chat::LossOn;
use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::data::store::RowStore;
use crate::data::tokenize::{TextTokenizer, wide};
use crate::data::{self, LoadSettings, Watch, prompts};
use crate::draft::medusa::heads::Heads;
use crate::draft::medusa::heads::import::HeadsFile;
use crate::formats::calibration::Calibration;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;

/// Measure how often each guess of each head is right, on rows that the heads were not trained on.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa calibrate --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final \\\n    --data data/tiny/eval.jsonl --out calibration.json"
)]
pub struct CalibrateArgs {
    /// The backbone: its folder, or an id of the Hugging Face Hub (owner/name or owner/name@revision).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// The heads: their folder, a run's `final/`, or an id of the Hub.
    #[arg(long, value_name = "H")]
    pub heads: PathBuf,
    /// Rows as for training: files, globs or ids of data sets on the Hub (owner/name takes validation or test files, all where it has none). Best is text that the backbone wrote itself.
    #[arg(long, value_name = "F", num_args = 1.., required_unless_present = "prompts", conflicts_with = "prompts")]
    pub data: Vec<String>,
    /// Instead of --data: prompts, which the backbone answers greedily before the heads are measured on its answers.
    #[arg(long, value_name = "F")]
    pub prompts: Option<PathBuf>,
    /// Of each answer to --prompts.
    #[arg(long, value_name = "N", default_value_t = 256, conflicts_with = "data")]
    pub max_new_tokens: usize,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// For rows of conversations. "tokenizer": the backbone's own; a built-in one (vicuna, zephyr, llama-2, llama-3, chatml,
    /// mistral); or a .jinja file.
    #[arg(long, value_name = "TEMPLATE", default_value = "tokenizer", value_parser = chat_template)]
    pub chat_template: TemplateChoice,
    /// Guesses counted of each head.
    #[arg(long, value_name = "K", default_value = "10")]
    pub top_k: NonZeroUsize,
}

/// Counts, writes the calibration, and prints each head's accuracy.
///
/// # Errors
/// What is wrong with the backbone, the heads, the rows or the file to write.
pub fn run(args: &CalibrateArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let (backbone, rows) = match &args.prompts {
        Some(prompts) => own_answers(args, prompts, common)?,
        None => {
            let backbone = load_backbone(&args.backbone, Some(&args.heads), common, Purpose::Training)?;
            let rows = read_rows(args, &backbone, common)?;
            (backbone, rows)
        }
    };
    let heads = load_heads(&args.heads, &backbone, common)?.for_decoding(); // what they guess there is what counts
    let bar = progress_bar(Some(rows.len() as u64), COUNT, common);
    let counts =
        calibrate::calibrate(&backbone, &heads, &rows, args.top_k.get(), |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    let calibration = counts.sign(shown(&args.backbone), HeadsFile::open(&args.heads)?.sha256()?)?;
    calibration.save(&args.out)?;
    common.say(format_args!("{} tokens of {} rows; wrote {}", calibration.tokens, rows.len(), args.out.display()));
    if common.json { print_json(&summary(&calibration, &args.out)) } else { print_line(table(&calibration)) }
}

/// The backbone, and what it answers to the prompts, every turn of a conversation.
fn own_answers(args: &CalibrateArgs, file: &Path, common: &CommonFlags) -> anyhow::Result<(Llama, RowStore)> {
    let prompts = prompts::read(file)?;
    let backbone = load_backbone(&args.backbone, Some(&args.heads), common, Purpose::Decoding)?;
    Heads::check(&args.heads, [backbone.config.vocab_size, backbone.config.hidden_size])?; // before minutes of decoding
    let tokenizer = TextTokenizer::load(&args.backbone)?;
    let template = ChatTemplate::choose(&args.chat_template, &args.backbone)?;
    let decoder = Decoder { backbone, tokenizer, template, medusa: None };
    let bar = progress_bar(Some(prompts.len() as u64), COUNT, common);
    let mut rows = Vec::new();
    for (at, prompt) in prompts.iter().enumerate() {
        let answer = |_, ids: &[i64]| {
            let row = calibrate::own_answer(&decoder.backbone, ids, args.max_new_tokens)?;
            let new_ids = wide(&row.input_ids[ids.len()..]);
            rows.push(row);
            decoder.text(&new_ids)
        };
        decoder.each_turn(&prompt.input, answer).with_context(|| format!("prompt {} of {}", at + 1, prompts.len()))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((decoder.backbone, RowStore::in_memory(rows)))
}

fn read_rows(args: &CalibrateArgs, backbone: &Llama, common: &CommonFlags) -> anyhow::Result<RowStore> {
    // Rows of token ids need no tokenizer, and rows of text say so themselves.
    let has_tokenizer = args.backbone.join("tokenizer.json").exists();
    let tokenizer = has_tokenizer.then(|| TextTokenizer::load(&args.backbone)).transpose()?;
    let template = ChatTemplate::choose(&args.chat_template, &args.backbone)?;
    let (cache, config) = (TokenCache::of_user(), &backbone.config);
    let settings = LoadSettings {
        tokenizer: tokenizer.as_ref(),
        vocab_size: usize::try_from(config.vocab_size)?,
        max_length: usize::try_from(config.max_position_embeddings)?.try_into()?,
        cache: cache.as_ref(),
        template: template.as_ref(),
        loss_on: LossOn::default(),
        skip_bad_rows: false,
        watch: Watch::default(),
    };
    let (rows, report) = watched(common, |watch| data::load(&args.data, &LoadSettings { watch, ..settings }))?;
    common.say(report);
    Ok(rows)
}

fn summary(calibration: &Calibration, out: &Path) -> serde_json::Value {
    let heads: Vec<_> = calibration.heads.iter().map(|h| json!({"accuracy": h.accuracy, "total": h.total})).collect();
    json!({"out": out, "heads": heads, "tokens": calibration.tokens, "heads_sha256": calibration.heads_sha256})
}

/// One line a head; `top-5` is the sum of its first five guesses.
fn table(calibration: &Calibration) -> String {
    let mut text = String::from("head   targets   top-1   top-5");
    for (head, accuracy) in calibration.heads.iter().enumerate() {
        let top = |k: usize| accuracy.accuracy.iter().take(k).sum::<f64>();
        let _ = write!(text, "\n{:>4} {:>9} {:>7.3} {:>7.3}", head + 1, accuracy.total, top(1), top(5)); // a String takes all
    }
    text
}
