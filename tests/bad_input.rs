//! Bad input produces one error with the file, the expected and the actual value, and the documented exit status; it
//! leaves nothing behind.

use std::fs;
use std::path::Path;

use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use medusa::model::weights::{WeightFiles, save};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::small_run::{Ended, SmallRun};

const WEIGHTS: &str = "backbone/model.safetensors";

/// Damages the folder before the program runs; the error must contain these facts.
type Case = (fn(&SmallRun), &'static [&'static str]);

/// Runs `medusa-train` with and without `--check`: both fail with the same error and leave the folder unchanged.
fn refused_by_training(status: i32, cases: &[Case]) {
    for (spoil, facts) in cases {
        let small = SmallRun::new();
        spoil(&small);
        // The token cache is outside the user's folders and keeps valid rows.
        let names = || small.names(".").into_iter().filter(|name| name != "token_cache").collect::<Vec<_>>();
        let before = names();
        for arguments in [&["--check"][..], &[]] {
            small.train(arguments).failed(status, facts);
            assert_eq!(names(), before, "{facts:?}: something was left behind");
        }
    }
}

/// Runs `medusa generate` and `medusa bench` with heads, tree and prompts that are valid except for one thing.
fn refused_by_decoding(cases: &[Case]) {
    for (spoil, facts) in cases {
        let small = SmallRun::new();
        small.write_tokenizer(48);
        write_heads(&small, "heads", SHAPE);
        small.write("tree.json", "[[0], [1], [0, 0]]");
        small.write("prompts.jsonl", r#"{"prompt_ids": [1, 2, 3]}"#);
        spoil(&small);
        let before = small.names(".");
        for verb in ["generate", "bench"] {
            let inputs =
                "--backbone backbone --heads heads --tree tree.json --prompts prompts.jsonl --max-new-tokens 4";
            let arguments: Vec<&str> = [verb].into_iter().chain(inputs.split(' ')).collect();
            let ended = small.medusa(&arguments);
            ended.failed(1, facts);
            assert_eq!((ended.stdout.as_str(), small.names(".")), ("", before.clone()), "{verb}: {facts:?}");
        }
    }
}

/// The shape of heads that fit the backbone.
const SHAPE: HeadsShape = HeadsShape {
    architecture: HeadsArchitecture::Medusa,
    medusa_num_heads: 2,
    medusa_num_layers: 1,
    hidden_size: 32,
    vocab_size: 48,
    w2_bias: false,
    w2_rank: 0,
    shared_w2: false,
};

fn write_heads(small: &SmallRun, folder: &str, shape: HeadsShape) {
    fs::create_dir_all(small.path(folder)).expect("a folder");
    Heads::random(shape, Kind::Float, Device::Cpu, 1).save(&small.path(folder)).expect("heads");
}

fn cut(small: &SmallRun, name: &str, bytes: usize) {
    let whole = small.bytes(name);
    small.write(name, &whole[..whole.len() - bytes]);
}

fn add_row(small: &SmallRun, row: &str) {
    let rows = small.read("rows.jsonl");
    small.write("rows.jsonl", format!("{rows}{row}\n"));
}

fn start_from(small: &SmallRun, shape: HeadsShape) {
    write_heads(small, "start", shape);
    small.edit("recipe.toml", "[heads]", "[heads]\ninit_from = \"start\"");
}

/// Starts from heads that can guess two tokens, neither of which is a label.
fn start_from_other_tokens(small: &SmallRun) {
    start_from(small, HeadsShape { vocab_size: 2, ..SHAPE });
    let map = Tensor::from_slice(&[46_i64, 47]);
    rewrite(small, "start/heads.safetensors", |all| all.push(("token_map".into(), map)));
    small.edit("recipe.toml", "[stage.medusa1]", "draft_vocab_size = 2\n[stage.medusa1]");
    let row =
        |row: usize| json!({ "input_ids": (0..30).map(|t| (t * 7 + row) % 46).collect::<Vec<_>>() }).to_string() + "\n";
    small.write("rows.jsonl", (0..6).map(row).collect::<String>());
}

fn tensors(path: &Path) -> Vec<(String, Tensor)> {
    let files = WeightFiles::open_file(path).expect("weights");
    let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor").copy();
    files.names().into_iter().map(|name| (name.to_owned(), read(name))).collect()
}

fn rewrite(small: &SmallRun, name: &str, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    let mut all = tensors(&small.path(name));
    change(&mut all);
    save(&small.path(name), &all.iter().map(|(name, tensor)| (name.clone(), tensor)).collect::<Vec<_>>())
        .expect("weights");
}

fn split_and_lose_the_second_shard(small: &SmallRun) {
    let of = |name: &str| format!("model-0000{}-of-00002.safetensors", if name == "lm_head.weight" { 2 } else { 1 });
    let names = tensors(&small.path(WEIGHTS)).into_iter().map(|(name, _)| name);
    let map: serde_json::Map<String, Value> = names.map(|name| (name.clone(), of(&name).into())).collect();
    small.write("backbone/model.safetensors.index.json", json!({"weight_map": map}).to_string());
    fs::rename(small.path(WEIGHTS), small.path(&format!("backbone/{}", of("another")))).expect("another name");
}

fn write_header(small: &SmallRun, says: u64, header: &str) {
    small.write(WEIGHTS, [&says.to_le_bytes()[..], header.as_bytes(), &[0; 24]].concat());
}

#[test]
fn a_damaged_backbone() {
    const OVERLAPPING: &str = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}"#;
    refused_by_training(
        1,
        &[
            (
                split_and_lose_the_second_shard,
                &["backbone/model-00002-of-00002.safetensors is missing", "index.json", "1 of 2 shards"],
            ),
            (|small| cut(small, WEIGHTS, 10), &["backbone/model.safetensors: not a whole safetensors file", "cut off"]),
            (
                |small| write_header(small, u64::MAX, "{}"),
                &["backbone/model.safetensors: not a whole safetensors file"],
            ),
            (|small| write_header(small, 1 << 28, "{}"), &["backbone/model.safetensors: not a whole safetensors file"]),
            (
                |small| write_header(small, OVERLAPPING.len() as u64, OVERLAPPING),
                &["backbone/model.safetensors: not a whole safetensors file"],
            ),
            (
                |small| small.edit("backbone/config.json", r#""intermediate_size": 48"#, r#""intermediate_size": 50"#),
                &[WEIGHTS, "mlp.gate_proj.weight", "expected shape [50, 32], got [48, 32]", "config.json"],
            ),
            (
                |small| {
                    rewrite(small, WEIGHTS, |all| {
                        let norm = all.iter_mut().find(|(name, _)| name == "model.norm.weight").expect("the norm");
                        norm.1 = Tensor::ones([32], (Kind::Int64, Device::Cpu));
                    });
                },
                &[WEIGHTS, "model.norm.weight", "expected F64, F32, BF16 or F16, got I64"],
            ),
            (|small| small.write_tokenizer(49), &["backbone/tokenizer.json", "\"w48\"", "id 48", "vocab_size 48"]),
            (|small| small.write("backbone/tokenizer.json", "{}"), &["backbone/tokenizer.json"]),
        ],
    );
}

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n";
const PAGE: &str = "<!DOCTYPE html>\n<html><body>Sign in</body></html>\n";

fn utf_16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn what_took_the_place_of_a_file_is_named() {
    let spoil: fn(&SmallRun) = |small| small.write("backbone/config.json", PAGE);
    refused_by_training(2, &[(spoil, &["backbone/config.json: it is an HTML page"])]);
    refused_by_training(
        1,
        &[
            (
                |small| small.write(WEIGHTS, POINTER),
                &["backbone/model.safetensors: it is a Git LFS pointer", "git lfs pull"],
            ),
            (|small| small.write(WEIGHTS, PAGE), &["backbone/model.safetensors: it is an HTML page"]),
            (|small| small.write("rows.jsonl", POINTER), &["rows.jsonl: it is a Git LFS pointer"]),
            (|small| small.write("rows.jsonl", PAGE), &["rows.jsonl: it is an HTML page"]),
            (
                |small| small.write("rows.jsonl", utf_16(&format!("\u{feff}{}", small.read("rows.jsonl")))),
                &["rows.jsonl: it is text in UTF-16; convert it to UTF-8"],
            ),
            (
                |small| small.write("rows.jsonl", utf_16(&small.read("rows.jsonl"))),
                &["rows.jsonl: it is text in UTF-16; convert it to UTF-8"],
            ),
        ],
    );
    refused_by_decoding(&[
        (|small| small.write("heads/heads.safetensors", POINTER), &["heads.safetensors: it is a Git LFS pointer"]),
        (|small| small.write("backbone/tokenizer.json", POINTER), &["tokenizer.json: it is a Git LFS pointer"]),
        (|small| small.write("backbone/tokenizer_config.json", PAGE), &["tokenizer_config.json: it is an HTML page"]),
        (|small| small.write("prompts.jsonl", POINTER), &["prompts.jsonl", "it is a Git LFS pointer"]),
        (|small| small.write("prompts.jsonl", utf_16("{\"prompt_ids\": [1]}")), &["prompts.jsonl", "UTF-16"]),
        (|small| small.write("tree.json", PAGE), &["tree.json", "it is an HTML page"]),
    ]);
}

#[test]
fn rows_that_do_not_fit() {
    refused_by_training(
        1,
        &[
            (
                |small| add_row(small, r#"{"input_ids": [1, 48, 2]}"#),
                &["rows.jsonl, line 13: input_ids[1]: expected a token id from 0 to 47", "got 48"],
            ),
            (
                |small| add_row(small, r#"{"input_ids": [1, 2, 3], "labels": [1, 2]}"#),
                &["rows.jsonl, line 13: labels: expected 3 values", "got 2; --skip-bad-rows skips"],
            ),
            (|small| small.write("rows.jsonl", ""), &["no row to use in rows.jsonl"]),
            (|small| small.write("validation.jsonl", "[]\n"), &["no row to use in validation.jsonl"]),
            (
                |small| small.write("validation.jsonl", "[\n{\"input_ids\": [1, 2]},\n{]"),
                &["validation.jsonl: not a valid JSON array of rows, line 3, column 2"],
            ),
            (
                |small| add_row(small, r#"{"messages": [{"role": "user", "content": "Hi"}]}"#),
                &["rows.jsonl, line 13: a row of \"messages\" needs the backbone's tokenizer.json or tokenizer.model"],
            ),
            (
                |small| small.write("validation.jsonl", r#"{"input_ids": [1, -1]}"#),
                &["validation.jsonl, line 1: input_ids[1]", "got -1"],
            ),
        ],
    );
}

#[test]
fn heads_to_start_from_that_do_not_fit() {
    refused_by_training(
        1,
        &[
            (
                |small| start_from(small, HeadsShape { hidden_size: 16, ..SHAPE }),
                &["heads.init_from", "start/heads.safetensors: hidden size: expected 32, got 16"],
            ),
            (
                |small| start_from(small, HeadsShape { vocab_size: 47, ..SHAPE }),
                &["heads.init_from", "start/heads.safetensors: vocabulary: expected 48, got 47"],
            ),
            (
                |small| {
                    start_from(small, SHAPE);
                    cut(small, "start/heads.safetensors", 4);
                },
                &["heads.init_from", "start/heads.safetensors: not a whole safetensors file"],
            ),
        ],
    );
}

#[test]
fn a_recipe_that_is_wrong_is_a_wrong_command() {
    refused_by_training(
        2,
        &[
            (
                |small| small.edit("recipe.toml", "epochs", "epoch"),
                &["recipe.toml: line 19, column 1: unknown key `epoch`"],
            ),
            (
                |small| small.edit("recipe.toml", "\"backbone\"", "\"nowhere\""),
                &["recipe.toml: line 2, column 8: backbone.path: nowhere does not exist"],
            ),
            (
                |small| fs::remove_file(small.path("rows.jsonl")).expect("a file"),
                &["recipe.toml: line 9, column 9: data.train: data file rows.jsonl does not exist"],
            ),
            (
                |small| small.write("backbone/config.json", "{"),
                &["recipe.toml: line 2, column 8", "config.json", "line 1"],
            ),
            (
                |small| fs::remove_file(small.path("recipe.toml")).expect("a file"),
                &["cannot read the recipe recipe.toml"],
            ),
            (
                |small| start_from(small, HeadsShape { medusa_num_heads: 3, ..SHAPE }),
                &[
                    "heads.init_from start",
                    "medusa_num_heads = 2",
                    "got architecture = \"medusa\", medusa_num_heads = 3",
                ],
            ),
            (
                |small| start_from(small, HeadsShape { vocab_size: 0, ..SHAPE }),
                &["heads.init_from start", "expected", "their own output layer", "got", "the backbone's lm_head"],
            ),
            (
                start_from_other_tokens,
                &[
                    "heads.init_from start: its token_map of 2 tokens holds none of the labels",
                    "loss.targets = \"backbone\"",
                ],
            ),
        ],
    );
}

#[test]
fn a_value_that_cannot_be_used_is_a_wrong_command() {
    refused_by_training(
        2,
        &[
            (
                |small| small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 25"),
                &["schedule.warmup_steps = 25", "only 24 optimizer steps"],
            ),
            (
                |small| {
                    small.write("broken.jinja", "{% for m in messages %}");
                    small.edit("recipe.toml", "max_length = 40", "max_length = 40\nchat_template = \"broken.jinja\"");
                },
                &["broken.jinja: the chat template cannot be used"],
            ),
            (
                |small| {
                    small.edit("recipe.toml", "micro_batch_size = 1", "micro_batch_size = 1000000000000000000");
                },
                &["train.micro_batch_size = 1000000000000000000: expected at most 1048576"],
            ),
            (
                |small| {
                    small.edit("recipe.toml", "micro_batch_size = 1", "micro_batch_size = 8");
                    let many = "accumulation_steps = 4611686018427387904";
                    small.edit("recipe.toml", "accumulation_steps = 2", many);
                },
                &["train.micro_batch_size = 8", "train.gradient_accumulation_steps = 4611686018427387904"],
            ),
            (
                |small| small.edit("recipe.toml", "epochs = 8", "epochs = 9223372036854775807"),
                &["train.epochs = 9223372036854775807 of 3 optimizer steps each", "train.gradient_accumulation_steps"],
            ),
        ],
    );
}

#[test]
fn heads_without_a_label_to_guess_can_learn_from_the_backbone() {
    let small = SmallRun::new();
    start_from_other_tokens(&small);
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa1]\n[loss]\ntargets = \"backbone\"");
    let printed = small.train(&["--check"]).succeeded().stdout;
    assert!(printed.contains("2 of 48 tokens, 0.00 % of the labels"), "{printed}");
}

fn change(small: &SmallRun, part: &str, change: impl FnOnce(&mut Tensor)) {
    rewrite(small, WEIGHTS, |all| {
        change(&mut all.iter_mut().find(|(name, _)| name.ends_with(part)).expect("its name").1);
    });
}

fn run(small: &SmallRun, arguments: &str) -> Ended {
    small.medusa(&arguments.split(' ').collect::<Vec<_>>())
}

#[test]
fn a_weight_with_nan_is_refused_where_it_is_read() {
    let spoilt = |part: &str| {
        let small = SmallRun::new();
        small.write_tokenizer(48);
        write_heads(&small, "heads", SHAPE);
        small.write("prompts.jsonl", "{\"prompt_ids\": [3, 4]}\n");
        change(&small, part, |weight| drop(weight.view([-1]).narrow(0, 5, 1).fill_(f64::NAN)));
        small
    };
    let generate = "generate --backbone backbone --prompts prompts.jsonl --max-new-tokens 4";
    for part in ["q_proj", "v_proj", "o_proj", "gate_proj", "input_layernorm", "model.norm", "embed_tokens", "lm_head"]
    {
        let part = format!("{part}.weight");
        run(&spoilt(&part), generate).failed(1, &[WEIGHTS, &part, "expected finite numbers, got NaN at [", "in F32"]);
    }
    let small = spoilt("k_proj.weight"); // libtorch's fused attention would ignore it
    let facts = [WEIGHTS, "k_proj.weight", "expected finite numbers, got NaN at [0, 5] in"];
    for how in [" --heads heads", " --engine tch", " --dtype float16"] {
        run(&small, &format!("{generate}{how}")).failed(1, &facts);
    }
    run(&small, "distill --backbone backbone --prompts prompts.jsonl --out distilled").failed(1, &facts);
    run(&small, "calibrate --backbone backbone --heads heads --data rows.jsonl --out calibration.json")
        .failed(1, &facts);
    small.train(&[]).failed(1, &facts);
}

#[test]
fn heads_with_nan_are_refused_by_every_verb() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    write_heads(&small, "heads", SHAPE);
    small.write("prompts.jsonl", "{\"prompt_ids\": [3, 4]}\n");
    rewrite(&small, "heads/heads.safetensors", |all| drop(all[0].1.view([-1]).narrow(0, 3, 1).fill_(f64::NAN)));
    let facts = ["heads/heads.safetensors", "expected finite numbers, got NaN at ["];
    let heads = "--backbone backbone --heads heads";
    for arguments in [
        format!("generate {heads} --prompts prompts.jsonl --max-new-tokens 4"),
        format!("serve {heads} --port 0"),
        format!("distill {heads} --prompts prompts.jsonl --out distilled"),
        format!("calibrate {heads} --data rows.jsonl --out calibration.json"),
    ] {
        run(&small, &arguments).failed(1, &facts);
    }
    run(&small, "export --heads heads --format heads --out exported").failed(1, &["head 1 in", "NaN or infinity"]);
}

#[test]
fn a_backbone_whose_logits_overflow_decodes_nothing() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    write_heads(&small, "heads", SHAPE);
    small.write("backbone/chat_template.jinja", "{% for message in messages %}{{ message['content'] }}{% endfor %}");
    small.write("prompts.jsonl", "{\"prompt\": \"w3 w4\"}\n{\"prompt\": \"w5\"}\n");
    change(&small, "model.norm.weight", |norm| drop(norm.fill_(3e38)));
    let before = small.names(".");
    let refused = |arguments: &str, facts: &[&str]| {
        let facts = [&["logits contain NaN or infinity at new token 1;", "--dtype", "weights"], facts].concat();
        let ended = run(&small, arguments);
        ended.failed(1, &facts);
        assert_eq!(ended.stderr.matches("logits contain NaN").count(), 1, "{}", ended.stderr);
        let answers = ended.stdout.lines().filter(|line| !line.starts_with("[1 of 2] "));
        assert_eq!(answers.count(), 0, "{arguments}: {}", ended.stdout);
    };
    let inputs = "--backbone backbone --prompts prompts.jsonl --max-new-tokens 4";
    for how in ["", " --heads heads", " --temperature 0.8", " --heads heads --temperature 0.8", " --engine tch"] {
        refused(&format!("generate {inputs}{how}"), &["prompt 1 of 2"]);
    }
    refused(&format!("generate {inputs} --drafter ngram"), &["cannot measure step times"]);
    refused(&format!("generate {inputs} --dtype bfloat16"), &["prompt 1 of 2"]);
    refused(&format!("bench {inputs} --heads heads --json"), &["prompt 1 of 2"]);
    refused(&format!("calibrate {inputs} --heads heads --out calibration.json"), &["prompt 1 of 2"]);
    assert_eq!(small.names("."), before, "nothing half-written");
    refused(&format!("distill {inputs} --out distilled"), &["conversation 0"]);
    refused(&format!("distill {inputs} --heads heads --out distilled_with_heads"), &["conversation 0"]);
    for folder in ["distilled", "distilled_with_heads"] {
        assert!(small.names(folder).iter().all(|name| !name.ends_with(".parquet")), "{:?}", small.names(folder));
    }
    let rows = "calibrate --backbone backbone --heads heads --data rows.jsonl --out calibration.json";
    run(&small, rows).failed(1, &["row 1: the logits of head 1 contain NaN or infinity"]);
    assert!(!small.path("calibration.json").exists());
    let chat = small
        .program(env!("CARGO_BIN_EXE_medusa"), &["chat", "--backbone", "backbone"])
        .stdin(fs::File::open(small.path("prompts.jsonl")).expect("lines"))
        .output();
    let ended = Ended::from(chat.expect("the program starts"));
    ended.failed(1, &["answer 1", "logits contain NaN or infinity at new token 1;"]);
}

#[test]
fn a_conversation_that_cannot_be_answered_loses_no_other() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    // In float32 the embedding of token 47 is infinite.
    change(&small, "embed_tokens.weight", |embedding| {
        *embedding = embedding.to_kind(Kind::Double);
        let _ = embedding.get(47).fill_(1e300);
    });
    let prompts: Vec<String> = (45..50).map(|id| format!("{{\"prompt_ids\": [{}]}}", id.min(94 - id))).collect();
    small.write("prompts.jsonl", prompts.join("\n"));
    let distill = "distill --backbone backbone --prompts prompts.jsonl --max-new-tokens 1 --out distilled";
    let facts = ["prompts.jsonl, line 3: conversation 2", "logits contain NaN", "another --dtype, and another --out"];
    for how in ["", " --resume"] {
        run(&small, &format!("{distill}{how}")).failed(1, &facts);
        let journal = small.read("distilled/journal.jsonl");
        let json = |line: &str| line.find('{').map(|at| line[at..].to_owned()).expect("a checksum, then an object");
        let id = |line: &str| serde_json::from_str::<Value>(&json(line)).expect("JSON")["id"].clone();
        let mut ids: Vec<Value> = journal.lines().map(id).collect();
        ids.sort_by_key(Value::as_u64);
        assert_eq!(ids, [0, 1, 3, 4], "{how}");
    }
}

#[test]
fn a_backbone_that_was_cut_off_is_not_summarised() {
    let small = SmallRun::new();
    small.medusa(&["inspect", "backbone"]).succeeded();
    cut(&small, WEIGHTS, 10);
    small.medusa(&["inspect", "backbone"]).failed(1, &["backbone/model.safetensors: not a whole safetensors file"]);
}

#[test]
fn heads_that_do_not_fit_the_backbone_they_decode_with() {
    refused_by_decoding(&[
        (
            |small| write_heads(small, "heads", HeadsShape { hidden_size: 16, ..SHAPE }),
            &["heads/heads.safetensors: hidden size: expected 32, got 16"],
        ),
        (
            |small| write_heads(small, "heads", HeadsShape { vocab_size: 50, ..SHAPE }),
            &["heads/heads.safetensors: vocabulary: expected 48, got 50"],
        ),
        (|small| cut(small, "heads/heads.safetensors", 1), &["heads/heads.safetensors: not a whole safetensors file"]),
        (
            |small| rewrite(small, "heads/heads.safetensors", |all| all.retain(|(name, _)| name != "0.0.linear.bias")),
            &["heads/heads.safetensors: no tensor \"0.0.linear.bias\""],
        ),
        (
            |small| rewrite(small, "heads/heads.safetensors", |all| all[0].0 = "lm_head.weight".into()),
            &["heads/heads.safetensors: tensor \"lm_head.weight\" does not belong to Medusa or Hydra heads"],
        ),
        (|small| small.write_tokenizer(60), &["tokenizer.json", "vocab_size 48"]),
    ]);
}

#[test]
fn trees_and_prompts_that_cannot_be_used() {
    refused_by_decoding(&[
        (
            |small| small.write("tree.json", "[[0], [1, 0]]"),
            &["tree.json: tree choice [1, 0] has no parent [1]", "every prefix"],
        ),
        (
            |small| small.write("tree.json", "[[0], [0, 0], [0, 0, 0]]"),
            &["tree.json: tree choice [0, 0, 0] needs 3 heads, but there are 2"],
        ),
        (|small| small.write("tree.json", "[[0], [48]]"), &["tree.json: tree choice [48] asks for guess 48"]),
        (|small| small.write("tree.json", "[]"), &["tree.json: the tree has no choices"]),
        (|small| small.write("tree.json", "{\"choices\": 3}"), &["tree.json is no tree file"]),
        (
            |small| small.write("prompts.jsonl", r#"{"prompt_ids": [1, 48]}"#),
            &["prompt_ids[1]", "token id from 0 to 47", "48"],
        ),
        (|small| small.write("prompts.jsonl", r#"{"prompt_ids": []}"#), &["prompt"]),
        (|small| small.write("prompts.jsonl", r#"{"question": "a"}"#), &["prompts.jsonl, line 1", "question"]),
        (|small| small.write("prompts.jsonl", ""), &["prompts.jsonl"]),
    ]);
}
