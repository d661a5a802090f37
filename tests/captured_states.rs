//! Promise: heads trained on hidden states that a server captured, in the layout of vLLM and speculators, are those trained on the backbone
//! itself; decoder layers need not be there; and whatever is wrong with a file is told.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListArray, RecordBatch};
use arrow::datatypes::Int64Type;
use arrow::ipc::writer::StreamWriter;
use medusa::data::LoadSettings;
use medusa::data::captured::CapturedSet;
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::taps::Taps;
use medusa::model::weights::{WeightFiles, save};
use medusa::recipe::Recipe;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::launched_processes::{self, ended};
use super::published::published;
use super::small_run::SmallRun;

/// What a folder without decoder layers needs.
const OUTPUT: [&str; 3] = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"];
const TOLERANCE: f64 = 1e-5;

/// How the files of a server are written.
#[derive(Clone, Copy)]
struct Capture {
    /// The last of them is the backbone's last.
    layers: i64,
    kind: Kind,
    has_mask: bool,
}

const AS_SPECULATORS: Capture = Capture { layers: 4, kind: Kind::Float, has_mask: false };

impl Capture {
    /// `token_ids` and `hidden_states` of each row of some files, as vLLM computes them: each row alone. `rows.jsonl` becomes
    /// `states/hs_0.safetensors`, …
    fn of(self, small: &SmallRun, files: &[&str]) {
        let mut backbone =
            Llama::load(&small.path("backbone"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
        backbone.set_taps(Taps::new([backbone.config.num_hidden_layers])); // before the final norm
        fs::create_dir(small.path("states")).expect("a folder");
        let rows: Vec<Value> = files.iter().flat_map(|file| json_lines(&small.read(file))).collect();
        for (number, row) in rows.iter().enumerate() {
            self.write(&backbone, row, &small.path(&format!("states/hs_{number}.safetensors")));
        }
    }

    fn write(self, backbone: &Llama, row: &Value, path: &Path) {
        let [ids, labels] = ["input_ids", "labels"].map(|key| integers(&row[key]));
        let tokens_t = Tensor::from_slice(&ids);
        let mask = RowMask::causal(ids.len() as i64, &backbone.config, Device::Cpu);
        let states_1tw = backbone.hidden_states(&tokens_t.unsqueeze(0), &mask, Adapters::Off);
        let last_t1h = states_1tw.narrow(-1, backbone.config.hidden_size, backbone.config.hidden_size).transpose(0, 1);
        let others = Tensor::full(
            [ids.len() as i64, self.layers - 1, backbone.config.hidden_size],
            7.0,
            (Kind::Float, Device::Cpu),
        );
        let states_tlh = Tensor::cat(&[others, last_t1h], 1).to_kind(self.kind);
        let mask_t = Tensor::from_slice(&labels.iter().map(|&label| i64::from(label != -100)).collect::<Vec<_>>());
        let mut tensors = vec![("token_ids".to_owned(), &tokens_t), ("hidden_states".to_owned(), &states_tlh)];
        if self.has_mask {
            tensors.push(("loss_mask".to_owned(), &mask_t));
        }
        save(path, &tensors).expect("a place for states");
    }
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn integers(list: &Value) -> Vec<i64> {
    list.as_array().expect("a list").iter().map(|number| number.as_i64().expect("an integer")).collect()
}

/// Leaves of the backbone's weights what is read beside a server's states.
fn drop_layers(small: &SmallRun, wanted: &[&str]) {
    keep_weights(small, |name| wanted.contains(&name));
}

fn keep_weights(small: &SmallRun, is_kept: impl Fn(&str) -> bool) {
    let path = small.path("backbone/model.safetensors");
    let files = WeightFiles::open(&small.path("backbone")).expect("weights");
    let names: Vec<String> = files.names().into_iter().filter(|name| is_kept(name)).map(str::to_owned).collect();
    let tensor = |name: &String| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor").copy();
    let tensors: Vec<Tensor> = names.iter().map(tensor).collect();
    save(&path, &names.into_iter().zip(&tensors).collect::<Vec<_>>()).expect("a place for weights");
}

fn train_lines(small: &SmallRun, split: &str) -> Vec<Value> {
    json_lines(&small.read("run/metrics.jsonl")).into_iter().filter(|line| line["split"] == split).collect()
}

/// Trains on the backbone, then, without its layers, on states.
fn both(small: &SmallRun, capture: Capture) -> [(Vec<Value>, Vec<Value>, WeightFiles); 2] {
    capture.of(small, &["rows.jsonl", "validation.jsonl"]);
    small.edit("recipe.toml", "eval_every", "eval_answers = 0\neval_every"); // states have no backbone that answers
    let trained = || {
        small.train(&[]).succeeded();
        let heads = small.path("run/final/heads.safetensors");
        let kept = small.path("heads.safetensors");
        fs::copy(heads, &kept).expect("a copy");
        let all = (
            train_lines(small, "train"),
            train_lines(small, "validation"),
            WeightFiles::open_file(&kept).expect("heads"),
        );
        fs::remove_dir_all(small.path("run")).expect("a folder");
        fs::remove_file(kept).expect("a file"); // it stays mapped
        all
    };
    let of_backbone = trained();
    drop_layers(small, &OUTPUT);
    small.edit("recipe.toml", "[data]\n", "[data]\nhidden_states = \"states\"\n");
    [of_backbone, trained()]
}

fn numbers(line: &Value) -> Vec<f64> {
    let lists = ["head_losses", "head_top1"].map(|key| line[key].as_array().cloned().unwrap_or_default());
    let single = ["loss", "grad_norm", "tokens_per_step"].map(|key| line[key].clone());
    lists.concat().into_iter().chain(single).filter_map(|number| number.as_f64()).collect()
}

fn assert_same(what: &str, [of_backbone, of_states]: [(Vec<Value>, Vec<Value>, WeightFiles); 2]) {
    for (before, now) in [(&of_backbone.0, &of_states.0), (&of_backbone.1, &of_states.1)] {
        assert_eq!(before.len(), now.len(), "{what}");
        for (before, now) in before.iter().zip(now) {
            let (one, other) = (numbers(before), numbers(now));
            let is_near =
                one.len() > 2 && one.iter().zip(&other).all(|(a, b)| (a - b).abs() <= TOLERANCE * a.abs().max(1.0));
            assert!(is_near, "{what}: {before}\n{now}");
        }
    }
    assert_eq!(of_backbone.2.names(), of_states.2.names(), "{what}");
    for name in of_backbone.2.names() {
        let tensor = |heads: &WeightFiles| heads.mapped(name, &heads.shape(name).expect("a shape")).expect("a head");
        let difference = (tensor(&of_backbone.2) - tensor(&of_states.2)).abs().max().double_value(&[]);
        assert!(difference <= TOLERANCE, "{what}: {name} differs by {difference:e}");
    }
}

/// A run of 20 steps on the published stories260K, whose lm_head is its embedding; packed and shuffled.
fn stories() -> SmallRun {
    let small = SmallRun::new();
    let model = published("models/stories260K");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), small.path("backbone").join(name)).expect("a copy");
    }
    let text = fs::read_to_string(published("reference/losses/rows.jsonl")).expect("rows");
    let (train, held_out) =
        (text.lines().take(24).collect::<Vec<_>>(), text.lines().skip(24).take(4).collect::<Vec<_>>());
    small.write("rows.jsonl", train.join("\n"));
    small.write("validation.jsonl", held_out.join("\n"));
    small.edit("recipe.toml", "max_length = 40", "max_length = 512");
    small.edit("recipe.toml", "epochs = 8", "max_steps = 20");
    small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 1e-3");
    small
}

#[test]
fn heads_are_those_of_the_backbone_itself() {
    for (what, heads) in [
        ("medusa", "medusa_num_heads = 2\nmedusa_num_layers = 1"),
        ("hydra", "medusa_num_heads = 2\nmedusa_num_layers = 1\narchitecture = \"hydra\""),
    ] {
        let small = stories();
        small.edit("recipe.toml", "medusa_num_heads = 2\nmedusa_num_layers = 1", heads);
        assert_same(what, both(&small, AS_SPECULATORS));
    }
}

#[test]
fn every_kind_of_head_and_target_learns_from_states() {
    const MEDUSA: &str = "medusa_num_heads = 2\nmedusa_num_layers = 1";
    for (what, from, by) in [
        (
            "soft targets, one W2",
            "[data]",
            "[loss]\ntargets = { labels = 0.5, backbone = 0.5 }\non_unlabelled = true\n[data]",
        ),
        ("heads through the lm_head", MEDUSA, "medusa_num_heads = 2\nmedusa_num_layers = 1\nshared_lm_head = true"),
        ("a prefix layer", MEDUSA, "medusa_num_heads = 2\nmedusa_num_layers = 1\narchitecture = \"hydra++\""),
        ("rows in their order", "[data]", "[data]\nshuffle = false\npacking = false"),
    ] {
        let small = SmallRun::new();
        small.edit("recipe.toml", from, by);
        small.edit("recipe.toml", "epochs = 8", "epochs = 3");
        assert_same(what, both(&small, Capture { layers: 1, ..AS_SPECULATORS }));
    }
}

/// A run on states alone, in bfloat16, with masks in the files.
fn alone() -> SmallRun {
    let small = SmallRun::new();
    Capture { layers: 2, kind: Kind::BFloat16, has_mask: true }.of(&small, &["rows.jsonl"]);
    drop_layers(&small, &OUTPUT[1..]);
    small.edit(
        "recipe.toml",
        "train = [\"rows.jsonl\"]\nvalidation = [\"validation.jsonl\"]",
        "hidden_states = \"states\"\nvalidation_fraction = 0.2",
    );
    small
}

#[test]
fn files_with_masks_are_rows_and_a_resumed_run_ends_with_the_same_heads() {
    let small = alone();
    let plan = small.train(&["--check"]).succeeded().stdout;
    for fact in
        ["the last of 2 layers in bfloat16", "in 12 files in states", "12 rows with", "backbone, frozen          1568"]
    {
        assert!(plan.contains(fact), "expected {fact:?} in:\n{plan}");
    }
    let ended = small.train(&[]).succeeded();
    assert!(ended.stderr.contains("hidden states of the server the LM head predicts"), "{}", ended.stderr);
    let expected = small.bytes("run/final/heads.safetensors");
    for gone in ["final", "step-000021", "step-000024"] {
        let _ = fs::remove_dir_all(small.path("run").join(gone));
    }
    fs::rename(small.path("states"), small.path("moved")).expect("a folder");
    small.edit("recipe.toml", "\"states\"", "\"moved\"");
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == expected, "another place is no other data");
    let provenance: Value = serde_json::from_str(&small.read("run/provenance.json")).expect("JSON");
    assert_eq!(provenance["hidden_states"]["files"], 12);
    small.edit("recipe.toml", "epochs = 8", "epochs = 9");
    fs::copy(small.path("moved/hs_1.safetensors"), small.path("moved/hs_12.safetensors")).expect("a copy");
    small.train(&["--resume"]).failed(1, &["a run on other hidden states", "12 files", "13 files"]);
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"other\"");
    let checked = small.train(&["--check"]).succeeded();
    let repeated = "1 with the tokens of another one, whose states are taken (moved/hs_12.safetensors has those of moved/hs_1.safetensors)";
    assert!(format!("{}{}", checked.stdout, checked.stderr).contains(repeated), "{checked:?}");
}

/// The data set that `prepare_data.py` saves, as `datasets` does.
fn write_prepared(small: &SmallRun, rows: &[Value]) {
    let list = |of: fn(&Value) -> Vec<i64>| -> ArrayRef {
        let lists = rows.iter().map(|row| Some(of(row).into_iter().map(Some)));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let mask = |row: &Value| integers(&row["labels"]).into_iter().map(|label| i64::from(label != -100)).collect();
    let columns = [
        ("input_ids", list(|row| integers(&row["input_ids"]))),
        ("loss_mask", list(mask)),
        (
            "seq_len",
            Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| integers(&row["input_ids"]).len() as i64))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).expect("columns");
    fs::create_dir(small.path("output")).expect("a folder");
    let mut bytes = vec![];
    let mut writer = StreamWriter::try_new(&mut bytes, &batch.schema()).expect("a schema");
    writer.write(&batch).and_then(|()| writer.finish()).expect("memory");
    drop(writer);
    small.write("output/data-00000-of-00001.arrow", bytes);
    small.write("output/state.json", r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}"#);
    small.write("output/dataset_info.json", "{}");
    small.write("output/token_freq.pt", "");
}

#[test]
fn the_folder_that_speculators_prepares_is_read_as_it_is() {
    let small = SmallRun::new();
    let rows = json_lines(&small.read("rows.jsonl"));
    write_prepared(&small, &rows);
    AS_SPECULATORS.of(&small, &["rows.jsonl"]);
    fs::rename(small.path("states"), small.path("output/hidden_states")).expect("a folder");
    let data = "train = [\"output\"]\nhidden_states = \"output/hidden_states\"\nvalidation_fraction = 0.1";
    small.edit("recipe.toml", "train = [\"rows.jsonl\"]\nvalidation = [\"validation.jsonl\"]", data);
    let plan = small.train(&["--check"]).succeeded().stdout;
    let count = |of: fn(&Value) -> usize| rows.iter().map(of).sum::<usize>();
    let tokens = count(|row| integers(&row["input_ids"]).len());
    let learned = count(|row| integers(&row["labels"])[1..].iter().filter(|&&label| label != -100).count());
    assert!(plan.contains(&format!("12 rows with {tokens} tokens ({learned} with loss) in 1 file\n")), "{plan}");
    assert!(plan.contains("the last of 4 layers in float32") && !plan.contains("with the tokens of no row"), "{plan}");
}

#[test]
fn loss_on_all_tokens_needs_no_mask() {
    let small = alone();
    fs::remove_dir_all(small.path("states")).expect("a folder");
    let error = |small: &SmallRun| small.train(&["--check"]);
    error(&small).failed(2, &["data.hidden_states", "states does not exist"]);
    let without = SmallRun::new();
    AS_SPECULATORS.of(&without, &["rows.jsonl"]);
    without.edit(
        "recipe.toml",
        "train = [\"rows.jsonl\"]\nvalidation = [\"validation.jsonl\"]",
        "hidden_states = \"states\"",
    );
    without.edit("recipe.toml", "eval_every = 6\n", "");
    error(&without).failed(1, &["hs_0.safetensors: no tensor \"loss_mask\"", "data.loss_on = \"all\""]);
    without.edit("recipe.toml", "[data]", "[data]\nloss_on = \"all\"");
    let plan = error(&without).succeeded().stdout;
    let tokens: usize =
        json_lines(&without.read("rows.jsonl")).iter().map(|row| integers(&row["input_ids"]).len()).sum();
    assert!(plan.contains(&format!("12 rows with {tokens} tokens ({} with loss)", tokens - 12)), "{plan}");
}

/// Rewrites a file of states.
fn change(small: &SmallRun, number: usize, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    let path = small.path(&format!("states/hs_{number}.safetensors"));
    let file = WeightFiles::open_file(&path).expect("states");
    let tensor = |header: &medusa::model::weights::TensorHeader| {
        let kind = file.kind(&header.name).expect("a dtype");
        (header.name.clone(), file.mapped_as(&header.name, &header.shape, kind).expect("a tensor").copy())
    };
    let mut tensors: Vec<(String, Tensor)> = file.tensors().iter().map(tensor).collect();
    change(&mut tensors);
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
    save(&path, &tensors).expect("a place for states");
}

/// Changes the one tensor of this name.
fn with(small: &SmallRun, number: usize, name: &str, by: impl Fn(&Tensor) -> Tensor) {
    change(small, number, |tensors| {
        let (_, tensor) = tensors.iter_mut().find(|(found, _)| found == name).expect("the tensor");
        *tensor = by(tensor);
    });
}

#[test]
fn processes_read_the_states_of_their_own_rows() {
    let small = small_with_states();
    small.edit("recipe.toml", "epochs = 8", "epochs = 2");
    let heads = |name: &str| WeightFiles::open_file(&small.path(name).join("final/heads.safetensors")).expect("heads");
    small.train(&["--nproc", "2"]).succeeded();
    fs::rename(small.path("run"), small.path("of_two")).expect("a folder");
    small.train(&[]).succeeded();
    let (of_two, alone) = (heads("of_two"), heads("run"));
    for name in alone.names() {
        let tensor = |heads: &WeightFiles| heads.mapped(name, &heads.shape(name).expect("a shape")).expect("a head");
        let difference = (tensor(&of_two) - tensor(&alone)).abs().max().double_value(&[]);
        assert!(difference <= TOLERANCE, "{name} differs by {difference:e}");
    }
}

#[test]
fn processes_with_other_states_are_distinguished() {
    let [first, second] = [small_with_states(), small_with_states()];
    (0..15).for_each(|number| {
        with(&second, number, "hidden_states", |states| states.narrow(1, 2, 2).contiguous());
    });
    let differs = "rank 1 differs from rank 0 in the files of `data.hidden_states`: it has 15 files with ";
    launched_processes::both([&first, &second], &[]).map(ended).iter().for_each(|end| end.failed(1, &[differs]));
}

type Fault = (&'static str, &'static [&'static str], fn(&SmallRun));

/// What is wrong with a file, and what is told of it.
const FAULTS: [Fault; 9] = [
    ("no states", &["no tensor \"hidden_states\"", "only token_ids"], |small| {
        change(small, 3, |tensors| tensors.retain(|(name, _)| name == "token_ids"));
    }),
    ("other width", &["\"hidden_states\": expected shape [", "hidden size 32", "31]"], |small| {
        with(small, 3, "hidden_states", |states| states.narrow(2, 0, 31).contiguous());
    }),
    ("fewer states", &["\"hidden_states\": expected shape [", "token_ids, the backbone"], |small| {
        with(small, 3, "hidden_states", |states| states.narrow(0, 0, 5).contiguous());
    }),
    ("no layer", &["with the last layer, got [", ", 0, 32]"], |small| {
        with(small, 3, "hidden_states", |states| states.narrow(1, 0, 0).contiguous());
    }),
    ("fewer layers", &["expected 4 layers of float32, as in", "hs_0.safetensors, got 3 layers"], |small| {
        with(small, 3, "hidden_states", |states| states.narrow(1, 0, 3).contiguous());
    }),
    ("another dtype", &["\"hidden_states\": expected F32, BF16 or F16, got F64"], |small| {
        with(small, 3, "hidden_states", |states| states.to_kind(Kind::Double));
    }),
    ("a large id", &["\"token_ids\"[2]: expected a token id from 0 to 47", "got 48"], |small| {
        with(small, 3, "token_ids", |ids| {
            let _ = ids.get(2).fill_(48);
            ids.shallow_clone()
        });
    }),
    ("cut off", &["bytes, as its header says, got 900"], |small| {
        let bytes = small.bytes("states/hs_3.safetensors");
        small.write("states/hs_3.safetensors", &bytes[..900]);
    }),
    ("no safetensors", &["not a safetensors file", "it is an HTML page"], |small| {
        small.write("states/hs_3.safetensors", "<html>no</html>")
    }),
];

fn small_with_states() -> SmallRun {
    let small = SmallRun::new();
    AS_SPECULATORS.of(&small, &["rows.jsonl", "validation.jsonl"]);
    small.edit("recipe.toml", "[data]\n", "[data]\nhidden_states = \"states\"\n");
    small
}

/// The files as a run opens them.
fn opened(small: &SmallRun, skip_bad_rows: bool) -> Result<CapturedSet, String> {
    let settings = LoadSettings { skip_bad_rows, ..LoadSettings::new(48, NonZeroUsize::MAX) };
    let folder = small.path("states").display().to_string();
    CapturedSet::open(&folder, 32, &settings).map_err(|error| error.to_string())
}

#[test]
fn a_file_that_is_not_right_is_named_or_left_out() {
    for (what, facts, damage) in FAULTS {
        let small = small_with_states();
        damage(&small);
        let refused = opened(&small, false).expect_err(what);
        for fact in facts.iter().chain(&["data.hidden_states: ", "states/hs_3.safetensors"]) {
            assert!(refused.contains(fact), "{what}: expected {fact:?} in: {refused}");
        }
        let set = opened(&small, true).expect(what);
        let left_out: Vec<_> = set.left_out().values().map(|bad| (bad.rows, bad.first.contains("hs_3"))).collect();
        assert_eq!((set.files().len(), left_out), (14, vec![(1, true)]), "{what}");
    }
}

#[test]
fn a_damaged_file_stops_a_run_or_is_counted() {
    let small = small_with_states();
    small.write("states/hs_3.safetensors", "");
    small.train(&["--check"]).failed(1, &["hs_3.safetensors", "; --skip-bad-rows skips and counts such files"]);
    let plan = small.train(&["--check", "--skip-bad-rows"]).succeeded().stdout;
    let facts = [
        "in 14 files in states, 1 skipped (a damaged file",
        "11 rows with",
        "1 skipped (no hidden states; first row 3 of",
    ];
    for fact in facts {
        assert!(plan.contains(fact), "expected {fact:?} in:\n{plan}");
    }
}

#[test]
fn states_that_are_not_finite_end_the_run_or_are_skipped() {
    let small = small_with_states();
    let set = |value: f64| {
        with(&small, 3, "hidden_states", |states| {
            let _ = states.get(9).get(3).get(1).fill_(value);
            states.shallow_clone()
        });
    };
    set(f64::INFINITY);
    opened(&small, false).expect("no state is read");
    let left_out = opened(&small, true).expect("the others").left_out().values().next().expect("a file").first.clone();
    assert!(left_out.contains("got inf in layer 4 of 4, token 9"), "{left_out}");
    set(f64::NAN);
    small.train(&[]).failed(1, &["hs_3.safetensors", "\"hidden_states\": expected finite numbers, got NaN", "token 9"]);
    fs::remove_dir_all(small.path("run")).expect("a folder");
    small.edit("recipe.toml", "epochs = 8", "epochs = 1");
    let ended = small.train(&["--skip-bad-rows"]).succeeded();
    assert!(ended.stderr.contains("1 skipped (hidden states that are not finite; first"), "{}", ended.stderr);
}

#[test]
fn a_row_without_states_is_reported_with_what_its_file_has() {
    let small = small_with_states();
    with(&small, 3, "token_ids", |ids| {
        let _ = ids.get(2).fill_(41);
        ids.shallow_clone()
    });
    let facts = [
        "1 of 12 rows has no hidden states in states",
        "row 3 (counted from 0)",
        "hs_3.safetensors has token 41 at position 2",
    ];
    small.train(&["--check"]).failed(1, &facts);
    fs::remove_file(small.path("states/hs_3.safetensors")).expect("a file");
    small.train(&["--check"]).failed(1, &["row 3 (counted from 0)", "no file has these token_ids; let the server"]);
    small.train(&["--skip-bad-rows"]).succeeded();
    let lines = train_lines(&small, "train");
    assert!(lines[0]["tokens"].as_u64().is_some_and(|tokens| tokens > 0));
}

#[test]
fn rows_are_whole() {
    let small = small_with_states();
    small.edit("recipe.toml", "max_length = 40", "max_length = 17");
    small
        .train(&["--check"])
        .failed(2, &["longer than data.max_length = 17", "raise data.max_length (the longest file has 20 tokens)"]);
    small.edit("recipe.toml", "max_length = 17", "max_length = 17\nlong_rows = \"drop\"");
    let plan = small.train(&["--check"]).succeeded().stdout;
    assert!(plan.contains("dropped (longer than max_length)"), "{plan}");
}

#[test]
fn a_backbone_without_what_is_read_is_refused() {
    let small = small_with_states();
    drop_layers(&small, &["model.norm.weight"]);
    small.train(&["--check"]).failed(1, &["no tensor \"lm_head.weight\""]);
    let small = small_with_states();
    small.edit("recipe.toml", "medusa_num_layers = 1", "medusa_num_layers = 1\narchitecture = \"hydra\"");
    drop_layers(&small, &OUTPUT[1..]);
    small.train(&["--check"]).failed(1, &["no tensor \"model.embed_tokens.weight\""]);
}

#[test]
fn a_shard_with_decoder_layers_may_be_absent() {
    let small = small_with_states();
    let of = |name: &str| if OUTPUT.contains(&name) { "model-1.safetensors" } else { "model-2.safetensors" };
    let weights = WeightFiles::open(&small.path("backbone")).expect("weights");
    let map: serde_json::Map<String, Value> =
        weights.names().into_iter().map(|name| (name.to_owned(), of(name).into())).collect();
    drop_layers(&small, &OUTPUT);
    fs::rename(small.path("backbone/model.safetensors"), small.path("backbone/model-1.safetensors")).expect("a file");
    small.write("backbone/model.safetensors.index.json", json!({ "weight_map": map }).to_string());
    small.edit("recipe.toml", "epochs = 8", "epochs = 1");
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "hidden_states = \"states\"\n", "");
    small.edit("recipe.toml", "\"run\"", "\"other\"");
    small.train(&["--check"]).failed(1, &["model-2.safetensors is missing"]);
}

/// A run of one step on states of the stories' backbone.
fn stories_with_states(capture: Capture, decoder_layers: usize) -> SmallRun {
    let small = stories();
    let with_layers = |from: usize, to: usize| {
        let layers = |count: usize| format!("\"num_hidden_layers\": {count}");
        small.edit("backbone/config.json", &layers(from), &layers(to));
    };
    let [weights, whole] = ["backbone/model.safetensors", "whole.safetensors"].map(|name| small.path(name));
    fs::copy(&weights, &whole).expect("a copy");
    let later: Vec<String> = (decoder_layers..5).map(|layer| format!("model.layers.{layer}.")).collect();
    keep_weights(&small, |name| !later.iter().any(|layer| name.starts_with(layer)));
    with_layers(5, decoder_layers);
    capture.of(&small, &["rows.jsonl", "validation.jsonl"]);
    with_layers(decoder_layers, 5);
    fs::rename(&whole, &weights).expect("the whole backbone");
    small.edit("recipe.toml", "[data]\n", "[data]\nhidden_states = \"states\"\n");
    small.edit("recipe.toml", "max_steps = 20", "max_steps = 3");
    small
}

/// What a run says of its states, after a change of each file's.
fn judged(small: &SmallRun, change: impl Fn(&Tensor) -> Tensor) -> String {
    for number in 0..28 {
        with(small, number, "hidden_states", &change);
    }
    let said = small.train(&[]).succeeded().stderr;
    said.lines().find(|line| line.contains("hidden states of the server")).expect("a line about the states").to_owned()
}

#[test]
fn states_of_something_else_are_reported() {
    let noise = |states: &Tensor| {
        let noise = Tensor::arange(states.numel() as i64, (Kind::Double, Device::Cpu)).square().sin();
        noise.to_kind(Kind::Float).view_as(states)
    };
    let of_noise = judged(&stories_with_states(AS_SPECULATORS, 5), noise);
    assert!(
        of_noise.contains("warning: from") && of_noise.contains("which is no better than that guess"),
        "{of_noise}"
    );
    let alone = Capture { layers: 1, ..AS_SPECULATORS };
    let early = judged(&stories_with_states(alone, 1), Tensor::shallow_clone);
    assert!(early.contains("which is no better than that guess"), "{early}");
    let reversed = judged(&stories_with_states(AS_SPECULATORS, 5), |states| states.flip([1]));
    assert!(reversed.contains("worse than from layer 1 of 4"), "{reversed}");
    let right = stories_with_states(alone, 5);
    let weight_h = WeightFiles::open(&right.path("backbone")).expect("weights").mapped("model.norm.weight", &[64]);
    let weight_h = weight_h.expect("the final norm").to_kind(Kind::Float);
    let norm = |states: &Tensor| states / states.square().mean_dim(-1, true, Kind::Float).sqrt() * &weight_h;
    let normalised = judged(&right, |states| norm(states).contiguous());
    assert!(normalised.contains("they are as after the final norm"), "{normalised}");
    let unchanged = judged(&stories_with_states(alone, 5), Tensor::shallow_clone);
    assert!(unchanged.starts_with("from ") && !unchanged.contains("warning"), "{unchanged}");
}

#[test]
fn a_file_that_changes_while_it_is_used_is_reported() {
    let small = small_with_states();
    let files = opened(&small, false).expect("files").files().to_vec();
    let read = |number: usize| {
        let mut states = vec![0; files[number].state_bytes()];
        files[number].read_states(files[number].layers - 1, &[0], &mut states).map_err(|error| error.to_string())
    };
    read(3).expect("an unchanged file");
    with(&small, 3, "hidden_states", |states| states * 2.0);
    let path = small.path("states/hs_4.safetensors");
    fs::OpenOptions::new().append(true).open(path).and_then(|file| file.set_len(900)).expect("a shorter file");
    for number in [3, 4] {
        let error = read(number).expect_err("another file");
        let name = format!("hs_{number}.safetensors: changed since this run opened it: expected ");
        let facts = [name.as_str(), " bytes of 20"];
        facts.iter().for_each(|fact| assert!(error.contains(fact), "expected {fact:?} in: {error}"));
    }
    let tokens = files[3].token_ids(48).expect_err("another file").to_string();
    assert!(tokens.contains("changed since this run opened it"), "{tokens}");
}

#[test]
fn keys_that_do_not_go_with_states_are_refused() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[data]\n", "[data]\nhidden_states = \"states\"\n");
    let text = small.read("recipe.toml");
    Recipe::parse(Path::new("recipe.toml"), &text).expect("a recipe");
    for (from, by, fact) in [
        ("[stage.medusa1]", "[stage.medusa2]", "data.hidden_states needs [stage.medusa1]"),
        (
            "epochs = 8",
            "epochs = 8\nhidden_state_cache = \"c\"",
            "data.hidden_states and train.hidden_state_cache exclude each other",
        ),
        (
            "dtype = \"float32\"",
            "dtype = \"float32\"\nquantization = \"nf4\"",
            "no quantisation with data.hidden_states",
        ),
        ("max_length = 40", "max_length = 40\nlong_rows = \"truncate\"", "neither split nor cut"),
        ("train = [\"rows.jsonl\"]\n", "", "data.validation needs data.train"),
        ("train = [\"rows.jsonl\"]\n", "train = []\n", "data.train = []: expected at least one file"),
    ] {
        let text = text.replace(from, by);
        let error = Recipe::parse(Path::new("recipe.toml"), &text).expect_err(by).to_string();
        assert!(error.contains(fact), "expected {fact:?} in: {error}");
    }
}
