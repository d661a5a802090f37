//! Errors as clients of OpenAI's API read them.

use std::borrow::Cow;
use std::time::Duration;

use serde_json::{Value, json};

use crate::plural::counted;

/// Why a request gets no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// A body that is no JSON; serde_json names line and column.
    #[error("the body cannot be read as JSON: {why}")]
    Json { why: String },
    /// A field whose value is of another type, or out of range.
    #[error("{param}: expected {expected}, got {got}")]
    Field { param: String, expected: String, got: String },
    #[error("unknown field `{}`", start_of(.param))]
    UnknownField { param: String },
    /// What this server does not do, and fields that do not go together.
    #[error("{param}: {problem}")]
    Invalid { param: String, problem: String },
    #[error("the model {:?} is not served here; GET /v1/models lists those that are", start_of(.model))]
    UnknownModel { model: String },
    /// A prompt that leaves no room for an answer.
    #[error(
        "the prompt has {}, and the context {context} with the answer; send a shorter prompt",
        counted(*.prompt_tokens, "token")
    )]
    PromptTooLong { param: &'static str, prompt_tokens: usize, context: usize },
    /// One that cannot fit, whatever its tokens are.
    #[error("the prompt has {bytes} bytes, too many for the context of {context} tokens; send a shorter prompt")]
    TextTooLong { param: &'static str, bytes: usize, context: usize },
    #[error("messages: the model has no chat template; use /v1/completions")]
    NoTemplate,
    #[error("the body has more than {limit} bytes, the limit of this server")]
    BodyTooLarge { limit: usize },
    #[error("Content-Type: expected application/json, got {}", start_of(.got))]
    ContentType { got: String },
    #[error("Content-Encoding: expected a body that is not compressed, got {}", start_of(.got))]
    ContentEncoding { got: String },
    #[error("no API key; send the header `Authorization: Bearer KEY`")]
    NoKey,
    #[error("the API key is not one of this server's")]
    WrongKey,
    /// A page of another name than the server's, or a client that the server was not configured for.
    #[error(
        "Host: expected a loopback name, the value of --host or one of --allowed-host, got {}; start the server with --allowed-host NAME",
        start_of(.got)
    )]
    WrongHost { got: String },
    /// HTTP/1.1 requires exactly one (RFC 9112, section 3.2).
    #[error("Host: expected one such header, got {got}")]
    HostCount { got: usize },
    /// A request for more texts than there are places left.
    #[error(
        "the queue has {} left, and the request asks for {}; try again in {retry_after} s",
        counted(*.places, "place"),
        counted(*.texts, "text")
    )]
    QueueFull { places: usize, texts: usize, retry_after: u64 },
    #[error("request timed out: not finished within {} s", .limit.as_secs_f64())]
    TimeLimit { limit: Duration },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(
        "{} is not here; see GET /v1/models, POST /v1/chat/completions, POST /v1/completions", start_of(.path)
    )]
    NotFound { path: String },
    #[error("{} does not take {method}; use {allowed}", start_of(.path))]
    MethodNotAllowed { path: String, method: String, allowed: &'static str },
    /// Our mistake; the log says more than the client learns.
    #[error("internal error; the server's log has the reason")]
    Internal,
}

impl ApiError {
    /// A field whose value is not what it should be.
    pub fn field(param: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Field { param: param.into(), expected: expected.into(), got: got.into() }
    }

    /// A field that cannot be as it is.
    pub fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), problem: problem.into() }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        match self {
            Self::Json { .. } | Self::Field { .. } | Self::UnknownField { .. } | Self::Invalid { .. } => 400,
            Self::PromptTooLong { .. } | Self::TextTooLong { .. } | Self::NoTemplate | Self::HostCount { .. } => 400,
            Self::NoKey | Self::WrongKey => 401,
            Self::WrongHost { .. } => 403,
            Self::UnknownModel { .. } | Self::NotFound { .. } => 404,
            Self::MethodNotAllowed { .. } => 405,
            Self::TimeLimit { .. } => 408,
            Self::BodyTooLarge { .. } => 413,
            Self::ContentType { .. } | Self::ContentEncoding { .. } => 415,
            Self::QueueFull { .. } => 429,
            Self::Internal => 500,
            Self::ShuttingDown => 503,
        }
    }

    /// The `type`, by which clients distinguish errors.
    pub fn kind(&self) -> &'static str {
        match self.status() {
            401 => "authentication_error",
            403 => "permission_error",
            408 => "timeout_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The field at fault.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Field { param, .. } | Self::UnknownField { param } | Self::Invalid { param, .. } => Some(param),
            Self::PromptTooLong { param, .. } | Self::TextTooLong { param, .. } => Some(param),
            Self::NoTemplate => Some("messages"),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    /// A name for errors that programs handle.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::PromptTooLong { .. } | Self::TextTooLong { .. } => Some("context_length_exceeded"),
            Self::NoKey | Self::WrongKey => Some("invalid_api_key"),
            Self::WrongHost { .. } => Some("host_not_allowed"),
            Self::QueueFull { .. } => Some("queue_full"),
            _ => None,
        }
    }

    /// The seconds of `Retry-After`.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::QueueFull { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// Whether clients that repeat a request after this status, as OpenAI's do, are to leave that: what took too long once would again.
    pub fn is_not_to_be_repeated(&self) -> bool {
        matches!(self, Self::TimeLimit { .. })
    }

    /// The body.
    pub fn to_json(&self) -> Value {
        let error = json!({
            "message": self.to_string(), "type": self.kind(), "param": self.param().map(start_of), "code": self.code(),
        });
        json!({ "error": error })
    }
}

/// What a client wrote, as far as a message shows it.
fn start_of(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_as_openais_clients_read_it() {
        let body = ApiError::field("n", "a whole number", "\"two\"").to_json();
        let message = "n: expected a whole number, got \"two\"";
        let expected = json!({"message": message, "type": "invalid_request_error", "param": "n", "code": null});
        assert_eq!(body, json!({ "error": expected }));
    }

    #[test]
    fn every_error_has_its_status_type_and_code() {
        let path = || "/x".to_owned();
        let limit = Duration::from_millis(1500);
        let invalid = "invalid_request_error";
        let cases = [
            (ApiError::Json { why: "x".to_owned() }, 400, invalid, None, None),
            (ApiError::UnknownField { param: "foo".to_owned() }, 400, invalid, Some("foo"), None),
            (ApiError::invalid("a", "b"), 400, invalid, Some("a"), None),
            (ApiError::NoTemplate, 400, invalid, Some("messages"), None),
            (ApiError::HostCount { got: 0 }, 400, invalid, None, None),
            (
                ApiError::TextTooLong { param: "prompt", bytes: 1 << 20, context: 8 },
                400,
                invalid,
                Some("prompt"),
                Some("context_length_exceeded"),
            ),
            (
                ApiError::PromptTooLong { param: "prompt", prompt_tokens: 9, context: 8 },
                400,
                invalid,
                Some("prompt"),
                Some("context_length_exceeded"),
            ),
            (ApiError::NoKey, 401, "authentication_error", None, Some("invalid_api_key")),
            (ApiError::WrongKey, 401, "authentication_error", None, Some("invalid_api_key")),
            (ApiError::WrongHost { got: "h".to_owned() }, 403, "permission_error", None, Some("host_not_allowed")),
            (ApiError::UnknownModel { model: "m".to_owned() }, 404, invalid, Some("model"), Some("model_not_found")),
            (ApiError::NotFound { path: path() }, 404, invalid, None, None),
            (
                ApiError::MethodNotAllowed { path: path(), method: "GET".to_owned(), allowed: "POST" },
                405,
                invalid,
                None,
                None,
            ),
            (ApiError::TimeLimit { limit }, 408, "timeout_error", None, None),
            (ApiError::BodyTooLarge { limit: 9 }, 413, invalid, None, None),
            (ApiError::ContentType { got: "nothing".to_owned() }, 415, invalid, None, None),
            (
                ApiError::QueueFull { places: 0, texts: 1, retry_after: 3 },
                429,
                "rate_limit_error",
                None,
                Some("queue_full"),
            ),
            (ApiError::Internal, 500, "server_error", None, None),
            (ApiError::ShuttingDown, 503, "server_error", None, None),
        ];
        for (error, status, kind, param, code) in cases {
            assert_eq!(
                (error.status(), error.kind(), error.param(), error.code()),
                (status, kind, param, code),
                "{error}"
            );
            assert_eq!(error.retry_after(), (status == 429).then_some(3), "{error}");
            assert_eq!(error.is_not_to_be_repeated(), status == 408, "{error}");
        }
    }

    #[test]
    fn a_limit_and_a_queue_are_reported_with_their_numbers() {
        let limit = Duration::from_millis(1500);
        assert_eq!(ApiError::TimeLimit { limit }.to_string(), "request timed out: not finished within 1.5 s");
        let full = ApiError::QueueFull { places: 1, texts: 2, retry_after: 3 };
        let message = "the queue has 1 place left, and the request asks for 2 texts; try again in 3 s";
        assert_eq!(full.to_string(), message);
    }

    #[test]
    fn a_message_stays_short() {
        let error = ApiError::UnknownModel { model: "é".repeat(1_000_000) };
        assert!(error.to_string().chars().count() < 200, "{error}");
    }
}
