//! A server for tests of clients of OpenAI-compatible servers: it speaks HTTP and server-sent events by hand, and breaks off on request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub(crate) struct SeenRequest {
    /// Method and path.
    pub(crate) line: String,
    pub(crate) authorization: Option<String>,
    pub(crate) body: Value,
}

/// What a server answers.
pub(crate) enum Reply {
    /// Status, headers and body.
    Whole(u16, &'static str, String),
    /// A success with JSON, after so many milliseconds.
    Slow(u64, String),
    /// Status 100 and, after so many milliseconds, 103, both of which nobody asked for; then a success with JSON.
    Interim(u64, String),
    /// The headers of an answer, and the first half of its body; then the connection ends.
    Half(String),
    /// Events, each after so many milliseconds.
    Stream(Vec<(u64, String)>),
    /// A status, and a body without an end: a kibibyte after so many milliseconds each.
    Endless(u16, u64),
    /// The connection ends without an answer.
    Nothing,
    /// The connection ends after these events.
    BrokenStream(Vec<(u64, String)>),
}

type Answers = dyn Fn(usize, &SeenRequest) -> Reply + Send + Sync;

/// A server on a port of its own, which ends with the test.
pub(crate) struct TestServer {
    pub(crate) address: String,
    pub(crate) connections: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<SeenRequest>>>,
    pub(crate) most_at_once: Arc<AtomicUsize>,
    /// How often the models are not listed yet.
    pub(crate) loading: Arc<AtomicUsize>,
    /// The models' `max_model_len`; 0: it is not told.
    pub(crate) context: Arc<AtomicUsize>,
}

impl TestServer {
    /// Answers each POST, numbered from 0, and names two models, below any path.
    pub(crate) fn new(answer: impl Fn(usize, &SeenRequest) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let server = Self {
            address,
            connections: Arc::default(),
            seen: Arc::default(),
            most_at_once: Arc::default(),
            loading: Arc::default(),
            context: Arc::default(),
        };
        let (loading, context) = (Arc::clone(&server.loading), Arc::clone(&server.context));
        let (seen, most, answer): (_, _, Arc<Answers>) =
            (Arc::clone(&server.seen), Arc::clone(&server.most_at_once), Arc::new(answer));
        let (now, connections) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&server.connections));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::SeqCst);
                let (seen, most, now, answer) =
                    (Arc::clone(&seen), Arc::clone(&most), Arc::clone(&now), Arc::clone(&answer));
                let (loading, context) = (Arc::clone(&loading), Arc::clone(&context));
                thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
                    while let Some(request) = read_request(&mut reader) {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        let number = {
                            let mut seen = seen.lock().expect("no thread panics with it");
                            seen.push(request.clone());
                            seen.iter().filter(|request| request.line.starts_with("POST")).count()
                        };
                        let lists_models = request.line.starts_with("GET ") && request.line.ends_with("/v1/models");
                        let reply = match lists_models {
                            true if loading.load(Ordering::SeqCst) > 0 => {
                                loading.fetch_sub(1, Ordering::SeqCst);
                                Reply::Whole(503, "", json!({"error": {"message": "loading"}}).to_string())
                            }
                            true => Reply::Whole(200, "", models(context.load(Ordering::SeqCst)).to_string()),
                            false => answer(number - 1, &request),
                        };
                        let goes_on = send(&stream, &reply, &now);
                        if !goes_on {
                            break;
                        }
                    }
                });
            }
        });
        server
    }

    pub(crate) fn posts(&self) -> Vec<SeenRequest> {
        let seen = self.seen.lock().expect("no thread panics with it");
        seen.iter().filter(|request| request.line.starts_with("POST")).cloned().collect()
    }
}

fn models(context: usize) -> Value {
    let model = |id: &str| match context {
        0 => json!({"id": id}),
        _ => json!({"id": id, "max_model_len": context}),
    };
    json!({"data": [model("m-1"), model("m-2")]})
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<SeenRequest> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim() {
            "" => break,
            line => head.push(line.to_owned()),
        }
    }
    let header = |name: &str| {
        let pairs = head.iter().filter_map(|line| line.split_once(": "));
        pairs.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).next()
    };
    let length = header("content-length").map_or(0, |text| text.parse().expect("a length"));
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(SeenRequest {
        line: head.first()?.rsplit_once(' ')?.0.to_owned(),
        authorization: header("authorization"),
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

/// Returns whether the connection stays open. `now` counts the requests in flight, which end with their last byte.
fn send(mut stream: &TcpStream, reply: &Reply, now: &AtomicUsize) -> bool {
    let (events, is_whole) = match reply {
        Reply::Whole(status, headers, body) => {
            now.fetch_sub(1, Ordering::SeqCst);
            let length = body.len();
            let kind = "Content-Type: application/json\r\n";
            let text = format!("HTTP/1.1 {status} X\r\n{kind}Content-Length: {length}\r\n{headers}\r\n{body}");
            return stream.write_all(text.as_bytes()).is_ok();
        }
        Reply::Slow(wait, body) => {
            thread::sleep(Duration::from_millis(*wait));
            return send(stream, &Reply::Whole(200, "", body.clone()), now);
        }
        Reply::Interim(wait, body) => {
            let _ = stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n"); // the answer finds out whether the client is there
            thread::sleep(Duration::from_millis(*wait));
            let _ = stream.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n");
            return send(stream, &Reply::Whole(200, "", body.clone()), now);
        }
        Reply::Half(body) => {
            now.fetch_sub(1, Ordering::SeqCst);
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ =
                stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body.as_bytes()[..body.len() / 2]));
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return false;
        }
        Reply::Endless(status, wait) => {
            now.fetch_sub(1, Ordering::SeqCst);
            let mut written = stream.write_all(format!("HTTP/1.1 {status} X\r\n\r\n").as_bytes());
            while written.is_ok() {
                thread::sleep(Duration::from_millis(*wait));
                written = stream.write_all(&[b'a'; 1024]);
            }
            return false;
        }
        Reply::Nothing => {
            now.fetch_sub(1, Ordering::SeqCst);
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return false;
        }
        Reply::Stream(events) => (events, true),
        Reply::BrokenStream(events) => (events, false),
    };
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut written = stream.write_all(head.as_bytes());
    for (wait, event) in events {
        thread::sleep(Duration::from_millis(*wait));
        let data = format!("data: {event}\n\n");
        written = written.and_then(|()| stream.write_all(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes()));
    }
    now.fetch_sub(1, Ordering::SeqCst);
    written
        .and_then(
            |()| if is_whole { stream.write_all(b"0\r\n\r\n") } else { stream.shutdown(std::net::Shutdown::Both) },
        )
        .is_ok()
        && is_whole
}
