//! A question as a request.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::settings::ServerSettings;
use crate::bounds::{ANSWER_BYTES, ANSWER_TOKEN_BYTES};
use crate::distill::answer::Question;
use crate::engine::sample::Stream;
use crate::http::endpoint::{CHAT_COMPLETIONS, COMPLETIONS, EndpointRequest};
use crate::numbers::Probability;

/// Whether a request asks for token ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenIds {
    Asked,
    NotAsked,
}

/// What is sent for a question. Besides what every server knows it has only what the user asks for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ServerRequest {
    path: &'static str,
    fields: Map<String, Value>,
    answer_bytes: u64,
}

impl ServerRequest {
    pub(super) fn new(question: &Question, settings: &ServerSettings) -> Self {
        let path = if question.input.needs_template() { CHAT_COMPLETIONS } else { COMPLETIONS };
        let most_tokens = most_tokens(question, settings.context_now);
        let tokens = (most_tokens as u64).saturating_add(question.prompt.ids.len() as u64);
        let answer_bytes = ANSWER_BYTES.saturating_add(tokens.saturating_mul(ANSWER_TOKEN_BYTES));
        let draws = settings.temperature.get() > 0.0;
        let fields = [
            ("model", Some(json!(settings.model))),
            ("max_tokens", Some(json!(most_tokens))),
            ("temperature", Some(json!(settings.temperature.get()))),
            ("top_p", (settings.top_p != Probability::ONE).then(|| json!(settings.top_p.get()))),
            ("seed", draws.then(|| json!(seed(question.stream)))),
        ];
        let fields = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Self { path, fields: question.input.to_openai().into_iter().chain(fields).collect(), answer_bytes }
    }

    pub(super) fn model(&self) -> Option<&str> {
        self.fields["model"].as_str()
    }

    pub(super) fn sent(&self, ids: TokenIds) -> EndpointRequest {
        let mut fields = self.fields.clone();
        if ids == TokenIds::Asked {
            fields.insert("return_token_ids".to_owned(), true.into());
        }
        EndpointRequest { path: self.path, body: Value::Object(fields).to_string(), answer_bytes: self.answer_bytes }
    }
}

/// Most tokens of an answer: some servers refuse a request that could outgrow their context.
pub(super) fn most_tokens(question: &Question, context: usize) -> usize {
    let room = context.saturating_sub(question.prompt.ids.len()).max(1);
    question.max_new_tokens.get().min(room)
}

/// 31 bits, which every server takes: another seed for each turn of each conversation, so that two equal prompts get two answers.
fn seed(stream: Stream) -> u32 {
    let Stream { seed, index, turn, sample } = stream;
    let bytes = [seed, index, turn, sample].map(u64::to_le_bytes).concat();
    let hash = Sha256::digest(bytes);
    u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]) >> 1
}

#[cfg(test)]
pub(super) mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::data::conversation::ChatInput;
    use crate::data::prompts::PromptInput;
    use crate::distill::render::Rendered;
    use crate::numbers::NonNegative;

    pub(in crate::distill::server) fn settings(temperature: f64) -> ServerSettings {
        ServerSettings {
            model: "m".into(),
            temperature: NonNegative::new(temperature).unwrap(),
            top_p: Probability::ONE,
            concurrency: 1,
            retries: 0,
            context: 100,
            context_now: 100,
            strict: false,
            eos: vec![],
        }
    }

    pub(in crate::distill::server) fn question(input: PromptInput, tokens: usize, turn: u64) -> Question {
        Question {
            conversation: 0,
            input,
            prompt: Rendered { text: String::new(), ids: vec![7; tokens] },
            max_new_tokens: NonZeroUsize::new(50).unwrap(),
            end_mark: vec![],
            stream: Stream { seed: 1, index: 2, turn, sample: 0 },
        }
    }

    fn body(request: &EndpointRequest) -> Value {
        serde_json::from_str(&request.body).unwrap()
    }

    #[test]
    fn a_conversation_is_asked_as_messages_and_never_for_more_than_fits() {
        let chat = PromptInput::Chat(ChatInput::user("hi"));
        let request = ServerRequest::new(&question(chat, 70, 1), &settings(0.0));
        let sent = request.sent(TokenIds::NotAsked);
        let expected = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0.0});
        assert_eq!((sent.path, body(&sent)), ("chat/completions", expected));
        assert_eq!(body(&request.sent(TokenIds::Asked))["return_token_ids"], json!(true));
        let raw = ServerRequest::new(&question(PromptInput::Ids(vec![1, 2]), 2, 1), &settings(0.0));
        let sent = raw.sent(TokenIds::NotAsked);
        assert_eq!(
            (sent.path, &body(&sent)["prompt"], &body(&sent)["max_tokens"]),
            ("completions", &json!([1, 2]), &json!(50))
        );
    }

    #[test]
    fn every_turn_has_a_seed_of_its_own_and_always_the_same() {
        let seed_of = |turn| {
            let request = ServerRequest::new(&question(PromptInput::Text("a".into()), 1, turn), &settings(0.5));
            body(&request.sent(TokenIds::NotAsked))["seed"].as_u64().unwrap()
        };
        assert_eq!(seed_of(1), seed_of(1));
        assert!(seed_of(1) != seed_of(2) && seed_of(1) < 1 << 31 && seed_of(2) < 1 << 31);
    }
}
