//! Promise: `medusa report` writes one self-contained page for runs that are finished, unfinished, minimal or damaged.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use medusa::files::write_atomic;
use serde_json::{Value, json};
use tempfile::TempDir;

use std::io::Write as _;

use crate::program::medusa;

const RECIPE: &str = r#"[backbone]
path = "models/llama"
dtype = "float32"

[heads]
medusa_num_heads = 2
medusa_num_layers = 1

[stage.medusa2]
medusa_heads_coefficient = 0.2

[optimizer]
learning_rate = 0.001

[train]
output_dir = "runs/a"
max_steps = 30
"#;

/// Headings of a page for a complete run folder.
const SECTIONS: [&str; 4] = ["Calibrated accuracy", "<h3>Tree</h3>", "Speed of decoding", "Step time by tree size"];

/// A working directory with hand-written runs.
struct Runs {
    folder: TempDir,
}

impl Runs {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        write_atomic(&path, |out| out.write_all(text.as_ref())).expect("a file");
    }

    /// Writes the files of a finished training run.
    fn bare(&self, name: &str, steps: usize) {
        self.write(&format!("{name}/recipe.toml"), RECIPE);
        self.write(&format!("{name}/metrics.jsonl"), metrics(steps));
        self.write(&format!("{name}/provenance.json"), provenance().to_string());
        self.write(&format!("{name}/final/heads.safetensors"), "");
    }

    /// Adds the files of the other commands.
    fn full(&self, name: &str) {
        self.bare(name, 30);
        self.write(&format!("{name}/calibration.json"), calibration().to_string());
        self.write(
            &format!("{name}/tree.json"),
            json!({"choices": [[0], [0, 0], [1]], "expected_tokens_per_step": 1.75}).to_string(),
        );
        self.write(&format!("{name}/latency.json"), latency().to_string());
        self.write(&format!("{name}/bench.json"), bench().to_string());
    }

    fn medusa(&self, arguments: &[&str]) -> Output {
        let mut command = medusa(&["report"]);
        command.current_dir(self.folder.path()).args(arguments).output().expect("an output")
    }

    /// The page, and stderr.
    fn page(&self, arguments: &[&str]) -> (String, String) {
        let output = self.medusa(arguments);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        let out = String::from_utf8(output.stdout).expect("UTF-8");
        (fs::read_to_string(self.path(out.trim())).expect("the page that it names"), stderr)
    }

    /// The error message; asserts that there is one and that no file was written.
    fn complaint(&self, arguments: &[&str], status: i32) -> String {
        let before = self.names();
        let output = self.medusa(arguments);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(status), "{stderr}");
        assert!(stderr.lines().filter(|line| line.starts_with("error: ")).count() == 1, "{stderr}");
        assert_eq!(self.names(), before, "nothing is left of a page that failed");
        stderr
    }

    /// All files below the working directory, sorted.
    fn names(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.path("")];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files.sort();
        files
    }
}

/// Lines for every step, with an evaluation at every tenth.
fn metrics(steps: usize) -> String {
    let line = |split: &str, step: usize| {
        let loss = 40.0 / step as f64 + (step % 7) as f64 / 10.0;
        json!({"split": split, "step": step, "epoch": 0.1, "tokens": 100 * step, "loss": loss, "lm_loss": 0.5,
            "head_losses": [loss / 2.0, Value::Null], "head_top1": [0.5, 0.25], "head_top5": [0.75, Value::Null], "lr": 1e-4,
            "heads_lr": 4e-4, "lambda0": 0.2, "grad_norm": 1.0, "tokens_per_second": 50.0, "memory_bytes": 3 << 20})
    };
    let lines = (1..=steps).flat_map(|step| {
        let validation = (step % 10 == 0).then(|| line("validation", step));
        [Some(line("train", step)), validation].into_iter().flatten()
    });
    lines.map(|line| format!("{line}\n")).collect()
}

fn provenance() -> Value {
    json!({"program": "medusa-train 0.1.0", "git_revision": "abc123", "libtorch": "2.11.0", "device": "cpu", "threads": 2,
        "command": ["medusa-train", "a recipe.toml"], "started": "2026-01-02T03:04:05Z",
        "data": [{"path": "data/train.jsonl", "sha256": "5eed"}]})
}

fn calibration() -> Value {
    let head = |hits: u64| json!({"counts": [hits, 10], "total": 100, "accuracy": [hits as f64 / 100.0, 0.1]});
    json!({"heads": [head(62), head(41)], "joint": {"total": 100, "paths": []}, "backbone": "b", "heads_sha256": "", "tokens": 1234})
}

fn latency() -> Value {
    let step = |nodes: usize, depth: usize| json!({"nodes": nodes, "depth": depth, "step_ms": nodes as f64});
    json!({"device": "cpu", "engine": "tch", "engine_flag": "auto", "dtype": "float32", "threads": 2, "context": 64, "backbone": "b", "heads_sha256": "",
        "plain_step_ms": 0.5, "steps": [step(1, 1), step(2, 1), step(2, 2)]})
}

/// Results of two levels, as `medusa bench --concurrency` prints them.
fn load() -> String {
    let quantiles = |ms: f64| json!({"median": ms, "p95": 2.0 * ms});
    let line = |concurrency: usize, drafter: &str| {
        let result = json!({"concurrency": concurrency, "drafter": drafter, "device": "cpu", "dtype": "float32", "engine": "tch",
            "requests": 8, "errors": 0, "seconds": 1.0, "prompt_tokens": 9, "tokens": 80, "tokens_per_second": 80.0 * concurrency as f64,
            "requests_per_second": 8.0, "tokens_per_step": 1.5, "ttft_ms": quantiles(5.0), "tpot_ms": quantiles(2.0), "itl_ms": null,
            "e2el_ms": quantiles(9.0), "identical": null});
        result.to_string()
    };
    [line(1, "plain"), line(1, "medusa"), line(4, "plain"), line(4, "medusa")].join("\n")
}

fn bench() -> Value {
    let side =
        |speed: f64| json!({"tokens": 100, "seconds": 1.0, "tokens_per_second": speed, "step_ms": 2.5, "steps": 50});
    let group = |speedup: f64| {
        json!({"plain": side(100.0), "medusa": side(100.0 * speedup), "acceleration_rate": 2.25,
        "overhead": 1.5, "speedup": speedup, "identical": true})
    };
    let mut all = group(1.5);
    all["categories"] = json!({"maths": group(1.25)});
    (all["device"], all["dtype"], all["tree_nodes"]) = (json!("cpu"), json!("float32"), json!(3));
    all
}

/// The text of a page without markup and with entities decoded.
fn text_of(page: &str) -> String {
    let body = page.split("</style>").nth(1).and_then(|rest| rest.split("<script>").next()).expect("a body");
    let pieces = body.split('<').filter_map(|piece| piece.split_once('>')).map(|(_, text)| text);
    let text = pieces.collect::<Vec<_>>().join(" ");
    let entities = [("&#x27;", "'"), ("&#x2f;", "/"), ("&quot;", "\""), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")];
    let text = entities.iter().fold(text, |text, (entity, character)| text.replace(entity, character));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn throughput_and_latencies_under_load_are_drawn() {
    let runs = Runs::new();
    runs.full("runs/a");
    assert!(!runs.page(&["runs/a"]).0.contains("Under load"));
    runs.write("runs/a/load.json", load());
    let (page, said) = runs.page(&["runs/a"]);
    let text = text_of(&page);
    assert!(text.contains("several requests in flight (float32 on cpu, engine tch)."), "{text} {said}");
    for title in [
        "Throughput tokens/s",
        "Time to first token, median and p95 ms",
        "Time per output token, median and p95 ms",
        "Latency of a request, median and p95 ms",
    ] {
        assert!(text.contains(title), "{title}: {text}");
    }
    for line in ["medusa", "plain", "medusa, p95"] {
        assert!(page.contains(&format!("data-name=\"{line}\"")), "{line}");
    }
    let first = load().lines().next().expect("a line").to_owned();
    runs.write("runs/a/load.json", first);
    assert!(!runs.page(&["runs/a"]).0.contains("Under load"), "one level is no line");
    runs.write("runs/a/load.json", "{\"speedup\": 1}");
    let refused = runs.complaint(&["runs/a"], 1);
    assert!(refused.contains("load.json is no result of medusa bench --json with --concurrency"), "{refused}");
}

#[test]
fn a_full_run_has_every_section() {
    let runs = Runs::new();
    runs.full("runs/a");
    let (page, said) = runs.page(&["runs/a"]);
    assert!(runs.path("runs/a/report.html").is_file() && said.is_empty(), "{said}");
    let text = text_of(&page);
    for section in SECTIONS {
        assert!(page.contains(section), "{section}");
    }
    for fact in [
        "Medusa-2: heads and the whole backbone together",
        "backbone models/llama",
        "steps 30",
        "state finished",
        "tokens per step 2.25 decoding",
        "speedup 1.50 × over plain decoding",
        "head 1, top-1 62.0 % calibrated",
        "peak memory 3.0 MiB",
        "training time 1 min 0 s",
        "head 2 41.0 % 10.0 % 51.0 % 100",
        "1.75 expected tokens per step",
        "maths 1.25 2.25 1.50 100",
        "identical to plain decoding’s",
        "learning_rate = 0.001",
        "command medusa-train 'a recipe.toml'",
        "started 2026-01-02 03:04:05 UTC",
        "data/train.jsonl 5eed",
        "Total loss",
        "LM loss",
        "Learning rate",
        "λ0",
        "Gradient norm",
        "Training throughput",
        "Memory",
    ] {
        assert!(text.contains(fact), "{fact}\n{text}");
    }
    assert!(!text.contains("Not measured yet") && !page.contains("NaN"), "{text}");
}

#[test]
fn every_plot_is_described_and_every_id_is_its_own() {
    let runs = Runs::new();
    runs.full("a");
    runs.full("b");
    let (page, _) = runs.page(&["a", "b", "--out", "both.html"]);
    let plots = page.matches("<svg class=\"plot\"").count();
    assert!(plots >= 12, "{plots} plots");
    for words in ["<title id=\"plot", "<desc id=\"plot"] {
        assert_eq!(page.matches(words).count(), plots - 2, "{words}: all but those of latency.json, one a run");
    }
    assert!(
        page.contains("Over the optimizer step. a, training: 40.1 at 1, 1.53 at 30."),
        "the first and the last value"
    );
    let mut ids: Vec<&str> = page.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all, "an id stands once");
    let named = page.split("aria-labelledby=\"").skip(1).filter_map(|rest| rest.split('"').next());
    for id in named.flat_map(str::split_whitespace) {
        assert!(ids.contains(&id), "{id}");
    }
}

#[test]
fn what_is_missing_is_left_out_and_the_page_says_what_makes_it() {
    let runs = Runs::new();
    runs.bare("my runs/a", 30);
    let (page, _) = runs.page(&["my runs/a"]);
    for section in SECTIONS {
        assert!(!page.contains(section), "{section}");
    }
    let text = text_of(&page);
    for command in [
        "medusa calibrate --backbone models/llama --heads 'my runs/a/final' --prompts PROMPTS.jsonl --out 'my runs/a/calibration.json'",
        "medusa tree --calibration 'my runs/a/calibration.json' --nodes 63 --out 'my runs/a/tree.json'",
        "--latency 'my runs/a/latency.json'",
        "--json > 'my runs/a/bench.json'",
    ] {
        assert!(text.contains(command), "{command}\n{text}");
    }
    assert!(text.contains("head 1, top-1 50.0 % validation"), "the last evaluation's, without a calibration: {text}");
    runs.write("my runs/a/tree.json", "[[0], [0, 0], [0, 0, 0]]");
    runs.write("my runs/a/calibration.json", calibration().to_string());
    let (page, _) = runs.page(&["my runs/a"]);
    assert!(
        page.contains("<title>[0, 0, 0]</title>"),
        "a tree of more heads than were calibrated has no probabilities"
    );
}

#[test]
fn a_tree_that_is_chosen_at_each_step_and_the_kind_of_heads_are_reported() {
    let runs = Runs::new();
    runs.full("a");
    runs.write("a/recipe.toml", RECIPE.replace("[stage", "architecture = \"hydra\"\n[stage"));
    let limits = json!({"dynamic": {"nodes": 63, "depth": 4, "top_k": 10}, "expected_tokens_per_step": 4.25});
    runs.write("a/tree.json", limits.to_string());
    let text = text_of(&runs.page(&["a"]).0);
    let reported = "Chosen at each step: at most 63 nodes and 4 levels, from the best 10 guesses of a node; 4.25 expected tokens per step";
    assert!(text.contains(reported) && text.contains("heads 2 architecture hydra"), "{text}");
}

#[test]
fn several_runs_lie_over_each_other_and_their_recipes_are_compared() {
    let runs = Runs::new();
    runs.full("x/a");
    runs.bare("y/a", 20);
    runs.write("y/a/recipe.toml", RECIPE.replace("learning_rate = 0.001", "learning_rate = 0.002\neps = 1e-7"));
    let (page, _) = runs.page(&["x/a", "y/a", "--out", "both.html"]);
    let text = text_of(&page);
    assert!(text.contains("tokens per step decoding 2.25 –") && text.contains("stage Medusa-2 Medusa-2"), "{text}");
    assert!(text.contains("key x/a y/a optimizer.learning_rate 0.001 0.002 optimizer.eps – 1e-7 Loss"), "{text}");
    let total = page
        .split("<b>Total loss (LM loss + λ0 × heads loss)</b>")
        .nth(1)
        .and_then(|rest| rest.split("</figure>").next())
        .expect("a plot");
    for line in ["train s1", "marked s1", "train s2", "marked s2"] {
        assert!(total.contains(&format!("<g class=\"{line}\">")), "{line}: two runs in one plot");
    }
    assert!(page.contains("Loss of head 1") && page.contains("Head 2, top-1"), "a plot a head");
    assert!(!page.contains("Loss of head 2"), "but none without a value");
    let (page, _) = runs.page(&["x/a", "x/a", "--out", "both.html"]);
    assert!(text_of(&page).contains("The recipes are identical."));
}

#[test]
fn many_files_of_one_folder_are_one_line() {
    let runs = Runs::new();
    runs.bare("a", 10);
    let mut many = provenance();
    let files = (0..200).map(|file| json!({"path": format!("rows/{file}.jsonl"), "sha256": "5eed"}));
    many["data"] = files.chain([json!({"path": "data/tokenizer.json", "sha256": "70ce"})]).collect();
    runs.write("a/provenance.json", many.to_string());
    let text = text_of(&runs.page(&["a"]).0);
    assert!(text.contains("rows/ 200 files, listed in provenance.json data/tokenizer.json 70ce"), "{text}");
    assert!(!text.contains("rows/1.jsonl"), "{text}");
}

#[test]
fn the_page_asks_the_network_for_nothing() {
    let runs = Runs::new();
    runs.full("a");
    runs.write("a/recipe.toml", RECIPE.replace("models/llama", "https://example.org/model"));
    let (page, _) = runs.page(&["a"]);
    assert!(text_of(&page).contains("https://example.org/model"), "addresses may be read");
    for load in
        ["src=", "url(", "@import", "<link rel=\"stylesheet\"", "<img", "<iframe", "fetch(", "XMLHttp", "import("]
    {
        assert!(!page.contains(load), "{load}");
    }
    let links: Vec<&str> = page.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(links, ["data:,"], "the empty icon, which keeps browsers from asking for one");
    assert!(page.contains("content=\"default-src 'none'; "), "and browsers are told to refuse it");
}

#[test]
fn names_are_text_whatever_they_hold() {
    let runs = Runs::new();
    let evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&";
    let name = "a<b onclick='x'>&amp;";
    runs.full(name);
    runs.write(&format!("{name}/recipe.toml"), RECIPE.replace("\"models/llama\"", &json!(evil).to_string()));
    let mut origin = provenance();
    (origin["command"][1], origin["data"][0]["path"]) = (json!(evil), json!(evil));
    runs.write(&format!("{name}/provenance.json"), origin.to_string());
    let mut bench = bench();
    bench["categories"] = json!({evil: bench["categories"]["maths"]});
    runs.write(&format!("{name}/bench.json"), bench.to_string());
    runs.full("other");
    for arguments in [&[name][..], &[name, "other", "--out", "both.html"]] {
        let (page, _) = runs.page(arguments);
        assert_eq!((page.matches("<script").count(), page.matches("<img").count()), (1, 0), "our own script alone");
        assert!(!page.contains("<b onclick") && text_of(&page).contains(evil), "it is there, as text");
        assert!(text_of(&page).contains(name));
    }
}

#[test]
fn speeds_name_the_drafter_that_they_were_measured_with() {
    let runs = Runs::new();
    runs.full("a");
    let of_heads = text_of(&runs.page(&["a"]).0);
    assert!(of_heads.contains("tokens/s with heads") && of_heads.contains("per step); with heads"), "{of_heads}");
    let mut bench = bench();
    bench["drafter"] = json!("ngram");
    runs.write("a/bench.json", bench.to_string());
    let of_ngram = text_of(&runs.page(&["a"]).0);
    assert!(!of_ngram.contains("with heads"), "{of_ngram}");
    assert!(of_ngram.contains("tokens/s with prompt lookup"), "{of_ngram}");
    assert!(of_ngram.contains("per step); with prompt lookup"), "{of_ngram}");
}

#[test]
fn drafters_that_were_measured_together_are_compared() {
    let runs = Runs::new();
    runs.full("a");
    let row = |drafter: &str, speedup: f64| {
        let mut bench = bench();
        (bench["drafter"], bench["speedup"]) = (json!(drafter), json!(speedup));
        bench
    };
    assert!(!text_of(&runs.page(&["a"]).0).contains("Drafters compared"), "one drafter is no comparison");
    let mut heads = row("medusa", 1.75);
    (heads["weights"], heads["parameters"]) = (json!(["x/final"]), json!(12345));
    heads["training"] = json!({"seconds": 90.0, "tokens": 1000});
    let lines = [row("plain", 1.0), row("ngram", 1.25), heads].map(|line| line.to_string());
    runs.write("a/bench.json", lines.join("\n"));
    let page = text_of(&runs.page(&["a"]).0);
    for words in ["Drafters compared", "plain", "ngram", "medusa:x/final", "12,345", "1.75", "with heads"] {
        assert!(page.contains(words), "{words}: {page}");
    }
    assert!(!page.contains("results of a sweep"), "{page}");
}

#[test]
fn several_drafters_have_a_table_of_categories_each() {
    let runs = Runs::new();
    runs.full("a");
    let row = |drafter: &str| {
        let mut bench = bench();
        bench["drafter"] = json!(drafter);
        bench.to_string()
    };
    runs.write("a/bench.json", ["plain", "ngram", "medusa"].map(row).join("\n"));
    let text = text_of(&runs.page(&["a"]).0);
    assert!(text.contains("Speed of decoding: ngram") && text.contains("Speed of decoding: medusa"), "{text}");
    assert!(!text.contains("Speed of decoding: plain"), "{text}");
    assert_eq!(text.matches("maths 1.25 2.25 1.50 100").count(), 2, "{text}");
}

#[test]
fn of_a_sweep_the_value_of_the_tree_stands_for_the_run_and_all_are_drawn() {
    let runs = Runs::new();
    runs.full("a");
    let row = |nodes: usize, speedup: f64| {
        let mut bench = bench();
        (bench["tree_nodes"], bench["speedup"]) = (json!(nodes), json!(speedup));
        bench["sweep"] = json!({"name": "nodes", "value": nodes});
        bench.to_string()
    };
    runs.write("a/bench.json", [row(1, 1.25), row(3, 1.75), row(8, 2.0)].join("\n"));
    let (page, _) = runs.page(&["a"]);
    let text = text_of(&page);
    assert!(text.contains("speedup 1.75 × over plain decoding"), "tree.json has three nodes: {text}");
    assert!(text.contains("Of the sweep in bench.json, this is the result with nodes = 3."), "{text}");
    assert!(!text.contains("Measured with a tree of"), "{text}");
    assert!(text.contains("nodes of the tree") && page.contains("id=\"run1-sweep1-title\""), "both plots: {text}");
    runs.write("a/bench.json", [row(1, 1.25), row(8, 2.0)].join("\n"));
    let text = text_of(&runs.page(&["a"]).0);
    assert!(text.contains("Measured with a tree of 1 node, not with tree.json, which has 3."), "{text}");
}

#[test]
fn files_that_were_made_from_others_than_those_in_the_folder_are_reported() {
    let runs = Runs::new();
    runs.full("a");
    let sha256 = |name: &str| medusa::files::sha256(&runs.path(name)).expect("a file");
    let tree = |calibration: &str, latency: &str| {
        json!({"choices": [[0]], "calibration_sha256": calibration, "latency_sha256": latency}).to_string()
    };
    runs.write("a/tree.json", tree(&sha256("a/calibration.json"), &sha256("a/latency.json")));
    let (_, said) = runs.page(&["a"]);
    assert!(!said.contains("tree.json"), "{said}");
    runs.write("a/tree.json", tree("00", "00"));
    let mut other = latency();
    other["heads_sha256"] = json!("cd");
    runs.write("a/latency.json", other.to_string());
    let (page, said) = runs.page(&["a"]);
    for words in [
        "a: tree.json was searched with another calibration than calibration.json",
        "a: tree.json was chosen by other step times than those of latency.json",
        "a: calibration.json and latency.json were measured with different heads",
    ] {
        assert!(said.contains(words) && text_of(&page).contains(words), "{words}: {said}");
    }
}

#[test]
fn a_page_that_is_replaced_is_reported() {
    let runs = Runs::new();
    runs.bare("a", 12);
    assert!(!runs.page(&["a"]).1.contains("replaced"));
    assert!(runs.page(&["a"]).1.contains("a/report.html exists and will be replaced"));
}

#[test]
fn a_run_that_goes_on_has_a_page_too() {
    let runs = Runs::new();
    runs.bare("a", 12);
    fs::remove_dir_all(runs.path("a/final")).expect("it was there");
    let whole = metrics(12);
    runs.write("a/metrics.jsonl", &whole[..whole.len() - 30]);
    let (page, said) = runs.page(&["a"]);
    assert!(said.contains("the last line of metrics.jsonl is incomplete and is skipped"), "{said}");
    let text = text_of(&page);
    assert!(text.contains("steps 11 of 30") && text.contains("state not finished"), "{text}");
    assert!(text.contains("latest loss") && !text.contains("final loss"), "{text}");
    assert!(
        text.contains("is incomplete and is skipped") && text.contains("the run is still going, or was stopped"),
        "{text}"
    );
    let (_, said) = runs.page(&["a", "--quiet"]);
    assert!(said.is_empty(), "{said}");
    for nothing in ["", "\n"] {
        runs.write("a/metrics.jsonl", nothing);
        let (page, said) = runs.page(&["a"]);
        assert!(
            said.contains("a has no logged steps yet") && !page.contains("NaN") && !page.contains("Loss"),
            "{said}"
        );
    }
    fs::remove_file(runs.path("a/metrics.jsonl")).expect("it was there");
    runs.page(&["a"]);
}

#[test]
fn a_long_run_has_a_page_of_less_than_a_megabyte_and_a_half() {
    let runs = Runs::new();
    runs.bare("a", 3000);
    assert!(!runs.page(&["a"]).0.contains(">100k<"));
    let of_spike = "\"step\":2345,\"epoch\":0.1,\"tokens\":234500,\"loss\":";
    let metrics = metrics(3000);
    assert!(metrics.contains(of_spike));
    runs.write("a/metrics.jsonl", metrics.replacen(of_spike, &format!("{of_spike}123456,\"was\":"), 1));
    let (page, _) = runs.page(&["a"]);
    assert!(page.len() < 600_000, "{} bytes", page.len());
    assert!(page.contains(">100k<"), "the one high value of 3,000 is still on the page");
    let names: Vec<String> = (0..6).map(|at| format!("r{at}")).collect();
    for name in &names {
        runs.bare(name, 1000);
    }
    let arguments: Vec<&str> = names.iter().map(String::as_str).chain(["--out", "all.html"]).collect();
    let (page, _) = runs.page(&arguments);
    assert!(page.len() < 1_500_000, "{} bytes of six runs", page.len());
}

#[test]
fn lines_of_a_plot_can_be_distinguished() {
    let runs = Runs::new();
    runs.full("a");
    let mut times = latency();
    times["steps"]
        .as_array_mut()
        .expect("steps")
        .push(json!({"nodes": 2, "depth": 1, "step_ms": 3.0, "dynamic": true}));
    runs.write("a/latency.json", times.to_string());
    let (page, _) = runs.page(&["a"]);
    let style = |name: &str| {
        let before = page.split(&format!("</svg>{name}</li>")).next().expect("a legend");
        before.rsplit("swatch ").next().expect("a line").split('"').next().expect("a class").to_owned()
    };
    let styles = ["depth 1", "depth 2", "depth 1, chosen at each step", "plain decoding"].map(style);
    assert_eq!(styles, ["s1", "s2", "s3", "s0"]);
    runs.bare("b", 0);
    let (page, _) = runs.page(&["a", "b", "--out", "both.html"]);
    let loss = page.split("<b>Total loss").nth(1).and_then(|rest| rest.split("</ul>").next()).expect("a legend");
    assert!(loss.contains("</svg>a</li>") && !loss.contains("</svg>b</li>"), "the only run of two with values: {loss}");
}

#[test]
fn several_runs_need_no_name_for_their_page() {
    let runs = Runs::new();
    ["a", "b"].iter().for_each(|name| runs.bare(name, 3));
    let output = runs.medusa(&["a", "b"]);
    let [page, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    assert_eq!(page, "report.html\n");
    assert!(said.contains("no --out: writing the page of 2 runs to report.html"), "{said}");
    assert!(runs.path("report.html").is_file() && !runs.path("a/report.html").exists());
}

#[test]
fn json_names_the_page_and_its_runs() {
    let runs = Runs::new();
    runs.bare("a", 3);
    let output = runs.medusa(&["a", "--out", "page.html", "--json"]);
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(printed, json!({"out": "page.html", "runs": ["a"]}));
    assert!(runs.path("page.html").is_file());
}

#[test]
fn what_is_no_run_is_one_clear_error() {
    let runs = Runs::new();
    runs.bare("a", 3);
    let absent = runs.complaint(&["nowhere"], 2);
    assert!(
        absent.contains("nowhere is not a run folder: it does not exist; give the train.output_dir of a recipe"),
        "{absent}"
    );
    let inside = runs.complaint(&["a/final"], 2);
    assert!(inside.contains("a/final is not a run folder: it has no recipe.toml"), "{inside}");
    assert!(runs.complaint(&["a/recipe.toml"], 2).contains("it is a file"));
    runs.write("exported/recipe.toml", RECIPE);
    let exported = runs.complaint(&["exported"], 2);
    assert!(exported.contains("exported is not a run folder: it has no provenance.json"), "{exported}");
    assert!(runs.complaint(&["a", "--out", "a"], 2).contains("--out a is a folder"));
    let whole = metrics(3);
    runs.write(
        "a/metrics.jsonl",
        whole.replacen("{\"split\":\"train\",\"step\":2", "{\"split\":\"train\",\"step\":\"two\"", 1),
    );
    let line = runs.complaint(&["a"], 1);
    assert!(
        line.contains("a/metrics.jsonl, line 2: invalid type: string \"two\"")
            && line.contains("fix or remove the line"),
        "{line}"
    );
    runs.write("a/metrics.jsonl", whole);
    for (file, text, words) in [
        ("bench.json", "{\"plain\": 1}", "is no result of medusa bench --json"),
        ("calibration.json", "{}", "a/calibration.json"),
        ("latency.json", "{}", "a/latency.json"),
        ("tree.json", "[[1, 2]]", "a/tree.json"),
        ("provenance.json", "[", "expected what medusa-train writes"),
    ] {
        runs.write(&format!("a/{file}"), text);
        let reported = runs.complaint(&["a"], 1);
        assert!(reported.contains(words) && reported.contains(file), "{reported}");
        fs::remove_file(runs.path(&format!("a/{file}"))).expect("it was there");
    }
}
