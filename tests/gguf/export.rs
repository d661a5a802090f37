//! `medusa export --format gguf`: the file holds the backbone that it was made of.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use medusa::data::tokenize::TextTokenizer;
use medusa::export::gguf::{GgufRequest, GgufType, export};
use medusa::files::write_atomic;
use medusa::gguf::file::GgufFile;
use medusa::gguf::metadata::MetaValue;
use medusa::gguf::types::TensorType;
use medusa::model::loading::Purpose;
use medusa::model::weights::WeightFiles;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::super::backbone::{Fixture, load, over_the_row};
use super::super::small_run::SmallRun;

/// Families with what llama.cpp does not have: another pattern of windows than the architecture's, other layers without rotary embeddings than every fourth, frequencies that depend on the
/// length of the text, and factors and a ramp of YaRN. Gemma's fixtures scale their queries otherwise than any Gemma; the test changes that.
const REFUSED: [(&str, &str); 6] = [
    ("gemma3", "layers"),
    ("smollm3", "layers"),
    ("llama_dynamic_short_text", "rope_scaling"),
    ("llama_dynamic_long_text", "rope_scaling"),
    ("llama_yarn_attention_factor", "rope_scaling"),
    ("llama_yarn_mscale", "rope_scaling"),
];

fn request(backbone: &Path, out: &Path, kind: Option<GgufType>) -> GgufRequest {
    GgufRequest { backbone: Some(backbone.into()), name: None, heads: None, out: out.into(), kind }
}

#[test]
fn written_blocks_are_those_of_the_gguf_package_bit_for_bit() {
    let all = super::fixture("gguf_blocks.json");
    let bytes = |key: &str| STANDARD.decode(all["written"][key].as_str().unwrap()).unwrap();
    let numbers: Vec<f32> = bytes("numbers").as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect();
    for name in ["F16", "BF16", "Q8_0"] {
        let mut blocks = vec![];
        TensorType::named(name).unwrap().encode(&numbers, &mut blocks);
        assert_eq!(blocks, bytes(name), "{name}");
    }
}

#[expect(clippy::disallowed_methods, reason = "a file of a test")]
fn scale_queries_as_gemma(path: &Path) {
    let mut config: Value = serde_json::from_slice(&medusa::files::read(path).expect("a config")).expect("JSON");
    if config.get("query_pre_attn_scalar").is_some() {
        config["query_pre_attn_scalar"] = config["head_dim"].clone();
        std::fs::write(path, config.to_string()).expect("a file");
    }
}

/// The norms of the first layer, which differ between architectures though the weights have the same names in transformers.
fn names_of_layer(file: &Path) -> Vec<String> {
    let file = GgufFile::open(file).expect("a GGUF file");
    let tensors = file.shards()[0].1.tensors.keys();
    tensors.filter_map(|name| Some(name.strip_prefix("blk.0.")?.strip_suffix("norm.weight")?.to_owned())).collect()
}

/// As llama.cpp's loaders of the architectures have them.
fn llama_cpp_names(fixture: &str) -> Vec<&'static str> {
    match fixture.split('_').next().unwrap_or_default() {
        "gemma2" => vec!["attn_", "ffn_", "post_attention_", "post_ffw_"],
        "gemma3" => vec!["attn_k_", "attn_", "attn_q_", "ffn_", "post_attention_", "post_ffw_"],
        "olmo2" => vec!["attn_k_", "attn_q_", "post_attention_", "post_ffw_"],
        "qwen3" => vec!["attn_k_", "attn_", "attn_q_", "ffn_"],
        _ => vec!["attn_", "ffn_"],
    }
}

fn sliding_window(folder: &Path) -> Option<i64> {
    medusa::model::config::LlamaConfig::load(folder).expect("a config").sliding_window
}

/// A tokenizer of 40 bytes for a backbone that has none.
fn write_tokenizer(folder: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    let mut tokenizer: Value =
        serde_json::from_slice(&medusa::files::read(&root.join("tokenizer.json")).expect("a file")).expect("JSON");
    let letters = ('A'..='h').enumerate().map(|(id, letter)| (letter.to_string(), id.into()));
    tokenizer["model"]["vocab"] = Value::Object(letters.collect());
    tokenizer["model"]["merges"] = Value::Array(vec![]);
    tokenizer["added_tokens"] = Value::Array(vec![]);
    tokenizer["post_processor"] = Value::Null;
    write_atomic(&folder.join("tokenizer.json"), |out| {
        std::io::Write::write_all(out, tokenizer.to_string().as_bytes())
    })
    .expect("a file");
}

#[test]
fn the_file_of_every_family_computes_what_its_folder_does() {
    let _no_grad = tch::no_grad_guard();
    let families = super::super::families::FAMILIES.map(|name| (name, format!("families/{name}")));
    for (name, fixture) in families.into_iter().chain([("llama_linear_scaling", "llama_linear_scaling".to_owned())]) {
        let fixture = Fixture::open(&fixture);
        let (folder, dir) = (fixture.folder("config"), tempfile::tempdir().unwrap());
        scale_queries_as_gemma(&folder.path().join("config.json"));
        write_tokenizer(folder.path());
        let written = export(&request(folder.path(), &dir.path().join("out"), Some(GgufType::F32)));
        if let Some((_, key)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            let error = written.unwrap_err().to_string();
            assert!(error.starts_with(&format!("llama.cpp has no {key} = ")), "{name}: {error}");
            assert!(!dir.path().join("out").exists(), "{name}");
            continue;
        }
        let written = written.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(names_of_layer(&written.file), llama_cpp_names(name), "{name}");
        if let Some(window) = sliding_window(folder.path()).filter(|_| !written.notices.is_empty()) {
            assert!(written.notices[0].ends_with(&format!("texts of more than {window} tokens")), "{name}");
            assert_eq!(written.notices[0].contains("this file as a backbone"), !name.starts_with("phi3"), "{name}");
        }
        if written.notices.iter().any(|notice| notice.contains("this file as a backbone")) {
            continue;
        }
        let [one, other] = [folder.path(), &*written.file].map(|path| {
            let mut llama = load(path, Kind::Float, Purpose::Training);
            if name != "llama_linear_scaling" {
                llama.set_context(fixture.number("context"));
            }
            over_the_row(&llama, &fixture.input_ids()).1
        });
        let differs = (&one - &other).abs().max().double_value(&[]);
        assert!(differs <= 1e-5 * one.abs().max().double_value(&[]), "{name}: {differs}");
    }
}

/// A GGUF file with a tokenizer alone.
fn with_tokenizer(folder: &Path, out: &Path, vocab_size: usize) -> TextTokenizer {
    let own = TextTokenizer::load(folder).expect("a tokenizer that llama.cpp has");
    let mut metadata = vec![("general.architecture".to_owned(), MetaValue::Text("llama".into()))];
    metadata.extend(
        own.gguf_keys(folder, vocab_size, &[own.eos_id().expect("an end").into()])
            .expect("a tokenizer that llama.cpp has"),
    );
    write_atomic(out, |out| medusa::gguf::write::write(out, &metadata, &[], &mut |_, _| Ok(())))
        .expect("a tokenizer that llama.cpp has");
    TextTokenizer::load(out).expect("a tokenizer that llama.cpp has")
}

const TEXTS: [&str; 6] = [
    "Explain beam search.",
    "  two  spaces\n\nand\ttabs ",
    "naïve café 北京 🦙 12345",
    "<|user|>who?<|end|>",
    "fn main() { println!(\"{}\", 1e-5); }",
    "",
];

#[test]
fn tokenizers_keep_their_ids() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    for (at, folder) in
        ["data/tiny/backbone", "tests/fixtures/models/tokenizer-mistral-v1-32000", "tests/fixtures/models/stories260K"]
            .into_iter()
            .enumerate()
    {
        let own = TextTokenizer::load(&root.join(folder)).unwrap();
        let written = with_tokenizer(&root.join(folder), &dir.path().join(format!("{at}.gguf")), own.vocab_size());
        for text in TEXTS {
            for add_special in [false, true] {
                let [one, other] = [&own, &written].map(|tokenizer| tokenizer.encode(text, add_special).unwrap());
                assert_eq!(one, other, "{folder}: {text:?}");
                let [one, other] = [&own, &written].map(|tokenizer| tokenizer.decode(&one, false).unwrap());
                assert_eq!(one, other, "{folder}: {text:?}");
            }
        }
        assert_eq!((own.bos_id(), own.eos_id()), (written.bos_id(), written.eos_id()), "{folder}");
    }
}

#[test]
fn a_tokenizer_that_llama_cpp_does_not_have_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let unigram =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers/user-defined-unigram-identity.model");
    let bytes = medusa::files::read(&unigram).unwrap();
    write_atomic(&dir.path().join("tokenizer.model"), |out| std::io::Write::write_all(out, &bytes)).unwrap();
    let error = TextTokenizer::load(dir.path()).unwrap().gguf_keys(dir.path(), 100, &[]).unwrap_err().to_string();
    assert!(error.contains("tokenizer.model: cannot be written to a GGUF file: only SentencePiece's BPE"), "{error}");
}

#[test]
fn what_was_trained_is_merged_and_the_file_is_a_backbone_for_every_export() {
    let small = SmallRun::new();
    small.edit(
        "recipe.toml",
        "[stage.medusa1]",
        "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8\ntarget_modules = [\"q_proj\"]",
    );
    small.train(&[]).succeeded();
    let no_tokenizer = ["export", "--format", "gguf", "--backbone", "backbone", "--out", "out"];
    small.medusa(&no_tokenizer).failed(1, &["backbone has no tokenizer", "tokenizer.json"]);
    write_tokenizer(&small.path("backbone"));
    let export = |format: &str, more: &[&str]| {
        small.medusa(&[&["export", "--heads", "run/final", "--format", format], more].concat())
    };
    let ended = export("gguf", &["--out", "gguf", "--dtype", "float32"]).succeeded();
    assert!(ended.stderr.contains("the heads are not in the file"), "{}", ended.stderr);
    assert_eq!(small.names("gguf"), ["backbone-F32.gguf", "medusa.sha256"]);
    export("merged", &["--out", "merged", "--dtype", "float32"]).succeeded();
    let logits = |path: &str| {
        let llama = load(&small.path(path), Kind::Float, Purpose::Training);
        tch::no_grad(|| over_the_row(&llama, &Tensor::from_slice(&[3i64, 1, 4, 1, 5])).1)
    };
    assert!((logits("gguf/backbone-F32.gguf") - logits("merged")).abs().max().double_value(&[]) < 1e-5);

    small
        .medusa(&["export", "--format", "gguf", "--backbone", "backbone", "--gguf-type", "Q8_0", "--out", "blocks"])
        .succeeded();
    let from_blocks = ["--backbone", "blocks/backbone-Q8_0.gguf", "--dtype", "float32", "--out", "of-blocks"];
    export("merged", &from_blocks).succeeded();
    let files = WeightFiles::open(&small.path("of-blocks")).unwrap();
    assert!(files.contains("model.layers.0.self_attn.q_proj.weight"), "a weight in blocks is written, too");

    small.write_tokenizer(48);
    small.write("blocks/tokenizer.json", small.read("backbone/tokenizer.json"));
    small.edit("recipe.toml", "path = \"backbone\"", "path = \"blocks\"");
    let backbone_bytes = || {
        let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).unwrap();
        plan["memory"]["groups"][0]["weight_bytes"].as_u64().unwrap()
    };
    let in_blocks = backbone_bytes();
    small.edit("recipe.toml", "path = \"blocks\"", "path = \"of-blocks\"");
    assert!(in_blocks < backbone_bytes(), "the plan counts blocks as blocks");
    small.edit("recipe.toml", "path = \"of-blocks\"", "path = \"blocks\"");
    let checked = small.train(&["--check"]).succeeded().stderr;
    let said = "blocks/tokenizer.json: used in the place of what blocks/backbone-Q8_0.gguf says";
    assert!(checked.contains(said), "a recipe may name the folder: {checked}");
}

#[test]
fn flags_of_heads_are_refused() {
    let small = SmallRun::new();
    let refused = |more: &[&str], fact: &str| {
        small.medusa(&[&["export", "--backbone", "backbone", "--out", "out"], more].concat()).failed(2, &[fact]);
    };
    refused(&["--format", "gguf", "--dtype", "bfloat16", "--gguf-type", "F16"], "--dtype and --gguf-type both say");
    refused(&["--format", "gguf", "--pickle"], "--pickle does nothing with --format gguf");
    refused(&["--format", "vllm"], "--format vllm needs --heads");
    small.medusa(&["export", "--format", "gguf", "--out", "out"]).failed(2, &["--format gguf needs the backbone"]);
}
