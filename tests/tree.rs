//! Promise: published trees load, and `medusa tree` writes the best tree for the calibration or explains why it cannot.

use std::io::Write as _;
use std::path::Path;

use assert_cmd::Command;
use medusa::files::write_atomic;
use medusa::tree::search::search;
use medusa::tree::sparse_tree::SparseTree;
use serde_json::{Value, json};

use crate::program::medusa;
use crate::published::published;

fn reference(name: &str) -> Value {
    let path = published("reference").join(name);
    serde_json::from_slice(&std::fs::read(path).expect("a fixture")).expect("JSON")
}

fn write(path: &Path, content: &Value) {
    write_atomic(path, |out| write!(out, "{content}")).expect("a file of a test");
}

fn tree(arguments: &[&str], folder: &Path) -> Command {
    let mut command = medusa(&["tree"]);
    command.args(arguments).current_dir(folder);
    command
}

#[test]
fn published_trees_load_as_bare_lists() {
    let dir = tempfile::tempdir().unwrap();
    let published = reference("medusa_choices.json");
    let published = published.as_object().unwrap();
    assert_eq!(published.len(), 11);
    for (name, choices) in published {
        let path = dir.path().join("choices.json");
        write(&path, choices);
        let tree = SparseTree::load(&path).unwrap_or_else(|error| panic!("{name}: {error}")).0;
        assert_eq!(tree.choices().len(), if name == "hydra/single" { 1 } else { 63 }, "{name}");
        assert_eq!(json!(tree.choices()), *choices, "{name}: the order is kept");
        assert_eq!(tree.check_fits(5, 10), Ok(()), "{name}: for 5 heads of 10 guesses");
    }
}

/// Published accuracies of five heads (top-1 to top-5, cumulative), and the expected tokens per step of trees of 63
/// nodes for them.
#[test]
fn published_accuracies_promise_what_was_computed_for_them() {
    let published = reference("medusa_acc.json");
    for (model, expected) in [("7b", 2.38), ("13b", 2.48), ("33b", 2.52)] {
        let heads = published[model]["heads"].as_array().unwrap();
        let top = |head: &Value, k: usize| head[format!("top{k}")].as_f64().unwrap_or(0.0); // there is no top-0
        let of_guesses = |head| (1..=5).map(|k| top(head, k) - top(head, k - 1)).collect();
        let accuracies: Vec<Vec<f64>> = heads.iter().map(of_guesses).collect();
        let found = search(&accuracies, 63).unwrap();
        assert!(
            (found.expected_tokens_per_step - expected).abs() < 0.006,
            "{model}: {}",
            found.expected_tokens_per_step
        );
    }
}

fn calibration(accuracies: &[&[f64]]) -> Value {
    let head = |accuracy: &&[f64]| {
        let counts: Vec<u64> = accuracy.iter().map(|a| (a * 1000.0).round() as u64).collect();
        json!({"counts": counts, "total": 1000, "accuracy": accuracy})
    };
    let heads: Vec<Value> = accuracies.iter().map(head).collect();
    json!({"heads": heads, "joint": {"total": 0, "paths": []}, "backbone": "b", "heads_sha256": "00", "tokens": 500})
}

#[test]
fn the_tree_is_written_in_the_order_of_the_search() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("c.json"), &calibration(&[&[0.5, 0.25], &[0.5, 0.25]]));
    let arguments = ["--calibration", "c.json", "--nodes", "4"];
    let printed = tree(&arguments, dir.path()).output().unwrap();
    tree(&[&arguments[..], &["--out", "t.json"]].concat(), dir.path()).assert().success().stdout("");
    let written = std::fs::read_to_string(dir.path().join("t.json")).unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), written);
    let sha256 = medusa::files::sha256(&dir.path().join("c.json")).unwrap();
    let expected = json!({"choices": [[0], [1], [0, 0], [0, 1]], "expected_tokens_per_step": 2.125, "nodes": 4,
                          "calibration_sha256": sha256});
    let mut without_checksum: Value = serde_json::from_str(&written).unwrap();
    assert!(without_checksum.as_object_mut().unwrap().remove("checksum").is_some());
    assert_eq!(without_checksum, expected);
    let (loaded, _) = SparseTree::load(&dir.path().join("t.json")).unwrap();
    assert_eq!(loaded, SparseTree::new(vec![vec![0], vec![1], vec![0, 0], vec![0, 1]]).unwrap());
}

/// Head 1's second guess is less accurate than its first, but head 2 is only right after the second guess.
#[test]
fn paths_that_are_right_together_are_preferred_to_products() {
    let dir = tempfile::tempdir().unwrap();
    let mut together = calibration(&[&[0.6, 0.4], &[0.4, 0.0]]);
    let path = |path: &[usize], count: u64| json!({"path": path, "count": count});
    together["joint"] = json!({"total": 1000, "paths": [path(&[0], 600), path(&[1], 400), path(&[1, 0], 390)]});
    write(&dir.path().join("c.json"), &together);
    let choices = |more: &[&str]| {
        let arguments = [&["--calibration", "c.json", "--nodes", "3"][..], more].concat();
        let output = tree(&arguments, dir.path()).assert().success().get_output().clone();
        let written: Value = serde_json::from_slice(&output.stdout).unwrap();
        (written["choices"].clone(), String::from_utf8(output.stderr).unwrap())
    };
    let (joint, said) = choices(&[]);
    assert_eq!(joint, json!([[0], [1], [1, 0]]));
    assert!(said.contains("2.3") && said.contains("(2.160 if heads were independent)"), "{said}");
    let (products, said) = choices(&["--independent"]);
    assert_eq!(products, json!([[0], [1], [0, 0]]));
    assert!(said.contains("2.240 expected tokens per step, assuming independent heads"), "{said}");
}

#[test]
fn a_tree_that_needs_fewer_heads_than_there_are_says_so() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("c.json"), &calibration(&[&[0.6, 0.3], &[0.5, 0.1], &[0.1, 0.1]]));
    for (nodes, heads) in [("3", "the first 2 of 3 heads"), ("8", "3 heads")] {
        let arguments = ["--calibration", "c.json", "--nodes", nodes];
        let output = tree(&arguments, dir.path()).assert().success().get_output().clone();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with(&format!("{nodes} nodes over {heads}: ")), "{said}");
    }
}

#[test]
fn a_picture_of_the_tree_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("c.json"), &calibration(&[&[0.5, 0.25], &[0.5, 0.25]]));
    let arguments = ["--calibration", "c.json", "--nodes", "4", "--out", "t.json", "--svg", "t.svg"];
    tree(&arguments, dir.path()).assert().success().stdout("");
    let svg = std::fs::read_to_string(dir.path().join("t.svg")).unwrap();
    assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && svg.contains("prefers-color-scheme: dark"));
    assert_eq!((svg.matches("<circle").count(), svg.matches("class=\"edge\"").count()), (5, 4));
    assert!(svg.contains("4 nodes, 2.12 tokens per step") && svg.contains("[0, 1]: 0.1250"), "{svg}");
}

#[test]
fn what_cannot_be_searched_is_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("c.json"), &calibration(&[&[0.5, 0.25]]));
    write(&dir.path().join("none.json"), &json!([[0]]));
    let complaint = |arguments: &[&str], status: i32| {
        let output = tree(arguments, dir.path()).assert().code(status).get_output().clone();
        assert!(output.stdout.is_empty());
        String::from_utf8(output.stderr).unwrap()
    };
    let many = complaint(&["--calibration", "c.json", "--nodes", "3"], 1);
    assert!(many.contains("1 heads with the calibrated guesses make only 2"), "{many}");
    let kind = complaint(&["--calibration", "none.json", "--nodes", "1"], 1);
    assert!(kind.starts_with("error: none.json is no calibration"), "{kind}");
    assert!(complaint(&["--calibration", "c.json", "--nodes", "0"], 2).contains("--nodes"));
    assert!(complaint(&["--nodes", "3"], 2).contains("--calibration"));
    let size = complaint(&["--calibration", "c.json"], 2);
    assert!(size.contains("<--nodes <N>|--latency <L>>"), "{size}");
    let mut nothing = calibration(&[&[0.5, 0.25], &[0.0, 0.0]]);
    nothing["heads"][1]["total"] = json!(0);
    write(&dir.path().join("none.json"), &nothing);
    let total = complaint(&["--calibration", "none.json", "--nodes", "1"], 1);
    assert!(total.contains("none.json: head 2 has a total of 0 targets"), "{total}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left behind");
}
