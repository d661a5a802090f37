//! Promise: `medusa calibrate` counts, for each head over its own targets, which of its guesses is right.

use medusa::draft::heads::import::HeadsFile;
use medusa::draft::heads::{HeadInput, Heads, HeadsArchitecture, HeadsShape};
use medusa::dtype::DraftDtype;
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::decoding::World;
use crate::small_run::without_checksum;

const TOP_K: usize = 40; // 40 of 264 tokens: even untrained heads are sometimes right

/// Counts straight from the definition: every head at every position, every guess.
fn counted_by_hand(world: &World, heads: &str, rows: &[(Vec<i64>, Vec<i64>)]) -> (Vec<Vec<u64>>, Vec<u64>) {
    let llama =
        Llama::load(&world.path("b"), Kind::Float, Device::Cpu, Purpose::Training).expect("the backbone of this test");
    let heads = Heads::load(&world.path(heads), &llama).expect("its heads").for_decoding(DraftDtype::default()); // in the dtype and layout of decoding
    let (mut counts, mut totals) = (vec![vec![0; TOP_K]; heads.num_heads()], vec![0; heads.num_heads()]);
    for (ids, labels) in rows {
        let mask = RowMask::causal(ids.len() as i64, &llama.config, Device::Cpu);
        let hidden_th = llama.hidden_states(&Tensor::from_slice(ids).unsqueeze(0), &mask, Adapters::Off).squeeze_dim(0);
        for head in 0..heads.num_heads() {
            for t in 0..ids.len() {
                let Some(&target) = labels.get(t + head + 2).filter(|&&label| label != -100) else { continue };
                let hidden_1h = hidden_th.narrow(0, t as i64, 1);
                let previous_1j = Tensor::from_slice(&ids[t + 1..t + head + 2]).unsqueeze(0);
                let previous_nj = heads.shape().reads().tokens.then_some(&previous_1j);
                let logits_v = heads.logits(head, &HeadInput { hidden_nh: &hidden_1h, previous_nj }, &llama).get(0);
                let better = logits_v.gt_tensor(&logits_v.get(target)).sum(Kind::Int64).int64_value(&[]) as usize;
                totals[head] += 1;
                if better < TOP_K {
                    counts[head][better] += 1;
                }
            }
        }
    }
    (counts, totals)
}

#[test]
fn counts_are_those_of_the_definition() {
    let world = World::new();
    let ids = |length: usize, step: usize| (0..length).map(|t| (4 + t * step % 5) as i64).collect::<Vec<_>>();
    let mut rows = vec![(ids(40, 1), ids(40, 1)), (ids(25, 2), ids(25, 2)), (ids(4, 3), ids(4, 3))];
    rows[1].1[..10].fill(-100);
    rows[0].1[17] = -100;
    let lines: Vec<Value> = rows.iter().map(|(ids, labels)| json!({"input_ids": ids, "labels": labels})).collect();
    world.lines("rows.jsonl", &lines);
    let top_k = TOP_K.to_string();
    let shape = HeadsShape { architecture: HeadsArchitecture::Hydra, ..heads_shape(&world) };
    std::fs::create_dir(world.path("hydra")).expect("a folder");
    Heads::random(shape, Kind::Float, Device::Cpu, 9).save(&world.path("hydra")).expect("a file of a test");
    let calibrate = |heads: &str| {
        let data = ["--data", "rows.jsonl", "--out", "c.json", "--top-k", &top_k];
        world.json(&[&["calibrate", "--backbone", "b", "--heads", heads], &data[..]].concat());
        counts_equal_those_by_hand(&world, heads, &rows);
    };
    calibrate("hydra");
    calibrate("h");
    let tree = ["tree", "--calibration", "c.json", "--nodes", "20", "--out", "t.json"];
    let said = |output: &std::process::Output| String::from_utf8(output.stderr.clone()).unwrap();
    let first = world.medusa(&tree).assert().success().get_output().clone();
    assert!(!said(&first).contains("will be replaced"), "{first:?}");
    let again = world.medusa(&tree).assert().success().get_output().clone();
    assert!(said(&again).contains("--out t.json exists and will be replaced"), "{again:?}");
}

#[test]
fn prompts_that_do_not_fit_are_counted_in_the_result() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"prompt_ids": vec![4; 65]}), json!({"prompt_ids": [4, 5]})]);
    let calibrate = ["calibrate", "--backbone", "b", "--heads", "h", "--top-k", "3", "--out", "c.json"];
    let of_prompts = [&calibrate[..], &["--prompts", "p.jsonl", "--max-new-tokens", "8", "--quiet"]].concat();
    assert_eq!(world.json(&of_prompts)[0]["too_long"], 1);
    world.write("rows.jsonl", &json!({"input_ids": [4, 5, 6, 7, 8, 9]}));
    assert_eq!(world.json(&[&calibrate[..], &["--data", "rows.jsonl"]].concat())[0].get("too_long"), None);
    let strict = world.complaint(&[&of_prompts[..], &["--strict"]].concat(), 1);
    assert!(strict.contains("cannot decode 1 of 2 prompts"), "{strict}");
}

fn heads_shape(world: &World) -> HeadsShape {
    HeadsFile::open(&world.path("h")).expect("heads").shape()
}

/// Sequential heads get the right tokens before their own.
fn counts_equal_those_by_hand(world: &World, heads: &str, rows: &[(Vec<i64>, Vec<i64>)]) {
    let written: Value = serde_json::from_slice(&std::fs::read(world.path("c.json")).expect("what calibrate wrote"))
        .expect("what calibrate wrote");
    let (counts, totals) = counted_by_hand(world, heads, rows);
    assert!(counts.iter().flatten().sum::<u64>() > 0, "no guess was right: nothing is tested");
    for (head, of_head) in written["heads"].as_array().expect("what calibrate wrote").iter().enumerate() {
        assert_eq!(
            (&of_head["counts"], &of_head["total"]),
            (&json!(counts[head]), &json!(totals[head])),
            "head {head}"
        );
        assert_eq!(of_head["accuracy"][0], json!(counts[head][0] as f64 / totals[head] as f64));
    }
    assert_eq!(written["tokens"], json!(69));
    assert_eq!(
        written["heads_sha256"],
        json!(medusa::files::sha256(&world.path(heads).join("heads.safetensors")).expect("what calibrate wrote"))
    );
    for path in written["joint"]["paths"].as_array().expect("what calibrate wrote") {
        let (guess, count) = (
            path["path"][0].as_u64().expect("what calibrate wrote") as usize,
            path["count"].as_u64().expect("what calibrate wrote"),
        );
        assert!(count <= counts[0][guess], "a path is right no more often than its first guess");
    }
}

#[test]
fn what_cannot_be_calibrated_is_one_clear_error_and_no_file() {
    let world = World::new();
    let complaint = |row: Value, more: &[&str]| {
        world.write("rows.jsonl", &row);
        let all = ["calibrate", "--backbone", "b", "--heads", "h", "--data", "rows.jsonl", "--out", "c.json"];
        let text = world.complaint(&[&all[..], more].concat(), 1);
        assert!(!world.path("c.json").exists());
        text
    };
    let short = complaint(json!({"input_ids": [4, 5, 6], "labels": [4, 5, 6]}), &[]);
    assert!(short.contains("no row has a target for head 2; it needs rows of at least 4 tokens"), "{short}");
    let row = || json!({"input_ids": [4, 5, 6, 7, 4, 5], "labels": [4, 5, 6, 7, 4, 5]});
    let wide = complaint(row(), &["--top-k", "1000"]);
    assert!(wide.contains("top-k is 1000; expected 1 to 264, the tokens that the heads can guess"), "{wide}");
    let unknown = complaint(json!({"input_ids": [4, 5, 600], "labels": [4, 5, 600]}), &[]);
    assert!(unknown.contains("600"), "{unknown}");
}

#[test]
fn bad_rows_are_skipped_and_counted_where_asked() {
    let world = World::new();
    let row = json!({"input_ids": [4, 5, 6, 7, 4, 5], "labels": [4, 5, 6, 7, 4, 5]});
    let calibrate = ["calibrate", "--backbone", "b", "--heads", "h", "--data", "rows.jsonl", "--out", "c.json"];
    world.lines("rows.jsonl", std::slice::from_ref(&row));
    let of_good = world.json(&calibrate);
    world.lines("rows.jsonl", &[row, json!({"input_ids": [4, 5, 600]})]);
    assert!(world.complaint(&calibrate, 1).contains("600"));
    let skips = [&calibrate[..], &["--skip-bad-rows"]].concat();
    assert_eq!(world.json(&skips), of_good);
    let output = world.medusa(&skips).assert().success().get_output().clone();
    assert!(String::from_utf8(output.stderr).expect("UTF-8").contains(", 1 skipped ("));
}

fn merge<'a>(files: &[&'a str]) -> Vec<&'a str> {
    [&["calibrate", "--out", "merged.json", "--merge"][..], files].concat()
}

/// The rows of several machines, one of them without a single target of the second head.
#[test]
fn merged_shares_are_the_file_of_one_machine() {
    let world = World::new();
    let ids = |row: usize| (0..3 + row * 7 % 19).map(|t| 4 + (t * (1 + row % 3)) % 5).collect::<Vec<_>>();
    let mut rows: Vec<Value> = (0..23).map(|row| json!({"input_ids": ids(row), "labels": ids(row)})).collect();
    for row in [2, 6, 10, 14, 18, 22] {
        rows[row] = json!({"input_ids": [4, 5, 6], "labels": [4, 5, 6]});
    }
    world.lines("rows.jsonl", &rows);
    let calibrate = |out: &str, more: &[&str]| {
        let all = ["calibrate", "--backbone", "b", "--heads", "h", "--data", "rows.jsonl", "--out", out];
        world.json(&[&all[..], more].concat())
    };
    let bytes = |name: &str| std::fs::read(world.path(name)).expect("what calibrate wrote");
    calibrate("whole.json", &["--top-k", "20"]);
    for share in ["1", "2", "3", "4"] {
        calibrate(&format!("{share}.json"), &["--top-k", "20", "--shard", &format!("{share}/4")]);
    }
    world.json(&merge(&["3.json", "1.json", "4.json", "2.json"]));
    assert!(bytes("merged.json") == bytes("whole.json"), "byte by byte");
    let missing = world.complaint(&merge(&["3.json", "1.json"]), 1);
    assert!(missing.contains("shares are missing: 2/4, 4/4; make each with medusa calibrate --shard"), "{missing}");
    std::fs::copy(world.path("3.json"), world.path("again.json")).expect("a copy");
    let double = world.complaint(&merge(&["3.json", "1.json", "again.json"]), 1);
    assert!(double.contains("share 3/4 is there twice: 3.json and again.json"), "{double}");
    let own = world.complaint(&[&["calibrate", "--out", "3.json", "--merge"][..], &["3.json", "1.json"]].concat(), 2);
    assert!(own.contains("--out 3.json would replace --merge"), "{own}");
    let on_cpu = without_checksum(&String::from_utf8(bytes("2.json")).expect("JSON"));
    let on_gpu = on_cpu.replace("\"device\":\"cpu\"", "\"device\":\"cuda\"");
    medusa::files::write_atomic(&world.path("on_gpu.json"), |out| std::io::Write::write_all(out, on_gpu.as_bytes()))
        .expect("a file");
    let other = world.complaint(&merge(&["1.json", "on_gpu.json"]), 1);
    assert!(other.contains("on_gpu.json: device: expected cpu as in 1.json, got cuda"), "{other}");
    calibrate("other.json", &["--top-k", "21", "--shard", "2/4"]);
    let other = world.complaint(&merge(&["1.json", "other.json"]), 1);
    assert!(other.contains("other.json: top_k: expected 20 as in 1.json, got 21"), "{other}");
    rows[0] = json!({"input_ids": [4, 5, 6, 7]});
    world.lines("rows.jsonl", &rows);
    calibrate("other.json", &["--top-k", "20", "--shard", "2/4"]);
    let other = world.complaint(&merge(&["1.json", "other.json"]), 1);
    assert!(other.contains("other.json: rows_sha256: expected"), "{other}");
    let tree = world.complaint(&["tree", "--calibration", "1.json", "--nodes", "4", "--out", "t.json"], 1);
    assert!(tree.contains("1.json is share 1/4 of a calibration; merge all shares"), "{tree}");
    let whole = world.complaint(&merge(&["whole.json"]), 1);
    assert!(whole.contains("whole.json is no share of a calibration"), "{whole}");
    assert_eq!(world.json(&["inspect", "1.json"])[0]["share"], json!("1/4"));
}
