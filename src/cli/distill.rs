//! `medusa distill`: generates training data from the backbone.

use std::io;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::decoder::Decoder;
use super::drafter::Drafts;
use super::drafter::plan::{DrafterPlan, PlannedTree};
use super::engine::{EngineFlags, EngineName};
use super::numbers::{above_zero, probability, temperature};
use super::progress::Counter;
use super::prompts::{self, FitFlags, TooLong};
use super::served::ServedFlags;
use super::{CommonFlags, Interrupted, UsageError, batch_size, downloads, interrupted, print_json, print_text};
use crate::data::prompts::{Dialogue, PromptFile};
use crate::decode::batch::SequenceBatch;
use crate::decode::request::Request;
use crate::distill::answer::Answerer;
use crate::distill::output::{self, CONVERSATIONS_PER_SHARD, Output, Share};
use crate::distill::provenance;
use crate::distill::render::Renderer;
use crate::distill::{self, DialogueTokens, DistillEnd, DistillProgress, DistillSettings};
use crate::draft::medusa::heads::import::{HeadsFile, folder_of};
use crate::dtype::Dtype;
use crate::engine::Engine;
use crate::engine::sample::Sampling;
use crate::engine::tch::TchEngine;
use crate::files;
use crate::formats::provenance::{DistillProvenance, SHARD_FORMAT};
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::numbers::{NonNegative, Probability};
use crate::plural::counted;
use crate::torch::device_name;
use crate::tree::accept::Acceptance;

/// What is drawn has the backbone's own distribution, whatever the heads guess.
const ACCEPTANCE: Acceptance = Acceptance::Rejection;
/// Default answers per conversation with --self-talk.
const SELF_TALK_TURNS: usize = 4;
/// Why only libtorch's engine decodes without heads.
const TOGETHER: &str = "without heads, conversations are decoded together, by libtorch";

/// Generate training data: the backbone's answers to prompts, as Parquet.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa distill --backbone B --prompts prompts.jsonl --out distilled \\\n    --max-new-tokens 500\n\nTrain on the output with [data] train = [\"distilled/*.parquet\"]; only the backbone's own tokens carry loss. --resume continues an interrupted run and produces the same files. Several machines can write to one folder with --shard 1/4, 2/4, …"
)]
pub struct DistillArgs {
    /// Backbone: a folder or a Hugging Face Hub id (owner/name or owner/name@revision).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// Prompts, as JSONL or a JSON array: text, messages, turns or token ids; - is stdin.
    #[arg(long, value_name = "F")]
    pub prompts: PathBuf,
    #[command(flatten)]
    fit: FitFlags,
    /// Output folder.
    #[arg(long, help_heading = "Output", value_name = "DIR")]
    pub out: PathBuf,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, help_heading = "Answers", value_name = "T", default_value = "0.3", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: NonNegative,
    /// Nucleus sampling: draw from the smallest set of tokens whose probability reaches P.
    #[arg(long, help_heading = "Answers", value_name = "P", default_value = "1", value_parser = probability)]
    pub top_p: Probability,
    /// Maximum number of new tokens per answer.
    #[arg(long, help_heading = "Answers", value_name = "N", default_value = "1024", value_parser = above_zero::<NonZeroUsize>)]
    pub max_new_tokens: NonZeroUsize,
    /// Maximum number of answers per conversation [default: one per user turn; 4 with --self-talk].
    #[arg(long, help_heading = "Answers", value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub turns: Option<NonZeroUsize>,
    /// Let the backbone also write the user turns after the first, for models trained on both roles.
    #[arg(long, help_heading = "Answers")]
    pub self_talk: bool,
    /// Decode with these heads, each conversation with its tree of guesses. The answers are sampled as without heads (rejection).
    #[arg(long, value_name = "H")]
    pub heads: Option<PathBuf>,
    /// Tree of guesses: a file from `medusa tree`, or dynamic:N for the N likeliest guesses of each step [default: a chain of each
    /// head's best guess].
    #[arg(long, value_name = "T", requires = "heads")]
    pub tree: Option<PathBuf>,
    /// Conversations decoded together [default: as many as the free memory holds, at most 32 on a CPU and 256 on a GPU]. On a CPU the
    /// answers do not depend on the batch size up to 64.
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub batch_size: Option<NonZeroUsize>,
    /// Process only this share of the prompts: every N-th one, starting with the I-th (1-based).
    #[arg(long, help_heading = "Output", value_name = "I/N", default_value = "1/1")]
    pub shard: Share,
    /// Continue an interrupted run in --out.
    #[arg(long, help_heading = "Output")]
    pub resume: bool,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    served: ServedFlags,
}

/// Answers the prompts of this machine's share.
///
/// # Errors
/// An error in the prompts, the backbone, the heads or the folder; [`Interrupted`] after Ctrl-C.
pub fn run(args: &DistillArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let mut engine = args.engine;
    if args.heads.is_none() {
        if matches!(engine.engine, EngineName::Cpu | EngineName::Cuda) {
            let why = format!("--engine cpu and --engine cuda need --heads: {TOGETHER}; use --engine tch");
            return Err(UsageError(why).into());
        }
        engine.engine = EngineName::Tch;
    }
    if !args.resume {
        output::check_is_free(&args.out, args.shard)?;
    }
    let plan = DrafterPlan::new(None, args.heads.as_deref(), args.tree.as_deref())?;
    let file = prompts::open(&args.prompts, common)?;
    let dialogues = file.dialogues()?;
    let all = dialogues.len();
    let served = args.served.resolve(&args.backbone, args.heads.as_deref(), common)?;
    served.check_template(dialogues.iter().map(|dialogue| dialogue.questions.needs_template()), &args.backbone)?;
    let decoder = engine.load(&args.backbone, args.heads.as_deref(), plan.into_iter().collect(), served, common)?;
    let renderer = Renderer { tokenizer: &decoder.tokenizer, template: decoder.template.as_ref() };
    let settings = args.settings(&decoder, common)?;
    let (dialogues, tokens) = args.fitting(dialogues, &renderer, &settings, common)?;
    let prompts = PromptsUsed { file: &file, conversations: dialogues.len(), too_long: all - dialogues.len() };
    let provenance = args.provenance(&decoder, &prompts, common)?;
    let mut output = Output::open(&args.out, args.shard, &provenance, args.resume)?;
    let longest = distill::longest_text(&tokens, &settings);
    let answerer = args.answerer(&decoder, longest, output.missing().len(), common)?;
    let batch_size = answerer.batch_size();
    let (stop, began, before) = (interrupted(), Instant::now(), output.kept());
    if before > 0 {
        common.say(format_args!("resuming after {before} of {} conversations", output.conversations()));
    }
    let counter = Counter::new(output.conversations(), before, "conversations", common);
    let mut last = DistillProgress { conversations: before, tokens: 0, batch_size };
    let mut on_step = |progress: DistillProgress| {
        if progress.batch_size < last.batch_size {
            let conversations = counted(progress.batch_size, "conversation");
            counter
                .say(format_args!("out of memory: from now on {conversations} are decoded together; nothing is lost"));
        }
        last = progress;
        let speed = progress.tokens as f64 / began.elapsed().as_secs_f64();
        counter.set(progress.conversations, &format!("{speed:.0} tokens/s"));
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let end = distill::run(&dialogues, &renderer, &settings, answerer, &mut output, &mut on_step)?;
    drop(counter);
    if end == DistillEnd::Stopped {
        let (kept, all, folder) = (output.kept(), output.conversations(), args.out.display());
        let text = format!("interrupted: {kept} of {all} conversations are saved in {folder}; continue with --resume");
        return Err(Interrupted(text).into());
    }
    let (too_long, seconds) = (prompts.too_long, began.elapsed().as_secs_f64());
    summary(args, &output, &FinishedRun { too_long, resumed: before, batch_size, last, seconds }, common)
}

/// The prompts of `--prompts`: how many are answered, and how many are skipped because they do not fit.
struct PromptsUsed<'a> {
    file: &'a PromptFile,
    conversations: usize,
    too_long: usize,
}

/// Of a tree's file, or of what stands in its place.
fn tree_sha256(tree: &Path) -> io::Result<String> {
    if PlannedTree::is_inline(tree) {
        Ok(files::sha256_of_all(&[tree.display().to_string()]))
    } else {
        files::sha256(tree)
    }
}

impl DistillArgs {
    /// The prompts that leave room for an answer, and the tokens of each.
    fn fitting(
        &self,
        dialogues: Vec<Dialogue>,
        renderer: &Renderer,
        settings: &DistillSettings,
        common: &CommonFlags,
    ) -> anyhow::Result<(Vec<Dialogue>, Vec<DialogueTokens>)> {
        let tokens = distill::check(&dialogues, renderer, settings)?;
        let all = dialogues.into_iter().zip(tokens);
        let (fit, others): (Vec<_>, Vec<_>) = all.partition(|(_, tokens)| tokens.first < settings.context);
        let too_long =
            others.into_iter().map(|(dialogue, tokens)| TooLong { place: Some(dialogue.place), length: tokens.first });
        self.fit.refuse_or_say(&too_long.collect::<Vec<_>>(), fit.len(), settings.context, common)?;
        Ok(fit.into_iter().unzip())
    }

    fn settings(&self, decoder: &Decoder, common: &CommonFlags) -> anyhow::Result<DistillSettings> {
        let all = if self.self_talk { SELF_TALK_TURNS } else { usize::MAX };
        Ok(DistillSettings {
            max_new_tokens: self.max_new_tokens,
            turns: self.turns.unwrap_or(NonZeroUsize::new(all).expect("above 0")),
            self_talk: self.self_talk,
            seed: common.seed,
            context: usize::try_from(decoder.backbone.config.max_position_embeddings)?,
        })
    }

    fn provenance(
        &self,
        decoder: &Decoder,
        prompts: &PromptsUsed,
        common: &CommonFlags,
    ) -> anyhow::Result<DistillProvenance> {
        let shown = |path: &Path| path.display().to_string();
        let hash = |heads: &Path| -> io::Result<[String; 2]> {
            Ok([files::sha256(&heads.join(ADAPTER_FILE))?, files::sha256(&heads.join(ADAPTER_CONFIG))?])
        };
        let adapted = self.heads.as_deref().map(folder_of).filter(|heads| heads.join(ADAPTER_CONFIG).exists());
        let adapter = adapted.map(hash).transpose()?;
        Ok(DistillProvenance {
            shard_format: SHARD_FORMAT,
            program_version: env!("CARGO_PKG_VERSION"),
            backbone: downloads::shown(&self.backbone),
            backbone_revision: provenance::revision(&self.backbone),
            backbone_sha256: provenance::identity(&self.backbone)?,
            chat_template_sha256: decoder.template.as_ref().map(|template| template.sha256().to_owned()),
            prompts: shown(prompts.file.name()),
            prompts_sha256: prompts.file.sha256(),
            conversations: prompts.conversations,
            too_long: prompts.too_long,
            share: self.shard.to_string(),
            conversations_per_file: CONVERSATIONS_PER_SHARD,
            device: device_name(decoder.backbone.device()),
            dtype: Dtype::of(decoder.backbone.kind()).to_string(),
            quantization: decoder.backbone.quantization().map(|quantization| quantization.to_string()),
            temperature: self.temperature.get(),
            top_p: self.top_p.get(),
            max_new_tokens: self.max_new_tokens.get(),
            max_context: self.engine.max_context.map(NonZeroU32::get),
            turns: self.turns.map(NonZeroUsize::get),
            self_talk: self.self_talk,
            seed: common.seed,
            heads: self.heads.as_deref().map(shown),
            heads_sha256: self.heads.as_deref().map(|heads| HeadsFile::open(heads)?.sha256()).transpose()?,
            adapter_sha256: adapter,
            acceptance: (self.heads.is_some() && self.temperature.get() > 0.0).then_some("rejection"),
            tree_sha256: self.tree.as_deref().map(tree_sha256).transpose()?,
        })
    }

    /// Answers texts of at most `longest` tokens, of which `waiting` remain.
    fn answerer<'d>(
        &self,
        decoder: &'d Decoder,
        longest: NonZeroUsize,
        waiting: usize,
        common: &CommonFlags,
    ) -> anyhow::Result<Answerer<'d>> {
        let sampling = Sampling { top_p: self.top_p, ..Sampling::of_temperature(self.temperature) };
        let backbone = &decoder.backbone;
        if self.engine.engine == EngineName::Cuda {
            common.say("engine cuda: one conversation at a time; --engine tch decodes many together");
            let drafts = decoder.drafter().map(|drafter| Drafts::new(backbone, drafter, ACCEPTANCE)).transpose()?;
            let request = Request { sampling, ..Request::greedy(&[], 0) };
            return Ok(Answerer::one_by_one(self.engine.take(decoder, drafts, &request, common)?, sampling));
        }
        let drafts = decoder.drafter().map(|drafter| Drafts::for_batches(backbone, drafter, ACCEPTANCE)).transpose()?;
        let engine = self.engine_for(decoder, drafts.is_some(), common)?;
        let guesses = drafts.as_ref().map_or(0, |(_, guesses)| *guesses);
        let tokens = longest.saturating_add(guesses);
        let fits = || batch_size::that_fits(&*engine, [tokens.get(), guesses], waiting, common);
        let size = self.batch_size.map_or_else(fits, Ok)?;
        let device = backbone.device();
        let drafts = drafts.map(|(drafter, _)| (drafter, ACCEPTANCE));
        let batch = SequenceBatch::new(engine, drafts, size).with_prefix_cache(batch_size::of_prefixes(device)?);
        Ok(Answerer::together(if device == Device::Cpu { batch } else { batch.with_room(tokens) }, sampling))
    }

    /// The engine of a batch.
    fn engine_for<'d>(
        &self,
        decoder: &'d Decoder,
        has_heads: bool,
        common: &CommonFlags,
    ) -> anyhow::Result<Box<dyn Engine + 'd>> {
        if has_heads {
            let engine = self.engine.for_batches(decoder)?;
            let rule = if self.temperature.get() > 0.0 { ", sampled without loss (rejection)" } else { "" };
            common.say(format_args!("engine {}: each conversation has its tree of guesses{rule}", engine.name()));
            return Ok(engine);
        }
        if self.engine.engine == EngineName::Auto {
            common.say(format_args!("engine tch: {TOGETHER}"));
        }
        batch_size::tell_slower(&decoder.backbone, common);
        Ok(Box::new(TchEngine::for_batches(&decoder.backbone)))
    }
}

/// What this run did.
struct FinishedRun {
    /// Prompts that do not fit.
    too_long: usize,
    /// Conversations of earlier runs.
    resumed: usize,
    /// At the start.
    batch_size: usize,
    last: DistillProgress,
    seconds: f64,
}

/// Prints a summary of the folder.
fn summary(args: &DistillArgs, output: &Output, run: &FinishedRun, common: &CommonFlags) -> anyhow::Result<()> {
    let (kept, shards) = (output.kept(), output.shards());
    let FinishedRun { too_long, resumed, batch_size, last, seconds } = *run;
    let DistillProgress { tokens, batch_size: at_end, .. } = last;
    let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    if common.json {
        return print_json(&json!({
            "conversations": kept, "resumed": resumed, "tokens": tokens, "seconds": seconds, "tokens_per_second": speed,
            "shards": shards, "too_long": too_long, "out": args.out, "batch_size": batch_size,
            "batch_size_at_end": at_end,
        }));
    }
    print_text(format_args!(
        "{} in {} of {}; {} in {seconds:.1} s, {speed:.0} tokens/s",
        counted(kept, "conversation"),
        counted(shards, "file"),
        args.out.display(),
        counted(tokens, "new token")
    ))
}
