//! HTTP client of the Hub: sends the token only to the Hub itself and never to redirects, and waits when asked to.

mod refusal;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::{Agent, ErrorKind, OrAnyStatus, Response, Transport};
use url::Url;

use super::id::{Repo, RepoKind};
use super::token::Token;
use super::{HubError, Observer, TransferEvent};
use crate::bounds::{QUOTED_CHARACTERS, RESPONSE_BYTES};
use crate::files;
use crate::http::connection::{header, proxy, trusted};
use crate::panics;

const TRIES: u32 = 5;
/// Tries of a host that cannot be reached: an unknown name will still be unknown in a minute.
const CONNECTION_TRIES: u32 = 3;
/// Longest wait that is accepted, in seconds.
const LONGEST_WAIT: u64 = 300;
const REDIRECTS: u32 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout between two reads, not of the whole response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) struct Client<'o> {
    agent: Agent,
    pub(super) endpoint: Url,
    pub(super) token: Option<Token>,
    tell: Observer<'o>,
}

/// A request and the context of its errors.
pub(super) struct Ask<'a> {
    pub(super) method: &'static str,
    pub(super) url: Url,
    pub(super) headers: Vec<(&'a str, String)>,
    pub(super) body: Body<'a>,
    pub(super) about: About<'a>,
}

pub(super) enum Body<'a> {
    Nothing,
    Json(&'a Value),
    Lines(&'a [u8]),
    /// A range of a file.
    Part {
        path: &'a Path,
        offset: u64,
        length: u64,
    },
}

/// The context of a request, for error messages.
#[derive(Clone, Copy)]
pub(super) struct About<'a> {
    pub(super) repo: &'a Repo,
    pub(super) revision: &'a str,
    pub(super) file: Option<&'a str>,
    /// An -ing verb with its object, as in "downloading x".
    pub(super) doing: &'a str,
}

impl<'a> Ask<'a> {
    pub(super) fn get(url: Url, about: About<'a>) -> Self {
        Self { method: "GET", url, headers: Vec::new(), body: Body::Nothing, about }
    }

    pub(super) fn post(url: Url, body: Body<'a>, about: About<'a>) -> Self {
        Self { method: "POST", url, headers: Vec::new(), body, about }
    }
}

impl<'o> Client<'o> {
    pub(super) fn new(
        endpoint: Url,
        token: Option<Token>,
        setting: &dyn Fn(&str) -> Option<String>,
        tell: Observer<'o>,
    ) -> Result<Self, HubError> {
        let agent = ureq::AgentBuilder::new()
            .redirects(0) // followed here, so that the token is not sent along
            .tls_config(trusted())
            .timeout_connect(CONNECT_TIMEOUT)
            .timeout_read(READ_TIMEOUT)
            .timeout_write(READ_TIMEOUT)
            .user_agent(concat!("medusa-train/", env!("CARGO_PKG_VERSION")));
        let agent = match proxy(&endpoint, setting) {
            Some((name, address)) => {
                let address = ureq::Proxy::new(address); // its error would quote a password
                agent.proxy(address.map_err(|_| HubError::setting(name, "http://host:port"))?)
            }
            None => agent,
        };
        Ok(Self { agent: agent.build(), endpoint, token, tell })
    }

    /// A URL of the Hub; every part becomes one escaped path segment.
    pub(super) fn url(&self, parts: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        url.path_segments_mut().expect("an http address").pop_if_empty().extend(parts);
        url
    }

    /// A URL of a repository in the API.
    pub(super) fn api(&self, repo: &Repo, parts: &[&str]) -> Url {
        self.url(&[&["api", repo.plural(), &repo.owner, &repo.name], parts].concat())
    }

    /// A URL of a repository's pages and files.
    pub(super) fn page(&self, repo: &Repo, parts: &[&str]) -> Url {
        let prefix: &[&str] = if repo.kind == RepoKind::Dataset { &["datasets"] } else { &[] };
        self.url(&[prefix, &[&repo.owner, &repo.name], parts].concat())
    }

    /// The endpoint as shown in messages.
    pub(super) fn name(&self) -> String {
        self.endpoint.as_str().trim_end_matches('/').to_owned()
    }

    /// Sends a request; retries a few times with pauses on server and network trouble.
    pub(super) fn send(&self, ask: &Ask<'_>) -> Result<Response, HubError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let pause = match self.follow(ask)? {
                Ok(response) if response.status() < 400 => return Ok(response),
                Ok(response) if is_trouble(response.status()) => {
                    let host = self.host_of(response.get_url());
                    let asked = retry_after(&response);
                    if tries == TRIES || asked.is_some_and(|seconds| seconds > LONGEST_WAIT) {
                        return Err(self.busy(ask, response, tries));
                    }
                    let why = format!("{host} answered {}", response.status());
                    (asked.unwrap_or(1 << (tries - 1)), why)
                }
                Ok(response) => return Err(self.refusal(ask, response)),
                Err(transport) => {
                    let reason = reason(&transport);
                    let limit = if is_connection(&transport) { CONNECTION_TRIES } else { TRIES };
                    if tries == limit {
                        let doing = ask.about.doing.to_owned();
                        let endpoint = self.host_of(transport.url().unwrap_or(&ask.url).as_str());
                        return Err(HubError::Unreachable { endpoint, reason, doing });
                    }
                    (1 << (tries - 1), reason)
                }
            };
            let (seconds, why) = pause;
            (self.tell)(TransferEvent::Waiting { seconds, why });
            std::thread::sleep(Duration::from_secs(seconds));
        }
    }

    /// Sends a request and parses the JSON response.
    pub(super) fn json<T: DeserializeOwned>(&self, ask: &Ask<'_>) -> Result<T, HubError> {
        self.read_json(ask, self.send(ask)?)
    }

    pub(super) fn read_json<T: DeserializeOwned>(&self, ask: &Ask<'_>, response: Response) -> Result<T, HubError> {
        let endpoint = self.host_of(response.get_url());
        let bad = |reason: String| {
            let (endpoint, doing) = (endpoint.clone(), ask.about.doing.to_owned());
            HubError::BadAnswer { endpoint, doing, reason: self.clean(&reason) }
        };
        let mut bytes = Vec::new();
        response.into_reader().take(RESPONSE_BYTES).read_to_end(&mut bytes).map_err(|error| bad(error.to_string()))?;
        serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))
    }

    pub(super) fn bad_answer(&self, doing: &str, reason: impl Into<String>) -> HubError {
        self.bad_answer_of(self.endpoint.as_str(), doing, reason)
    }

    /// As [`Client::bad_answer`], for a response from this URL.
    pub(super) fn bad_answer_of(&self, address: &str, doing: &str, reason: impl Into<String>) -> HubError {
        HubError::BadAnswer { endpoint: self.host_of(address), doing: doing.into(), reason: reason.into() }
    }

    /// Sends once and follows redirects.
    fn follow(&self, ask: &Ask<'_>) -> Result<Result<Response, Transport>, HubError> {
        let mut url = ask.url.clone();
        for _ in 0..=REDIRECTS {
            let response = match self.once(ask, &url)? {
                Ok(response) => response,
                Err(transport) => return Ok(Err(transport)),
            };
            if !matches!(response.status(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Ok(response));
            }
            let next = header(&response, "location").and_then(|to| url.join(to).ok());
            url = next
                .filter(|next| may_follow(&url, next))
                .ok_or_else(|| self.bad_answer_of(url.as_str(), ask.about.doing, "a redirection to nowhere"))?;
        }
        Err(self.bad_answer(ask.about.doing, "too many redirections"))
    }

    fn once(&self, ask: &Ask<'_>, url: &Url) -> Result<Result<Response, Transport>, HubError> {
        let mut request = self.agent.request_url(ask.method, url).set("Accept-Encoding", "identity");
        if let Some(token) = self.token.as_ref().filter(|_| url.origin() == self.endpoint.origin()) {
            request = request.set("Authorization", &token.header());
        }
        for (name, value) in &ask.headers {
            request = request.set(name, value);
        }
        let moved = AtomicU64::new(0);
        // ureq panics on a header without a colon.
        let sent = panics::of_library(|| self.sent(request, ask, &moved));
        let answer = sent.map_err(|panic| self.bad_answer_of(url.as_str(), ask.about.doing, panic))??;
        if !answer.as_ref().is_ok_and(|answer| answer.status() < 300) {
            (self.tell)(TransferEvent::Lost(moved.into_inner())); // the bytes counted so far have to be sent again
        }
        Ok(answer)
    }

    /// The answer, or why there is none; fails if a file that is to be sent cannot be read.
    fn sent(
        &self,
        request: ureq::Request,
        ask: &Ask<'_>,
        moved: &AtomicU64,
    ) -> Result<Result<Response, Transport>, HubError> {
        let sent = match ask.body {
            Body::Nothing => request.call(),
            Body::Json(value) => {
                let request =
                    if request.has("Content-Type") { request } else { request.set("Content-Type", "application/json") };
                request.send_bytes(value.to_string().as_bytes())
            }
            Body::Lines(bytes) => request.set("Content-Type", "application/x-ndjson").send_bytes(bytes),
            Body::Part { path, offset, length } => {
                let part = || -> io::Result<File> {
                    let mut file = files::open_regular(path)?;
                    file.seek(SeekFrom::Start(offset))?;
                    Ok(file)
                };
                let file = part().map_err(HubError::io("read", path))?;
                let counted = CountedUpload { inner: file.take(length), moved, tell: self.tell };
                request.set("Content-Length", &length.to_string()).send(counted)
            }
        };
        Ok(sent.or_any_status())
    }

    /// The host that answered, which may be one that the Hub redirected to. Never the whole URL: a signed one grants
    /// access.
    fn host_of(&self, address: &str) -> String {
        let origin = Url::parse(address).map_or_else(|_| self.endpoint.origin(), |url| url.origin());
        if origin == self.endpoint.origin() { self.name() } else { origin.ascii_serialization() }
    }

    /// Text from outside: the token and control characters are removed, and the length is limited.
    pub(super) fn clean(&self, text: &str) -> String {
        let text = self.token.as_ref().map_or_else(|| text.to_owned(), |token| token.removed_from(text));
        text.chars().filter(|c| !c.is_control()).take(QUOTED_CHARACTERS).collect()
    }
}

/// Reports the bytes read to the observer.
struct CountedUpload<'o, R> {
    inner: R,
    moved: &'o AtomicU64,
    tell: Observer<'o>,
}

impl<R: Read> Read for CountedUpload<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.moved.fetch_add(count as u64, Ordering::Relaxed);
        (self.tell)(TransferEvent::Moved(count as u64));
        Ok(count)
    }
}

/// Whether a redirect from one URL to another is allowed: never from https to http.
pub(super) fn may_follow(here: &Url, next: &Url) -> bool {
    matches!(next.scheme(), "http" | "https") && (here.scheme() == "http" || next.scheme() == "https")
}

fn is_trouble(status: u16) -> bool {
    matches!(status, 429 | 500 | 502 | 503 | 504)
}

/// How long the Hub asks to wait, in seconds: `Retry-After` (the Hub never sends a date), or the end of the rate-limit
/// window.
fn retry_after(response: &Response) -> Option<u64> {
    let told = || header(response, "retry-after")?.trim().parse().ok();
    told().or_else(|| window_end(header(response, "ratelimit")?))
}

/// `"api";r=0;t=55` (draft-ietf-httpapi-ratelimit-headers): nothing remains for 55 seconds. Adds one second, since the
/// header rounds.
fn window_end(header: &str) -> Option<u64> {
    let value = |key: &str| header.split(';').find_map(|part| part.trim().strip_prefix(key)?.parse::<u64>().ok());
    value("t=").filter(|_| value("r=") == Some(0)).map(|seconds| seconds + 1)
}

fn is_connection(transport: &Transport) -> bool {
    matches!(
        transport.kind(),
        ErrorKind::Dns | ErrorKind::ConnectionFailed | ErrorKind::ProxyConnect | ErrorKind::ProxyUnauthorized
    )
}

/// The reason without the URL, which may be signed.
fn reason(transport: &Transport) -> String {
    let source = std::error::Error::source(transport).map(|source| format!(": {source}"));
    format!("{}{}", transport.kind(), source.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotas_window_is_waited_for_when_nothing_remains() {
        assert_eq!(window_end("\"api\";r=0;t=55"), Some(56));
        assert_eq!(window_end("\"api\"; r=12; t=55"), None);
        assert_eq!(window_end("nonsense"), None);
    }
}
