//! `medusa generate`: decodes prompts, streaming the text.

use std::fmt::Write;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Context;
use clap::{ArgGroup, Args};
use console::truncate_str;
use serde_json::{Value, json};

use super::decoding::{DecodingFlags, StopFlags};
use super::drafter::DrafterFlags;
use super::engine::EngineFlags;
use super::numbers::above_zero;
use super::print::visible;
use super::progress::Counter;
use super::prompts::{self, EndedEarly, FitFlags, each_turn};
use super::served::ServedFlags;
use super::{CommonFlags, UsageError, print_json, print_line, write_out};
use crate::data::conversation::ChatInput;
use crate::data::prompts::{Prompt, PromptInput};
use crate::data::tokenize::narrow;
use crate::decode::DecodeLoop;
use crate::decode::likelihood::{self, ScoredToken};
use crate::decode::request::{Generation, Request};
use crate::decode::step::Drafting;
use crate::decode::text::{self, FinishedText, OnText, TextOptions};
use crate::engine::sample::Stream;
use crate::plural::counted;
use crate::session::Decoder;
use crate::session::drafter::plan::deciding_heads;
use crate::session::opened::OpenedBackbone;

/// Decode prompts, with heads or plainly.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("input").required(true),
    after_help = "Example:\n  medusa generate --backbone B --message \"Explain beam search.\"\n  medusa generate --backbone B --heads checkpoints/first --tree tree.json \\\n    --prompts prompts.jsonl\n\nfinish_reason is \"eos\", \"length\" (--max-new-tokens or a full context) or \"stop\" (--stop)."
)]
pub struct GenerateArgs {
    /// Backbone: a folder, a GGUF file or a Hugging Face Hub id (owner/name, owner/name@revision or owner/name:Q4_K_M).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// Heads: a folder such as a run's `final/`, or a Hub id. Without: plain autoregressive decoding.
    #[arg(long, value_name = "H")]
    pub heads: Option<PathBuf>,
    /// Tree of guesses: a file from `medusa tree`, or dynamic:N for the N likeliest guesses of each step [default: a chain of each
    /// head's best guess].
    #[arg(long, value_name = "T")]
    pub tree: Option<PathBuf>,
    /// A user's message to a chat model, rendered by the chat template.
    #[arg(long, value_name = "S", group = "input")]
    pub message: Option<String>,
    /// Prompt as raw text: no chat template, only BOS is added.
    #[arg(long, value_name = "S", group = "input")]
    pub prompt: Option<String>,
    /// JSONL of prompts: text, messages, turns or token ids; - is stdin.
    #[arg(long, value_name = "F", group = "input")]
    pub prompts: Option<PathBuf>,
    #[command(flatten)]
    fit: FitFlags,
    /// Samples per prompt, each with its own random stream.
    #[arg(long, value_name = "N", default_value = "1", value_parser = above_zero::<NonZeroU32>)]
    pub num_samples: NonZeroU32,
    /// With --json: log-probabilities of the new tokens and of the N likeliest at each place (0 to 20), of the backbone's distribution
    /// before temperature, penalty, top-k and top-p. With --engine cuda each finished text is read once more for them.
    #[arg(long, value_name = "N", value_parser = logprobs)]
    pub logprobs: Option<usize>,
    #[command(flatten)]
    pub(super) drafter: DrafterFlags,
    #[command(flatten)]
    decoding: DecodingFlags,
    #[command(flatten)]
    stopping: StopFlags,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    served: ServedFlags,
}

/// What `--prompt` does on a model that has a chat template.
const RAW_PROMPT: &str = "--prompt is continued as raw text, without the chat template; --message, `medusa chat`, and \"messages\" in the \
     file of --prompts apply it";

/// Columns of the line above an answer.
const HEADING: usize = 79;

/// The largest N of `--logprobs`, as in vLLM: the texts of all N tokens are decoded at every place.
const MOST_LOGPROBS: usize = 20;

/// Parses `--logprobs`.
fn logprobs(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= MOST_LOGPROBS);
    count.ok_or_else(|| format!("expected a whole number from 0 to {MOST_LOGPROBS}"))
}

/// Decodes the prompts in order.
///
/// # Errors
/// An error in the command line, the backbone, the heads, the tree or a prompt.
pub fn run(args: &GenerateArgs, common: &CommonFlags) -> anyhow::Result<()> {
    if args.logprobs.is_some() && !common.json {
        return Err(UsageError("--logprobs is printed in JSON lines: add --json".into()).into());
    }
    let acceptance = args.decoding.acceptance()?;
    let plan = args.drafter.plan(args.heads.as_deref(), args.tree.as_deref())?;
    args.decoding.unused_sampling(plan.is_some()).iter().for_each(|notice| common.say(notice));
    if args.num_samples > NonZeroU32::MIN && !args.decoding.draws(plan.is_some()) {
        common.say("--num-samples: the samples of a prompt are equal, because no token is drawn at random");
    }
    let prompts = given_prompts(args, common)?;
    let backbone = OpenedBackbone::open(&args.backbone)?;
    let heads = deciding_heads(plan.as_ref(), args.heads.as_deref())?;
    let setup = args.served.options().resolve(backbone, heads, common)?;
    if args.prompt.is_some() && setup.template.is_some() {
        common.say(RAW_PROMPT);
    }
    setup.check_template(prompts.iter().map(|prompt| prompt.input.needs_template()))?;
    let engine = args.engine.options();
    let decoder = engine.load(setup, plan.into_iter().collect(), common.context())?;
    let (all, prompts) = (prompts.len(), args.fit.fitting(prompts, &decoder, common)?);
    let request = args.decoding.request(&[], Stream::default());
    let decoding = engine.decode_loop(&decoder, acceptance, &request, common.context())?;
    let counter = counter(args, prompts.len(), common);
    let mut writer = Answers { decoder: &decoder, decoding, args, common, counter, all };
    let mut ended_early = EndedEarly::default();
    for (index, prompt) in &prompts {
        for sample in 0..args.num_samples.get() {
            writer.decoding.reset();
            let stream = |turn| Stream { seed: common.seed, index: *index as u64, turn, sample: sample.into() };
            let context = || format!("prompt {} of {all}", index + 1);
            let answer = |turn, ids: &[i64]| writer.answer(prompt, ids, stream(turn));
            let answered = each_turn(&decoder, &prompt.input, answer).with_context(context);
            ended_early.note(*index, answered, args.fit)?;
            writer.counter.iter().for_each(Counter::inc);
        }
    }
    ended_early.report(common);
    Ok(())
}

fn given_prompts(args: &GenerateArgs, common: &CommonFlags) -> anyhow::Result<Vec<Prompt>> {
    let input = match (&args.message, &args.prompt, &args.prompts) {
        (Some(text), ..) => PromptInput::Chat(ChatInput::user(text)),
        (None, Some(text), _) => PromptInput::Text(text.clone()),
        (None, None, Some(path)) => return prompts::read(path, common),
        (None, None, None) => {
            let missing = "nothing to decode: give --message TEXT, --prompt TEXT or --prompts FILE";
            return Err(UsageError(missing.into()).into());
        }
    };
    Ok(vec![Prompt::new(input)])
}

/// Progress through `--prompts`, unless the answers show it: what a pipe's reader prints would end up in the bar.
fn counter(args: &GenerateArgs, prompts: usize, common: &CommonFlags) -> Option<Counter> {
    let samples = args.num_samples.get() as usize;
    let things = if samples > 1 { "samples" } else { "prompts" };
    let is_shown = args.prompts.is_some() && (is_file(io::stdout()) || !io::stderr().is_terminal());
    is_shown.then(|| Counter::new(prompts * samples, 0, things, common))
}

fn is_file(stream: impl AsFd) -> bool {
    let file = stream.as_fd().try_clone_to_owned().map(File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.is_file())
}

/// Decodes and prints answers. Later turns of a conversation reuse the loop's cache.
struct Answers<'a> {
    decoder: &'a Decoder,
    decoding: Box<dyn DecodeLoop + 'a>,
    args: &'a GenerateArgs,
    common: &'a CommonFlags,
    counter: Option<Counter>,
    /// Prompts of the file.
    all: usize,
}

impl Answers<'_> {
    /// Decodes one turn of a prompt, prints the answer and returns its text.
    fn answer(&mut self, prompt: &Prompt, ids: &[i64], stream: Stream) -> anyhow::Result<String> {
        let logprobs = self.args.logprobs.filter(|_| self.decoding.scores_tokens());
        let request = Request { logprobs, ..self.args.decoding.request(ids, stream) };
        let finished = if self.common.json {
            let finished = self.decode(&request, &mut |_| ControlFlow::Continue(()))?;
            let mut line = as_json(ids, &finished, self.decoding.engine_name());
            (line["index"], line["sample"]) = (stream.index.into(), stream.sample.into());
            add_names(&mut line, prompt, stream.turn);
            if let Some(count) = self.args.logprobs {
                line["logprobs"] = self.logprobs(ids, &finished.generation, count)?;
            }
            print_json(&line)?;
            finished
        } else {
            let is_one_of_many = self.args.prompts.is_some();
            if is_one_of_many {
                print_line(self.heading(prompt, stream))?;
            }
            let finished = self.stream(&request)?;
            if is_one_of_many {
                print_line("")?;
            }
            finished
        };
        Ok(finished.text_alone)
    }

    /// The line above an answer to `--prompts`, as `[2 of 80, id 7, turn 1] What is beam search?`.
    fn heading(&self, prompt: &Prompt, Stream { index, turn, sample, .. }: Stream) -> String {
        let mut names = format!("{} of {}", index + 1, self.all);
        let _ = prompt.id.iter().try_for_each(|id| write!(names, ", id {id}")); // writing to a String cannot fail
        if let PromptInput::Turns { .. } = prompt.input {
            let _ = write!(names, ", turn {}", turn + 1); // as above
        }
        if self.args.num_samples.get() > 1 {
            let _ = write!(names, ", sample {}", sample + 1); // as above
        }
        let asked = asked(&prompt.input, turn).split_whitespace().collect::<Vec<_>>().join(" ");
        truncate_str(&visible(&format!("[{names}] {asked}")), HEADING, "…").into_owned()
    }

    /// Each new token beside the likeliest ones. Their texts are those that follow the tokens before them: with the space before a word.
    fn logprobs(&self, prompt: &[i64], generation: &Generation, count: usize) -> anyhow::Result<Value> {
        let mut stream = self.decoder.tokenizer.stream_after(&narrow(prompt));
        let scored = |token: &ScoredToken| -> anyhow::Result<Value> {
            let named = |id: i64, log_p: f64| -> anyhow::Result<Value> {
                Ok(json!({"id": id, "token": stream.text_of(narrow(&[id])[0])?, "logprob": log_p}))
            };
            let mut chosen = named(token.id, token.log_p)?;
            let likeliest = token.likeliest.iter().map(|&(id, log_p)| named(id, log_p));
            chosen["top_logprobs"] = likeliest.collect::<anyhow::Result<_>>()?;
            stream.push(narrow(&[token.id])[0])?;
            Ok(chosen)
        };
        if self.decoding.scores_tokens() {
            return generation.scored.iter().map(scored).collect();
        }
        likelihood::scored(&self.decoder.backbone, prompt, &generation.new_ids, count)?.iter().map(scored).collect()
    }

    fn decode(&mut self, request: &Request, on_text: &mut OnText) -> anyhow::Result<FinishedText> {
        let (tokenizer, stop) = (&self.decoder.tokenizer, &self.args.stopping.stop[..]);
        let options = TextOptions { tokenizer, prompt: request.prompt, stop };
        let decoding = &mut self.decoding;
        Ok(text::stream_text(options, on_text, |on_tokens| decoding.decode(Drafting::On, request, on_tokens))?)
    }

    /// Streams the text to stdout; prints the figures to stderr.
    fn stream(&mut self, request: &Request) -> anyhow::Result<FinishedText> {
        let finished = to_stdout(|on_text| self.decode(request, on_text))?;
        let tally = finished.generation.tally();
        let figures = format!(
            "[{} in {}, {:.2} a step, {:.0} tokens/s, ended by {}]",
            counted(tally.tokens, "token"),
            counted(tally.steps, "step"),
            tally.tokens_per_step(),
            tally.tokens_per_second(),
            finished.generation.finish_reason.name()
        );
        match &self.counter {
            Some(counter) => counter.say(figures),
            None => self.common.say(figures),
        }
        Ok(finished)
    }
}

/// What an answer replies to.
fn asked(input: &PromptInput, turn: u64) -> String {
    match input {
        PromptInput::Text(text) => text.clone(),
        PromptInput::Ids(ids) => counted(ids.len(), "token"),
        PromptInput::Chat(chat) => chat.messages.last().map_or_else(String::new, |last| last.content.clone()),
        PromptInput::Turns { user, .. } => user[turn as usize].clone(),
    }
}

/// The names that a prompt has, and the turn of one that has several.
fn add_names(line: &mut Value, prompt: &Prompt, turn: u64) {
    if let Some(id) = &prompt.id {
        line["id"] = id.clone();
    }
    if let Some(category) = &prompt.category {
        line["category"] = category.as_str().into();
    }
    if let PromptInput::Turns { .. } = prompt.input {
        line["turn"] = turn.into();
    }
}

/// The `--json` object of an answer.
pub(super) fn as_json(prompt: &[i64], finished: &FinishedText, engine: &str) -> Value {
    let (generation, tally) = (&finished.generation, finished.generation.tally());
    json!({
        "prompt_ids": prompt,
        "new_ids": generation.new_ids,
        "text": finished.text_alone,
        "steps": tally.steps,
        "tokens_per_step": tally.tokens_per_step(),
        "accept_lengths": generation.accept_lengths,
        "seconds": (tally.prefill + tally.decoding).as_secs_f64(),
        "finish_reason": generation.finish_reason.name(),
        "engine": engine,
    })
}

/// Decodes, streaming the text to stdout and ending it with a newline.
pub(super) fn to_stdout(
    decode: impl FnOnce(&mut OnText) -> anyhow::Result<FinishedText>,
) -> anyhow::Result<FinishedText> {
    let mut trouble = Ok(());
    let finished = decode(&mut |piece| {
        trouble = write_out(piece);
        if trouble.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    trouble?;
    write_out("\n")?;
    Ok(finished)
}
