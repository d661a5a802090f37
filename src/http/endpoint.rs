//! An HTTP client of an OpenAI-compatible server.

use std::io::{self, ErrorKind, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::http::Request;
use ureq::http::request::Builder;
use ureq::{Agent, Error};
use url::Url;

use super::EndpointError;
use super::api_key::ApiKey;
use super::connection::{self, HttpAnswer, header, proxy};
use super::connector::{reason, was_closed};
use crate::bounds::{ANSWERS_BYTES, ERROR_RESPONSE_BYTES, QUOTED_CHARACTERS, RESPONSE_BYTES};

/// Path of a conversation's next turn.
pub const CHAT_COMPLETIONS: &str = "chat/completions";
/// Path of a text's continuation.
pub const COMPLETIONS: &str = "completions";

/// Bytes of an answer that are read at once.
const PIECE: usize = 16 << 10;
/// Bytes of a connection's two buffers, each. There may be a thousand connections.
const BUFFER: usize = 32 << 10;
/// Bytes of a part of the endpoint's path that may be a key.
const SHORTEST_SECRET: usize = 16;

/// A request that any thread may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointRequest {
    /// Below the endpoint.
    pub path: &'static str,
    /// JSON.
    pub body: String,
    /// Most bytes that an answer may have.
    pub answer_bytes: u64,
}

/// How a client uses its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientLimits {
    /// Idle connections that are kept for the next request; as many as there are requests at a time.
    pub idle: usize,
    pub wait: AnswerWait,
    /// How often a request is sent again whose connection was closed before an answer began.
    pub resends: u32,
}

/// How long a request waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerWait {
    /// From the connection to the last byte of the answer.
    Whole(Duration),
    /// For the next bytes of an answer that may take as long as it likes.
    NextBytes(Duration),
}

/// A model of `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ListedModel {
    pub id: String,
    /// Most tokens of prompt and answer, where the server reports it (vLLM, SGLang).
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// Shared by all threads that send requests; each uses a connection of its own.
#[derive(Debug)]
pub struct EndpointClient {
    agent: Agent,
    endpoint: Url,
    key: Option<ApiKey>,
    resends: u32,
    /// Bytes of all answers that are being read.
    in_flight: AtomicU64,
}

/// A part of an answer, counted among those in flight until it is dropped.
struct AnswerBytes<'c> {
    bytes: Vec<u8>,
    in_flight: &'c AtomicU64,
}

impl AnswerBytes<'_> {
    /// Reads the next part into `piece`; its length, 0 at the end.
    fn extend(&mut self, reader: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
        let count = reader.read(piece)?;
        self.bytes.extend_from_slice(&piece[..count]);
        self.in_flight.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

impl Drop for AnswerBytes<'_> {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

impl EndpointClient {
    /// Sends no request. `endpoint` is an address up to `/v1` (see [`parse_endpoint`]).
    ///
    /// # Errors
    /// A proxy that is no address.
    pub fn new(endpoint: Url, key: Option<ApiKey>, limits: ClientLimits) -> Result<Self, EndpointError> {
        let setting = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let proxy = proxy(&endpoint, &setting).map_err(|variable| EndpointError::Proxy { variable })?;
        let settings = connection::settings(proxy)
            .input_buffer_size(BUFFER)
            .output_buffer_size(BUFFER)
            .max_response_header_size(BUFFER / 2)
            .max_idle_connections(limits.idle)
            .max_idle_connections_per_host(limits.idle);
        let settings = match limits.wait {
            AnswerWait::Whole(time) => settings.timeout_global(Some(time)),
            AnswerWait::NextBytes(time) => settings.timeout_per_read(Some(time)),
        };
        let agent = connection::agent(settings);
        Ok(Self { agent, endpoint, key, resends: limits.resends, in_flight: AtomicU64::new(0) })
    }

    /// The endpoint for files and messages: what stands before `/v1` is left out, because some gateways have a key there.
    pub fn shown_endpoint(&self) -> String {
        let hidden = if hidden_path(&self.endpoint).is_some() { "/…" } else { "" };
        format!("{}{hidden}/v1", self.endpoint.origin().ascii_serialization())
    }

    /// The models of `/v1/models`.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn models(&self) -> Result<Vec<ListedModel>, EndpointError> {
        #[derive(Deserialize)]
        struct ModelList {
            data: Vec<ListedModel>,
        }
        let sent = self.answered(connection::send(&self.agent, self.request("GET", "models"), ()));
        let body = self.body(sent.and_then(|answer| self.success(answer))?, RESPONSE_BYTES)?;
        let list: ModelList = serde_json::from_slice(&body.bytes)
            .map_err(|_| unreadable(format!("{}/models is no list of models", self.shown_endpoint())))?;
        Ok(list.data)
    }

    /// Posts a request. Its answer is a success, whose body has not been read.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn post(&self, request: &EndpointRequest) -> Result<HttpAnswer, EndpointError> {
        self.connected(request).and_then(|answer| self.success(answer))
    }

    /// Posts a request that is answered with JSON. Fields that `T` does not have take no memory.
    ///
    /// # Errors
    /// [`EndpointError`], also for an answer that breaks off, is no JSON, is too long, or is an error with the status of a success.
    pub fn json<T: DeserializeOwned>(&self, request: &EndpointRequest) -> Result<T, EndpointError> {
        let body = self.body(self.post(request)?, request.answer_bytes.min(RESPONSE_BYTES))?;
        serde_json::from_slice(&body.bytes).map_err(|why| {
            let problem = match error_message(&body.bytes) {
                Some(message) => format!("the answer is an error: {message}"),
                None if why.is_data() => format!("the answer is none of the API: {why}"),
                None => "the answer is no JSON, or only a part of it".to_owned(),
            };
            unreadable(self.clean(&problem))
        })
    }

    /// Text from outside: the key, the endpoint's hidden path and control characters are removed, and the length is limited.
    pub fn clean(&self, text: &str) -> String {
        let text = self.key.as_ref().map_or_else(|| text.to_owned(), |key| key.removed_from(text));
        let text = without_path(text, &self.endpoint);
        text.chars().filter(|c| !c.is_control()).take(QUOTED_CHARACTERS).collect()
    }

    /// A server may close an idle connection just when the next request is sent.
    fn connected(&self, request: &EndpointRequest) -> Result<HttpAnswer, EndpointError> {
        let mut resends = 0;
        loop {
            let post = self.request("POST", request.path).header("Content-Type", "application/json");
            let sent = connection::send(&self.agent, post, request.body.as_str());
            if resends == self.resends || !sent.as_ref().is_err_and(was_closed) {
                return self.answered(sent);
            }
            resends += 1;
        }
    }

    fn request(&self, method: &str, path: &str) -> Builder {
        let request = Request::builder().method(method).uri(format!("{}/{path}", self.endpoint));
        match &self.key {
            Some(key) => request.header("Authorization", key.header()),
            None => request,
        }
    }

    /// An answer of any status.
    fn answered(&self, sent: Result<HttpAnswer, Error>) -> Result<HttpAnswer, EndpointError> {
        sent.map_err(|why| self.unreachable(&reason(&why)))
    }

    /// Only a success; others are errors with the server's message.
    fn success(&self, answer: HttpAnswer) -> Result<HttpAnswer, EndpointError> {
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status().as_u16();
        let retry_after = header(&answer, "retry-after").and_then(|text| text.trim().parse().ok()); // a date is not read
        let should_retry = header(&answer, "x-should-retry").and_then(|text| text.trim().parse().ok());
        let mut body = Vec::new();
        let _ = answer.into_body().into_reader().take(ERROR_RESPONSE_BYTES).read_to_end(&mut body); // without it the status has to do
        let message = error_message(&body).unwrap_or_else(|| String::from_utf8_lossy(&body).into_owned());
        let message = self.clean(message.trim());
        Err(EndpointError::Refused { status, message, retry_after: retry_after.map(Duration::from_secs), should_retry })
    }

    /// The whole of it, of at most so many bytes.
    fn body(&self, answer: HttpAnswer, most: u64) -> Result<AnswerBytes<'_>, EndpointError> {
        let mut reader = answer.into_body().into_reader();
        let mut body = AnswerBytes { bytes: Vec::new(), in_flight: &self.in_flight };
        let mut piece = vec![0; PIECE];
        loop {
            match body.extend(&mut reader, &mut piece) {
                Ok(0) => return Ok(body),
                Ok(_) if body.bytes.len() as u64 > most => {
                    return Err(unreadable(format!("the answer has more than {most} bytes")));
                }
                Ok(_) if self.in_flight.load(Ordering::Relaxed) > ANSWERS_BYTES => {
                    return Err(unreadable(format!("the answers in flight have more than {ANSWERS_BYTES} bytes")));
                }
                Ok(_) => {}
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(self.unreachable(&format!("the answer broke off: {}", reason(&why.into())))),
            }
        }
    }

    fn unreachable(&self, reason: &str) -> EndpointError {
        EndpointError::Unreachable { endpoint: self.shown_endpoint(), reason: self.clean(reason) }
    }
}

/// What stands before `/v1`, without the slash at its end.
fn hidden_path(endpoint: &Url) -> Option<&str> {
    endpoint.path().strip_suffix("/v1").filter(|path| !path.is_empty())
}

/// Servers quote the path of a request, or a key in it, as it was sent or decoded. Words as short as a name are left alone outside of the path.
fn without_path(text: String, endpoint: &Url) -> String {
    let Some(path) = hidden_path(endpoint) else { return text };
    [path.to_owned(), percent_decoded(path)].iter().fold(text, |text, path| {
        let secrets = path.split('/').filter(|part| part.len() >= SHORTEST_SECRET);
        secrets.fold(text.replace(&format!("{path}/v1"), "/…/v1"), |text, secret| text.replace(secret, "…"))
    })
}

/// `%41` becomes `A`.
fn percent_decoded(path: &str) -> String {
    let literal = path.replace('+', "%2B"); // a plus is a space only in a form
    url::form_urlencoded::parse(format!("={}", literal.replace('&', "%26")).as_bytes())
        .map(|(_, value)| value.into_owned())
        .collect()
}

/// The message of an answer that is an error.
fn error_message(body: &[u8]) -> Option<String> {
    let start = &body[..body.len().min(usize::try_from(ERROR_RESPONSE_BYTES).unwrap_or(usize::MAX))];
    let json: Value = serde_json::from_slice(start).ok()?;
    let messages = [&json["error"]["message"], &json["error"], &json["message"], &json["detail"]];
    messages.into_iter().find_map(Value::as_str).map(str::to_owned)
}

fn unreadable(problem: String) -> EndpointError {
    EndpointError::Unreadable { problem }
}

/// The address of a server, completed to `/v1`.
///
/// # Errors
/// A message with the expected form, without a password that the text may hold.
pub fn parse_endpoint(text: &str) -> Result<Url, String> {
    let expected = || "expected an http or https address such as http://127.0.0.1:8000".to_owned();
    let mut url = Url::parse(text).map_err(|_| expected())?;
    if !matches!(url.scheme(), "http" | "https") || url.query().is_some() || url.fragment().is_some() {
        return Err(expected());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("expected no user name or password; a key goes into --api-key-file or MEDUSA_API_KEY".into());
    }
    let has_version = url.path().trim_end_matches('/').ends_with("/v1");
    let mut segments = url.path_segments_mut().map_err(|()| expected())?;
    segments.pop_if_empty().extend((!has_version).then_some("v1"));
    drop(segments);
    Ok(url)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn an_address_ends_in_the_version_of_the_api() {
        for (text, url) in [
            ("http://h:8000", "http://h:8000/v1"),
            ("http://h:8000/", "http://h:8000/v1"),
            ("http://h/v1", "http://h/v1"),
            ("https://h/openai/v1/", "https://h/openai/v1"),
            ("http://[::1]:1/proxy", "http://[::1]:1/proxy/v1"),
        ] {
            assert_eq!(parse_endpoint(text).map(String::from), Ok(url.into()), "{text}");
        }
        for text in ["h:8000", "127.0.0.1:8000", "ftp://h", "http://h?key=1", ""] {
            assert!(parse_endpoint(text).is_err_and(|why| why.contains("http://127.0.0.1:8000")), "{text}");
        }
        assert!(parse_endpoint("http://me:secret@h").is_err_and(|why| !why.contains("secret")));
    }

    #[test]
    fn a_path_that_may_be_a_key_is_not_shown() {
        let limits = ClientLimits { idle: 1, wait: AnswerWait::Whole(Duration::from_secs(1)), resends: 0 };
        let client = |text: &str| EndpointClient::new(parse_endpoint(text).unwrap(), None, limits).unwrap();
        assert_eq!(client("http://127.0.0.1:8000").shown_endpoint(), "http://127.0.0.1:8000/v1");
        let gateway = client("https://gateway.example/openai/0123456789abcdef0123/v1");
        assert_eq!(gateway.shown_endpoint(), "https://gateway.example/…/v1");
        let quoted = "no POST /openai/0123456789abcdef0123/v1/completions for 0123456789abcdef0123\n";
        assert_eq!(gateway.clean(quoted), "no POST /…/v1/completions for …");
        let encoded = client("https://gateway.example/key%200123456789+a&b/v1");
        assert_eq!(encoded.clean("no POST /key 0123456789+a&b/v1/models"), "no POST /…/v1/models");
        assert_eq!(encoded.clean("no key%200123456789+a&b or key 0123456789+a&b"), "no … or …");
    }

    #[test]
    fn a_short_path_is_hidden_only_as_a_path() {
        let limits = ClientLimits { idle: 1, wait: AnswerWait::Whole(Duration::from_secs(1)), resends: 0 };
        let client = |text: &str| EndpointClient::new(parse_endpoint(text).unwrap(), None, limits).unwrap();
        let gateway = client("https://h/api/v1");
        for text in ["vendor/api-x", "vendor/api", "see /api/v2"] {
            assert_eq!(gateway.clean(text), text);
        }
        assert_eq!(gateway.clean("no POST /api/v1/completions"), "no POST /…/v1/completions");
        assert_eq!(client("http://h//v1").clean("GET //v1/models of a/b"), "GET /…/v1/models of a/b");
    }

    /// Sends the head of an answer of ten bytes, the first five of them each after `pause`, and then nothing more.
    fn halting_server(pause: Duration) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n").unwrap();
            for _ in 0..5 {
                thread::sleep(pause);
                stream.write_all(b" ").unwrap();
            }
            let _ = stream.read_to_end(&mut Vec::new()); // until the client leaves
        });
        address
    }

    #[test]
    fn a_wait_is_for_the_next_bytes_or_for_the_whole_answer() {
        let request = EndpointRequest { path: COMPLETIONS, body: "{}".into(), answer_bytes: 99 };
        let limit = Duration::from_secs(2); // a busy machine may stop a thread for a second
        for (wait, least, most) in [(AnswerWait::NextBytes(limit), 4.8, 18.0), (AnswerWait::Whole(limit), 1.8, 4.8)] {
            let endpoint = parse_endpoint(&halting_server(limit * 3 / 10)).unwrap();
            let client = EndpointClient::new(endpoint, None, ClientLimits { idle: 1, wait, resends: 0 }).unwrap();
            let began = Instant::now();
            let why = client.json::<Value>(&request).unwrap_err().to_string();
            assert!(why.ends_with("the answer broke off: timed out"), "{why}");
            let seconds = began.elapsed().as_secs_f64();
            assert!((least..most).contains(&seconds), "{wait:?}: {seconds}");
        }
    }
}
