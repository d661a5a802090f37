//! HTTP client of the Hub: sends the token only to the Hub itself and never to redirects, waits when asked to, and maps
//! each refusal to one error.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::{Agent, ErrorKind, OrAnyStatus, Response, Transport};
use url::{Host, Url};

use super::id::{Repo, RepoKind};
use super::token::Token;
use super::{HubError, Observer, TransferEvent};

const TRIES: u32 = 5;
/// Tries of a host that cannot be reached: an unknown name will still be unknown in a minute.
const CONNECTION_TRIES: u32 = 3;
/// Longest wait that is accepted, in seconds.
const LONGEST_WAIT: u64 = 300;
const REDIRECTS: u32 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout between two reads, not of the whole response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Characters of an error message from the server.
const LONGEST_MESSAGE: usize = 300;
/// Bytes of a JSON response; a page of a tree lists a thousand files.
const LONGEST_JSON: u64 = 64 << 20;

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
        response.into_reader().take(LONGEST_JSON).read_to_end(&mut bytes).map_err(|error| bad(error.to_string()))?;
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
            let next = response.header("location").and_then(|to| url.join(to).ok());
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
                    let mut file = File::open(path)?;
                    file.seek(SeekFrom::Start(offset))?;
                    Ok(file)
                };
                let file = part().map_err(HubError::io("read", path))?;
                let counted = CountedUpload { inner: file.take(length), moved: &moved, tell: self.tell };
                request.set("Content-Length", &length.to_string()).send(counted)
            }
        };
        let answer = sent.or_any_status();
        if !answer.as_ref().is_ok_and(|answer| answer.status() < 300) {
            (self.tell)(TransferEvent::Lost(moved.into_inner())); // the bytes counted so far have to be sent again
        }
        Ok(answer)
    }

    /// The host that answered, which may be one that the Hub redirected to. Never the whole URL: a signed one grants
    /// access.
    fn host_of(&self, address: &str) -> String {
        let origin = Url::parse(address).map_or_else(|_| self.endpoint.origin(), |url| url.origin());
        if origin == self.endpoint.origin() { self.name() } else { origin.ascii_serialization() }
    }

    fn refusal(&self, ask: &Ask<'_>, response: Response) -> HubError {
        let About { repo, revision, file, doing } = ask.about;
        let (status, code) = (response.status(), response.header("x-error-code").unwrap_or_default().to_owned());
        let endpoint = self.host_of(response.get_url());
        if endpoint != self.name() && code.is_empty() {
            // An object store, which knows neither repositories nor tokens. A mirror sends the Hub's error codes.
            let message = self.message(response);
            return HubError::Refused { endpoint, doing: doing.into(), status, message };
        }
        let id = format!("{repo}@{revision}");
        let kind = if repo.kind == RepoKind::Dataset { "data set" } else { "model" };
        let no_repo = || HubError::NoRepo {
            endpoint: endpoint.clone(),
            repo: format!("{kind} {repo}"),
            token: self.token_words(),
        };
        let message = self.message(response);
        if let Some(token) = self.token.as_ref().filter(|_| status == 401 && message.contains("Invalid credentials")) {
            return HubError::WrongToken { endpoint, from: token.from.clone() };
        }
        match (code.as_str(), status) {
            ("GatedRepo", _) => {
                HubError::Gated { repo: repo.to_string(), page: self.page(repo, &[]).into(), token: self.token_words() }
            }
            ("RevisionNotFound", _) => {
                HubError::NoRevision { repo: format!("{kind} {repo}"), revision: revision.into() }
            }
            ("EntryNotFound", _) => HubError::NoFile { id, file: file.unwrap_or_default().into(), holds: Vec::new() },
            ("RepoNotFound", _) => no_repo(),
            (_, 401) if self.token.is_none() && ask.method != "GET" => HubError::NeedsToken { endpoint },
            (_, 401) => no_repo(), // the Hub answers so for repositories that the user may not see
            (_, 403) => {
                let token = self.token_words();
                HubError::Forbidden { endpoint, doing: doing.into(), token, message }
            }
            (_, 412) => HubError::Moved { repo: repo.to_string() },
            _ => HubError::Refused { endpoint, doing: doing.into(), status, message },
        }
    }

    fn busy(&self, ask: &Ask<'_>, response: Response, tries: u32) -> HubError {
        let (status, wait) = (response.status(), retry_after(&response));
        let endpoint = self.host_of(response.get_url());
        let message = match wait.filter(|seconds| *seconds > LONGEST_WAIT) {
            Some(seconds) => format!("it asks to wait {seconds} seconds"),
            None => self.message(response),
        };
        let doing = ask.about.doing.to_owned();
        HubError::Busy { endpoint, status, doing, tries, message }
    }

    /// The token's source, for messages.
    fn token_words(&self) -> String {
        self.token.as_ref().map_or_else(|| "no token was sent".into(), |token| format!("the token from {}", token.from))
    }

    /// The server's error message, from the header or the JSON body.
    fn message(&self, response: Response) -> String {
        if let Some(message) = response.header("x-error-message") {
            return self.clean(message);
        }
        let mut bytes = Vec::new();
        let _ = response.into_reader().take(1 << 16).read_to_end(&mut bytes); // without a body the status has to do
        let json: Option<Value> = serde_json::from_slice(&bytes).ok();
        let error = json.as_ref().and_then(|json| json.get("error")).and_then(Value::as_str);
        self.clean(error.unwrap_or_default())
    }

    /// Text from outside: the token and control characters are removed, and the length is limited.
    pub(super) fn clean(&self, text: &str) -> String {
        let text = self.token.as_ref().map_or_else(|| text.to_owned(), |token| token.removed_from(text));
        text.chars().filter(|c| !c.is_control()).take(LONGEST_MESSAGE).collect()
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
    let told = || response.header("retry-after")?.trim().parse().ok();
    told().or_else(|| window_end(response.header("ratelimit")?))
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

/// Mozilla's root certificates, compiled in, and those of this machine (`SSL_CERT_FILE`, `SSL_CERT_DIR` or the system's
/// store).
fn trusted() -> Arc<ClientConfig> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs); // broken certificates are skipped
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// The proxy's variable and address; `None` for the local machine and hosts in `NO_PROXY`.
fn proxy(endpoint: &Url, setting: &dyn Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let names: [&'static str; 4] = match endpoint.scheme() {
        "https" => ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"],
        _ => ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"],
    };
    let host = endpoint.host_str()?;
    let is_local = match endpoint.host()? {
        Host::Domain(name) => name == "localhost",
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.is_loopback(),
    };
    let excepted = setting("NO_PROXY").or_else(|| setting("no_proxy")).unwrap_or_default();
    let is_excepted = excepted.split(',').map(|name| name.trim().trim_start_matches('.')).any(|name| {
        name == "*"
            || name == host
            || !name.is_empty() && host.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
    });
    let found = names.into_iter().find_map(|name| Some((name, setting(name)?)));
    found.filter(|_| !is_local && !is_excepted)
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

    #[test]
    fn a_proxy_is_for_other_machines() {
        let found = |endpoint: &str, pairs: &[(&str, &str)]| {
            let setting = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            proxy(&Url::parse(endpoint).unwrap(), &setting).map(|(name, _)| name)
        };
        let both = [("HTTPS_PROXY", "http://p:1"), ("http_proxy", "http://p:2")];
        assert_eq!(found("https://huggingface.co", &both), Some("HTTPS_PROXY"));
        assert_eq!(found("http://hub.example", &both), Some("http_proxy"));
        assert_eq!(found("http://127.0.0.1:8", &both), None);
        assert_eq!(found("http://localhost:8", &both), None);
        let excepted = [("ALL_PROXY", "http://p:1"), ("NO_PROXY", "a.example, .huggingface.co")];
        assert_eq!(found("https://huggingface.co", &excepted), None);
        assert_eq!(found("https://hub.huggingface.co", &excepted), None);
        assert_eq!(found("https://nothuggingface.co", &excepted), Some("ALL_PROXY"));
    }
}
