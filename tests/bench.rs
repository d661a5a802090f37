//! Promise: `medusa bench` repeats its measurements, along a sweep if requested, reports them as JSON, as a table and
//! as CSV, and refuses an impossible sweep before anything is loaded.

use serde_json::{Value, json};

use crate::decoding::World;

const BENCH: [&str; 7] = ["bench", "--backbone", "b", "--heads", "h", "--prompts", "p.jsonl"];

/// A calibration of three heads with four guesses each.
fn calibrated() -> World {
    let world = World::new();
    let head = json!({"counts": [50, 25, 12, 6], "total": 100, "accuracy": [0.5, 0.25, 0.12, 0.06]});
    let rest = json!({"total": 0, "paths": []});
    let sha256 = medusa::files::sha256(&world.path("h/heads.safetensors")).expect("heads");
    for (name, sha256) in [("c.json", sha256.as_str()), ("others.json", "00")] {
        let calibration =
            json!({"heads": [head, head, head], "joint": rest, "backbone": "b", "heads_sha256": sha256, "tokens": 500});
        world.write(name, &calibration);
    }
    world
}

const EIGHT: [&str; 2] = ["--max-new-tokens", "8"];

fn bench(world: &World, more: &[&str]) -> Vec<Value> {
    world.json(&[&BENCH[..], &EIGHT, more].concat())
}

fn swept(lines: &[Value]) -> Vec<Value> {
    lines.iter().map(|line| line["sweep"].clone()).collect()
}

/// The rows of a CSV, keyed by the header.
fn csv(world: &World, name: &str) -> Vec<std::collections::HashMap<String, String>> {
    let reader = csv::Reader::from_path(world.path(name)).expect("a CSV");
    reader.into_deserialize().map(|row| row.expect("a row under this header")).collect()
}

#[test]
fn repeats_are_counted_once_and_their_range_holds_the_median() {
    let world = World::new();
    let line = bench(&world, &["--repeats", "4"]).remove(0);
    assert_eq!((&line["repeats"], &line["plain"]["tokens"], line.get("sweep")), (&json!(4), &json!(8), None));
    for side in ["plain", "medusa"] {
        let number = |value: &Value| value.as_f64().expect("a number");
        let range = &line[side]["tokens_per_second_range"];
        let [low, median, high] = [&range[0], &line[side]["tokens_per_second"], &range[1]].map(number);
        assert!(0.0 < low && low <= median && median <= high, "{line}");
    }
}

#[test]
fn a_sweep_of_nodes_has_a_tree_of_each_size() {
    let world = calibrated();
    let sweep = ["--sweep", "nodes=1,5,12", "--calibration", "c.json", "--repeats", "1", "--csv", "n.csv"];
    let lines = bench(&world, &sweep);
    let expected = [1, 5, 12].map(|nodes| json!({"name": "nodes", "value": nodes}));
    assert_eq!(swept(&lines), expected);
    for (line, nodes) in lines.iter().zip([1, 5, 12]) {
        assert_eq!((&line["tree_nodes"], &line["identical"]), (&json!(nodes), &json!(true)));
    }
    world.lines("sweep.json", &lines);
    let inspected = world.json(&["inspect", "sweep.json"]).remove(0);
    let fastest =
        lines.iter().max_by(|a, b| a["speedup"].as_f64().partial_cmp(&b["speedup"].as_f64()).expect("numbers"));
    assert_eq!((&inspected["kind"], Some(&inspected["bench"])), (&json!("bench"), fastest));
    let rows = csv(&world, "n.csv");
    assert_eq!(rows.len(), 3);
    for (row, line) in rows.iter().zip(&lines) {
        let text = |key: &str| row[key].as_str();
        assert_eq!((text("sweep"), text("category"), text("identical")), ("nodes", "all", "true"));
        assert_eq!((text("value"), text("tree_nodes")), (text("tree_nodes"), line["tree_nodes"].to_string().as_str()));
        for key in ["acceleration_rate", "overhead", "speedup"] {
            assert_eq!(row[key].parse::<f64>().ok(), line[key].as_f64(), "{key}");
        }
    }
}

#[test]
fn a_sweep_is_drawn_with_a_line_for_each_drafter() {
    let world = calibrated();
    let sweep = ["--sweep", "nodes=1,5", "--calibration", "c.json", "--repeats", "1", "--svg", "new/n.svg"];
    bench(&world, &sweep);
    let svg = std::fs::read_to_string(world.path("new/n.svg")).expect("a picture in a folder that is made");
    for part in [
        "medusa bench --sweep nodes",
        ">Speed, tokens",
        "Tokens per step",
        ">nodes of the tree</text>",
        ">medusa</text>",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    assert_eq!(svg.matches("data-name=\"medusa\"").count(), 2, "a line in each plot: {svg}");
    assert_eq!(svg.matches("data-name=\"plain decoding\"").count(), 1, "speed alone: {svg}");
    assert!(svg.contains("prefers-color-scheme: dark") && !svg.contains("NaN"), "{svg}");
    let refused = world.complaint(&[&BENCH[..], &["--svg", "x.svg"]].concat(), 2);
    assert!(refused.contains("--sweep"), "{refused}");
}

#[test]
fn the_table_is_printed_although_the_last_value_of_a_sweep_fails() {
    let world = World::new();
    let sweep = ["--sweep", "context=2,64", "--max-new-tokens", "0", "--repeats", "1", "--csv", "c.csv"];
    let output = world.medusa(&[&BENCH[..], &sweep].concat()).output().expect("it runs");
    let [table, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: --sweep context=64") && said.contains("no prompt fits"), "{said}");
    assert!(table.lines().next().is_some_and(|header| header.contains(" tokens/step ")), "{table}");
    assert!(table.starts_with("context") && table.lines().nth(1).is_some_and(|row| row.starts_with('2')), "{table}");
    assert_eq!(csv(&world, "c.csv").len(), 1);
}

#[test]
fn a_larger_threshold_accepts_less_and_the_texts_are_scored() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]));
    let thresholds = ["--sweep", "posterior-threshold=0.00001,0.9", "--temperature", "1"];
    let lines = world.json(&[&BENCH[..], &thresholds, &["--tree", "t.json", "--max-new-tokens", "40"]].concat());
    let rate = |line: &Value| line["acceleration_rate"].as_f64().expect("a number");
    assert!(rate(&lines[0]) > rate(&lines[1]), "{lines:?}");
    for line in &lines {
        assert_eq!((&line["identical"], &line["sweep"]["name"]), (&Value::Null, &json!("posterior-threshold")));
        let [plain, drafted] = ["plain", "medusa"].map(|side| {
            let mean = line[side]["mean_log_probability"].as_f64().expect("a number");
            let uniform = -(crate::data::BYTE_VOCABULARY as f64).ln();
            assert!((2.0 * uniform..0.0).contains(&mean), "{mean} for a random backbone; {uniform} is uniform");
            mean
        });
        assert_eq!(line["log_probability_distance"], (drafted - plain).abs());
    }
    let greedy = bench(&world, &["--sweep", "temperature=0,1", "--repeats", "1"]);
    assert_eq!((&greedy[0]["identical"], &greedy[0]["plain"]["mean_log_probability"]), (&json!(true), &Value::Null));
    assert!(greedy[1]["plain"]["mean_log_probability"].is_f64());
}

#[test]
fn contexts_are_swept_up_to_the_backbones() {
    let world = World::new();
    let lines = bench(&world, &["--sweep", "context=2,56", "--repeats", "1"]);
    assert_eq!(swept(&lines), [2, 56].map(|value| json!({"name": "context", "value": value})));
    assert!(lines.iter().all(|line| line["plain"]["tokens"] == 8 && line["identical"] == true), "{lines:?}");
    let refused = world.complaint(&[&BENCH[..], &["--max-new-tokens", "8", "--sweep", "context=57"]].concat(), 2);
    let expected = "error: --sweep context=57: with --max-new-tokens 8 that is 65 tokens, but the backbone's context is 64; \
                    lower one of them\n";
    assert_eq!(refused, expected);
}

#[test]
fn the_table_has_a_row_a_category_or_a_value_and_csv_quotes_what_it_must() {
    let world = calibrated();
    let prompt = |text: &str, category: &str| json!({"prompt": text, "category": category});
    world.lines("p.jsonl", &[prompt("ab", "sums, \"hard\""), prompt("ba", "x")]);
    let table = |more: &[&str]| {
        let output = world.medusa(&[&BENCH[..], &["--max-new-tokens", "8"], more].concat()).output().expect("it runs");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let starts = |table: &str| -> Vec<String> {
        table.lines().map(|line| line.split("   ").next().unwrap_or_default().to_owned()).collect()
    };
    let plain = table(&["--csv", "p.csv"]);
    assert_eq!(starts(&plain)[..4], ["category", "sums, \"hard\"", "x", "all"], "{plain}");
    assert!(plain.contains("a tree of 3 nodes; median of 3 repeats; range: slowest to fastest\n"), "{plain}");
    let categories: Vec<String> = csv(&world, "p.csv").iter().map(|row| row["category"].clone()).collect();
    assert_eq!(categories, ["sums, \"hard\"", "x", "all"]);
    let swept = table(&["--sweep", "nodes=2,4", "--calibration", "c.json", "--repeats", "1"]);
    assert_eq!(starts(&swept)[..3], ["nodes", "2", "4"], "{swept}");
    assert!(swept.contains("float32 on cpu; measured once\n"), "{swept}");
    assert_eq!(csv(&world, "p.csv")[0]["drafter"].as_str(), "medusa");
    let drafter = |table: &str| table.split_whitespace().nth(4).map(str::to_owned);
    assert_eq!(drafter(&plain).as_deref(), Some("medusa"), "{plain}");
    let ngram = ["--backbone", "b", "--drafter", "ngram", "--prompts", "p.jsonl", "--max-new-tokens", "8"];
    let output = world.medusa(&[&["bench"], &ngram[..], &["--csv", "g.csv"]].concat()).output().expect("it runs");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(drafter(&table).as_deref(), Some("ngram"), "{table}");
    assert_eq!(csv(&world, "g.csv")[0]["drafter"].as_str(), "ngram");
}

#[test]
fn a_turn_longer_than_the_context_is_left_out_and_counted() {
    let world = World::new();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    world
        .write("b/tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}));
    let long = "abc".repeat(30);
    world.lines(
        "p.jsonl",
        &[
            json!({"question_id": 1, "category": "c", "turns": ["a", long]}),
            json!({"question_id": 2, "category": "c", "turns": [long, "a"]}),
        ],
    );
    let output = world.medusa(&[&BENCH[..], &EIGHT, &["--json"]].concat()).assert().success().get_output().clone();
    let line: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&line["too_long"], &line["plain"]["tokens"]), (&json!(2), &json!(8)), "{line}");
    let printed = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(printed.contains("skipping 1 of 2 prompts: too long for the context of 64 tokens"), "{printed}");
    assert!(printed.ends_with("1 conversation ended before a turn that does not fit the context\n"), "{printed}");
    let strict = world.complaint(&[&BENCH[..], &["--strict", "--sweep", "temperature=0,1"]].concat(), 1);
    assert!(strict.contains("error: cannot decode 1 of 2 prompts") && strict.contains("line 2, "), "{strict}");
    assert_eq!(bench(&world, &["--strict", "--sweep", "context=8"])[0]["too_long"], 0, "every turn is cut");
    world.lines("p.jsonl", &[json!({"prompt": long}), json!({"prompt": long})]);
    let refused = world.complaint(&BENCH, 1);
    assert!(refused.contains("error: cannot decode 2 of 2 prompts: too long"), "{refused}");
}

#[test]
fn a_forced_rate_is_a_timing_and_says_so() {
    let world = calibrated();
    let line = bench(&world, &["--force-acceptance-rate", "2", "--repeats", "1", "--csv", "f.csv"]).remove(0);
    assert_eq!(
        (&line["acceleration_rate"], &line["medusa"]["steps"], &line["identical"]),
        (&json!(2.0), &json!(4), &Value::Null)
    );
    assert_eq!((&line["forced_acceptance_rate"], &line["plain"]["mean_log_probability"]), (&json!(2.0), &Value::Null));
    assert_eq!(csv(&world, "f.csv")[0]["forced_acceptance_rate"].as_str(), "2.0");
    let output = world.medusa(&[&BENCH[..], &["--force-acceptance-rate", "1.5"]].concat()).output().expect("it runs");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.ends_with("forced to 1.5 tokens per step: the speed is not that of this drafter\n"), "{table}");
    let refused = |more: &[&str]| world.complaint(&[&BENCH[..], &["--force-acceptance-rate"], more].concat(), 2);
    assert!(refused(&["5"]).contains("expected 1 to 4"));
    assert!(refused(&["0.5"]).contains("expected 1 to 4") && refused(&["-1"]).contains("--force-acceptance-rate"));
    let swept = refused(&["2", "--sweep", "posterior-threshold=0.1", "--temperature", "1"]);
    assert!(swept.contains("drop one of them"), "{swept}");
}

#[test]
fn what_cannot_be_swept_is_status_2_before_anything_is_loaded() {
    let world = calibrated();
    world.write("t.json", &json!([[0]]));
    world.write("t.json", &json!([[0]]));
    std::fs::remove_file(world.path("b/model.safetensors")).expect("it was there");
    let refused = |more: &[&str]| world.complaint(&[&BENCH[..], more].concat(), 2);
    let says = |more: &[&str], words: &str| {
        let text = refused(more);
        assert!(text.contains(words), "{more:?}: {text}");
    };
    says(&["--sweep", "depth=1"], "no sweep \"depth\"; expected nodes, posterior-threshold, context or temperature");
    says(&["--sweep", "nodes"], "expected NAME=VALUE,VALUE,…");
    says(&["--sweep", "nodes="], "nodes has no values");
    says(&["--sweep", "nodes=4,0"], "nodes \"0\": expected a whole number above 0");
    says(&["--sweep", "nodes=4,,8"], "nodes \"\": expected a whole number above 0");
    says(&["--sweep", "temperature=-1"], "expected a number that is finite and at least 0");
    says(&["--sweep", "posterior-threshold=0"], "expected a number that is above 0 and at most 1");
    says(&["--sweep", "nodes=4"], "give it --calibration C");
    says(&["--sweep", "nodes=4", "--calibration", "c.json", "--tree", "t.json"], "drop --tree");
    says(
        &["--sweep", "nodes=4,400", "--calibration", "c.json"],
        "--sweep nodes=400: a tree of 400 nodes was asked for",
    );
    says(&["--nodes", "4", "--calibration", "others.json"], "others.json is a calibration of other heads than h");
    says(&["--calibration", "c.json"], "without one of them, drop it");
    says(&["--sweep", "posterior-threshold=0.1"], "needs --temperature above 0");
    says(&["--sweep", "posterior-threshold=0.1", "--temperature", "1", "--acceptance", "greedy"], "typical acceptance");
    says(&["--repeats", "0"], "--repeats");
    says(
        &["--csv", "b/config.json/x.csv"],
        "--csv b/config.json/x.csv cannot be written: b/config.json is not a folder",
    );
}

/// A run with the heads of `h`, a tree and a calibration beside them, and metrics.
fn a_run(world: &World) {
    std::fs::create_dir_all(world.path("run/final")).expect("a folder");
    std::fs::copy(world.path("h/heads.safetensors"), world.path("run/final/heads.safetensors")).expect("heads");
    for (file, content) in
        [("recipe.toml", json!({})), ("provenance.json", json!({})), ("tree.json", json!([[0], [1]]))]
    {
        world.write(&format!("run/{file}"), &content);
    }
    std::fs::copy(world.path("c.json"), world.path("run/calibration.json")).expect("a calibration");
    let step = |step: u64| json!({"split": "train", "step": step, "tokens": step * 100, "loss": 1.0, "head_losses": [1.0], "tokens_per_second": 50.0});
    world.lines("run/metrics.jsonl", &[step(1), step(2)]);
}

const DRAFTERS: [&str; 7] = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "8"];

#[test]
fn drafters_take_turns_and_share_a_table() {
    let world = calibrated();
    a_run(&world);
    let prompt = |text: &str, category: &str| json!({"prompt": text, "category": category});
    world.lines("p.jsonl", &[prompt("ab ab ab", "x"), prompt("ba", "y")]);
    let compared = ["--heads", "h", "--drafters", "plain,ngram,medusa,medusa:run/final"];
    let lines = world.json(&[&DRAFTERS[..], &compared, &["--csv", "d.csv", "--repeats", "2"]].concat());
    let all = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    assert_eq!(all("drafter"), ["plain", "ngram", "medusa", "medusa"].map(|name| json!(name)));
    assert_eq!(all("identical"), [true; 4].map(|same| json!(same)));
    assert_eq!(
        [0, 2, 3].map(|at| all("tree_nodes")[at].clone()),
        [0, 3, 2].map(|nodes| json!(nodes)),
        "a chain of three heads; the tree of the run"
    );
    assert_eq!(all("weights"), [Value::Null, Value::Null, json!(["h"]), json!(["run/final"])]);
    let parameters = 3 * (32 * 32 + 32 + 32 * crate::data::BYTE_VOCABULARY);
    assert_eq!(all("parameters"), [0, 0, parameters, parameters].map(|count| json!(count)));
    let cost = json!({"seconds": 4.0, "tokens": 200});
    assert_eq!(all("training"), [Value::Null, Value::Null, Value::Null, cost]);
    for line in &lines {
        assert_eq!(line["plain"], lines[0]["plain"], "plain decoding is measured once for all");
        assert_eq!(line["categories"].as_object().map(serde_json::Map::len), Some(2));
    }
    let plain = &lines[0];
    assert_eq!((&plain["medusa"], &plain["speedup"], &plain["overhead"]), (&plain["plain"], &json!(1.0), &json!(1.0)));
    let rows = csv(&world, "d.csv");
    assert_eq!(rows.len(), 12, "two categories and all, for each of four");
    let last = &rows[11];
    let text = |key: &str| last[key].as_str();
    assert_eq!((text("drafter"), text("weights"), text("category")), ("medusa", "run/final", "all"));
    assert_eq!((text("training_seconds"), text("training_tokens")), ("4.0", "200"));
    assert_eq!(Some(text("engine")), lines[3]["engine"].as_str());
    let output = world.medusa(&[&DRAFTERS[..], &compared, &["--repeats", "1"]].concat()).output().expect("it runs");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    for words in ["drafter ", "parameters", "medusa:h ", "medusa:run/final ", "4 s, 200 tokens", "tokens/step, speedup"]
    {
        assert!(table.contains(words), "{words}: {table}");
    }
    let speeds = |table: &str, start: &str| table.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!((speeds(&table, "plain "), speeds(&table, "x "), speeds(&table, "y ")), (1, 1, 1), "{table}");
}

#[test]
fn a_node_budget_is_the_same_for_all_heads() {
    let world = calibrated();
    a_run(&world);
    let drafters =
        ["--heads", "h", "--calibration", "c.json", "--drafters", "ngram,medusa,medusa:run/final", "--repeats", "1"];
    let lines = world.json(&[&DRAFTERS[..], &drafters, &["--nodes", "5"]].concat());
    let nodes: Vec<_> = lines.iter().skip(1).map(|line| line["tree_nodes"].clone()).collect();
    assert_eq!(nodes, [5, 5].map(|nodes| json!(nodes)));
    let lines = world.json(&[&DRAFTERS[..], &drafters, &["--sweep", "nodes=2,4"]].concat());
    let found: Vec<_> = lines.iter().map(|line| (line["drafter"].clone(), line["sweep"]["value"].clone())).collect();
    let expected = [("ngram", 2), ("medusa", 2), ("medusa", 2), ("ngram", 4), ("medusa", 4), ("medusa", 4)];
    assert_eq!(found, expected.map(|(name, value)| (json!(name), json!(value))));
    std::fs::remove_file(world.path("run/calibration.json")).expect("it was there");
    let refused = world.complaint(&[&DRAFTERS[..], &drafters, &["--nodes", "5"]].concat(), 2);
    assert!(refused.contains("run/final has no calibration.json beside it"), "{refused}");
    let forced = ["--heads", "h", "--drafters", "plain,medusa", "--force-acceptance-rate", "2", "--repeats", "1"];
    let lines = world.json(&[&DRAFTERS[..], &forced].concat());
    assert_eq!((&lines[0]["acceleration_rate"], &lines[1]["acceleration_rate"]), (&json!(1.0), &json!(2.0)));
}

#[test]
fn what_cannot_be_compared_is_status_2_before_anything_is_loaded() {
    let world = calibrated();
    world.write("t.json", &json!([[0]]));
    a_run(&world);
    std::fs::remove_file(world.path("b/model.safetensors")).expect("it was there");
    let says = |more: &[&str], words: &str| {
        let text = world.complaint(&[&DRAFTERS[..], more].concat(), 2);
        assert!(text.contains(words), "{more:?}: {text}");
    };
    says(&["--drafters", "plain"], "nothing to compare plain decoding with");
    says(&["--drafters", "ngram,plain,ngram"], "--drafters names ngram twice");
    says(&["--drafters", "ngram,medusae"], "no drafter \"medusae\"; expected medusa, hydra, hydra++, eagle3, ngram");
    says(&["--drafters", "ngram,medusa"], "--drafter medusa needs --heads");
    says(&["--drafters", "ngram", "--heads", "h"], "no drafter of --drafters uses --heads h");
    says(&["--drafters", "ngram", "--tree", "dynamic:4"], "no drafter of --drafters uses --tree dynamic:4");
    says(&["--drafters", "model:b,ngram", "--tree", "t.json"], "no drafter of --drafters uses --tree t.json");
    says(&["--drafters", "model:b+model:./b"], "model:b and model:./b are the same folder");
    says(&["--drafters", "medusa:h", "--drafter", "ngram"], "cannot be used with");
    says(&["--drafters", "medusa:h,ngram:x"], "ngram has no weights; drop :x");
    says(&["--drafters", "hydra:h"], "the heads in h are medusa heads");
    says(&["--drafters", "ngram", "--nodes", "4"], "--drafter ngram makes its own at every step");
    says(
        &["--drafters", "plain,ngram", "--force-acceptance-rate", "2"],
        "--drafter ngram makes a new tree at every step",
    );
    says(&["--drafter", "plain"], "drop --drafter");
    says(&["--drafter", "medusa:run/final", "--heads", "h"], "has heads of its own; drop --heads h");
    std::fs::create_dir(world.path("tuned")).expect("a folder");
    std::fs::copy(world.path("h/heads.safetensors"), world.path("tuned/heads.safetensors")).expect("heads");
    world.write("tuned/adapter_config.json", &json!({}));
    says(
        &["--drafters", "medusa:tuned,medusa:h"],
        "tuned has an adapter for the backbone, and h was trained for another",
    );
    world.write("tuned/config.json", &json!({"architecture": "clover"}));
    says(
        &["--drafters", "medusa:tuned"],
        "config.json: architecture: expected \"medusa\", \"hydra\", \"hydra++\" or \"eagle3\", got \"clover\"",
    );
}

/// Every text in flight is the one of plain decoding, and the table, the CSV and the picture have a line for each level.
#[test]
fn texts_in_flight_are_counted_and_identical() {
    let world = World::new();
    let prompts = [json!({"prompt_ids": [1, 4, 5, 6]}), json!({"prompt_ids": [1, 9]}), json!({"prompt": "ab"})];
    world.lines("p.jsonl", &prompts);
    let load = ["--concurrency", "1,3", "--requests", "7", "--dtype", "float32"];
    let lines = bench(&world, &[&load[..], &["--csv", "l.csv", "--svg", "l.svg"]].concat());
    let names = |lines: &[Value]| -> Vec<(Value, Value)> {
        lines.iter().map(|line| (line["concurrency"].clone(), line["drafter"].clone())).collect()
    };
    let expected =
        [(1, "plain"), (1, "medusa"), (3, "plain"), (3, "medusa")].map(|(level, name)| (json!(level), json!(name)));
    assert_eq!(names(&lines), expected);
    for line in &lines {
        assert_eq!((&line["requests"], &line["tokens"], &line["errors"]), (&json!(7), &json!(56), &json!(0)));
        let is_plain = line["drafter"] == "plain";
        assert_eq!(line["identical"], if is_plain { Value::Null } else { json!(true) });
        let number = |value: &Value| value.as_f64().expect("a number");
        assert!(number(&line["tokens_per_step"]) >= 1.0 && (!is_plain || line["tokens_per_step"] == 1.0), "{line}");
        for latency in ["ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"] {
            let [median, p95] = ["median", "p95"].map(|key| number(&line[latency][key]));
            assert!(0.0 < median && median <= p95, "{latency}: {line}");
        }
    }
    assert_eq!(lines[0]["prompt_tokens"], lines[3]["prompt_tokens"]);
    let rows = csv(&world, "l.csv");
    assert_eq!((rows.len(), rows[3]["concurrency"].as_str(), rows[3]["drafter"].as_str()), (4, "3", "medusa"));
    let svg = std::fs::read_to_string(world.path("l.svg")).expect("a picture");
    assert!(svg.contains(">medusa bench --concurrency<") && svg.contains(">plain, p95<"), "{svg}");
    let ngram = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "4", "--concurrency", "2"];
    let both = world.json(&[&ngram[..], &["--drafters", "plain,ngram"]].concat());
    assert_eq!(names(&both), ["plain", "ngram"].map(|name| (json!(2), json!(name))));
    assert_eq!((&both[0]["requests"], &both[1]["tokens"]), (&json!(8), &json!(32)));
    let output = world.medusa(&ngram).output().expect("it runs");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.starts_with("concurrency   requests   tokens   tokens/s   tokens/step "), "{table}");
    assert!(table.contains("plain, ") && table.contains("TTFT: time to first token"), "{table}");
}

#[test]
fn what_does_not_go_with_a_load_is_status_2() {
    let world = World::new();
    let says = |more: &[&str], words: &str| {
        let text = world.complaint(&[&BENCH[..], more].concat(), 2);
        assert!(text.contains(words), "{more:?}: {text}");
    };
    says(&["--requests", "4"], "give it --concurrency N,N… or --endpoint URL");
    says(&["--concurrency", "4", "--requests", "3"], "--requests 3 is fewer than --concurrency 4");
    says(&["--concurrency", "0"], "expected a whole number above 0");
    says(&["--concurrency", "2", "--sweep", "temperature=0,1"], "cannot be used with");
    says(&["--concurrency", "2", "--engine", "cuda"], "--engine cuda decodes one text at a time");
    says(&["--concurrency", "2", "--max-new-tokens", "0"], "--max-new-tokens 0");
    says(&["--model", "m"], "--model is for a server; give it --endpoint URL");
    let refused = world.complaint(&["bench", "--prompts", "p.jsonl", "--concurrency", "2"], 2);
    assert!(refused.contains("--backbone"), "{refused}");
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn the_products_of_a_backbone_are_timed_on_the_kernels_only() {
    let world = World::new();
    let products = ["bench", "--backbone", "b", "--products"];
    let found = world.json(&products).remove(0);
    assert!(found["read_gigabytes_per_second"].as_f64().expect("a number") > 0.0, "{found}");
    let measured = found["products"].as_array().expect("products");
    let names: Vec<&Value> = measured.iter().map(|product| &product["weights"]).collect();
    assert_eq!(names, ["q, k, v", "o", "gate, up", "down", "LM head"]);
    for product in measured {
        assert!(product["gigabytes_per_second"].as_f64().expect("a number") > 0.0, "{product}");
        let rows: Vec<&Value> = product["rows"].as_array().expect("rows").iter().map(|row| &row["rows"]).collect();
        assert_eq!(rows, [1, 2, 4, 8, 16, 32]);
    }
    let elsewhere = world.complaint(&[&products[..], &["--engine", "tch"]].concat(), 2);
    assert!(elsewhere.contains("--products times the CPU kernels, which cannot run this backbone"), "{elsewhere}");
    let both = world.complaint(&[&products[..], &["--prompts", "p.jsonl"]].concat(), 2);
    assert!(both.contains("--prompts"), "{both}");
}
