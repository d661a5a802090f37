//! Results of `bench`: a JSON object, a table, CSV.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::measure::{BenchPass, BenchRun, Measured, Texts};
use crate::data::report::counted;
use crate::decode::stats::{Comparison, Tally};
use crate::dtype::Dtype;
use crate::files;
use crate::formats::bench::{BenchResult, DecodingComparison, DecodingFigures};
use crate::numbers::Positive;
use crate::torch::device_name;

/// The result of one setting.
pub(super) fn result(bench: &BenchRun, passes: &[BenchPass]) -> BenchResult {
    let first = &passes[0];
    let of =
        |pick: &dyn Fn(&BenchPass) -> Measured| comparison(&passes.iter().map(pick).collect::<Vec<_>>(), bench.texts());
    let category = |name: &String| (name.clone(), of(&|pass| pass.categories.get(name).copied().unwrap_or_default()));
    BenchResult {
        all: of(&|pass| pass.all),
        categories: first.categories.keys().map(category).collect(),
        device: device_name(bench.decoder.backbone.device()),
        dtype: Dtype::of(bench.decoder.backbone.kind()).to_string(),
        quantization: bench.decoder.backbone.quantization().map(|quantization| quantization.to_string()),
        engine: bench.decoding.borrow().engine_name().into(),
        drafter: bench.drafter.clone(),
        tree_nodes: bench.tree_nodes,
        repeats: passes.len(),
        too_long: first.too_long,
        forced_acceptance_rate: bench.setting.forced.map(Positive::get),
        sweep: bench.setting.swept.clone(),
    }
}

/// Compares the repeats over the same prompts.
fn comparison(repeats: &[Measured], texts: Texts) -> DecodingComparison {
    let of = |pick: fn(&Measured) -> Tally| repeats.iter().map(pick).collect::<Vec<_>>();
    let (plain, drafted) = (of(|measured| measured.times.plain), of(|measured| measured.times.drafted));
    let median = Comparison { plain: median(&plain), drafted: self::median(&drafted) };
    // Only the first repeat is scored.
    let log_p = repeats.first().filter(|_| texts == Texts::Sampled).map(|first| first.log_p);
    DecodingComparison {
        plain: figures(&plain, median.plain, log_p.map(|log_p| log_p.plain)),
        drafted: figures(&drafted, median.drafted, log_p.map(|log_p| log_p.drafted)),
        acceleration_rate: median.acceleration_rate(),
        overhead: median.overhead(),
        speedup: median.speedup(),
        speedup_range: range(repeats.iter().map(|measured| measured.times.speedup())),
        identical: (texts == Texts::Greedy).then(|| !repeats.iter().any(|measured| measured.differ)),
    }
}

fn figures(repeats: &[Tally], median: Tally, log_p: Option<f64>) -> DecodingFigures {
    DecodingFigures {
        tokens: median.tokens,
        seconds: median.decoding.as_secs_f64(),
        tokens_per_second: median.tokens_per_second(),
        tokens_per_second_range: range(repeats.iter().map(Tally::tokens_per_second)),
        step_ms: median.step_ms(),
        steps: median.steps,
        prefill_seconds: median.prefill.as_secs_f64(),
        mean_log_probability: log_p.filter(|_| median.tokens > 0).map(|log_p| log_p / median.tokens as f64),
    }
}

/// The repeat with the median speed; of an even number, the slower of the middle two.
fn median(repeats: &[Tally]) -> Tally {
    let mut sorted = repeats.to_vec();
    sorted.sort_by(|a, b| a.tokens_per_second().total_cmp(&b.tokens_per_second()));
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

fn range(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let [low, high] = values.fold([f64::INFINITY, 0.0], |[low, high], value| [value.min(low), value.max(high)]);
    [low.min(high), high]
}

/// The table: one row per category, or per value of the sweep.
pub(super) fn table(results: &[BenchResult]) -> String {
    let Some(first) = results.first() else { return String::new() };
    let swept = first.sweep.as_ref().map(|swept| swept.name.as_str());
    let mut rows = vec![header(swept.unwrap_or("category"), results)];
    for result in results {
        match &result.sweep {
            Some(swept) => rows.push(row(&swept.value.to_string(), &result.all)),
            None => rows.extend(result.groups().map(|(name, group)| row(name, group))),
        }
    }
    let mut lines = aligned(&rows);
    lines.push(conditions(first, swept == Some("nodes")));
    lines.join("\n")
}

fn header(first: &str, results: &[BenchResult]) -> Vec<String> {
    let has_identical = results.iter().any(|result| result.all.identical.is_some());
    let has_log_p = results.iter().any(|result| result.all.plain.mean_log_probability.is_some());
    let drafter = &results[0].drafter;
    let last = match (has_identical, has_log_p) {
        (true, true) => &format!("identical, or log p: plain, {drafter}"),
        (false, true) => &format!("log p: plain, {drafter}"),
        _ => "identical",
    };
    let names = [first, "tokens", "tokens/s: plain", drafter, "acceleration", "overhead", "speedup", "range", last];
    names.map(str::to_owned).to_vec()
}

fn row(name: &str, group: &DecodingComparison) -> Vec<String> {
    let [low, high] = group.speedup_range;
    let last = match (group.identical, group.plain.mean_log_probability, group.drafted.mean_log_probability) {
        (Some(same), ..) => if same { "yes" } else { "no" }.into(),
        (None, Some(plain), Some(drafted)) => format!("{plain:.3}, {drafted:.3}"),
        _ => "-".into(),
    };
    vec![
        name.into(),
        group.drafted.tokens.to_string(),
        format!("{:.1}", group.plain.tokens_per_second),
        format!("{:.1}", group.drafted.tokens_per_second),
        format!("{:.2}", group.acceleration_rate),
        format!("{:.2}", group.overhead),
        format!("{:.2}", group.speedup),
        format!("{low:.2}-{high:.2}"),
        last,
    ]
}

/// Aligns the columns, the first to the left, the others to the right.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let rest = row.iter().zip(&widths).skip(1).map(|(cell, width)| format!("   {cell:>width$}"));
        format!("{:<width$}{}", row[0], rest.collect::<String>(), width = widths[0])
    };
    rows.iter().map(line).collect()
}

fn conditions(result: &BenchResult, nodes_are_swept: bool) -> String {
    let nodes =
        if nodes_are_swept { String::new() } else { format!(", a tree of {}", counted(result.tree_nodes, "node")) };
    let repeats = match result.repeats {
        1 => "measured once".into(),
        repeats => format!("median of {repeats} repeats; range: slowest to fastest"),
    };
    let too_long = match result.too_long {
        0 => String::new(),
        prompts => {
            format!("\n{} with a turn longer than the context: skipped from that turn on", counted(prompts, "prompt"))
        }
    };
    let forced = result.forced_acceptance_rate.map_or_else(String::new, |rate| {
        format!("\nacceptance was forced to {rate} tokens per step: the speed is not that of these heads")
    });
    let quantized = result.quantization.as_ref().map_or_else(String::new, |name| format!(", weights in {name}"));
    format!("{}{quantized} on {}{nodes}; {repeats}{too_long}{forced}", result.dtype, result.device)
}

/// A CSV row as pairs of column and value. The `medusa_…` columns hold the figures of any drafter.
fn csv_row(result: &BenchResult, category: &str, group: &DecodingComparison) -> Vec<(&'static str, Value)> {
    let (plain, drafted, [speedup_min, speedup_max]) = (&group.plain, &group.drafted, group.speedup_range);
    vec![
        ("sweep", json!(result.sweep.as_ref().map(|swept| &swept.name))),
        ("value", json!(result.sweep.as_ref().map(|swept| &swept.value))),
        ("category", json!(category)),
        ("tree_nodes", json!(result.tree_nodes)),
        ("plain_tokens", json!(plain.tokens)),
        ("plain_seconds", json!(plain.seconds)),
        ("plain_tokens_per_second", json!(plain.tokens_per_second)),
        ("plain_step_ms", json!(plain.step_ms)),
        ("plain_mean_log_probability", json!(plain.mean_log_probability)),
        ("medusa_tokens", json!(drafted.tokens)),
        ("medusa_steps", json!(drafted.steps)),
        ("medusa_seconds", json!(drafted.seconds)),
        ("medusa_tokens_per_second", json!(drafted.tokens_per_second)),
        ("medusa_step_ms", json!(drafted.step_ms)),
        ("medusa_mean_log_probability", json!(drafted.mean_log_probability)),
        ("acceleration_rate", json!(group.acceleration_rate)),
        ("overhead", json!(group.overhead)),
        ("speedup", json!(group.speedup)),
        ("speedup_min", json!(speedup_min)),
        ("speedup_max", json!(speedup_max)),
        ("identical", json!(group.identical)),
        ("forced_acceptance_rate", json!(result.forced_acceptance_rate)),
        ("repeats", json!(result.repeats)),
        ("dtype", json!(result.dtype)),
        ("device", json!(result.device)),
        ("drafter", json!(result.drafter)),
        ("quantization", json!(result.quantization)),
    ]
}

/// Empty for absent values.
fn csv_cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Writes a header and one row per group of each result, atomically.
///
/// # Errors
/// An I/O error.
pub(super) fn write_csv(path: &Path, results: &[BenchResult]) -> io::Result<()> {
    let groups =
        results.iter().flat_map(|result| result.groups().map(move |(name, group)| csv_row(result, name, group)));
    let rows: Vec<_> = groups.collect();
    files::write_atomic(path, |out| {
        let mut csv = csv::Writer::from_writer(out);
        csv.write_record(rows[0].iter().map(|(column, _)| column))?;
        rows.iter().try_for_each(|row| csv.write_record(row.iter().map(|(_, value)| csv_cell(value))))?;
        csv.flush()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn measured(plain: u64, drafted: u64) -> Measured {
        let tally =
            |steps, seconds| Tally { tokens: 100, steps, decoding: Duration::from_secs(seconds), ..Tally::default() };
        let times = Comparison { plain: tally(100, plain), drafted: tally(50, drafted) };
        Measured { times, ..Measured::default() }
    }

    #[test]
    fn a_slow_repeat_moves_the_range_and_not_the_median() {
        let group = comparison(&[measured(10, 5), measured(10, 20), measured(10, 4)], Texts::Greedy);
        assert_eq!((group.drafted.seconds, group.speedup, group.speedup_range), (5.0, 2.0, [0.5, 2.5]));
        assert_eq!(group.drafted.tokens_per_second_range, [5.0, 25.0]);
        assert_eq!((group.plain.tokens, group.drafted.steps, group.acceleration_rate), (100, 50, 2.0));
        assert_eq!((group.identical, group.plain.mean_log_probability), (Some(true), None));
        let even = comparison(&[measured(10, 5), measured(10, 20)], Texts::Greedy);
        assert_eq!(even.speedup, 0.5, "of two the slower");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["a".to_owned(), "tokens".into()], vec!["all of it".into(), "7".into()]];
        assert_eq!(aligned(&rows), ["a           tokens", "all of it        7"]);
    }
}
