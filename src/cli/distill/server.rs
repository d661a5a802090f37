//! `medusa distill --endpoint`: an OpenAI-compatible server answers. Needs no libtorch.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};

use super::args::{DistillArgs, PromptsUsed, say_resumed};
use crate::cli::progress::Counter;
use crate::cli::{CommonFlags, UsageError, api_key, interrupted, print_json, print_text, prompts};
use crate::data::chat_template::ChatTemplate;
use crate::data::prompts::Dialogue;
use crate::data::tokenize::TextTokenizer;
use crate::distill::output::{self, ClaimedShare, Output};
use crate::distill::render::Renderer;
use crate::distill::server::ServerAnswerer;
use crate::distill::server::settings::ServerSettings;
use crate::distill::server::tally::{ServerCounts, ServerTally};
use crate::distill::{self, DistillProgress, DistillSettings};
use crate::formats::provenance::DistillProvenance;
use crate::http::endpoint::{AnswerWait, ClientLimits, EndpointClient, ListedModel};
use crate::model::config::LlamaConfig;
use crate::plural::counted;
use crate::session::engine::EngineName;
use crate::session::opened::OpenedBackbone;
use crate::session::setup::needs_template;

/// Each request in flight has a thread and a connection.
const MOST_REQUESTS: usize = 1024;

/// The backbone without its weights.
struct BackboneTokens {
    config: LlamaConfig,
    tokenizer: TextTokenizer,
    template: Option<ChatTemplate>,
}

impl BackboneTokens {
    fn load(folder: &Path, args: &DistillArgs, dialogues: &[Dialogue]) -> anyhow::Result<Self> {
        let config = OpenedBackbone::open(folder)?.config;
        let template = args.served.options().template_of(folder)?;
        let asked = dialogues.iter().position(|dialogue| dialogue.questions.needs_template());
        if let Some(at) = asked.filter(|_| template.is_none()) {
            let why = format!("prompt {} is a conversation, and {}", at + 1, needs_template(folder));
            return Err(UsageError(why).into());
        }
        let tokenizer = TextTokenizer::load(folder)?;
        tokenizer.check_vocabulary(usize::try_from(config.vocab_size)?)?;
        Ok(Self { config, tokenizer, template })
    }

    fn renderer(&self) -> Renderer<'_> {
        Renderer { tokenizer: &self.tokenizer, template: self.template.as_ref() }
    }
}

/// Lets the server answer the prompts of this machine's share.
///
/// # Errors
/// An error in the command line, the prompts, the backbone's folder or the output folder; a server without the model; a question that it does
/// not answer; [`Interrupted`](crate::cli::Interrupted) after Ctrl-C.
pub fn run(args: &DistillArgs, common: &CommonFlags) -> anyhow::Result<()> {
    args.check_server_flags()?;
    let claim = ClaimedShare::new(&args.out, args.shard, args.resume)?;
    let key = api_key::find(args.server.api_key_file.as_deref())?;
    let file = prompts::open(&args.prompts, common)?;
    let dialogues = file.dialogues()?;
    let all = dialogues.len();
    let words = args.backbone.as_deref().map(|folder| BackboneTokens::load(folder, args, &dialogues)).transpose()?;
    let renderer = words.as_ref().map(BackboneTokens::renderer);
    let endpoint = args.server.endpoint.clone().context("--endpoint is given")?;
    let timeout = Duration::from_secs(u64::from(args.server.timeout.get()));
    let wait = AnswerWait::Whole(timeout);
    let client =
        EndpointClient::new(endpoint, key, ClientLimits { idle: args.server.concurrency.get(), wait, resends: 0 })?;
    let stop = interrupted();
    let model = args.server.model(&client, stop, common)?;
    let contexts = args.contexts(words.as_ref(), &model)?;
    contexts.check(words.is_some(), common)?;
    let settings = args.settings(contexts.initial, common);
    let (dialogues, _) = args.fitting(dialogues, renderer.as_ref(), &settings, common)?;
    let prompts = PromptsUsed { file: &file, conversations: dialogues.len(), too_long: all - dialogues.len() };
    let provenance = DistillProvenance {
        model: Some(client.clean(&model.id)),
        endpoint: Some(client.shown_endpoint()),
        server_context: model.max_model_len,
        max_context: u32::try_from(contexts.own).ok(),
        ..args.server_provenance(words.as_ref(), &prompts, common)
    };
    let mut output = Output::open(claim, &provenance, args.resume)?;
    say_resumed(&output, common);
    let (began, before) = (Instant::now(), output.kept());
    let settings = DistillSettings { max_refused: args.server.most_refused(&output, args.fit.strict), ..settings };
    let asking = args.server_settings(words.as_ref(), model.id, contexts);
    let answerer = ServerAnswerer::start(client, asking, renderer.as_ref(), stop)
        .context("cannot start a thread for each request of --concurrency")?;
    let progress = ServerProgress::new(&output, answerer.tally(), began, common);
    let mut tokens = 0;
    let mut on_step = |now: DistillProgress| {
        tokens = now.tokens;
        progress.show(now);
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let end = distill::run(&dialogues, renderer.as_ref(), &settings, answerer, &mut output, &mut on_step);
    let tally = progress.end();
    let end = end?;
    args.check_ended(end, &output)?;
    let done =
        ServerRun { too_long: prompts.too_long, resumed: before, tokens, seconds: began.elapsed().as_secs_f64() };
    done.say_differences(&tally, &output, common);
    done.print(args, &output, &tally.counts(), common)
}

impl DistillArgs {
    fn check_server_flags(&self) -> Result<(), UsageError> {
        let concurrency = self.server.concurrency;
        if concurrency.get() > MOST_REQUESTS {
            return Err(UsageError(format!(
                "--concurrency {concurrency}: at most {MOST_REQUESTS} requests are in flight"
            )));
        }
        if self.engine.engine != EngineName::Auto || self.served.quantization.is_some() {
            let why = "--engine and --quantization have no effect with --endpoint: the server decodes; leave them out";
            return Err(UsageError(why.to_owned()));
        }
        Ok(())
    }

    /// The smallest limits that are known.
    fn contexts(&self, words: Option<&BackboneTokens>, model: &ListedModel) -> anyhow::Result<Contexts> {
        let backbone_limit = words.map(|words| usize::try_from(words.config.max_position_embeddings)).transpose()?;
        let flag_limit = self.engine.max_context.map(|tokens| usize::try_from(tokens.get())).transpose()?;
        let own = [backbone_limit, flag_limit].into_iter().flatten().min().unwrap_or(usize::MAX);
        let begun = if self.resume { output::begun_with(&self.out, self.shard)? } else { None };
        let at_first = begun.map_or(model.max_model_len, |keys| keys.get("server_context").and_then(Value::as_u64));
        let with =
            |limit: Option<u64>| limit.map_or(Ok(own), |limit| usize::try_from(limit).map(|limit| limit.min(own)));
        let initial = with(at_first)?;
        Ok(Contexts { own, initial, now: initial.min(with(model.max_model_len)?) })
    }

    fn server_settings(&self, words: Option<&BackboneTokens>, model: String, contexts: Contexts) -> ServerSettings {
        ServerSettings {
            model,
            temperature: self.temperature,
            top_p: self.top_p,
            concurrency: self.server.concurrency.get(),
            retries: self.server.retries,
            context: contexts.initial,
            context_now: contexts.now,
            strict: self.fit.strict,
            eos: words.map_or_else(Vec::new, |words| words.config.eos_token_ids.clone()),
        }
    }

    fn server_provenance(
        &self,
        words: Option<&BackboneTokens>,
        prompts: &PromptsUsed,
        common: &CommonFlags,
    ) -> DistillProvenance {
        let template = words.and_then(|words| words.template.as_ref());
        DistillProvenance {
            tokenizer_sha256: words.map(|words| words.tokenizer.sha256().to_owned()),
            chat_template_sha256: template.map(|template| template.sha256().to_owned()),
            ..self.provenance(prompts, common)
        }
    }
}

/// Most tokens of prompt and answer.
#[derive(Debug, Clone, Copy)]
struct Contexts {
    /// Of the backbone and the flag: a resumed run must have the same.
    own: usize,
    /// With the server's when the folder was begun, which decides on the prompts that fit.
    initial: usize,
    /// With the server's of this run.
    now: usize,
}

impl Contexts {
    /// Says that the server has come back with a smaller context.
    ///
    /// # Errors
    /// Without `--backbone` nobody knows what does not fit.
    fn check(self, has_backbone: bool, common: &CommonFlags) -> anyhow::Result<()> {
        let Self { initial, now, .. } = self;
        if now >= initial {
            return Ok(());
        }
        let smaller =
            format!("the server's context (max_model_len) is {now} tokens, and was {initial} when --out was begun");
        if !has_backbone {
            anyhow::bail!(
                "{smaller}; without --backbone the prompts that do not fit are not known: start the server with {initial} again"
            );
        }
        common.say(format_args!("{smaller}: the run ends at the first prompt or answer that does not fit"));
        Ok(())
    }
}

/// The bar, and what happens for the first time.
struct ServerProgress {
    counter: Counter,
    tally: Arc<ServerTally>,
    began: Instant,
    before: usize,
}

impl ServerProgress {
    fn new(output: &Output, tally: Arc<ServerTally>, began: Instant, common: &CommonFlags) -> Self {
        let before = output.kept();
        let counter = Counter::new(output.conversations(), before, "conversations", common);
        Self { counter, tally, began, before }
    }

    fn show(&self, now: DistillProgress) {
        let (seconds, counts) = (self.began.elapsed().as_secs_f64(), self.tally.counts());
        let rate = |count: usize| count as f64 / seconds;
        let mut note =
            format!("{:.1} conversations/s, {:.0} tokens/s", rate(now.conversations - self.before), rate(now.tokens));
        if counts.retries > 0 {
            let why = self.tally.last_error().unwrap_or_default();
            note = format!("{note}, {} (the last: {why})", counted_retries(counts.retries));
        }
        if self.tally.refused() > 0 {
            note = format!("{note}, {} refused", self.tally.refused());
        }
        self.counter.set(now.conversations, &note);
        self.report_news();
    }

    fn report_news(&self) {
        self.tally.news().iter().for_each(|line| self.counter.say(line));
    }

    fn end(self) -> Arc<ServerTally> {
        self.report_news();
        self.tally
    }
}

fn counted_retries(retries: usize) -> String {
    if retries == 1 { "1 retry".to_owned() } else { format!("{retries} retries") }
}

/// What this run did.
struct ServerRun {
    /// Prompts that do not fit.
    too_long: usize,
    /// Conversations of earlier runs.
    resumed: usize,
    /// New ones, as far as the server reports them.
    tokens: usize,
    seconds: f64,
}

impl ServerRun {
    fn say_differences(&self, tally: &ServerTally, output: &Output, common: &CommonFlags) {
        if output.refused() > 0 {
            let (questions, file) = (counted(output.refused(), "question"), output.refused_file());
            common.say(format_args!("{questions} refused: {} says which and why", file.display()));
        }
        let ServerCounts { prompts_differ, answers_differ, unchecked, other_model, .. } = tally.counts();
        let first = tally.first_fault().map_or_else(String::new, |fault| format!(" (the first: {fault})"));
        if prompts_differ + answers_differ > 0 {
            let (prompts, answers) = (counted(prompts_differ, "prompt"), counted(answers_differ, "answer"));
            let advice = match prompts_differ {
                0 => "a model sometimes writes a word in other pieces than its tokenizer",
                _ => "check that both have the same tokenizer and chat template",
            };
            common.say(format_args!(
                "server and --backbone differ in the tokens of {prompts} and {answers}{first}; {advice}"
            ));
        }
        if other_model > 0 {
            common.say(format_args!("{} from another model{first}", counted(other_model, "answer")));
        }
        if unchecked > 0 {
            common
                .say(format_args!("{} could not be checked: the server tells no tokens", counted(unchecked, "answer")));
        }
    }

    fn print(
        &self,
        args: &DistillArgs,
        output: &Output,
        counts: &ServerCounts,
        common: &CommonFlags,
    ) -> anyhow::Result<()> {
        let Self { too_long, resumed, tokens, seconds } = *self;
        let (kept, shards, refused) = (output.rows(), output.shards(), output.refused());
        let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        if common.json {
            let mut summary = json!({
                "conversations": kept, "resumed": resumed, "tokens": tokens, "seconds": seconds, "tokens_per_second": speed,
                "shards": shards, "too_long": too_long, "refused": refused, "out": args.out,
            });
            if let (Some(summary), Value::Object(counts)) = (summary.as_object_mut(), json!(counts)) {
                summary.extend(counts);
            }
            return print_json(&summary);
        }
        print_text(format_args!(
            "{} in {} of {}; {} in {seconds:.1} s, {speed:.0} tokens/s, {}",
            counted(kept, "conversation"),
            counted(shards, "file"),
            args.out.display(),
            counted(tokens, "new token"),
            counted_retries(counts.retries)
        ))
    }
}
