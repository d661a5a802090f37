//! Streams a generation as text: in pieces of whole characters, up to the first stop string.

use std::ops::ControlFlow;

use super::error::DecodeError;
use super::request::{FinishReason, Generation, OnTokens, keep_tokens};
use super::stats::GeneratedTokens;
use crate::data::tokenize::{TextStream, TextTokenizer, TokenizeError, narrow};

/// Decoding, or turning tokens into text, failed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// What becomes text, and where it ends.
#[derive(Debug, Clone, Copy)]
pub struct TextOptions<'a> {
    /// The backbone's.
    pub tokenizer: &'a TextTokenizer,
    /// Token ids that the text goes on from.
    pub prompt: &'a [i64],
    /// None is empty. The text ends before the first of them that is complete, be it in one token or across several.
    pub stop: &'a [String],
}

/// A generation and its text.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedText {
    /// Its tokens end with the last one that is wholly before the stop string.
    pub generation: Generation,
    /// All that was emitted, as it reads behind the prompt. It may go on, after the last of the tokens, with the beginning of the token
    /// in which the stop string begins.
    pub text: String,
    /// The same as the tokenizer has it without a prompt: a Llama tokenizer drops the space before the first word.
    pub text_alone: String,
    /// The end of `text` that was emitted last, once no more tokens came.
    pub last: String,
}

/// Hears the text, and may end it.
pub type OnText<'a> = dyn FnMut(&str) -> ControlFlow<()> + 'a;

/// Runs `decode` and streams its text. Nothing of a stop string is ever emitted: text that could be the beginning of one is
/// held back until it is known.
///
/// # Errors
/// What `decode` or the tokenizer says.
pub fn stream_text(
    options: TextOptions,
    on_text: &mut OnText,
    decode: impl FnOnce(&mut OnTokens) -> Result<Generation, DecodeError>,
) -> Result<FinishedText, TextError> {
    let mut text = StreamedText::new(options.tokenizer, options.prompt, options.stop.to_vec());
    let mut trouble = None;
    let generation = decode(&mut |ids| {
        let next =
            text.take(ids).map(|piece| if piece.is_empty() { ControlFlow::Continue(()) } else { on_text(&piece) });
        match next {
            Ok(_) if text.is_stopped() => ControlFlow::Break(()),
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
    let finished = text.finish(generation)?;
    if !finished.last.is_empty() {
        let _ = on_text(&finished.last); // it is over anyway
    }
    Ok(finished)
}

/// Of a generation only the first `tokens` stay: a stop string ended it.
fn end_after(generation: &mut Generation, tokens: usize) {
    generation.new_ids.truncate(tokens);
    generation.scored.truncate(tokens);
    keep_tokens(&mut generation.accept_lengths, tokens);
    generation.finish_reason = FinishReason::Stop;
    generation.end.clear();
    generation.end_steps = 0;
}

/// The text of a generation that is under way, for a caller that follows several at a time; [`stream_text`] follows one.
#[derive(Debug)]
pub struct StreamedText<'t> {
    tokenizer: &'t TextTokenizer,
    stream: TextStream<'t>,
    buffer: StopBuffer,
    /// Up to the token that completes a stop string.
    ids: Vec<i32>,
}

impl<'t> StreamedText<'t> {
    /// Of a text that goes on from `prompt`, up to the first of the strings `stop` that is complete, none of which is empty.
    pub fn new(tokenizer: &'t TextTokenizer, prompt: &[i64], stop: Vec<String>) -> Self {
        Self { tokenizer, stream: tokenizer.stream_after(&narrow(prompt)), buffer: StopBuffer::new(stop), ids: vec![] }
    }

    /// Whether a stop string came: the generation is to end here, and tokens that follow are not taken.
    pub fn is_stopped(&self) -> bool {
        self.buffer.stopped
    }

    /// Takes new tokens, up to a stop string; returns what can be emitted now: whole characters, and nothing of a stop string.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn take(&mut self, ids: &[i64]) -> Result<String, TokenizeError> {
        let from = self.buffer.emitted;
        for id in narrow(ids) {
            if self.buffer.stopped {
                break;
            }
            self.ids.push(id);
            if let Some(piece) = self.stream.push(id)? {
                self.buffer.add(&piece, self.ids.len());
            }
        }
        Ok(self.buffer.text[from..self.buffer.emitted].to_owned())
    }

    /// The tokens whose text is emitted whole, from the first one on. At a stop string, those that stay.
    pub fn emitted_tokens(&self) -> usize {
        self.buffer.emitted_tokens()
    }

    /// Tokens that were taken: all so far, up to the one that completes a stop string.
    pub fn taken_tokens(&self) -> usize {
        self.ids.len()
    }

    /// What was generated when the text has ended: `generation` whole, or up to the token that completes a stop string. What the same step
    /// committed after that token depends on the guesses and is not counted.
    pub fn generated(&self, generation: &Generation) -> GeneratedTokens {
        match self.is_stopped() {
            true => generation.generated_until(self.taken_tokens()),
            false => generation.generated(),
        }
    }

    /// The end: the generation, cut where a stop string came, with its text.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn finish(self, mut generation: Generation) -> Result<FinishedText, TokenizeError> {
        let Self { tokenizer, stream, buffer: mut words, ids } = self;
        let from = words.emitted;
        if !words.stopped {
            words.add(&stream.finish()?.unwrap_or_default(), ids.len());
            words.emitted = words.text.len();
        }
        let last = words.text[from..].to_owned();
        let text_alone = if words.stopped {
            end_after(&mut generation, words.emitted_tokens());
            let drops_space = !tokenizer.decode(&ids, true)?.starts_with(' ');
            words.text.strip_prefix(' ').filter(|_| drops_space).unwrap_or(&words.text).to_owned()
        } else {
            tokenizer.decode(&narrow(&generation.new_ids), true)?
        };
        Ok(FinishedText { generation, text: words.text, text_alone, last })
    }
}

/// The text so far, without its tokens.
#[derive(Debug)]
struct StopBuffer {
    stop: Vec<String>,
    /// Up to the stop string, if there was one.
    text: String,
    /// Bytes of `text` that are emitted; the others could be the beginning of a stop string.
    emitted: usize,
    /// For each token, how many bytes of text there are when it is complete. A token that completes no character, or has no text,
    /// goes with the next one that does.
    ends: Vec<usize>,
    stopped: bool,
}

impl StopBuffer {
    fn new(stop: Vec<String>) -> Self {
        Self { stop, text: String::new(), emitted: 0, ends: vec![], stopped: false }
    }

    /// Adds the text that token `tokens` (1-based) completes.
    fn add(&mut self, piece: &str, tokens: usize) {
        self.text.push_str(piece);
        self.ends.resize(tokens, self.text.len());
        let pending = &self.text[self.emitted..];
        if let Some(at) = first_stop(pending, &self.stop) {
            self.text.truncate(self.emitted + at);
            self.emitted = self.text.len();
            self.stopped = true;
        } else {
            self.emitted = self.text.len() - possible_beginning(pending, &self.stop);
        }
    }

    fn emitted_tokens(&self) -> usize {
        self.ends.partition_point(|&end| end <= self.emitted)
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
    use serde_json::json;

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

    #[test]
    fn special_tokens_are_no_text_and_a_space_behind_one_is() {
        let folder = tempfile::tempdir().unwrap();
        let special = json!({"id": 0, "content": "<x>", "special": true, "normalized": false, "lstrip": false, "rstrip": false, "single_word": false});
        let tokenizer = json!({
            "added_tokens": [special],
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "vocab": {"<x>": 0, "Ġa": 1, "b": 2}, "merges": []},
        });
        crate::files::write_json(&folder.path().join("tokenizer.json"), &tokenizer).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        for (stop, new_ids, expected) in [(&["b"][..], vec![0, 1, 2], " a"), (&[], vec![0, 1, 2, 0], " ab")] {
            let mut text = StreamedText::new(&tokenizer, &[], strings(stop));
            text.take(&new_ids).unwrap();
            assert_eq!(text.finish(Generation::from_tokens(new_ids)).unwrap().text_alone, expected);
        }
    }

    /// Characters one by one, as tokens of one character would bring them.
    fn by_characters(text: &str, stop: &[String]) -> (Vec<String>, String, bool) {
        let mut words = StopBuffer::new(stop.to_vec());
        let mut streamed = vec![];
        for (character, tokens) in text.chars().map(String::from).zip(1..) {
            let from = words.emitted;
            words.add(&character, tokens);
            streamed.push(words.text[from..words.emitted].to_owned());
            assert_eq!(words.emitted_tokens(), words.text[..words.emitted].chars().count());
            if words.stopped {
                break;
            }
        }
        (streamed, words.text, words.stopped)
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
            let (streamed, known, stopped) = by_characters(&text, &stop);
            prop_assert_eq!((known.as_str(), stopped), (expected, cut.is_some()));
            let streamed = streamed.concat();
            prop_assert!(expected.starts_with(&streamed), "nothing of a stop string is streamed");
            let kept = &expected[streamed.len()..];
            prop_assert!(kept.is_empty() || stop.iter().any(|stop| stop.starts_with(kept)), "all else is streamed at once: {kept}");
            // The same text in larger pieces.
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|&at| text.is_char_boundary(at)).collect();
            ends.extend([0, text.len()]);
            ends.sort_unstable();
            let mut words = StopBuffer::new(stop.clone());
            for (piece, tokens) in ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).zip(1..) {
                if !words.stopped && !piece.is_empty() {
                    words.add(piece, tokens);
                    prop_assert!(expected.starts_with(&words.text[..words.emitted]));
                }
            }
            prop_assert_eq!((words.text.as_str(), words.stopped), (expected, cut.is_some()));
        }
    }
}
