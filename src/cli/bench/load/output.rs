//! Results under load as JSON lines, CSV, a picture and a table, after each level.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use console::Term;
use serde_json::{Value, json};

use super::super::args::BenchArgs;
use super::super::rows::write_rows;
use crate::cli::{CommonFlags, load_table, print_json, print_text, wrap};
use crate::files;
use crate::formats::load::{LatencyQuantiles, LoadResult, LoadSource};

/// The results so far, and where they go.
pub(in crate::cli::bench) struct LoadOutput<'a> {
    args: &'a BenchArgs,
    common: &'a CommonFlags,
    results: Vec<LoadResult>,
}

impl<'a> LoadOutput<'a> {
    pub(in crate::cli::bench) fn new(args: &'a BenchArgs, common: &'a CommonFlags) -> Self {
        Self { args, common, results: vec![] }
    }

    /// The results of a level: JSON is printed at once, and files are written again.
    ///
    /// # Errors
    /// If stdout or a file cannot be written.
    pub(in crate::cli::bench) fn add(&mut self, found: Vec<LoadResult>) -> anyhow::Result<()> {
        if self.common.json {
            found.iter().try_for_each(print_json)?;
        }
        self.results.extend(found);
        let failed = |path: &Path| format!("cannot write {}", path.display());
        if let Some(path) = &self.args.csv {
            let rows: Vec<_> = self.results.iter().map(csv_row).collect();
            write_rows(path, &rows).with_context(|| failed(path))?;
        }
        if let Some(path) = &self.args.svg {
            let svg = crate::report::draw_load(&self.results);
            files::write_atomic(path, |out| out.write_all(svg.as_bytes())).with_context(|| failed(path))?;
        }
        Ok(())
    }

    /// Prints the table of all levels, unless JSON was printed.
    ///
    /// # Errors
    /// If stdout cannot be written.
    pub(in crate::cli::bench) fn print_table(&self) -> anyhow::Result<()> {
        match self.common.json || self.results.is_empty() {
            true => Ok(()),
            false => print_text(load_table::table(&self.results, wrap::columns(&Term::stdout()))),
        }
    }
}

/// A CSV row as pairs of column and value; the columns are the same for servers and for decoding in process.
fn csv_row(result: &LoadResult) -> Vec<(&'static str, Value)> {
    let ms = |latency: Option<LatencyQuantiles>| [json!(latency.map(|ms| ms.median)), json!(latency.map(|ms| ms.p95))];
    let [[ttft, ttft_p95], [tpot, tpot_p95], [itl, itl_p95], [e2el, e2el_p95]] =
        [result.ttft_ms, result.tpot_ms, result.itl_ms, result.e2el_ms].map(ms);
    let own = vec![
        ("concurrency", json!(result.concurrency)),
        ("requests", json!(result.requests)),
        ("errors", json!(result.errors)),
        ("rate_limited", json!(result.rate_limited)),
        ("seconds", json!(result.seconds)),
        ("prompt_tokens", json!(result.prompt_tokens)),
        ("tokens", json!(result.tokens)),
        ("tokens_per_second", json!(result.tokens_per_second)),
        ("requests_per_second", json!(result.requests_per_second)),
        ("tokens_per_step", json!(result.tokens_per_step)),
        ("median_ttft_ms", ttft),
        ("p95_ttft_ms", ttft_p95),
        ("median_tpot_ms", tpot),
        ("p95_tpot_ms", tpot_p95),
        ("median_itl_ms", itl),
        ("p95_itl_ms", itl_p95),
        ("median_e2el_ms", e2el),
        ("p95_e2el_ms", e2el_p95),
        ("identical", json!(result.identical)),
    ];
    own.into_iter().chain(source_columns(&result.source)).collect()
}

fn source_columns(source: &LoadSource) -> [(&'static str, Value); 8] {
    let columns = ["drafter", "weights", "device", "dtype", "quantization", "engine", "endpoint", "model"];
    let values = match source {
        LoadSource::Server { endpoint, model } => [
            json!(null),
            json!(null),
            json!(null),
            json!(null),
            json!(null),
            json!(null),
            json!(endpoint),
            json!(model),
        ],
        LoadSource::Process { drafter, weights, device, dtype, quantization, engine } => {
            let [drafter, device, dtype, engine] = [drafter, device, dtype, engine].map(|text| json!(text));
            [drafter, json!(weights.join(" ")), device, dtype, json!(quantization), engine, json!(null), json!(null)]
        }
    };
    let mut pairs = columns.into_iter().zip(values);
    std::array::from_fn(|_| pairs.next().expect("a value for each column"))
}
