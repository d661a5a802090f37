//! What clients send.

use std::num::NonZeroUsize;

use serde_json::Value;

use super::Endpoint;
use super::error::ApiError;
use super::fields::Fields;
use super::messages::chat;
use super::neutral;
use super::prompt::{ClientPrompt, prompts};
use crate::bounds::{
    REQUEST_LOGPROBS, REQUEST_SAMPLES, REQUEST_STOP_BYTES, REQUEST_STOPS, REQUEST_TEXTS, REQUEST_TOKENS,
};
use crate::engine::sample::Sampling;
use crate::numbers::{Finite, NonNegative, Positive, Probability};

/// A request for texts, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct TextRequest {
    /// Where it came in.
    pub endpoint: Endpoint,
    pub model: String,
    /// At least one; in a chat, exactly one.
    pub prompts: Vec<ClientPrompt>,
    /// Texts for each prompt.
    pub samples: NonZeroUsize,
    /// At least 1; `None`: the endpoint's default.
    pub max_new_tokens: Option<usize>,
    /// Temperature, top-k, top-p.
    pub sampling: Sampling,
    /// 1 is off.
    pub repetition_penalty: Positive,
    /// From -2 to 2; 0 is off.
    pub frequency_penalty: Finite,
    /// From -2 to 2; 0 is off.
    pub presence_penalty: Finite,
    /// Stop strings, none of them empty.
    pub stop: Vec<String>,
    /// `None`: one of the server's.
    pub seed: Option<u64>,
    /// How many of the most probable tokens to show at each place; `None` shows no logprobs at all.
    pub logprobs: Option<usize>,
    /// `None`: the server's.
    pub acceptance: Option<AcceptanceChoice>,
    /// Server-sent events.
    pub stream: bool,
    /// A stream ends with its usage.
    pub include_usage: bool,
    /// Token ids of prompts and texts are part of the answer.
    pub return_token_ids: bool,
}

/// How guesses are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptanceChoice {
    /// Rejection sampling: the texts have the backbone's distribution.
    Rejection,
    /// The paper's typical acceptance.
    Typical,
    /// The most probable token only.
    Greedy,
}

impl TextRequest {
    /// A request of `/v1/chat/completions`.
    ///
    /// # Errors
    /// [`ApiError`]: a body that is not JSON, and fields that are unknown, wrong or not supported.
    pub fn chat(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::from_body(body)?;
        let chat = chat(&mut fields)?;
        let request = Self {
            logprobs: chat_logprobs(&mut fields)?,
            max_new_tokens: chat_length(&mut fields)?,
            ..Self::common(Endpoint::Chat, vec![ClientPrompt::Chat(chat)], &mut fields)?
        };
        fields.end()?;
        Ok(request)
    }

    /// A request of `/v1/completions`.
    ///
    /// # Errors
    /// As [`TextRequest::chat`].
    pub fn completion(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::from_body(body)?;
        let prompts = prompts(fields.take("prompt"))?;
        let request = Self {
            logprobs: completion_logprobs(&mut fields)?,
            max_new_tokens: fields.whole("max_tokens", 1..=REQUEST_TOKENS)?,
            ..Self::common(Endpoint::Completions, prompts, &mut fields)?
        };
        fields.end()?;
        Ok(request)
    }

    /// The texts that it asks for.
    pub fn texts(&self) -> usize {
        self.prompts.len() * self.samples.get()
    }

    /// What both endpoints have; no logprobs and no limit of its own.
    fn common(endpoint: Endpoint, prompts: Vec<ClientPrompt>, fields: &mut Fields) -> Result<Self, ApiError> {
        neutral::take(fields)?;
        texts_only(fields)?;
        // A chat template writes the special tokens itself.
        fields.without_effect("add_special_tokens", |value| *value == (endpoint == Endpoint::Completions))?;
        // They identify the caller to OpenAI, and have no effect on the text.
        for name in ["user", "safety_identifier", "prompt_cache_key"] {
            fields.text(name)?;
        }
        let model = fields.text("model")?.ok_or_else(|| ApiError::field("model", "the name of a model", "nothing"))?;
        let (stream, include_usage) = streaming(fields)?;
        let samples = samples(prompts.len(), fields)?;
        fields.without_effect("best_of", |value| value.as_u64() == Some(samples.get() as u64))?;
        Ok(Self {
            endpoint,
            model,
            samples,
            prompts,
            max_new_tokens: None,
            sampling: sampling(fields)?,
            repetition_penalty: repetition_penalty(fields)?,
            frequency_penalty: penalty(fields, "frequency_penalty")?,
            presence_penalty: penalty(fields, "presence_penalty")?,
            stop: stop(fields)?,
            seed: seed(fields)?,
            logprobs: None,
            acceptance: acceptance(fields)?,
            stream,
            include_usage,
            return_token_ids: fields.flag("return_token_ids")?,
        })
    }
}

fn penalty(fields: &mut Fields, name: &str) -> Result<Finite, ApiError> {
    let penalty = fields.number(name, -2.0..=2.0)?;
    Ok(penalty.and_then(Finite::new).unwrap_or(Finite::ZERO))
}

/// Only the plain format: JSON would take a grammar that bounds which tokens may come.
fn texts_only(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut format) = fields.inner("response_format")? else { return Ok(()) };
    match format.text("type")?.as_deref() {
        Some("text") => format.end(),
        _ => {
            let problem = "this server writes text only and cannot hold it to JSON; use {\"type\": \"text\"}";
            Err(ApiError::invalid("response_format", problem))
        }
    }
}

fn chat_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.flag("logprobs")?;
    let top = fields.whole("top_logprobs", 0..=REQUEST_LOGPROBS)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::invalid("top_logprobs", "goes only with logprobs: true"));
    }
    Ok(wanted.then(|| top.unwrap_or(0)))
}

/// A number; false is none.
fn completion_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let expected = format!("a whole number from 0 to {REQUEST_LOGPROBS}");
    let wanted = fields.read("logprobs", &expected, |value| match value {
        Value::Bool(false) => Some(None),
        value => usize::try_from(value.as_u64()?).ok().filter(|top| *top <= REQUEST_LOGPROBS).map(Some),
    })?;
    Ok(wanted.flatten())
}

/// `max_tokens` is the old name.
fn chat_length(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let new = fields.whole("max_completion_tokens", 1..=REQUEST_TOKENS)?;
    let old = fields.whole("max_tokens", 1..=REQUEST_TOKENS)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            Err(ApiError::invalid("max_tokens", format!("{old}, but max_completion_tokens is {new}; give one of them")))
        }
        _ => Ok(new.or(old)),
    }
}

fn samples(prompts: usize, fields: &mut Fields) -> Result<NonZeroUsize, ApiError> {
    let samples = fields.whole("n", 1..=REQUEST_SAMPLES)?.and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN);
    let texts = prompts * samples.get();
    if texts > REQUEST_TEXTS {
        let problem = format!("{prompts} prompts with n = {samples} ask for {texts} texts; at most {REQUEST_TEXTS}");
        return Err(ApiError::invalid("prompt", problem));
    }
    Ok(samples)
}

fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let temperature = fields.read("temperature", "a number from 0 to 2", |value| {
        NonNegative::new(value.as_f64()?).filter(|temperature| temperature.get() <= 2.0)
    })?;
    let top_p = fields.read("top_p", "a number above 0 and at most 1", |value| Probability::new(value.as_f64()?))?;
    let top_k =
        fields.read("top_k", "a whole number of at least 1 (0 and -1: off)", |value| match value.as_i64()? {
            -1 | 0 => Some(None),
            number => usize::try_from(number).ok().and_then(NonZeroUsize::new).map(Some),
        })?;
    Ok(Sampling {
        temperature: temperature.unwrap_or(NonNegative::ONE),
        top_k: top_k.flatten(),
        top_p: top_p.unwrap_or(Probability::ONE),
    })
}

fn repetition_penalty(fields: &mut Fields) -> Result<Positive, ApiError> {
    let penalty = fields.read("repetition_penalty", "a number above 0", |value| Positive::new(value.as_f64()?))?;
    Ok(penalty.unwrap_or(Positive::ONE))
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let text = |value: &Value| {
        let text = value.as_str().filter(|text| (1..=REQUEST_STOP_BYTES).contains(&text.len()))?;
        Some(text.to_owned())
    };
    let expected = format!("a string of 1 to {REQUEST_STOP_BYTES} bytes, or a list of at most {REQUEST_STOPS} of them");
    let stop = fields.read("stop", &expected, |value| match value.as_array() {
        Some(list) if list.len() > REQUEST_STOPS => None,
        Some(list) => list.iter().map(text).collect(),
        None => text(value).map(|one| vec![one]),
    })?;
    Ok(stop.unwrap_or_default())
}

/// OpenAI's seeds may be below 0.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let number = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    fields.read("seed", "a whole number of 64 bits", number)
}

fn acceptance(fields: &mut Fields) -> Result<Option<AcceptanceChoice>, ApiError> {
    fields.read("acceptance", "\"rejection\", \"typical\" or \"greedy\"", |value| match value.as_str()? {
        "rejection" => Some(AcceptanceChoice::Rejection),
        "typical" => Some(AcceptanceChoice::Typical),
        "greedy" => Some(AcceptanceChoice::Greedy),
        _ => None,
    })
}

/// Whether to stream, and whether the stream ends with its usage.
fn streaming(fields: &mut Fields) -> Result<(bool, bool), ApiError> {
    let stream = fields.flag("stream")?;
    let Some(mut options) = fields.inner("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "goes only with stream: true"));
    }
    let include_usage = options.flag("include_usage")?;
    options.without_effect("include_obfuscation", |value| value == false)?;
    options.end()?;
    Ok((stream, include_usage))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::conversation::ChatInput;

    /// A request of one field more than it needs.
    fn chat(more: Value) -> Result<TextRequest, String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        TextRequest::chat(body.to_string().as_bytes()).map_err(|error| error.to_string())
    }

    fn completion(more: Value) -> Result<TextRequest, String> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        TextRequest::completion(body.to_string().as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_absent_or_null_is_openais_default() {
        let expected = TextRequest {
            endpoint: Endpoint::Chat,
            model: "m".to_owned(),
            prompts: vec![ClientPrompt::Chat(ChatInput::user("hi"))],
            samples: NonZeroUsize::MIN,
            max_new_tokens: None,
            sampling: Sampling::with_temperature(NonNegative::ONE),
            repetition_penalty: Positive::ONE,
            frequency_penalty: Finite::ZERO,
            presence_penalty: Finite::ZERO,
            stop: vec![],
            seed: None,
            logprobs: None,
            acceptance: None,
            stream: false,
            include_usage: false,
            return_token_ids: false,
        };
        assert_eq!(chat(json!({})).unwrap(), expected);
        let fields = "tools tool_choice parallel_tool_calls metadata store response_format logprobs top_logprobs user \
            max_tokens max_completion_tokens logit_bias stream stream_options n seed stop temperature top_p top_k \
            frequency_penalty presence_penalty repetition_penalty return_token_ids acceptance functions modalities";
        let nulls: serde_json::Map<String, Value> =
            fields.split_whitespace().map(|name| (name.to_owned(), Value::Null)).collect();
        assert_eq!(chat(nulls.into()).unwrap(), expected);
        let prompts = vec![ClientPrompt::Text("hi".to_owned())];
        let expected = TextRequest { endpoint: Endpoint::Completions, prompts, ..expected };
        assert_eq!(completion(json!({})).unwrap(), expected);
        let nulls = json!({"suffix": null, "echo": null, "best_of": null, "logprobs": false, "max_tokens": null});
        assert_eq!(completion(nulls).unwrap(), expected);
    }

    #[test]
    fn fields_of_both_endpoints_are_read() {
        let all = json!({
            "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "frequency_penalty": -2, "presence_penalty": 2.0,
            "repetition_penalty": 1.1, "stop": ["a", "b"], "seed": -1, "acceptance": "typical", "stream": true,
            "stream_options": {"include_usage": true, "include_obfuscation": false}, "return_token_ids": true,
            "logit_bias": {}, "user": "someone", "max_tokens": 7,
        });
        for read in [chat(all.clone()).unwrap(), completion(all).unwrap()] {
            assert_eq!((read.samples.get(), read.max_new_tokens, read.seed), (3, Some(7), Some(u64::MAX)));
            let Sampling { temperature, top_k, top_p } = read.sampling;
            assert_eq!((temperature.get(), top_k.map(NonZeroUsize::get), top_p.get()), (0.5, Some(40), 0.9));
            let penalties = (read.frequency_penalty.get(), read.presence_penalty.get(), read.repetition_penalty.get());
            assert_eq!(penalties, (-2.0, 2.0, 1.1));
            assert_eq!((read.stop, read.acceptance), (vec!["a".into(), "b".into()], Some(AcceptanceChoice::Typical)));
            assert!(read.stream && read.include_usage && read.return_token_ids);
        }
        for off in [-1, 0] {
            assert_eq!(completion(json!({"top_k": off})).unwrap().sampling.top_k, None);
        }
        assert_eq!(completion(json!({"stop": "a"})).unwrap().stop, ["a"]);
        assert_eq!(completion(json!({"seed": u64::MAX})).unwrap().seed, Some(u64::MAX));
    }

    #[test]
    fn fields_of_one_endpoint_are_read() {
        let logprobs = |more| chat(more).unwrap().logprobs;
        assert_eq!(logprobs(json!({"logprobs": false, "top_logprobs": 0})), None);
        assert_eq!(logprobs(json!({"logprobs": true})), Some(0));
        assert_eq!(logprobs(json!({"logprobs": true, "top_logprobs": 20})), Some(20));
        assert_eq!(completion(json!({"logprobs": 0, "echo": false, "n": 2, "best_of": 2})).unwrap().logprobs, Some(0));
        let length = |more| chat(more).unwrap().max_new_tokens;
        assert_eq!(length(json!({"max_completion_tokens": 3})), Some(3));
        assert_eq!(length(json!({"max_completion_tokens": 3, "max_tokens": 3})), Some(3));
        let more = json!({"response_format": {"type": "text"}, "best_of": 1});
        assert_eq!(chat(more.clone()), chat(json!({})));
        assert_eq!(completion(more), completion(json!({})));
        assert_eq!(chat(json!({"add_special_tokens": false})), chat(json!({})));
        assert_eq!(completion(json!({"add_special_tokens": true})), completion(json!({})));
    }

    #[test]
    fn what_both_endpoints_refuse_is_reported() {
        let cases = [
            (json!({"foo": 1}), "unknown field `foo`"),
            (json!({"model": null}), "model: expected the name of a model, got nothing"),
            (json!({"n": 17}), "n: expected a whole number from 1 to 16, got 17"),
            (json!({"temperature": -0.1}), "temperature: expected a number from 0 to 2, got -0.1"),
            (json!({"top_p": 0}), "top_p: expected a number above 0 and at most 1, got 0"),
            (json!({"top_k": -2}), "top_k: expected a whole number of at least 1 (0 and -1: off), got -2"),
            (json!({"frequency_penalty": 3}), "frequency_penalty: expected a number from -2 to 2, got 3"),
            (json!({"repetition_penalty": 0}), "repetition_penalty: expected a number above 0, got 0"),
            (json!({"seed": 0.5}), "seed: expected a whole number of 64 bits, got 0.5"),
            (
                json!({"acceptance": "best"}),
                "acceptance: expected \"rejection\", \"typical\" or \"greedy\", got \"best\"",
            ),
            (json!({"best_of": 2}), "best_of: not supported by this server; leave it out"),
            (json!({"max_tokens": 0}), "max_tokens: expected a whole number from 1 to 2147483648, got 0"),
            (json!({"stream_options": {}}), "stream_options: goes only with stream: true"),
            (json!({"stream": true, "stream_options": {"x": 1}}), "unknown field `stream_options.x`"),
        ];
        for (more, message) in cases {
            assert_eq!(chat(more.clone()).unwrap_err(), message);
            assert_eq!(completion(more).unwrap_err(), message);
        }
        let stops = [json!(""), json!(["a", ""]), json!(vec!["a"; 17]), json!([1]), json!(["a".repeat(1001)])];
        for stop in stops {
            let message = chat(json!({ "stop": stop })).unwrap_err();
            assert!(
                message.starts_with("stop: expected a string of 1 to 1000 bytes, or a list of at most 16"),
                "{message}"
            );
        }
    }

    #[test]
    fn the_texts_of_a_request_are_bounded() {
        let many = completion(json!({"prompt": vec!["a"; 43], "n": 3})).unwrap_err();
        assert_eq!(many, "prompt: 43 prompts with n = 3 ask for 129 texts; at most 128");
    }

    #[test]
    fn what_one_endpoint_refuses_is_reported() {
        let cases = [
            (json!({"top_logprobs": 1}), "top_logprobs: goes only with logprobs: true"),
            (json!({"logprobs": 5}), "logprobs: expected true or false, got 5"),
            (json!({"prompt": "a"}), "unknown field `prompt`"),
            (
                json!({"max_tokens": 3, "max_completion_tokens": 4}),
                "max_tokens: 3, but max_completion_tokens is 4; give one of them",
            ),
            (
                json!({"response_format": {"type": "json_object"}}),
                "response_format: this server writes text only and cannot hold it to JSON; use {\"type\": \"text\"}",
            ),
        ];
        for (more, message) in cases {
            assert_eq!(chat(more).unwrap_err(), message);
        }
        assert_eq!(
            completion(json!({"logprobs": true})).unwrap_err(),
            "logprobs: expected a whole number from 0 to 20, got true"
        );
        assert_eq!(completion(json!({"messages": []})).unwrap_err(), "unknown field `messages`");
    }
}
