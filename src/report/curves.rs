//! The curves of each plot: for one run, all heads in one plot; for several runs, one plot per head with one line per
//! run.

use super::axis::Range;
use super::metrics::{curve, memory_bytes, updated};
use super::plot::{Plot, Series, SeriesKind};
use super::readable::byte_unit;
use super::run::Run;
use super::thinned::thinned;
use crate::formats::metrics::MetricsLine;

const STEP: &str = "optimizer step";
/// Maximum number of points of a line: more than the pixels of a plot's width on most screens.
const LINE_POINTS: usize = 600;
/// Maximum number of points of a page: about 14 bytes each, so less than a megabyte.
const PAGE_POINTS: usize = 60_000;

/// Plots under one heading.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlotGroup {
    pub(super) title: &'static str,
    pub(super) plots: Vec<Plot>,
}

/// The value of a curve in a line of metrics.jsonl.
type Pick<'p> = &'p dyn Fn(&MetricsLine) -> Option<f64>;

/// A per-head column of metrics.jsonl.
type Column = fn(&MetricsLine) -> &Vec<Option<f64>>;

/// A run and its name on the page.
pub(super) type Named<'r> = (&'r Run, String);

/// All curves of the runs, without empty groups and plots.
pub(super) fn groups(runs: &[Named<'_>]) -> Vec<PlotGroup> {
    let several = runs.len() > 1;
    let accuracy = if several { accuracies_of_several(runs) } else { accuracies_of_one(runs) };
    let mut groups = vec![
        PlotGroup { title: "Loss", plots: losses(runs, several) },
        PlotGroup { title: "Tokens per step", plots: vec![tokens_per_step(runs)] },
        PlotGroup { title: "Accuracy of the heads", plots: accuracy },
        PlotGroup { title: "Optimizer", plots: optimizer(runs, several) },
        PlotGroup { title: "Speed and memory", plots: machine(runs) },
    ];
    for group in &mut groups {
        group.plots.retain(|plot| !plot.is_empty());
    }
    groups.retain(|group| !group.plots.is_empty());
    thin(&mut groups);
    groups
}

fn thin(groups: &mut [PlotGroup]) {
    let lines: usize = groups.iter().flat_map(|group| &group.plots).map(|plot| plot.series.len()).sum();
    let most = (PAGE_POINTS / lines.max(1)).min(LINE_POINTS);
    for series in groups.iter_mut().flat_map(|group| &mut group.plots).flat_map(|plot| &mut plot.series) {
        series.points = thinned(&series.points, most);
    }
}

fn plot(title: impl Into<String>, unit: &'static str, range: Range, series: Vec<Series>) -> Plot {
    Plot { title: title.into(), x: STEP.into(), x_range: Range::Tight, unit, range, series }
}

/// Training and validation curves of one quantity, under one name.
fn both(run: &Run, name: &str, style: usize, pick: Pick<'_>) -> [Series; 2] {
    let series = |kind, lines: &[MetricsLine]| Series { name: name.into(), style, kind, points: curve(lines, pick) };
    [series(SeriesKind::Train, &run.metrics.train), series(SeriesKind::Marked, &run.metrics.validation)]
}

/// A plot of one quantity: one run in ink, several in one colour each.
fn overlaid(
    title: impl Into<String>,
    (unit, range): (&'static str, Range),
    runs: &[Named<'_>],
    pick: Pick<'_>,
) -> Plot {
    let series = runs.iter().enumerate().flat_map(|(at, (run, name))| both(run, name, style(runs, at), pick));
    plot(title, unit, range, series.collect())
}

fn style(runs: &[Named<'_>], at: usize) -> usize {
    if runs.len() > 1 { at + 1 } else { 0 }
}

fn heads(runs: &[Named<'_>]) -> usize {
    runs.iter().map(|(run, _)| run.metrics.heads()).max().unwrap_or(0)
}

fn losses(runs: &[Named<'_>], several: bool) -> Vec<Plot> {
    let is_joint = runs.iter().any(|(run, _)| run.metrics.train.iter().any(|line| line.lm_loss.is_some()));
    let total = if is_joint { "Total loss (LM loss + λ0 × heads loss)" } else { "Total loss" };
    let mut plots = vec![
        overlaid("LM loss", ("", Range::Free), runs, &|line| line.lm_loss),
        overlaid("Heads loss (Σ λk·Lk)", ("", Range::Free), runs, &|line| line.heads_loss.filter(|_| is_joint)),
        overlaid(total, ("", Range::Free), runs, &|line| Some(line.loss)),
    ];
    if several {
        plots.extend((0..heads(runs)).map(|head| {
            let title = format!("Loss of head {}", head + 1);
            overlaid(title, ("", Range::Free), runs, &|line| line.head_losses.get(head).copied()?)
        }));
    } else {
        plots.push(heads_plot("Loss of each head", ("", Range::Free), runs, |line| &line.head_losses));
    }
    plots
}

fn tokens_per_step(runs: &[Named<'_>]) -> Plot {
    overlaid("Tokens per step on the validation rows", ("", Range::Free), runs, &|line| line.tokens_per_step)
}

/// One run's heads in one plot, one colour each.
fn heads_plot(title: &str, (unit, range): (&'static str, Range), runs: &[Named<'_>], column: Column) -> Plot {
    let factor = if unit == "%" { 100.0 } else { 1.0 };
    let head_series = |(run, head): (&Run, usize)| {
        let pick = move |line: &MetricsLine| column(line).get(head).copied()?.map(|value| factor * value);
        both(run, &format!("head {}", head + 1), head + 1, &pick)
    };
    let all = runs.iter().flat_map(|(run, _)| (0..run.metrics.heads()).map(move |head| (*run, head)));
    plot(title, unit, range, all.flat_map(head_series).collect())
}

fn accuracies_of_one(runs: &[Named<'_>]) -> Vec<Plot> {
    vec![
        heads_plot("Top-1 accuracy", ("%", Range::FromZero), runs, |line| &line.head_top1),
        heads_plot("Top-5 accuracy", ("%", Range::FromZero), runs, |line| &line.head_top5),
    ]
}

fn accuracies_of_several(runs: &[Named<'_>]) -> Vec<Plot> {
    let plot = |name: &str, head: usize, column: Column| {
        let percent = |line: &MetricsLine| column(line).get(head).copied()?.map(|share| 100.0 * share);
        overlaid(format!("Head {}, {name}", head + 1), ("%", Range::FromZero), runs, &percent)
    };
    let top1 = (0..heads(runs)).map(|head| plot("top-1", head, |line| &line.head_top1));
    let top5 = (0..heads(runs)).map(|head| plot("top-5", head, |line| &line.head_top5));
    top1.chain(top5).collect()
}

/// A training curve of one run.
fn steady((run, _): &Named<'_>, (name, style): (&str, usize), pick: Pick<'_>) -> Series {
    Series { name: name.into(), style, kind: SeriesKind::Smooth, points: curve(&run.metrics.train, pick) }
}

/// A plot of one quantity's training curves: one run in ink, several in one colour each.
fn steadies(title: &str, (unit, range): (&'static str, Range), runs: &[Named<'_>], pick: Pick<'_>) -> Plot {
    let series = runs.iter().enumerate().map(|(at, run)| steady(run, (&run.1, style(runs, at)), pick));
    plot(title, unit, range, series.collect())
}

fn optimizer(runs: &[Named<'_>], several: bool) -> Vec<Plot> {
    let mut plots = if several {
        vec![
            steadies("Learning rate of the backbone", ("", Range::FromZero), runs, &backbone_rate),
            steadies("Learning rate of the heads", ("", Range::FromZero), runs, &heads_rate),
        ]
    } else {
        vec![learning_rates(runs)]
    };
    let lambda0 = |line: &MetricsLine| updated(line, |update| update.lambda0).filter(|_| line.lm_loss.is_some());
    let grad_norm = |line: &MetricsLine| updated(line, |update| update.grad_norm);
    plots.push(steadies("λ0 (weight of the heads' loss)", ("", Range::FromZero), runs, &lambda0));
    plots.push(steadies("Gradient norm before clipping", ("", Range::Free), runs, &grad_norm));
    plots
}

/// `None` in Medusa-1.
fn backbone_rate(line: &MetricsLine) -> Option<f64> {
    updated(line, |update| update.lr).filter(|_| line.lm_loss.is_some())
}

fn heads_rate(line: &MetricsLine) -> Option<f64> {
    updated(line, |update| update.heads_lr)
}

/// Medusa-1 has only the heads' rate.
fn learning_rates(runs: &[Named<'_>]) -> Plot {
    let rates = |run| {
        let backbone = steady(run, ("backbone", 1), &backbone_rate);
        let style = if backbone.points.is_empty() { 0 } else { 2 };
        [backbone, steady(run, ("heads", style), &heads_rate)]
    };
    let series = runs.iter().flat_map(rates).collect();
    plot("Learning rate", "", Range::FromZero, series)
}

fn machine(runs: &[Named<'_>]) -> Vec<Plot> {
    let memory = runs.iter().flat_map(|(run, _)| curve(&run.metrics.train, memory_bytes));
    let (divisor, unit) = byte_unit(memory.map(|point| point.1).fold(0.0, f64::max));
    let throughput = |line: &MetricsLine| updated(line, |update| update.tokens_per_second);
    let memory = |line: &MetricsLine| memory_bytes(line).map(|bytes| bytes / divisor);
    vec![
        steadies("Training throughput", ("tokens/s", Range::FromZero), runs, &throughput),
        steadies("Memory", (unit, Range::FromZero), runs, &memory),
    ]
}
