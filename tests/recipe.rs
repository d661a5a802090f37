//! Mistakes in a recipe are reported at once, each with file, line, column, caret and the accepted values.

use std::path::Path;

use medusa::recipe::Recipe;
use serde_json::Value;
use tch::Device;

use super::small_run::SmallRun;

const GOOD: &str = r#"[backbone]
path = "b"
dtype = "float32"
[heads]
medusa_num_heads = 4
medusa_num_layers = 1
[stage.medusa1]
[data]
train = ["rows.jsonl"]
max_length = 64
[optimizer]
learning_rate = 1e-3
[schedule]
name = "cosine"
[train]
output_dir = "out"
epochs = 2
micro_batch_size = 2
"#;

fn parse(text: &str) -> Result<Recipe, String> {
    Recipe::parse(Path::new("r.toml"), text).map_err(|error| error.to_string())
}

/// The error text for the good recipe after replacing `piece` by `by`.
fn error_of(piece: &str, by: &str) -> String {
    assert!(GOOD.contains(piece), "{piece:?} is not in the good recipe");
    parse(&GOOD.replacen(piece, by, 1)).expect_err("a mistake")
}

/// Everything that a recipe has to say.
const SHORTEST: &str = "[backbone]\npath = \"b\"\n[stage.medusa1]\n[data]\ntrain = [\"rows.jsonl\"]\n";

#[test]
fn a_recipe_needs_only_a_backbone_rows_and_a_stage() {
    let recipe = parse(SHORTEST).unwrap();
    let resolved = recipe.resolved_toml();
    for line in [
        "dtype = \"float32\"",
        "medusa_num_heads = 5",
        "medusa_num_layers = 1",
        "max_length = 2048",
        "learning_rate = 0.001",
        "name = \"cosine\"",
        "warmup_ratio = 0.1",
        "output_dir = \"checkpoints/r\"",
        "epochs = 2",
        "micro_batch_size = 1",
        "gradient_accumulation_steps = 8",
    ] {
        assert!(resolved.contains(&format!("\n{line}\n")), "{line} in\n{resolved}");
    }
    assert_eq!(parse(&resolved).unwrap(), recipe);
    for required in ["path = \"b\"\n", "[stage.medusa1]\n", "train = [\"rows.jsonl\"]\n"] {
        parse(&SHORTEST.replace(required, "")).expect_err(required);
    }
}

#[test]
fn all_mistakes_are_reported_in_the_order_of_the_file() {
    let text = GOOD
        .replace("dtype = \"float32\"", "dtype = \"float\"")
        .replace("medusa_num_heads = 4", "medusa_num_head = 4")
        .replace("[stage.medusa1]", "[stage.medusa2]\nself_distillation = true\nlora = { rank = 0, alpah = 1 }")
        .replace("learning_rate = 1e-3", "learning_rate = \"1e-3\"\nbetas = [0.9, 1.5]")
        .replace("name = \"cosine\"", "name = \"cosin\"\nwarmup_steps = 5\nwarmup_ratio = 0.5")
        .replace("epochs = 2", "epochs = 2\nmax_steps = 9\nhidden_state_cache = \"states\"\n[trian]\nx = 1");
    let error = parse(&text).unwrap_err();
    let lines: Vec<&str> = error.lines().filter(|line| line.starts_with("r.toml: ")).collect();
    let expected = [
        "line 3, column 9: backbone.dtype: unknown value `float`, did you mean `float32`? Expected one of",
        "line 5, column 1: unknown key `medusa_num_head`, did you mean `medusa_num_heads`? Expected one of",
        "line 9, column 17: stage.medusa2.lora.rank: invalid value: integer `0`, expected a whole number above 0",
        "line 9, column 20: unknown key `alpah`, did you mean `alpha`? Expected one of",
        "line 14, column 17: optimizer.learning_rate: invalid type: string \"1e-3\"",
        "line 15, column 9: optimizer.betas: expected a number that is at least 0 and below 1, got 1.5",
        "line 17, column 8: schedule.name: unknown value `cosin`, did you mean `cosine`? Expected one of",
        "line 19, column 1: schedule.warmup_steps and schedule.warmup_ratio exclude each other",
        "line 23, column 1: train.epochs and train.max_steps exclude each other; keep one of them",
        "line 24, column 22: train.hidden_state_cache needs [stage.medusa1]",
        "line 25, column 2: unknown key `trian`, did you mean `train`? Expected one of",
    ];
    assert_eq!(lines.len(), expected.len(), "{error}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("r.toml: {expected}")), "expected {expected}, got {line}");
    }
    assert!(error.starts_with("11 mistakes in r.toml:\n\nr.toml: line 3"), "{error}");
    let with_carets = error.lines().filter(|line| line.trim_end().ends_with('^')).count();
    assert_eq!(with_carets, expected.len(), "{error}");
}

/// A check that reads a key with a mistake would report what is not there.
#[test]
fn a_mistake_brings_no_others_with_it() {
    for edits in [
        &[("[stage.medusa1]", "[stage.medusa3]"), ("learning_rate", "medusa_lr_multiplier = 4.0\nlearning_rate")][..],
        &[("[data]", "[loss]\ntargets = \"teacher\"\non_unlabelled = true\n[data]")],
        &[("epochs = 2", "epochs = 2\nkeep_best = \"accuracy\"\npatience = 3")],
        &[("max_length = 64", "max_length = 64\nvalidation_fraction = 2"), ("epochs", "eval_every = 5\nepochs")],
        &[("train = [\"rows.jsonl\"]", "train = 3")],
        &[("[heads]\nmedusa_num_heads = 4\nmedusa_num_layers = 1\n", ""), ("[backbone]", "heads = 4\n[backbone]")],
        &[("[backbone]\npath = \"b\"\ndtype = \"float32\"\n", "backbone = 3\n")],
        &[("[data]\ntrain = [\"rows.jsonl\"]\nmax_length = 64\n", ""), ("[backbone]", "data = 3\n[backbone]")],
    ] {
        let text = edits.iter().fold(GOOD.to_owned(), |text, (piece, by)| text.replacen(piece, by, 1));
        let error = parse(&text).unwrap_err();
        assert_eq!(error.matches("r.toml: line").count(), 1, "{error}");
    }
}

#[test]
fn errors_of_the_syntax_are_reported_together() {
    let error =
        parse(&GOOD.replace("epochs = 2", "epochs = ").replace("max_length = 64", "max_length = ")).unwrap_err();
    let lines: Vec<&str> = error.lines().filter(|line| line.starts_with("r.toml: line")).collect();
    assert!(lines.len() == 2 && lines[0].contains("line 10") && lines[1].contains("line 17"), "{error}");
    let twice = parse(&GOOD.replace("epochs = 2", "epochs = 2\nepochs = 3\nsed = 1")).unwrap_err();
    assert!(twice.contains("line 18, column 1: duplicate key"), "{twice}");
    assert!(twice.contains("line 19, column 1: unknown key `sed`, did you mean `seed`?"), "{twice}");
}

#[test]
fn a_resolved_recipe_names_every_default_and_loads_to_the_same() {
    let recipe = parse(GOOD).unwrap();
    let resolved = recipe.resolved_toml();
    for line in ["[stage.medusa1]", "betas = [0.9, 0.999]", "eps = 0.00000001", "packing = true", "seed = 42"] {
        assert!(resolved.contains(line), "{line} in\n{resolved}");
    }
    assert_eq!(parse(&resolved).unwrap(), recipe);
}

#[test]
fn an_unknown_key_is_shown_with_the_known_ones() {
    let expected = r#"r.toml: line 5, column 1: unknown key `medusa_num_head`, did you mean `medusa_num_heads`? Expected one of `medusa_num_heads`, `medusa_num_layers`, `init_from`, `shared_lm_head`, `w2_rank`, `shared_w2`, `draft_vocab_size`, `architecture`, `ttt_steps`, `tap_layers`, `dropout`
  |
5 | medusa_num_head = 4
  | ^^^^^^^^^^^^^^^"#;
    assert_eq!(error_of("medusa_num_heads = 4", "medusa_num_head = 4"), expected);
}

#[test]
fn targets_are_labels_or_the_backbone_or_a_mix() {
    for (loss, expected) in [
        ("targets = \"backbone\"\non_unlabelled = true", "targets = \"backbone\"\non_unlabelled = true"),
        ("targets = { labels = 0.25, backbone = 1 }", "[loss.targets]\nlabels = 0.25\nbackbone = 1.0"),
        ("", "targets = \"labels\"\non_unlabelled = false"),
    ] {
        let recipe = parse(&GOOD.replace("[data]", &format!("[loss]\n{loss}\n[data]"))).unwrap();
        let resolved = recipe.resolved_toml();
        assert!(resolved.contains(expected), "{resolved}");
        assert_eq!(parse(&resolved).unwrap(), recipe);
    }
    let expected = r#"r.toml: line 9, column 11: loss.targets: expected "labels", "backbone" or { labels = 0.5, backbone = 0.5 }, got "teacher"
  |
9 | targets = "teacher"
  |           ^^^^^^^^^"#;
    assert_eq!(error_of("[data]", "[loss]\ntargets = \"teacher\"\n[data]"), expected);
    let expected = r#"r.toml: line 9, column 17: loss.on_unlabelled needs loss.targets = "backbone" or a mix: without a label there is no other target; add it, or remove loss.on_unlabelled
  |
9 | on_unlabelled = true
  |                 ^^^^"#;
    assert_eq!(error_of("[data]", "[loss]\non_unlabelled = true\n[data]"), expected);
}

#[test]
fn a_constant_rate_has_no_smallest_one() {
    let expected = r#"r.toml: line 15, column 13: schedule.min_ratio needs schedule.name = "cosine" or "linear": a constant rate stays at its peak; add it, or remove schedule.min_ratio
   |
15 | min_ratio = 0.5
   |             ^^^"#;
    assert_eq!(error_of("name = \"cosine\"", "name = \"constant\"\nmin_ratio = 0.5"), expected);
    let constant = parse(&GOOD.replace("name = \"cosine\"", "name = \"constant\"")).unwrap();
    assert_eq!(parse(&constant.resolved_toml()).unwrap(), constant, "the default is written out");
}

#[test]
fn a_key_given_twice_is_refused() {
    let expected = r#"r.toml: line 18, column 1: duplicate key
   |
18 | epochs = 3
   | ^^^^^^"#;
    assert_eq!(error_of("epochs = 2", "epochs = 2\nepochs = 3"), expected);
}

#[test]
fn a_number_out_of_range_is_refused() {
    let expected = r#"r.toml: line 12, column 17: optimizer.learning_rate: expected a number that is finite and above 0, got -1
   |
12 | learning_rate = -1.0
   |                 ^^^^"#;
    assert_eq!(error_of("learning_rate = 1e-3", "learning_rate = -1.0"), expected);
}

#[test]
fn no_heads_at_all_is_out_of_range() {
    let expected = r#"r.toml: line 5, column 20: heads.medusa_num_heads: invalid value: integer `0`, expected a whole number above 0
  |
5 | medusa_num_heads = 0
  |                    ^"#;
    assert_eq!(error_of("medusa_num_heads = 4", "medusa_num_heads = 0"), expected);
}

#[test]
fn a_value_of_another_type_is_refused() {
    let expected = r#"r.toml: line 5, column 20: heads.medusa_num_heads: invalid type: string "4", expected a whole number above 0
  |
5 | medusa_num_heads = "4"
  |                    ^^^"#;
    assert_eq!(error_of("medusa_num_heads = 4", "medusa_num_heads = \"4\""), expected);
}

#[test]
fn a_missing_key_is_shown_at_its_table() {
    let expected = r#"r.toml: line 8, column 1: missing key `data.train`: a list of files, globs or ids of the Hub
  |
8 | [data]
  | ^^^^^^"#;
    assert_eq!(error_of("train = [\"rows.jsonl\"]\n", ""), expected);
    let error = error_of("[backbone]\npath = \"b\"\ndtype = \"float32\"\n", "");
    assert!(error.contains("r.toml: line 1, column 1: missing key `backbone.path`: a folder"), "{error}");
}

#[test]
fn a_key_of_another_trainer_is_answered_with_ours() {
    let error = error_of("epochs = 2", "steps = 5");
    assert!(error.contains("unknown key `steps`, did you mean `max_steps`? Expected one of `output_dir`"), "{error}");
    let error = error_of("learning_rate", "lr");
    assert!(error.contains("unknown key `lr`, did you mean `learning_rate`?"), "{error}");
}

#[test]
fn one_file_needs_no_brackets() {
    let recipe = parse(&GOOD.replace("train = [\"rows.jsonl\"]", "train = \"rows.jsonl\"")).unwrap();
    assert_eq!(recipe.data.train, ["rows.jsonl"]);
    let error = error_of("train = [\"rows.jsonl\"]", "train = [\"rows.jsonl\", 3]");
    let expected = "data.train: expected a list of files, folders, globs or Hub ids, such as [\"rows.jsonl\"]";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_value_that_is_none_of_the_known_ones_is_refused_with_them() {
    let expected = r#"r.toml: line 14, column 8: schedule.name: unknown value `sine`, did you mean `cosine`? Expected one of `cosine`, `linear`, `constant`
   |
14 | name = "sine"
   |        ^^^^^^"#;
    assert_eq!(error_of("cosine", "sine"), expected);
}

#[test]
fn two_stages_are_refused() {
    let expected = r#"r.toml: line 8, column 8: a recipe has exactly one of [stage.medusa1], [stage.medusa2]; this one has [stage.medusa1] and [stage.medusa2]
  |
8 | [stage.medusa2]
  |        ^^^^^^^"#;
    assert_eq!(error_of("[stage.medusa1]", "[stage.medusa1]\n[stage.medusa2]"), expected);
}

#[test]
fn no_stage_is_refused() {
    let expected = r#"r.toml: line 1, column 1: a recipe has exactly one of [stage.medusa1], [stage.medusa2]; this one has none
  |
1 | [backbone]
  | ^"#;
    assert_eq!(error_of("[stage.medusa1]\n", ""), expected);
}

#[test]
fn an_optimizer_that_there_is_not_is_refused_with_those_there_are() {
    let expected = r#"r.toml: line 12, column 8: optimizer.name: unknown value `adam8bit`, did you mean `adamw8bit`? Expected `adamw` or `adamw8bit`
   |
12 | name = "adam8bit"
   |        ^^^^^^^^^^"#;
    assert_eq!(error_of("learning_rate", "name = \"adam8bit\"\nlearning_rate"), expected);
    let recipe = parse(&GOOD.replacen("learning_rate", "name = \"adamw8bit\"\nlearning_rate", 1)).unwrap();
    assert!(recipe.resolved_toml().contains("name = \"adamw8bit\""));
}

#[test]
fn epochs_and_max_steps_exclude_each_other() {
    let expected = r#"r.toml: line 18, column 1: train.epochs and train.max_steps exclude each other; keep one of them
   |
18 | max_steps = 5
   | ^^^^^^^^^"#;
    assert_eq!(error_of("epochs = 2", "epochs = 2\nmax_steps = 5"), expected);
}

#[test]
fn warm_up_is_no_longer_than_the_run() {
    let expected = r#"r.toml: line 15, column 16: schedule.warmup_steps = 11: expected at most 10, the steps of the run (train.max_steps); or raise train.max_steps, or remove schedule.warmup_steps
   |
15 | warmup_steps = 11
   |                ^^"#;
    assert_eq!(
        error_of(
            "name = \"cosine\"\n[train]\noutput_dir = \"out\"\nepochs = 2",
            "name = \"cosine\"\nwarmup_steps = 11\n[train]\noutput_dir = \"out\"\nmax_steps = 10"
        ),
        expected
    );
}

#[test]
fn the_last_head_has_a_target_in_every_full_row() {
    let expected = r#"r.toml: line 10, column 14: data.max_length = 5: expected at least 6, so that each of 4 heads has a target
   |
10 | max_length = 5
   |              ^"#;
    assert_eq!(error_of("max_length = 64", "max_length = 5"), expected);
}

#[test]
fn the_best_evaluation_needs_evaluations() {
    let of = |more: &str| error_of("epochs = 2", &format!("epochs = 2\n{more}"));
    let alone = of("keep_best = \"loss\"");
    assert!(alone.contains("train.keep_best needs train.eval_every, and data.validation or"), "{alone}");
    let without_rows = of("keep_best = \"loss\"\neval_every = 5");
    assert!(without_rows.contains("train.eval_every needs rows"), "{without_rows}");
    let patience = of("patience = 3");
    assert!(patience.contains("train.patience needs train.keep_best, which says what"), "{patience}");
    let other = of("keep_best = \"accuracy\"");
    assert!(other.contains("unknown value `accuracy`, expected `tokens_per_step` or `loss`"), "{other}");
    assert!(of("patience = 0").contains("a whole number above 0"));
}

#[test]
fn evaluation_needs_rows() {
    let expected = r#"r.toml: line 18, column 14: train.eval_every needs rows: data.validation or data.validation_fraction; add it, or remove train.eval_every
   |
18 | eval_every = 5
   |              ^"#;
    assert_eq!(error_of("epochs = 2", "epochs = 2\neval_every = 5"), expected);
}

const MEDUSA2: &str = "[stage.medusa2]\nmedusa_scheduler = \"sine\"\nself_distillation = true\n[stage.medusa2.lora]\nrank = 8\nalpha = 16";

#[test]
fn a_recipe_of_medusa2_names_every_default_and_loads_to_the_same() {
    let recipe = parse(&GOOD.replace("[stage.medusa1]", MEDUSA2)).unwrap();
    let resolved = recipe.resolved_toml();
    for line in [
        "medusa_heads_coefficient = 0.2",
        "medusa_lr_multiplier = 4.0",
        "dropout = 0.0",
        "target_modules = \"all-linear\"",
    ] {
        assert!(resolved.contains(line), "{line} in\n{resolved}");
    }
    assert_eq!(parse(&resolved).unwrap(), recipe);
}

#[test]
fn each_stage_refuses_the_keys_of_the_other() {
    let error_of_medusa2 = |piece: &str, by: &str| {
        let good = GOOD.replace("[stage.medusa1]", MEDUSA2);
        assert!(good.contains(piece), "{piece:?} is not in the good recipe");
        parse(&good.replacen(piece, by, 1)).expect_err("a mistake")
    };
    let multiplier = error_of("learning_rate = 1e-3", "learning_rate = 1e-3\nmedusa_lr_multiplier = 4.0");
    assert!(
        multiplier.contains("line 13, column 24: optimizer.medusa_lr_multiplier needs [stage.medusa2]"),
        "{multiplier}"
    );
    let recompute = error_of("epochs = 2", "epochs = 2\nrecompute = true");
    assert!(recompute.contains("train.recompute needs [stage.medusa2]"), "{recompute}");
    let cache = error_of_medusa2("epochs = 2", "epochs = 2\nhidden_state_cache = \"states\"");
    assert!(cache.contains("train.hidden_state_cache needs [stage.medusa1]"), "{cache}");
    let direct = error_of_medusa2("dtype = \"float32\"", "dtype = \"float32\"\nquantization = \"nf4\"");
    assert!(direct.contains("backbone.quantization needs train.recompute = true"), "{direct}");
    let quantised =
        GOOD.replace("[stage.medusa1]", "[stage.medusa2]").replace("dtype = ", "quantization = \"nf4\"\ndtype = ");
    let trained = parse(&quantised).expect_err("weights of 4 bits do not train");
    assert!(trained.contains("needs [stage.medusa2.lora]: quantised weights cannot be trained"), "{trained}");
    for (betas, length) in [("[0.9]", 1), ("[0.9, 0.99, 0.999]", 3)] {
        let error = error_of("learning_rate = 1e-3", &format!("learning_rate = 1e-3\nbetas = {betas}"));
        assert!(error.contains(&format!("optimizer.betas: invalid length {length}, expected two numbers")), "{error}");
    }
    let teacher = error_of_medusa2("[stage.medusa2.lora]\nrank = 8\nalpha = 16", "");
    assert!(teacher.contains("stage.medusa2.self_distillation needs [stage.medusa2.lora]"), "{teacher}");
}

#[test]
fn what_rounds_is_refused_in_float64() {
    let float64 = GOOD.replace("float32", "float64");
    assert!(parse(&float64).expect("a recipe").resolved_toml().contains("dtype = \"float64\""));
    let error_of = |piece: &str, by: &str| parse(&float64.replacen(piece, by, 1)).expect_err("a mistake");
    for (piece, by, what) in [
        ("learning_rate", "name = \"adamw8bit\"\nlearning_rate", "optimizer.name = \"adamw8bit\""),
        ("dtype", "quantization = \"int8\"\ndtype", "backbone.quantization"),
        ("max_length", "hidden_states = \"states\"\nmax_length", "data.hidden_states"),
    ] {
        let expected = format!("backbone.dtype = \"float64\": expected \"float32\" or 16 bits with {what}, whose");
        let error = error_of(piece, by);
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn adapters_go_on_layers_that_there_are() {
    let with =
        |line: &str| parse(&GOOD.replace("[stage.medusa1]", &format!("{MEDUSA2}\n{line}"))).expect_err("a mistake");
    let modules = with("target_modules = [\"query\"]");
    assert!(modules.contains("unknown layer \"query\", expected some of q_proj, k_proj, v_proj"), "{modules}");
    assert!(with("target_modules = \"linear\"").contains("\"all-linear\" or a list"));
    assert!(with("dropout = 1.0").contains("at least 0 and below 1"));
    let sine =
        parse(&GOOD.replace("[stage.medusa1]", MEDUSA2).replace("epochs = 2", "max_steps = 0")).expect_err("no steps");
    assert!(sine.contains("train.max_steps: invalid value: integer `0`, expected a whole number above 0"), "{sine}");
}

#[test]
fn conversations_are_rendered_as_the_recipe_says() {
    let data = |lines: &str| parse(&GOOD.replacen("max_length = 64", &format!("max_length = 64\n{lines}"), 1));
    let resolved = data("").unwrap().resolved_toml();
    assert!(resolved.contains("chat_template = \"tokenizer\"") && resolved.contains("loss_on = \"assistant\""));
    for template in ["vicuna", "zephyr", "llama-2", "llama-3", "chatml", "mistral", "chats/own.jinja"] {
        let recipe = data(&format!("chat_template = {template:?}\nloss_on = \"all\"")).unwrap();
        assert!(recipe.resolved_toml().contains(&format!("chat_template = {template:?}")), "{template}");
    }
    let expected = r#"r.toml: line 11, column 17: data.chat_template: expected "tokenizer", one of "vicuna", "zephyr", "llama-2", "llama-3", "chatml", "mistral", or the path of a .jinja file, got "vicunna"
   |
11 | chat_template = "vicunna"
   |                 ^^^^^^^^^"#;
    assert_eq!(data("chat_template = \"vicunna\"").unwrap_err(), expected);
    let error = data("loss_on = \"answers\"").unwrap_err();
    assert!(error.contains("data.loss_on: unknown value `answers`, expected `assistant` or `all`"), "{error}");
}

#[test]
fn a_recipe_needs_its_backbone_and_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    write(&path, GOOD);
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("line 2, column 8: backbone.path: b does not exist"), "{error}");

    let backbone = dir.path().join("backbone");
    std::fs::create_dir(&backbone).unwrap();
    let with_backbone = GOOD.replace("path = \"b\"", &format!("path = {backbone:?}"));
    write(&path, &with_backbone);
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("backbone.path: cannot read") && error.contains("config.json"), "{error}");

    write(&backbone.join("config.json"), CONFIG);
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("line 9, column 9: data.train: data file rows.jsonl does not exist"), "{error}");

    write(&dir.path().join("rows.jsonl"), "");
    let rows = format!("train = [{:?}]", dir.path().join("*.jsonl"));
    let good = with_backbone.replace("train = [\"rows.jsonl\"]", &rows);
    write(&path, &good);
    Recipe::load(&path, Device::Cpu).expect("a good recipe");
    write(&path, &good.replace("float32", "float64"));
    Recipe::load(&path, Device::Cpu).expect("a good recipe");
    let error = Recipe::load(&path, Device::Cuda(0)).unwrap_err().to_string();
    let expected =
        "line 3, column 9: backbone.dtype = \"float64\": expected float32 or 16 bits on cuda:0; or train on the CPU";
    assert!(error.contains(expected), "{error}");
    write(&path, &good.replace("max_length = 64", "max_length = 64\nchat_template = \"none.jinja\""));
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("column 17: data.chat_template: none.jinja does not exist; give the path"), "{error}");
    write(&path, &good.replace("max_length = 64", "max_length = 65"));
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("data.max_length = 65: expected at most 64, the backbone's context"), "{error}");
    let adapted = MEDUSA2.replace("alpha = 16", "alpha = 16\ntarget_modules = [\"qkv_proj\"]");
    write(&path, &good.replace("[stage.medusa1]", &adapted));
    let error = Recipe::load(&path, Device::Cpu).unwrap_err().to_string();
    assert!(
        error.contains("lora.target_modules = qkv_proj: expected some of this backbone's layers: q_proj, k_proj"),
        "{error}"
    );
}

const CONFIG: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 64,
"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": true}"#;

fn write(path: &Path, text: &str) {
    use std::io::Write;
    std::fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes())).expect("a temporary file");
}

/// Five heads, the default without `init_from`, would not fit into rows of 5 tokens.
#[test]
fn heads_to_start_from_bring_their_sizes_which_the_length_of_rows_must_fit() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 0");
    small.edit("recipe.toml", "epochs = 8", "max_steps = 1");
    small.train(&[]).succeeded();
    let sizes = "medusa_num_heads = 2\nmedusa_num_layers = 1";
    small.edit("recipe.toml", sizes, "init_from = \"run/final\"");
    small.edit("recipe.toml", "max_length = 40", "max_length = 5");
    let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
    assert_eq!(plan["recipe"]["heads"]["medusa_num_heads"], 2, "{plan}");
    small.edit("recipe.toml", "max_length = 5", "max_length = 3");
    small
        .train(&["--check"])
        .failed(2, &["data.max_length = 3: expected at least 4, so that each of 2 heads has a target"]);
}

#[test]
fn the_dtype_of_a_backbone_is_never_guessed() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "dtype = \"float32\"\n", "");
    let printed = small.train(&["--check"]).succeeded().stdout;
    assert!(printed.lines().any(|line| line == "  backbone              dtype = \"float32\""), "{printed}");
    small.write("backbone/model.safetensors", "cut off");
    small.train(&["--check"]).failed(2, &["backbone.path: backbone/model.safetensors", "not a whole safetensors file"]);
    std::fs::remove_file(small.path("backbone/model.safetensors")).expect("a file");
    small.train(&["--check"]).failed(2, &["missing key `backbone.dtype`", "config.json", "download the weights first"]);
    small.edit("backbone/config.json", "{", "{\"torch_dtype\": \"bfloat16\",");
    let printed = small.train(&["--check"]).succeeded().stdout;
    assert!(printed.contains("dtype = \"bfloat16\""), "{printed}");
}
