//! A row as its file has it: token ids, a text, a prompt with its completion or a conversation, which become tokens of the vocabulary here.

use super::chat::ConversationRenderer;
use super::conversation::{Message, TemplateInputs};
use super::pair;
use super::report::DropReason;
use super::rows::{ReadRow, RowForm, RowProblem, TokenRow};
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
            Self::Text(text) => (TokenRow::from_text(&text, tokenizer("text")?)?, RowForm::Text),
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
