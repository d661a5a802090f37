//! `medusa inspect PATH`: summarises a run, checkpoint, heads, tree, calibration, latency file, results of bench, distillation or backbone. Reads
//! headers and JSON, no weights.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::print::visible;
use super::{CommonFlags, UsageError, print_json, print_text};
use crate::distill::folder::{DistilledFolder, DistilledShare, ShareState};
use crate::draft::heads::HEADS_FILE;
use crate::draft::heads::import::{self, HeadsFile};
use crate::draft::heads::layout::HeadsLayout;
use crate::dtype::Dtype;
use crate::files::{self, check_regular, failed};
use crate::formats::bench::BenchHeadline;
use crate::formats::calibration::Calibration;
use crate::formats::calibration_share::{CalibratedWork, CalibrationShare};
use crate::formats::latency::{Latency, StepTime};
use crate::formats::load::{self, LoadResult};
use crate::formats::run_folder::is_run;
use crate::formats::share::Share;
use crate::formats::tree::{DynamicTree, TreeFile};
use crate::model::config::LlamaConfig;
use crate::model::weights::{self, MODEL_FILE, MODEL_INDEX, WeightFiles, WeightsError};
use crate::plural::{counted, mebibytes};
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;

mod checked;
mod eagle;
mod links;
mod run;
mod tensors;
mod verify;

use self::eagle::EagleFound;
use self::run::JsonLine;
use self::tensors::{HeadsFound, TensorsFound, WeightsFound};

/// Summarise a run, checkpoint, heads, weights file, tree, calibration, latency file, results of bench, distilled folder or backbone.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa inspect checkpoints/first\n  medusa inspect tree.json\n  medusa inspect --verify checkpoints/first"
)]
pub struct InspectArgs {
    /// File or folder.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Instead of a summary, compare every file with its checksum, and with the files that it names: a line for each, exit status 1 if one is
    /// damaged.
    #[arg(long)]
    pub verify: bool,
}

/// The contents of the path.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Contents {
    Run(Box<run::RunContents>),
    Heads(HeadsFound),
    Eagle(EagleFound),
    Calibration(Calibration),
    #[serde(rename = "calibration share")]
    CalibrationShare(CalibrationShareFound),
    Distilled(DistilledFolder),
    Tree(TreeFound),
    Latency(Latency),
    Bench {
        bench: JsonLine<BenchHeadline>,
    },
    Load {
        load: Vec<LoadResult>,
    },
    Tensors(TensorsFound),
    Backbone(Box<BackboneFound>),
}

#[derive(Debug, Serialize)]
struct Inspected<'p> {
    path: &'p Path,
    #[serde(flatten)]
    contents: Contents,
}

#[derive(Debug, Serialize)]
struct CalibrationShareFound {
    share: Share,
    #[serde(flatten)]
    of: CalibratedWork,
    tokens: u64,
}

#[derive(Debug, Serialize)]
struct TreeFound {
    nodes: usize,
    /// Of a tree that is chosen at each step.
    #[serde(skip_serializing_if = "Option::is_none")]
    dynamic: Option<DynamicTree>,
    nodes_of_level: Vec<usize>,
    guesses_of_head: Vec<usize>,
    expected_tokens_per_step: Option<f64>,
    calibration_sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_sha256: Option<String>,
}

#[derive(Debug, Serialize)]
struct BackboneFound {
    config: LlamaConfig,
    /// Of its config.json.
    unknown_keys: Vec<String>,
    parameters: i64,
    weights_bytes: Option<u64>,
    bytes: BTreeMap<String, u64>,
    /// Heads among the backbone's weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    heads: Option<HeadsFound>,
}

/// Prints a summary of the path.
///
/// # Errors
/// If the path does not exist, has an unknown kind, or is damaged.
pub fn run(args: &InspectArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let path = args.path.as_path();
    if args.verify && path.exists() {
        return verify::run(path, common);
    }
    let contents = if path.is_dir() {
        folder(path)?
    } else if path.exists() {
        check_regular(path).map_err(failed("read", path))?;
        file(path)?
    } else {
        return Err(UsageError(format!("{} does not exist", path.display())).into());
    };
    if common.json {
        return print_json(&Inspected { path, contents });
    }
    print_text(text(path, &contents)?.trim_end())
}

fn folder(path: &Path) -> anyhow::Result<Contents> {
    if is_run(path) {
        return Ok(Contents::Run(Box::new(run::RunContents::read(path)?)));
    }
    if let Some(distilled) = DistilledFolder::read(path)? {
        return Ok(Contents::Distilled(distilled));
    }
    if let Some(eagle) = EagleFound::read(path)? {
        return Ok(Contents::Eagle(eagle));
    }
    if let Ok(found) = import::locate(path)
        && is_draft(&found)
    {
        return Ok(Contents::Heads(HeadsFound::read(&HeadsFile::open(&found)?)?));
    }
    if path.join("config.json").is_file() {
        return Ok(Contents::Backbone(Box::new(backbone(path)?)));
    }
    anyhow::bail!(
        "{} holds nothing this program knows; expected a run's folder (recipe.toml and provenance.json), a checkpoint or final/ \
         ({HEADS_FILE}), what medusa distill writes, or a backbone (config.json)",
        path.display()
    )
}

/// Whether a file holds only heads: vLLM's heads have the file name of a backbone's weights.
fn is_draft(file: &Path) -> bool {
    let in_weights = [MODEL_FILE, MODEL_INDEX].iter().any(|name| file.ends_with(name));
    !in_weights || HeadsFile::open(file).is_ok_and(|heads| heads.layout() == HeadsLayout::Vllm)
}

fn file(path: &Path) -> anyhow::Result<Contents> {
    if let Some(eagle) = EagleFound::read(path)? {
        return Ok(Contents::Eagle(eagle));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors" | "pt" | "pth" | "bin") => Ok(match tensors::read(path)? {
            WeightsFound::Heads(found) => Contents::Heads(found),
            WeightsFound::Tensors(found) => Contents::Tensors(found),
        }),
        Some("json") => json(path),
        Some("gguf") => Ok(Contents::Backbone(Box::new(backbone(path)?))),
        _ => anyhow::bail!("{} is of no known kind; expected .safetensors, .pt, .bin, .gguf or .json", path.display()),
    }
}

fn backbone(folder: &Path) -> anyhow::Result<BackboneFound> {
    let config = LlamaConfig::load(folder)?;
    let parameters = config.parameters();
    let in_memory = |dtype: Dtype| (dtype.to_string(), parameters.unsigned_abs() * dtype.bytes() as u64);
    let bytes = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16].map(in_memory).into_iter().collect();
    let size = |path: &PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
    let weights_bytes = match weights::files_of(folder) {
        Ok(files) => {
            WeightFiles::open(folder)?; // reads headers and lengths, so a truncated file is an error
            Some(files.iter().map(size).sum())
        }
        Err(WeightsError::NoWeights { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let heads = HeadsFile::open(folder).ok().map(|file| HeadsFound::read(&file)).transpose()?;
    let unknown_keys = LlamaConfig::unknown_keys(folder)?;
    Ok(BackboneFound { config, unknown_keys, parameters, weights_bytes, bytes, heads })
}

fn json(path: &Path) -> anyhow::Result<Contents> {
    let text = files::read_text(path).map_err(failed("read", path))?;
    // The first result of a sweep determines the kind; the kind's own reader checks the rest.
    let value = Value::deserialize(&mut serde_json::Deserializer::from_str(&text))
        .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    if value.is_array()
        || value.get("choices").is_some()
        || value.get("dynamic").is_some() && value.get("heads").is_none()
    {
        return Ok(Contents::Tree(tree(GuessTree::load(path)?)));
    }
    if value.get("rows_with_ranks").is_some() {
        let CalibrationShare { share, of, tokens, .. } = CalibrationShare::load(path)?;
        return Ok(Contents::CalibrationShare(CalibrationShareFound { share, of, tokens }));
    }
    if value.get("heads").is_some() {
        let calibration = Calibration { exported_from: None, other: Map::new(), ..Calibration::load(path)? };
        return Ok(Contents::Calibration(calibration));
    }
    if value.get("plain_step_ms").is_some() {
        return Ok(Contents::Latency(Latency::load(path)?));
    }
    if value.get("acceleration_rate").is_some()
        && let Some(bench) = JsonLine::fastest(path)?
    {
        return Ok(Contents::Bench { bench });
    }
    if value.get("requests_per_second").is_some() {
        return Ok(Contents::Load { load: load::load(path)? });
    }
    anyhow::bail!(
        "{} is JSON of no known kind: {}; expected a tree (choices or dynamic), a calibration (heads), latencies (plain_step_ms), a bench \
         (acceleration_rate) or one under load (requests_per_second)",
        path.display(),
        keys(&value)
    )
}

fn tree((tree, file): (GuessTree, TreeFile)) -> TreeFound {
    let mut nodes_of_level = vec![0; tree.as_static().map_or(0, SparseTree::max_depth)];
    file.choices.iter().for_each(|choice| nodes_of_level[choice.len() - 1] += 1);
    TreeFound {
        nodes: tree.nodes(),
        dynamic: file.dynamic,
        nodes_of_level,
        guesses_of_head: tree.as_static().map_or(vec![], SparseTree::widths),
        expected_tokens_per_step: file.expected_tokens_per_step,
        calibration_sha256: file.calibration_sha256,
        expected_tokens_per_second: file.expected_tokens_per_second,
        latency_sha256: file.latency_sha256,
    }
}

fn keys(value: &Value) -> String {
    match value.as_object() {
        Some(object) => format!("an object with the keys {:?}", object.keys().collect::<Vec<_>>()),
        None => "no object".into(),
    }
}

fn text(path: &Path, contents: &Contents) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    match contents {
        Contents::Run(run) => run.text(path, &mut out)?,
        Contents::Heads(heads) => heads.text(&mut out)?,
        Contents::Eagle(eagle) => eagle.text(&mut out)?,
        Contents::Calibration(found) => calibration_text(found, &mut out)?,
        Contents::CalibrationShare(found) => calibration_share_text(found, &mut out)?,
        Contents::Distilled(found) => distilled_text(found, &mut out)?,
        Contents::Tree(found) => tree_text(found, &mut out)?,
        Contents::Latency(found) => latency_text(found, &mut out)?,
        Contents::Bench { bench } => bench.text(&mut out)?,
        Contents::Load { load } => writeln!(out, "{}", run::load_text(load))?,
        Contents::Tensors(found) => found.text(&mut out)?,
        Contents::Backbone(found) => backbone_text(found, &mut out)?,
    }
    Ok(out)
}

fn calibration_text(found: &Calibration, out: &mut String) -> std::fmt::Result {
    writeln!(out, "backbone     {}", found.backbone)?;
    writeln!(out, "heads        sha256 {}", found.heads_sha256)?;
    writeln!(out, "tokens       {}", found.tokens)?;
    let steps: usize = found.joint.runs.iter().map(Vec::len).sum();
    writeln!(out, "replayable   {} of {}", counted(steps, "token"), counted(found.joint.runs.len(), "text"))?;
    run::accuracy_text(&run::accuracy_of(found), out)
}

fn calibration_share_text(found: &CalibrationShareFound, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "calibration  share {}: {} tokens of the rows of all shares ({})",
        found.share, found.tokens, found.of.rows
    )?;
    writeln!(out, "backbone     {} in {} on {}", found.of.backbone, found.of.dtype, found.of.device)?;
    writeln!(out, "heads        sha256 {}", found.of.heads_sha256)?;
    writeln!(out, "rows         sha256 {}", found.of.rows_sha256)
}

fn distilled_text(found: &DistilledFolder, out: &mut String) -> std::fmt::Result {
    let refused = |count: usize| if count > 0 { format!(", {count} refused") } else { String::new() };
    let (all, refused_note) = (counted(found.conversations, "conversation"), refused(found.refused));
    writeln!(out, "distilled    {} of {all}{refused_note}", found.kept)?;
    for DistilledShare { share, conversations, kept, refused: refused_here, state } in &found.shares {
        let state = match state {
            ShareState::Whole => "whole",
            ShareState::Unfinished => "not finished: continue with --resume",
            ShareState::Missing => "missing",
        };
        writeln!(out, "share {share:<6} {kept} of {conversations}{}, {state}", refused(*refused_here))?;
    }
    Ok(())
}

fn tree_text(found: &TreeFound, out: &mut String) -> std::fmt::Result {
    if let Some(DynamicTree { nodes, depth, top_k }) = found.dynamic {
        writeln!(out, "tree         chosen at each step: at most {}, the likeliest", counted(nodes, "node"))?;
        writeln!(out, "heads        {depth}, of each up to {top_k} nodes with {top_k} guesses")?;
    } else {
        let (levels, guesses) = (&found.nodes_of_level, &found.guesses_of_head);
        writeln!(out, "tree         {}, on each level {levels:?}", counted(found.nodes, "node"))?;
        writeln!(out, "heads        {}, of each this many guesses: {guesses:?}", guesses.len())?;
    }
    if let Some(tokens) = found.expected_tokens_per_step {
        writeln!(out, "expected     {tokens:.3} tokens per step")?;
    }
    if let Some(tokens) = found.expected_tokens_per_second {
        writeln!(out, "             {tokens:.1} tokens/s, where its latencies were measured")?;
    }
    for (name, sha256) in [("calibration", &found.calibration_sha256), ("latencies", &found.latency_sha256)] {
        if let Some(sha256) = sha256 {
            writeln!(out, "{name:<12} sha256 {sha256}")?;
        }
    }
    Ok(())
}

fn latency_text(found: &Latency, out: &mut String) -> std::fmt::Result {
    let Latency { device, engine, dtype, threads, context, backbone, heads_sha256, plain_step_ms, steps, .. } = found;
    let weights = found.quantization.as_ref().map_or_else(String::new, |name| format!(", weights in {name}"));
    writeln!(
        out,
        "latencies    {dtype}{weights} on {device}, {}, behind {}",
        counted(*threads, "CPU thread"),
        counted(*context, "token")
    )?;
    writeln!(out, "engine       {engine}")?;
    if let Some(caveat) = found.caveat() {
        writeln!(out, "warning      {caveat}")?;
    }
    writeln!(out, "backbone     {backbone}")?;
    if let Some(heads) = heads_sha256 {
        writeln!(out, "heads        sha256 {heads}")?;
    }
    writeln!(out, "plain        {plain_step_ms:.3} ms per step")?;
    for &StepTime { nodes, depth, step_ms, dynamic, .. } in steps {
        let chosen = if dynamic { ", chosen at each step" } else { "" };
        writeln!(
            out,
            "tree         {step_ms:.3} ms per step, {} over {}{chosen}",
            counted(nodes, "node"),
            counted(depth, "head")
        )?;
    }
    Ok(())
}

fn backbone_text(found: &BackboneFound, out: &mut String) -> std::fmt::Result {
    let config = &found.config;
    writeln!(out, "family       {}", config.model_type)?;
    writeln!(
        out,
        "shape        {} layers, hidden size {}, MLP {}, {} query and {} key/value heads of {}",
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim
    )?;
    let lm_head = if config.tie_word_embeddings { "tied to the embedding" } else { "its own" };
    writeln!(out, "vocabulary   {}, lm_head {lm_head}", config.vocab_size)?;
    writeln!(out, "context      {} tokens", config.max_position_embeddings)?;
    writeln!(out, "end of text  {:?}", config.eos_token_ids)?;
    writeln!(out, "parameters   {}", found.parameters)?;
    match found.weights_bytes {
        Some(bytes) => writeln!(out, "files        {}", mebibytes(bytes))?,
        None => writeln!(out, "files        no weights here")?,
    }
    let sizes: Vec<String> =
        found.bytes.iter().map(|(dtype, bytes)| format!("{dtype} {}", mebibytes(*bytes))).collect();
    writeln!(out, "memory       {}", sizes.join(", "))?;
    if !found.unknown_keys.is_empty() {
        writeln!(out, "unknown keys {}", visible(&found.unknown_keys.join(", ")))?;
    }
    found.heads.as_ref().map_or(Ok(()), |heads| heads.text(out))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use serde_json::json;

    use super::*;
    use crate::cli::load_table;
    use crate::formats::latency::examples::latency;
    use crate::formats::run_folder::LOAD;

    #[test]
    fn one_thread_is_reported_in_the_singular() {
        let mut out = String::new();
        latency_text(&Latency { threads: 1, ..latency(&[(1, 1, 2.5)]) }, &mut out).unwrap();
        assert!(out.starts_with("latencies    float32 on cpu, 1 CPU thread, behind 256 tokens\n"), "{out}");
        assert!(out.contains("\ntree         2.500 ms per step, 1 node over 1 head\n"), "{out}");
    }

    #[test]
    fn results_under_load_are_shown_as_bench_shows_them() {
        let dir = tempfile::tempdir().unwrap();
        let result = |concurrency: usize| {
            json!({"concurrency": concurrency, "endpoint": "http://h/v1", "model": "m", "requests": 8, "errors": 0, "seconds": 2.0,
                "prompt_tokens": 9, "tokens": 100, "tokens_per_second": 50.0, "requests_per_second": 4.0,
                "e2el_ms": {"median": 250.0, "p95": 300.0}})
        };
        let lines = format!("{}\n{}\n", result(1), result(16));
        for name in ["recipe.toml", "provenance.json", LOAD] {
            let text = if name == LOAD { lines.as_bytes() } else { b"{}" };
            crate::files::write_atomic(&dir.path().join(name), |out| out.write_all(text)).unwrap();
        }
        let table = load_table::table(&load::load(&dir.path().join(LOAD)).unwrap(), None);
        assert!(table.contains("\n16 ") && table.contains("250, 300"), "{table}");
        for path in [dir.path().to_owned(), dir.path().join(LOAD)] {
            let contents = if path.is_dir() { folder(&path) } else { file(&path) }.unwrap();
            let text = text(&path, &contents).unwrap();
            assert!(text.contains(&table), "{text}");
            assert_eq!(serde_json::to_value(&contents).unwrap()["load"][1]["concurrency"], 16);
        }
    }
}
