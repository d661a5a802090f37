//! Results under load as a table for people.

use super::columns::aligned;
use crate::formats::load::{LatencyQuantiles, LoadResult};
use crate::plural::counted;

const TERMS: &str = "latencies: median, p95 in ms. TTFT: time to first token; TPOT: time per output token after the first; ITL: time between \
                     steps or chunks that bring tokens; E2EL: whole request";

/// A row per level and drafter, in `width` columns.
pub(super) fn table(results: &[LoadResult], width: Option<usize>) -> String {
    let Some(first) = results.first() else { return String::new() };
    let shown = LoadColumns {
        has_names: results.iter().any(|result| result.source.name() != first.source.name()),
        has_errors: results.iter().any(|result| result.errors > 0),
        has_steps: results.iter().any(|result| result.tokens_per_step.is_some()),
        has_identical: results.iter().any(|result| result.identical.is_some()),
    };
    let rows: Vec<Vec<String>> =
        [shown.header()].into_iter().chain(results.iter().map(|result| shown.row(result))).collect();
    let mut lines = aligned(&rows, width);
    let name = if shown.has_names { String::new() } else { format!("{}, ", first.source.name()) };
    lines.push(format!("{name}{}; {TERMS}", first.source.conditions()));
    lines.extend(notes(results));
    lines.join("\n")
}

/// Which columns have anything to show.
#[derive(Debug, Clone, Copy)]
struct LoadColumns {
    has_names: bool,
    has_errors: bool,
    has_steps: bool,
    has_identical: bool,
}

impl LoadColumns {
    fn header(self) -> Vec<String> {
        let figures = ["tokens", "tokens/s"];
        let latencies = ["TTFT", "TPOT", "ITL", "E2EL"];
        let names = ["concurrency"].into_iter().chain(self.has_names.then_some("drafter"));
        let names = names.chain(["requests"]).chain(self.has_errors.then_some("errors")).chain(figures);
        let names = names.chain(self.has_steps.then_some("tokens/step")).chain(latencies);
        names.chain(self.has_identical.then_some("identical")).map(str::to_owned).collect()
    }

    fn row(self, result: &LoadResult) -> Vec<String> {
        let figures = [result.tokens.to_string(), format!("{:.1}", result.tokens_per_second)];
        let latencies = [result.ttft_ms, result.tpot_ms, result.itl_ms, result.e2el_ms].map(shown);
        let cells = [result.concurrency.to_string()].into_iter().chain(self.has_names.then(|| result.source.name()));
        let cells = cells.chain([result.requests.to_string()]);
        let cells = cells.chain(self.has_errors.then(|| result.errors.to_string())).chain(figures);
        let per_step = result.tokens_per_step.map_or_else(|| "-".into(), |rate| format!("{rate:.2}"));
        let cells = cells.chain(self.has_steps.then_some(per_step)).chain(latencies);
        let identical = match result.identical {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        cells.chain(self.has_identical.then(|| identical.into())).collect()
    }
}

/// Three digits of each.
fn shown(latency: Option<LatencyQuantiles>) -> String {
    let digits = |ms: f64| match ms {
        100.0.. => format!("{ms:.0}"),
        10.0.. => format!("{ms:.1}"),
        _ => format!("{ms:.2}"),
    };
    latency.map_or_else(|| "-".into(), |ms| format!("{}, {}", digits(ms.median), digits(ms.p95)))
}

/// What went wrong, and what waited.
fn notes(results: &[LoadResult]) -> Vec<String> {
    let errors: usize = results.iter().map(|result| result.errors).sum();
    let first = results.iter().find_map(|result| result.first_error.as_ref());
    let failed = first.map(|why| format!("{} failed; the first: {why}", counted(errors, "request")));
    let limited: usize = results.iter().map(|result| result.rate_limited).sum();
    let waited = (limited > 0).then(|| {
        format!(
            "status 429 came {}: the client waited and asked again, which its latencies include",
            counted(limited, "time")
        )
    });
    failed.into_iter().chain(waited).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::load::LoadSource;

    fn result(drafter: &str, concurrency: usize) -> LoadResult {
        let source = LoadSource::Process {
            drafter: drafter.into(),
            weights: vec![],
            device: "cpu".into(),
            dtype: "float32".into(),
            quantization: None,
            engine: "tch".into(),
        };
        LoadResult {
            concurrency,
            source,
            requests: 8,
            errors: 0,
            first_error: None,
            rate_limited: 0,
            seconds: 2.0,
            prompt_tokens: 9,
            tokens: 100,
            tokens_per_second: 50.0,
            requests_per_second: 4.0,
            tokens_per_step: Some(1.5),
            ttft_ms: Some(LatencyQuantiles { median: 1.234, p95: 120.6 }),
            tpot_ms: None,
            itl_ms: None,
            e2el_ms: Some(LatencyQuantiles { median: 250.0, p95: 300.0 }),
            identical: Some(true),
        }
    }

    #[test]
    fn columns_without_values_are_left_out() {
        let shown = table(&[result("plain", 1), result("medusa", 1)], None);
        let lines: Vec<Vec<&str>> = shown
            .lines()
            .map(|line| line.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        assert_eq!(
            lines[0],
            [
                "concurrency",
                "drafter",
                "requests",
                "tokens",
                "tokens/s",
                "tokens/step",
                "TTFT",
                "TPOT",
                "ITL",
                "E2EL",
                "identical"
            ]
        );
        assert_eq!(lines[2], ["1", "medusa", "8", "100", "50.0", "1.50", "1.23, 121", "-", "-", "250, 300", "yes"]);
        assert!(shown.contains("\nfloat32 on cpu, engine tch; latencies: median, p95"), "{shown}");
        let source = LoadSource::Server { endpoint: "http://h/v1".into(), model: "m".into() };
        let server = LoadResult { source, tokens_per_step: None, identical: None, ..result("", 4) };
        let failed = LoadResult { errors: 2, first_error: Some("no".into()), rate_limited: 1, ..server.clone() };
        let shown = table(&[server, failed], None);
        assert!(shown.starts_with("concurrency   requests   errors   tokens   tokens/s "), "{shown}");
        assert!(
            shown.contains("\nm, http://h/v1; ") && shown.contains("\n2 requests failed; the first: no\n"),
            "{shown}"
        );
        assert!(shown.lines().last().is_some_and(|line| line.starts_with("status 429 came 1 time: ")), "{shown}");
    }
}
