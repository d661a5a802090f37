//! A run's folder: progress, accuracies and files.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use console::Term;
use serde::Serialize;
use serde_json::Value;

use super::super::{load_table, wrap};
use super::eagle::EagleFound;
use super::links;
use super::tensors::{self, HeadsFound, WeightsFound};
use crate::draft::heads::HEADS_FILE;
use crate::formats::FormatError;
use crate::formats::bench::{self, BenchHeadline};
use crate::formats::best::BestEvaluation;
use crate::formats::calibration::Calibration;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::formats::load::{self, LoadResult};
use crate::formats::metrics::{MetricsFile, MetricsLine, MetricsSplit};
use crate::formats::run_folder::{BENCH, BEST, CALIBRATION, FINAL, LOAD, METRICS, step_of};
use crate::tree::cross_validation;

/// Contents of a run's folder.
#[derive(Debug, Serialize)]
pub(super) struct RunContents {
    finished: bool,
    checkpoints: Vec<String>,
    heads: Option<HeadsFound>,
    /// In place of heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    eagle: Option<EagleFound>,
    /// The newest lines of metrics.jsonl.
    training: Option<JsonLine<MetricsLine>>,
    validation: Option<JsonLine<MetricsLine>>,
    /// The evaluation that `best/` was kept for.
    best: Option<BestEvaluation>,
    accuracy: Vec<TopAccuracy>,
    /// What is wrong with a file whose numbers are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    /// Results of `medusa bench --json` for these heads, if the folder has them as bench.json.
    bench: Option<JsonLine<BenchHeadline>>,
    /// Its results under load, if the folder has them as load.json.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    load: Vec<LoadResult>,
    files: Vec<String>,
}

/// A line of metrics.jsonl or a result of `medusa bench --json`, with all its keys.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct JsonLine<T> {
    whole: Value,
    #[serde(skip)]
    read: T,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct TopAccuracy {
    top1: f64,
    top5: f64,
}

impl RunContents {
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let lines = MetricsFile::read_what_is_whole(&path.join(METRICS)).lines; // none before step 1
        let whole = |text: &[u8]| serde_json::from_slice(text).unwrap_or_default();
        let json_line = |(text, line): &(Vec<u8>, MetricsLine)| JsonLine { whole: whole(text), read: line.clone() };
        let newest = |split| lines.iter().rfind(|(_, line)| line.split == split).map(json_line);
        let (training, validation) = (newest(MetricsSplit::Train), newest(MetricsSplit::Validation));
        let calibration = path.join(CALIBRATION);
        let is_foreign = links::is_of_other_heads(&calibration);
        let files = names(path)?;
        let checkpoints: Vec<String> = files.iter().filter(|name| step_of(name).is_some()).cloned().collect();
        Ok(Self {
            finished: path.join(FINAL).join(HEADS_FILE).is_file(),
            heads: newest_heads(path, &checkpoints)?,
            eagle: newest_file(path, &checkpoints).map_or(Ok(None), |file| EagleFound::read(&file))?,
            accuracy: accuracy((!is_foreign).then_some(&calibration), validation.as_ref().map(|line| &line.read))?,
            warning: is_foreign.then(|| {
                format!("{CALIBRATION} was measured with other heads than this run's; its accuracies are left out")
            }),
            bench: JsonLine::fastest(&path.join(BENCH))?,
            load: load(&path.join(LOAD))?,
            best: PublishedHeadsConfig::best_of_run(path),
            checkpoints,
            training,
            validation,
            files,
        })
    }

    pub(super) fn text(&self, path: &Path, out: &mut String) -> std::fmt::Result {
        let stopped_early = self.validation.as_ref().is_some_and(|line| line.read.stopped_early);
        let state = if self.finished && stopped_early {
            "finished: stopped early by train.patience"
        } else if self.finished {
            "finished"
        } else {
            "not finished; continue with medusa-train RECIPE.toml --resume"
        };
        writeln!(out, "run          {} ({state})", path.display())?;
        if let Some(heads) = &self.heads {
            writeln!(out, "heads        {}", heads.line())?;
        }
        if let Some(eagle) = &self.eagle {
            eagle.text(out)?;
        }
        if let Some(line) = &self.training {
            writeln!(out, "training     step {}, {}", line.read.step, line.read.losses())?;
        }
        if let Some(line) = &self.validation {
            let tokens =
                cross_validation::in_words(&line.read).map_or_else(String::new, |tokens| format!(", {tokens}"));
            writeln!(out, "validation   step {}, {}{tokens}", line.read.step, line.read.losses())?;
        }
        if let Some(best) = &self.best {
            writeln!(out, "best         {BEST}/: {best}")?;
        }
        writeln!(out, "files        {}", self.files.join(" "))?;
        if let Some(warning) = &self.warning {
            writeln!(out, "warning      {warning}")?;
        }
        accuracy_text(&self.accuracy, out)?;
        self.bench.as_ref().map_or(Ok(()), |bench| bench.text(out))?;
        match self.load.is_empty() {
            true => Ok(()),
            false => writeln!(out, "\n{}", load_text(&self.load)),
        }
    }
}

pub(super) fn accuracy_text(heads: &[TopAccuracy], out: &mut String) -> std::fmt::Result {
    if heads.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:>20}  {:>6}  {:>6}", "accuracy", "top-1", "top-5")?;
    for (head, accuracy) in heads.iter().enumerate() {
        let name = format!("head {}", head + 1);
        writeln!(out, "{name:>20}  {:>6.3}  {:>6.3}", accuracy.top1, accuracy.top5)?;
    }
    Ok(())
}

/// Results under load as `medusa bench` shows them.
pub(super) fn load_text(results: &[LoadResult]) -> String {
    load_table::table(results, wrap::columns(&Term::stdout()))
}

impl JsonLine<BenchHeadline> {
    /// The fastest result of a sweep; `None` if the file is missing or empty.
    pub(super) fn fastest(path: &Path) -> Result<Option<Self>, FormatError> {
        if !path.exists() {
            return Ok(None);
        }
        let results = bench::load(path)?.into_iter().zip(bench::load(path)?);
        let found = results.map(|(whole, read)| Self { whole, read });
        Ok(found.max_by(|a, b| a.read.speedup.total_cmp(&b.read.speedup)))
    }

    pub(super) fn text(&self, out: &mut String) -> std::fmt::Result {
        let BenchHeadline { acceleration_rate, overhead, speedup, identical, .. } = self.read;
        writeln!(out)?;
        writeln!(out, "{:>20}  {acceleration_rate:>6.2}  the paper's acceleration rate", "tokens per step")?;
        let overhead = overhead.unwrap_or(f64::NAN); // shown as NaN: the result lacks the key
        writeln!(out, "{:>20}  {overhead:>6.2}  step time relative to plain decoding", "overhead")?;
        writeln!(out, "{:>20}  {speedup:>6.2}  wall clock", "speedup")?;
        let identical = identical.map_or("-", |same| if same { "yes" } else { "no" });
        writeln!(out, "{:>20}  {identical:>6}  to plain greedy decoding", "identical")
    }
}

/// Empty if the file is missing.
fn load(path: &Path) -> Result<Vec<LoadResult>, FormatError> {
    if path.exists() { load::load(path) } else { Ok(vec![]) }
}

/// Sorted names; checkpoints by step.
fn names(path: &Path) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(path)?.flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_by_cached_key(|name| match step_of(name) {
        Some(step) => ("step-".to_owned(), step),
        None => (name.clone(), 0),
    });
    Ok(names)
}

fn newest_file(path: &Path, checkpoints: &[String]) -> Option<PathBuf> {
    let mut folders = [FINAL].into_iter().chain(checkpoints.iter().rev().map(String::as_str));
    folders.find_map(|name| Some(path.join(name).join(HEADS_FILE)).filter(|heads| heads.is_file()))
}

fn newest_heads(path: &Path, checkpoints: &[String]) -> anyhow::Result<Option<HeadsFound>> {
    match newest_file(path, checkpoints).map(|heads| tensors::read(&heads)).transpose()? {
        Some(WeightsFound::Heads(heads)) => Ok(Some(heads)),
        _ => Ok(None),
    }
}

pub(super) fn accuracy_of(calibration: &Calibration) -> Vec<TopAccuracy> {
    let top_accuracy = |guesses: Vec<f64>| TopAccuracy {
        top1: guesses.first().copied().unwrap_or(f64::NAN), // shown as NaN: the head has no guess
        top5: guesses.iter().take(5).sum(),
    };
    calibration.accuracies().into_iter().map(top_accuracy).collect()
}

/// From the calibration if there is one, else from the last evaluation.
fn accuracy(calibration: Option<&PathBuf>, validation: Option<&MetricsLine>) -> anyhow::Result<Vec<TopAccuracy>> {
    if let Some(calibration) = calibration.filter(|path| path.is_file()) {
        return Ok(accuracy_of(&Calibration::load(calibration)?));
    }
    let pair = |(&top1, &top5): (&Option<f64>, &Option<f64>)| TopAccuracy {
        top1: top1.unwrap_or(f64::NAN), // shown as NaN: the head had no target
        top5: top5.unwrap_or(f64::NAN),
    };
    let pairs = validation.map(|line| line.head_top1.iter().zip(&line.head_top5));
    Ok(pairs.into_iter().flatten().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn checkpoints_are_in_the_order_of_their_steps_and_a_broken_bench_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["step-10", "step-9", "step-1000000", "step-000020", "final"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let write = |name: &str, text: &[u8]| {
            crate::files::write_atomic(&dir.path().join(name), |out| out.write_all(text)).unwrap();
        };
        write("recipe.toml", b"");
        let run = RunContents::read(dir.path()).unwrap();
        assert_eq!(run.checkpoints, ["step-9", "step-10", "step-000020", "step-1000000"]);
        assert_eq!((run.files.first().unwrap().as_str(), run.bench.is_none()), ("final", true));
        write("bench.json", b"{\"speedup\": ");
        let error = RunContents::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("bench.json is no result of medusa bench --json"), "{error}");
        write("bench.json", b"");
        write("load.json", b"{\"concurrency\": ");
        let error = RunContents::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("load.json is no result of medusa bench --json with --concurrency"), "{error}");
    }

    #[test]
    fn the_fastest_result_of_a_sweep_is_shown_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bench.json");
        let result = |speedup: f64| format!(r#"{{"acceleration_rate":2.5,"speedup":{speedup},"engine":"cpu"}}"#);
        let lines = [1.5, 2.25, 1.0].map(result).join("\n");
        crate::files::write_atomic(&path, |out| out.write_all(lines.as_bytes())).unwrap();
        let fastest = JsonLine::fastest(&path).unwrap().unwrap();
        let whole: Value = serde_json::from_str(&result(2.25)).unwrap();
        assert_eq!(serde_json::to_value(&fastest).unwrap(), whole);
        let mut text = String::new();
        fastest.text(&mut text).unwrap();
        assert!(text.contains("  2.25  wall clock") && text.contains("   NaN  step time relative"), "{text}");
    }

    #[test]
    fn accuracy_is_of_the_calibration_else_of_the_last_evaluation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let line = r#"{"split":"validation","step":1,"head_top1":[0.5],"head_top5":[0.75]}"#;
        let line: MetricsLine = serde_json::from_str(line).unwrap();
        let evaluated = [TopAccuracy { top1: 0.5, top5: 0.75 }];
        assert_eq!(accuracy(Some(&path), Some(&line)).unwrap(), evaluated);
        assert_eq!(accuracy(Some(&path), None).unwrap(), []);
        let text =
            br#"{"heads":[{"counts":[4,1,1,1,1,4],"total":16,"accuracy":[0.25,0.0625,0.0625,0.0625,0.0625,0.25]}],
            "joint":{"total":0,"paths":[]},"backbone":"b","heads_sha256":"","tokens":16}"#;
        crate::files::write_atomic(&path, |out| out.write_all(text)).unwrap();
        assert_eq!(accuracy(Some(&path), Some(&line)).unwrap(), [TopAccuracy { top1: 0.25, top5: 0.5 }]);
    }
}
