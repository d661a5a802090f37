//! A row as its file has it: token ids, a text, a prompt with its completion or a conversation, which become tokens of the vocabulary here.

use super::chat::ConversationRenderer;
use super::conversation::{Message, TemplateInputs};
use super::pair;
use super::report::DropReason;
use super::rows::{IGNORE, ReadRow, RowForm, RowProblem, TokenRow};
use super::settings::LoadSettings;
use super::tokenize::TextTokenizer;

/// A row as its file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RawRow {
    Tokens {
        input_ids: Vec<i64>,
        labels: Option<Vec<i64>>,
    },
    Text(String),
    /// A text in two parts: what is given, and what is learned.
    Pair {
        prompt: String,
        completion: String,
    },
    Conversation {
        key: &'static str,
        messages: Vec<Message>,
        /// So many of them are given, whoever speaks; answers behind them are learned.
        given: usize,
        inputs: TemplateInputs,
    },
}

impl RawRow {
    /// Token ids with labels, or with a mask that is not 0 where a token carries loss; labels count before it.
    pub(super) fn of_tokens(
        input_ids: Vec<i64>,
        labels: Option<Vec<i64>>,
        loss_mask: Option<Vec<i64>>,
    ) -> Result<Self, RowProblem> {
        let Some(mask) = loss_mask.filter(|_| labels.is_none()) else {
            return Ok(Self::Tokens { input_ids, labels });
        };
        if mask.len() != input_ids.len() {
            return Err(RowProblem::LabelsLength { key: "loss_mask", ids: input_ids.len(), labels: mask.len() });
        }
        let label = |(&id, carries): (&i64, i64)| if carries == 0 { i64::from(IGNORE) } else { id };
        let labels = input_ids.iter().zip(mask).map(label).collect();
        Ok(Self::Tokens { input_ids, labels: Some(labels) })
    }

    pub(super) fn conversation(key: &'static str, messages: Vec<Message>, inputs: TemplateInputs) -> Self {
        Self::Conversation { key, messages, given: 0, inputs }
    }

    /// A prompt of messages and a completion of messages.
    pub(super) fn conversation_pair(prompt: Vec<Message>, completion: Vec<Message>, inputs: TemplateInputs) -> Self {
        let given = prompt.len();
        Self::Conversation { key: "prompt", messages: prompt.into_iter().chain(completion).collect(), given, inputs }
    }

    /// The row as tokens of the vocabulary, or why a conversation is left out.
    pub(super) fn read(self, settings: &LoadSettings) -> Result<Result<ReadRow, DropReason>, RowProblem> {
        let vocab_size = settings.vocab_size;
        let tokenizer = |key| -> Result<&TextTokenizer, RowProblem> {
            let tokenizer = settings.tokenizer.ok_or(RowProblem::NeedsTokenizer { key })?;
            tokenizer.check_vocabulary(vocab_size)?;
            Ok(tokenizer)
        };
        let (tokens, of) = match self {
            Self::Tokens { input_ids, labels } => {
                (TokenRow::checked(&input_ids, labels.as_deref(), vocab_size)?, RowForm::Tokens)
            }
            Self::Text(text) if text.trim().is_empty() => return Ok(Err(DropReason::EmptyText)),
            Self::Text(text) => (TokenRow::of_text(&text, tokenizer("text")?)?, RowForm::Text),
            Self::Pair { completion, .. } if completion.trim().is_empty() => {
                return Ok(Err(DropReason::EmptyCompletion));
            }
            Self::Pair { prompt, completion } => {
                let tokens = pair::row(&prompt, &completion, tokenizer("prompt")?, settings.loss_on)?;
                (tokens, RowForm::Pair)
            }
            Self::Conversation { key, messages, given, inputs } => {
                let tokenizer = tokenizer(key)?;
                let template = settings.template.ok_or(RowProblem::NeedsTemplate { key })?;
                let (loss_on, fit) = (settings.loss_on, settings.fit());
                let chat = ConversationRenderer { template, inputs: &inputs, tokenizer, loss_on, given, fit };
                return chat.row(&messages);
            }
        };
        Ok(Ok(ReadRow::new(tokens, of)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_stands_for_labels_where_there_are_none() {
        let of = |labels: Option<Vec<i64>>, mask: Option<Vec<i64>>| RawRow::of_tokens(vec![5, 6, 7], labels, mask);
        let tokens = |labels| RawRow::Tokens { input_ids: vec![5, 6, 7], labels };
        assert_eq!(of(None, Some(vec![0, 1, 1])).unwrap(), tokens(Some(vec![-100, 6, 7])));
        assert_eq!(of(Some(vec![5, -100, -100]), Some(vec![0, 1, 1])).unwrap(), tokens(Some(vec![5, -100, -100])));
        assert_eq!(of(None, None).unwrap(), tokens(None));
        let short = of(None, Some(vec![1])).unwrap_err().to_string();
        assert_eq!(short, "loss_mask: expected 3 values, one for each of input_ids, got 1");
    }
}
