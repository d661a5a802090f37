//! Requests to the server: bytes of a connection without its socket, and bodies without their connection. A thread plays the model.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::tokenize::TextTokenizer;
use medusa::decode::request::FinishReason;
use medusa::decode::stats::GeneratedTokens;
use medusa::serve::acceptance::AcceptanceRules;
use medusa::serve::api::Endpoint;
use medusa::serve::auth::ApiKeys;
use medusa::serve::connections::Phase;
use medusa::serve::host_names::HostNames;
use medusa::serve::job::{EndedText, Job, TextEvent, TextPiece};
use medusa::serve::metrics::ServerMetrics;
use medusa::serve::prompting::Prompting;
use medusa::serve::record::Recorder;
use medusa::serve::routes::routes;
use medusa::serve::service::{RequestBody, RequestLimits, Service};
use medusa::tree::accept::{Acceptance, TypicalAcceptance};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use super::scratch::{choice, folder, write};

/// Texts that are decoded or wait.
const PLACES: usize = 4;
const BODY_BYTES: usize = 128 << 10;
const TIME: Duration = Duration::from_secs(600);

/// One server for all inputs. Its phase is that of a sender which is never dropped.
static SERVICE: LazyLock<Arc<Service>> = LazyLock::new(|| {
    let folder = folder("serve");
    write(&folder.join("tokenizer.model"), include_bytes!("../../../tests/fixtures/tokenizers/suffix.model"));
    let choice = TemplateChoice::try_from("zephyr".to_owned()).expect("a built-in template");
    let template = ChatTemplate::choose(&choice, &folder).expect("a template that parses");
    let (jobs, heard_jobs) = channel();
    let (phase, heard_phase) = watch::channel(Phase::Serving);
    Box::leak(Box::new(phase));
    thread::spawn(move || write_texts(&heard_jobs));
    Arc::new(Service {
        model: "tiny".to_owned(),
        created: 7,
        prompting: Prompting {
            tokenizer: Arc::new(TextTokenizer::load(&folder).expect("a tokenizer of the fixtures")),
            template: template.map(Arc::new),
            context: 64,
        },
        limits: RequestLimits { body_bytes: BODY_BYTES, body_time: TIME, new_tokens: None, time: TIME },
        keys: ApiKeys::new(["key"]),
        hosts: HostNames::loopback_and(["a.test"]),
        recorder: Recorder {
            sink: Arc::new(|line| assert!(line.is_object(), "a line of the log: {line}")),
            metrics: ServerMetrics::new().expect("names differ"),
            logs_texts: true,
        },
        jobs,
        places: Arc::new(Semaphore::new(PLACES)),
        capacity: PLACES,
        bodies: Arc::new(Semaphore::new(256)),
        phase: heard_phase,
        acceptance: AcceptanceRules { server_rule: Some(Acceptance::Rejection), typical: TypicalAcceptance::default() },
    })
});

thread_local! {
    static RUNTIME: Runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
}

/// Every text is "é\n", in two pieces, or refused.
fn write_texts(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let piece = |text: &str, ids: &[i64]| TextPiece { text: text.to_owned(), ids: ids.to_vec(), logprobs: vec![] };
        let tokens = job.text.request().prompt.len();
        if tokens % 8 == 7 {
            job.send(TextEvent::Refused("no text of so many tokens".to_owned()));
            continue;
        }
        let reason = [FinishReason::Eos, FinishReason::Length, FinishReason::Stop][tokens % 3];
        let generated = GeneratedTokens { tokens: 2, steps: 1 };
        let ended = EndedText { reason, generated, cached_tokens: 1, proposed: 4 };
        job.send(TextEvent::Piece(piece("\u{e9}", &[5])));
        job.send(TextEvent::Ended(piece("\n", &[6]), ended));
    }
}

/// The bytes of a connection. Behind a `c` or a `t`, the body of a chat or of a completion, whose line and headers are right.
pub(super) fn http(input: &[u8]) {
    let (form, rest) = choice(input);
    let posted = |path: &str| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            rest.len()
        );
        [head.as_bytes(), rest].concat()
    };
    let sent = match form {
        b'c' => posted("/v1/chat/completions"),
        b't' => posted("/v1/completions"),
        _ => input.to_vec(),
    };
    let got = RUNTIME.with(|runtime| runtime.block_on(connection(sent)));
    let got = String::from_utf8_lossy(&got);
    assert!(got.is_empty() || got.starts_with("HTTP/1."), "an answer that is none: {got}");
    assert!(!got.contains("HTTP/1.1 500"), "an error of our own: {got}");
}

/// What a client gets that sends all at once, and then only reads.
async fn connection(sent: Vec<u8>) -> Vec<u8> {
    let (client, server) = duplex(1 << 16);
    let service = service_fn(|request: Request<Incoming>| routes(&SERVICE, None).oneshot(request.map(Body::new)));
    let answering = http1::Builder::new().half_close(true).serve_connection(TokioIo::new(server), service);
    let (mut reading, mut writing) = tokio::io::split(client);
    let send = async {
        let _ = writing.write_all(&sent).await; // the server may have closed
        let _ = writing.shutdown().await;
    };
    let mut got = Vec::new();
    let (_, (), _) = tokio::join!(answering, send, reading.read_to_end(&mut got));
    got
}

/// The body of a request, up to the tokens of its prompts.
pub(super) fn request(input: &[u8]) {
    let (form, json) = choice(input);
    let endpoint = if form == b't' { Endpoint::Completions } else { Endpoint::Chat };
    match SERVICE.checked(endpoint, RequestBody { json: json.to_vec().into(), memory: None }) {
        Ok(checked) => assert!(checked.prompts.iter().all(|prompt| !prompt.is_empty() && prompt.len() < 64)),
        Err(error) => {
            assert!((400..500).contains(&error.status()), "an error that is not the client's: {error:?}");
            assert!(error.to_json().is_object());
        }
    }
}
