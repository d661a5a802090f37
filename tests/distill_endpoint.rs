//! Promise: `medusa distill --endpoint` loses and doubles no conversation, whatever the server and the machine do, says where server and
//! backbone disagree, and keeps its key to itself.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use medusa::data::chat_template::{ChatTemplate, Message};
use medusa::data::conversation::read_messages;
use medusa::data::tokenize::TextTokenizer;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::{Reply, SeenRequest, TestServer};
use crate::distill::{Row, contents, kept, names, rows};
use crate::program::{medusa, on_the_cpu};
use crate::small_run::without_checksum;

pub(crate) const KEY: &str = "sk-very-secret-123";
const EOS: i64 = 1;
const IN_FLIGHT: usize = 48;

pub(crate) fn backbone() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")
}

/// The tokenizer and the template of data/tiny.
pub(crate) struct Words {
    tokenizer: TextTokenizer,
    template: ChatTemplate,
}

impl Words {
    pub(crate) fn new() -> Self {
        let template = ChatTemplate::load(&backbone()).expect("a template").expect("a template");
        Self { tokenizer: TextTokenizer::load(&backbone()).expect("a tokenizer"), template }
    }

    fn ids(&self, text: &str) -> Vec<i64> {
        let ids = self.tokenizer.encode(text, false).expect("tokens");
        ids.into_iter().map(i64::from).collect()
    }

    fn prompt(&self, messages: &[Message]) -> Vec<i64> {
        self.ids(&self.template.render(messages, true).expect("a prompt"))
    }

    /// What the server says, and its usage. Long questions are not answered to the end.
    pub(crate) fn answer(&self, request: &SeenRequest) -> (Vec<i64>, Vec<i64>, Value) {
        let messages = read_messages("messages", &request.body["messages"]).expect("messages");
        let text = said(&messages);
        let (prompt, mut ids) = (self.prompt(&messages), self.ids(&text));
        let finish = if is_cut(&messages) { "length" } else { "stop" };
        ids.extend((finish == "stop").then_some(EOS));
        let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": ids.len()});
        let message = json!({"role": "assistant", "content": text});
        let whole = json!({"model": request.body["model"], "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}]});
        (prompt, ids, whole)
    }
}

fn said(messages: &[Message]) -> String {
    let last = messages.last().expect("a question");
    format!("Answer {} to {}: 1, 2, 3.", messages.len(), last.content)
}

fn is_cut(messages: &[Message]) -> bool {
    messages.last().is_some_and(|last| last.content.ends_with('7'))
}

/// A folder with prompts, and what distillation makes of it.
pub(crate) struct World(pub(crate) TempDir);

impl World {
    /// Every third prompt has three turns, the second with a system message.
    pub(crate) fn new(prompts: usize) -> Self {
        let world = Self(tempfile::tempdir().expect("a folder"));
        let turn = |n: usize, turn: usize| format!("Count to {}", n * 10 + turn);
        let prompt = |n: usize| match n % 3 {
            0 => json!({"turns": [turn(n, 1), turn(n, 7), turn(n, 3)], "category": "c"}),
            _ => json!({"messages": [{"role": "user", "content": turn(n, n % 10)}], "id": format!("p{n}")}),
        };
        world.lines(&(0..prompts).map(prompt).collect::<Vec<_>>());
        world
    }

    pub(crate) fn lines(&self, lines: &[Value]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        medusa::files::write_atomic(&self.path("p.jsonl"), |out| std::io::Write::write_all(out, text.as_bytes()))
            .expect("a file of a test");
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn arguments<'a>(&self, endpoint: &'a str, out: &'a str, more: &[&'a str]) -> Vec<String> {
        let backbone = backbone().display().to_string();
        let common = ["distill", "--endpoint", endpoint, "--prompts", "p.jsonl", "--out", out, "--model", "m-1"];
        let backbone = if more.contains(&"--without") { vec![] } else { vec!["--backbone".to_owned(), backbone] };
        let more = more.iter().filter(|flag| **flag != "--without").map(|flag| (*flag).to_owned());
        common.map(str::to_owned).into_iter().chain(backbone).chain(more).collect()
    }

    /// Exit status, stdout and stderr.
    pub(crate) fn distill(&self, endpoint: &str, out: &str, more: &[&str]) -> (Option<i32>, String, String) {
        let arguments = self.arguments(endpoint, out, more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = medusa(&arguments);
        let output = command.current_dir(self.0.path()).env("MEDUSA_API_KEY", KEY).output().expect("it runs");
        let [printed, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        assert!(!printed.contains(KEY) && !said.contains(KEY), "{printed}{said}");
        (output.status.code(), printed, said)
    }

    pub(crate) fn summary(&self, endpoint: &str, out: &str, more: &[&str]) -> (Value, String) {
        let (status, printed, said) = self.distill(endpoint, out, &[more, &["--json"]].concat());
        assert_eq!(status, Some(0), "{said}");
        (serde_json::from_str(&printed).expect("one line of JSON"), said)
    }

    fn prompts(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("p.jsonl")).expect("its prompts");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// What every row must be.
    pub(crate) fn expected(&self, words: &Words) -> BTreeMap<i64, Row> {
        let row = |prompt: &Value| {
            let user = |messages: &Value| messages[0]["content"].as_str().expect("a text").to_owned();
            let turns: Vec<String> = match prompt.get("turns") {
                Some(turns) => serde_json::from_value(turns.clone()).expect("texts"),
                None => vec![user(&prompt["messages"])],
            };
            let (mut messages, mut input_ids, mut labels, mut said_so_far) = (vec![], vec![], vec![], vec![]);
            let mut finish_reason = "";
            for turn in turns {
                messages.push(Message::new("user", &turn));
                let text = said(&messages);
                let seen = words.prompt(&messages);
                labels.resize(seen.len(), -100);
                let mut new = words.ids(&text);
                finish_reason = if is_cut(&messages) { "length" } else { "eos" };
                new.extend((finish_reason == "eos").then_some(EOS));
                input_ids = [seen, new.clone()].concat();
                labels.extend(new);
                said_so_far.extend([("human".to_owned(), turn), ("gpt".to_owned(), text.clone())]);
                messages.push(Message::new("assistant", text));
            }
            let text = |key: &str| prompt[key].as_str().map(str::to_owned);
            let (name, category) = (text("id"), text("category"));
            Row { name, category, said: said_so_far, input_ids, labels, finish_reason: finish_reason.to_owned() }
        };
        self.prompts().iter().zip(0..).map(|(prompt, index)| (index, row(prompt))).collect()
    }
}

pub(crate) fn whole(answer: &Value) -> Reply {
    Reply::Whole(200, "", answer.to_string())
}

/// A server whose answers have ids, as those of vLLM have.
fn with_ids(words: &Words, request: &SeenRequest) -> Value {
    let (prompt, ids, mut answer) = words.answer(request);
    if request.body["return_token_ids"] == json!(true) {
        answer["prompt_token_ids"] = json!(prompt);
        answer["choices"][0]["token_ids"] = json!(ids);
    }
    answer
}

/// Fails each question in up to two of nine ways before it answers it.
fn unreliable(words: Words) -> impl Fn(usize, &SeenRequest) -> Reply + Send + Sync + 'static {
    let attempts: Mutex<HashMap<String, usize>> = Mutex::default();
    let arrived = AtomicUsize::new(0);
    move |number, request| {
        arrived.fetch_add(1, Ordering::SeqCst);
        let began = Instant::now();
        while number < IN_FLIGHT && arrived.load(Ordering::SeqCst) < IN_FLIGHT && began.elapsed().as_secs() < 20 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let body = request.body["messages"].to_string();
        let hash = body.bytes().fold(7usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let attempt = {
            let mut attempts = attempts.lock().expect("no thread panics with it");
            let attempt = attempts.entry(body).or_default();
            *attempt += 1;
            *attempt
        };
        let (_, _, answer) = words.answer(request);
        if attempt > hash % 3 {
            return Reply::Slow((hash % 40) as u64, answer.to_string());
        }
        match (hash / 3 + attempt) % 9 {
            0 => Reply::Whole(429, "Retry-After: 0\r\n", json!({"error": {"message": "slow down"}}).to_string()),
            1 => Reply::Whole(500, "", json!({"error": {"message": format!("key {KEY}, no luck")}}).to_string()),
            2 => Reply::Whole(503, "", format!("overloaded, says {KEY}")),
            3 => Reply::Nothing,
            4 => Reply::Half(answer.to_string()),
            5 => Reply::Whole(200, "", answer.to_string()[..40].to_owned()),
            6 => Reply::Whole(200, "", json!({"error": KEY}).to_string()),
            7 => Reply::Whole(200, "", "<html>a proxy's page</html>".to_owned()),
            _ => Reply::Whole(
                200,
                "",
                json!({"choices": [{"message": {"content": "x"}, "finish_reason": null}]}).to_string(),
            ),
        }
    }
}

#[test]
fn whatever_the_server_does_every_conversation_is_there_once() {
    let (world, words) = (World::new(300), Words::new());
    let server = TestServer::new(unreliable(Words::new()));
    let (reported, said) =
        world.summary(&server.address, "out", &["--concurrency", &IN_FLIGHT.to_string(), "--temperature", "0.5"]);
    assert_eq!(rows(&world.path("out")), world.expected(&words));
    assert_eq!((&reported["conversations"], &reported["shards"]), (&json!(300), &json!(2)));
    assert!(reported["retries"].as_u64().is_some_and(|retries| retries > 200), "{reported}");
    assert!(reported["rate_limited"].as_u64().is_some_and(|retries| retries > 10), "{reported}");
    assert_eq!(
        ["prompts_differ", "answers_differ", "unchecked", "other_model"].map(|key| reported[key].clone()),
        [0, 0, 0, 0]
    );
    assert_eq!(server.most_at_once.load(Ordering::SeqCst), IN_FLIGHT);
    assert!(!said.contains("differ"), "{said}");
    for (name, bytes) in contents(&world.path("out")) {
        assert!(!bytes.windows(KEY.len()).any(|part| part == KEY.as_bytes()), "the key is in {name}");
    }
    let posts = server.posts();
    assert!(posts.iter().all(|post| post.authorization.as_deref() == Some(&format!("Bearer {KEY}"))));
    assert!(posts.iter().all(|post| post.body["seed"].is_u64() && post.body["temperature"] == json!(0.5)));
    let begun: Value = serde_json::from_slice(&contents(&world.path("out"))["distill.json"]).expect("JSON");
    assert_eq!((&begun["model"], &begun["engine"], &begun["seed"]), (&json!("m-1"), &Value::Null, &json!(42)));
}

#[test]
fn killed_at_any_moment_it_resumes_with_the_same_files() {
    let (world, words) = (World::new(600), Words::new());
    let server =
        TestServer::new(move |number, request| Reply::Slow(2 + number as u64 % 7, words.answer(request).2.to_string()));
    let flags = ["--concurrency", "8"];
    world.summary(&server.address, "unbroken", &flags);
    let resumed = [&flags[..], &["--resume"]].concat();
    let mut kills = 0;
    for kill in 0..8 {
        let before = kept(&world.path("out"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
        on_the_cpu(&mut command).args(world.arguments(&server.address, "out", &resumed)).current_dir(world.0.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        while kept(&world.path("out")) < before + [1, 30, 7, 0][kill % 4]
            && child.try_wait().expect("a child").is_none()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        kills += usize::from(child.try_wait().expect("a child").is_none());
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    assert!(kills >= 6 && kept(&world.path("out")) < 600, "{kills} kills");
    let (reported, _) = world.summary(&server.address, "out", &resumed);
    assert!(reported["resumed"].as_u64().is_some_and(|resumed| resumed > 60), "{reported}");
    assert!(contents(&world.path("out")) == contents(&world.path("unbroken")), "the same files, byte by byte");
    let (again, _) = world.summary(&server.address, "out", &resumed);
    assert_eq!((&again["conversations"], &again["tokens"]), (&json!(600), &json!(0)));
}

#[test]
fn what_no_other_attempt_changes_ends_the_run_at_once() {
    for (status, words) in [
        (401, "the server refuses the API key: set MEDUSA_API_KEY, or give --api-key-file"),
        (404, "--model a name that the server lists"),
    ] {
        let world = World::new(3);
        let refusal = json!({"error": {"message": format!("not with {KEY}")}}).to_string();
        let server = TestServer::new(move |_, _| Reply::Whole(status, "", refusal.clone()));
        let (ended, _, said) = world.distill(&server.address, "out", &["--concurrency", "1", "--without"]);
        assert_eq!((ended, server.posts().len()), (Some(1), 1), "{said}");
        assert!(said.contains("p.jsonl, line 1: conversation 0 is not answered") && said.contains(words), "{said}");
    }
    let world = World::new(3);
    let server = TestServer::new(|_, _| Reply::Whole(503, "", "loading".into()));
    let (ended, _, said) = world.distill(&server.address, "out", &["--concurrency", "1", "--retries", "1"]);
    assert_eq!((ended, server.posts().len()), (Some(1), 2), "{said}");
    assert!(said.contains("status 503: loading, after 2 attempts; continue with --resume"), "{said}");
}

#[test]
fn a_model_that_the_server_has_not_is_reported_with_those_that_it_has() {
    let world = World::new(3);
    let server = TestServer::new(|_, _| Reply::Nothing);
    let (status, _, said) = world.distill(&server.address, "out", &["--model", "m-1"]);
    assert!(status == Some(2) && said.contains("cannot be used multiple times"), "{said}");
    let run = |arguments: &[&str]| {
        let all = ["distill", "--endpoint", &server.address, "--prompts", "p.jsonl", "--out", "out"];
        let output = medusa(&[&all[..], arguments].concat()).current_dir(world.0.path()).output().expect("it runs");
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (status, said) = run(&["--model", "llama"]);
    assert!(status == Some(2) && said.contains("--model llama: ") && said.contains("/v1 has m-1, m-2"), "{said}");
    let (status, said) = run(&[]);
    assert!(status == Some(2) && said.contains("has m-1, m-2; choose one"), "{said}");
    for flags in [
        &["--heads", "h"][..],
        &["--batch-size", "3"],
        &["--self-talk"],
        &["--engine", "tch"],
        &["--concurrency", "2000"],
    ] {
        let (status, said) = run(&[&["--model", "m-1"], flags].concat());
        assert_eq!(status, Some(2), "{flags:?}: {said}");
    }
    assert!(server.posts().is_empty() && names(&world.path("out")).is_empty());
    let (status, _, said) = world.distill("http://127.0.0.1:9", "out", &[]);
    assert!(status == Some(1) && said.contains("no answer from http://127.0.0.1:9/v1"), "{said}");
}

#[test]
fn the_servers_own_token_ids_are_taken() {
    let (world, words) = (World::new(30), Words::new());
    // Letter by letter, as the tokenizer itself would never write it.
    let spelt =
        |words: &Words, text: &str| text.chars().flat_map(|letter| words.ids(&letter.to_string())).collect::<Vec<_>>();
    let server = TestServer::new(move |_, request| {
        let mut answer = with_ids(&words, request);
        let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
        let end = if answer["choices"][0]["finish_reason"] == "stop" { vec![EOS] } else { vec![] };
        answer["choices"][0]["token_ids"] = json!([spelt(&words, &text), end].concat());
        whole(&answer)
    });
    let (reported, _) = world.summary(&server.address, "out", &["--strict"]);
    assert_eq!((&reported["answers_differ"], &reported["prompts_differ"]), (&json!(0), &json!(0)));
    let words = Words::new();
    for (id, row) in rows(&world.path("out")) {
        let (_, last) = row.said.last().expect("an answer");
        let end = if row.finish_reason == "eos" { vec![EOS] } else { vec![] };
        let written = [spelt(&words, last), end].concat();
        assert!(row.input_ids.ends_with(&written) && row.labels.ends_with(&written), "conversation {id}");
    }
}

#[test]
fn a_server_that_knows_no_token_ids_is_asked_without() {
    let (world, words) = (World::new(12), Words::new());
    let server = TestServer::new(move |_, request| match request.body.get("return_token_ids") {
        Some(_) => Reply::Whole(422, "", json!({"detail": "extra fields not permitted"}).to_string()),
        None => whole(&words.answer(request).2),
    });
    server.loading.store(2, Ordering::SeqCst);
    let (_, said) = world.summary(&server.address, "out", &["--concurrency", "1", "--strict"]);
    assert_eq!(said.matches("/v1/models: status 503: loading; asking again in ").count(), 2, "{said}");
    assert_eq!(rows(&world.path("out")), world.expected(&Words::new()));
    let refused = server.posts().iter().filter(|post| post.body.get("return_token_ids").is_some()).count();
    assert_eq!(refused, 1, "the first refusal is remembered");
    let reported = "the server refuses return_token_ids (status 422: extra fields not permitted): from now on";
    assert_eq!(said.matches(reported).count(), 1, "{said}");
}

/// Each way to have other tokens is counted and told; with `--strict` it ends the run.
#[test]
fn other_tokens_on_the_server_are_counted_or_refused() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str, &str); 5] = [
        (|answer| answer["usage"]["prompt_tokens"] = json!(99), "prompts_differ", "99 tokens on the server"),
        (|answer| answer["usage"]["completion_tokens"] = json!(2), "answers_differ", "2 tokens on the server"),
        (|answer| answer["prompt_token_ids"] = json!([0, 2, 9]), "prompts_differ", "id 9 at position 2 on the server"),
        (|answer| answer["choices"][0]["token_ids"] = json!([9, 99_999]), "answers_differ", "2 tokens of another text"),
        (|answer| answer["model"] = json!("m-2"), "other_model", "the answer is from model \"m-2\", not from \"m-1\""),
    ];
    for (change, key, words) in changes {
        let (world, tiny) = (World::new(5), Words::new());
        let server = TestServer::new(move |_, request| {
            let mut answer = tiny.answer(request).2;
            change(&mut answer);
            whole(&answer)
        });
        let (reported, said) = world.summary(&server.address, "out", &[]);
        assert!(
            reported[key].as_u64().is_some_and(|count| count > 4) && said.contains(words),
            "{key}: {reported} {said}"
        );
        assert_eq!(rows(&world.path("out")), world.expected(&Words::new()), "the backbone's tokens are taken");
        let (status, _, said) = world.distill(&server.address, "strict", &["--strict"]);
        assert!(status == Some(1) && said.contains("--strict: ") && said.contains("is not answered"), "{said}");
    }
}

#[test]
fn reasoning_that_is_distinguished_is_learnt_where_its_tokens_are_known() {
    let (world, words) = (World::new(3), Words::new());
    let reasons = |words: &Words, request: &SeenRequest| {
        let mut answer = with_ids(words, request);
        let message = &mut answer["choices"][0]["message"];
        message["reasoning_content"] = json!("Count first.");
        if let Some(ids) = answer["choices"][0]["token_ids"].as_array() {
            let thought = words.ids("Count first. ").into_iter().map(Value::from);
            answer["choices"][0]["token_ids"] = thought.chain(ids.iter().cloned()).collect();
        }
        whole(&answer)
    };
    let server = TestServer::new(move |_, request| reasons(&words, request));
    let (status, _, said) = world.distill(&server.address, "text", &["--without"]);
    assert!(status == Some(1) && said.contains("start it without a reasoning parser"), "{said}");
    world.summary(&server.address, "out", &["--strict"]);
    let words = Words::new();
    let row = &rows(&world.path("out"))[&1];
    assert!(row.said[1].1.starts_with("Answer 1 to"), "the conversation has the answer alone: {:?}", row.said);
    let learnt: Vec<i64> = row.labels.iter().copied().filter(|label| *label != -100).collect();
    assert!(learnt.starts_with(&words.ids("Count first. ")), "the tokens have the reasoning");
}

/// Vicuna's template puts a space before the answer, which a server's text has not.
#[test]
fn a_space_that_the_template_puts_before_an_answer_is_among_its_tokens() {
    let world = World::new(0);
    world.lines(&[json!({"messages": [{"role": "user", "content": "Count to 3"}]})]);
    let template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}\
                    {% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";
    medusa::files::write_atomic(&world.path("t.jinja"), |out| std::io::Write::write_all(out, template.as_bytes()))
        .expect("a file of a test");
    let words = Words::new();
    let (prompt, answer) =
        (words.ids("user: Count to 3<|end|>assistant:"), [words.ids(" 1, 2, 3."), vec![EOS]].concat());
    assert_ne!(words.ids(" 1, 2, 3."), words.ids("1, 2, 3."));
    let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": answer.len()});
    let server = TestServer::new(move |_, _| {
        let message = json!({"content": "1, 2, 3."});
        whole(&json!({"usage": usage, "choices": [{"message": message, "finish_reason": "stop"}]}))
    });
    world.summary(&server.address, "out", &["--strict", "--chat-template", "t.jinja"]);
    assert_eq!(rows(&world.path("out"))[&0].input_ids, [prompt, answer].concat());
}

#[test]
fn without_a_backbone_rows_are_text_that_training_tokenises() {
    let (world, words) = (World::new(9), Words::new());
    let server = TestServer::new(move |_, request| whole(&words.answer(request).2));
    world.summary(&server.address, "out", &["--without", "--turns", "2"]);
    let file = std::fs::File::open(world.path("out/shard-00000.parquet")).expect("a shard");
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).expect("Parquet");
    let columns: Vec<String> = reader.schema().fields().iter().map(|field| field.name().clone()).collect();
    let expected = ["index", "id", "category", "conversations", "tools", "chat_template_kwargs", "finish_reason"];
    assert_eq!(columns, expected);
    assert!(server.posts().iter().all(|post| post.body.get("return_token_ids").is_none()));
    let shard = world.path("out/shard-00000.parquet").display().to_string();
    let read = medusa(&["data", &shard, "--json", "--backbone", &backbone().display().to_string()]).output();
    let read: Value = serde_json::from_slice(&read.expect("it runs").stdout).expect("JSON");
    assert_eq!((&read["data"]["rows"], &read["data"]["read"]), (&json!(9), &json!(9)));
    world.lines(&[json!({"prompt": "raw"})]);
    let (status, _, said) = world.distill(&server.address, "raw", &["--without"]);
    assert!(status == Some(1) && said.contains("p.jsonl, line 1: a prompt without messages or turns"), "{said}");
}

#[test]
fn training_renders_the_tools_and_variables_of_a_prompt_that_a_server_answered() {
    let (world, words) = (World::new(0), Words::new());
    let tool = json!({"type": "function", "function": {"name": "rain", "parameters": {}}});
    let messages = json!([{"role": "user", "content": "Count to 3"}]);
    world.lines(&[
        json!({"messages": messages, "tools": [tool], "chat_template_kwargs": {"suffix": "!"}}),
        json!({"messages": messages}),
    ]);
    let template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}\
                    {{ m.role + ': ' + m.content }}{{ suffix or '' }}{{ eos_token }}{% endfor %}\
                    {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
    medusa::files::write_atomic(&world.path("t.jinja"), |out| std::io::Write::write_all(out, template.as_bytes()))
        .expect("a file of a test");
    let server = TestServer::new(move |_, request| whole(&words.answer(request).2));
    world.summary(&server.address, "out", &["--without"]);
    let shown = |row: &str| {
        let backbone = backbone().display().to_string();
        let shard = world.path("out/shard-00000.parquet").display().to_string();
        let template = world.path("t.jinja").display().to_string();
        let output =
            medusa(&["data", &shard, "--backbone", &backbone, "--chat-template", &template, "--row", row]).output();
        String::from_utf8(output.expect("it runs").stdout).expect("UTF-8")
    };
    let (with_tools, without) = (shown("1"), shown("2"));
    assert!(with_tools.contains("[rain]user: Count to 3!"), "{with_tools}");
    assert!(without.contains("user: Count to 3<|end|>") && !without.contains("rain"), "{without}");
}

#[test]
fn a_resumed_run_asks_the_same_model_and_may_ask_another_server() {
    let (world, words) = (World::new(6), Words::new());
    let server = TestServer::new(move |_, request| whole(&words.answer(request).2));
    world.summary(&server.address, "out", &["--shard", "1/2"]);
    world.summary(&server.address, "out", &["--shard", "2/2"]);
    assert_eq!(rows(&world.path("out")), world.expected(&Words::new()));
    let elsewhere = TestServer::new(|_, _| Reply::Nothing);
    world.summary(&elsewhere.address, "out", &["--shard", "1/2", "--resume"]);
    let file = world.path("out/distill-1-of-2.json");
    let begun = without_checksum(&std::fs::read_to_string(&file).expect("it")).replace("\"m-1\"", "\"m-2\"");
    medusa::files::write_atomic(&file, |out| std::io::Write::write_all(out, begun.as_bytes())).expect("a file");
    let (status, _, said) = world.distill(&server.address, "out", &["--shard", "1/2", "--resume"]);
    assert!(status == Some(1) && said.contains("model: expected \"m-2\", got \"m-1\""), "{said}");
}
