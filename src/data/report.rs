//! The report of reading data: files, rows kept, rows left out and why.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::column_advice::NO_ANSWERS;
use super::described_folder::LeftOutSplits;
use super::long_rows::{LongRows, RowFit};
use super::other_keys::OtherKeys;
use super::rows::{IGNORE, ReadRow, RowError, RowForm, TokenRow};
use crate::plural::counted;

/// Words of a template that are counted on their own; what else it says is counted together.
const REFUSALS_KEPT_APART: usize = 8;

/// Why a row was left out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DropReason {
    /// One token predicts nothing.
    FewerThanTwoTokens,
    /// A conversation without turns, or with nothing said in them.
    EmptyConversation,
    /// The assistant's turns, which carry the loss, are empty.
    NoAssistantTurn,
    NoLearnedTurn,
    /// A turn of a role that no data set is known to have.
    UnknownRole,
    /// What the chat template raised, in its words.
    TemplateRefuses(String),
    /// The assistant's part of the text cannot be located.
    AnswersNotFound,
    /// All of the assistant's text is beyond the maximum length.
    NoLabelLeft,
    /// More than the maximum length, and `data.long_rows` is `drop`.
    TooLong,
    /// A prompt with nothing to learn behind it.
    EmptyCompletion,
    /// A text of nothing but blanks.
    EmptyText,
}

/// How the cache was used for a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheUse {
    /// There is no cache.
    NotUsed,
    /// Its rows were read, tokenised and kept.
    Written,
    /// Its rows were there.
    Read,
    /// What was there was damaged (how), so the file was read anew.
    Rebuilt(String),
}

/// Bad rows of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRows {
    pub rows: usize,
    /// The first of them: file, line and problem.
    pub first: String,
}

/// Tokens and time of tokenising. Equality compares the tokens only.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Tokenised {
    /// Tokens, also of rows that were cut or left out later.
    pub tokens: usize,
    /// From the first byte read to the last one written.
    pub milliseconds: u64,
}

/// One data file, for provenance.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DataFile {
    /// As the recipe, or its glob, names it.
    pub path: PathBuf,
    /// Of its bytes; absent with `data.limit`, which does not read all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Of the tokens and labels that came of it (the footer of their file, with a checksum of each batch).
    pub tokens_sha256: String,
    /// Its rows, dropped ones included.
    pub rows: usize,
    /// Rows of it that were dropped or skipped.
    #[serde(skip)]
    pub left_out: usize,
    /// Whether it had to be tokenised.
    pub cache: CacheUse,
}

/// Counts of rows by outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows that the files have.
    pub read: usize,
    pub rows: usize,
    pub tokens: usize,
    /// Those of them that carry loss: each is a target of the tokens before it.
    pub tokens_with_loss: usize,
    /// Rows cut to the maximal length.
    pub truncated: usize,
    /// Rows that became several, and how many they became.
    pub split: usize,
    pub pieces: usize,
    /// BOS tokens that later pieces repeat; they are among `tokens`.
    pub repeated_tokens: usize,
    /// Tokens of rows beyond the maximal length that no row kept.
    pub lost_tokens: usize,
    /// Rows of tokens kept although no label of theirs is a target.
    pub without_targets: usize,
    /// Turns of the assistant of which the chat template leaves out thoughts, calls or all.
    #[serde(default)]
    pub shortened_turns: usize,
    /// Turns of the assistant whose calls are JSON in the text, because the chat template writes none.
    #[serde(default)]
    pub calls_as_text: usize,
    /// Rows left out, and why.
    pub dropped: BTreeMap<DropReason, usize>,
    /// Rows that are not right, by kind; without `--skip-bad-rows` the first one ends the run.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bad_rows: BTreeMap<String, BadRows>,
    /// Columns and keys of messages that are not read.
    #[serde(flatten)]
    pub others: OtherKeys,
}

/// Counts for one file, cached with its rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileSummary {
    /// The first of its bad rows is named by its place within the file, whatever its path is.
    pub(super) counts: RowCounts,
    /// Whether any conversation became tokens.
    pub(super) rendered: bool,
}

/// What was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The files, in reading order.
    pub files: Vec<DataFile>,
    /// Of the rows of all files.
    #[serde(flatten)]
    pub counts: RowCounts,
    /// Text files beside the files of a folder.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub texts_left_out: Vec<PathBuf>,
    /// Splits of data sets that are not read, where a folder names its splits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub splits_left_out: Vec<LeftOutSplits>,
    /// Tokens of the longest row: `data.max_length`, or the backbone's context.
    #[serde(skip)]
    pub max_length: usize,
    /// Whether any conversation became tokens.
    #[serde(skip)]
    pub has_conversations: bool,
    /// Rows kept of each entry of the list.
    #[serde(skip)]
    pub rows_of_entries: Vec<usize>,
    /// Files of each entry of the list.
    #[serde(skip)]
    pub files_of_entries: Vec<usize>,
    /// What tokenising took, of the files that the cache did not have; absent where nothing had to be tokenised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenised: Option<Tokenised>,
}

impl FileSummary {
    /// Fits a row to the maximal length, counts it, and returns what is kept of it: nothing, the row, or its pieces.
    pub(super) fn admit(&mut self, row: ReadRow, fit: &RowFit) -> Vec<TokenRow> {
        let ReadRow { tokens, of, exchanges, shortened_turns, calls_as_text } = row;
        self.rendered |= of == RowForm::Conversation;
        let (length, is_long) = (tokens.input_ids.len(), fit.is_too_long(&tokens));
        let mut pieces = fit.of(tokens, &exchanges);
        let has_answer = matches!(of, RowForm::Conversation | RowForm::Pair);
        pieces.retain(|piece| piece.row.input_ids.len() > 1 && (!has_answer || piece.row.has_target()));
        let repeated: usize = pieces.iter().map(|piece| piece.lead).sum();
        let kept: Vec<TokenRow> = pieces.into_iter().map(|piece| piece.row).collect();
        self.counts.repeated_tokens += repeated;
        if is_long {
            let tokens: usize = kept.iter().map(|row| row.input_ids.len()).sum();
            self.counts.lost_tokens += length + repeated - tokens;
        }
        match kept.len() {
            0 if length < 2 => self.leave_out(DropReason::FewerThanTwoTokens),
            0 if is_long && fit.long_rows == LongRows::Drop => self.leave_out(DropReason::TooLong),
            0 => self.leave_out(DropReason::NoLabelLeft),
            _ => {
                self.counts.shortened_turns += shortened_turns;
                self.counts.calls_as_text += calls_as_text;
                self.keep(&kept, is_long, is_long && fit.long_rows == LongRows::Truncate);
            }
        }
        kept
    }

    fn keep(&mut self, kept: &[TokenRow], was_long: bool, was_cut: bool) {
        let (counts, pieces) = (&mut self.counts, kept.len());
        counts.read += 1;
        counts.rows += pieces;
        counts.truncated += usize::from(was_cut);
        if was_long && pieces > 1 {
            counts.split += 1;
            counts.pieces += pieces;
        }
        for row in kept {
            let targets = targets(row);
            counts.tokens += row.input_ids.len();
            counts.tokens_with_loss += targets;
            counts.without_targets += usize::from(targets == 0);
        }
    }

    /// Counts a row that is left out.
    pub(super) fn leave_out(&mut self, reason: DropReason) {
        self.counts.read += 1;
        leave_out(&mut self.counts.dropped, reason, 1);
    }

    /// Counts a row that is not right.
    ///
    /// # Errors
    /// The row's own, where it is not the row's fault.
    pub(super) fn skip(&mut self, error: RowError) -> Result<(), RowError> {
        let Some(kind) = error.problem.kind() else { return Err(error) };
        self.counts.read += 1;
        let row = error.place.row.map(|(kind, number)| format!(", {kind} {number}")).unwrap_or_default();
        let first = format!("{row}: {}", error.problem);
        self.counts.bad_rows.entry(kind.to_owned()).or_insert(BadRows { rows: 0, first }).rows += 1;
        Ok(())
    }
}

impl RowCounts {
    /// Rows dropped or skipped.
    pub(super) fn left_out(&self) -> usize {
        self.dropped.values().sum::<usize>() + self.bad_rows.values().map(|bad| bad.rows).sum::<usize>()
    }

    /// Rows kept; the pieces of a long one count once.
    pub fn whole_rows(&self) -> usize {
        self.rows + self.split - self.pieces
    }

    /// The tokens that rows lost to `max_length`, of all that were read: from 0 to 1.
    pub fn lost_fraction(&self) -> f64 {
        self.lost_tokens as f64 / (self.tokens - self.repeated_tokens + self.lost_tokens).max(1) as f64
    }

    fn loss_in_words(&self) -> String {
        if self.lost_tokens == 0 {
            return String::new();
        }
        let percent = 100.0 * self.lost_fraction();
        let percent = if percent < 0.1 { "less than 0.1".to_owned() } else { format!("{percent:.1}") };
        let too_long = self.dropped.get(&DropReason::TooLong).copied().unwrap_or(0);
        let advice = match self.truncated + too_long {
            0 => "",
            _ => "; data.long_rows = \"split\" (--long-rows split) keeps them",
        };
        format!(", {percent} % of all tokens lost{advice}")
    }
}

impl LoadReport {
    /// Takes in what came of a file.
    pub(super) fn add(&mut self, file: RowCounts, path: &Path) {
        let all = &mut self.counts;
        all.read += file.read;
        all.rows += file.rows;
        all.tokens += file.tokens;
        all.tokens_with_loss += file.tokens_with_loss;
        all.truncated += file.truncated;
        all.split += file.split;
        all.pieces += file.pieces;
        all.repeated_tokens += file.repeated_tokens;
        all.lost_tokens += file.lost_tokens;
        all.without_targets += file.without_targets;
        all.shortened_turns += file.shortened_turns;
        all.calls_as_text += file.calls_as_text;
        for (reason, count) in file.dropped {
            leave_out(&mut all.dropped, reason, count);
        }
        for (kind, bad) in file.bad_rows {
            let first = format!("{}{}", path.display(), bad.first);
            all.bad_rows.entry(kind).or_insert(BadRows { rows: 0, first }).rows += bad.rows;
        }
        all.others.add(file.others);
    }

    /// Takes in what tokenising a file took; rows of token ids take none.
    pub(super) fn add_time(&mut self, file: Tokenised) {
        if file.tokens == 0 {
            return;
        }
        let all = self.tokenised.get_or_insert_default();
        all.tokens += file.tokens;
        all.milliseconds += file.milliseconds;
    }

    /// Counts rows as skipped that were counted as kept. `first` is the problem of the first.
    pub(super) fn skip(&mut self, kind: &str, first: &str, rows: &[LeftOutRow]) {
        let first = BadRows { rows: 0, first: first.to_owned() };
        self.counts.bad_rows.entry(kind.to_owned()).or_insert(first).rows += rows.len();
        self.counts.rows -= rows.len();
        for LeftOutRow { tokens, targets, .. } in rows {
            self.counts.tokens -= tokens;
            self.counts.tokens_with_loss -= targets;
            self.counts.without_targets -= usize::from(*targets == 0);
        }
        let (mut places, mut end) = (rows.iter().map(|row| row.at).peekable(), 0);
        for count in &mut self.rows_of_entries {
            end += *count;
            while places.next_if(|at| *at < end).is_some() {
                *count -= 1;
            }
        }
    }

    /// What to do where all rows are conversations in which the assistant says nothing.
    pub(super) fn no_answers(&self) -> Option<&'static str> {
        let unanswered = self.counts.dropped.get(&DropReason::NoAssistantTurn);
        (unanswered == Some(&self.counts.read)).then_some(NO_ANSWERS)
    }

    /// How many conversations the template refused, and its words for most of them.
    pub(super) fn refusals(&self) -> Option<(usize, String)> {
        let refusals = self.counts.dropped.iter().filter_map(|(reason, count)| match reason {
            DropReason::TemplateRefuses(words) => Some((*count, words)),
            _ => None,
        });
        let (_, words) = refusals.clone().max()?;
        Some((refusals.map(|(count, _)| count).sum(), words.clone()))
    }
}

impl PartialEq for Tokenised {
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl Eq for Tokenised {}

impl fmt::Display for Tokenised {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, speed) = (self.milliseconds as f64 / 1000.0, self.tokens_per_second());
        write!(out, "{} tokens in {seconds:.1} s, {speed:.0} tokens/s", self.tokens)
    }
}

impl Tokenised {
    pub fn tokens_per_second(&self) -> f64 {
        1000.0 * self.tokens as f64 / self.milliseconds.max(1) as f64
    }
}

/// A row that was counted as kept and is not.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftOutRow {
    /// Its place among those kept.
    pub(super) at: usize,
    tokens: usize,
    targets: usize,
}

impl LeftOutRow {
    pub(super) fn new(at: usize, row: &TokenRow) -> Self {
        Self { at, tokens: row.input_ids.len(), targets: targets(row) }
    }
}

/// Tokens of a row that the tokens before them learn.
fn targets(row: &TokenRow) -> usize {
    row.labels.iter().skip(1).filter(|label| **label != IGNORE).count()
}

/// Counts rows that are left out.
pub(super) fn leave_out(dropped: &mut BTreeMap<DropReason, usize>, reason: DropReason, count: usize) {
    let is_refusal = |reason: &DropReason| matches!(reason, DropReason::TemplateRefuses(_));
    let is_new = is_refusal(&reason) && !dropped.contains_key(&reason);
    let reason = match is_new && dropped.keys().filter(|known| is_refusal(known)).count() >= REFUSALS_KEPT_APART {
        true => DropReason::TemplateRefuses("in other words".to_owned()),
        false => reason,
    };
    *dropped.entry(reason).or_default() += count;
}

impl fmt::Display for LoadReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowCounts { rows, tokens, tokens_with_loss, .. } = &self.counts;
        let (rows, files) = (counted(*rows, "row"), counted(self.files.len(), "file"));
        write!(out, "{rows} with {tokens} tokens ({tokens_with_loss} with loss) in {files}")?;
        let mut also = |count: usize, what: &str| if count > 0 { write!(out, ", {count} {what}") } else { Ok(()) };
        let limit = counted(self.max_length, "token");
        also(self.counts.split, &format!("longer than {limit}, split into {}", self.counts.pieces))?;
        also(self.counts.truncated, &format!("cut to {limit}"))?;
        also(self.counts.without_targets, "without a target")?;
        let answers = |count: usize| if count == 1 { "answer" } else { "answers" };
        let short = self.counts.shortened_turns;
        also(short, &format!("{} shortened by the chat template (left out: thoughts or calls)", answers(short)))?;
        let with_calls = self.counts.calls_as_text;
        also(with_calls, &format!("{} with calls as text (the chat template writes no calls)", answers(with_calls)))?;
        for (reason, count) in &self.counts.dropped {
            also(*count, &format!("dropped ({reason})"))?;
        }
        write!(out, "{}", self.counts.loss_in_words())?;
        for (kind, bad) in &self.counts.bad_rows {
            write!(out, ", {} skipped ({kind}; first {})", bad.rows, bad.first)?;
        }
        if !self.counts.others.not_read.is_empty() {
            write!(out, "; not read: {}", self.counts.others)?;
        }
        if let Some(first) = self.texts_left_out.first() {
            let texts = counted(self.texts_left_out.len(), "text file");
            write!(
                out,
                "; not read: {texts} beside other data files ({}); name such files to read them",
                first.display()
            )?;
        }
        for LeftOutSplits { path, splits } in &self.splits_left_out {
            let words = if splits.len() == 1 { "the split" } else { "the splits" };
            write!(out, "; not read: {words} {} that {} names", splits.join(", "), path.display())?;
        }
        for file in &self.files {
            if let CacheUse::Rebuilt(how) = &file.cache {
                write!(out, "; tokenised {} again: {how}", file.path.display())?;
            }
        }
        Ok(())
    }
}

const REFUSES: &str = "template_refuses: ";
/// The reasons without words: as JSON has them, and for people.
const NAMES: [(DropReason, &str, &str); 10] = [
    (DropReason::TooLong, "too_long", "longer than max_length"),
    (DropReason::EmptyText, "empty_text", "empty text"),
    (DropReason::EmptyCompletion, "empty_completion", "empty completion"),
    (DropReason::FewerThanTwoTokens, "fewer_than_two_tokens", "fewer than two tokens"),
    (DropReason::EmptyConversation, "empty_conversation", "empty conversation"),
    (DropReason::NoAssistantTurn, "no_assistant_turn", "no turn of the assistant"),
    (DropReason::NoLearnedTurn, "no_learned_turn", "no turn of the assistant carries loss"),
    (DropReason::UnknownRole, "unknown_role", "a role that is not known"),
    (DropReason::AnswersNotFound, "answers_not_found", "the chat template changes the answers"),
    (DropReason::NoLabelLeft, "no_label_left", "no answer within max_length"),
];

impl DropReason {
    /// What a reason is called in JSON, and what it is for people.
    fn words(&self) -> (String, String) {
        match self {
            Self::TemplateRefuses(words) => {
                (format!("{REFUSES}{words}"), format!("the chat template refuses it: {words}"))
            }
            plain => {
                let named = NAMES.iter().find(|(known, ..)| known == plain);
                let (_, name, words) = named.expect("the table has every reason without words");
                ((*name).to_owned(), (*words).to_owned())
            }
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.words().1)
    }
}

impl From<DropReason> for String {
    fn from(reason: DropReason) -> Self {
        reason.words().0
    }
}

impl TryFrom<String> for DropReason {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if let Some(words) = name.strip_prefix(REFUSES) {
            return Ok(Self::TemplateRefuses(words.to_owned()));
        }
        let known = NAMES.into_iter().find(|(_, known, _)| *known == name);
        known.map(|(reason, ..)| reason).ok_or_else(|| format!("{name:?} is no reason to leave a row out"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_a_key_of_json_and_back() {
        let reasons = NAMES.map(|(reason, ..)| reason).into_iter().chain([DropReason::TemplateRefuses("a: b".into())]);
        let counts: BTreeMap<DropReason, usize> = reasons.zip(1..).collect();
        let json = serde_json::to_string(&counts).unwrap();
        assert!(
            json.contains(r#""fewer_than_two_tokens":4"#) && json.contains(r#""template_refuses: a: b":11"#),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<BTreeMap<DropReason, usize>>(&json).unwrap(), counts);
        assert!(serde_json::from_str::<DropReason>("\"tired\"").is_err());
    }

    #[test]
    fn repeated_bos_hides_no_lost_token() {
        let labels: Vec<i32> = (1..10).map(|id| if id < 7 { IGNORE } else { id }).collect();
        let tokens = TokenRow { input_ids: (1..10).collect(), labels };
        let mut summary = FileSummary::default();
        let fit = RowFit { max_length: 4, long_rows: LongRows::Split, bos: Some(1) };
        let kept = summary.admit(ReadRow::new(tokens, RowForm::Conversation), &fit);
        let kept: Vec<Vec<i32>> = kept.into_iter().map(|row| row.input_ids).collect();
        assert_eq!(kept, [vec![1, 5, 6, 7], vec![1, 8, 9]], "no token of the first piece is a target");
        let counts = summary.counts;
        assert_eq!((counts.tokens, counts.repeated_tokens, counts.lost_tokens), (7, 2, 4));
        assert_eq!(counts.lost_fraction(), 4.0 / 9.0);
    }

    #[test]
    fn a_template_that_names_the_row_does_not_fill_the_report() {
        let mut dropped = BTreeMap::new();
        for row in 0..20 {
            leave_out(&mut dropped, DropReason::TemplateRefuses(format!("row {row}")), 1);
        }
        leave_out(&mut dropped, DropReason::TemplateRefuses("row 3".to_owned()), 2);
        leave_out(&mut dropped, DropReason::UnknownRole, 1);
        assert_eq!((dropped.len(), dropped.values().sum::<usize>()), (REFUSALS_KEPT_APART + 2, 23));
        assert_eq!(dropped[&DropReason::TemplateRefuses("in other words".to_owned())], 12);
    }
}
