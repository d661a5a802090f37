//! A training run of about a second, for tests of the programs: a random backbone, token rows and a recipe in a
//! temporary folder.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use medusa::files::checksums::CHECKSUMS;
use medusa::files::write_atomic;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::weights::save;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// Token ids in the rows are below this; the backbone's vocabulary has 48.
const USED: usize = 40;
const ROWS: usize = 12;

const CONFIG: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 48, "max_position_embeddings": 64,
"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": false, "eos_token_id": 2}"#;

/// 24 steps: 6 sequences, of which 2 per step in micro batches of 1, for 8 epochs.
const RECIPE: &str = r#"[backbone]
path = "backbone"
dtype = "float32"
[heads]
medusa_num_heads = 2
medusa_num_layers = 1
[stage.medusa1]
[data]
train = ["rows.jsonl"]
validation = ["validation.jsonl"]
max_length = 40
[optimizer]
learning_rate = 1e-2
[schedule]
name = "cosine"
warmup_steps = 3
[train]
output_dir = "run"
epochs = 8
micro_batch_size = 1
gradient_accumulation_steps = 2
save_every = 3
eval_every = 6
"#;

/// The working directory of the programs.
pub(crate) struct SmallRun {
    folder: TempDir,
}

/// Exit status and output of a program.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl SmallRun {
    pub(crate) fn new() -> Self {
        Self::with_hidden_size(32)
    }

    pub(crate) fn with_hidden_size(hidden_size: i64) -> Self {
        Self::with_sizes(hidden_size, 48)
    }

    pub(crate) fn with_sizes(hidden_size: i64, vocab_size: i64) -> Self {
        let small = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        fs::create_dir(small.path("backbone")).expect("a folder");
        let [of_size, of_vocabulary] =
            [("hidden_size", hidden_size), ("vocab_size", vocab_size)].map(|(key, size)| format!("\"{key}\": {size},"));
        let config = CONFIG.replace("\"hidden_size\": 32,", &of_size).replace("\"vocab_size\": 48,", &of_vocabulary);
        small.write("backbone/config.json", config);
        let config = LlamaConfig::load(&small.path("backbone")).expect("a config");
        let backbone = Llama::random(config, Kind::Float, Device::Cpu, 7);
        small.save_backbone(&backbone.weights());
        small.write("rows.jsonl", rows(ROWS, 1));
        small.write("validation.jsonl", rows(3, 2));
        small.write("recipe.toml", RECIPE);
        small
    }

    pub(crate) fn save_backbone(&self, weights: &[(String, &Tensor)]) {
        save(&self.path("backbone/model.safetensors"), weights).expect("a place for weights");
    }

    /// A tokenizer of words `w0`, `w1`, …
    pub(crate) fn write_tokenizer(&self, words: usize) {
        let vocabulary: serde_json::Map<String, Value> = (0..words).map(|id| (format!("w{id}"), id.into())).collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        });
        self.write("backbone/tokenizer.json", tokenizer.to_string());
    }

    pub(crate) fn root(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        write_atomic(&self.path(name), |out| out.write_all(text.as_ref())).expect("a file");
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Replaces the first `piece` in a file; panics if it is missing.
    pub(crate) fn edit(&self, name: &str, piece: &str, by: &str) {
        let text = self.read(name);
        assert!(text.contains(piece), "{piece:?} is not in {name}:\n{text}");
        self.write(name, text.replacen(piece, by, 1));
    }

    /// Removes the list of a folder whose files are changed on purpose.
    pub(crate) fn forget_checksums(&self, folder: &str) {
        fs::remove_file(self.path(folder).join(CHECKSUMS)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    }

    /// As [`SmallRun::edit`], of a file with a checksum, which is removed as the error asks.
    pub(crate) fn edit_trusted(&self, name: &str, piece: &str, by: &str) {
        self.edit(name, piece, by);
        self.write(name, without_checksum(&self.read(name)));
        let list = self.path(name).with_file_name(CHECKSUMS);
        if let Ok(text) = fs::read_to_string(&list) {
            let own = format!("  {}", Path::new(name).file_name().expect("a name").to_string_lossy());
            let others: String = text.split_inclusive('\n').filter(|line| !line.trim_end().ends_with(&own)).collect();
            write_atomic(&list, |out| out.write_all(others.as_bytes())).expect("a file");
        }
    }

    /// Names in a folder, sorted.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// `medusa-train recipe.toml …` in the folder, on one thread for the same numbers on every machine.
    pub(crate) fn trainer(&self, arguments: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_medusa-train"), &[&["recipe.toml"], arguments].concat())
    }

    pub(crate) fn train(&self, arguments: &[&str]) -> Ended {
        self.trainer(arguments).output().expect("the program starts").into()
    }

    pub(crate) fn medusa(&self, arguments: &[&str]) -> Ended {
        self.program(env!("CARGO_BIN_EXE_medusa"), arguments).output().expect("the program starts").into()
    }

    /// A program with the tests' environment.
    pub(crate) fn program(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.root());
        command.envs([("OMP_NUM_THREADS", "1"), ("MEDUSA_CUDA", "off"), ("MEDUSA_CACHE", "token_cache")]);
        command
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Self { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Ended {
    /// Asserts that the program succeeded.
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }

    /// Asserts that the program ended with this status and one error that contains all `facts`.
    pub(crate) fn failed(&self, status: i32, facts: &[&str]) {
        assert_eq!(self.status, Some(status), "{self:?}");
        let error = self.error();
        for fact in facts {
            assert!(error.contains(fact), "expected {fact:?} in:\n{error}");
        }
        let said = error.to_lowercase();
        assert!(!said.contains("panicked") && !said.contains("backtrace"), "{error}");
    }

    /// From `error:` to the end of stderr; asserts that there is exactly one error.
    pub(crate) fn error(&self) -> String {
        let is_error = |line: &&str| line.starts_with("error: ");
        assert_eq!(self.stderr.lines().filter(is_error).count(), 1, "one error is expected in:\n{}", self.stderr);
        self.stderr.lines().skip_while(|line| !is_error(line)).collect::<Vec<_>>().join("\n")
    }
}

/// A JSON object without the checksum that stands last in it.
pub(crate) fn without_checksum(text: &str) -> String {
    let object = text.rsplit_once("\"checksum\":").and_then(|(object, _)| object.trim_end().strip_suffix(','));
    object.map_or_else(|| text.to_owned(), |object| format!("{object}\n}}\n"))
}

/// Token rows with a learnable pattern; half of the labels of every third row carry no loss.
fn rows(count: usize, seed: usize) -> String {
    let row = |row: usize| {
        let length = 14 + (row * 5 + seed) % 7;
        let ids: Vec<i64> = (0..length).map(|t| ((seed + row * 11 + t * t * 3) % USED) as i64).collect();
        let ignored = if row.is_multiple_of(3) { length / 2 } else { 0 };
        let labels: Vec<i64> = ids.iter().enumerate().map(|(t, &id)| if t < ignored { -100 } else { id }).collect();
        serde_json::json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
    };
    (0..count).map(row).collect()
}
