//! Promise: `medusa data` shows the rows that training would read, and the tokens of a row that carry loss.

use std::path::Path;

use assert_cmd::Command;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::program::medusa;

fn medusa_data(files: &[&str], arguments: &[&str]) -> Command {
    let mut command = medusa(&["data"]);
    let cache = std::env::temp_dir().join("medusa-tests-cache");
    command.env("MEDUSA_CACHE", cache).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(files).args(["--backbone", "data/tiny/backbone"]).args(arguments);
    command
}

fn printed(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).expect("UTF-8")
}

/// Two conversations with an answer and one without, in one file.
fn chats() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("chats.jsonl");
    let talk = |answer: &str| json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]});
    let lines = [talk("Hello."), json!({"messages": [{"role": "user", "content": "Hi"}]}), talk("Bye.")];
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.join("\n").as_bytes()))
        .expect("a file");
    let path = path.display().to_string();
    (folder, path)
}

#[test]
fn it_counts_what_is_read_and_left_out_and_how_full_sequences_get() {
    let (_folder, path) = chats();
    let text = printed(&mut medusa_data(&[&path], &["--max-length", "64"]));
    assert!(text.contains("chats.jsonl: 3 rows") && text.contains("1 dropped (no turn of the assistant)"), "{text}");
    assert!(text.contains("packed: 1 sequence of 64 tokens, "), "{text}");
    let json: Value =
        serde_json::from_str(&printed(&mut medusa_data(&[&path], &["--max-length", "64", "--json"]))).unwrap();
    assert_eq!((&json["data"]["rows"], &json["packing"]["sequences"]), (&json!(2), &json!(1)));
    let fill = json["packing"]["fill_rate"].as_f64().unwrap();
    assert!((fill * 64.0 - json["data"]["tokens"].as_f64().unwrap()).abs() < 1e-9, "{json}");
}

#[test]
fn a_row_is_shown_with_what_carries_loss() {
    let (folder, path) = chats();
    let text = printed(&mut medusa_data(&[&path], &["--row", "2", "--chat-template", "zephyr"]));
    assert!(text.contains("⟦Bye.<|end|>⟧") && text.contains("<|user|>\nHi"), "{text}");
    let svg = folder.path().join("mask.svg");
    let svg_path = svg.display().to_string();
    let json = printed(&mut medusa_data(&[&path], &["--row", "2", "--svg", &svg_path, "--json", "--loss-on", "all"]));
    let json: Value = serde_json::from_str(&json).unwrap();
    let tokens = json["tokens"].as_array().unwrap();
    assert!(tokens.iter().all(|token| token["learned"] == true), "{json}");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert_eq!(picture.matches("class=\"learned\"").count(), tokens.len());
}

#[test]
fn a_folder_is_one_line_and_the_files_that_lost_rows_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in 0..12 {
        let rows =
            if file == 7 { "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [1]}\n" } else { "{\"input_ids\": [1, 2]}\n" };
        let path = folder.path().join(format!("{file:02}.jsonl"));
        medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, rows.as_bytes())).expect("a file");
    }
    let folder = folder.path().display().to_string();
    let text = printed(&mut medusa_data(&[&folder], &[]));
    let expected =
        format!("{folder}: 12 files, 13 rows\n  {folder}/07.jsonl: 1 of 2 rows left out\n12 rows with 25 tokens");
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn the_picture_in_readme_is_what_its_command_draws() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let svg = folder.path().join("mask.svg");
    printed(&mut medusa_data(&["docs/chat.jsonl"], &["--row", "1", "--svg", &svg.display().to_string()]));
    let picture = |path: &Path| std::fs::read_to_string(path).expect("a picture");
    assert!(
        picture(&svg) == picture(Path::new("docs/images/mask.svg")),
        "draw docs/images/mask.svg anew, README says how"
    );
}

#[test]
fn a_folder_with_a_tokenizer_alone_is_enough() {
    let (folder, path) = chats();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(Path::new("data/tiny/backbone").join(name), folder.path().join(name)).expect("a copy");
    }
    let backbone = folder.path().display().to_string();
    let of_folder = |arguments: &[&str]| {
        let mut command = medusa(&["data"]);
        command.env("MEDUSA_CACHE", folder.path().join("cache")).args([&path, "--backbone", &backbone]);
        command.args(arguments).assert()
    };
    of_folder(&["--max-length", "64", "--chat-template", "chatml"]).success();
    let error = String::from_utf8(of_folder(&[]).code(2).get_output().stderr.clone()).expect("UTF-8");
    assert!(error.contains("has no config.json, so no context: give --max-length TOKENS"), "{error}");
}

#[test]
fn what_cannot_be_shown_is_said() {
    let (folder, path) = chats();
    let complaint = |arguments: &[&str], status: i32| {
        let output = medusa_data(&[&path], arguments).assert().code(status).get_output().stderr.clone();
        String::from_utf8(output).expect("UTF-8")
    };
    let error = complaint(&["--row", "3"], 2);
    assert!(error.contains("--row: expected a row from 1 to 2, the rows kept, got 3"), "{error}");
    let within_a_file = Path::new(&path).join("mask.svg").display().to_string();
    let error = complaint(&["--row", "1", "--svg", &within_a_file], 2);
    assert!(error.contains("mask.svg cannot be written") && error.contains("is not a folder"), "{error}");
    let new = folder.path().join("new/folder/mask.svg");
    complaint(&["--row", "1", "--svg", &new.display().to_string()], 0);
    assert!(new.is_file(), "its folders are made");
    let error = complaint(&["--svg", "mask.svg"], 2);
    assert!(error.contains("--row <N>"), "{error}");
}
