//! Results of `bench` as tables for people.

use super::notes::notes;
use crate::cli::columns::aligned;
use crate::formats::bench::{BenchResult, DecodingComparison};
use crate::plural::counted;

/// The column of [`DecodingComparison::log_probability_distance`].
const DISTANCE: &str = "log p distance";

/// One drafter: a row per category, or per value of the sweep. Several: a row per drafter, and their categories in a second table. `width` is that
/// of the terminal.
pub(super) fn table(results: &[BenchResult], width: Option<usize>) -> String {
    let Some(first) = results.first() else { return String::new() };
    if results.iter().any(|result| (&result.drafter, &result.weights) != (&first.drafter, &first.weights)) {
        return drafter_table(results, first, width);
    }
    let swept = first.sweep.as_ref().map(|swept| swept.name.as_str());
    let mut rows = vec![header(swept.unwrap_or("category"), results)];
    for result in results {
        match &result.sweep {
            Some(swept) => rows.push(row(&swept.value.to_string(), &result.all)),
            None => rows.extend(result.groups().map(|(name, group)| row(name, group))),
        }
    }
    let mut lines = aligned(&rows, width);
    let nodes = format!(", a tree of {}", counted(first.tree_nodes, "node"));
    lines.push(conditions(first, if swept == Some("nodes") { "" } else { &nodes }));
    lines.extend(notes(results, &names(results)));
    lines.join("\n")
}

fn drafter_table(results: &[BenchResult], first: &BenchResult, width: Option<usize>) -> String {
    let names = names(results);
    let engines_differ = results.iter().any(|result| result.engine != first.engine);
    let columns = |result: &BenchResult, name: &str| comparison_row(result, name, engines_differ);
    let mut rows = vec![columns_of_drafters(results, first, engines_differ)];
    rows.extend(results.iter().zip(&names).map(|(result, name)| columns(result, name)));
    let mut lines = aligned(&rows, width);
    if first.sweep.is_none() && !first.categories.is_empty() {
        lines.push(String::new());
        lines.extend(aligned(&by_category(results, &names, first), width));
    }
    lines.push(conditions(first, ""));
    lines.extend(notes(results, &names));
    lines.join("\n")
}

/// Each result's drafter, with the path of its weights where the name alone is not enough.
fn names(results: &[BenchResult]) -> Vec<String> {
    let is_shared = |result: &BenchResult| {
        results.iter().any(|other| other.drafter == result.drafter && other.weights != result.weights)
    };
    let name = |result: &BenchResult| match is_shared(result) {
        true => format!("{}:{}", result.drafter, result.weights.join("+")),
        false => result.drafter.clone(),
    };
    results.iter().map(name).collect()
}

fn columns_of_drafters(results: &[BenchResult], first: &BenchResult, with_engine: bool) -> Vec<String> {
    let swept = first.sweep.as_ref().map(|swept| swept.name.as_str());
    let last = if has_distance(results) { DISTANCE } else { "identical" };
    let figures = ["tokens", "tokens/s", "tokens/step", "overhead", "speedup", "range", last];
    let facts = ["nodes", "parameters", "training"];
    let engine = with_engine.then_some("engine");
    let all = ["drafter"].into_iter().chain(swept).chain(figures).chain(facts).chain(engine);
    all.map(str::to_owned).collect()
}

fn comparison_row(result: &BenchResult, name: &str, with_engine: bool) -> Vec<String> {
    let mut figures = row(name, &result.all);
    figures.remove(2); // plain decoding's speed has a row of its own
    figures.extend([
        result.tree_nodes.to_string(),
        result.parameters.map_or_else(|| "-".into(), |count| short(count as f64)),
        result.training.map_or_else(
            || "-".into(),
            |cost| format!("{} s, {} tokens", short(cost.seconds), short(cost.tokens as f64)),
        ),
    ]);
    figures.extend(with_engine.then(|| result.engine.clone()));
    if let Some(swept) = &result.sweep {
        figures.insert(1, swept.value.to_string());
    }
    figures
}

/// Three digits and a unit.
fn short(number: f64) -> String {
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (unit, name) = units.into_iter().find(|(unit, _)| number >= *unit).unwrap_or((1.0, ""));
    let value = number / unit;
    let digits = if value >= 100.0 || number.fract() == 0.0 && unit == 1.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}{name}")
}

fn by_category(results: &[BenchResult], names: &[String], first: &BenchResult) -> Vec<Vec<String>> {
    let header = ["tokens/step, speedup"].into_iter().chain(names.iter().map(String::as_str));
    let row = |category: &String| {
        let cell = |result: &BenchResult| {
            result
                .categories
                .get(category)
                .map_or_else(String::new, |group| format!("{:.2}, {:.2}", group.acceleration_rate, group.speedup))
        };
        [category.clone()].into_iter().chain(results.iter().map(cell)).collect()
    };
    [header.map(str::to_owned).collect()].into_iter().chain(first.categories.keys().map(row)).collect()
}

fn has_distance(results: &[BenchResult]) -> bool {
    results.iter().any(|result| result.all.log_probability_distance.is_some())
}

fn header(first: &str, results: &[BenchResult]) -> Vec<String> {
    let has_identical = results.iter().any(|result| result.all.identical.is_some());
    let drafter = &results[0].drafter;
    let last = match (has_identical, has_distance(results)) {
        (true, true) => &format!("identical, or {DISTANCE}"),
        (false, true) => DISTANCE,
        _ => "identical",
    };
    let names = [first, "tokens", "tokens/s: plain", drafter, "tokens/step", "overhead", "speedup", "range", last];
    names.map(str::to_owned).to_vec()
}

fn row(name: &str, group: &DecodingComparison) -> Vec<String> {
    let [low, high] = group.speedup_range;
    let last = match (group.identical, group.log_probability_distance) {
        (Some(same), _) => if same { "yes" } else { "no" }.into(),
        (None, Some(distance)) => format!("{distance:.4}"),
        (None, None) => "-".into(),
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

fn conditions(result: &BenchResult, nodes: &str) -> String {
    let repeats = match result.repeats {
        1 => "measured once".into(),
        repeats => format!("median of {repeats} repeats; range: slowest to fastest"),
    };
    let too_long = match result.too_long {
        0 => String::new(),
        prompts => {
            format!(
                "\n{} with a turn that does not fit the context: skipped from that turn on",
                counted(prompts, "prompt")
            )
        }
    };
    let forced = result.forced_acceptance_rate.map_or_else(String::new, |rate| {
        format!("\nacceptance was forced to {rate} tokens per step: the speed is not that of this drafter")
    });
    let quantized = result.quantization.as_ref().map_or_else(String::new, |name| format!(", weights in {name}"));
    format!("{}{quantized} on {}{nodes}; {repeats}{too_long}{forced}", result.dtype, result.device)
}
