//! The sections of one run besides its curves: tables, tree, provenance, missing measurements.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use super::axis::Range;
use super::key_figures::key_figures;
use super::plot::{Plot, Series, SeriesKind};
use super::readable::{duration, grouped, number, percent, time};
use super::run::Run;
use super::shell::quoted;
use super::{load, sweep};
use crate::formats::bench::{BenchResult, DecodingComparison};
use crate::formats::calibration::{Calibration, HeadAccuracy};
use crate::formats::latency::Latency;
use crate::formats::run_folder::{BENCH, BEST, CALIBRATION, FINAL, LATENCY, PROVENANCE, TREE};
use crate::plural::counted;
use crate::tree::drawing;
use crate::tree::search;
use crate::tree::sparse_tree::SparseTree;

/// Most files of one folder that are listed.
const MOST_FILES: usize = 10;
/// Keys of provenance.json that list files with their SHA-256.
const HASHED: [&str; 3] = ["data", "backbone_files", "init_from_files"];
/// Trees with more leaves take the full width of the page.
const WIDE_TREE: usize = 15;

/// A run's data for the template. `at` numbers the runs of the page, `name` is the run's name on it.
pub(super) fn sections(run: &Run, at: usize, name: &str) -> Value {
    let id = format!("run{at}");
    json!({
        "path": run.path.display().to_string(),
        "stage": run.stage(),
        "facts": facts(run),
        "notes": run.notes(),
        "key_figures": key_figures(run),
        "calibration": run.calibration.as_ref().map(accuracies),
        "tree": tree(run, &id),
        "latency": run.latency.as_ref().map(|latency| times(latency, &id)),
        "benches": benches(run),
        "sweep": sweep(run, &id),
        "load": load_plots(run, &id),
        "drafters": drafters(&run.bench),
        "recipe": run.recipe.lines,
        "provenance": provenance(run),
        "data": data_files(run),
        "missing": missing(run),
        "id": id,
        "name": name,
    })
}

fn facts(run: &Run) -> Vec<(&'static str, String)> {
    let recipe = |key: &str| run.recipe.value(key);
    let last = run.metrics.last_step();
    let steps = match recipe("train.max_steps") {
        Some(all) if !run.finished => format!("{last} of {all}"),
        _ => last.to_string(),
    };
    let quantized = recipe("backbone.quantization").map(|bits| format!(", {bits}")).unwrap_or_default();
    let stopped_early = run.metrics.validation.last().is_some_and(|line| line.stopped_early);
    let state = match (run.finished, stopped_early) {
        (true, true) => "finished: stopped early",
        (true, false) => "finished",
        (false, _) => "not finished",
    };
    let facts = [
        ("backbone", recipe("backbone.path")),
        ("dtype", recipe("backbone.dtype").map(|dtype| dtype + &quantized)),
        ("heads", recipe("heads.medusa_num_heads")),
        ("architecture", recipe("heads.architecture")),
        ("ResBlocks per head", recipe("heads.medusa_num_layers")),
        ("steps", Some(steps)),
        ("state", Some(state.into())),
        ("best", run.best.map(|best| best.to_string())),
        ("device", run.provenance.get("device").map(plain)),
        ("started", run.provenance.get("started").map(|started| time(&plain(started)))),
    ];
    facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// The calibrated accuracies, one row per head; a cell's shade is 0 to 1.
fn accuracies(calibration: &Calibration) -> Value {
    // Second guesses are right a few times in a hundred; the square root keeps their shade distinguishable from 0.
    let cell = |&share: &f64| json!({"text": percent(share), "shade": share.clamp(0.0, 1.0).sqrt()});
    let row = |head: &HeadAccuracy| {
        json!({
            "cells": head.accuracy.iter().map(cell).collect::<Vec<_>>(),
            "together": percent(head.accuracy.iter().sum()),
            "targets": grouped(head.total as f64),
        })
    };
    let guesses = calibration.heads.iter().map(|head| head.accuracy.len()).max().unwrap_or(0);
    let heads: Vec<Value> = calibration.heads.iter().map(row).collect();
    json!({"guesses": guesses, "heads": heads, "tokens": grouped(calibration.tokens as f64)})
}

fn tree(run: &Run, id: &str) -> Option<Value> {
    let (tree, file) = run.tree.as_ref()?;
    Some(json!({
        "nodes": tree.nodes(),
        "depth": tree.depth(),
        "expected_per_step": file.expected_tokens_per_step.map(number),
        "expected_per_second": file.expected_tokens_per_second.map(number),
        "top_k": file.dynamic.map(|limits| limits.top_k),
        "drawing": tree.as_static().map(|tree| tree_drawing(tree, run, id)),
    }))
}

fn tree_drawing(tree: &SparseTree, run: &Run, id: &str) -> Value {
    // A calibration with fewer heads or guesses than the tree belongs to another tree.
    let guesses =
        |calibration: &Calibration| calibration.heads.iter().map(|head| head.accuracy.len()).min().unwrap_or(0);
    let fits = |calibration: &&Calibration| tree.check_fits(calibration.heads.len(), guesses(calibration)).is_ok();
    let calibration = run.calibration.as_ref().filter(fits);
    let probabilities = calibration.map(|calibration| search::node_probabilities(tree, &calibration.counts_for(tree)));
    let leaves = (0..tree.len()).filter(|&node| tree.children(node).is_empty()).count();
    json!({
        "svg": drawing::draw_in_page(tree, probabilities.as_deref(), &format!("{id}-tree")),
        "is_wide": leaves > WIDE_TREE,
        "has_probabilities": probabilities.is_some(),
    })
}

fn times(latency: &Latency, id: &str) -> Value {
    let depths: BTreeSet<(bool, usize)> = latency.steps.iter().map(|step| (step.dynamic, step.depth)).collect();
    let depth_series = |(at, (dynamic, depth)): (usize, (bool, usize))| {
        let steps = latency.steps.iter().filter(move |step| (step.dynamic, step.depth) == (dynamic, depth));
        let name = if dynamic { format!("depth {depth}, chosen at each step") } else { format!("depth {depth}") };
        let mut points: Vec<(f64, f64)> = steps.map(|step| (step.nodes as f64, step.step_ms)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, style: at + 1, kind: SeriesKind::Marked, points }
    };
    let most = latency.steps.iter().map(|step| step.nodes as f64).fold(1.0, f64::max);
    let plain = vec![(1.0, latency.plain_step_ms), (most, latency.plain_step_ms)];
    let plain = Series { name: "plain decoding".into(), style: 0, kind: SeriesKind::Smooth, points: plain };
    let series = depths.into_iter().enumerate().map(depth_series).chain([plain]).collect();
    let plot = Plot {
        title: "Step time by tree size".into(),
        x: "nodes".into(),
        x_range: Range::Tight,
        unit: "ms",
        range: Range::FromZero,
        series,
    };
    json!({
        "plot": plot.draw(&format!("{id}-latency")),
        "device": latency.device,
        "dtype": latency.dtype.to_string(),
        "threads": counted(latency.threads, "thread"),
        "context": latency.context,
    })
}

/// The result that stands for the run; where several drafters were measured by category, a table for each.
fn benches(run: &Run) -> Vec<Value> {
    let Some(headline) = run.headline() else { return vec![] };
    let measured_with_it = |other: &&BenchResult| other.sweep == headline.sweep && !other.is_plain();
    let drafters: Vec<&BenchResult> = run.bench.iter().filter(measured_with_it).collect();
    let shown = if headline.categories.is_empty() || drafters.len() < 2 { vec![headline] } else { drafters };
    let named = shown.len() > 1;
    let section = |bench: &&BenchResult| {
        let mut section = speeds(bench, run);
        section["name"] = json!(named.then(|| drafter_name(bench)));
        section
    };
    shown.iter().map(section).collect()
}

/// The plots of a sweep.
fn sweep(run: &Run, id: &str) -> Vec<Value> {
    let plots = if sweep::has_lines(&run.bench) { sweep::plots(&run.bench) } else { vec![] };
    plots.iter().enumerate().map(|(at, plot)| json!(plot.draw(&format!("{id}-sweep{at}")))).collect()
}

/// The plots of throughput and latencies under load, and where they were measured; one level alone has no lines.
fn load_plots(run: &Run, id: &str) -> Option<Value> {
    let first = run.load.first().filter(|_| load::has_lines(&run.load))?;
    let plots = load::plots(&run.load);
    let drawn: Vec<Value> =
        plots.iter().enumerate().map(|(at, plot)| json!(plot.draw(&format!("{id}-load{at}")))).collect();
    Some(json!({"conditions": first.source.conditions(), "plots": drawn}))
}

/// The drafter with its weights.
fn drafter_name(result: &BenchResult) -> String {
    match result.weights.is_empty() {
        true => result.drafter.clone(),
        false => format!("{}:{}", result.drafter, result.weights.join("+")),
    }
}

/// One row per category and one for all; `part` is relative to the largest speedup.
fn speeds(bench: &BenchResult, run: &Run) -> Value {
    let largest = bench.groups().map(|(_, group)| group.speedup).fold(f64::MIN_POSITIVE, f64::max);
    let row = |(name, group): (&str, &DecodingComparison)| {
        json!({
            "name": name,
            "tokens": grouped(group.drafted.tokens as f64),
            "acceleration_rate": format!("{:.2}", group.acceleration_rate),
            "overhead": format!("{:.2}", group.overhead),
            "speedup": format!("{:.2}", group.speedup),
            "part": (group.speedup / largest).clamp(0.0, 1.0),
        })
    };
    json!({
        "rows": bench.groups().map(row).collect::<Vec<_>>(),
        "plain_per_second": number(bench.all.plain.tokens_per_second),
        "drafted_per_second": number(bench.all.drafted.tokens_per_second),
        "plain_ms": number(bench.all.plain.step_ms),
        "drafted_ms": number(bench.all.drafted.step_ms),
        "identical": bench.all.identical,
        "device": bench.device,
        "dtype": bench.dtype,
        "guesses": bench.guesses(),
        "nodes": counted(bench.tree_nodes, "node"),
        "swept": bench.sweep.as_ref().map(|swept| format!("{} = {}", swept.name, swept.value)),
        "other_tree": other_tree(bench, run),
    })
}

/// How the tree of a result differs from that of tree.json.
fn other_tree(bench: &BenchResult, run: &Run) -> Option<String> {
    let (tree, _) = run.tree.as_ref().filter(|_| bench.is_of_heads())?;
    let (shown, measured) = (tree.nodes(), bench.tree_nodes);
    let said =
        || format!("Measured with a tree of {}, not with tree.json, which has {shown}.", counted(measured, "node"));
    (shown != measured).then(said)
}

/// One row per drafter if there are several; of a sweep, those of its first value.
fn drafters(bench: &[BenchResult]) -> Option<Value> {
    let first = bench.first()?;
    let compared: Vec<&BenchResult> = bench.iter().filter(|result| result.sweep == first.sweep).collect();
    let largest = compared.iter().map(|result| result.all.speedup).fold(f64::MIN_POSITIVE, f64::max);
    let row = |result: &&BenchResult| {
        json!({
            "name": drafter_name(result),
            "is_plain": result.is_plain(),
            "speedup": format!("{:.2}", result.all.speedup),
            "part": (result.all.speedup / largest).clamp(0.0, 1.0),
            "acceleration_rate": format!("{:.2}", result.all.acceleration_rate),
            "overhead": format!("{:.2}", result.all.overhead),
            "per_second": number(result.all.drafted.tokens_per_second),
            "nodes": result.tree_nodes,
            "parameters": result.parameters.map(|count| grouped(count as f64)),
            "training": result.training.map(|cost| duration(cost.seconds)),
            "identical": result.all.identical,
        })
    };
    (compared.len() > 1).then(
        || json!({"rows": compared.iter().map(row).collect::<Vec<_>>(), "device": first.device, "dtype": first.dtype}),
    )
}

/// A JSON value as text: words as a command line, snapshots as `id@commit`, data as its counts.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) if items.first().is_some_and(Value::is_object) => {
            items.iter().map(plain).collect::<Vec<_>>().join("; ")
        }
        Value::Array(words) => words.iter().map(|word| quoted(&plain(word))).collect::<Vec<_>>().join(" "),
        Value::Object(snapshot) if snapshot.contains_key("commit") => {
            format!("{}@{}", plain(&value["id"]), plain(&value["commit"]))
        }
        Value::Object(data) if data.contains_key("tokens") => {
            let rows = if value["rows"] == 1 { "row" } else { "rows" };
            format!("{} {rows}, {} tokens", plain(&value["rows"]), plain(&value["tokens"]))
        }
        Value::Object(facts) => {
            let fact = |(key, value): (&String, &Value)| format!("{}: {}", key.replace('_', " "), plain(value));
            facts.iter().map(fact).collect::<Vec<_>>().join(", ")
        }
        Value::Null => "–".into(),
        other => other.to_string(),
    }
}

fn provenance(run: &Run) -> Vec<(String, String)> {
    let is_shown_elsewhere = |key: &str| key == "recipe" || HASHED.contains(&key);
    let named = run.provenance.iter().filter(|(key, _)| !is_shown_elsewhere(key));
    named.map(|(key, value)| (key.replace('_', " "), plain(value))).collect()
}

/// Path and SHA-256; many files of one folder are one line.
fn data_files(run: &Run) -> Vec<(String, String)> {
    fn folder((path, _): &(String, String)) -> Option<&Path> {
        Path::new(path).parent()
    }
    let files = HASHED.into_iter().filter_map(|key| run.provenance.get(key)?.as_array()).flatten();
    let file = |file: &Value| Some((plain(file.get("path")?), plain(file.get("sha256")?)));
    let files: Vec<(String, String)> = files.filter_map(file).collect();
    let lines = |files: &[(String, String)]| match folder(&files[0]) {
        Some(folder) if files.len() > MOST_FILES => {
            vec![(
                format!("{}/", folder.display()),
                format!("{}, listed in {PROVENANCE}", counted(files.len(), "file")),
            )]
        }
        _ => files.to_vec(),
    };
    files.chunk_by(|file, next| folder(file) == folder(next)).flat_map(lines).collect()
}

/// Files that are missing, and the commands that create them.
fn missing(run: &Run) -> Vec<Value> {
    let folder = run.path.display().to_string();
    let file = |name: &str| quoted(&format!("{folder}/{name}"));
    let heads = format!("--heads {}", file(if run.best.is_some() { BEST } else { FINAL }));
    let models =
        format!("--backbone {} {heads}", quoted(&run.recipe.value("backbone.path").unwrap_or("BACKBONE".into())));
    let (calibration, tree) = (file(CALIBRATION), file(TREE));
    let mut missing = vec![];
    let mut add = |is_absent: bool, file: &str, shows: &str, command: String| {
        if is_absent {
            missing.push(json!({"file": file, "shows": shows, "command": command}));
        }
    };
    let calibrate = format!("medusa calibrate {models} --prompts PROMPTS.jsonl --out {calibration}");
    add(run.calibration.is_none(), CALIBRATION, "accuracy of every guess", calibrate);
    let search = format!("medusa tree --calibration {calibration} --nodes 63 --out {tree}");
    add(run.tree.is_none(), TREE, "tree of guesses", search);
    let time = format!("medusa tree --calibration {calibration} --latency {} {models} --out {tree}", file(LATENCY));
    add(run.latency.is_none(), LATENCY, "step times", time);
    let bench = format!("medusa bench {models} --tree {tree} --prompts PROMPTS.jsonl --json > {}", file(BENCH));
    add(run.bench.is_empty(), BENCH, "decoding speed", bench);
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_that_a_shell_takes() {
        assert_eq!(
            plain(&json!(["medusa-train", "my recipe.toml", "it's"])),
            r"medusa-train 'my recipe.toml' 'it'\''s'"
        );
        let rows = json!([{"rows": 3, "tokens": 40, "files": []}, {"rows": 1, "tokens": 9}]);
        assert_eq!(plain(&rows), "3 rows, 40 tokens; 1 row, 9 tokens");
        assert_eq!(plain(&json!({"id": "o/n", "commit": "c0"})), "o/n@c0");
        assert_eq!(plain(&json!([{"a_b": 1, "c": null}, {"d": ["x", "y z"]}])), "a b: 1, c: –; d: x 'y z'");
        assert_eq!((plain(&json!("a b")), plain(&json!(2)), quoted("")), ("a b".into(), "2".into(), "''".into()));
    }
}
