//! A sweep of `medusa bench` as plots: speed and tokens per step against the swept value.

use super::axis::Range;
use super::plot::{Plot, Series, SeriesKind, marked_lines};
use crate::formats::bench::{BenchResult, DecodingComparison};

/// Both plots; none without a sweep.
pub(super) fn plots(results: &[BenchResult]) -> Vec<Plot> {
    let swept: Vec<&BenchResult> = results.iter().filter(|result| result.sweep.is_some()).collect();
    let Some(name) = swept.first().and_then(|first| Some(first.sweep.as_ref()?.name.as_str())) else { return vec![] };
    let plot = |title: &str, unit, series| Plot {
        title: title.into(),
        x: axis(name),
        x_range: Range::Tight,
        unit,
        range: Range::FromZero,
        series,
    };
    vec![
        plot("Speed", "tokens/s", speeds(&swept)),
        plot("Tokens per step", "", drafter_series(&swept, |group| group.acceleration_rate)),
    ]
}

/// Whether lines can be drawn: a sweep with more than one value.
pub(super) fn has_lines(results: &[BenchResult]) -> bool {
    let mut values = results.iter().filter_map(|result| result.sweep.as_ref());
    values.next().is_some_and(|first| values.any(|other| other != first))
}

/// The swept parameter as the name of an axis.
fn axis(name: &str) -> String {
    match name {
        "nodes" => "nodes of the tree",
        "context" => "tokens of the prompt",
        other => other,
    }
    .replace('-', " ")
}

fn value(result: &BenchResult) -> Option<f64> {
    result.sweep.as_ref()?.value.as_f64()
}

fn speeds(swept: &[&BenchResult]) -> Vec<Series> {
    let drafted = drafter_series(swept, |group| group.drafted.tokens_per_second);
    drafted.into_iter().chain([plain(swept)]).collect()
}

/// Plain decoding beside the first drafter of each value.
fn plain(swept: &[&BenchResult]) -> Series {
    let mut points: Vec<(f64, f64)> =
        swept.iter().filter_map(|result| Some((value(result)?, result.all.plain.tokens_per_second))).collect();
    points.dedup_by_key(|point| point.0);
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Series { name: "plain decoding".into(), style: 0, kind: SeriesKind::Marked, points }
}

/// A line for each drafter.
fn drafter_series(swept: &[&BenchResult], figure: fn(&DecodingComparison) -> f64) -> Vec<Series> {
    let drafted = swept.iter().filter(|result| !result.is_plain());
    let point = |result: &BenchResult| Some((value(result)?, figure(&result.all)));
    marked_lines(drafted.map(|result| (name(result, swept), point(result))))
}

/// The drafter, with its weights if another result has others.
fn name(result: &BenchResult, all: &[&BenchResult]) -> String {
    let is_shared = all.iter().any(|other| other.drafter == result.drafter && other.weights != result.weights);
    match (is_shared, result.drafter.as_str()) {
        (true, drafter) => format!("{drafter}:{}", result.weights.join("+")),
        (false, "") => "heads".into(),
        (false, drafter) => drafter.into(),
    }
}
