//! Promise: `medusa serve` answers as OpenAI's API does, with the texts of `medusa generate`, and one client cannot hurt another.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::embedded_default::tiny;
use crate::program::{medusa, on_the_cpu};

/// For an answer, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn client() -> ureq::Agent {
    let settings = ureq::Agent::config_builder().proxy(None).http_status_as_error(false);
    settings.timeout_global(Some(PATIENCE)).build().into()
}

/// A server of the embedded backbone on a port of its own.
struct Server {
    child: Child,
    address: String,
    /// Read to the end when the server has stopped.
    log: Option<BufReader<std::process::ChildStdout>>,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        Self::start_as(Command::new(env!("CARGO_BIN_EXE_medusa")), flags)
    }

    fn start_as(mut command: Command, flags: &[&str]) -> Self {
        let backbone = tiny("backbone");
        let mut child = on_the_cpu(&mut command)
            .args(["serve", "--port", "0", "--backbone", backbone.to_str().expect("UTF-8")])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("medusa starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).expect("UTF-8") > 0, "the server ended: {said}");
            if let Some(address) = line.trim().strip_prefix("serving backbone on http://") {
                break address.trim_end_matches("/v1").to_owned();
            }
            said.push_str(&line);
        };
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        let log = child.stdout.take().map(BufReader::new);
        Self { child, address, log }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        stream
    }

    /// Sends bytes, and nothing more; returns all that comes back.
    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        let _ = stream.write_all(bytes); // a server may refuse before it has read everything
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.send(path, body, None);
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    fn send(&self, path: &str, body: &Value, key: Option<&str>) -> (u16, String) {
        let request =
            client().post(format!("http://{}{path}", self.address)).header("Content-Type", "application/json");
        let request = key.iter().fold(request, |request, key| request.header("Authorization", format!("Bearer {key}")));
        let mut answer = request.send(body.to_string()).expect("an answer");
        (answer.status().as_u16(), answer.body_mut().read_to_string().expect("UTF-8"))
    }

    fn completion(&self, more: &Value) -> Value {
        let mut body = json!({"model": "backbone", "max_tokens": 24, "temperature": 0});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, answer) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    fn metric(&self, name: &str) -> f64 {
        let mut page = client().get(format!("http://{}/metrics", self.address)).call().expect("metrics");
        let page = page.body_mut().read_to_string().expect("UTF-8");
        let line = page.lines().find(|line| line.split(' ').next() == Some(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name}: {page}"))
    }

    /// SIGTERM; returns the exit code and the log.
    fn stop(self) -> (Option<i32>, String) {
        self.stop_by("-TERM")
    }

    fn stop_by(mut self, signal: &str) -> (Option<i32>, String) {
        let printed = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill runs");
        assert!(printed.success());
        let mut log = String::new();
        self.log.take().expect("taken once").read_to_string(&mut log).expect("UTF-8");
        (self.child.wait().expect("it ends").code(), log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The chunks of a stream.
fn chunks(stream: &str) -> Vec<Value> {
    let lines: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, chunks) = lines.split_last().expect("a stream has chunks");
    assert_eq!(*last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect()
}

fn said(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().expect("a text").to_owned()
}

#[test]
#[cfg(target_os = "linux")]
fn the_end_of_a_terminal_ends_a_server() {
    // The tests themselves may run under nohup.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_medusa")]);
    let (code, _) = Server::start_as(command, &[]).stop_by("-HUP");
    assert_eq!(code, Some(0));
}

#[test]
fn a_log_that_nobody_reads_does_not_keep_a_server() {
    let mut server = Server::start(&[]);
    for _ in 0..800 {
        let answer = server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}"); // in all a log that no pipe holds
    }
    let signalled = Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("kill runs");
    assert!(signalled.success());
    let began = Instant::now();
    while server.child.try_wait().expect("a child").is_none() {
        assert!(began.elapsed() < PATIENCE, "it goes on");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(server.child.wait().expect("it ended").code(), Some(0));
}

#[test]
fn a_text_is_that_of_generate_whole_and_streamed() {
    let (server, prompt) = (Server::start(&[]), "Once upon a time");
    let backbone = tiny("backbone");
    let backbone = backbone.to_str().expect("UTF-8");
    let generate = ["generate", "--backbone", backbone, "--prompt", prompt, "--max-new-tokens", "24", "--json"];
    let generated = medusa(&generate).output().expect("it runs").stdout;
    let generated: Value = serde_json::from_slice(&generated).expect("a line of JSON");
    let answer = server.completion(&json!({"prompt": prompt, "return_token_ids": true}));
    assert_eq!(answer["choices"][0]["token_ids"], generated["new_ids"]);
    assert_eq!(generated["finish_reason"], "eos", "the usage counts it");
    assert_eq!(answer["usage"]["completion_tokens"], generated["new_ids"].as_array().expect("ids").len() + 1);
    let body = json!({
        "model": "backbone", "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": true,
        "stream_options": {"include_usage": true}, "return_token_ids": true
    });
    let chunks = chunks(&server.send("/v1/completions", &body, None).1);
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, said(&answer));
    let ids: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(json!(ids), generated["new_ids"]);
    assert_eq!(chunks.last().expect("usage")["usage"], answer["usage"]);
}

/// As vLLM counts: an OpenAI client is billed for what was generated.
#[test]
fn usage_and_metrics_count_the_tokens_that_end_a_text() {
    for flags in [&[][..], &["--drafter", "ngram"]] {
        let server = Server::start(flags);
        let question = "Sort these numbers from smallest to largest: 24, 12, 1.";
        let mut body = json!({
            "model": "backbone", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 128, "n": 2,
            "return_token_ids": true
        });
        let asked = |body: &Value| {
            let (before, (status, answer)) =
                (server.metric("medusa_generation_tokens_total"), server.post("/v1/chat/completions", body));
            let tokens = answer["usage"]["completion_tokens"].as_f64().expect("a number");
            assert_eq!(server.metric("medusa_generation_tokens_total") - before, tokens, "{answer}");
            assert_eq!((status, &answer["choices"][1]["finish_reason"]), (200, &json!("stop")), "{answer}");
            let ids: Vec<Value> = (0..2).map(|choice| answer["choices"][choice]["token_ids"].clone()).collect();
            (ids.iter().map(|ids| ids.as_array().expect("ids").len()).sum::<usize>(), tokens as usize, answer)
        };
        let (of_texts, generated, answer) = asked(&body);
        assert_eq!(generated, of_texts + 2, "an EOS each");
        let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
        body["stop"] = json!([text[10..20]]);
        let (of_texts, until_stop, _) = asked(&body);
        assert!(of_texts < until_stop && until_stop < generated, "{of_texts} {until_stop} {generated}");
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = chunks(&server.send("/v1/chat/completions", &body, None).1);
        assert_eq!(chunks.last().expect("usage")["usage"]["completion_tokens"], until_stop);
    }
}

#[test]
fn fields_that_would_have_no_effect_are_refused() {
    let refused = |server: &Server, more: &Value| {
        let mut body = json!({"model": "backbone", "prompt": "Once", "max_tokens": 3, "temperature": 1.5});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, answer) = server.post("/v1/completions", &body);
        (status == 400).then(|| answer["error"]["param"].clone())
    };
    let plain = Server::start(&[]);
    for rule in ["greedy", "typical"] {
        assert_eq!(refused(&plain, &json!({ "acceptance": rule })), Some(json!("acceptance")));
    }
    assert_eq!(refused(&plain, &json!({"acceptance": "rejection", "seed": 1, "top_p": 0.9})), None);
    let drafted = Server::start(&["--drafter", "ngram"]);
    for (field, value) in [("seed", json!(1)), ("top_p", json!(0.1)), ("top_k", json!(5))] {
        assert_eq!(refused(&drafted, &json!({"acceptance": "typical", field: value})), Some(json!(field)));
        assert_eq!(refused(&drafted, &json!({ field: value })), None);
    }
    assert_eq!(refused(&drafted, &json!({"acceptance": "typical"})), None);
    let backbone = tiny("backbone");
    let backbone = backbone.to_str().expect("UTF-8");
    let output = medusa(&["serve", "--port", "0", "--backbone", backbone, "--acceptance", "greedy"]).output();
    let output = output.expect("it runs");
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.code() == Some(2) && said.contains("--acceptance has no effect without a drafter"), "{said}");
}

#[test]
fn many_clients_each_get_the_text_that_they_get_alone() {
    let server = Server::start(&["--max-texts", "4"]);
    let prompts = ["Once upon a time", "The small stone", "To go from", "Here is the person"];
    let asked: Vec<Value> = (0..12)
        .map(|at| json!({"prompt": prompts[at % 4], "seed": at, "temperature": 0.8, "n": 1 + at % 3, "stop": [" the"]}))
        .collect();
    let choices = |request: &Value| server.completion(request)["choices"].clone();
    let alone: Vec<Value> = asked.iter().map(choices).collect();
    let together: Vec<Value> = thread::scope(|scope| {
        let clients: Vec<_> = asked.iter().map(|request| scope.spawn(move || choices(request))).collect();
        clients.into_iter().map(|client| client.join().expect("no client panics")).collect()
    });
    assert_eq!(together, alone);
    assert!(alone.iter().any(|choices| choices[0] != alone[0][0]), "the texts differ");
    assert!(!alone.iter().any(|choices| choices.to_string().contains(" the")), "stop strings are not told");
}

/// A stop string that begins inside a token is held back while the first part of that token is told.
#[test]
fn text_before_a_stop_string_is_reported_whole_wherever_it_begins() {
    let server = Server::start(&[]);
    let request = json!({"prompt": "Once upon a time", "max_tokens": 48});
    let text = said(&server.completion(&request));
    let letters: Vec<char> = text.chars().collect();
    for stop in letters.windows(5).step_by(4).map(String::from_iter) {
        let (before, _) = text.split_once(&stop).expect("it is in the text");
        let mut request = request.clone();
        request["stop"] = json!(stop);
        assert_eq!(said(&server.completion(&request)), before, "{stop:?}");
    }
}

#[test]
fn what_is_no_request_gets_one_clear_error_and_others_are_unhurt() {
    let server = Server::start(&["--max-body-bytes", "100000"]);
    let before = server.completion(&json!({"prompt": "Once"}));
    let post = |path: &str, kind: &str, length: usize, body: &[u8]| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    };
    let json_post = |body: &[u8]| post("/v1/completions", "application/json", body.len(), body);
    let (deep, large) = ("[".repeat(50_000), vec![b'['; 1 << 26]);
    let cases: [(&str, Vec<u8>, &str); 13] = [
        ("a large body", post("/v1/completions", "application/json", 1 << 26, &large), "413"),
        ("no JSON", json_post(b"hello"), "line 1 column 1"),
        ("nothing", json_post(b""), "400"),
        ("wrong UTF-8", json_post(b"{\"model\": \"\xff\xfe\"}"), "400"),
        ("deep", json_post(deep.as_bytes()), "recursion limit"),
        ("an unknown field", json_post(b"{\"model\": \"backbone\", \"prompt\": \"a\", \"promt\": 1}"), "promt"),
        (
            "another type",
            json_post(b"{\"model\": \"backbone\", \"prompt\": \"a\", \"max_tokens\": \"7\"}"),
            "max_tokens",
        ),
        ("another model", json_post(b"{\"model\": \"gpt\", \"prompt\": \"a\"}"), "model_not_found"),
        ("no type", post("/v1/completions", "text/plain", 2, b"{}"), "415"),
        ("no such path", post("/v1/nothing", "application/json", 2, b"{}"), "404"),
        (
            "another method",
            b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(),
            "405",
        ),
        (
            "the name of a page",
            b"GET /v1/models HTTP/1.1\r\nHost: page.example\r\nConnection: close\r\n\r\n".to_vec(),
            "host_not_allowed",
        ),
        ("garbage", (0..=255).collect(), "400"),
    ];
    for (what, bytes, expected) in cases {
        let answer = server.raw(&bytes);
        assert!(answer.contains(expected), "{what}: expected {expected:?} in {answer:?}");
        assert!(answer.starts_with("HTTP/1.1 4"), "{what}: {answer}");
    }
    let half = post("/v1/completions", "application/json", 50, b"{\"mod");
    let mut gone = server.connect();
    gone.write_all(&half).expect("sent");
    gone.shutdown(Shutdown::Both).expect("gone");
    let after = server.completion(&json!({"prompt": "Once"}));
    assert_eq!(said(&after), said(&before));
}

#[test]
fn a_key_is_needed_and_is_in_no_log() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("keys");
    medusa::files::write_atomic(&file, |out| out.write_all(b"# ours\nsesame\n")).expect("a writable folder");
    let server = Server::start(&["--api-key-file", file.to_str().expect("UTF-8")]);
    let body = json!({"model": "backbone", "prompt": "a secret prompt", "max_tokens": 2});
    for (key, expected) in [(None, 401), (Some("wrong"), 401), (Some("sesame"), 200)] {
        assert_eq!(server.send("/v1/completions", &body, key).0, expected, "{key:?}");
    }
    let (code, log) = server.stop();
    assert_eq!(code, Some(0));
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let statuses: Vec<&Value> = lines.iter().map(|line| &line["status"]).collect();
    assert_eq!(statuses, [401, 401, 200]);
    assert!(lines.iter().all(|line| line["request_id"].as_str().is_some_and(|id| id.starts_with("req-"))));
    assert!(!log.contains("sesame") && !log.contains("secret"), "{log}");
}

/// A request whose text goes on to the end of the context: repetition is rewarded.
fn endless() -> Vec<u8> {
    let body = json!({
        "model": "backbone", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0,
        "repetition_penalty": 0.01, "stream": true
    })
    .to_string();
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json";
    format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn a_full_server_says_so_and_a_client_that_leaves_frees_its_place() {
    let server = Server::start(&["--max-texts", "1", "--max-queue", "0"]);
    let mut first = server.connect();
    first.write_all(&endless()).expect("sent");
    let mut begun = BufReader::new(first.try_clone().expect("a handle"));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(begun.read_line(&mut line).expect("a stream") > 0);
    }
    let body = json!({"model": "backbone", "prompt": "a", "max_tokens": 1});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!((status, &answer["error"]["code"]), (429, &json!("queue_full")), "{answer}");
    drop((first, begun));
    let asked = Instant::now();
    while server.send("/v1/completions", &body, None).0 != 200 {
        assert!(asked.elapsed() < PATIENCE, "the place is free");
    }
    let written = server.metric("medusa_generation_tokens_total");
    assert!(written < 400.0, "the abandoned text did not go on: {written}");
}

#[test]
fn sigterm_lets_open_answers_finish_and_refuses_new_ones() {
    let server = Server::start(&["--drain-timeout", "600"]);
    let mut open = server.connect();
    open.write_all(&endless()).expect("sent");
    let mut first = [0; 1];
    open.read_exact(&mut first).expect("an answer begins");
    let address = server.address.clone();
    let (code, log) = server.stop();
    assert_eq!(code, Some(0));
    let mut answer = String::new();
    open.read_to_string(&mut answer).expect("UTF-8");
    assert!(answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]"), "{answer}");
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
    assert!(log.contains("\"finish_reasons\":[\"length\"]"), "{log}");
}
