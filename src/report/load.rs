//! A load of `medusa bench` as plots: throughput and latencies against the number of requests in flight.

use super::axis::Range;
use super::plot::{OTHER_DASHES, Plot, Series, marked_lines};
use crate::formats::load::{LatencyQuantiles, LoadResult};

/// Throughput, time to first token, time per output token, and latency of a request; those that were measured.
pub(super) fn plots(results: &[LoadResult]) -> Vec<Plot> {
    let throughput = lines(results, "", |result| Some(result.tokens_per_second));
    let plots = [
        plot("Throughput", "tokens/s", throughput),
        plot("Time to first token, median and p95", "ms", latencies(results, |result| result.ttft_ms)),
        plot("Time per output token, median and p95", "ms", latencies(results, |result| result.tpot_ms)),
        plot("Latency of a request, median and p95", "ms", latencies(results, |result| result.e2el_ms)),
    ];
    plots.into_iter().filter(|plot| !plot.is_empty()).collect()
}

/// Whether lines can be drawn: results of more than one level.
pub(super) fn has_lines(results: &[LoadResult]) -> bool {
    results.iter().any(|result| result.concurrency != results[0].concurrency)
}

fn plot(title: &str, unit: &'static str, series: Vec<Series>) -> Plot {
    let x = "requests in flight".into();
    Plot { title: title.into(), x, x_range: Range::Chosen, unit, range: Range::FromZero, series }
}

/// A line of medians and one of 95th percentiles, of the same colour, for each drafter or model.
fn latencies(results: &[LoadResult], figure: fn(&LoadResult) -> Option<LatencyQuantiles>) -> Vec<Series> {
    let median = lines(results, "", |result| figure(result).map(|latency| latency.median));
    let p95 = lines(results, ", p95", |result| figure(result).map(|latency| latency.p95));
    let dashed = |series: Series| Series { style: series.style + OTHER_DASHES, ..series };
    median.into_iter().chain(p95.into_iter().map(dashed)).collect()
}

/// A line for each drafter or model, in the order of the results.
fn lines(results: &[LoadResult], suffix: &str, figure: impl Fn(&LoadResult) -> Option<f64>) -> Vec<Series> {
    marked_lines(results.iter().map(|result| {
        let point = figure(result).map(|figure| (result.concurrency as f64, figure));
        (format!("{}{suffix}", result.source.name()), point)
    }))
}
