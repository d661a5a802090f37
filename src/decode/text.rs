//! Streams a generation as text: in pieces of whole characters, up to the first stop string.

use std::ops::ControlFlow;

use super::error::DecodeError;
use super::request::{FinishReason, Generation, OnTokens};
use super::transcript::keep_tokens;
use crate::data::tokenize::{TextStream, TextTokenizer, TokenizeError, narrow};

/// Decoding, or turning tokens into text, failed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Decoding.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Text.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// What becomes text, and where it ends.
#[derive(Debug, Clone, Copy)]
pub struct Wording<'a> {
    /// The backbone's.
    pub tokenizer: &'a TextTokenizer,
    /// Token ids that the text goes on from.
    pub prompt: &'a [i64],
    /// None is empty. The text ends before the first of them that is complete, be it in one token or across several.
    pub stop: &'a [String],
}

/// A generation and its text.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Its tokens end with the last one that is wholly before the stop string.
    pub generation: Generation,
    /// All that was told, as it reads behind the prompt. It may go on, after the last of the tokens, with the beginning of the token
    /// in which the stop string begins.
    pub text: String,
    /// The same as the tokenizer has it without a prompt: a Llama tokenizer drops the space before the first word.
    pub text_alone: String,
}

/// Hears the text, and may end it.
pub type OnText<'a> = dyn FnMut(&str) -> ControlFlow<()> + 'a;

/// Runs `decode` and tells its text as it comes. Nothing of a stop string is ever told: text that could be the beginning of one is
/// held back until it is known.
///
/// # Errors
/// What `decode` or the tokenizer says.
pub fn tell(
    wording: Wording,
    on_text: &mut OnText,
    decode: impl FnOnce(&mut OnTokens) -> Result<Generation, DecodeError>,
) -> Result<Told, TextError> {
    let mut words = Words::new(wording);
    let mut trouble = None;
    let mut generation = decode(&mut |ids| {
        let told =
            words.take(ids).map(|piece| if piece.is_empty() { ControlFlow::Continue(()) } else { on_text(&piece) });
        match told {
            Ok(_) if words.is_stopped() => ControlFlow::Break(()),
            Ok(go_on) => go_on,
            Err(error) => {
                trouble = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = trouble {
        return Err(error.into());
    }
    let last = words.end()?;
    if !last.is_empty() {
        let _ = on_text(&last); // it is over anyway
    }
    if words.is_stopped() {
        end_after(&mut generation, words.whole_tokens());
    }
    let text_alone = words.alone(wording.tokenizer, &generation)?;
    Ok(Told { generation, text: words.text, text_alone })
}

/// Of a generation only the first `tokens` stay: a stop string ended it.
fn end_after(generation: &mut Generation, tokens: usize) {
    generation.new_ids.truncate(tokens);
    keep_tokens(&mut generation.accept_lengths, tokens);
    generation.finish_reason = FinishReason::Stop;
    generation.end.clear();
}

/// The text so far.
struct Words<'a> {
    /// `None` once all is said.
    stream: Option<TextStream<'a>>,
    stop: &'a [String],
    /// Up to the stop string, if there was one.
    text: String,
    /// Bytes of `text` that are told; the others could be the beginning of a stop string.
    told: usize,
    ids: Vec<i32>,
    /// For each token, how many bytes of text there are when it is complete. A token that completes no character, or has no text,
    /// goes with the next one that does.
    ends: Vec<usize>,
    stopped: bool,
}

impl<'a> Words<'a> {
    fn new(wording: Wording<'a>) -> Self {
        let stream = Some(wording.tokenizer.stream_after(&narrow(wording.prompt)));
        Self { stream, stop: wording.stop, text: String::new(), told: 0, ids: vec![], ends: vec![], stopped: false }
    }

    fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes tokens, up to a stop string; returns what can be told now.
    fn take(&mut self, ids: &[i64]) -> Result<String, TokenizeError> {
        let from = self.told;
        for id in narrow(ids) {
            let Some(stream) = self.stream.as_mut().filter(|_| !self.stopped) else { break };
            self.ids.push(id);
            if let Some(piece) = stream.push(id)? {
                self.add(&piece);
            }
        }
        Ok(self.text[from..self.told].to_owned())
    }

    /// Nothing comes any more; returns what is left to tell.
    fn end(&mut self) -> Result<String, TokenizeError> {
        let from = self.told;
        if let Some(stream) = self.stream.take().filter(|_| !self.stopped) {
            self.add(&stream.finish()?.unwrap_or_default());
            self.told = self.text.len();
        }
        Ok(self.text[from..self.told].to_owned())
    }

    fn add(&mut self, piece: &str) {
        self.text.push_str(piece);
        self.ends.resize(self.ids.len(), self.text.len());
        let untold = &self.text[self.told..];
        if let Some(at) = first_stop(untold, self.stop) {
            self.text.truncate(self.told + at);
            self.told = self.text.len();
            self.stopped = true;
        } else {
            self.told = self.text.len() - possible_beginning(untold, self.stop);
        }
    }

    /// Tokens whose text is all before the stop string.
    fn whole_tokens(&self) -> usize {
        self.ends.iter().take_while(|&&end| end <= self.text.len()).count()
    }

    fn alone(&self, tokenizer: &TextTokenizer, generation: &Generation) -> Result<String, TokenizeError> {
        if !self.stopped {
            return tokenizer.decode(&narrow(&generation.new_ids), true);
        }
        let drops_space = !tokenizer.decode(&self.ids, true)?.starts_with(' ');
        let without = self.text.strip_prefix(' ').filter(|_| drops_space);
        Ok(without.unwrap_or(&self.text).to_owned())
    }
}

/// Where the stop string begins that is complete first; of those that end together, the longest.
fn first_stop(text: &str, stop: &[String]) -> Option<usize> {
    let found = stop.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
    found.min().map(|(_, at)| at)
}

/// How many bytes at the text's end could be the beginning of a stop string.
fn possible_beginning(text: &str, stop: &[String]) -> usize {
    let begins = |at: &usize| stop.iter().any(|stop| stop.starts_with(&text[*at..]));
    text.char_indices().map(|(at, _)| at).find(begins).map_or(0, |at| text.len() - at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn strings(stop: &[&str]) -> Vec<String> {
        stop.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn the_stop_string_that_is_complete_first_counts() {
        assert_eq!(first_stop("xabcdx", &strings(&["abcd", "bc"])), Some(2));
        assert_eq!(
            first_stop("xabcdx", &strings(&["cd", "abcd", "d"])),
            Some(1),
            "of those that end together the longest"
        );
        assert_eq!((first_stop("xab", &strings(&["abc"])), first_stop("xab", &[])), (None, None));
        assert_eq!(possible_beginning("xabab", &strings(&["abac", "b!"])), 2);
        assert_eq!(possible_beginning("xé", &strings(&["éa"])), 2);
        assert_eq!((possible_beginning("abc", &strings(&["bx"])), possible_beginning("abc", &[])), (0, 0));
    }

    /// Characters one by one, as tokens of one character would bring them.
    fn by_characters(text: &str, stop: &[String]) -> (Vec<String>, String, bool) {
        let mut words =
            Words { stream: None, stop, text: String::new(), told: 0, ids: vec![], ends: vec![], stopped: false };
        let mut told = vec![];
        for character in text.chars().map(String::from) {
            let from = words.told;
            words.ids.push(0);
            words.add(&character);
            told.push(words.text[from..words.told].to_owned());
            if words.stopped {
                break;
            }
        }
        (told, words.text, words.stopped)
    }

    proptest! {
        #[test]
        fn a_text_ends_where_its_first_stop_string_begins_whatever_its_pieces(
            text in "[abé]{0,24}",
            stop in proptest::collection::vec("[abé]{1,4}", 0..3),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
        ) {
            // Slowly: the shortest beginning of the text that ends with a stop string, the longest of them.
            let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
            let cut = ends.filter_map(|end| stop.iter().filter(|stop| text[..end].ends_with(*stop)).map(|stop| end - stop.len()).min()).next();
            let expected = &text[..cut.unwrap_or(text.len())];
            let (told, known, stopped) = by_characters(&text, &stop);
            prop_assert_eq!((known.as_str(), stopped), (expected, cut.is_some()));
            prop_assert!(expected.starts_with(&told.concat()), "nothing of a stop string is told");
            // The same text in larger pieces.
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|&at| text.is_char_boundary(at)).collect();
            ends.extend([0, text.len()]);
            ends.sort_unstable();
            let mut words = Words { stream: None, stop: &stop, text: String::new(), told: 0, ids: vec![], ends: vec![], stopped: false };
            for piece in ends.windows(2).map(|pair| &text[pair[0]..pair[1]]) {
                if !words.stopped && !piece.is_empty() {
                    words.add(piece);
                    prop_assert!(expected.starts_with(&words.text[..words.told]));
                }
            }
            prop_assert_eq!((words.text.as_str(), words.stopped), (expected, cut.is_some()));
        }
    }
}
