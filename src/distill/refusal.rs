//! Why a server refuses a question for good.

use serde::{Deserialize, Serialize};

use crate::plural::counted;

/// Refused questions that a small folder may have without --max-refused, and that the end of a folder may have with no answer behind them.
pub const FEW_REFUSED: usize = 10;

/// Why a server has no answer to one question, which no other attempt changes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The request itself is refused.
    #[error("status {status}: {message}")]
    Status {
        status: u16,
        /// The server's words.
        message: String,
    },
    #[error("the server's content filter withholds the answer")]
    ContentFilter,
    #[error("the model refuses: {words}")]
    Words { words: String },
    #[error("the answer is the call of a tool")]
    ToolCall,
    /// The text is empty: the answer was cut while the model was reasoning.
    #[error("the answer has reasoning (reasoning_content) and no text")]
    ReasoningAlone,
    /// Every attempt failed, each time with an answer.
    #[error("{words}, after {}", counted(*attempts as usize, "attempt"))]
    Failing {
        /// Of the last attempt.
        words: String,
        attempts: u32,
    },
}

impl Refusal {
    /// Whether the server itself may be at fault, unless it answers another question later.
    pub(super) fn is_doubtful(&self) -> bool {
        matches!(self, Self::Failing { .. })
    }

    /// What can be done if there are many of them.
    pub(super) fn advice(&self) -> &'static str {
        match self {
            Self::Status { .. } => {
                "; --max-context N keeps prompts and answers within the server's context, --max-new-tokens N shortens answers"
            }
            Self::ReasoningAlone => {
                "; --max-new-tokens N leaves room for the text, or start the server without its reasoning parser"
            }
            Self::ContentFilter | Self::Words { .. } | Self::ToolCall | Self::Failing { .. } => "",
        }
    }
}

/// The turn at which a conversation was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedTurn {
    /// 1 for the first question: then the conversation has no row.
    pub turn: u64,
    /// In words.
    pub why: String,
}
