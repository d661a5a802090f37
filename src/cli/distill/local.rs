//! `medusa distill` without a server: the backbone answers in this process.

use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use rayon::prelude::*;
use serde_json::json;
use tch::Device;

use super::args::{DistillArgs, PromptsUsed, say_resumed};
use crate::cli::progress::Counter;
use crate::cli::{CommonFlags, UsageError, interrupted, print_json, print_text, prompts, trained_on};
use crate::data::chat_template::ChatTemplate;
use crate::data::conversation::ChatInput;
use crate::data::prompts::Dialogue;
use crate::data::tokenize::{TextTokenizer, narrow};
use crate::decode::batch::SequenceBatch;
use crate::decode::identity::identity;
use crate::decode::request::Request;
use crate::decode::texts::SerialDecoder;
use crate::distill::answer::Answerer;
use crate::distill::local::BackboneAnswerer;
use crate::distill::output::{ClaimedShare, Output};
use crate::distill::render::{self, Renderer};
use crate::distill::{self, DistillProgress};
use crate::dtype::Dtype;
use crate::engine::Engine;
use crate::engine::sample::Sampling;
use crate::files;
use crate::formats::provenance::DistillProvenance;
use crate::formats::trained_prompts::MeasuredPrompts;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::plural::counted;
use crate::session::drafter::Drafts;
use crate::session::drafter::plan::{DrafterPlan, PlannedTree};
use crate::session::engine::EngineName;
use crate::session::opened::{OpenedBackbone, OpenedHeads};
use crate::session::{Decoder, batch_size};
use crate::torch::device_name;
use crate::tree::accept::Acceptance;

/// What is drawn has the backbone's own distribution, whatever the heads guess.
const ACCEPTANCE: Acceptance = Acceptance::Rejection;
/// Why the CUDA engine does not decode without heads.
const TOGETHER: &str = "without heads, conversations are decoded together";

/// Answers the prompts of this machine's share.
///
/// # Errors
/// An error in the prompts, the backbone, the heads or the folder; `Interrupted` after Ctrl-C.
pub(super) fn run(args: &DistillArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let folder = args.backbone.as_deref().context("--backbone is given")?;
    if args.heads.is_none() && args.engine.engine == EngineName::Cuda {
        let why = format!(
            "--engine cuda needs --heads, and decodes one conversation at a time; {TOGETHER}: use --engine tch"
        );
        return Err(UsageError(why).into());
    }
    let claim = ClaimedShare::new(&args.out, args.shard, args.resume)?;
    let plan = DrafterPlan::new(None, args.heads.as_deref(), args.tree.as_deref())?;
    let file = prompts::open(&args.prompts, common)?;
    let dialogues = file.dialogues()?;
    let all = dialogues.len();
    let heads = plan.as_ref().and_then(|plan| plan.heads.clone());
    let setup = args.served.options().resolve(OpenedBackbone::open(folder)?, heads.clone(), common)?;
    setup.check_template(dialogues.iter().map(|dialogue| dialogue.questions.needs_template()))?;
    args.report_trained_prompts(folder, &dialogues, setup.template.as_ref(), common)?;
    let decoder = args.engine.options().load(setup, plan.into_iter().collect(), common.context())?;
    let renderer = Renderer { tokenizer: &decoder.tokenizer, template: decoder.template.as_deref() };
    let settings = args.settings(usize::try_from(decoder.backbone.config.max_position_embeddings)?, common);
    let (dialogues, tokens) = args.fitting(dialogues, Some(&renderer), &settings, common)?;
    let prompts = PromptsUsed { file: &file, conversations: dialogues.len(), too_long: all - dialogues.len() };
    let engine = args.batch_engine(&decoder, common)?;
    let engine_name =
        engine.as_ref().map_or_else(|| EngineName::Cuda.flag().to_owned(), |engine| engine.name().to_owned());
    let local = LocalModel { folder, heads: heads.as_deref(), decoder: &decoder, engine: engine_name };
    let provenance = args.local_provenance(local, &prompts, common)?;
    let mut output = Output::open(claim, &provenance, args.resume)?;
    let longest = distill::longest_text(&tokens, &settings);
    let answerer = args.answerer(&decoder, engine, longest, output.missing().len(), common)?;
    let batch_size = answerer.batch_size();
    let (stop, began, before) = (interrupted(), Instant::now(), output.kept());
    say_resumed(&output, common);
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
    let end = distill::run(&dialogues, Some(&renderer), &settings, answerer, &mut output, &mut on_step)?;
    drop(counter);
    args.check_ended(end, &output)?;
    let (too_long, seconds) = (prompts.too_long, began.elapsed().as_secs_f64());
    summary(args, &output, &FinishedRun { too_long, resumed: before, batch_size, last, seconds }, common)
}

/// What answers the prompts.
struct LocalModel<'a> {
    folder: &'a Path,
    heads: Option<&'a OpenedHeads>,
    decoder: &'a Decoder,
    engine: String,
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
    /// Heads decode faster what they were trained on. Prompts that cannot be rendered are refused where they are checked.
    fn report_trained_prompts(
        &self,
        backbone: &Path,
        dialogues: &[Dialogue],
        template: Option<&ChatTemplate>,
        common: &CommonFlags,
    ) -> anyhow::Result<()> {
        let Some(heads) = &self.heads else { return Ok(()) };
        let Some(trained) = trained_on::for_heads(heads)? else { return Ok(()) };
        let tokenizer = TextTokenizer::load(backbone)?;
        let renderer = Renderer { tokenizer: &tokenizer, template };
        let is_met = |dialogue: &&Dialogue| {
            let rendered = render::first(&dialogue.questions, Some(&renderer), &mut ChatInput::default());
            rendered.is_ok_and(|rendered| trained.have(&narrow(&rendered.ids)))
        };
        let trained_on = dialogues.par_iter().filter(is_met).count();
        let measured = MeasuredPrompts { count: dialogues.len(), trained_on };
        trained_on::report(Some(measured), &heads.display().to_string(), self.fit.strict, common)
    }

    fn local_provenance(
        &self,
        LocalModel { folder, heads, decoder, engine }: LocalModel,
        prompts: &PromptsUsed,
        common: &CommonFlags,
    ) -> anyhow::Result<DistillProvenance> {
        let hash = |heads: &Path| -> io::Result<[String; 2]> {
            Ok([files::sha256(&heads.join(ADAPTER_FILE))?, files::sha256(&heads.join(ADAPTER_CONFIG))?])
        };
        let adapted = heads.map_or(Ok(None), OpenedHeads::adapter)?;
        Ok(DistillProvenance {
            backbone_sha256: Some(identity(folder)?),
            chat_template_sha256: decoder.template.as_ref().map(|template| template.sha256().to_owned()),
            device: Some(device_name(decoder.backbone.device())),
            dtype: Some(Dtype::of(decoder.backbone.kind()).to_string()),
            quantization: decoder.backbone.quantization().map(|quantization| quantization.to_string()),
            heads: self.heads.as_deref().map(|path| path.display().to_string()),
            heads_sha256: heads.map(|heads| heads.file.sha256()).transpose()?,
            adapter_sha256: adapted.map(hash).transpose()?,
            acceptance: (self.heads.is_some() && self.temperature.get() > 0.0).then_some("rejection"),
            tree_sha256: self.tree.as_deref().map(tree_sha256).transpose()?,
            engine: Some(engine),
            ..self.provenance(prompts, common)
        })
    }

    /// Answers texts of at most `longest` tokens, of which `waiting` remain, in a batch on `engine`, or one by one on the CUDA engine.
    fn answerer<'d>(
        &self,
        decoder: &'d Decoder,
        engine: Option<Box<dyn Engine + 'd>>,
        longest: NonZeroUsize,
        waiting: usize,
        common: &CommonFlags,
    ) -> anyhow::Result<BackboneAnswerer<'d>> {
        let sampling = Sampling { top_p: self.top_p, ..Sampling::with_temperature(self.temperature) };
        let backbone = &decoder.backbone;
        let Some(engine) = engine else {
            let request = Request { sampling, ..Request::greedy(&[], 0) };
            let decoding = self.engine.options().decode_loop(decoder, ACCEPTANCE, &request, common.context())?;
            let serial = SerialDecoder::new(decoding).with_resets();
            return Ok(BackboneAnswerer::new(Box::new(serial), sampling));
        };
        let drafts = decoder.drafter().map(|drafter| Drafts::for_batches(backbone, drafter, ACCEPTANCE)).transpose()?;
        let guesses = drafts.as_ref().map_or(0, |(_, guesses)| *guesses);
        let tokens = longest.saturating_add(guesses);
        let fits = || batch_size::that_fits(&*engine, [tokens.get(), guesses], waiting, common);
        let size = self.batch_size.map_or_else(fits, Ok)?;
        let (device, prefixes) = (backbone.device(), batch_size::prefix_bytes(&*engine)?);
        let drafts = drafts.map(|(drafter, _)| (drafter, ACCEPTANCE));
        let mut batch = SequenceBatch::new(engine, drafts, size);
        if let Some(bytes) = prefixes {
            batch = batch.with_prefix_cache(bytes);
        }
        let batch = if device == Device::Cpu { batch } else { batch.with_room(tokens) };
        Ok(BackboneAnswerer::new(Box::new(batch), sampling))
    }

    /// The engine of a batch; `None` for the CUDA engine.
    fn batch_engine<'d>(
        &self,
        decoder: &'d Decoder,
        common: &CommonFlags,
    ) -> anyhow::Result<Option<Box<dyn Engine + 'd>>> {
        if self.engine.engine == EngineName::Cuda {
            common.say("engine cuda: one conversation at a time; --engine tch decodes many together");
            return Ok(None);
        }
        let engine = self.engine.options().for_batches(decoder)?;
        if self.heads.is_some() {
            let rule = if self.temperature.get() > 0.0 { ", sampled without loss (rejection)" } else { "" };
            common.say(format_args!("engine {}: each conversation has its tree of guesses{rule}", engine.name()));
            return Ok(Some(engine));
        }
        if self.engine.engine == EngineName::Auto {
            common.say(format_args!("engine {}: {TOGETHER}", engine.name()));
        }
        batch_size::report_slower(&decoder.backbone, common);
        Ok(Some(engine))
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
