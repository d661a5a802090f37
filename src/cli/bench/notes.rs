//! What the figures of a table mean, in words: a drafter that is slower than plain decoding, texts that are not identical.

use crate::formats::bench::{BenchResult, ChosenToken, FirstDifference};

/// One sentence a finding; `names` are those of the results' drafters.
pub(super) fn notes(results: &[BenchResult], names: &[String]) -> Vec<String> {
    let mut notes = Vec::new();
    for (at, name) in names.iter().enumerate().filter(|(at, name)| !names[..*at].contains(name)) {
        let own: Vec<&BenchResult> =
            (at..names.len()).filter(|at| names[*at] == *name).map(|at| &results[at]).collect();
        notes.extend(slower(name, &own));
        notes.extend(own.iter().find_map(|result| differs(name, result)));
    }
    notes
}

/// A speedup below this one is shown below 1.00.
const SAME_SPEED: f64 = 0.995;

/// Says that a drafter is slower than plain decoding, in all settings of a sweep.
fn slower(name: &str, own: &[&BenchResult]) -> Option<String> {
    let is_slower = |result: &&BenchResult| {
        !result.is_plain() && result.forced_acceptance_rate.is_none() && result.all.speedup < SAME_SPEED
    };
    let first = own.first().filter(|_| own.iter().all(is_slower))?;
    let why = match own.len() {
        1 => format!(
            "the steps of {name} take {:.2} times as long and commit {:.2} tokens",
            first.all.overhead, first.all.acceleration_rate
        ),
        _ => format!("{name}, at every value of the sweep"),
    };
    let advice = match name {
        _ if first.is_of_heads() => "`medusa tree --latency` chooses the nodes that are fastest on this machine",
        name if name.contains("model:") => "fewer --draft-tokens may be faster",
        _ => "decode such prompts without it",
    };
    Some(format!("slower than plain decoding: {why}; {advice}"))
}

/// Explains `identical no`.
fn differs(name: &str, result: &BenchResult) -> Option<String> {
    let FirstDifference { prompt, turn, token, plain, drafted } = result.first_difference.as_ref()?;
    let turn = if *turn > 1 { format!(", turn {turn}") } else { String::new() };
    let (dtype, chosen) = (result.dtype.as_str(), |token: &ChosenToken| {
        let text = token.text.as_ref().map_or_else(|| "the end".into(), |text| format!("{text:?}"));
        format!("{text} (probability {:.4})", token.probability)
    });
    let is_near_tie = (plain.probability / drafted.probability).ln().abs() < largest_error(dtype);
    let verdict = match (is_near_tie, dtype) {
        (true, "float32") => "the two are almost equally likely, and rounding decided",
        (true, _) => "the two are almost equally likely, and rounding decided; --dtype float32 rounds less",
        (false, _) => "that is more than rounding: please report it as a bug",
    };
    Some(format!(
        "identical no: in prompt {prompt}{turn}, token {token}, plain decoding chose {} and {name} {}: {verdict}",
        chosen(plain),
        chosen(drafted)
    ))
}

/// How far rounding may move the difference of two logits: of logits near 16, the last bit is 0.125 in bfloat16, 0.016 in float16 and 2e-6
/// in float32; the errors of all layers add up to a few of these.
fn largest_error(dtype: &str) -> f64 {
    match dtype {
        "bfloat16" => 0.5,
        "float16" => 0.06,
        _ => 1e-3,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn result(drafter: &str, speedup: f64, more: &Value) -> BenchResult {
        let side = json!({"tokens": 10, "tokens_per_second": 1.0, "step_ms": 1.0});
        let mut result = json!({"plain": side, "medusa": side, "acceleration_rate": 1.25, "overhead": 5.0, "speedup": speedup,
            "identical": true, "device": "cpu", "dtype": "bfloat16", "drafter": drafter, "tree_nodes": 16});
        result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(result).unwrap()
    }

    fn of(results: &[BenchResult]) -> Vec<String> {
        notes(results, &results.iter().map(|result| result.drafter.clone()).collect::<Vec<_>>())
    }

    #[test]
    fn a_drafter_that_is_slower_than_plain_decoding_is_reported_with_a_remedy() {
        let none = json!({});
        let results = [("plain", 1.0), ("medusa", 0.25), ("ngram", 1.2), ("model:m", 0.9), ("lookahead", 0.5)];
        let said = of(&results.map(|(drafter, speedup)| result(drafter, speedup, &none)));
        assert_eq!(
            said,
            [
                "slower than plain decoding: the steps of medusa take 5.00 times as long and commit 1.25 tokens; `medusa tree --latency` \
                 chooses the nodes that are fastest on this machine",
                "slower than plain decoding: the steps of model:m take 5.00 times as long and commit 1.25 tokens; fewer --draft-tokens \
                 may be faster",
                "slower than plain decoding: the steps of lookahead take 5.00 times as long and commit 1.25 tokens; decode such prompts \
                 without it",
            ]
        );
        assert_eq!(of(&[result("medusa", 0.997, &none)]), [""; 0], "the table says 1.00");
        assert_eq!(of(&[result("medusa", 0.5, &json!({"forced_acceptance_rate": 1.25}))]), [""; 0]);
        let swept = |speedup| result("medusa", speedup, &json!({"sweep": {"name": "nodes", "value": 4}}));
        assert_eq!(of(&[swept(0.5), swept(1.5)]), [""; 0], "one of the values is faster");
        assert!(of(&[swept(0.5), swept(0.25)])[0].starts_with("slower than plain decoding: medusa, at every value of"));
    }

    #[test]
    fn texts_that_are_not_identical_are_explained_where_they_part() {
        let difference = |turn, probability: f64| {
            let plain = json!({"text": " the", "probability": 0.5});
            json!({"first_difference": {"prompt": 3, "turn": turn, "token": 17, "plain": plain,
                "drafted": {"text": null, "probability": probability}}})
        };
        assert_eq!(
            of(&[result("medusa", 2.0, &difference(1, 0.45))]),
            [
                "identical no: in prompt 3, token 17, plain decoding chose \" the\" (probability 0.5000) and medusa the end (probability \
              0.4500): the two are almost equally likely, and rounding decided; --dtype float32 rounds less"
            ]
        );
        let far = &of(&[result("medusa", 2.0, &difference(2, 0.1))])[0];
        assert!(far.contains("in prompt 3, turn 2, token 17") && far.ends_with("please report it as a bug"), "{far}");
    }
}
