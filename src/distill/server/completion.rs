//! A server's answer, as it came.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

use crate::decode::request::FinishReason;
use crate::distill::refusal::Refusal;

/// What is wrong with an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AnswerFault {
    /// It is none of the API, or not whole. The words may quote the server.
    Unreadable(String),
    /// There is no text, and another attempt would bring none.
    Refused(Refusal),
}

/// A checked answer of either endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) model: Option<String>,
    pub(super) text: String,
    /// What a reasoning parser took away from the text; not empty.
    pub(super) reasoning: Option<String>,
    pub(super) finish_reason: FinishReason,
    pub(super) prompt_ids: Option<Vec<i64>>,
    /// The new tokens; an EOS may be the last of them.
    pub(super) ids: Option<Vec<i64>>,
    pub(super) prompt_tokens: Option<usize>,
    /// With the EOS or without.
    pub(super) completion_tokens: Option<usize>,
}

/// The fields of an answer that are read.
#[derive(Debug, Deserialize)]
pub(super) struct WholeAnswer {
    model: Option<String>,
    choices: AnswerChoices,
    usage: Option<AnswerUsage>,
    prompt_token_ids: Option<Vec<i64>>,
}

/// One choice was asked for: others are counted and take no memory.
#[derive(Debug)]
struct AnswerChoices {
    first: Option<AnswerChoice>,
    count: usize,
}

impl<'de> Deserialize<'de> for AnswerChoices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstOfList;

        impl<'de> Visitor<'de> for FirstOfList {
            type Value = AnswerChoices;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<AnswerChoices, A::Error> {
                let first = list.next_element()?;
                let mut count = usize::from(first.is_some());
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(AnswerChoices { first, count })
            }
        }

        deserializer.deserialize_seq(FirstOfList)
    }
}

#[derive(Debug, Deserialize)]
struct AnswerChoice {
    /// Of /v1/completions.
    text: Option<String>,
    /// Of /v1/chat/completions.
    message: Option<AnswerMessage>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<i64>>,
    prompt_token_ids: Option<Vec<i64>>,
}

#[derive(Debug, Deserialize)]
struct AnswerMessage {
    content: Option<String>,
    // Servers do not agree on the name for what a model thinks before it answers.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    /// OpenAI's, in place of the content.
    refusal: Option<String>,
}

/// Sums of more would be none that a server counted.
const MOST_TOKENS: usize = 1 << 32;

#[derive(Debug, Default, Deserialize)]
struct AnswerUsage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
}

impl Completion {
    /// # Errors
    /// What is wrong with the answer.
    pub(super) fn read(answer: WholeAnswer) -> Result<Self, AnswerFault> {
        let unreadable = AnswerFault::Unreadable;
        let choice = match answer.choices {
            AnswerChoices { first: Some(choice), count: 1 } => choice,
            AnswerChoices { count, .. } => {
                return Err(unreadable(format!("the answer has {count} choices; expected one")));
            }
        };
        let finish_reason = finish_reason(choice.finish_reason.as_deref())?;
        let (text, reasoning) = match (choice.message, choice.text) {
            (Some(message), _) => message.text()?,
            (None, Some(text)) => (text, None),
            (None, None) => return Err(unreadable("the answer has neither a message nor a text".to_owned())),
        };
        let usage = answer.usage.unwrap_or_default();
        let counts = [usage.prompt_tokens, usage.completion_tokens];
        if let Some(count) = counts.into_iter().flatten().find(|count| *count > MOST_TOKENS) {
            return Err(unreadable(format!("the answer's usage is {count} tokens; expected at most {MOST_TOKENS}")));
        }
        Ok(Self {
            model: answer.model,
            text,
            reasoning,
            finish_reason,
            prompt_ids: answer.prompt_token_ids.or(choice.prompt_token_ids),
            ids: choice.token_ids,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
        })
    }

    /// The new tokens, as far as the server reports them.
    pub(super) fn new_tokens(&self) -> usize {
        self.completion_tokens.or(self.ids.as_ref().map(Vec::len)).unwrap_or(0)
    }
}

impl AnswerMessage {
    /// Its text, and the reasoning that was taken away from it.
    fn text(self) -> Result<(String, Option<String>), AnswerFault> {
        let has_words = |text: &String| !text.trim().is_empty();
        let text = self.content.unwrap_or_default();
        let reasoning = self.reasoning_content.filter(has_words).or(self.reasoning.filter(has_words));
        match self.refusal.filter(has_words) {
            Some(words) if !has_words(&text) => Err(AnswerFault::Refused(Refusal::Words { words })),
            _ if reasoning.is_some() && !has_words(&text) => Err(AnswerFault::Refused(Refusal::ReasoningAlone)),
            _ => Ok((text, reasoning)),
        }
    }
}

/// As a shard records it. No stop strings are sent, so that only an EOS stops.
fn finish_reason(received: Option<&str>) -> Result<FinishReason, AnswerFault> {
    match received {
        Some("stop" | "eos" | "eos_token" | "stop_sequence") => Ok(FinishReason::Eos), // the last three are older TGI's
        Some("length") => Ok(FinishReason::Length),
        Some("content_filter") => Err(AnswerFault::Refused(Refusal::ContentFilter)),
        Some("tool_calls" | "function_call") => Err(AnswerFault::Refused(Refusal::ToolCall)),
        other => {
            let problem = format!("finish_reason is {}; expected \"stop\" or \"length\"", json_of(other));
            Err(AnswerFault::Unreadable(problem))
        }
    }
}

fn json_of(text: Option<&str>) -> String {
    text.map_or_else(|| "null".to_owned(), |text| format!("{text:?}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(json: Value) -> Result<Completion, AnswerFault> {
        let answer = serde_json::from_value(json).map_err(|why| AnswerFault::Unreadable(why.to_string()))?;
        Completion::read(answer)
    }

    #[test]
    fn both_endpoints_are_read_with_what_vllm_adds() {
        let chat = json!({"model": "m", "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 3},
            "choices": [{"message": {"role": "assistant", "content": "a", "reasoning_content": null}, "finish_reason": "stop",
                "token_ids": [5, 6, 7]}]});
        let received = read(chat).unwrap();
        assert_eq!(
            (received.text.as_str(), received.finish_reason, &received.reasoning),
            ("a", FinishReason::Eos, &None)
        );
        assert_eq!(
            (received.prompt_ids.as_deref(), received.ids.as_deref()),
            (Some(&[1, 2][..]), Some(&[5, 6, 7][..]))
        );
        assert_eq!(received.new_tokens(), 3);
        let raw = json!({"choices": [{"text": "b", "finish_reason": "length", "prompt_token_ids": [4]}]});
        let received = read(raw).unwrap();
        assert_eq!((received.text.as_str(), received.finish_reason), ("b", FinishReason::Length));
        assert_eq!((received.prompt_ids.as_deref(), received.new_tokens()), (Some(&[4][..]), 0));
        let thinks = json!({"choices": [{"message": {"content": "so", "reasoning": "hm"}, "finish_reason": "length"}]});
        assert_eq!(read(thinks).unwrap().reasoning.as_deref(), Some("hm"));
        let silent = json!({"choices": [{"message": {"content": null, "reasoning": " "}, "finish_reason": "stop"}]});
        assert_eq!(read(silent).unwrap().text, "", "the model ends at once");
    }

    #[test]
    fn an_answer_without_its_text_is_refused() {
        let words = Refusal::Words { words: "I cannot".into() };
        for (message, reason, refusal) in [
            (json!({"content": "half an ans"}), "content_filter", Refusal::ContentFilter),
            (json!({"content": null, "tool_calls": []}), "tool_calls", Refusal::ToolCall),
            (json!({"content": null, "refusal": "I cannot"}), "stop", words),
            (json!({"content": null, "reasoning_content": "hm"}), "length", Refusal::ReasoningAlone),
            (json!({"content": "\n", "reasoning_content": "", "reasoning": "hm"}), "stop", Refusal::ReasoningAlone),
        ] {
            let answer = json!({"choices": [{"message": message, "finish_reason": reason}]});
            assert_eq!(read(answer), Err(AnswerFault::Refused(refusal)), "{message}");
        }
    }

    #[test]
    fn what_is_no_answer_says_why() {
        for (json, words) in [
            (json!({}), "missing field `choices`"),
            (json!({"choices": []}), "0 choices"),
            (json!({"choices": [{"finish_reason": "stop"}]}), "neither a message nor a text"),
            (json!({"choices": [{"text": "a", "finish_reason": "abort"}]}), "\"abort\""),
            (json!({"choices": [{"text": "a", "finish_reason": null}]}), "finish_reason is null"),
            (json!({"choices": [{}, {}, {}]}), "3 choices"),
            (
                json!({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1_u64 << 63}}),
                "usage is 9223372036854775808 tokens",
            ),
            (json!([1]), "invalid type"),
        ] {
            let Err(AnswerFault::Unreadable(why)) = read(json.clone()) else { panic!("{json} is read") };
            assert!(why.contains(words), "{json}: {why}");
        }
    }
}
