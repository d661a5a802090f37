//! Promise: a chat template that does not end, writes without end or has a source without end is one error that names its file.

use std::fs;
use std::path::Path;
use std::process::Command;

use medusa::bounds::TEMPLATE_BYTES;
use medusa::files::write_atomic;
use serde_json::json;
use tempfile::TempDir;

use crate::program::on_the_cpu;

/// A tokenizer's folder with this template, and a conversation.
fn folder_with(template: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(tiny.join(name), folder.path().join(name)).expect("a copy");
    }
    let row = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]});
    for (name, content) in [("tokenizer_config.json", json!({"chat_template": template})), ("chat.jsonl", row)] {
        write_atomic(&folder.path().join(name), |out| std::io::Write::write_all(out, content.to_string().as_bytes()))
            .expect("a file");
    }
    folder
}

#[test]
fn one_without_end_is_an_error_that_names_its_file() {
    let forever = |body: &str| {
        format!("{{% for i in range(100000) %}}{{% for j in range(100000) %}}{body}{{% endfor %}}{{% endfor %}}")
    };
    for (template, why) in [
        (forever(""), "did not end within 10000000 steps"),
        (forever(&"a".repeat(1 << 16)), "wrote more than 67108864 bytes"),
        ("a".repeat(TEMPLATE_BYTES + 1), "expected at most 1048576 bytes, got 1048577"),
        ("{{ 1 +".to_owned(), "syntax error"),
        (format!("{{{{ {}1{} }}}}", "(".repeat(1000), ")".repeat(1000)), "recursion"),
    ] {
        let folder = folder_with(&template);
        let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
        command.args(["data", "chat.jsonl", "--backbone", "."]).current_dir(folder.path());
        command.env("MEDUSA_CACHE", folder.path().join("cache"));
        let output = on_the_cpu(&mut command).output().expect("the program");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{why}: {:?}", output.status);
        assert!(said.contains("tokenizer_config.json") && said.contains(why), "{why}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("error")).count(), 1, "{said}");
    }
}
