//! A prompt and its completion, two strings, as tokens with a loss mask. No chat template renders them.

use super::chat::{self, LossOn};
use super::rows::TokenRow;
use super::tokenize::{TextTokenizer, TokenizeError};

/// Both as one text, which begins with BOS and ends with EOS as any other. Loss on the completion and the EOS; a token across the border
/// belongs to the completion. (TRL counts the tokens of the prompt alone, which is the same where no token lies across the border.)
pub(super) fn row(
    prompt: &str,
    completion: &str,
    tokenizer: &TextTokenizer,
    loss_on: LossOn,
) -> Result<TokenRow, TokenizeError> {
    let text = format!("{prompt}{completion}");
    if loss_on == LossOn::All {
        return TokenRow::from_text(&text, tokenizer);
    }
    let (mut input_ids, places) = tokenizer.encode_around(&text)?;
    let learned = prompt.len()..text.len();
    let mut labels = chat::labels(&input_ids, &places, std::slice::from_ref(&learned));
    if let Some(eos) = tokenizer.eos_id() {
        if input_ids.last() == Some(&eos) {
            labels.pop();
        } else {
            input_ids.push(eos);
        }
        labels.push(eos);
    }
    Ok(TokenRow { input_ids, labels })
}
