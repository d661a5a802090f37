//! HTTP client of the Hub: sends the token only to the Hub itself and never to redirects, and waits when asked to.

mod refusal;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::http::Request;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use ureq::http::request::Builder;
use ureq::{Agent, Error, ResponseExt, SendBody};
use url::Url;

use super::id::{Repo, RepoKind};
use super::token::Token;
use super::{HubError, Observer, TransferEvent};
use crate::bounds::{QUOTED_CHARACTERS, RESPONSE_BYTES};
use crate::files;
use crate::http::connection::{self, HttpAnswer, header, proxy};
use crate::http::connector::{is_unconnected, reason};

const TRIES: u32 = 5;
/// Tries of a host that cannot be reached: an unknown name will still be unknown in a minute.
const CONNECTION_TRIES: u32 = 3;
/// Longest wait that is accepted, in seconds.
const LONGEST_WAIT: u64 = 300;
const REDIRECTS: u32 = 5;
/// Timeout of each read and write, not of the whole response.
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a redirection's body that are read, so that its connection can be used again.
const REDIRECTION_BYTES: u64 = 1 << 16;

pub(super) struct Client<'o> {
    agent: Agent,
    pub(super) endpoint: Url,
    pub(super) token: Option<Token>,
    observer: Observer<'o>,
}

/// A request and the context of its errors.
pub(super) struct Ask<'a> {
    pub(super) method: &'static str,
    pub(super) url: Url,
    pub(super) headers: Vec<(&'a str, String)>,
    pub(super) body: Body<'a>,
    pub(super) about: RequestContext<'a>,
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
pub(super) struct RequestContext<'a> {
    pub(super) repo: &'a Repo,
    pub(super) revision: &'a str,
    pub(super) file: Option<&'a str>,
    /// An -ing verb with its object, as in "downloading x".
    pub(super) doing: &'a str,
}

impl<'a> Ask<'a> {
    pub(super) fn get(url: Url, about: RequestContext<'a>) -> Self {
        Self { method: "GET", url, headers: Vec::new(), body: Body::Nothing, about }
    }

    pub(super) fn post(url: Url, body: Body<'a>, about: RequestContext<'a>) -> Self {
        Self { method: "POST", url, headers: Vec::new(), body, about }
    }
}

impl<'o> Client<'o> {
    pub(super) fn new(
        endpoint: Url,
        token: Option<Token>,
        setting: &dyn Fn(&str) -> Option<String>,
        observer: Observer<'o>,
    ) -> Result<Self, HubError> {
        let proxy = proxy(&endpoint, setting).map_err(|name| HubError::setting(name, "http://host:port"))?;
        let settings = connection::settings(proxy);
        let settings = settings.timeout_per_read(Some(IO_TIMEOUT)).timeout_per_write(Some(IO_TIMEOUT));
        Ok(Self { agent: connection::agent(settings), endpoint, token, observer })
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
    pub(super) fn send(&self, ask: &Ask<'_>) -> Result<HttpAnswer, HubError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let pause = match self.follow(ask)? {
                Ok(response) if response.status().as_u16() < 400 => return Ok(response),
                Ok(response) if is_trouble(response.status().as_u16()) => {
                    let host = self.host_of(&address(&response));
                    let asked = retry_after(&response);
                    if tries == TRIES || asked.is_some_and(|seconds| seconds > LONGEST_WAIT) {
                        return Err(self.busy(ask, response, tries));
                    }
                    let why = format!("{host} answered {}", response.status().as_u16());
                    (asked.unwrap_or(1 << (tries - 1)), why)
                }
                Ok(response) => return Err(self.refusal(ask, response)),
                Err((url, why)) => {
                    let limit = if is_unconnected(&why) { CONNECTION_TRIES } else { TRIES };
                    let reason = reason(&why);
                    if tries == limit {
                        let (endpoint, doing) = (self.host_of(url.as_str()), ask.about.doing.to_owned());
                        return Err(HubError::Unreachable { endpoint, reason, doing });
                    }
                    (1 << (tries - 1), reason)
                }
            };
            let (seconds, why) = pause;
            (self.observer)(TransferEvent::Waiting { seconds, why });
            std::thread::sleep(Duration::from_secs(seconds));
        }
    }

    /// Sends a request and parses the JSON response.
    pub(super) fn json<T: DeserializeOwned>(&self, ask: &Ask<'_>) -> Result<T, HubError> {
        self.read_json(ask, self.send(ask)?)
    }

    pub(super) fn read_json<T: DeserializeOwned>(&self, ask: &Ask<'_>, response: HttpAnswer) -> Result<T, HubError> {
        let endpoint = self.host_of(&address(&response));
        let bad = |reason: String| {
            let (endpoint, doing) = (endpoint.clone(), ask.about.doing.to_owned());
            HubError::BadAnswer { endpoint, doing, reason: self.clean(&reason) }
        };
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(RESPONSE_BYTES);
        body.read_to_end(&mut bytes).map_err(|error| bad(reason(&error.into())))?;
        serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))
    }

    pub(super) fn bad_answer(&self, doing: &str, reason: impl Into<String>) -> HubError {
        self.bad_answer_of(self.endpoint.as_str(), doing, reason)
    }

    /// As [`Client::bad_answer`], for a response from this URL.
    pub(super) fn bad_answer_of(&self, address: &str, doing: &str, reason: impl Into<String>) -> HubError {
        HubError::BadAnswer { endpoint: self.host_of(address), doing: doing.into(), reason: reason.into() }
    }

    /// Sends once and follows redirects. Without an answer, where none came from and why.
    fn follow(&self, ask: &Ask<'_>) -> Result<Result<HttpAnswer, (Url, Error)>, HubError> {
        let mut url = ask.url.clone();
        for _ in 0..=REDIRECTS {
            let response = match self.once(ask, &url)? {
                Ok(response) => response,
                Err(why) => return Ok(Err((url, why))),
            };
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Ok(response));
            }
            let next = header(&response, "location").and_then(|to| url.join(to).ok());
            url = next
                .filter(|next| may_follow(&url, next))
                .ok_or_else(|| self.bad_answer_of(url.as_str(), ask.about.doing, "a redirection to nowhere"))?;
            let mut body = response.into_body().into_reader().take(REDIRECTION_BYTES);
            let _ = io::copy(&mut body, &mut io::sink()); // it says no more than the header
        }
        Err(self.bad_answer(ask.about.doing, "too many redirections"))
    }

    fn once(&self, ask: &Ask<'_>, url: &Url) -> Result<Result<HttpAnswer, Error>, HubError> {
        let mut request = Request::builder().method(ask.method).uri(url.as_str()).header("Accept-Encoding", "identity");
        if let Some(token) = self.token.as_ref().filter(|_| url.origin() == self.endpoint.origin()) {
            request = request.header("Authorization", token.header());
        }
        for (name, value) in &ask.headers {
            request = request.header(*name, value);
        }
        let moved = AtomicU64::new(0);
        let answer = self.sent(request, ask, &moved)?;
        if !answer.as_ref().is_ok_and(|answer| answer.status().is_success()) {
            (self.observer)(TransferEvent::Lost(moved.into_inner())); // the bytes counted so far have to be sent again
        }
        match answer {
            // No other try changes a head that is not one of HTTP, or an address that is none.
            Err(why @ (Error::Protocol(_) | Error::LargeResponseHeader(..) | Error::Http(_))) => {
                Err(self.bad_answer_of(url.as_str(), ask.about.doing, reason(&why)))
            }
            answer => Ok(answer),
        }
    }

    /// The answer, or why there is none; fails if a file that is to be sent cannot be read.
    fn sent(&self, request: Builder, ask: &Ask<'_>, moved: &AtomicU64) -> Result<Result<HttpAnswer, Error>, HubError> {
        Ok(match ask.body {
            Body::Nothing => connection::send(&self.agent, request, ()),
            Body::Json(value) => {
                let has_type = request.headers_ref().is_some_and(|headers| headers.contains_key(CONTENT_TYPE));
                let request = if has_type { request } else { request.header(CONTENT_TYPE, "application/json") };
                connection::send(&self.agent, request, value.to_string())
            }
            Body::Lines(bytes) => {
                connection::send(&self.agent, request.header(CONTENT_TYPE, "application/x-ndjson"), bytes)
            }
            Body::Part { path, offset, length } => {
                let part = || -> io::Result<File> {
                    let mut file = files::open_regular(path)?;
                    file.seek(SeekFrom::Start(offset))?;
                    Ok(file)
                };
                let file = part().map_err(HubError::io("read", path))?;
                let mut counted = CountedUpload { inner: file.take(length), moved, observer: self.observer };
                let request = request.header(CONTENT_LENGTH, length);
                connection::send(&self.agent, request, SendBody::from_reader(&mut counted))
            }
        })
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
    observer: Observer<'o>,
}

impl<R: Read> Read for CountedUpload<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into()); // a file that became shorter: ureq would ask for the rest for ever
        }
        self.moved.fetch_add(count as u64, Ordering::Relaxed);
        (self.observer)(TransferEvent::Moved(count as u64));
        Ok(count)
    }
}

/// Where a response came from.
pub(super) fn address(response: &HttpAnswer) -> String {
    response.get_uri().to_string()
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
fn retry_after(response: &HttpAnswer) -> Option<u64> {
    let seconds = || header(response, "retry-after")?.trim().parse().ok();
    seconds().or_else(|| window_end(header(response, "ratelimit")?))
}

/// `"api";r=0;t=55` (draft-ietf-httpapi-ratelimit-headers): nothing remains for 55 seconds. Adds one second, since the
/// header rounds.
fn window_end(header: &str) -> Option<u64> {
    let value = |key: &str| header.split(';').find_map(|part| part.trim().strip_prefix(key)?.parse::<u64>().ok());
    value("t=").filter(|_| value("r=") == Some(0)).map(|seconds| seconds + 1)
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
