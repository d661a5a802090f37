//! Promise: a chat template that would take memory, time or the stack without end is an error that names its file, within 5 seconds of a CPU
//! and 500 MB. Every template: `cargo test --release --test promises hostile_templates -- --include-ignored`.

pub(crate) mod table;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use medusa::data::chat_template::{ChatTemplate, Message};
use medusa::files::write_atomic;
use rayon::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use crate::program::on_the_cpu;

/// Limits of a process: KiB of its data, and seconds of a CPU.
const LIMITS: &str = "ulimit -d 500000 && ulimit -t 5 && ulimit -c 0";

/// One of each kind, of which a limit of steps alone stops none.
const OF_EACH_KIND: [&str; 12] = [
    "depth_cycle",
    "source_elif",
    "source_plus",
    "source_not",
    "source_dots",
    "source_filters",
    "depth_nested_list",
    "width_json_indent",
    "width_indent",
    "growth_doubled_replace",
    "width_format_printf",
    "growth_doubled_plus",
];

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

/// `medusa data` under the limits.
fn data(folder: &Path) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{LIMITS} && exec \"$0\" data chat.jsonl --backbone .")]);
    command.arg(env!("CARGO_BIN_EXE_medusa")).current_dir(folder).env("MEDUSA_CACHE", folder.join("cache"));
    on_the_cpu(&mut command).output().expect("sh")
}

/// What is wrong with how the program ends.
fn fault(name: &str, template: &str) -> Option<String> {
    let folder = folder_with(template);
    let output = data(folder.path());
    let said = String::from_utf8_lossy(&output.stderr);
    let is_told =
        said.contains("tokenizer_config.json") && said.lines().filter(|line| line.starts_with("error")).count() == 1;
    let is_right = matches!(output.status.code(), Some(1 | 2)) && is_told;
    (!is_right).then(|| format!("{name}: {:?}: {said}", output.status))
}

fn assert_no_fault(templates: &[(String, String)]) {
    let faults: Vec<String> = templates.par_iter().filter_map(|(name, template)| fault(name, template)).collect();
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), templates.len(), faults.join("\n"));
}

#[cfg(target_os = "linux")]
#[test]
fn one_of_each_kind_ends_as_one_error_within_the_limits() {
    let mut templates = table::templates();
    templates.retain(|(name, _)| OF_EACH_KIND.contains(&name.as_str()));
    assert_eq!(templates.len(), OF_EACH_KIND.len());
    assert_no_fault(&templates);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "a minute: cargo test --release --test promises hostile_templates -- --include-ignored"]
fn every_template_ends_as_one_error_within_the_limits() {
    let templates = table::templates();
    assert!(templates.len() >= 100, "{}", templates.len());
    assert_no_fault(&templates);
}

/// The error of loading or rendering, with its causes.
fn error_of(folder: &Path) -> Option<String> {
    let messages = [Message::new("user", "Hi")];
    let rendered = match ChatTemplate::load(folder) {
        Ok(Some(template)) => template.render(&messages, true),
        Ok(None) => return None,
        Err(error) => Err(error),
    };
    rendered.err().map(|error| format!("{:#}", anyhow::Error::from(error)))
}

#[test]
fn quick_ones_are_errors_of_the_library_that_name_the_file() {
    let mut templates = table::templates();
    templates.retain(|(name, _)| !name.starts_with("time_") && !table::SLOW.contains(&name.as_str()));
    assert!(templates.len() > 100);
    let faults = templates.par_iter().filter_map(|(name, template)| {
        let folder = folder_with(template);
        let error = error_of(folder.path());
        let is_told = error.as_ref().is_some_and(|error| error.contains("tokenizer_config.json"));
        (!is_told).then(|| format!("{name}: {error:?}"))
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
