//! Promise: a row or a conversation of tens of megabytes is refused by name, in little more memory than it has bytes.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use medusa::files::write_atomic;
use serde_json::{Value, json};

use crate::program::on_the_cpu;

/// Limits of a process: KiB of its data, and seconds of a CPU.
const LIMITS: &str = "ulimit -d 400000 && ulimit -t 10 && ulimit -c 0";

/// `medusa data` of these rows, under the limits.
fn data(rows: &[Value], flags: &str) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = |out: &mut dyn Write| rows.iter().try_for_each(|row| writeln!(out, "{row}"));
    write_atomic(&folder.path().join("rows.jsonl"), |out| lines(out)).expect("a file");
    let backbone = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{LIMITS} && exec \"$0\" data rows.jsonl --backbone \"$1\" {flags}")]);
    command.arg(env!("CARGO_BIN_EXE_medusa")).arg(&backbone);
    command.current_dir(folder.path()).env("MEDUSA_CACHE", folder.path().join("cache"));
    on_the_cpu(&mut command).output().expect("sh")
}

#[test]
fn a_row_of_thirty_megabytes_is_refused_by_its_line() {
    let rows = [json!({"text": "a b c"}), json!({"text": "a b c d ".repeat(3_750_000)})];
    let refused = data(&rows, "");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("rows.jsonl, line 2: a text of 30000000 bytes that begins \"a b c d a"), "{said}");
    let left_out = data(&rows, "--skip-bad-rows");
    let said = String::from_utf8_lossy(&left_out.stdout);
    assert!(left_out.status.success() && said.contains("1 row"), "{left_out:?}");
}

#[test]
fn a_conversation_of_thirty_megabytes_is_left_out_with_its_size() {
    let talk = |answer: String| json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]});
    let output = data(&[talk("Hello.".into()), talk("Hello ".repeat(5_000_000))], "--chat-template zephyr");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.contains("a conversation of 2 turns has 30000"), "{said}");
}
