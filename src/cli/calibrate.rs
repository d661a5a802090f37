//! `medusa calibrate`: the accuracy of every head's i-th guess.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::Context;
use clap::{ArgGroup, Args};
use serde_json::json;

use super::held_out;
use super::numbers::{above_zero, temperature};
use super::progress::Counter;
use super::prompts::{self, EndedEarly, FitFlags, each_turn};
use super::reading::watched;
use super::served::ServedFlags;
use super::{CommonFlags, print_json, print_text, trained_on};
use crate::calibrate::{self, CountedRows};
use crate::data::cache::TokenCache;
use crate::data::chat_template::ChatTemplate;
use crate::data::column_names::ColumnNames;
use crate::data::rows::TokenRow;
use crate::data::store::RowStore;
use crate::data::tokenize::{TextTokenizer, wide};
use crate::data::{self, LoadSettings};
use crate::decode::error::DecodeError;
use crate::decode::own_answers::{RowPrompts, own_answer};
use crate::decode::request::Request;
use crate::dtype::Dtype;
use crate::engine::sample::{Sampling, Stream};
use crate::formats::calibration::Calibration;
use crate::formats::calibration_share::{CalibratedWork, CalibrationShare};
use crate::formats::share::Share;
use crate::formats::trained_prompts::{MeasuredPrompts, TrainedPrompts};
use crate::hub;
use crate::model::device_map::DeviceMap;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::weights::WeightFiles;
use crate::numbers::NonNegative;
use crate::plural::counted;
use crate::session::loading::load_backbone;
use crate::session::opened::{OpenedBackbone, OpenedHeads};
use crate::session::setup::ModelSetup;
use crate::session::{Decoder, SessionError};
use crate::torch::device_kind;
use crate::tree::calibration_shares;

/// Measure the accuracy of each head's guesses on the backbone's own answers.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("input"),
    after_help = "Example:\n  medusa calibrate --backbone B --heads checkpoints/first \\\n    --out calibration.json\n  medusa calibrate --backbone B --heads checkpoints/first \\\n    --data held_out.jsonl --out calibration.json\n  medusa calibrate --backbone B --heads checkpoints/first \\\n    --data held_out.jsonl --shard 1/2 --out first.json\n  medusa calibrate --merge first.json second.json --out calibration.json"
)]
pub struct CalibrateArgs {
    /// Backbone: a folder, a GGUF file or a Hugging Face Hub id (owner/name, owner/name@revision or owner/name:Q4_K_M).
    #[arg(long, value_name = "B", required_unless_present = "merge")]
    pub backbone: Option<PathBuf>,
    /// Heads: a folder such as a run's `final/`, or a Hub id.
    #[arg(long, value_name = "H", required_unless_present = "merge")]
    pub heads: Option<PathBuf>,
    /// Instead of answers: given text, which the heads are measured on as it is. Files, folders, globs or Hub data sets of rows (owner/name
    /// reads the validation or test files, else all). Only for text that the backbone wrote: on other text, heads seem worse than they are.
    #[arg(long, value_name = "F", num_args = 1.., group = "input")]
    pub data: Vec<String>,
    /// The local files of each entry of `data`, once Hub data sets are downloaded.
    #[arg(skip)]
    pub(super) fetched: Vec<Vec<String>>,
    /// Columns that rows of --data are made of, if they have other names: prompt=question,completion=answer.
    #[arg(long, value_name = "KEY=COLUMN,…", requires = "data")]
    pub columns: Option<ColumnNames>,
    /// Skip and count malformed rows of --data instead of stopping at the first.
    #[arg(long, requires = "data")]
    pub skip_bad_rows: bool,
    /// Prompts that the backbone answers; the heads are measured on the answers. - is stdin [default: prompts of the rows that the heads' run
    /// held out].
    #[arg(long, value_name = "F", group = "input")]
    pub prompts: Option<PathBuf>,
    #[command(flatten)]
    fit: FitFlags,
    /// Maximum length of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, conflicts_with = "data")]
    pub max_new_tokens: usize,
    /// Answer at most this many of the run's held-out prompts, evenly spaced.
    #[arg(long, value_name = "N", default_value = "200", value_parser = above_zero::<NonZeroUsize>, conflicts_with = "input")]
    pub max_prompts: NonZeroUsize,
    /// Sampling temperature of the answers: the one that you will decode at. 0 is greedy.
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_negative_numbers = true, conflicts_with = "data")]
    pub temperature: NonNegative,
    /// Output file: the calibration, or with --shard a share of it.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Process only this share of the rows: every N-th one, starting with the I-th (1-based). For several machines; --merge makes one
    /// calibration of all shares.
    #[arg(long, value_name = "I/N", default_value = "1/1", requires = "data")]
    pub shard: Share,
    /// Merge the files of all shares; the calibration is the one that a single machine would write.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["backbone", "heads", "input", "columns", "shard", "top_k", "max_new_tokens", "device_map", "quantization", "chat_template", "max_prompts", "temperature"])]
    pub merge: Vec<PathBuf>,
    /// Guesses counted per head.
    #[arg(long, value_name = "K", default_value = "10", value_parser = above_zero::<NonZeroUsize>)]
    pub top_k: NonZeroUsize,
    /// Spread the backbone's layers over several GPUs: auto, or how many each has, such as 40,40.
    #[arg(long, value_name = "MAP", requires = "data")]
    pub device_map: Option<DeviceMap>,
    #[command(flatten)]
    served: ServedFlags,
}

impl CalibrateArgs {
    /// The backbone's own answer to a prompt, given the prompt's index and turn.
    fn answer(&self, backbone: &Llama, prompt: &[i64], [index, turn]: [u64; 2]) -> Result<TokenRow, DecodeError> {
        let (sampling, stream) =
            (Sampling::with_temperature(self.temperature), Stream { index, turn, ..Stream::default() });
        own_answer(backbone, &Request { sampling, stream, ..Request::greedy(prompt, self.max_new_tokens) })
    }
}

/// Counts, writes the calibration, and prints each head's accuracy.
///
/// # Errors
/// An error in the backbone, the heads, the rows or the output file.
pub fn run(args: &CalibrateArgs, common: &CommonFlags) -> anyhow::Result<()> {
    if !args.merge.is_empty() {
        return merge(args, common);
    }
    let model = CalibratedModel::open(args, common)?;
    let (folder, heads_file) = (model.setup.backbone.folder.clone(), model.heads.clone());
    let MeasuredRows { backbone, rows, prompts, too_long } = match &args.prompts {
        Some(prompts) => answers_to_file(args, model, prompts, common)?,
        None if args.data.is_empty() => answers_to_held_out(args, &model, common)?,
        None => given_text(args, &model, common)?,
    };
    let heads = heads_file.load(&backbone, common.context())?;
    let counter = Counter::new(args.shard.ids(rows.len()).count(), 0, "rows", common);
    let on_row = |done| counter.set(done, "");
    let counted_rows = calibrate::calibrate(&backbone, &*heads, &rows, args.top_k.get(), args.shard, on_row)?;
    drop(counter);
    let heads_sha256 = heads_file.file.sha256()?;
    if args.shard != Share::WHOLE {
        let work = CalibratedWork {
            heads_sha256,
            backbone_fingerprint: WeightFiles::open(&folder)?.fingerprint()?,
            dtype: Dtype::of(backbone.kind()).to_string(),
            device: device_kind(backbone.device()),
            quantization: backbone.quantization().map(|quantization| quantization.to_string()),
            rows: rows.len(),
            rows_sha256: counted_rows.rows_sha256.clone(),
            prompts,
            top_k: args.top_k.get(),
            dynamic_top_k: counted_rows.dynamic.top_k,
            backbone: hub::name_of(&folder),
        };
        return save_share(args, counted_rows, work, common);
    }
    let calibration = counted_rows.counts.sign(hub::name_of(&folder), heads_sha256)?;
    let calibration = Calibration { dynamic: Some(counted_rows.dynamic), prompts, ..calibration };
    calibration.save(&args.out)?;
    common.say(format_args!(
        "{} tokens of {}; wrote {}",
        calibration.tokens,
        counted(rows.len(), "row"),
        args.out.display()
    ));
    if common.json { print_json(&summary(&calibration, too_long, &args.out)) } else { print_text(table(&calibration)) }
}

/// The rows that heads are measured on, with the backbone.
struct MeasuredRows {
    backbone: Llama,
    rows: RowStore,
    /// `None` for heads that do not say what they were trained on.
    prompts: Option<MeasuredPrompts>,
    /// Prompts with a turn that does not fit; `None` for rows of data, which are split instead.
    too_long: Option<usize>,
}

/// What is measured, before its weights are read.
struct CalibratedModel {
    setup: ModelSetup,
    heads: Rc<OpenedHeads>,
}

impl CalibratedModel {
    fn open(args: &CalibrateArgs, common: &CommonFlags) -> anyhow::Result<Self> {
        let backbone = OpenedBackbone::open(args.backbone.as_deref().context("--backbone is given")?)?;
        let heads = OpenedHeads::open(args.heads.as_deref().context("--heads is given")?)?;
        let setup = args.served.options().resolve(backbone, Some(heads.clone()), common)?;
        Ok(Self { setup: ModelSetup { device_map: args.device_map.clone(), ..setup }, heads })
    }

    fn folder(&self) -> &Path {
        &self.setup.backbone.folder
    }

    /// How many of the prompts that `count` counts the heads were trained on, which is reported.
    fn trained_on(
        &self,
        count: impl FnOnce(&TrainedPrompts) -> anyhow::Result<MeasuredPrompts>,
        args: &CalibrateArgs,
        common: &CommonFlags,
    ) -> anyhow::Result<Option<MeasuredPrompts>> {
        let path = &self.heads.path;
        let prompts = trained_on::for_heads(path)?.map(|trained| count(&trained)).transpose()?;
        trained_on::report(prompts, &path.display().to_string(), args.fit.strict, common)?;
        Ok(prompts)
    }

    fn trained_on_rows(
        &self,
        rows: &RowStore,
        args: &CalibrateArgs,
        common: &CommonFlags,
    ) -> anyhow::Result<Option<MeasuredPrompts>> {
        let template = self.setup.template.as_ref();
        self.trained_on(|trained| trained_on::count_rows(trained, rows, self.folder(), template), args, common)
    }

    /// The backbone, which the heads fit: that is known before minutes of decoding.
    fn backbone_for(&self, purpose: Purpose, common: &CommonFlags) -> Result<Llama, SessionError> {
        let backbone = load_backbone(&self.setup, purpose, common.context())?;
        self.heads.file.check(&backbone.config)?;
        Ok(backbone)
    }
}

fn save_share(
    args: &CalibrateArgs,
    counted_rows: CountedRows,
    of: CalibratedWork,
    common: &CommonFlags,
) -> anyhow::Result<()> {
    let ranks = counted_rows.ranks_by_row();
    let share = counted_rows.counts.into_share(args.shard, of, ranks);
    share.save(&args.out)?;
    let (rows, out) = (share.share.ids(share.of.rows).count(), args.out.display());
    if common.json {
        return print_json(&json!({"out": args.out, "share": share.share, "rows": rows, "tokens": share.tokens}));
    }
    print_text(format_args!(
        "share {}: {} tokens of {rows} of {}; wrote {out}; medusa calibrate --merge makes a calibration of all {} shares",
        share.share,
        share.tokens,
        counted(share.of.rows, "row"),
        share.share.of()
    ))
}

/// Merges shares. Needs no libtorch.
///
/// # Errors
/// Files that cannot be read or are no shares; shares that are missing, double, or of other work.
pub(super) fn merge(args: &CalibrateArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let load = |path: &PathBuf| Ok((path.clone(), CalibrationShare::load(path)?));
    let shares = args.merge.iter().map(load).collect::<anyhow::Result<Vec<_>>>()?;
    let calibration = calibration_shares::merge(shares)?;
    trained_on::report(calibration.prompts, "the measured heads", args.fit.strict, common)?;
    calibration.save(&args.out)?;
    let shares = counted(args.merge.len(), "share");
    common.say(format_args!("{} tokens of {shares}; wrote {}", calibration.tokens, args.out.display()));
    if common.json { print_json(&summary(&calibration, None, &args.out)) } else { print_text(table(&calibration)) }
}

/// Answers to every turn of the prompts of a file.
fn answers_to_file(
    args: &CalibrateArgs,
    model: CalibratedModel,
    file: &Path,
    common: &CommonFlags,
) -> anyhow::Result<MeasuredRows> {
    let prompts = prompts::read(file, common)?;
    model.setup.check_template(prompts.iter().map(|prompt| prompt.input.needs_template()))?;
    let template = model.setup.template.as_ref();
    let count = |trained: &_| trained_on::count_prompts(trained, &prompts, model.folder(), template);
    let met = model.trained_on(count, args, common)?;
    let backbone = model.backbone_for(Purpose::Decoding, common)?;
    let (tokenizer, template) = (TextTokenizer::load(model.folder())?, model.setup.template);
    let decoder =
        Decoder { backbone, tokenizer: tokenizer.into(), template: template.map(Into::into), drafters: vec![] };
    let (all, prompts) = (prompts.len(), args.fit.fitting(prompts, &decoder, common)?);
    let counter = Counter::new(prompts.len(), 0, "prompts", common);
    let (mut rows, mut ended_early) = (Vec::new(), EndedEarly::default());
    for (index, prompt) in &prompts {
        let answer = |turn, ids: &[i64]| {
            let row = args.answer(&decoder.backbone, ids, [*index as u64, turn])?;
            let new_ids = wide(&row.input_ids[ids.len()..]);
            rows.push(row);
            Ok(decoder.text(&new_ids)?)
        };
        let answered = each_turn(&decoder, &prompt.input, answer);
        ended_early.note(*index, answered.with_context(|| format!("prompt {} of {all}", index + 1)), args.fit)?;
        counter.inc();
    }
    drop(counter);
    ended_early.report(common);
    let too_long = Some(all - prompts.len() + ended_early.count());
    Ok(MeasuredRows { backbone: decoder.backbone, rows: RowStore::in_memory(rows), prompts: met, too_long })
}

/// Answers to what stands before the answers of the rows that the heads' run held out.
fn answers_to_held_out(
    args: &CalibrateArgs,
    model: &CalibratedModel,
    common: &CommonFlags,
) -> anyhow::Result<MeasuredRows> {
    let (held_out, notice) = held_out::rows(&model.heads.path, common)?;
    let met = model.trained_on_rows(&held_out, args, common)?;
    common.say(notice);
    let RowPrompts { chosen, all } = RowPrompts::of(&held_out, args.max_prompts)?;
    let wanted = chosen.len();
    common.say(format_args!("the backbone answers {wanted} of their {} (--max-prompts)", counted(all, "prompt")));
    let backbone = model.backbone_for(Purpose::Decoding, common)?;
    let counter = Counter::new(wanted, 0, "prompts", common);
    let answer = |(index, prompt): &(usize, Vec<i64>)| {
        let row = args.answer(&backbone, prompt, [*index as u64, 0]);
        counter.inc();
        row.with_context(|| format!("held-out prompt {}", index + 1))
    };
    let rows = chosen.iter().map(answer).collect::<anyhow::Result<Vec<_>>>()?;
    drop(counter);
    Ok(MeasuredRows { backbone, rows: RowStore::in_memory(rows), prompts: met, too_long: None })
}

fn given_text(args: &CalibrateArgs, model: &CalibratedModel, common: &CommonFlags) -> anyhow::Result<MeasuredRows> {
    let backbone = model.backbone_for(Purpose::Training, common)?;
    let (rows, report) = read_rows(args, model.folder(), &backbone, model.setup.template.as_ref(), common)?;
    let prompts = model.trained_on_rows(&rows, args, common)?;
    common.say(report);
    common.say(
        "measured on the given text: if the backbone did not write it, decoding is measured better with --prompts",
    );
    Ok(MeasuredRows { backbone, rows, prompts, too_long: None })
}

fn read_rows(
    args: &CalibrateArgs,
    folder: &Path,
    backbone: &Llama,
    template: Option<&ChatTemplate>,
    common: &CommonFlags,
) -> anyhow::Result<(RowStore, String)> {
    // Rows of token ids need no tokenizer; rows of text report a missing one.
    let tokenizer = TextTokenizer::load_if_there(folder)?;
    let (cache, config) = (TokenCache::for_user(), &backbone.config);
    let context = usize::try_from(config.max_position_embeddings)?.try_into()?;
    let settings = LoadSettings {
        tokenizer: tokenizer.as_ref(),
        cache: cache.as_ref(),
        columns: args.columns.as_ref(),
        template,
        skip_bad_rows: args.skip_bad_rows,
        ..LoadSettings::new(usize::try_from(config.vocab_size)?, context)
    };
    let entries = data::entries(&args.data, &args.fetched);
    let (rows, report) = watched(common, |watch| data::load_entries(&entries, &LoadSettings { watch, ..settings }))?;
    Ok((rows, report.to_string()))
}

/// `too_long` prompts have a turn that does not fit; rows of data are split instead.
fn summary(calibration: &Calibration, too_long: Option<usize>, out: &Path) -> serde_json::Value {
    let heads: Vec<_> = calibration.heads.iter().map(|h| json!({"accuracy": h.accuracy, "total": h.total})).collect();
    let mut summary =
        json!({"out": out, "heads": heads, "tokens": calibration.tokens, "heads_sha256": calibration.heads_sha256});
    if let Some(prompts) = too_long {
        summary["too_long"] = prompts.into();
    }
    if let Some(prompts) = calibration.prompts {
        summary["prompts"] = json!(prompts);
    }
    summary
}

/// One line per head; `top-5` is the sum over its first five guesses.
fn table(calibration: &Calibration) -> String {
    let mut text = String::from("head   targets   top-1   top-5");
    for (head, accuracy) in calibration.heads.iter().enumerate() {
        let top = |k: usize| accuracy.accuracy.iter().take(k).sum::<f64>();
        let _ = write!(text, "\n{:>4} {:>9} {:>7.3} {:>7.3}", head + 1, accuracy.total, top(1), top(5)); // writing to a String cannot fail
    }
    text
}
