//! Promise: `medusa tree --latency` measures step times once on this machine and chooses the tree with the most tokens
//! per second; a file measured under other conditions is refused.

use medusa::formats::latency::Latency;
use medusa::formats::tree::TreeFile;
use medusa::latency::Timed;
use medusa::tree::guess_tree::GuessTree;
use medusa::tree::sparse_tree::SparseTree;
use serde_json::{Value, json};

use crate::decoding::World;

/// A folder with a calibration of its heads.
fn world() -> World {
    let world = World::new();
    let arguments =
        ["calibrate", "--backbone", "b", "--heads", "h", "--prompts", "p.jsonl", "--top-k", "20", "--out", "c.json"];
    world.medusa(&arguments).assert().success();
    world
}

const CHOOSE: [&str; 7] = ["tree", "--calibration", "c.json", "--latency", "l.json", "--out", "t.json"];
const MEASURE: [&str; 6] = ["--backbone", "b", "--heads", "h", "--max-nodes", "8"];

fn stderr(world: &World, arguments: &[&str]) -> String {
    let output = world.medusa(arguments).assert().success().get_output().clone();
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// The speedup and its range, of a line as "expected: 900 tokens/s, 1.50 times plain decoding (1.30 to 1.60); …".
fn speedup_with_range(line: &str) -> [f64; 3] {
    let words: Vec<&str> = line.split_whitespace().collect();
    let decoding = words.iter().position(|&word| word == "decoding").expect("a speedup");
    [decoding - 3, decoding + 1, decoding + 3]
        .map(|at| words[at].trim_matches(['(', ')', ';']).parse().expect("a number"))
}

#[test]
fn times_are_measured_once_and_kept() {
    let world = world();
    let printed = stderr(&world, &[&CHOOSE[..], &MEASURE].concat());
    assert!(printed.contains("wrote l.json") && printed.contains("<- fastest"), "{printed}");
    let expected = printed.lines().find(|line| line.starts_with("expected: ")).expect("a line");
    let latency = Latency::load(&world.path("l.json")).unwrap();
    let [mean, low, high] = speedup_with_range(expected);
    assert!(low <= mean && mean <= high, "{expected}");
    assert_eq!((latency.device.as_str(), latency.context, latency.backbone.as_str()), ("cpu", 32, "b"));
    let decoded = ["generate", "--backbone", "b", "--heads", "h", "--prompts", "p.jsonl", "--max-new-tokens", "2"];
    assert_eq!(json!(latency.engine), world.json(&decoded)[0]["engine"], "the engine that decodes");
    let timed = |nodes, depth| latency.steps.iter().any(|step| (step.nodes, step.depth) == (nodes, depth));
    assert!(latency.steps.iter().all(|step| step.nodes <= 8), "{:?}", latency.steps);
    assert!(timed(8, 2) && timed(8, 1), "heads can be left out: {:?}", latency.steps);
    let (first, file) = GuessTree::load(&world.path("t.json")).unwrap();
    let sha256 = medusa::files::sha256(&world.path("l.json")).unwrap();
    assert_eq!(file.latency_sha256.as_ref(), Some(&sha256));
    let per_second = file.expected_tokens_per_second;
    let timed = Timed {
        tree: first.clone(),
        tokens_per_step: file.expected_tokens_per_step.unwrap(),
        interval: None,
        step: latency.step(first.as_static().is_none(), first.nodes(), first.depth()).unwrap(),
    };
    let by_means = timed.tokens_per_second() / latency.slowdown.unwrap().trees;
    assert_eq!(per_second, Some(by_means), "mean step times, as bench has them");
    assert!(!stderr(&world, &CHOOSE).contains("wrote"));
    assert_eq!(GuessTree::load(&world.path("t.json")).unwrap(), (first, file), "the same times, the same tree");
    assert_eq!(medusa::files::sha256(&world.path("l.json")).unwrap(), sha256);
    let found = world.json(&["inspect", "l.json"]).remove(0);
    assert_eq!((&found["kind"], &found["plain_step_ms"]), (&json!("latency"), &json!(latency.plain_step_ms)));
    assert_eq!(world.json(&["inspect", "t.json"])[0]["expected_tokens_per_second"], json!(per_second));
}

#[test]
fn each_number_of_texts_has_its_times_and_its_tree() {
    let world = world();
    let measure = ["--backbone", "b", "--heads", "h", "--max-nodes", "2"];
    let several = [&CHOOSE[..], &measure, &["--sequences", "2,6"]].concat();
    let printed = stderr(&world, &several);
    assert!(printed.contains("2 texts at a time: ") && printed.contains("6 texts at a time: "), "{printed}");
    let latency = Latency::load(&world.path("l.json")).unwrap();
    let numbers: Vec<usize> = latency.by_sequences.iter().map(|of| of.sequences).collect();
    let sizes: Vec<usize> = latency.by_sequences[0].steps.iter().map(|step| step.nodes).collect();
    assert!(numbers == [2, 6] && [1, 2].iter().all(|size| sizes.contains(size)), "{numbers:?}, {sizes:?}");
    let [two, six] = [0, 1].map(|at| latency.by_sequences[at].plain_step_ms);
    assert!(
        two > 0.5 * latency.plain_step_ms && six > 0.5 * latency.plain_step_ms,
        "steps in which nothing ran: {latency:?}"
    );
    let file = TreeFile::load(&world.path("t.json")).unwrap();
    for (tree, times) in file.by_sequences.iter().zip(&latency.by_sequences) {
        let slowdown = times.slowdown.unwrap();
        let plain = 1e3 * times.sequences as f64 / times.plain_step_ms;
        let of = if tree.choices.is_empty() { slowdown.plain } else { slowdown.trees };
        let undisturbed = tree.expected_tokens_per_second * of;
        assert_eq!(tree.sequences, times.sequences);
        assert!(
            undisturbed >= plain * (1.0 - 1e-9) && (tree.choices.is_empty() == (undisturbed <= plain * (1.0 + 1e-9)))
        );
    }
    assert_eq!(file.by_sequences.len(), 2);
    assert!(!stderr(&world, &several).contains("wrote l.json"), "the times are kept");
    let other = world.complaint(&[&CHOOSE[..], &["--sequences", "3"]].concat(), 2);
    assert!(other.contains("l.json has no times of 3 texts at a time; remove it to measure anew"), "{other}");
    let cuda = world.complaint(&[&CHOOSE[..], &measure, &["--engine", "cuda", "--sequences", "2"]].concat(), 2);
    assert!(cuda.contains("engine cuda decodes one text at a time"), "{cuda}");
    let distill = ["distill", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "8", "--temperature", "0"];
    let with_heads = [&distill[..], &["--out", "d", "--heads", "h", "--tree", "t.json"]].concat();
    world.medusa(&with_heads).assert().success();
}

#[test]
fn the_engine_that_is_asked_for_is_timed() {
    let world = world();
    let tch = stderr(&world, &[&CHOOSE[..], &MEASURE, &["--engine", "tch"]].concat());
    assert!(tch.contains("wrote l.json: steps of engine tch"), "{tch}");
    let timed = Latency::load(&world.path("l.json")).unwrap();
    assert_eq!((timed.engine.as_str(), timed.engine_flag.as_str()), ("tch", "tch"));
    let auto = world.complaint(&CHOOSE, 1); // `medusa generate` may choose another
    assert!(auto.contains("l.json was measured with engine tch, not with auto"), "{auto}");
    std::fs::remove_file(world.path("l.json")).expect("written just now");
    let cuda = world.complaint(&[&CHOOSE[..], &MEASURE, &["--engine", "cuda"]].concat(), 1);
    assert!(cuda.contains("--engine cuda cannot decode this"), "{cuda}");
    assert!(!world.path("l.json").exists());
}

#[test]
fn a_backbone_is_known_by_its_content_and_not_by_its_path() {
    let world = world();
    stderr(&world, &[&CHOOSE[..], &MEASURE].concat());
    std::fs::rename(world.path("b"), world.path("moved")).expect("a folder");
    let moved = ["--backbone", "./moved", "--heads", "h"];
    assert!(!stderr(&world, &[&CHOOSE[..], &moved].concat()).contains("wrote"), "the same times");
    let config = std::fs::read_to_string(world.path("moved/config.json")).expect("a config");
    let mut other: Value = serde_json::from_str(&config).expect("JSON");
    other["rope_theta"] = json!(500_000.0);
    world.write("moved/config.json", &other);
    let refused = world.complaint(&[&CHOOSE[..], &moved].concat(), 1);
    assert!(refused.contains("l.json was measured with the backbone b, not with ./moved"), "{refused}");
}

/// Writes `l.json` with these nodes, depths and milliseconds.
fn write_times(world: &World, plain_step_ms: f64, steps: &[(usize, usize, f64)]) {
    let written = std::fs::read(world.path("c.json")).expect("the calibration of this test");
    let calibration: Value = serde_json::from_slice(&written).expect("JSON");
    let step = |&(nodes, depth, step_ms): &_| json!({"nodes": nodes, "depth": depth, "step_ms": step_ms});
    world.write(
        "l.json",
        &json!({
        "device": "cpu", "engine": "tch", "engine_flag": "auto", "dtype": "float32", "threads": threads(), "context": 32, "backbone": "b",
        "heads_sha256": calibration["heads_sha256"], "plain_step_ms": plain_step_ms,
        "steps": steps.iter().map(step).collect::<Vec<_>>()}),
    );
}

/// Threads that a decoding step may use on this machine.
fn threads() -> usize {
    medusa::cpu::team::Team::shared().size()
}

#[test]
fn the_fastest_is_taken_and_plain_decoding_may_be_it() {
    let world = world();
    let all = |ms: &dyn Fn(usize, usize) -> f64| -> Vec<(usize, usize, f64)> {
        (1..=3).flat_map(|depth| [1, 4, 8].map(|nodes| (nodes, depth, ms(nodes, depth)))).collect()
    };
    let chosen = || SparseTree::load(&world.path("t.json")).unwrap().0.choices().len();
    write_times(&world, 2.0, &all(&|nodes, _| 1.0 + 0.001 * nodes as f64));
    let nearly_free = stderr(&world, &CHOOSE);
    assert!(!nearly_free.contains("plain decoding is expected to be faster"), "{nearly_free}");
    write_times(&world, 2.0, &all(&|nodes, _| 3.0 + 100.0 * nodes as f64));
    let costly = stderr(&world, &CHOOSE);
    assert!(costly.contains("plain decoding is expected to be faster than any tree: 500.0 tokens/s"), "{costly}");
    assert_eq!(chosen(), 1, "what is best of the trees is written all the same");
    let largest = stderr(&world, &[&CHOOSE[..], &["--max-nodes", "4"]].concat());
    assert!(!largest.contains("\n    8 ") && largest.contains("\n    4 "), "{largest}");
}

#[test]
fn a_tree_that_is_chosen_at_each_step_has_no_picture_and_is_no_error() {
    let world = world();
    write_times(&world, 2.0, &[(4, 2, 3.0)]);
    let mut times: Value = serde_json::from_slice(&std::fs::read(world.path("l.json")).expect("times")).expect("JSON");
    let steps = times["steps"].as_array_mut().expect("steps");
    steps.push(json!({"nodes": 4, "depth": 2, "step_ms": 0.1, "dynamic": true}));
    world.write("l.json", &times);
    let said = stderr(&world, &[&CHOOSE[..], &["--svg", "t.svg"]].concat());
    assert!(said.contains("no picture in t.svg: the fastest tree is chosen at each step"), "{said}");
    assert!(!world.path("t.svg").exists() && world.path("t.json").exists());
}

#[test]
fn times_from_a_busy_machine_are_reported_by_every_command_that_reads_them() {
    let world = world();
    write_times(&world, 2.0, &[(1, 1, 2.5), (4, 1, 3.0)]);
    assert!(!stderr(&world, &CHOOSE).contains("other programs"));
    let mut times: Value = serde_json::from_slice(&std::fs::read(world.path("l.json")).unwrap()).unwrap();
    times["busy_cores"] = json!(1.96);
    world.write("l.json", &times);
    let printed = stderr(&world, &CHOOSE);
    assert!(printed.contains("warning: l.json: other programs used 2.0 cores while its steps were timed"), "{printed}");
    let inspected = world.medusa(&["inspect", "l.json"]).output().unwrap().stdout;
    assert!(String::from_utf8(inspected).unwrap().contains("warning      other programs used 2.0 cores"));
}

#[test]
fn times_of_other_conditions_are_one_clear_error() {
    let world = world();
    let complaint = |more: &[&str], status| world.complaint(&[&CHOOSE[..], more].concat(), status);
    let absent = complaint(&[], 2);
    assert!(absent.contains("--latency l.json does not exist; give --backbone and --heads to measure it"), "{absent}");
    let full = complaint(&["--backbone", "b", "--heads", "h", "--context", "60"], 1);
    assert!(full.contains("a context of 60 tokens leaves no room") && full.contains("smaller --context"), "{full}");
    assert!(!world.path("l.json").exists());
    write_times(&world, 2.0, &[(1, 1, 2.5), (4, 1, 3.0)]);
    let dtype = complaint(&["--dtype", "bfloat16"], 1);
    assert!(dtype.contains("l.json was measured with dtype float32, not with bfloat16"), "{dtype}");
    let engine = complaint(&["--engine", "cpu"], 1);
    assert!(engine.contains("l.json was measured with engine auto, not with cpu"), "{engine}");
    let context = complaint(&["--context", "16"], 1);
    assert!(context.contains("a context of 32, not with 16"), "{context}");
    let others = threads() + 1;
    let output = world.medusa(&CHOOSE).env("OMP_NUM_THREADS", others.to_string()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(&format!("threads {}, not with {others}", threads())), "{said}");
    let mut other: Value = serde_json::from_slice(&std::fs::read(world.path("c.json")).unwrap()).unwrap();
    other["heads_sha256"] = json!("00");
    other.as_object_mut().and_then(|keys| keys.remove("checksum")).expect("a checksum");
    world.write("other.json", &other);
    let heads = world.complaint(&["tree", "--calibration", "other.json", "--latency", "l.json"], 1);
    assert!(heads.contains("measured with heads of sha256"), "{heads}");
    let made = ["tree", "--calibration", "other.json", "--latency", "new.json", "--backbone", "b", "--heads", "h"];
    let made = world.complaint(&made, 2);
    assert!(made.contains("other.json is a calibration of other heads than h"), "{made}");
    world.write("l.json", &json!({"plain_step_ms": 2}));
    assert!(complaint(&[], 1).contains("l.json holds no latencies"));
    assert!(complaint(&["--nodes", "3"], 2).contains("cannot be used with"));
    assert!(!world.path("t.json").exists() && !world.path("new.json").exists());
}
