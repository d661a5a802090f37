//! What SentencePiece does to a text before it is cut into pieces: replaced characters, extra spaces removed, spaces
//! written as `▁`, and one more before the first word. The tokenizers crate keeps track of where each character was.

use tokenizers::{NormalizedString, Normalizer};

use super::charsmap::Charsmap;
use super::prefixes::Prefixes;

/// The visible space.
const SPACE: char = '\u{2581}';

/// Where a space is added that makes the first word look like any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DummyPrefix {
    Never,
    /// Around each text between special tokens, as sentencepiece does to every text (`legacy` of transformers).
    Each,
    /// At the start of the whole text, unless it starts with a space (`"legacy": false`).
    Start,
}

/// `NormalizerSpec`, with what transformers makes of it.
#[derive(Debug, Clone)]
pub(in crate::data::tokenize) struct SpaceNormalizer {
    pub(super) charsmap: Option<Charsmap>,
    pub(super) user_defined: Prefixes,
    pub(super) dummy_prefix: DummyPrefix,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) escape_whitespaces: bool,
    pub(super) treat_whitespace_as_suffix: bool,
}

/// The new text, each character with the number of characters that it stands for.
#[derive(Default)]
struct Rewritten {
    letters: Vec<(char, usize)>,
    /// Characters before the first that are left out.
    removed: usize,
}

impl Normalizer for SpaceNormalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        if !text.is_empty() {
            let rewritten = self.rewrite(text.get(), text.offsets_original().0 == 0);
            let removed = rewritten.removed;
            text.transform(rewritten.changes(), removed);
        }
        Ok(())
    }
}

impl SpaceNormalizer {
    /// Whether characters become others.
    pub(in crate::data::tokenize) fn replaces_characters(&self) -> bool {
        self.charsmap.is_some()
    }

    /// Whether a space goes before the first word.
    pub(in crate::data::tokenize) fn adds_prefix(&self) -> bool {
        self.dummy_prefix != DummyPrefix::Never
    }

    pub(in crate::data::tokenize) fn removes_spaces(&self) -> bool {
        self.remove_extra_whitespaces
    }

    fn rewrite(&self, text: &str, at_start: bool) -> Rewritten {
        let mut new = Rewritten::default();
        let whole = self.dummy_prefix != DummyPrefix::Start || at_start;
        let mut after_space = self.remove_extra_whitespaces && whole;
        let mut rest = text;
        while after_space && let Some((" ", length)) = self.step(rest) {
            new.skip(&rest[..length]);
            rest = &rest[length..];
        }
        if rest.is_empty() {
            return new;
        }
        let adds = match self.dummy_prefix {
            DummyPrefix::Never => false,
            DummyPrefix::Each => true,
            DummyPrefix::Start => at_start && !self.starts_with_space(rest),
        };
        if adds && !self.treat_whitespace_as_suffix {
            new.letters.push((self.space(), 0));
        }
        while let Some((replacement, length)) = self.step(rest) {
            let kept = if after_space { replacement.trim_start_matches(' ') } else { replacement };
            new.push(kept.chars().map(|letter| if letter == ' ' { self.space() } else { letter }), &rest[..length]);
            after_space = self.remove_extra_whitespaces && (kept.is_empty() && after_space || kept.ends_with(' '));
            rest = &rest[length..];
        }
        if self.remove_extra_whitespaces {
            new.trim_end(self.space());
        }
        if adds && self.treat_whitespace_as_suffix {
            new.letters.push((self.space(), 0));
        }
        new
    }

    /// What the text's first characters become, and how many bytes they are.
    fn step<'a>(&'a self, text: &'a str) -> Option<(&'a str, usize)> {
        let first = text.chars().next()?.len_utf8();
        if let Some(length) = self.user_defined.longest(text) {
            return Some((&text[..length], length));
        }
        let replaced = self.charsmap.as_ref().and_then(|charsmap| charsmap.longest(text));
        Some(replaced.map_or((&text[..first], first), |(length, replacement)| (replacement, length)))
    }

    fn starts_with_space(&self, text: &str) -> bool {
        self.step(text).is_some_and(|(first, _)| first.starts_with([' ', SPACE]))
    }

    fn space(&self) -> char {
        if self.escape_whitespaces { SPACE } else { ' ' }
    }
}

impl Rewritten {
    fn push(&mut self, new: impl Iterator<Item = char>, old: &str) {
        let before = self.letters.len();
        self.letters.extend(new.map(|letter| (letter, 0)));
        match self.letters.get_mut(before) {
            Some((_, stands_for)) => *stands_for = old.chars().count(),
            None => self.skip(old),
        }
    }

    /// Leaves characters out.
    fn skip(&mut self, old: &str) {
        let count = old.chars().count();
        match self.letters.iter_mut().rev().find(|(_, stands_for)| *stands_for > 0) {
            Some((_, stands_for)) => *stands_for += count,
            None => self.removed += count,
        }
    }

    fn trim_end(&mut self, space: char) {
        while self.letters.last().is_some_and(|(letter, _)| *letter == space) {
            self.letters.pop();
        }
    }

    /// In the words of [`NormalizedString::transform`]: 1 for an added character, -n for one before n that are left out.
    fn changes(mut self) -> impl Iterator<Item = (char, isize)> {
        // The first character is never an added one, so that it belongs to a place in the text: it takes the next one's.
        if let Some(at) = self.letters.iter().position(|(_, stands_for)| *stands_for > 0) {
            let (first, taken) = (0, self.letters[at].1);
            self.letters[at].1 = 0;
            self.letters[first].1 = taken;
        }
        self.letters.into_iter().map(|(letter, stands_for)| (letter, 1 - stands_for.cast_signed()))
    }
}
