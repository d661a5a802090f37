//! The text that heads are measured on: what the backbone itself answers. Text of others has tokens that this backbone would not write.

use std::ops::ControlFlow;

use crate::data::IGNORE;
use crate::data::rows::TokenRow;
use crate::data::tokenize::{narrow, wide};
use crate::decode::error::DecodeError;
use crate::decode::generate;
use crate::decode::request::{Generation, Request};
use crate::model::llama::Llama;

/// Of a row of plain text, the share that is the prompt: one of so many parts.
const PARTS_OF_TEXT: usize = 4;

/// A row with a prompt and the backbone's own answer, whose tokens are the targets (without the EOS, which no step commits).
///
/// # Errors
/// [`DecodeError`], with the fault of the prompt.
pub fn own_answer(backbone: &Llama, request: &Request) -> Result<TokenRow, DecodeError> {
    let Generation { new_ids, .. } = generate::plain(backbone, request, &mut |_| ControlFlow::Continue(()))?;
    let (prompt, new_ids) = (narrow(request.prompt), narrow(&new_ids));
    let labels = [vec![IGNORE; prompt.len()], new_ids.clone()].concat();
    Ok(TokenRow { input_ids: [prompt, new_ids].concat(), labels })
}

/// What stands before each answer of a row, earlier answers among it: before each stretch of labels. A row of plain text has labels from its
/// beginning; its first quarter is the prompt.
pub fn prompts_of(row: &TokenRow) -> Vec<Vec<i64>> {
    let is_label = |at: usize| row.labels[at] != IGNORE;
    let begins = (0..row.labels.len()).filter(|&at| is_label(at) && (at == 0 || !is_label(at - 1)));
    let length = |begin: usize| if begin > 1 { begin } else { (row.input_ids.len() / PARTS_OF_TEXT).max(1) };
    begins.map(|begin| wide(&row.input_ids[..length(begin)])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_what_stands_before_an_answer() {
        const X: i32 = IGNORE;
        let of = |labels: &[i32]| {
            let input_ids = (1..=labels.len() as i32).collect();
            prompts_of(&TokenRow { input_ids, labels: labels.to_vec() })
        };
        assert_eq!(of(&[X, X, 3, 4, X, 6]), [vec![1, 2], vec![1, 2, 3, 4, 5]]);
        assert_eq!(of(&[X, 2, 3, 4, 5, 6, 7, 8]), [vec![1, 2]], "plain text behind a BOS");
        assert_eq!(of(&[1, 2]), [vec![1]]);
        assert_eq!(of(&[X, X]), Vec::<Vec<i64>>::new());
    }
}
