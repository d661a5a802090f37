//! Promise: `medusa chat` answers turn after turn, from a terminal or a pipe, with the tokens of `medusa generate`;
//! signals stop an answer or the program as a user expects, and memory does not grow over hours of chatting.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::decoding::World;
use crate::program::on_the_cpu;

const CHAT: [&str; 3] = ["chat", "--backbone", "b"];
const HEADS: [&str; 4] = ["--heads", "h", "--tree", "t.json"];

/// A world whose backbone has a chat template.
fn with_template() -> World {
    let world = World::new();
    let template = "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' else '' }}\
                    {{ m.content }}{{ 'c' }}{% endfor %}";
    world
        .write("b/tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}));
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    world
}

/// stdout and stderr of a conversation from a pipe; it must succeed.
fn said(world: &World, more: &[&str], lines: &str) -> (String, String) {
    said_with_status(0, world, more, lines)
}

fn said_with_status(status: i32, world: &World, more: &[&str], lines: impl Into<Vec<u8>>) -> (String, String) {
    let chat = world.medusa(&[&CHAT[..], more].concat()).write_stdin(lines).assert().code(status);
    let output = chat.get_output().clone();
    (String::from_utf8(output.stdout).expect("UTF-8"), String::from_utf8(output.stderr).expect("UTF-8"))
}

fn answers(world: &World, more: &[&str], lines: &str) -> Vec<Value> {
    let (stdout, _) = said(world, &[more, &["--json"]].concat(), lines);
    stdout.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line, and nothing else")).collect()
}

fn ids(of: &Value) -> Vec<i64> {
    serde_json::from_value(of.clone()).expect("token ids")
}

#[test]
fn a_text_that_cannot_fit_is_dropped_before_it_becomes_tokens() {
    let world = with_template();
    let lines = format!("{}\nab\n", "a b ".repeat(2_500_000));
    let (stdout, stderr) = said_with_status(1, &world, &["--json", "--max-new-tokens", "2"], lines);
    assert!(stderr.ends_with("\nerror: 1 turn got no answer\n"), "{stderr}");
    assert!(stderr.contains("bytes has more tokens than the context of"), "{stderr}");
    assert_eq!(stdout.lines().filter(|line| line.contains("\"text\"")).count(), 1, "{stdout}");
}

/// The line editor has the terminal in raw mode, without echo.
#[test]
#[cfg(unix)]
fn a_signal_at_the_prompt_gives_the_terminal_back() {
    use std::fs::File;

    use nix::pty::openpty;
    use nix::sys::termios::{LocalFlags, tcgetattr};

    let world = World::new();
    let pty = openpty(None, None).expect("a terminal");
    let end = || Stdio::from(pty.slave.try_clone().expect("a handle"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    on_the_cpu(&mut command)
        .env("TERM", "xterm")
        .args(CHAT)
        .args(["--chat-template", "none"])
        .current_dir(world.path(""));
    let mut chat = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("it runs");
    let mut shown = Vec::new();
    let mut screen = File::from(pty.master.try_clone().expect("a handle"));
    while !String::from_utf8_lossy(&shown).contains("> ") {
        let mut piece = [0; 256];
        let read = screen.read(&mut piece).expect("the prompt");
        shown.extend(&piece[..read]);
    }
    let echoes =
        || tcgetattr(&pty.slave).expect("a terminal").local_flags.contains(LocalFlags::ECHO | LocalFlags::ICANON);
    assert!(!echoes(), "the editor reads keys");
    let sent = Command::new("kill").args(["-TERM", &chat.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
    assert_eq!(chat.wait().expect("it ends").code(), Some(130));
    assert!(echoes(), "{}", String::from_utf8_lossy(&shown));
}

#[test]
fn turns_are_answered_as_generate_answers_them_plainly_and_with_heads() {
    let world = with_template();
    world.write("p.jsonl", &json!({"turns": ["ab", "ba", "c"]}));
    let seven = ["--max-new-tokens", "7"];
    let mut expected = world.json(&[&["generate", "--backbone", "b", "--prompts", "p.jsonl"][..], &seven].concat());
    for more in [&seven[..], &[&seven[..], &HEADS].concat()] {
        let mut talked = answers(&world, more, "ab\nba\r\n\nc"); // an empty line is no turn
        assert_eq!(talked.len(), 3);
        for (answer, expected) in talked.iter_mut().zip(&mut expected) {
            let keys = |line: &Value| line.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
            assert_eq!([&keys(answer)[..], &["index".into(), "sample".into(), "turn".into()]].concat(), keys(expected));
            for key in ["prompt_ids", "new_ids", "text", "finish_reason"] {
                assert_eq!(answer[key], expected[key], "{key}");
            }
        }
    }
}

#[test]
fn commands_start_anew_switch_the_heads_and_leave() {
    let world = with_template();
    let lines = "/help\nab\n/plain\n/reset\nab\n/plain\n/reset\nab\n/what\n/exit\nnever said\n";
    let (stdout, stderr) = said(&world, &[&HEADS[..], &["--max-new-tokens", "7"]].concat(), lines);
    let answers: Vec<&str> = stdout.lines().collect();
    assert_eq!(answers.len(), 3);
    assert!(answers.iter().all(|answer| answer == &answers[0]), "the same question in a new conversation: {answers:?}");
    let figures: Vec<&str> = stderr.lines().filter(|line| line.starts_with("[7 tokens, ")).collect();
    let modes = ["with heads, ended by length]", "plain, ended by length]", "with heads, ended by length]"];
    assert_eq!(figures.len(), 3, "{stderr}");
    assert!(figures.iter().zip(modes).all(|(figures, mode)| figures.ends_with(mode)), "{figures:?}");
    for words in
        ["/help lists the commands", "start a new conversation", "plain decoding from here on", "no command /what"]
    {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let (_, quiet) = said(&world, &["--quiet", "--max-new-tokens", "7"], "ab\n/plain\n");
    assert_eq!(quiet, "");
}

#[test]
fn without_a_template_the_text_goes_on_from_all_that_was_typed_and_said() {
    let world = World::new();
    let lines = answers(&world, &["--chat-template", "none", "--max-new-tokens", "5"], "ab\nba\n\n");
    assert_eq!(lines.len(), 3, "an empty line lets it go on");
    let all = |line: &Value| [ids(&line["prompt_ids"]), ids(&line["new_ids"])].concat();
    assert!(ids(&lines[1]["prompt_ids"]).starts_with(&all(&lines[0])));
    assert!(ids(&lines[1]["prompt_ids"]).len() > all(&lines[0]).len());
    assert_eq!(ids(&lines[2]["prompt_ids"]), all(&lines[1]));
    let (_, stderr) = said(&world, &["--chat-template", "none"], "");
    assert!(stderr.contains("no chat template: the model continues the plain text so far"), "{stderr}");
    let refused = world.complaint(&[&CHAT[..], &["--chat-template", "none", "--system", "be kind"]].concat(), 2);
    assert!(refused.starts_with("error: --system cannot be used here: a conversation needs"), "{refused}");
}

#[test]
fn a_template_that_refuses_the_systems_turn_is_status_2() {
    let refused = with_template().complaint(&[&CHAT[..], &["--system", "be kind"]].concat(), 2);
    assert!(refused.contains("--system cannot be used here") && refused.contains("no system"), "{refused}");
}

#[test]
fn a_full_context_ends_the_answer_and_a_turn_that_does_not_fit_is_dropped() {
    let world = with_template();
    let long = "abc".repeat(30);
    let lines = format!("ab\nba\n/reset\n{long}\nab\n");
    let (stdout, stderr) = said_with_status(1, &world, &["--json"], lines);
    assert!(stderr.ends_with("\nerror: 2 turns got no answer\n"), "{stderr}");
    let objects: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let is_dropped = |object: &Value| object["error"].as_str().is_some_and(|why| why.starts_with("the prompt has "));
    assert_eq!(objects.iter().map(is_dropped).collect::<Vec<_>>(), [false, true, true, false], "{stderr}");
    let answers = [&objects[0], &objects[3]];
    assert_eq!((&answers[0]["finish_reason"], &answers[0]["new_ids"]), (&json!("length"), &answers[1]["new_ids"]));
    assert_eq!(ids(&answers[0]["prompt_ids"]).len() + ids(&answers[0]["new_ids"]).len(), 64);
    assert!(stderr.contains("the conversation fills the backbone's context of 64 tokens; /reset starts a new one"));
    assert_eq!(stderr.matches("error: the prompt has ").count(), 2, "{stderr}");
    assert_eq!(stderr.matches("this turn was dropped").count(), 2, "{stderr}");
}

/// A program that writes lines and reads objects must not lose count.
#[test]
fn every_line_to_answer_has_one_object_also_what_is_no_text() {
    let world = with_template();
    let lines: Vec<u8> = [&b"ab\n"[..], b"a\xff\xfeb\n", b"/rest\n", b"/reset\n", b"ba"].concat();
    let (stdout, _) = said_with_status(1, &world, &["--json"], lines);
    let objects: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let why = |object: &Value| object["error"].as_str().map(|why| why.split(':').next().unwrap_or_default().to_owned());
    let expected = [None, Some("the line is not UTF-8"), Some("no command /rest; /help lists the commands"), None];
    assert_eq!(objects.iter().map(why).collect::<Vec<_>>(), expected.map(|why| why.map(str::to_owned)));
    assert!(objects.iter().all(|object| object["error"].is_string() || object["new_ids"].is_array()));
}

/// A running conversation.
struct Talk {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Talk {
    fn start(world: &World, arguments: &[&str]) -> Self {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("medusa"));
        on_the_cpu(&mut command).args(arguments).current_dir(world.path("."));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary is built with the tests");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        Self { child, stdin, stdout, stderr }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("it listens");
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("it answers");
        line
    }

    #[cfg(unix)]
    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().expect("kill is there");
        assert!(sent.success());
    }

    fn leave(self) -> Option<i32> {
        let Self { mut child, stdin, .. } = self;
        drop(stdin);
        child.wait().expect("it ends").code()
    }

    /// Resident memory in KiB.
    #[cfg(target_os = "linux")]
    fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

/// A world with a context long enough for an answer that outlasts any test.
fn endless() -> World {
    let world = World::new();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(world.path("b/config.json")).expect("it is there")).expect("JSON");
    config["max_position_embeddings"] = json!(20_000);
    world.write("b/config.json", &config);
    world
}

/// A conversation in the middle of an answer that will not end by itself.
#[cfg(unix)]
fn amid_an_answer(world: &World) -> Talk {
    // With a temperature, because the most probable tokens of a random backbone may never form a whole character.
    let mut talk = Talk::start(
        world,
        &[&CHAT[..], &["--chat-template", "none", "--max-new-tokens", "19000", "--temperature", "1"]].concat(),
    );
    talk.say("ab");
    talk.stdout.read_exact(&mut [0]).expect("the answer begins");
    talk
}

#[test]
#[cfg(unix)]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let mut talk = amid_an_answer(&endless());
    talk.signal("-INT");
    let figures = talk.stderr.by_ref().lines().map(|line| line.expect("UTF-8")).find(|line| line.starts_with('['));
    assert!(figures.expect("the figures").ends_with("plain, ended by stopped]"));
    talk.say("/help");
    assert_eq!(talk.leave(), Some(0));
}

#[test]
#[cfg(unix)]
fn sigterm_ends_the_program_amid_an_answer_and_ctrl_c_at_the_prompt() {
    let world = endless();
    let mut talk = amid_an_answer(&world);
    talk.signal("-TERM");
    assert_eq!(talk.child.wait().expect("it ends").code(), Some(130));

    let mut talk =
        Talk::start(&world, &[&CHAT[..], &["--chat-template", "none", "--json", "--max-new-tokens", "2"]].concat());
    talk.say("ab");
    talk.hear();
    let status = loop {
        // Until it is back at the prompt, a signal stops only the answer.
        talk.signal("-INT");
        std::thread::sleep(std::time::Duration::from_millis(50));
        if let Some(status) = talk.child.try_wait().expect("a child") {
            break status;
        }
    };
    assert_eq!(status.code(), Some(130), "nothing to stop but the program");
}

/// Tolerance for the allocator; a leaked cache of 64 KiB per answer would exceed it after 18 answers.
#[cfg(target_os = "linux")]
const GROWTH_KIB: u64 = 512;

/// Memory of one `medusa chat` in KiB after a quarter of the answers and after all of them: three per round, of 40
/// tokens each.
#[cfg(target_os = "linux")]
fn memory_of_chat(world: &World, rounds: usize) -> [u64; 2] {
    let flags = ["--chat-template", "none", "--json", "--max-new-tokens", "40"];
    let mut talk = Talk::start(world, &[&CHAT[..], &HEADS, &flags].concat());
    let mut memory = Vec::new();
    for round in 1..=rounds {
        ["ab", "b", "/plain", "c", "/plain", "/reset"].iter().for_each(|line| talk.say(line));
        (0..3).for_each(|_| assert!(talk.hear().contains("\"length\"")));
        if round == rounds / 4 || round == rounds {
            memory.push(talk.resident_kib());
        }
    }
    assert_eq!(talk.leave(), Some(0));
    memory.try_into().expect("two of the rounds")
}

/// The same for one `medusa generate`, with one prompt per answer. The last prompts are so long that their output does
/// not fit into the pipe: the process waits for its reader and can be inspected.
#[cfg(target_os = "linux")]
fn memory_of_generate(world: &World, rounds: usize) -> [u64; 2] {
    const WARM_UP: usize = 4;
    const BEHIND: usize = 40; // of more than 2 KB each; a pipe holds 64
    let answers = 3 * rounds;
    let long = |prompts| (0..prompts).map(|_| json!({"prompt_ids": vec![100; 500]}));
    let short = (0..answers).map(|at| json!({"prompt": "abc"[at % 3..]}));
    world.lines("many.jsonl", &long(WARM_UP).chain(short).chain(long(BEHIND)).collect::<Vec<_>>());
    let arguments = ["generate", "--backbone", "b", "--prompts", "many.jsonl", "--json", "--max-new-tokens", "40"];
    let mut talk = Talk::start(world, &[&arguments[..], &HEADS].concat());
    let mut memory = Vec::new();
    for answer in 1..=WARM_UP + answers {
        assert!(talk.hear().contains("\"length\""));
        if answer == WARM_UP + answers / 4 || answer == WARM_UP + answers {
            memory.push(talk.resident_kib());
        }
    }
    (0..BEHIND).for_each(|_| assert!(talk.hear().contains("\"length\"")));
    assert_eq!(talk.leave(), Some(0));
    memory.try_into().expect("two of the answers")
}

#[cfg(target_os = "linux")]
#[expect(clippy::print_stdout, reason = "the figures of the long run; a test's output is shown with --nocapture")]
fn memory_stays(rounds: usize) {
    let world = endless();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    for (verb, [early, late]) in
        [("chat", memory_of_chat(&world, rounds)), ("generate", memory_of_generate(&world, rounds))]
    {
        println!("{verb}: {early} KiB after {} tokens, {late} KiB after {}", 30 * rounds, 120 * rounds);
        assert!(late <= early + GROWTH_KIB, "{verb}: {early} KiB grew to {late} KiB over {} tokens", 90 * rounds);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn memory_does_not_grow_with_the_tokens() {
    memory_stays(8);
}

/// `cargo test --release --test promises fifty_thousand -- --ignored --nocapture`
#[test]
#[ignore = "50,000 tokens by each verb are many minutes in a dev build; run with --release -- --ignored. The same with 960 tokens always runs"]
#[cfg(target_os = "linux")]
fn memory_does_not_grow_over_fifty_thousand_tokens() {
    memory_stays(417);
}
