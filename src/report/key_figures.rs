//! The key figures of a run.

use serde::Serialize;

use super::metrics::{curve, memory_bytes, updated};
use super::readable::{bytes, duration, grouped, number, percent};
use super::run::Run;
use crate::formats::bench::BenchResult;
use crate::formats::metrics::MetricsLine;

/// A figure and its label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct KeyFigure {
    pub(super) name: &'static str,
    /// `None` if the run lacks it.
    pub(super) value: Option<String>,
    pub(super) of: &'static str,
}

/// The same figures in the same order for every run.
pub(super) fn key_figures(run: &Run) -> Vec<KeyFigure> {
    let figure = |name, value, of| KeyFigure { name, value, of };
    let bench = run.headline();
    let (train, validation) = (&run.metrics.train, &run.metrics.validation);
    let loss = if run.finished { "final loss" } else { "latest loss" };
    let speed_name = match bench.map_or("heads", BenchResult::guesses) {
        "heads" => "tokens/s with heads",
        "prompt lookup" => "tokens/s with prompt lookup",
        _ => "tokens/s with a drafter",
    };
    let (accuracy, accuracy_of) = first_head(run);
    vec![
        figure("tokens per step", bench.map(|bench| number(bench.all.acceleration_rate)), "decoding"),
        figure("speedup", bench.map(|bench| format!("{} ×", number(bench.all.speedup))), "over plain decoding"),
        figure("decoding", bench.map(|bench| number(bench.all.drafted.tokens_per_second)), speed_name),
        figure("tokens per step", last(validation, |line| line.tokens_per_step).map(number), "validation, best tree"),
        figure("head 1, top-1", accuracy.map(percent), accuracy_of),
        figure(loss, last(validation, |line| Some(line.loss)).map(number), "validation"),
        figure(loss, last(train, steady_loss).map(number), "training"),
        figure("LM loss", last(validation, |line| line.lm_loss).map(number), "validation"),
        figure("heads loss", last(validation, heads_loss_beside_lm).map(number), "validation"),
        figure("heads loss", last(train, heads_loss_beside_lm).map(number), "training"),
        figure("perplexity", last(validation, |line| line.perplexity).map(number), "backbone, validation"),
        figure(
            "training",
            median(train, |line| updated(line, |update| update.tokens_per_second)).map(grouped),
            "tokens/s, median",
        ),
        figure("peak memory", highest(train, memory_bytes).map(bytes), "training"),
        figure("tokens", last(train, |line| line.tokens.map(|n| n as f64)).map(grouped), "trained on"),
        figure("training time", run.metrics.cost().map(|cost| duration(cost.seconds)), "without evaluations"),
    ]
}

/// Top-1 accuracy of head 1: calibrated, else from the last evaluation.
fn first_head(run: &Run) -> (Option<f64>, &'static str) {
    let calibrated = run.calibration.as_ref().and_then(|file| file.heads.first()?.accuracy.first().copied());
    match calibrated {
        Some(accuracy) => (Some(accuracy), "calibrated"),
        None => (last(&run.metrics.validation, |line| line.head_top1.first().copied()?), "validation"),
    }
}

/// The total loss of a training step; `None` if the line has its two parts: the total depends on λ0 of the step.
fn steady_loss(line: &MetricsLine) -> Option<f64> {
    heads_loss_beside_lm(line).is_none().then_some(line.loss)
}

/// In Medusa-1 the heads' loss is the total.
fn heads_loss_beside_lm(line: &MetricsLine) -> Option<f64> {
    line.heads_loss.filter(|_| line.lm_loss.is_some())
}

fn values(lines: &[MetricsLine], pick: impl Fn(&MetricsLine) -> Option<f64>) -> Vec<f64> {
    curve(lines, pick).into_iter().map(|(_, value)| value).collect()
}

fn last(lines: &[MetricsLine], pick: impl Fn(&MetricsLine) -> Option<f64>) -> Option<f64> {
    values(lines, pick).pop()
}

fn highest(lines: &[MetricsLine], pick: impl Fn(&MetricsLine) -> Option<f64>) -> Option<f64> {
    values(lines, pick).into_iter().max_by(f64::total_cmp)
}

/// The upper median, which is always a measured value.
fn median(lines: &[MetricsLine], pick: impl Fn(&MetricsLine) -> Option<f64>) -> Option<f64> {
    let mut values = values(lines, pick);
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
