//! Results of `bench`, as a JSON object and as CSV.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::drafters::Rows;
use super::measure::{BenchDrafter, BenchPass, BenchRun, LogProbability, Measured, Texts};
use super::rows::write_rows;
use crate::decode::stats::{Comparison, Tally};
use crate::dtype::Dtype;
use crate::formats::bench::{BenchResult, DecodingComparison, DecodingFigures, PLAIN};
use crate::numbers::Positive;
use crate::session::drafter::plan::DrafterPlan;
use crate::torch::device_name;

/// The results of one setting, one per row.
pub(super) fn results(bench: &BenchRun, rows: &Rows, repeats: &[Vec<BenchPass>]) -> Vec<BenchResult> {
    let mut contestants = bench.contestants.iter().enumerate();
    let row = |row: &Option<DrafterPlan>| match row {
        Some(_) => {
            let (at, contestant) = contestants.next().expect("a contestant per drafter");
            result(bench, contestant, &repeats.iter().map(|passes| &passes[at]).collect::<Vec<_>>())
        }
        None => plain(bench, &repeats.iter().map(|passes| &passes[0]).collect::<Vec<_>>()),
    };
    rows.iter().map(row).collect()
}

fn result(bench: &BenchRun, contestant: &BenchDrafter, passes: &[&BenchPass]) -> BenchResult {
    let first = passes[0];
    let compared = |pick: &dyn Fn(&BenchPass) -> Measured| {
        comparison(&passes.iter().map(|pass| pick(pass)).collect::<Vec<_>>(), bench.texts())
    };
    let category = |name: &String| (name.clone(), compared(&|p| p.categories.get(name).copied().unwrap_or_default()));
    let facts = contestant.facts.clone();
    BenchResult {
        all: compared(&|pass| pass.all),
        categories: first.categories.keys().map(category).collect(),
        device: device_name(bench.decoder.backbone.device()),
        dtype: Dtype::of(bench.decoder.backbone.kind()).to_string(),
        quantization: bench.decoder.backbone.quantization().map(|quantization| quantization.to_string()),
        engine: contestant.decoding.borrow().engine_name().into(),
        drafter: facts.name,
        weights: facts.weights,
        parameters: Some(facts.parameters),
        training: facts.training,
        tree_nodes: contestant.tree_nodes,
        repeats: passes.len(),
        too_long: first.too_long,
        prompts: facts.prompts,
        forced_acceptance_rate: bench.setting.forced.map(Positive::get),
        sweep: bench.setting.swept.clone(),
        first_difference: passes.iter().find_map(|pass| pass.first_difference.clone()),
    }
}

/// The row of plain decoding, which is compared with itself.
fn plain(bench: &BenchRun, passes: &[&BenchPass]) -> BenchResult {
    let itself = |measured: Measured| Measured {
        times: Comparison { plain: measured.times.plain, drafted: measured.times.plain },
        differ: false,
        log_p: LogProbability { plain: measured.log_p.plain, drafted: measured.log_p.plain },
    };
    let plain_pass = |pass: &&BenchPass| BenchPass {
        all: itself(pass.all),
        categories: pass.categories.iter().map(|(name, measured)| (name.clone(), itself(*measured))).collect(),
        too_long: pass.too_long,
        first_difference: None,
    };
    let passes: Vec<BenchPass> = passes.iter().map(plain_pass).collect();
    let like = result(bench, &bench.contestants[0], &passes.iter().collect::<Vec<_>>());
    let engine = bench.plain.as_ref().map_or(like.engine, |plain| plain.borrow().engine_name().into());
    BenchResult {
        drafter: PLAIN.into(),
        weights: vec![],
        parameters: Some(0),
        training: None,
        prompts: None,
        tree_nodes: 0,
        forced_acceptance_rate: None,
        engine,
        ..like
    }
}

/// Compares the repeats over the same prompts.
fn comparison(repeats: &[Measured], texts: Texts) -> DecodingComparison {
    let tallies = |pick: fn(&Measured) -> Tally| repeats.iter().map(pick).collect::<Vec<_>>();
    let (plain, drafted) = (tallies(|measured| measured.times.plain), tallies(|measured| measured.times.drafted));
    let medians = Comparison { plain: median(&plain), drafted: median(&drafted) };
    // Only the first repeat is scored.
    let log_p = repeats.first().filter(|_| texts == Texts::Sampled).map(|first| first.log_p);
    let plain = figures(&plain, medians.plain, log_p.map(|log_p| log_p.plain));
    let drafted = figures(&drafted, medians.drafted, log_p.map(|log_p| log_p.drafted));
    let means = plain.mean_log_probability.zip(drafted.mean_log_probability);
    DecodingComparison {
        plain,
        drafted,
        acceleration_rate: medians.acceleration_rate(),
        overhead: medians.overhead(),
        speedup: medians.speedup(),
        speedup_range: range(repeats.iter().map(|measured| measured.times.speedup())),
        identical: (texts == Texts::Greedy).then(|| !repeats.iter().any(|measured| measured.differ)),
        log_probability_distance: means.map(|(plain, drafted)| (drafted - plain).abs()),
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
        ("log_probability_distance", json!(group.log_probability_distance)),
        ("forced_acceptance_rate", json!(result.forced_acceptance_rate)),
        ("repeats", json!(result.repeats)),
        ("dtype", json!(result.dtype)),
        ("device", json!(result.device)),
        ("drafter", json!(result.drafter)),
        ("quantization", json!(result.quantization)),
        ("engine", json!(result.engine)),
        ("weights", json!(result.weights.join(" "))),
        ("parameters", json!(result.parameters)),
        ("training_seconds", json!(result.training.map(|cost| cost.seconds))),
        ("training_tokens", json!(result.training.map(|cost| cost.tokens))),
    ]
}

/// Writes a header and one row per group of each result, atomically.
///
/// # Errors
/// An I/O error.
pub(super) fn write_csv(path: &Path, results: &[BenchResult]) -> io::Result<()> {
    let groups =
        results.iter().flat_map(|result| result.groups().map(move |(name, group)| csv_row(result, name, group)));
    write_rows(path, &groups.collect::<Vec<_>>())
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
        assert_eq!(group.log_probability_distance, None);
        let even = comparison(&[measured(10, 5), measured(10, 20)], Texts::Greedy);
        assert_eq!(even.speedup, 0.5, "of two the slower");
    }

    #[test]
    fn texts_that_are_more_probable_than_plain_ones_are_as_far_from_them_as_less_probable_ones() {
        let scored = |drafted| {
            let log_p = LogProbability { plain: -2.5, drafted };
            comparison(&[Measured { log_p, ..measured(10, 5) }], Texts::Sampled)
        };
        let [higher, lower, same] = [-1.5, -3.5, -2.5].map(scored);
        assert_eq!(
            (higher.plain.mean_log_probability, higher.drafted.mean_log_probability),
            (Some(-0.025), Some(-0.015))
        );
        for group in [higher, lower] {
            assert!(
                group.log_probability_distance.is_some_and(|distance| (distance - 0.01).abs() < 1e-12),
                "{group:?}"
            );
        }
        assert_eq!(same.log_probability_distance, Some(0.0));
    }
}
