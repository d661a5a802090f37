//! The routes of a server whose worker is the test. Time stands still while something runs, and jumps to the next timer when nothing does.

mod refusals;
mod streams;
mod texts;
mod worker;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::request::Builder;
use axum::http::{HeaderValue, Version};
use axum::response::Response;
use futures_util::stream;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::ServiceExt;

use super::acceptance::AcceptanceRules;
use super::auth::ApiKeys;
use super::connections::Phase;
use super::host_names::HostNames;
use super::job::{EndedText, Job, TextEvent, TextPiece};
use super::metrics::ServerMetrics;
use super::prompting::Prompting;
use super::record::{LogSink, Recorder};
use super::routes::routes;
use super::service::{RequestLimits, Service};
use crate::data::chat_template::ChatTemplate;
use crate::data::tokenize::TextTokenizer;
use crate::decode::request::FinishReason;
use crate::decode::stats::GeneratedTokens;
use crate::tree::accept::{Acceptance, TypicalAcceptance};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Texts that are decoded or wait.
const PLACES: usize = 4;
/// Of a body; a small one has at most half as many.
const BODY_BYTES: usize = 128 << 10;
/// Two of the largest bodies.
const BODIES_KIB: usize = 256;
/// From a request to the end of its answer.
const TIME: Duration = Duration::from_secs(600);
/// For its body.
const BODY_TIME: Duration = Duration::from_secs(30);

/// Read once for all tests.
static PROMPTING: LazyLock<Prompting> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    Prompting {
        tokenizer: Arc::new(TextTokenizer::load(&folder).expect("a tokenizer")),
        template: ChatTemplate::load(&folder).expect("a template").map(Arc::new),
        context: 64,
    }
});

struct FakeServer {
    service: Arc<Service>,
    phase: watch::Sender<Phase>,
    jobs: Receiver<Job>,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl FakeServer {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Service)) -> Self {
        let (jobs, heard_jobs) = channel();
        let (phase, heard_phase) = watch::channel(Phase::Serving);
        let lines = Arc::new(Mutex::new(vec![]));
        let written = lines.clone();
        let sink: LogSink = Arc::new(move |line| written.lock().expect("no test panics").push(line.clone()));
        let metrics = ServerMetrics::new().expect("names differ");
        let mut service = Service {
            model: "tiny".to_owned(),
            created: 7,
            prompting: PROMPTING.clone(),
            limits: RequestLimits { body_bytes: BODY_BYTES, body_time: BODY_TIME, new_tokens: None, time: TIME },
            keys: ApiKeys::default(),
            hosts: HostNames::Any,
            recorder: Recorder { sink, metrics, logs_texts: false },
            jobs,
            places: Arc::new(Semaphore::new(PLACES)),
            capacity: PLACES,
            bodies: Arc::new(Semaphore::new(BODIES_KIB)),
            phase: heard_phase,
            acceptance: AcceptanceRules {
                server_rule: Some(Acceptance::Rejection),
                typical: TypicalAcceptance::default(),
            },
        };
        change(&mut service);
        Self { service: Arc::new(service), phase, jobs: heard_jobs, lines }
    }

    /// Sends it with a Host, if it has none and is no request of HTTP/1.0.
    fn send(&self, mut request: Request) -> JoinHandle<Response> {
        if request.version() > Version::HTTP_10 {
            request.headers_mut().entry(HOST).or_insert(HeaderValue::from_static("localhost"));
        }
        let routes = routes(&self.service, None);
        tokio::spawn(async move { routes.oneshot(request).await.expect("routes answer everything") })
    }

    fn post(&self, path: &str, body: &Value) -> JoinHandle<Response> {
        self.send(posted(path).body(body.to_string().into()).expect("a request"))
    }

    /// The next text that a request asks for.
    async fn job(&self) -> Job {
        for _ in 0..1000 {
            match self.jobs.try_recv() {
                Ok(job) => return job,
                Err(_) => sleep(Duration::from_millis(1)).await,
            }
        }
        panic!("no job came: {:?}", self.lines());
    }

    /// A request for one text, and its job.
    async fn begun(&self, path: &str, body: &Value) -> (JoinHandle<Response>, Job) {
        let answer = self.post(path, body);
        (answer, self.job().await)
    }

    fn lines(&self) -> Vec<Value> {
        self.lines.lock().expect("no test panics").clone()
    }

    /// The only line of the log.
    fn line(&self) -> Value {
        let lines = self.lines();
        let [line] = &lines[..] else { panic!("one line: {lines:?}") };
        line.clone()
    }

    fn free_places(&self) -> usize {
        self.service.places.available_permits()
    }

    fn page(&self) -> String {
        String::from_utf8(self.service.recorder.metrics.page().expect("a page")).expect("UTF-8")
    }
}

/// Runs a test where time is the test's.
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(test);
}

fn posted(path: &str) -> Builder {
    Request::post(path).header(CONTENT_TYPE, "application/json").header(HOST, "localhost")
}

fn get(path: &str) -> Request {
    Request::get(path).body(Body::empty()).expect("a request")
}

/// A completion of one prompt of three tokens.
fn completion(more: &Value) -> Value {
    with(json!({"model": "tiny", "prompt": [5, 6, 7]}), more)
}

fn chat(more: &Value) -> Value {
    with(json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}), more)
}

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// A body of which nothing comes.
fn endless_body() -> Body {
    Body::from_stream(stream::pending::<Result<Bytes, std::convert::Infallible>>())
}

async fn text_of(response: Response) -> String {
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    String::from_utf8(bytes.into()).expect("UTF-8")
}

async fn json_of(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = text_of(response).await;
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}")))
}

async fn answer(sent: JoinHandle<Response>) -> (u16, Value) {
    json_of(sent.await.expect("no panic")).await
}

fn piece(text: &str, ids: &[i64]) -> TextEvent {
    TextEvent::Piece(TextPiece { text: text.to_owned(), ids: ids.to_vec(), logprobs: vec![] })
}

/// The end of a text of three tokens in two steps, of whose four guesses one became text.
fn ended(text: &str, ids: &[i64], reason: FinishReason) -> TextEvent {
    let piece = TextPiece { text: text.to_owned(), ids: ids.to_vec(), logprobs: vec![] };
    let generated = GeneratedTokens { tokens: 3, steps: 2 };
    TextEvent::Ended(piece, EndedText { reason, generated, cached_tokens: 2, proposed: 4 })
}

/// Sends a text's events; its place is free from then on.
fn finish(job: Job, events: impl IntoIterator<Item = TextEvent>) {
    for event in events {
        assert!(job.send(event), "somebody waits for it");
    }
}

fn limit(tokens: usize) -> Option<NonZeroUsize> {
    NonZeroUsize::new(tokens)
}
