//! Training data by self-distillation (paper section 2.3.2): the backbone answers prompts, and the conversations become
//! Parquet rows ready for training. This module does not know how an answer is decoded.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::data::conversation::{ChatInput, Message};
use crate::data::prompts::{Dialogue, Questions};

pub mod answer;
pub mod conversation;
mod error;
pub mod folder;
mod journal;
pub mod local;
pub mod output;
pub mod provenance;
mod refusal;
mod refused_file;
pub mod render;
pub mod server;
mod shards;
mod talk;

use answer::Answerer;
pub use conversation::DistillSettings;
pub use error::{AnswerError, DistillError, ServerError};
use output::Output;
pub use refusal::{FEW_REFUSED, Refusal, RefusedTurn};
use render::Renderer;
use talk::OpenConversations;

/// Tokens around a turn: more than any built-in template puts there.
const OF_TEMPLATE: usize = 32;

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistillProgress {
    /// Finished and refused conversations, including those of earlier runs.
    pub conversations: usize,
    /// New tokens of this run.
    pub tokens: usize,
    /// Most conversations that are decoded together; smaller than before where memory ran out.
    pub batch_size: usize,
}

/// How a distillation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DistillEnd {
    /// Every conversation is in a shard, or refused.
    Whole,
    /// The caller stopped the run; finished conversations are kept.
    Stopped,
}

/// Tokens of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DialogueTokens {
    /// Its first turn's, which must be fewer than the context for an answer to fit.
    pub first: usize,
    /// All turns', with answers as long as they may be.
    pub most: usize,
}

/// Checks before any work that every prompt can be rendered, or without a renderer that each is a conversation. Returns the tokens of each one.
///
/// # Errors
/// The first invalid prompt, with file and line.
pub fn check(
    dialogues: &[Dialogue],
    renderer: Option<&Renderer>,
    settings: &DistillSettings,
) -> Result<Vec<DialogueTokens>, DistillError> {
    let tokens = |dialogue: &Dialogue| check_one(dialogue, renderer, settings);
    let tokens: Vec<Result<DialogueTokens, DistillError>> = dialogues.par_iter().map(tokens).collect();
    tokens.into_iter().collect() // the first error in the order of the file
}

fn check_one(
    dialogue: &Dialogue,
    renderer: Option<&Renderer>,
    settings: &DistillSettings,
) -> Result<DialogueTokens, DistillError> {
    let place = || dialogue.place.clone();
    let is_raw = !matches!(dialogue.questions, Questions::Turns { .. });
    let Some(renderer) = renderer else {
        let tokens = DialogueTokens { first: 0, most: 0 };
        return if is_raw { Err(DistillError::RawPromptWithoutBackbone { place: place() }) } else { Ok(tokens) };
    };
    if settings.self_talk && is_raw {
        return Err(DistillError::SelfTalkOfRawPrompt { place: place() });
    }
    let failed = |source| DistillError::Prompt { place: place(), source: Box::new(source) };
    let mut chat = ChatInput::default();
    let first = render::first(&dialogue.questions, Some(renderer), &mut chat).map_err(failed)?;
    if settings.self_talk {
        chat.messages.push(Message::new("assistant", "a"));
        renderer.question(&chat).map_err(failed)?.ok_or(DistillError::NoPlaceForQuestions)?;
    }
    let later = later_turns(&dialogue.questions, settings).iter().map(|turn| renderer.tokenizer.encode(turn, false));
    let later = later.map(|ids| ids.map(|ids| ids.len())).collect::<Result<Vec<_>, _>>();
    let later = later.map_err(|source| failed(source.into()))?;
    let (first, is_self_talk) = (first.ids.len(), settings.self_talk && !is_raw);
    Ok(DialogueTokens { first, most: first.saturating_add(answered(&later, is_self_talk, settings)) })
}

/// The user's turns behind the first one that are answered.
fn later_turns<'d>(questions: &'d Questions, settings: &DistillSettings) -> &'d [String] {
    match questions {
        Questions::Turns { user, .. } if !settings.self_talk => {
            &user[user.len().min(1)..user.len().min(settings.turns.get())]
        }
        _ => &[],
    }
}

/// Most tokens that a conversation reaches.
pub fn longest_text(conversations: &[DialogueTokens], settings: &DistillSettings) -> NonZeroUsize {
    let longest = conversations.iter().map(|tokens| tokens.most).max().unwrap_or(1).min(settings.context);
    NonZeroUsize::new(longest).unwrap_or(NonZeroUsize::MIN)
}

/// Most tokens behind the first prompt: answers, and the user's later turns of so many tokens.
fn answered(later: &[usize], is_self_talk: bool, settings: &DistillSettings) -> usize {
    let (written, turns) = (settings.max_new_tokens.get(), settings.turns.get());
    let later = if is_self_talk {
        (turns - 1).saturating_mul(2).saturating_mul(written.saturating_add(OF_TEMPLATE))
    } else {
        let turn = |tokens: &usize| written.saturating_add(tokens + OF_TEMPLATE);
        later.iter().map(turn).fold(0, usize::saturating_add)
    };
    written.saturating_add(later)
}

/// Answers every prompt that the output lacks. Without a `renderer` conversations have no tokens. `on_step` receives the progress and may
/// stop the run.
///
/// # Errors
/// A decoding or I/O error, a server's fault, too many refused questions; conversations finished by then are kept.
pub fn run(
    dialogues: &[Dialogue],
    renderer: Option<&Renderer>,
    settings: &DistillSettings,
    mut answerer: impl Answerer,
    output: &mut Output,
    on_step: &mut dyn FnMut(DistillProgress) -> ControlFlow<()>,
) -> Result<DistillEnd, DistillError> {
    output.check_refused(settings.max_refused)?;
    let mut open = OpenConversations::new(dialogues, renderer, settings, output);
    loop {
        match go_on(&mut open, &mut answerer, output) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => {
                open.end(output)?;
                return Ok(DistillEnd::Whole);
            }
            Err(error @ DistillError::Io { .. }) => return Err(error),
            Err(error) => {
                answerer.end();
                let _ = on_step(progress(&answerer, output)); // says what is waited for; the run ends anyway
                open.take_last(&mut answerer, output)?;
                return Err(open.known_better(error, output));
            }
        }
        if on_step(progress(&answerer, output)).is_break() {
            answerer.end();
            open.take_last(&mut answerer, output)?;
            output.sync()?;
            return Ok(DistillEnd::Stopped);
        }
    }
}

fn progress(answerer: &impl Answerer, output: &Output) -> DistillProgress {
    DistillProgress { conversations: output.kept(), tokens: answerer.tokens(), batch_size: answerer.batch_size() }
}

/// Asks, and hears what is answered meanwhile. Breaks when nothing is left to ask.
fn go_on(
    open: &mut OpenConversations,
    answerer: &mut impl Answerer,
    output: &mut Output,
) -> Result<ControlFlow<()>, DistillError> {
    open.ask(answerer)?;
    if answerer.is_idle() {
        return Ok(ControlFlow::Break(()));
    }
    open.hear(answerer.step()?, output)?;
    open.new_refusals().iter().for_each(|(id, why)| answerer.note_refused(*id, why));
    Ok(ControlFlow::Continue(()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::data::chat_template::{ChatTemplate, TemplateChoice};
    use crate::data::tokenize::TextTokenizer;

    fn settings(max_new_tokens: usize, turns: usize, self_talk: bool) -> DistillSettings {
        let number = |number| NonZeroUsize::new(number).expect("above 0");
        DistillSettings {
            max_new_tokens: number(max_new_tokens),
            turns: number(turns),
            self_talk,
            seed: 0,
            context: 4096,
            max_refused: 0,
        }
    }

    #[test]
    fn a_text_reaches_its_prompt_and_all_answers_within_the_context() {
        let turns =
            |count: usize| Questions::Turns { opening: Box::default(), user: vec!["0123456789".to_owned(); count] };
        let text = Questions::Text("a".repeat(50));
        let later = 100 + 10 + OF_TEMPLATE;
        for (questions, settings, expected) in [
            (&text, settings(100, usize::MAX, false), 20 + 100),
            (&turns(0), settings(100, usize::MAX, false), 20 + 100),
            (&turns(1), settings(100, usize::MAX, false), 20 + 100),
            (&turns(3), settings(100, usize::MAX, false), 20 + 100 + 2 * later),
            (&turns(3), settings(100, 2, false), 20 + 100 + later),
            (&turns(1), settings(100, 3, true), 20 + 100 + 4 * (100 + OF_TEMPLATE)),
            (&turns(3), settings(2000, usize::MAX, false), 4096),
            (&turns(3), settings(usize::MAX, usize::MAX, false), 4096),
        ] {
            let later: Vec<usize> = later_turns(questions, &settings).iter().map(String::len).collect(); // a token for each byte
            let most = 20usize.saturating_add(answered(&later, settings.self_talk, &settings));
            let longest = longest_text(&[DialogueTokens { first: 20, most }], &settings);
            assert_eq!(longest.get(), expected, "{questions:?}, {settings:?}");
        }
    }

    #[test]
    fn turns_of_the_user_are_counted_in_tokens() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let tokenizer = TextTokenizer::load(&folder).expect("a tokenizer");
        let template = ChatTemplate::choose(&TemplateChoice::Tokenizer, &folder).expect("a template");
        let renderer = Renderer { tokenizer: &tokenizer, template: template.as_ref() };
        let turn = "How do I make omelette for 4 people?".to_owned();
        let place = crate::data::rows::RowLocation { path: "p.jsonl".into(), row: None };
        let questions = Questions::Turns { opening: Box::default(), user: vec![turn.clone(); 2] };
        let dialogue = Dialogue { place, index: 0, id: None, category: None, questions };
        let settings = settings(100, usize::MAX, false);
        let DialogueTokens { first, most } = check(&[dialogue], Some(&renderer), &settings).expect("a prompt")[0];
        let tokens = tokenizer.encode(&turn, false).expect("tokens").len();
        assert!(tokens < turn.len() / 2 && first > tokens, "{tokens} of {} bytes, {first}", turn.len());
        assert_eq!(most, first + 100 + 100 + tokens + OF_TEMPLATE);
    }
}
