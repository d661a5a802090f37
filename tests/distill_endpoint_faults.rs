//! Promise: `medusa distill --endpoint` goes on where a server refuses single questions, ends where it must, and says which of both it was.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::{Reply, SeenRequest, TestServer};
use crate::distill::{contents, kept, rows};
use crate::distill_endpoint::{KEY, Words, World, whole};
use crate::program::{medusa, on_the_cpu};

/// The last question of a request.
fn asked(request: &SeenRequest) -> String {
    let last = request.body["messages"].as_array().and_then(|messages| messages.last()).expect("a question");
    last["content"].as_str().expect("a text").to_owned()
}

/// Refuses five questions, each in another way; the one of conversation 6 is its second.
fn refusal(words: &Words, request: &SeenRequest) -> Option<Reply> {
    let error = |message: &str| json!({"error": {"message": message}}).to_string();
    let mut answer = words.answer(request).2;
    Some(match asked(request).as_str() {
        "Count to 11" => Reply::Whole(400, "", error(&format!("too bad for {KEY}"))),
        "Count to 44" => {
            answer["choices"][0]["finish_reason"] = json!("content_filter");
            whole(&answer)
        }
        "Count to 67" => Reply::Whole(422, "", error("no sevens")),
        "Count to 77" => {
            answer["choices"][0]["message"] = json!({"content": null, "reasoning_content": "Count first."});
            whole(&answer)
        }
        "Count to 2999" => Reply::Whole(408, "x-should-retry: false\r\n", error("took too long")),
        _ => return None,
    })
}

const REFUSED: [(usize, u64, &str); 5] = [
    (1, 1, "status 400: too bad for (the key)"),
    (4, 1, "the server's content filter withholds the answer"),
    (6, 2, "status 422: no sevens"),
    (7, 1, "the answer has reasoning (reasoning_content) and no text"),
    (299, 1, "status 408: took too long"),
];

fn refused(world: &World, out: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(world.path(out).join("refused.jsonl")).expect("refused.jsonl");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn refused_questions_are_recorded_and_asked_once() {
    let (world, words) = (World::new(300), Words::new());
    let is_down = Arc::new(AtomicBool::new(false));
    let goes_down = Arc::clone(&is_down);
    let server = TestServer::new(move |number, request| match refusal(&words, request) {
        _ if goes_down.load(Ordering::SeqCst) && number > 150 => Reply::Whole(401, "", "gone".into()),
        Some(reply) => reply,
        None => whole(&words.answer(request).2),
    });
    is_down.store(true, Ordering::SeqCst);
    let flags = ["--concurrency", "4"];
    let (status, _, said) = world.distill(&server.address, "out", &flags);
    assert!(status == Some(1) && said.contains("status 401: gone"), "{said}");
    assert!(kept(&world.path("out")) > 20, "{said}");
    is_down.store(false, Ordering::SeqCst);
    let (printed, said) = world.summary(&server.address, "out", &[&flags[..], &["--resume"]].concat());
    assert!(said.contains("5 questions refused: out/refused.jsonl says which and why"), "{said}");
    assert_eq!(
        (&printed["conversations"], &printed["refused"], &printed["shards"]),
        (&json!(296), &json!(5), &json!(2))
    );
    let mut expected = world.expected(&Words::new());
    expected.retain(|index, _| ![1, 4, 7, 299].contains(index));
    let mut made = rows(&world.path("out"));
    let [cut, whole] = [&mut made, &mut expected].map(|rows| rows.remove(&6).expect("conversation 6"));
    assert_eq!((cut.said.as_slice(), made), (&whole.said[..2], expected));
    for (line, (index, turn, why)) in refused(&world, "out").iter().zip(REFUSED) {
        assert_eq!([&line["index"], &line["turn"], &line["why"]], [&json!(index), &json!(turn), &json!(why)]);
    }
    assert_eq!(refused(&world, "out").len(), REFUSED.len());
    assert!(
        !contents(&world.path("out")).values().any(|bytes| bytes.windows(KEY.len()).any(|part| part == KEY.as_bytes()))
    );
    let posts: Vec<String> = server.posts().iter().map(asked).collect();
    for (question, times) in [("Count to 11", 2), ("Count to 44", 1), ("Count to 67", 2), ("Count to 77", 1)] {
        let times_asked = posts.iter().filter(|post| *post == question).count();
        assert_eq!(times_asked, times, "{question}: with token ids and, after a 400 or 422, without");
    }
    let before = server.posts().len();
    world.summary(&server.address, "out", &["--resume"]);
    assert_eq!(server.posts().len(), before, "nothing is left to ask");
    let (status, _, said) = world.distill(&server.address, "out", &["--resume", "--strict"]);
    assert!(status == Some(1) && said.contains("refused 5 of its questions, and --strict"), "{said}");
    let inspected = medusa(&["inspect", &world.path("out").display().to_string(), "--json"]).output().expect("it runs");
    let found: Value = serde_json::from_slice(&inspected.stdout).expect("JSON");
    let share = &found["shares"][0];
    let expected = [json!(296), json!(5), json!("whole")];
    assert_eq!([&share["kept"], &share["refused"], &share["state"]], expected.each_ref(), "{found}");
}

#[test]
fn an_answer_is_bounded_and_an_error_with_a_successs_status_is_quoted() {
    let huge = format!("{{\"choices\": [{}[]]}}", "[],".repeat(7_000_000));
    let wrong_usage = json!({"choices": [{"text": "a", "message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 1_u64 << 63}});
    for (body, fact) in [
        (huge, "the answer has more than "),
        (json!({"error": {"message": "overloaded"}}).to_string(), "the answer is an error: overloaded"),
        (wrong_usage.to_string(), "the answer's usage is 9223372036854775808 tokens"),
        ("{\"choices\": 1}".to_owned(), "the answer is none of the API: "),
    ] {
        let world = World::new(2);
        let server = TestServer::new(move |_, _| Reply::Whole(200, "", body.clone()));
        let (status, _, said) = world.distill(&server.address, "out", &["--retries", "0"]);
        assert!(status == Some(1) && said.contains(fact), "{fact}: {said}");
    }
}

#[test]
fn a_refusal_is_reported_and_the_flags_say_how_many_may_be() {
    let (world, words) = (World::new(12), Words::new());
    let server = TestServer::new(move |_, request| match refusal(&words, request) {
        Some(reply) => reply,
        None => whole(&words.answer(request).2),
    });
    let (status, _, said) = world.distill(&server.address, "strict", &["--strict", "--concurrency", "1"]);
    assert!(
        status == Some(1) && said.contains("conversation 1 is refused, and --strict or --max-refused 0 allows none"),
        "{said}"
    );
    assert!(said.contains("caused by: status 400: too bad for (the key)"), "{said}");
    assert!(!said.contains("the run goes on"), "{said}");
    assert_eq!(kept(&world.path("strict")), 1, "conversation 0 is kept");
    let (status, _, said) = world.distill(&server.address, "out", &["--max-refused", "2", "--concurrency", "1"]);
    assert!(status == Some(1) && said.contains("conversation 6 is refused, and --max-refused allows 2;"), "{said}");
    let first = "conversation 1 is refused: status 400: too bad for (the key); the run goes on and counts";
    assert_eq!((said.matches(first).count(), said.matches("the run goes on").count()), (1, 1), "{said}");
    let (printed, _) = world.summary(&server.address, "out", &["--max-refused", "4", "--resume"]);
    assert_eq!((&printed["refused"], &printed["conversations"]), (&json!(4), &json!(9)));
    let (status, _, said) = world.distill(&server.address, "out", &["--max-refused", "3", "--strict"]);
    assert!(status == Some(2) && said.contains("cannot be used with"), "{said}");
}

#[test]
fn a_server_that_refuses_everything_is_at_fault_itself() {
    let (world, words) = (World::new(12), Words::new());
    let is_wrong = Arc::new(AtomicBool::new(true));
    let refuses = Arc::clone(&is_wrong);
    let server = TestServer::new(move |_, request| match refuses.load(Ordering::SeqCst) {
        true => Reply::Whole(400, "", json!({"error": {"message": format!("not with {KEY}")}}).to_string()),
        false => whole(&words.answer(request).2),
    });
    let (status, _, said) = world.distill(&server.address, "out", &["--concurrency", "1"]);
    let words = "line 1: conversation 0 is refused, and the server has answered no other since; this is not recorded";
    assert!(status == Some(1) && said.contains(words) && said.contains("--max-context N keeps"), "{said}");
    assert!(said.contains("caused by: status 400: not with (the key)"), "{said}");
    is_wrong.store(false, Ordering::SeqCst);
    let (printed, _) = world.summary(&server.address, "out", &["--resume"]);
    assert_eq!((&printed["refused"], rows(&world.path("out"))), (&json!(0), world.expected(&Words::new())));
}

#[test]
fn the_last_question_of_a_resumed_folder_may_be_refused() {
    let (world, words) = (World::new(3), Words::new());
    let status = Arc::new(AtomicUsize::new(401));
    let now = Arc::clone(&status);
    let server = TestServer::new(move |_, request| match asked(request).as_str() {
        "Count to 22" if now.load(Ordering::SeqCst) == 401 => Reply::Whole(401, "", "no".into()),
        "Count to 22" => Reply::Whole(400, "", "never".into()),
        _ => whole(&words.answer(request).2),
    });
    assert_eq!(world.distill(&server.address, "out", &["--concurrency", "1"]).0, Some(1));
    status.store(400, Ordering::SeqCst);
    let (printed, _) = world.summary(&server.address, "out", &["--resume"]);
    assert_eq!((&printed["refused"], &printed["conversations"]), (&json!(1), &json!(2)));
    assert_eq!(refused(&world, "out")[0]["why"], json!("status 400: never"));
}

#[test]
fn answers_under_way_are_kept_when_a_run_ends_with_an_error() {
    let (world, words) = (World::new(0), Words::new());
    let prompt = |n: usize| json!({"messages": [{"role": "user", "content": format!("Count to {n}1")}]});
    world.lines(&(0..20).map(prompt).collect::<Vec<_>>());
    let server = TestServer::new(move |_, request| match asked(request).as_str() {
        "Count to 21" => Reply::Whole(403, "", "no".into()),
        _ => Reply::Slow(300, words.answer(request).2.to_string()),
    });
    let (status, _, said) = world.distill(&server.address, "out", &["--concurrency", "4"]);
    assert!(status == Some(1) && said.contains("conversation 2 is not answered"), "{said}");
    assert!(said.contains("the run ends; waiting up to 30 s for "), "{said}");
    let posts = server.posts().len();
    assert!(kept(&world.path("out")) == posts - 1 && posts >= 4, "{posts} asked, {} kept", kept(&world.path("out")));
}

/// Whoever takes status 100 for the answer reads the real one as that of the next question on this connection.
#[test]
fn interim_answers_that_nobody_asked_for_are_skipped() {
    let (world, words) = (World::new(60), Words::new());
    let server =
        TestServer::new(move |number, request| Reply::Interim(number as u64 % 3, words.answer(request).2.to_string()));
    let (printed, said) = world.summary(&server.address, "out", &["--concurrency", "4", "--strict"]);
    assert_eq!((&printed["retries"], &printed["refused"]), (&json!(0), &json!(0)), "{said}");
    assert_eq!(rows(&world.path("out")), world.expected(&Words::new()));
    let connections = server.connections.load(Ordering::SeqCst);
    assert!(connections <= 5, "{connections} connections for {} questions", server.posts().len());
}

#[test]
fn a_proxy_is_asked_for_whole_addresses() {
    let (world, words) = (World::new(6), Words::new());
    let proxy = TestServer::new(move |_, request| whole(&words.answer(request).2));
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    let command = on_the_cpu(&mut command).args(world.arguments("http://gpu.test:8000/v1", "out", &[]));
    let command = command.current_dir(world.0.path()).env("HTTP_PROXY", &proxy.address).env_remove("NO_PROXY");
    let output = command.env_remove("no_proxy").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(rows(&world.path("out")), world.expected(&Words::new()));
    assert!(proxy.posts().iter().all(|post| post.line == "POST http://gpu.test:8000/v1/chat/completions"));
}

#[test]
fn a_header_without_a_colon_is_no_answer() {
    for (status, header) in [(200, "X-Header\r\n"), (503, "Retry-After\r\n"), (400, "x-should-retry\r\n")] {
        let world = World::new(1);
        let server = TestServer::new(move |_, _| Reply::Whole(status, header, "{}".into()));
        let (ended, _, said) = world.distill(&server.address, "out", &["--retries", "0"]);
        assert!(ended == Some(1) && said.contains("no answer from ") && !said.contains("panic"), "{said}");
    }
}

#[test]
fn a_question_is_sent_as_often_as_the_retries_say() {
    for (retries, posts) in [("0", 1), ("2", 3)] {
        let world = World::new(1);
        let server = TestServer::new(|_, _| Reply::Nothing);
        let (status, _, said) = world.distill(&server.address, "out", &["--retries", retries]);
        assert_eq!((status, server.posts().len()), (Some(1), posts), "{said}");
    }
}

#[test]
fn ctrl_c_while_the_server_is_away_is_an_interruption() {
    for (loading, words) in
        [(0, "interrupted: 0 of 3 conversations are saved in out"), (99, "before the first question")]
    {
        let world = World::new(3);
        let server = TestServer::new(|_, _| Reply::Whole(503, "Retry-After: 60\r\n", "away".into()));
        server.loading.store(loading, Ordering::SeqCst);
        let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
        let command = on_the_cpu(&mut command).args(world.arguments(&server.address, "out", &["--retries", "99"]));
        let child = command
            .current_dir(world.0.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let began = Instant::now();
        let is_waiting = || !server.posts().is_empty() || (1..99).contains(&server.loading.load(Ordering::SeqCst));
        while !is_waiting() && began.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill").success());
        let ended = child.wait_with_output().expect("it ends");
        let said = String::from_utf8(ended.stderr).expect("UTF-8");
        assert!(ended.status.code() == Some(130) && said.contains(words), "{:?} {said}", ended.status);
        assert!(began.elapsed() < Duration::from_secs(60), "the wait is cut");
    }
}

#[test]
fn an_answer_without_an_end_is_given_up_and_an_error_is_not_read_to_its_end() {
    let world = World::new(1);
    let server = TestServer::new(|_, _| Reply::Endless(200, 50));
    let (status, _, said) = world.distill(&server.address, "out", &["--timeout", "3", "--retries", "0"]);
    assert!(status == Some(1) && said.contains("the answer broke off: timed out"), "{said}");
    let began = Instant::now();
    let server = TestServer::new(|_, _| Reply::Endless(403, 10));
    let (status, _, said) = world.distill(&server.address, "forbidden", &["--timeout", "60"]);
    assert!(status == Some(1) && said.contains("status 403: aaaa"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(50), "a few kibibytes are enough");
}

#[test]
fn with_strict_an_answer_is_compared_or_an_error() {
    let (world, words) = (World::new(3), Words::new());
    let server = TestServer::new(move |_, request| {
        let mut answer = words.answer(request).2;
        answer["usage"]["completion_tokens"] = Value::Null;
        whole(&answer)
    });
    let (printed, said) = world.summary(&server.address, "out", &[]);
    assert_eq!(printed["unchecked"], json!(5), "{printed}");
    assert!(said.contains("5 answers could not be checked"), "{said}");
    let (status, _, said) = world.distill(&server.address, "strict", &["--strict"]);
    assert!(status == Some(1) && said.contains("--strict: the answer: expected usage, or token ids"), "{said}");
}

#[test]
fn a_path_that_is_a_key_stands_in_no_file_and_no_message() {
    const SECRET: &str = "0123456789abcdef-gateway";
    let (world, words) = (World::new(3), Words::new());
    let fails = Arc::new(AtomicUsize::new(1));
    let server = TestServer::new(move |_, request| {
        if fails.swap(0, Ordering::SeqCst) == 1 {
            return Reply::Whole(404, "", format!("no {}", request.line));
        }
        whole(&words.answer(request).2)
    });
    let endpoint = format!("{}/openai/{SECRET}/v1", server.address);
    let (status, _, said) = world.distill(&endpoint, "out", &["--concurrency", "1"]);
    assert!(status == Some(1) && said.contains("no POST /…/v1/chat/completions") && !said.contains(SECRET), "{said}");
    let (_, said) = world.summary(&endpoint, "out", &["--resume"]);
    assert!(!said.contains(SECRET), "{said}");
    let files: BTreeMap<String, Vec<u8>> = contents(&world.path("out"));
    assert!(!files.values().any(|bytes| bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())));
    let begun: Value = serde_json::from_slice(&files["distill.json"]).expect("JSON");
    assert_eq!(begun["endpoint"], json!(format!("{}/…/v1", server.address)));
}

/// Answers so many questions as `left` says, then none, as a server that restarts.
fn until_none_are_left(left: &Arc<AtomicUsize>) -> impl Fn(usize, &SeenRequest) -> Reply + Send + Sync + 'static {
    let (words, left) = (Words::new(), Arc::clone(left));
    move |_, request| match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
        Ok(_) => whole(&words.answer(request).2),
        Err(_) => Reply::Whole(401, "", "restarting".into()),
    }
}

fn questions(last_digits: &[usize]) -> Vec<Value> {
    let prompt = |(n, digit)| json!({"messages": [{"role": "user", "content": format!("Count to {n}{digit}")}]});
    (0..).zip(last_digits).map(prompt).collect()
}

#[test]
fn a_server_may_come_back_with_another_context() {
    let (world, words, left) = (World::new(0), Words::new(), Arc::new(AtomicUsize::new(0)));
    world.lines(&questions(&[1; 9]));
    let server = TestServer::new(until_none_are_left(&left));
    for (context, answers) in [(300, 3), (250, 3), (400, 9)] {
        server.context.store(context, Ordering::SeqCst);
        left.store(answers, Ordering::SeqCst);
        let before = server.posts().len();
        let (status, _, said) = world.distill(&server.address, "out", &["--concurrency", "1", "--resume"]);
        assert_eq!(status, Some(i32::from(answers == 3)), "{said}");
        assert_eq!(said.contains("is 250 tokens, and was 300 when --out was begun"), context == 250, "{said}");
        let posts = server.posts().split_off(before);
        assert!(posts.len() >= 3, "{context}: {said}");
        for post in posts {
            let room = context.min(300) - words.answer(&post).0.len();
            assert_eq!(post.body["max_tokens"], json!(room), "{context}");
        }
    }
    assert_eq!(rows(&world.path("out")), world.expected(&words));
    let begun: Value = serde_json::from_slice(&contents(&world.path("out"))["distill.json"]).expect("JSON");
    assert_eq!([&begun["server_context"], &begun["max_context"]], [&json!(300), &json!(512)]);
    let (status, _, said) = world.distill(&server.address, "out", &["--resume", "--max-context", "200"]);
    assert!(status == Some(1) && said.contains("max_context: expected 512, got 200"), "{said}");
}

#[test]
fn what_a_smaller_context_would_cut_ends_the_run_and_is_asked_again() {
    let (world, words, left) = (World::new(0), Words::new(), Arc::new(AtomicUsize::new(1)));
    world.lines(&questions(&[1, 7, 1]));
    let server = TestServer::new(until_none_are_left(&left));
    let flags = ["--concurrency", "1", "--resume"];
    server.context.store(300, Ordering::SeqCst);
    assert_eq!(world.distill(&server.address, "out", &flags).0, Some(1));
    left.store(99, Ordering::SeqCst);
    for (context, what) in [(250, "the answer does not fit"), (4, "the prompt does not fit")] {
        server.context.store(context, Ordering::SeqCst);
        let (status, _, said) = world.distill(&server.address, "out", &flags);
        assert!(status == Some(1) && said.contains(what) && said.contains("with 300 again"), "{said}");
        assert_eq!(kept(&world.path("out")), 1, "{said}");
        let (status, _, said) = world.distill(&server.address, "out", &[&flags[..], &["--without"]].concat());
        assert!(status == Some(1) && said.contains("without --backbone"), "{said}");
    }
    server.context.store(300, Ordering::SeqCst);
    let (printed, _) = world.summary(&server.address, "out", &flags);
    assert_eq!((&printed["refused"], rows(&world.path("out"))), (&json!(0), world.expected(&words)));
}

#[test]
fn a_question_at_which_the_server_always_fails_is_refused() {
    let (world, words) = (World::new(0), Words::new());
    world.lines(&questions(&[1; 4]));
    let server = TestServer::new(move |_, request| {
        let mut answer = words.answer(request).2;
        match asked(request).as_str() {
            "Count to 11" => return Reply::Whole(500, "", "no luck".into()),
            "Count to 31" => answer["choices"][0]["finish_reason"] = json!("tired"),
            _ => {}
        }
        whole(&answer)
    });
    let (printed, _) = world.summary(&server.address, "out", &["--concurrency", "1", "--retries", "1"]);
    assert_eq!((&printed["refused"], &printed["conversations"]), (&json!(2), &json!(2)));
    let why: Vec<String> = refused(&world, "out").iter().map(|line| line["why"].to_string()).collect();
    assert!(why[0].contains("status 500: no luck, after 2 attempts") && why[1].contains("tired"), "{why:?}");
    let before = server.posts().len();
    world.summary(&server.address, "out", &["--resume"]);
    assert_eq!(server.posts().len(), before, "nothing is left to ask");
}

#[test]
fn a_server_that_refuses_the_rest_of_a_folder_is_at_fault_itself() {
    for status in [400, 500] {
        let (world, words) = (World::new(0), Words::new());
        world.lines(&questions(&[1; 15]));
        let is_wrong = Arc::new(AtomicBool::new(true));
        let refuses = Arc::clone(&is_wrong);
        let server = TestServer::new(move |number, request| match number {
            0..3 => whole(&words.answer(request).2),
            3 => Reply::Whole(401, "", "stop".into()),
            _ if refuses.load(Ordering::SeqCst) => Reply::Whole(status, "", "never".into()),
            _ => whole(&words.answer(request).2),
        });
        let flags = ["--concurrency", "1", "--retries", "0", "--resume"];
        assert_eq!(world.distill(&server.address, "out", &flags).0, Some(1));
        let before = kept(&world.path("out"));
        for (most, words) in [("99", "has answered no other since; this is not recorded"), ("10", "allows 10")] {
            let flags = [&flags[..], &["--max-refused", most]].concat();
            let (ended, _, said) = world.distill(&server.address, "out", &flags);
            assert!(ended == Some(1) && said.contains(words), "{said}");
            assert_eq!(kept(&world.path("out")), before, "{said}");
        }
        is_wrong.store(false, Ordering::SeqCst);
        let (printed, _) = world.summary(&server.address, "out", &flags);
        assert_eq!((&printed["refused"], rows(&world.path("out"))), (&json!(0), world.expected(&Words::new())));
    }
}

#[test]
fn an_answer_under_way_shows_that_the_server_is_not_at_fault() {
    let (world, words) = (World::new(0), Words::new());
    world.lines(&questions(&[1; 6]));
    let server = TestServer::new(move |_, request| match asked(request).as_str() {
        "Count to 01" => Reply::Slow(1500, words.answer(request).2.to_string()),
        _ => Reply::Whole(400, "", "never".into()),
    });
    let (status, _, said) = world.distill(&server.address, "out", &["--concurrency", "2", "--max-refused", "1"]);
    assert!(status == Some(1) && said.contains("is refused, and --max-refused allows 1"), "{said}");
    assert_eq!(kept(&world.path("out")), 2, "the answer and one refused question: {said}");
}

#[test]
fn lines_that_a_power_cut_left_do_not_count_once_their_questions_are_answered() {
    let (world, words) = (World::new(3), Words::new());
    let is_refusing = Arc::new(AtomicBool::new(true));
    let refuses = Arc::clone(&is_refusing);
    let server = TestServer::new(move |_, request| match refusal(&words, request) {
        Some(reply) if refuses.load(Ordering::SeqCst) => reply,
        _ => whole(&words.answer(request).2),
    });
    assert_eq!(world.summary(&server.address, "out", &[]).0["refused"], json!(1));
    std::fs::remove_file(world.path("out").join("shard-00000.parquet")).expect("a shard");
    is_refusing.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        let (printed, _) = world.summary(&server.address, "out", &["--resume"]);
        assert_eq!((&printed["refused"], &printed["conversations"]), (&json!(0), &json!(3)));
    }
}
