//! Answers: whole, or in chunks of a stream.

use serde_json::{Map, Value, json};

use super::Endpoint;
use crate::decode::request::FinishReason;

/// What all chunks of an answer have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerHead {
    /// Starts with [`Endpoint::id_prefix`].
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// As the client named it.
    pub model: String,
    /// Decides the shape.
    pub endpoint: Endpoint,
    /// `stream_options.include_usage`: every chunk has a `usage`, null in all but the last.
    pub include_usage: bool,
}

/// A choice, or what a chunk adds to it.
#[derive(Debug, Clone, Copy)]
pub struct ChoicePart<'a> {
    /// Prompt times samples plus sample.
    pub index: usize,
    /// What is new.
    pub text: &'a str,
    /// Why it ended, if it did.
    pub finish: Option<FinishReason>,
    /// The tokens of `text`, where the client asked for them.
    pub logprobs: Option<&'a [ShownToken]>,
    /// Characters of the choice's tokens before these, for `text_offset`.
    pub text_offset: usize,
    /// The new tokens, where the client asked for them.
    pub token_ids: Option<&'a [i64]>,
    /// The prompt's tokens, where the client asked for them: in a whole answer, and in a choice's first chunk.
    pub prompt_token_ids: Option<&'a [i64]>,
}

/// A token as `logprobs` show it.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownToken {
    /// Its text; of bytes that are no character, as `bytes:\xe2\x80`.
    pub text: String,
    /// What it adds to the text.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// The most probable tokens at its place: text, bytes, logprob.
    pub top: Vec<(String, Vec<u8>, f64)>,
}

/// Tokens that a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of all prompts.
    pub prompt_tokens: usize,
    /// Of these, from the prefix cache.
    pub cached_tokens: usize,
    /// Generated for all choices, those that end a text included, as in vLLM.
    pub completion_tokens: usize,
    pub accepted_draft_tokens: usize,
    /// Draft tokens that were not.
    pub rejected_draft_tokens: usize,
}

impl Usage {
    /// `usage` of an answer.
    pub fn to_json(self) -> Value {
        let mut usage = self.counts();
        usage["prompt_tokens_details"] = json!({ "cached_tokens": self.cached_tokens });
        usage["completion_tokens_details"] = json!({
            "accepted_prediction_tokens": self.accepted_draft_tokens,
            "rejected_prediction_tokens": self.rejected_draft_tokens,
        });
        usage
    }

    /// `usage` of an answer that breaks off: what cache and drafter did for a text is known at its end.
    pub fn counts(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        })
    }
}

impl AnswerHead {
    /// A whole answer.
    pub fn whole(&self, choices: &[ChoicePart], usage: Usage) -> Value {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completions => "text_completion",
        };
        let shown = choices.iter().map(|part| self.choice(part, "message")).collect();
        let mut answer = self.around(object, shown);
        if self.endpoint == Endpoint::Chat {
            insert_ids(&mut answer, "prompt_token_ids", choices.first().and_then(|part| part.prompt_token_ids));
        }
        answer.insert("usage".to_owned(), usage.to_json());
        answer.into()
    }

    /// The first chunk of a choice, which names the role; completions have none.
    pub fn first_chunk(&self, index: usize, prompt_token_ids: Option<&[i64]>) -> Option<Value> {
        if self.endpoint == Endpoint::Completions {
            return None;
        }
        let delta = json!({ "role": "assistant", "content": "", "refusal": null });
        let choice = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
        let mut chunk = self.chunk_around(vec![choice], Value::Null);
        insert_ids(&mut chunk, "prompt_token_ids", prompt_token_ids);
        Some(chunk.into())
    }

    /// A chunk of a choice.
    pub fn chunk(&self, part: &ChoicePart) -> Value {
        self.chunk_around(vec![self.choice(part, "delta")], Value::Null).into()
    }

    /// The last chunk of a stream with `include_usage`.
    pub fn usage_chunk(&self, usage: Usage) -> Value {
        self.chunk_around(Vec::new(), usage.to_json()).into()
    }

    fn chunk_around(&self, choices: Vec<Value>, usage: Value) -> Map<String, Value> {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        };
        let mut chunk = self.around(object, choices);
        if self.include_usage {
            chunk.insert("usage".to_owned(), usage);
        }
        chunk
    }

    fn around(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let fields = [
            ("id", json!(self.id)),
            ("object", json!(object)),
            ("created", json!(self.created)),
            ("model", json!(self.model)),
            ("choices", choices.into()),
        ];
        fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// A choice; in a chat, its text is the content of `holder`.
    fn choice(&self, part: &ChoicePart, holder: &str) -> Value {
        let mut choice = Map::from_iter([("index".to_owned(), json!(part.index))]);
        let logprobs = match self.endpoint {
            Endpoint::Chat => {
                choice.insert(holder.to_owned(), said(part, holder == "message"));
                part.logprobs.map(chat_logprobs)
            }
            Endpoint::Completions => {
                choice.insert("text".to_owned(), json!(part.text));
                insert_ids(&mut choice, "prompt_token_ids", part.prompt_token_ids);
                part.logprobs.map(|tokens| completion_logprobs(tokens, part.text_offset))
            }
        };
        choice.insert("logprobs".to_owned(), json!(logprobs));
        choice.insert("finish_reason".to_owned(), json!(part.finish.map(finish_name)));
        insert_ids(&mut choice, "token_ids", part.token_ids);
        choice.into()
    }
}

/// A message, or a chunk's part of one: nothing where the chunk only ends it.
fn said(part: &ChoicePart, is_whole: bool) -> Value {
    match (is_whole, part.text) {
        (true, text) => json!({ "role": "assistant", "content": text, "refusal": null }),
        (false, "") => json!({}),
        (false, text) => json!({ "content": text }),
    }
}

fn insert_ids(fields: &mut Map<String, Value>, key: &str, ids: Option<&[i64]>) {
    if let Some(ids) = ids {
        fields.insert(key.to_owned(), json!(ids));
    }
}

pub(in crate::serve) fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Eos | FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Stopped => "abort", // as vLLM spells it; a client that is there never sees it
    }
}

/// JSON has no infinity; OpenAI's API writes this for tokens that cannot come.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

fn chat_logprobs(tokens: &[ShownToken]) -> Value {
    let entry =
        |text: &str, bytes: &[u8], logprob: f64| json!({ "token": text, "bytes": bytes, "logprob": finite(logprob) });
    let content = tokens.iter().map(|token| {
        let top = token.top.iter().map(|(text, bytes, logprob)| entry(text, bytes, *logprob));
        let mut shown = entry(&token.text, &token.bytes, token.logprob);
        shown["top_logprobs"] = top.collect();
        shown
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

fn completion_logprobs(tokens: &[ShownToken], text_offset: usize) -> Value {
    let starts = tokens.iter().scan(text_offset, |end, token| {
        let start = *end;
        *end += token.text.chars().count();
        Some(start)
    });
    json!({
        "tokens": tokens.iter().map(|token| &token.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| finite(token.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top_of_completion).collect::<Vec<_>>(),
        "text_offset": starts.collect::<Vec<_>>(),
    })
}

/// The most probable tokens, and the chosen one where it is not among them.
fn top_of_completion(token: &ShownToken) -> Map<String, Value> {
    let top = token.top.iter().map(|(text, _, logprob)| (text, logprob));
    let shown = top.chain([(&token.text, &token.logprob)]);
    shown.map(|(text, logprob)| (text.clone(), json!(finite(*logprob)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(endpoint: Endpoint, include_usage: bool) -> AnswerHead {
        AnswerHead { id: "a-1".to_owned(), created: 7, model: "m".to_owned(), endpoint, include_usage }
    }

    fn part<'a>(index: usize, text: &'a str, finish: Option<FinishReason>) -> ChoicePart<'a> {
        let (logprobs, token_ids, prompt_token_ids) = (None, None, None);
        ChoicePart { index, text, finish, logprobs, text_offset: 0, token_ids, prompt_token_ids }
    }

    fn tokens() -> Vec<ShownToken> {
        let token = |text: &str, bytes: &[u8], logprob| ShownToken {
            text: text.to_owned(),
            bytes: bytes.to_vec(),
            logprob,
            top: vec![("b".to_owned(), b"b".to_vec(), -0.5)],
        };
        vec![token("é", "é".as_bytes(), -1.5), token("bytes:\\xe2", b"\xe2", f64::NEG_INFINITY), token("a", b"a", -3.0)]
    }

    const USAGE: Usage = Usage {
        prompt_tokens: 5,
        cached_tokens: 4,
        completion_tokens: 3,
        accepted_draft_tokens: 2,
        rejected_draft_tokens: 1,
    };

    fn usage() -> Value {
        json!({
            "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
        })
    }

    #[test]
    fn a_whole_answer() {
        let ended = [(FinishReason::Eos, "stop"), (FinishReason::Stop, "stop"), (FinishReason::Length, "length")];
        for (finish, name) in ended {
            let parts = [part(0, "a", Some(finish)), part(1, "", Some(finish))];
            let message = |text| json!({"role": "assistant", "content": text, "refusal": null});
            let expected = json!({
                "id": "a-1", "object": "chat.completion", "created": 7, "model": "m", "usage": usage(), "choices": [
                    {"index": 0, "message": message("a"), "logprobs": null, "finish_reason": name},
                    {"index": 1, "message": message(""), "logprobs": null, "finish_reason": name},
                ],
            });
            assert_eq!(head(Endpoint::Chat, false).whole(&parts, USAGE), expected);
            let expected = json!({
                "id": "a-1", "object": "text_completion", "created": 7, "model": "m", "usage": usage(), "choices": [
                    {"index": 0, "text": "a", "logprobs": null, "finish_reason": name},
                    {"index": 1, "text": "", "logprobs": null, "finish_reason": name},
                ],
            });
            assert_eq!(head(Endpoint::Completions, false).whole(&parts, USAGE), expected);
        }
    }

    #[test]
    fn chunks_of_a_chat() {
        let chunk = |choice| json!({"id": "a-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice]});
        let head = head(Endpoint::Chat, false);
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        let first = json!({"index": 1, "delta": role, "logprobs": null, "finish_reason": null});
        assert_eq!(head.first_chunk(1, None), Some(chunk(first.clone())));
        let mut with_ids = chunk(first);
        with_ids["prompt_token_ids"] = json!([1, 2]);
        assert_eq!(head.first_chunk(1, Some(&[1, 2])), Some(with_ids));
        let next = json!({"index": 1, "delta": {"content": "a"}, "logprobs": null, "finish_reason": null});
        assert_eq!(head.chunk(&part(1, "a", None)), chunk(next));
        let last = json!({"index": 1, "delta": {}, "logprobs": null, "finish_reason": "length"});
        assert_eq!(head.chunk(&part(1, "", Some(FinishReason::Length))), chunk(last));
    }

    #[test]
    fn chunks_of_a_completion() {
        let head = head(Endpoint::Completions, false);
        assert_eq!(head.first_chunk(0, None), None);
        let choice = json!({"index": 0, "text": "a", "logprobs": null, "finish_reason": "stop"});
        let expected =
            json!({"id": "a-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]});
        assert_eq!(head.chunk(&part(0, "a", Some(FinishReason::Eos))), expected);
    }

    #[test]
    fn usage_is_null_in_all_chunks_but_the_last() {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            let head = head(endpoint, true);
            let chunks = head.first_chunk(0, None).into_iter().chain([head.chunk(&part(0, "a", None))]);
            for chunk in chunks {
                assert_eq!(chunk.get("usage"), Some(&Value::Null), "{chunk}");
            }
            let last = head.usage_chunk(USAGE);
            assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &usage()));
        }
    }

    #[test]
    fn logprobs_have_the_endpoints_shape() {
        let tokens = tokens();
        let part = ChoicePart { logprobs: Some(&tokens), text_offset: 10, ..part(0, "é", None) };
        let shown =
            |token: &str, bytes: Value, logprob: f64| json!({"token": token, "bytes": bytes, "logprob": logprob});
        let with_top = |token, bytes, logprob| {
            let mut one = shown(token, bytes, logprob);
            one["top_logprobs"] = json!([shown("b", json!([98]), -0.5)]);
            one
        };
        let content = [
            with_top("é", json!([0xc3, 0xa9]), -1.5),
            with_top("bytes:\\xe2", json!([0xe2]), -9999.0),
            with_top("a", json!([97]), -3.0),
        ];
        let chunk = head(Endpoint::Chat, false).chunk(&part);
        assert_eq!(chunk["choices"][0]["logprobs"], json!({"content": content, "refusal": null}));
        let chunk = head(Endpoint::Completions, false).chunk(&part);
        let expected = json!({
            "tokens": ["é", "bytes:\\xe2", "a"], "token_logprobs": [-1.5, -9999.0, -3.0],
            "top_logprobs": [{"b": -0.5, "é": -1.5}, {"b": -0.5, "bytes:\\xe2": -9999.0}, {"b": -0.5, "a": -3.0}],
            "text_offset": [10, 11, 21],
        });
        assert_eq!(chunk["choices"][0]["logprobs"], expected);
    }

    #[test]
    fn token_ids_are_where_vllm_has_them() {
        let ids = ChoicePart { token_ids: Some(&[3]), prompt_token_ids: Some(&[1, 2]), ..part(0, "a", None) };
        let chat = head(Endpoint::Chat, false).whole(&[ids], USAGE);
        assert_eq!((&chat["prompt_token_ids"], &chat["choices"][0]["token_ids"]), (&json!([1, 2]), &json!([3])));
        assert_eq!(chat["choices"][0].get("prompt_token_ids"), None);
        let completion = head(Endpoint::Completions, false).whole(&[ids], USAGE);
        let choice = &completion["choices"][0];
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!([1, 2]), &json!([3])));
        assert_eq!(completion.get("prompt_token_ids"), None);
    }
}
