//! Recipes for the paper's models and today's pass `--check` with only the backbone's config, and print the memory that they need.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use arrow::array::{ArrayRef, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields};
use medusa::draft::heads::HeadsShape;
use medusa::draft::planned::Teachers;
use medusa::memory::layer::LayerPass;
use medusa::memory::plan::{MemoryPlan, WorldPlan};
use medusa::memory::weights::StageShape;
use medusa::model::config::LlamaConfig;
use medusa::recipe::Recipe;
use medusa::train::memory_plan::Workload;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

use super::small_run::{Ended, SmallRun};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The Hub's `config.json`, with the keys that matter here.
pub(crate) fn config_of(model: &str) -> Value {
    let llama = |hidden: u32, ffn: u32, layers: u32, heads: u32, context: u32| {
        json!({"model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 32000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": context, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "float16"})
    };
    match model {
        "lmsys/vicuna-7b-v1.5" => llama(4096, 11008, 32, 32, 4096),
        "lmsys/vicuna-13b-v1.5" => llama(5120, 13824, 40, 40, 4096),
        "lmsys/vicuna-33b-v1.3" => llama(6656, 17920, 60, 52, 2048),
        "HuggingFaceH4/zephyr-7b-beta" => {
            json!({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "sliding_window": 4096, "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"})
        }
        other => super::published_configs::published("served").remove(other).unwrap_or_else(|| {
            panic!("no config of {other}: a new recipe's belongs into tests/fixtures/configs/published.json")
        }),
    }
}

/// Recipes whose models are not in the repository.
fn recipes() -> Vec<(PathBuf, Recipe)> {
    let files = fs::read_dir(Path::new(ROOT).join("recipes")).expect("recipes/").flatten().map(|entry| entry.path());
    let tomls = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let read = |path: PathBuf| {
        let recipe = Recipe::parse(&path, &fs::read_to_string(&path).expect("a recipe")).expect("it is read");
        (path, recipe)
    };
    tomls.map(read).filter(|(_, recipe)| !recipe.backbone.path.starts_with("data/")).collect()
}

fn conversation(n: usize) -> [String; 2] {
    [format!("What is {n} and {n}?"), format!("It is {}, and one more is {}.", 2 * n, 2 * n + 1)]
}

/// A JSON array in ShareGPT's format, or Parquet as `medusa distill` writes it.
fn write_conversations(path: &Path) {
    const COUNT: usize = 40;
    if path.extension().is_some_and(|extension| extension == "json") {
        let row = |n| {
            let [question, answer] = conversation(n);
            json!({"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]})
        };
        return write(path, Value::from((0..COUNT).map(row).collect::<Vec<_>>()).to_string());
    }
    let texts: Vec<String> = (0..COUNT).flat_map(conversation).collect();
    let strings = |texts: Vec<&str>| Arc::new(StringArray::from(texts)) as ArrayRef;
    let names = ["user", "assistant"].into_iter().cycle().take(texts.len()).collect();
    let fields: Fields = ["role", "content"].map(|name| Field::new(name, DataType::Utf8, true)).to_vec().into();
    let columns = vec![strings(names), strings(texts.iter().map(String::as_str).collect())];
    let messages = StructArray::new(fields.clone(), columns, None);
    let item = Arc::new(Field::new("item", DataType::Struct(fields), true));
    let lengths = OffsetBuffer::from_lengths(std::iter::repeat_n(2, COUNT));
    let list: ArrayRef = Arc::new(ListArray::new(item, lengths, Arc::new(messages), None));
    let batch = RecordBatch::try_from_iter([("messages", list)]).expect("a table");
    let file = fs::File::create(path).expect("a file");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("Parquet");
    writer.write(&batch).expect("rows");
    writer.close().expect("an end");
}

/// Heads of this shape as a sparse file: `--check` reads only its header.
fn write_heads(path: &Path, shape: HeadsShape) {
    let mut end = 0;
    let mut entry = |shape: &[i64]| {
        let from = end;
        end += 4 * shape.iter().product::<i64>().unsigned_abs();
        json!({"dtype": "F32", "shape": shape, "data_offsets": [from, end]})
    };
    let header: serde_json::Map<String, Value> =
        shape.tensors().into_iter().map(|(name, shape)| (name, entry(&shape))).collect();
    let header = Value::from(header).to_string();
    let mut file = fs::File::create(path).expect("a file");
    file.write_all(&(header.len() as u64).to_le_bytes())
        .and_then(|()| file.write_all(header.as_bytes()))
        .expect("a header");
    file.set_len(8 + header.len() as u64 + end).expect("holes");
}

fn write(path: &Path, text: impl AsRef<[u8]>) {
    fs::File::create(path).and_then(|mut file| file.write_all(text.as_ref())).expect("a file");
}

/// Writes the backbone's folder without weights; returns its config.
fn write_backbone(small: &SmallRun, recipe: &Recipe) -> LlamaConfig {
    let folder = small.path(&recipe.backbone.path);
    fs::create_dir_all(&folder).expect("a folder");
    write(&folder.join("config.json"), config_of(&recipe.backbone.path).to_string());
    if recipe.backbone.path.starts_with("lmsys/") {
        ["tokenizer_config.json", "special_tokens_map.json"].iter().for_each(|file| copy(&vicuna(file), &folder));
        copy(&tokenizer_model(), &folder.join("tokenizer.model"));
    } else {
        // Those repositories have a tokenizer.json, and a chat template in tokenizer_config.json.
        let tiny = Path::new(ROOT).join("data/tiny/backbone");
        ["tokenizer.json", "tokenizer_config.json"].iter().for_each(|file| copy(&tiny.join(file), &folder));
    }
    LlamaConfig::load(&folder).expect("a config")
}

/// A file that scripts/fixtures/make_vicuna_folder.py wrote.
fn vicuna(name: &str) -> PathBuf {
    Path::new(ROOT).join("tests/fixtures/vicuna").join(name)
}

/// SentencePiece, with the options of Llama's.
fn tokenizer_model() -> PathBuf {
    Path::new(ROOT).join("tests/fixtures/tokenizers/llama.model")
}

/// Copies a file into a folder, or to a name.
fn copy(from: &Path, to: &Path) {
    let to = if to.is_dir() { to.join(from.file_name().expect("a name")) } else { to.to_owned() };
    fs::copy(from, to).expect("a fixture");
}

/// Writes a folder with exactly the files of lmsys/vicuna-7b-v1.5, small.
fn write_vicuna(small: &SmallRun) {
    const FILES: [&str; 7] = [
        "config.json",
        "generation_config.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
    ];
    let folder = small.path("lmsys/vicuna-7b-v1.5");
    fs::create_dir_all(&folder).expect("a folder");
    FILES.iter().for_each(|file| copy(&vicuna(file), &folder));
    copy(&tokenizer_model(), &folder.join("tokenizer.model"));
}

/// A stage of Vicuna's recipe in the folder; but few steps, and in float32 for a small model on a CPU.
fn write_stage(small: &SmallRun, stage: u32) {
    let path = format!("{ROOT}/recipes/vicuna7b_stage{stage}.toml");
    small.write("recipe.toml", fs::read_to_string(path).expect("a recipe"));
    small.edit("recipe.toml", "epochs = 2", "max_steps = 2");
    small.edit("recipe.toml", "warmup_steps = 40", "warmup_steps = 1");
    small.edit("recipe.toml", "dtype = \"bfloat16\"", "dtype = \"float32\"");
    let accumulation = if stage == 1 { 32 } else { 64 };
    small.edit(
        "recipe.toml",
        &format!("gradient_accumulation_steps = {accumulation}"),
        "gradient_accumulation_steps = 2",
    );
}

#[test]
fn vicunas_files_are_all_that_its_recipes_and_commands_need() {
    let small = SmallRun::new();
    write_vicuna(&small);
    fs::create_dir_all(small.path("data")).expect("a folder");
    write_conversations(&small.path("data/sharegpt.json"));
    for stage in [1, 2] {
        write_stage(&small, stage);
        small.train(&["--check"]).succeeded();
        small.train(&[]).succeeded();
    }
    let heads = ["--backbone", "lmsys/vicuna-7b-v1.5", "--heads", "checkpoints/vicuna7b_stage1/final"];
    let medusa = |arguments: &[&str]| small.medusa(&[arguments, &heads].concat()).succeeded();
    medusa(&["calibrate", "--data", "data/sharegpt.json", "--out", "calibration.json"]);
    small.medusa(&["tree", "--calibration", "calibration.json", "--nodes", "8", "--out", "tree.json"]).succeeded();
    let text = medusa(&["generate", "--tree", "tree.json", "--prompt", "What is 1 and 1?", "--max-new-tokens", "8"]);
    assert!(!text.stdout.trim().is_empty(), "{text:?}");
    small.write("talk.jsonl", r#"{"messages": [{"role": "user", "content": "What is 1 and 1?"}]}"#);
    medusa(&["generate", "--tree", "tree.json", "--prompts", "talk.jsonl", "--max-new-tokens", "8"]);
    let mut chat =
        small.program(env!("CARGO_BIN_EXE_medusa"), &[&["chat", "--max-new-tokens", "8"][..], &heads].concat());
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    chat.stdin.take().expect("a pipe").write_all(b"What is 1 and 1?\n").expect("it listens");
    let printed: Ended = chat.wait_with_output().expect("it ends").into();
    assert!(!printed.succeeded().stdout.trim().is_empty());
}

#[test]
fn every_recipe_of_the_paper_passes_check_without_weights() {
    for (path, recipe) in recipes() {
        let small = SmallRun::new();
        let config = write_backbone(&small, &recipe);
        for pattern in &recipe.data.train {
            let file = small.path(&pattern.replace('*', "shard-0"));
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            write_conversations(&file);
        }
        if let Some(heads) = &recipe.heads.init_from {
            let folder = small.root().join(heads);
            fs::create_dir_all(&folder).expect("a folder");
            write_heads(
                &folder.join("heads.safetensors"),
                recipe.heads.heads().expect("heads").shape([config.vocab_size, config.hidden_size]),
            );
        }
        // With forty rows, two epochs would have fewer steps than the warm-up.
        small.write("recipe.toml", fs::read_to_string(&path).expect("a recipe"));
        small.edit("recipe.toml", "epochs = 2", "max_steps = 100");
        let plan = small.train(&["--check", "--json"]);
        assert_eq!(plan.status, Some(0), "{}: {}", path.display(), plan.stderr);
        let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
        assert_eq!((&plan["weights_checked"], &plan["steps"]), (&false.into(), &100.into()), "{}", path.display());
        assert_eq!(plan["backbone_parameters"], config.parameters());
    }
}

/// Planned peak on a GPU, for rows of the recipe's maximum length.
fn peak_in_gib(recipe: &Recipe, config: &LlamaConfig) -> f64 {
    let trained = recipe.stage.trained();
    let pass = LayerPass {
        config,
        element: recipe.backbone.dtype.kind().elt_size_in_bytes() as u64,
        quantization: recipe.backbone.quantization,
        blocks: None,
        trained: trained.layers(),
        recompute: recipe.train.recompute,
        rows: recipe.train.micro_batch_size.get() as u64,
        length: recipe.data.max_length.get() as u64,
        masked: recipe.data.packing,
        flash: true,
        on_host: false,
    };
    let drafter = recipe.heads.drafter().for_backbone(config);
    let plan = MemoryPlan::of(&Workload {
        pass,
        stage: StageShape::whole(config.num_hidden_layers),
        drafter: &*drafter,
        teachers: Teachers { for_drafter: recipe.loss.targets.are_soft(), for_backbone: trained.has_teacher() },
        optimizer: recipe.optimizer.name,
        world: WorldPlan::ALONE,
        unequal: false,
        cached: false,
        loaded: None,
        answers_twice: false,
    });
    plan.peak_bytes() as f64 / f64::from(1 << 30)
}

#[test]
fn a_recipe_says_the_memory_that_the_plan_says() {
    let lacks = |(path, recipe): (PathBuf, Recipe)| {
        let config = write_backbone(&SmallRun::new(), &recipe);
        let words = format!("the peak is {:.0} GiB", peak_in_gib(&recipe, &config).ceil());
        let text = fs::read_to_string(&path).expect("a recipe");
        (!text.contains(&words)).then(|| format!("{}: expected {words:?} in its head", path.display()))
    };
    let lacking: Vec<String> = recipes().into_iter().filter_map(lacks).collect();
    assert!(lacking.is_empty(), "{lacking:#?}");
}
