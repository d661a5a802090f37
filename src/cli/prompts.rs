//! The prompts of a verb: where they come from, and what happens to those that do not fit the context.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::Context;
use clap::Args;
use rayon::prelude::*;

use super::CommonFlags;
use crate::data::OtherKeys;
use crate::data::chat_template::ChatTemplate;
use crate::data::conversation::{ChatInput, Message};
use crate::data::prompts::{self, Prompt, PromptError, PromptFile, PromptInput, STDIN};
use crate::data::rows::RowLocation;
use crate::data::tokenize::{TextTokenizer, wide};
use crate::decode::error::DecodeError;
use crate::decode::text::TextError;
use crate::plural::counted;
use crate::session::Decoder;

/// What happens to prompts that do not fit.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct FitFlags {
    /// Make an error of what is otherwise counted: a prompt that does not fit the context, which is skipped, or, where heads are measured,
    /// one that they were trained on.
    #[arg(long)]
    pub(super) strict: bool,
}

/// A prompt that leaves no room for a new token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TooLong {
    pub(super) place: Option<RowLocation>,
    /// Its tokens.
    pub(super) length: usize,
}

/// A prompt that fits, and its index in its file.
pub(super) type IndexedPrompt = (usize, Prompt);

/// The prompts of `--prompts` (`-` is stdin).
///
/// # Errors
/// An invalid prompt file.
pub(super) fn read(file: &Path, common: &CommonFlags) -> anyhow::Result<Vec<Prompt>> {
    Ok(open(file, common)?.prompts()?)
}

/// Reads `--prompts`. A user who types them learns how to end them.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn open(path: &Path, common: &CommonFlags) -> Result<PromptFile, PromptError> {
    if path == Path::new(STDIN) && io::stdin().is_terminal() {
        common.say("reading prompts from stdin, one JSON object per line; end with Ctrl-D");
    }
    let file = PromptFile::open(path)?;
    let others = file.other_keys();
    if !others.not_read.is_empty() {
        common.say(format_args!("{}: not read: {others}", file.name().display()));
    }
    Ok(file)
}

impl FitFlags {
    /// The prompts whose first turn fits the context of the decoder.
    ///
    /// # Errors
    /// A prompt without tokens, one that does not fit with `--strict`, or none that fits.
    pub(super) fn fitting(
        self,
        prompts: Vec<Prompt>,
        decoder: &Decoder,
        common: &CommonFlags,
    ) -> anyhow::Result<Vec<IndexedPrompt>> {
        say_unread(prompts.iter().filter_map(|prompt| prompt.input.chat()), decoder.template.as_deref(), common);
        let context = usize::try_from(decoder.backbone.config.max_position_embeddings)?;
        let lengths = first_lengths(&prompts, &decoder.tokenizer, decoder.template.as_deref())?;
        let all = prompts.into_iter().zip(lengths).enumerate();
        let (fit, others): (Vec<_>, Vec<_>) = all.partition(|(_, (_, length))| *length < context);
        let too_long = others.into_iter().map(|(_, (prompt, length))| TooLong { place: prompt.place, length });
        self.refuse_or_say(&too_long.collect::<Vec<_>>(), fit.len(), context, common)?;
        Ok(fit.into_iter().map(|(index, (prompt, _))| (index, prompt)).collect())
    }

    /// Prints how many prompts are skipped.
    ///
    /// # Errors
    /// Any of them with `--strict`, or if none is left.
    pub(super) fn refuse_or_say(
        self,
        too_long: &[TooLong],
        fit: usize,
        context: usize,
        common: &CommonFlags,
    ) -> anyhow::Result<()> {
        let Some(first) = too_long.first() else { return Ok(()) };
        if too_long.len() + fit == 1 {
            let error =
                anyhow::Error::new(DecodeError::PromptTooLong { length: first.length, context: context as i64 });
            return Err(match &first.place {
                Some(place) => error.context(place.to_string()),
                None => error,
            });
        }
        let place = first.place.iter().map(|place| format!("{place}, ")).collect::<String>();
        let (count, all) = (too_long.len(), counted(too_long.len() + fit, "prompt"));
        let why = format!(
            "{count} of {all}: too long for the context of {context} tokens, which needs room for a new token (the first: {place}{} \
             tokens)",
            first.length
        );
        match (self.strict, fit) {
            (true, _) => {
                anyhow::bail!("cannot decode {why}; shorten or remove them, or leave out --strict to skip them")
            }
            (false, 0) => anyhow::bail!("cannot decode {why}; use shorter prompts"),
            (false, _) => common.say(format_args!("skipping {why}; --strict makes this an error")),
        }
        Ok(())
    }
}

/// Reports what of conversations the chat template does not read.
pub(super) fn say_unread<'c>(
    chats: impl Iterator<Item = &'c ChatInput>,
    template: Option<&ChatTemplate>,
    common: &CommonFlags,
) {
    let Some(template) = template else { return };
    let others = OtherKeys::from_chats(chats, template);
    if !others.not_read.is_empty() {
        common.say(format_args!("the chat template does not read: {others}"));
    }
}

fn first_lengths(
    prompts: &[Prompt],
    tokenizer: &TextTokenizer,
    template: Option<&ChatTemplate>,
) -> anyhow::Result<Vec<usize>> {
    let length = |(at, prompt): (usize, &Prompt)| {
        let ids = prompts::to_ids(&prompt.input, tokenizer, template);
        ids.map(|ids| ids.len()).map_err(|error| match &prompt.place {
            Some(place) => anyhow::Error::new(error).context(place.to_string()),
            None => anyhow::Error::new(error).context(format!("prompt {} of {}", at + 1, prompts.len())),
        })
    };
    prompts.par_iter().enumerate().map(length).collect()
}

/// Calls `answer` with each 0-based turn of a prompt and its tokens, which include the previous turns and answers.
///
/// # Errors
/// A prompt that cannot be rendered, or an error of `answer`.
pub(super) fn each_turn(
    decoder: &Decoder,
    input: &PromptInput,
    mut answer: impl FnMut(u64, &[i64]) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let (tokenizer, template) = (&decoder.tokenizer, decoder.template.as_deref());
    let PromptInput::Turns { opening, user } = input else {
        return answer(0, &wide(&prompts::to_ids(input, tokenizer, template)?)).map(drop);
    };
    let mut chat = ChatInput::clone(opening);
    for (at, turn) in user.iter().enumerate() {
        let context = || format!("turn {}", at + 1);
        chat.messages.push(Message::new("user", turn));
        let ids = prompts::chat_ids(&chat, tokenizer, template).with_context(context)?;
        let said = answer(at as u64, &wide(&ids)).with_context(context)?;
        chat.messages.push(Message::new("assistant", said));
    }
    Ok(())
}

/// Indices of the conversations that ended because their next turn did not fit.
#[derive(Debug, Default)]
pub(super) struct EndedEarly(BTreeSet<usize>);

impl EndedEarly {
    /// Notes that prompt `index` ended early if its error is a turn that does not fit. Returns whether it did; other errors, and with
    /// `--strict` this one too, are returned.
    ///
    /// # Errors
    /// `answered`'s.
    pub(super) fn note(&mut self, index: usize, answered: anyhow::Result<()>, flags: FitFlags) -> anyhow::Result<bool> {
        match answered {
            Err(error) if !flags.strict && is_too_long(&error) => {
                self.0.insert(index);
                Ok(true)
            }
            other => other.map(|()| false),
        }
    }

    /// The number of conversations, whatever the number of samples or repeats of each.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Prints the count, if it is not 0.
    pub(super) fn report(&self, common: &CommonFlags) {
        if self.count() > 0 {
            let conversations = counted(self.count(), "conversation");
            common.say(format_args!("{conversations} ended before a turn that does not fit the context"));
        }
    }
}

/// Whether decoding failed because the prompt does not fit.
fn is_too_long(error: &anyhow::Error) -> bool {
    let decode_error = error.downcast_ref().and_then(|error| match error {
        TextError::Decode(error) => Some(error),
        TextError::Tokenize(_) => None,
    });
    matches!(decode_error.or_else(|| error.downcast_ref()), Some(DecodeError::PromptTooLong { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_that_ends_early_in_every_sample_counts_once() {
        let (mut ended, lenient) = (EndedEarly::default(), FitFlags { strict: false });
        let too_long = || Err(DecodeError::PromptTooLong { length: 90, context: 64 }.into());
        for index in [3, 3, 5] {
            assert!(ended.note(index, too_long(), lenient).expect("it is noted"));
        }
        assert!(!ended.note(7, Ok(()), lenient).expect("no error"));
        assert_eq!(ended.count(), 2);
        assert!(ended.note(8, too_long(), FitFlags { strict: true }).is_err());
        assert!(ended.note(8, Err(anyhow::anyhow!("another")), lenient).is_err());
        assert_eq!(ended.count(), 2);
    }
}
