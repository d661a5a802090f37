//! The backbone's own answers: the text that heads are measured on. Text of others has tokens that this backbone would not write.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use crate::data::IGNORE;
use crate::data::cache::CacheError;
use crate::data::rows::TokenRow;
use crate::data::store::RowStore;
use crate::data::tokenize::{narrow, wide};
use crate::decode::batch::SequenceBatch;
use crate::decode::error::DecodeError;
use crate::decode::generate;
use crate::decode::request::{Generation, Request};
use crate::decode::texts::TextDecoder;
use crate::engine::fastest::fastest_for_batches;
use crate::model::llama::Llama;

/// The prompt of a row of plain text is the first of so many equal parts.
const PARTS_OF_TEXT: usize = 4;

/// Prompts of some rows.
#[derive(Debug)]
pub struct RowPrompts {
    /// Token ids, each with its number among all prompts (0-based).
    pub chosen: Vec<(usize, Vec<i64>)>,
    pub all: usize,
}

impl RowPrompts {
    /// At most `most` prompts, evenly spaced. There is one before each answer of a row, earlier answers included: before each stretch of
    /// labels. The prompt of a row of plain text, which has labels from its beginning, is its first quarter.
    ///
    /// # Errors
    /// A damaged token cache.
    pub fn of(rows: &RowStore, most: NonZeroUsize) -> Result<Self, CacheError> {
        let mut places = vec![];
        for (row, tokens) in rows.iter().enumerate() {
            places.extend(prompt_lengths(&tokens?.labels).into_iter().map(|length| (row, length)));
        }
        let (all, wanted) = (places.len(), most.get().min(places.len()));
        let prompt = |at: usize| {
            let index = at * all / wanted;
            let (row, length) = places[index];
            Ok((index, wide(&rows.row(row)?.input_ids[..length])))
        };
        Ok(Self { chosen: (0..wanted).map(prompt).collect::<Result<_, _>>()?, all })
    }
}

fn prompt_lengths(labels: &[i32]) -> Vec<usize> {
    let is_label = |at: usize| labels[at] != IGNORE;
    let begins = (0..labels.len()).filter(|&at| is_label(at) && (at == 0 || !is_label(at - 1)));
    begins.map(|begin| if begin > 1 { begin } else { (labels.len() / PARTS_OF_TEXT).max(1) }).collect()
}

/// A row with a prompt and the backbone's own answer, whose tokens are the targets (without the EOS, which no step commits).
///
/// # Errors
/// [`DecodeError`], with the fault of the prompt.
pub fn own_answer(backbone: &Llama, request: &Request) -> Result<TokenRow, DecodeError> {
    let said = generate::plain(backbone, request, &mut |_| ControlFlow::Continue(()))?;
    Ok(answered(request.prompt, &said))
}

fn answered(prompt: &[i64], said: &Generation) -> TokenRow {
    let (prompt, new_ids) = (narrow(prompt), narrow(&said.new_ids));
    let labels = [vec![IGNORE; prompt.len()], new_ids.clone()].concat();
    TokenRow { input_ids: [prompt, new_ids].concat(), labels }
}

/// How long and how many the answers of [`greedy_answers`] are.
#[derive(Debug, Clone, Copy)]
pub struct AnswerLimits {
    /// Texts that are decoded together.
    pub together: NonZeroUsize,
    /// Tokens of an answer.
    pub new_tokens: usize,
    /// Tokens of a prompt and its answer.
    pub length: usize,
}

/// Answers prompts greedily, as [`own_answer`], several at a time. After each step `on_step` gets the number of finished answers; `None` if it breaks.
///
/// # Errors
/// [`DecodeError`].
pub fn greedy_answers(
    backbone: &Llama,
    prompts: &[&[i64]],
    limits: AnswerLimits,
    on_step: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Option<Vec<TokenRow>>, DecodeError> {
    let mut batch = SequenceBatch::new(fastest_for_batches(backbone), None, limits.together);
    let mut rows = vec![None; prompts.len()];
    let (mut entered, mut ended) = (0, 0);
    while ended < prompts.len() {
        while batch.has_room() && entered < prompts.len() {
            let room = limits.length.saturating_sub(prompts[entered].len());
            batch.enter(entered, &Request::greedy(prompts[entered], limits.new_tokens.min(room)))?;
            entered += 1;
        }
        for (key, said) in batch.step()? {
            rows[key] = Some(answered(prompts[key], &said?));
            ended += 1;
        }
        if on_step(ended).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(rows.into_iter().flatten().collect()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::model::config::LlamaConfig;

    const X: i32 = IGNORE;

    #[test]
    fn a_prompt_is_what_stands_before_an_answer() {
        assert_eq!(prompt_lengths(&[X, X, 3, 4, X, 6]), [2, 5]);
        assert_eq!(prompt_lengths(&[X, 2, 3, 4, 5, 6, 7, 8]), [2], "plain text behind a BOS");
        assert_eq!(prompt_lengths(&[1, 2]), [1]);
        assert_eq!(prompt_lengths(&[X, X]), [0; 0]);
    }

    #[test]
    fn prompts_are_evenly_spaced() {
        let row = |first: i32| TokenRow { input_ids: vec![first, 1, 2, 3], labels: vec![X, X, 2, 3] };
        let rows = RowStore::in_memory((0..10).map(row));
        let some = |most| RowPrompts::of(&rows, NonZeroUsize::new(most).unwrap()).unwrap();
        let RowPrompts { chosen, all } = some(4);
        assert_eq!(all, 10);
        assert_eq!(chosen, [(0, vec![0, 1]), (2, vec![2, 1]), (5, vec![5, 1]), (7, vec![7, 1])]);
        assert_eq!(some(99).chosen.len(), 10);
        assert_eq!(RowPrompts::of(&RowStore::in_memory([]), NonZeroUsize::MIN).unwrap().chosen, []);
    }

    #[test]
    fn answers_are_those_of_one_text_at_a_time() {
        tch::set_num_threads(1);
        let llama = Llama::random(LlamaConfig::tiny(), Kind::Double, Device::Cpu, 4);
        let prompts: Vec<Vec<i64>> = (1..6).map(|length| (1..=length).collect()).collect();
        let prompts: Vec<&[i64]> = prompts.iter().map(Vec::as_slice).collect();
        let limits = AnswerLimits { together: NonZeroUsize::new(2).unwrap(), new_tokens: 6, length: 9 };
        let mut finished = vec![];
        let rows = greedy_answers(&llama, &prompts, limits, &mut |ended| {
            finished.push(ended);
            ControlFlow::Continue(())
        });
        let alone = |prompt: &&[i64]| {
            own_answer(&llama, &Request::greedy(prompt, 6.min(9 - prompt.len()))).expect("a prompt that fits")
        };
        assert_eq!(rows.unwrap(), Some(prompts.iter().map(alone).collect()));
        assert_eq!(finished.last(), Some(&5));
        let stopped = greedy_answers(&llama, &prompts, limits, &mut |_| ControlFlow::Break(()));
        assert_eq!(stopped.unwrap(), None);
    }
}
