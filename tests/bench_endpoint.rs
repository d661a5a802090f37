//! Promise: `medusa bench --endpoint` measures an OpenAI-compatible server as its clients see it, counts its errors and waits, and keeps
//! its key to itself.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::{Reply, SeenRequest, TestServer};
use crate::program::{medusa, on_the_cpu};

/// A text of four tokens in three chunks: the first after 60 ms, the others after 20 ms each.
fn events(is_chat: bool, usage: &Value) -> Vec<(u64, String)> {
    let chunk = |text: &str| match is_chat {
        true => json!({"choices": [{"index": 0, "delta": {"content": text}}]}),
        false => json!({"choices": [{"index": 0, "text": text}]}),
    };
    let chunks = [(60, chunk("a")), (20, chunk("bc")), (20, chunk("d")), (0, chunk(""))];
    let last = [(0, json!({"choices": [], "usage": usage}).to_string()), (0, "[DONE]".to_owned())];
    chunks.into_iter().map(|(wait, chunk)| (wait, chunk.to_string())).chain(last).collect()
}

fn answered(request: &SeenRequest) -> Reply {
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
    Reply::Stream(events(request.line.contains("chat"), &usage))
}

/// A working directory with prompts.
struct Client(TempDir);

impl Client {
    fn new(prompts: &[Value]) -> Self {
        let client = Self(tempfile::tempdir().expect("a folder"));
        let lines: Vec<String> = prompts.iter().map(Value::to_string).collect();
        client.write("p.jsonl", &lines.join("\n"));
        client
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        medusa::files::write_atomic(&self.path(name), |out| out.write_all(text.as_bytes())).expect("a file of a test");
    }

    /// Exit status, stdout and stderr.
    fn bench(&self, endpoint: &str, more: &[&str]) -> (Option<i32>, String, String) {
        let arguments = ["bench", "--endpoint", endpoint, "--prompts", "p.jsonl", "--max-new-tokens", "9"];
        let mut command = medusa(&[&arguments[..], more].concat());
        command.current_dir(self.0.path()).env_remove("MEDUSA_API_KEY");
        let output = command.output().expect("it runs");
        let [printed, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        (output.status.code(), printed, said)
    }

    fn json(&self, endpoint: &str, more: &[&str]) -> Vec<Value> {
        let (status, printed, said) = self.bench(endpoint, &[more, &["--json"]].concat());
        assert_eq!(status, Some(0), "{said}");
        printed.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect()
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn as_many_clients_as_asked_for_wait_for_their_answers() {
    let server = TestServer::new(|_, request| answered(request));
    let client = Client::new(&[json!({"prompt": "x"}), json!({"messages": [{"role": "user", "content": "y"}]})]);
    let more = ["--concurrency", "1,4", "--requests", "8", "--csv", "l.csv", "--svg", "l.svg"];
    let lines = client.json(&server.address, &more);
    assert_eq!((lines.len(), server.most_at_once.load(Ordering::SeqCst)), (2, 4));
    for (line, clients) in lines.iter().zip([1, 4]) {
        assert_eq!((&line["concurrency"], &line["requests"], &line["errors"]), (&json!(clients), &json!(8), &json!(0)));
        assert_eq!((&line["tokens"], &line["prompt_tokens"], &line["model"]), (&json!(32), &json!(24), &json!("m-1")));
        assert_eq!((&line["tokens_per_step"], line.get("first_error")), (&Value::Null, None));
        // What the server waits is the least that its clients wait.
        assert!(number(&line["ttft_ms"]["median"]) >= 60.0 && number(&line["e2el_ms"]["median"]) >= 100.0, "{line}");
        assert!(number(&line["itl_ms"]["p95"]) > number(&line["tpot_ms"]["median"]), "two tokens a chunk: {line}");
        assert!(number(&line["ttft_ms"]["p95"]) >= number(&line["ttft_ms"]["median"]), "{line}");
        let speed = number(&line["tokens"]) / number(&line["seconds"]);
        assert!((number(&line["tokens_per_second"]) / speed - 1.0).abs() < 1e-9, "{line}");
    }
    assert!(number(&lines[1]["seconds"]) < number(&lines[0]["seconds"]), "four clients are not slower than one");
    let loaded = medusa::formats::load::load(&{
        client.write("load.json", &lines.iter().map(Value::to_string).collect::<Vec<_>>().join("\n"));
        client.path("load.json")
    });
    assert_eq!(loaded.expect("its own output").len(), 2);
    let rows = csv::Reader::from_path(client.path("l.csv")).expect("a CSV").into_deserialize();
    let rows: Vec<std::collections::HashMap<String, String>> = rows.map(|row| row.expect("a row")).collect();
    assert_eq!((rows.len(), rows[1]["concurrency"].as_str(), rows[1]["model"].as_str()), (2, "4", "m-1"));
    assert_eq!(rows[0]["median_ttft_ms"].parse().ok(), lines[0]["ttft_ms"]["median"].as_f64());
    let svg = std::fs::read_to_string(client.path("l.svg")).expect("a picture");
    for part in [">medusa bench --endpoint<", ">Throughput, tokens", ">m-1, p95<", ">requests in flight<"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
}

#[test]
fn each_prompt_goes_where_it_belongs_with_what_was_asked_for_and_nothing_else() {
    let server = TestServer::new(|_, request| answered(request));
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "y"}]);
    let client = Client::new(&[
        json!({"prompt": "x"}),
        json!({"prompt_ids": [1, 2]}),
        json!({"messages": messages}),
        json!({"turns": ["first", "second"]}),
    ]);
    client.write("key", "sk-secret\n");
    client
        .json(&format!("{}/v1/", server.address), &["--concurrency", "1", "--requests", "4", "--api-key-file", "key"]);
    let posts = server.posts();
    assert_eq!(posts.len(), 5, "the first one is not measured");
    let common = json!({"model": "m-1", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9, "temperature": 0.0});
    let expected = [
        ("completions", "prompt", json!("x")),
        ("completions", "prompt", json!([1, 2])),
        ("chat/completions", "messages", messages),
        ("chat/completions", "messages", json!([{"role": "user", "content": "first"}])),
    ];
    for (post, (path, key, prompt)) in posts[1..].iter().zip(expected) {
        let mut body = common.clone();
        body[key] = prompt;
        assert_eq!((post.line.as_str(), &post.body), (format!("POST /v1/{path}").as_str(), &body));
        assert_eq!(post.authorization.as_deref(), Some("Bearer sk-secret"));
    }
    let more = [
        "--concurrency",
        "1",
        "--requests",
        "1",
        "--model",
        "other",
        "--seed",
        "7",
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
    ];
    client.json(&server.address, &more);
    let last = server.posts().pop().expect("a request");
    let asked = ["model", "seed", "temperature", "top_p"].map(|key| last.body[key].clone());
    assert_eq!((asked, last.authorization), ([json!("other"), json!(7), json!(0.5), json!(0.9)], None));
}

#[test]
fn errors_and_waits_are_counted_and_the_first_error_is_reported() {
    let server = TestServer::new(|number, request| match number {
        1 | 2 => Reply::Whole(429, "Retry-After: 0\r\n", json!({"error": {"message": "slow down"}}).to_string()),
        4 => Reply::Whole(429, "Retry-After: 1\r\n", String::new()),
        6 => Reply::Whole(500, "", json!({"error": {"message": "out of luck with sk-secret"}}).to_string()),
        7 => Reply::BrokenStream(vec![(0, json!({"choices": [{"text": "a"}]}).to_string())]),
        8 => Reply::Stream(vec![(0, json!({"error": {"message": "stopped"}}).to_string())]),
        _ => answered(request),
    });
    let client = Client::new(&[json!({"prompt": "x"})]);
    client.write("key", "sk-secret");
    let more = ["--concurrency", "1", "--requests", "8", "--api-key-file", "key", "--csv", "l.csv"];
    let (status, table, said) = client.bench(&server.address, &more);
    assert_eq!(status, Some(0), "{said}");
    assert!(table.contains("\n3 requests failed; the first: status 500: out of luck with (the key)\n"), "{table}");
    assert!(table.contains("\nstatus 429 came 3 times: "), "{table}");
    assert!(!format!("{table}{said}").contains("sk-secret"), "{table}{said}");
    let mut rows = csv::Reader::from_path(client.path("l.csv")).expect("a CSV").into_deserialize();
    let row: std::collections::HashMap<String, String> = rows.next().expect("a row").expect("under this header");
    let counts = ["requests", "errors", "rate_limited", "tokens"].map(|key| row[key].as_str());
    assert_eq!(counts, ["5", "3", "3", "20"]);
    let longest: f64 = row["p95_e2el_ms"].parse().expect("a number");
    assert!(longest >= 800.0, "a wait of 1 s counts: {longest}"); // between the longest of five and the next one
}

#[test]
fn ctrl_c_ends_a_wait_for_a_busy_server_without_another_request() {
    let server = TestServer::new(|_, _| Reply::Whole(429, "Retry-After: 60\r\n", String::new()));
    let client = Client::new(&[json!({"prompt": "x"})]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    let command = on_the_cpu(&mut command).args(["bench", "--endpoint", &server.address, "--prompts", "p.jsonl"]);
    let command = command.current_dir(client.0.path()).env_remove("MEDUSA_API_KEY").stderr(Stdio::piped());
    let bench = command.spawn().expect("it runs");
    let begun = Instant::now();
    while server.posts().is_empty() && begun.elapsed() < Duration::from_secs(60) {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &bench.id().to_string()]).status().expect("kill").success());
    let ended = bench.wait_with_output().expect("it ends");
    let said = String::from_utf8(ended.stderr).expect("UTF-8");
    assert!(said.contains("interrupted before the first measured request"), "{said}");
    assert_eq!((ended.status.code(), server.posts().len()), (Some(130), 1), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(60), "the wait is cut");
}

#[test]
fn a_connection_that_the_server_closed_meanwhile_is_no_error() {
    let server = TestServer::new(|number, request| if number == 2 { Reply::Nothing } else { answered(request) });
    let client = Client::new(&[json!({"prompt": "x"})]);
    let line = client.json(&server.address, &["--concurrency", "1", "--requests", "3"]).remove(0);
    assert_eq!((&line["requests"], &line["errors"], server.posts().len()), (&json!(3), &json!(0), 5));
    let gone = TestServer::new(|_, _| Reply::Nothing);
    let (status, _, said) = client.bench(&gone.address, &[]);
    assert!(status == Some(1) && said.contains("no answer from") && gone.posts().len() == 3, "{said}");
}

#[test]
fn a_server_that_reports_its_accepted_guesses_has_tokens_per_step() {
    let details = json!({"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 5});
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": details});
    let server = TestServer::new(move |_, request| Reply::Stream(events(request.line.contains("chat"), &usage)));
    let client = Client::new(&[json!({"turns": ["x"]})]);
    let lines = client.json(&server.address, &["--concurrency", "2", "--requests", "2"]);
    assert_eq!(lines[0]["tokens_per_step"], json!(2.0));
}

#[test]
fn a_server_that_cannot_be_measured_is_one_error() {
    let client = Client::new(&[json!({"prompt": "x"})]);
    let fails = |reply: fn() -> Reply, words: &str| {
        let server = TestServer::new(move |_, _| reply());
        let (status, printed, said) = client.bench(&server.address, &[]);
        assert_eq!((status, printed.as_str(), server.posts().len()), (Some(1), "", 1), "{said}");
        assert!(
            said.starts_with("error: the first request, which is not measured, failed\n") && said.contains(words),
            "{said}"
        );
    };
    fails(|| Reply::Whole(401, "", json!({"error": {"message": "no key"}}).to_string()), "status 401: no key");
    fails(|| Reply::Whole(302, "Location: /elsewhere\r\n", String::new()), "status 302");
    fails(|| Reply::Whole(200, "", "{}".into()), "application/json, not with a stream (text/event-stream)");
    fails(|| Reply::Stream(vec![(0, "[DONE]".into())]), "stream_options.include_usage");
    let server = TestServer::new(|number, request| match number {
        0 => answered(request),
        _ => Reply::Whole(503, "", json!({"detail": "gone"}).to_string()),
    });
    let (status, _, said) = client.bench(&server.address, &["--concurrency", "2", "--requests", "3"]);
    assert_eq!(status, Some(1));
    assert!(said.contains("--concurrency 2: every request failed; the first: status 503: gone"), "{said}");
    assert_eq!(server.posts().len(), 4);
}

#[test]
fn what_does_not_go_with_a_server_is_status_2_before_anything_is_sent() {
    let server = TestServer::new(|_, request| answered(request));
    let client = Client::new(&[json!({"prompt": "x"})]);
    for (more, words) in [
        (&["--heads", "h"][..], "cannot be used with"),
        (&["--acceptance", "greedy"], "cannot be used with"),
        (&["--concurrency", "65"], "at most 64 clients"),
        (&["--concurrency", "8", "--requests", "7"], "--requests 7 is fewer than --concurrency 8"),
        (&["--api-key-file", "none"], "--api-key-file none does not exist"),
    ] {
        let (status, _, said) = client.bench(&server.address, more);
        assert!(status == Some(2) && said.contains(words), "{more:?}: {status:?} {said}");
    }
    let (status, _, said) = client.bench("localhost:80", &[]);
    assert!(status == Some(2) && said.contains("such as http://127.0.0.1:8000"), "{said}");
    let (_, _, said) = client.bench(&server.address, &["--concurrency", "1", "--requests", "1", "--dtype", "float32"]);
    assert!(said.contains("--dtype has no effect on `medusa bench --endpoint`"), "{said}");
    assert_eq!(server.posts().len(), 2, "of the last one alone");
}
