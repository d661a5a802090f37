//! Fields for features that this server does not have. Clients often send them with a value that requests nothing; that value is accepted.

use std::fmt;

use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// The value with which a field requests nothing. Null always does.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    Null,
    Flag(bool),
    Number(f64),
    /// An empty string, list or object.
    Empty,
    Words(&'static [&'static str]),
    /// A list of this word.
    ListOf(&'static str),
}

use Neutral::{Empty, Flag, ListOf, Null, Number, Words};

/// Of OpenAI's API, and of vLLM's sampling parameters and additions to it.
const FIELDS: [(&str, Neutral); 49] = [
    ("add_generation_prompt", Flag(true)),
    ("allowed_token_ids", Null),
    ("audio", Null),
    ("bad_words", Empty),
    ("cache_salt", Null),
    ("chat_template", Null),
    ("continue_final_message", Flag(false)),
    ("detokenize", Flag(true)),
    ("documents", Empty),
    ("echo", Flag(false)),
    ("function_call", Words(&["none", "auto"])),
    ("functions", Empty),
    ("guided_choice", Null),
    ("guided_grammar", Null),
    ("guided_json", Null),
    ("guided_regex", Null),
    ("ignore_eos", Flag(false)),
    ("include_reasoning", Flag(true)),
    ("include_stop_str_in_output", Flag(false)),
    ("kv_transfer_params", Null),
    ("length_penalty", Number(1.0)),
    ("logit_bias", Empty),
    ("logits_processors", Empty),
    ("metadata", Empty),
    ("min_p", Number(0.0)),
    ("min_tokens", Number(0.0)),
    ("mm_processor_kwargs", Empty),
    ("modalities", ListOf("text")),
    ("moderation", Null),
    ("prediction", Null),
    ("priority", Number(0.0)),
    ("prompt_cache_options", Empty),
    ("prompt_cache_retention", Words(&["in_memory"])),
    ("prompt_logprobs", Null),
    ("reasoning_effort", Null),
    ("return_tokens_as_token_ids", Flag(false)),
    ("service_tier", Words(&["auto", "default"])),
    ("skip_special_tokens", Flag(true)),
    ("spaces_between_special_tokens", Flag(true)),
    ("stop_token_ids", Empty),
    ("store", Flag(false)),
    ("structured_outputs", Null),
    ("suffix", Empty),
    ("thinking_token_budget", Null),
    ("truncate_prompt_tokens", Null),
    ("use_beam_search", Flag(false)),
    ("verbosity", Words(&["medium"])),
    ("vllm_xargs", Empty),
    ("web_search_options", Null),
];

/// Takes these fields.
///
/// # Errors
/// A field with a value that requests something.
pub(super) fn take(fields: &mut Fields) -> Result<(), ApiError> {
    FIELDS.iter().try_for_each(|(name, neutral)| match fields.take(name) {
        Some(value) if !neutral.is(&value) => {
            Err(ApiError::invalid(*name, format!("not supported by this server; leave it out{neutral}")))
        }
        _ => Ok(()),
    })
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Flag(flag), value) => value.as_bool() == Some(flag),
            (Number(number), value) => value.as_f64() == Some(number),
            (Empty, Value::String(text)) => text.is_empty(),
            (Empty, Value::Array(list)) => list.is_empty(),
            (Empty, Value::Object(fields)) => fields.is_empty(),
            (Words(words), Value::String(word)) => words.contains(&word.as_str()),
            (ListOf(word), Value::Array(list)) => list.iter().all(|value| value == word),
            _ => false,
        }
    }
}

/// The value that may be sent, as the end of an error's advice.
impl fmt::Display for Neutral {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Null => Ok(()),
            Flag(flag) => write!(out, ", or send {flag}"),
            Number(number) => write!(out, ", or send {number}"),
            Empty => write!(out, ", or send it empty"),
            Words(words) => write!(out, ", or send \"{}\"", words.join("\" or \"")),
            ListOf(word) => write!(out, ", or send [\"{word}\"]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::super::request::TextRequest;
    use super::*;

    /// A request with one field more, of each endpoint.
    fn read(name: &str, value: Value) -> [Result<TextRequest, String>; 2] {
        let body = |of: Value| {
            let mut body: Map<String, Value> = of.as_object().cloned().unwrap_or_default();
            body.insert(name.to_owned(), value.clone());
            json!(body).to_string().into_bytes()
        };
        let chat = body(json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}));
        let completion = body(json!({"model": "m", "prompt": "hi"}));
        [TextRequest::chat(&chat), TextRequest::completion(&completion)]
            .map(|read| read.map_err(|error| error.to_string()))
    }

    fn values(neutral: Neutral) -> Vec<Value> {
        match neutral {
            Null => vec![],
            Flag(flag) => vec![json!(flag)],
            Number(number) => vec![json!(number), json!(number as i64)],
            Empty => vec![json!([]), json!({}), json!("")],
            Words(words) => words.iter().map(|word| json!(word)).collect(),
            ListOf(word) => vec![json!([word])],
        }
    }

    #[test]
    fn what_asks_for_nothing_is_accepted_and_everything_else_refused() {
        let plain = read("user", Value::Null);
        assert!(FIELDS.is_sorted_by_key(|(name, _)| *name) && plain.iter().all(Result::is_ok));
        for (name, neutral) in FIELDS {
            for value in values(neutral).into_iter().chain([Value::Null]) {
                assert_eq!(read(name, value.clone()), plain, "{name}: {value}");
            }
            for value in [json!("other"), json!(0.5), json!(["audio"]), json!({"a": 1}), json!([{}])] {
                for read in read(name, value) {
                    let message = read.unwrap_err();
                    assert!(
                        message.starts_with(&format!("{name}: not supported by this server; leave it out")),
                        "{message}"
                    );
                }
            }
        }
        let [refused, _] = read("service_tier", json!("flex"));
        let message = "service_tier: not supported by this server; leave it out, or send \"auto\" or \"default\"";
        assert_eq!(refused.unwrap_err(), message);
    }

    #[test]
    fn the_page_on_serving_lists_them() {
        let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/serving.md"));
        for (name, neutral) in FIELDS {
            let shown = match neutral {
                Null | Empty => format!("`{name}`"),
                Words(words) => format!("`{name}: \"{}\"`", words[0]),
                Number(number) => format!("`{name}: {number}`"),
                other => format!("`{name}: {}`", values(other)[0]),
            };
            assert!(page.contains(&shown), "docs/serving.md lacks {shown}");
        }
    }
}
