//! A server's answer, as it came.

use serde::Deserialize;
use serde_json::Value;

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

#[derive(Debug, Deserialize)]
struct WholeAnswer {
    model: Option<String>,
    choices: Vec<AnswerChoice>,
    usage: Option<AnswerUsage>,
    prompt_token_ids: Option<Vec<i64>>,
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

#[derive(Debug, Deserialize)]
struct AnswerUsage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
}

impl Completion {
    /// # Errors
    /// What is wrong with the answer.
    pub(super) fn read(json: Value) -> Result<Self, AnswerFault> {
        let unreadable = AnswerFault::Unreadable;
        let answer: WholeAnswer =
            serde_json::from_value(json).map_err(|why| unreadable(format!("the answer is none of the API: {why}")))?;
        let [choice]: [AnswerChoice; 1] = answer
            .choices
            .try_into()
            .map_err(|choices: Vec<_>| unreadable(format!("the answer has {} choices; expected one", choices.len())))?;
        let finish_reason = finish_reason(choice.finish_reason.as_deref())?;
        let (text, reasoning) = match (choice.message, choice.text) {
            (Some(message), _) => message.text()?,
            (None, Some(text)) => (text, None),
            (None, None) => return Err(unreadable("the answer has neither a message nor a text".to_owned())),
        };
        let usage = answer.usage.as_ref();
        Ok(Self {
            model: answer.model,
            text,
            reasoning,
            finish_reason,
            prompt_ids: answer.prompt_token_ids.or(choice.prompt_token_ids),
            ids: choice.token_ids,
            prompt_tokens: usage.and_then(|usage| usage.prompt_tokens),
            completion_tokens: usage.and_then(|usage| usage.completion_tokens),
        })
    }

    /// The new tokens, as far as the server tells them.
    pub(super) fn new_tokens(&self) -> usize {
        self.completion_tokens.or(self.ids.as_ref().map(Vec::len)).unwrap_or(0)
    }
}

impl AnswerMessage {
    /// Its text, and the reasoning that was taken away from it.
    fn text(self) -> Result<(String, Option<String>), AnswerFault> {
        let is_told = |text: &String| !text.trim().is_empty();
        let text = self.content.unwrap_or_default();
        let reasoning = self.reasoning_content.filter(is_told).or(self.reasoning.filter(is_told));
        match self.refusal.filter(is_told) {
            Some(words) if !is_told(&text) => Err(AnswerFault::Refused(Refusal::Words { words })),
            _ if reasoning.is_some() && !is_told(&text) => Err(AnswerFault::Refused(Refusal::ReasoningAlone)),
            _ => Ok((text, reasoning)),
        }
    }
}

/// As a shard records it. No stop strings are sent, so that only an EOS stops.
fn finish_reason(told: Option<&str>) -> Result<FinishReason, AnswerFault> {
    match told {
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
    use serde_json::json;

    use super::*;

    #[test]
    fn both_endpoints_are_read_with_what_vllm_adds() {
        let chat = json!({"model": "m", "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 3},
            "choices": [{"message": {"role": "assistant", "content": "a", "reasoning_content": null}, "finish_reason": "stop",
                "token_ids": [5, 6, 7]}]});
        let read = Completion::read(chat).unwrap();
        assert_eq!((read.text.as_str(), read.finish_reason, &read.reasoning), ("a", FinishReason::Eos, &None));
        assert_eq!((read.prompt_ids.as_deref(), read.ids.as_deref()), (Some(&[1, 2][..]), Some(&[5, 6, 7][..])));
        assert_eq!(read.new_tokens(), 3);
        let raw = json!({"choices": [{"text": "b", "finish_reason": "length", "prompt_token_ids": [4]}]});
        let read = Completion::read(raw).unwrap();
        assert_eq!((read.text.as_str(), read.finish_reason), ("b", FinishReason::Length));
        assert_eq!((read.prompt_ids.as_deref(), read.new_tokens()), (Some(&[4][..]), 0));
        let thinks = json!({"choices": [{"message": {"content": "so", "reasoning": "hm"}, "finish_reason": "length"}]});
        assert_eq!(Completion::read(thinks).unwrap().reasoning.as_deref(), Some("hm"));
        let silent = json!({"choices": [{"message": {"content": null, "reasoning": " "}, "finish_reason": "stop"}]});
        assert_eq!(Completion::read(silent).unwrap().text, "", "the model ends at once");
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
            assert_eq!(Completion::read(answer), Err(AnswerFault::Refused(refusal)), "{message}");
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
            (json!([1]), "none of the API"),
        ] {
            let Err(AnswerFault::Unreadable(why)) = Completion::read(json.clone()) else { panic!("{json} is read") };
            assert!(why.contains(words), "{json}: {why}");
        }
    }
}
