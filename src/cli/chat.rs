//! `medusa chat`: a streamed conversation in the terminal, with the figures of every answer.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use clap::Args;
use serde_json::json;

use self::conversation::ChatHistory;
use self::input::{Input, InputLines};
use super::decoding::{DecodingFlags, StopFlags};
use super::drafter::DrafterFlags;
use super::engine::EngineFlags;
use super::exit::report;
use super::served::ServedFlags;
use super::signals::terminated;
use super::{CommonFlags, Interrupted, UsageError, generate, interrupted, print_json};
use crate::data::prompts::PromptError;
use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::{FinishReason, Request};
use crate::decode::step::Drafting;
use crate::decode::text::{self, FinishedText, OnText, TextError, TextOptions};
use crate::engine::sample::Stream;
use crate::plural::counted;
use crate::session::Decoder;
use crate::session::drafter::Drafts;
use crate::session::drafter::plan::deciding_heads;
use crate::session::opened::OpenedBackbone;
use crate::session::setup::{TemplateOption, needs_template};

mod conversation;
mod input;
mod restore;

const EXAMPLES: &str = "Example:
  medusa chat --backbone B --heads checkpoints/first --tree tree.json
  printf 'Hello\\n/reset\\nHello again\\n' | medusa chat --backbone B --json

Commands: /reset, /plain, /help, /exit. Ctrl-C stops an answer, Ctrl-D exits. With --chat-template none, the model continues the plain \
text so far.";

const HELP: &str = "/reset   start a new conversation
/plain   toggle plain decoding (without heads)
/help    show this list
/exit    exit, as Ctrl-D does
Ctrl-C   stop the answer; at the prompt: clear the line, twice: exit";

/// Chat with a backbone in the terminal, with heads or plainly.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ChatArgs {
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
    /// System prompt; needs a chat template.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
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

/// Chats until the user exits.
///
/// # Errors
/// An error in the command line, the backbone, the heads or the tree; a turn that was dropped; [`Interrupted`] after a signal.
pub fn run(args: &ChatArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let acceptance = args.decoding.acceptance()?;
    let plan = args.drafter.plan(args.heads.as_deref(), args.tree.as_deref())?;
    args.decoding.unused_sampling(plan.is_some()).iter().for_each(|notice| common.say(notice));
    let backbone = OpenedBackbone::open(&args.backbone)?;
    let heads = deciding_heads(plan.as_ref(), args.heads.as_deref())?;
    let setup = args.served.options().resolve(backbone, heads, common)?;
    if setup.template.is_none() && args.served.chat_template != Some(TemplateOption::None) {
        let why = needs_template(&args.backbone);
        return Err(UsageError(format!("{why}, or none to continue raw text")).into());
    }
    let engine = args.engine.options();
    let decoder = engine.load(setup, plan.into_iter().collect(), common.context())?;
    let drafts = decoder.drafter().map(|drafter| Drafts::new(&decoder.backbone, drafter, acceptance)).transpose()?;
    let request = args.decoding.request(&[], Stream::default());
    let conversation = ChatHistory::new(&decoder, args.system.as_deref())?;
    let mut chat = Chat {
        decoder: &decoder,
        guesses: drafts.as_ref().map(|drafts| drafts.drafter.described()),
        args,
        common,
        conversation,
        decoding: engine.take(&decoder, drafts, &request, common.context())?,
        is_plain: false,
        answers: 0,
        dropped: 0,
        stop: interrupted(),
    };
    let mut lines = InputLines::open(common)?;
    chat.greet();
    let mut was_cleared = false;
    loop {
        // At the prompt a signal ends the program; in a terminal Ctrl-C arrives as a key.
        chat.stop.store(lines.may_end_at_once(), Ordering::Relaxed);
        let input = lines.next()?;
        if terminated() {
            return Err(left());
        }
        match input {
            Input::End => return chat.end(),
            Input::Cleared if was_cleared => return Err(left()),
            Input::Cleared => {
                common.say("(press Ctrl-C again or Ctrl-D to exit)");
                was_cleared = true;
            }
            Input::NotText(why) => chat.drop_turn(&why)?,
            Input::Line(line) => {
                was_cleared = false;
                if chat.hear(&line)?.is_break() {
                    return chat.end();
                }
            }
        }
    }
}

fn left() -> anyhow::Error {
    Interrupted("interrupted".into()).into()
}

/// A line of input.
#[derive(Debug, PartialEq, Eq)]
enum ChatCommand<'a> {
    Reset,
    Plain,
    Help,
    Exit,
    /// A slash and one word that is not a command.
    Unknown(&'a str),
    Words(&'a str),
}

impl<'a> ChatCommand<'a> {
    fn of(text: &'a str) -> Self {
        match text.trim() {
            "/reset" => Self::Reset,
            "/plain" => Self::Plain,
            "/help" => Self::Help,
            "/exit" | "/quit" => Self::Exit,
            word if word.starts_with('/') && !word[1..].contains(|c: char| !c.is_alphanumeric()) => Self::Unknown(word),
            _ => Self::Words(text),
        }
    }
}

struct Chat<'a> {
    decoder: &'a Decoder,
    /// The source of guesses, if any.
    guesses: Option<&'static str>,
    args: &'a ChatArgs,
    common: &'a CommonFlags,
    conversation: ChatHistory<'a>,
    /// Keeps its cache between turns.
    decoding: Box<dyn DecodeLoop + 'a>,
    /// `/plain` has switched the drafter off.
    is_plain: bool,
    /// Answers so far; each has its own random stream.
    answers: u64,
    /// Turns that got no answer.
    dropped: usize,
    /// Set by Ctrl-C.
    stop: &'static AtomicBool,
}

impl Chat<'_> {
    fn greet(&self) {
        self.common.say(format_args!("{}; /help lists the commands, Ctrl-D exits", self.args.backbone.display()));
        if !self.conversation.has_turns() {
            self.common.say("no chat template: the model continues the plain text so far; an empty line lets it go on");
        }
    }

    /// Handles a line; breaks if the user exits.
    fn hear(&mut self, line: &str) -> anyhow::Result<ControlFlow<()>> {
        match ChatCommand::of(line) {
            ChatCommand::Exit => return Ok(ControlFlow::Break(())),
            ChatCommand::Reset => {
                self.conversation.reset();
                self.decoding.reset();
                self.common.say("new conversation");
            }
            ChatCommand::Plain => self.common.say(self.toggle()),
            ChatCommand::Help => self.common.say(HELP),
            ChatCommand::Unknown(word) => {
                let why = format!("no command {word}; /help lists the commands");
                if self.common.json { print_json(&json!({"error": why}))? } else { self.common.say(why) }
            }
            ChatCommand::Words(words) if words.trim().is_empty() && self.conversation.has_turns() => {}
            ChatCommand::Words(words) => self.turn(words)?,
        }
        Ok(ControlFlow::Continue(()))
    }

    fn toggle(&mut self) -> String {
        self.is_plain = !self.is_plain;
        match (self.guesses, self.is_plain) {
            (None, _) => "decoding is already plain: there is no --heads or --drafter".into(),
            (Some(guesses), true) => format!("plain decoding from here on; /plain switches back to {guesses}"),
            (Some(guesses), false) => format!("decoding with {guesses} from here on"),
        }
    }

    /// Answers a turn. If that fails, the error is reported, the turn is dropped, and the conversation continues; logits with NaN or
    /// infinity end it.
    fn turn(&mut self, words: &str) -> anyhow::Result<()> {
        match self.answer(words) {
            Err(error) if matches!(error.downcast_ref(), Some(TextError::Decode(DecodeError::NotFinite { .. }))) => {
                return Err(error.context(format!("answer {}", self.answers + 1)));
            }
            Err(error) if error.is::<TextError>() || error.is::<PromptError>() => {
                self.drop_turn(&error)?;
            }
            other => other?,
        }
        if terminated() { Err(left()) } else { Ok(()) }
    }

    /// The user exits: an error if a turn was dropped, which a script would not notice otherwise.
    fn end(&self) -> anyhow::Result<()> {
        match self.dropped {
            0 => Ok(()),
            dropped => Err(anyhow!("{} got no answer", counted(dropped, "turn"))),
        }
    }

    /// Reports why a turn has no answer. With --json that is its object, so that each line of the user has one.
    fn drop_turn(&mut self, why: &anyhow::Error) -> anyhow::Result<()> {
        self.dropped += 1;
        report(why);
        self.common.say("this turn was dropped; /reset starts a new conversation");
        if self.common.json { print_json(&json!({"error": format!("{why:#}")})) } else { Ok(()) }
    }

    fn answer(&mut self, words: &str) -> anyhow::Result<()> {
        let prompt = self.conversation.prompt(words)?;
        let stream = Stream { seed: self.common.seed, turn: self.answers, ..Stream::default() };
        let request = self.args.decoding.request(&prompt, stream);
        self.stop.store(false, Ordering::Relaxed);
        let finished = if self.common.json { self.as_json(&request) } else { self.as_text(&request) }?;
        self.answers += 1;
        let context = self.decoder.backbone.config.max_position_embeddings;
        let is_full = (prompt.len() + finished.generation.new_ids.len()) as i64 >= context;
        self.conversation.add(words, prompt, &finished);
        if is_full && finished.generation.finish_reason == FinishReason::Length {
            self.common.say(format_args!(
                "the conversation fills the backbone's context of {context} tokens; /reset starts a new one"
            ));
        }
        Ok(())
    }

    fn decode(&mut self, request: &Request, on_text: &mut OnText) -> anyhow::Result<FinishedText> {
        let (tokenizer, stop) = (&self.decoder.tokenizer, &self.args.stopping.stop[..]);
        let options = TextOptions { tokenizer, prompt: request.prompt, stop };
        let drafting = if self.is_plain { Drafting::Off } else { Drafting::On };
        let (decoding, stopped) = (&mut self.decoding, self.stop);
        Ok(text::stream_text(options, on_text, |on_tokens| {
            let mut until_stopped = |ids: &[i64]| {
                let goes_on = on_tokens(ids); // show the tokens that are kept
                if stopped.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { goes_on }
            };
            decoding.decode(drafting, request, &mut until_stopped)
        })?)
    }

    fn as_json(&mut self, request: &Request) -> anyhow::Result<FinishedText> {
        let finished = self.decode(request, &mut |_| ControlFlow::Continue(()))?;
        print_json(&generate::as_json(request.prompt, &finished, self.decoding.engine_name()))?;
        Ok(finished)
    }

    /// Streams the answer to stdout; prints the figures to stderr.
    fn as_text(&mut self, request: &Request) -> anyhow::Result<FinishedText> {
        let finished = generate::to_stdout(|on_text| self.decode(request, on_text))?;
        let tally = finished.generation.tally();
        self.common.say(format_args!(
            "[{}, {:.0} tokens/s, {:.2} a step, {}, ended by {}]",
            counted(tally.tokens, "token"),
            tally.tokens_per_second(),
            tally.tokens_per_step(),
            self.guesses.filter(|_| !self.is_plain).map_or("plain".into(), |guesses| format!("with {guesses}")),
            finished.generation.finish_reason.name()
        ));
        Ok(finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_slash_and_one_word_is_a_command() {
        assert_eq!((ChatCommand::of("/reset"), ChatCommand::of(" /exit ")), (ChatCommand::Reset, ChatCommand::Exit));
        assert_eq!(ChatCommand::of("/rest"), ChatCommand::Unknown("/rest"));
        for words in ["/etc/passwd", "/help me", "a /reset", "", "//"] {
            assert_eq!(ChatCommand::of(words), ChatCommand::Words(words));
        }
        assert_eq!(ChatCommand::of("/"), ChatCommand::Unknown("/"));
    }
}
