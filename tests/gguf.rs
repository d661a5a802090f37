//! Promise: a GGUF file may stand where a backbone's folder does. Its blocks are the numbers of ggml's reference code, bit for bit; its config,
//! tokenizer and template are those of a Hugging Face folder; and what is damaged or lies is one error that names the file.

mod builder;
pub(crate) mod damage;
mod export;

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use medusa::data::tokenize::TextTokenizer;
use medusa::engine::cpu::CpuEngine;
use medusa::gguf::file::{GgufFile, in_folder};
use medusa::gguf::folder;
use medusa::gguf::types::TYPES;
use medusa::model::attention::RowMask;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::weights::WeightFiles;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use builder::{GgufBuilder, Meta};

/// A file of tests/fixtures/ as JSON.
fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    serde_json::from_slice(&medusa::files::read(&path).expect("a fixture")).expect("JSON")
}

/// The fixture is written by scripts/fixtures/make_gguf_blocks.py with the `gguf` package.
#[test]
fn blocks_of_every_type_are_the_numbers_of_ggml_bit_for_bit() {
    let all = fixture("gguf_blocks.json");
    for kind in &TYPES {
        let [blocks, expected] =
            ["blocks", "numbers"].map(|key| STANDARD.decode(all[kind.name][key].as_str().unwrap()).unwrap());
        let expected: Vec<u32> = expected.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect();
        assert!(expected.len() >= 6 * kind.numbers, "{}", kind.name);
        let mut numbers = vec![0.0; blocks.len() / kind.bytes * kind.numbers];
        kind.dequantize(&blocks, &mut numbers);
        assert_eq!(numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>(), expected, "{}", kind.name);
        let again = blocks.repeat(5000);
        let mut many = vec![0.0; numbers.len() * 5000];
        kind.dequantize_in_parallel(&again, &mut many);
        assert!(many.chunks(numbers.len()).all(|part| part == numbers), "{}", kind.name);
    }
}

/// A llama of two layers whose file says so, with a byte-level vocabulary.
pub(crate) fn llama() -> GgufBuilder {
    let mut gguf = GgufBuilder::default();
    gguf.set("general.architecture", Meta::Text("llama".into()));
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 8),
        ("vocab_size", 260),
    ] {
        gguf.set(&format!("llama.{key}"), Meta::U32(value));
    }
    gguf.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    gguf.set("llama.rope.freq_base", Meta::F32(1e6));
    vocabulary(&mut gguf);
    let mut tensor = |name: &str, shape: &[usize], kind: &str| gguf.random(name, shape, kind);
    tensor("token_embd.weight", &[260, 32], "Q8_0");
    tensor("output_norm.weight", &[32], "F32");
    for layer in 0..2 {
        for (part, shape, kind) in [
            ("attn_norm", &[32][..], "F32"),
            ("attn_q", &[32, 32], "Q4_1"),
            ("attn_k", &[16, 32], "Q5_0"),
            ("attn_v", &[16, 32], "F16"),
            ("attn_output", &[32, 32], "BF16"),
            ("ffn_norm", &[32], "F32"),
            ("ffn_gate", &[64, 32], "Q4_0"),
            ("ffn_up", &[64, 32], "IQ4_NL"),
            ("ffn_down", &[32, 64], "Q5_1"),
        ] {
            tensor(&format!("blk.{layer}.{part}.weight"), shape, kind);
        }
    }
    gguf
}

/// A wider one in blocks of 256 numbers, with an LM head of its own.
fn wide_llama() -> GgufBuilder {
    let mut gguf = llama();
    for (key, value) in
        [("embedding_length", 256), ("feed_forward_length", 512), ("rope.dimension_count", 64), ("block_count", 1)]
    {
        gguf.set(&format!("llama.{key}"), Meta::U32(value));
    }
    gguf.tensors.clear();
    for (name, shape, kind) in [
        ("token_embd", &[260, 256][..], "Q4_K"),
        ("output_norm", &[256], "F32"),
        ("output", &[260, 256], "Q6_K"),
        ("blk.0.attn_norm", &[256], "F32"),
        ("blk.0.attn_q", &[256, 256], "Q4_K"),
        ("blk.0.attn_k", &[128, 256], "Q5_K"),
        ("blk.0.attn_v", &[128, 256], "Q6_K"),
        ("blk.0.attn_output", &[256, 256], "Q4_K"),
        ("blk.0.ffn_norm", &[256], "F32"),
        ("blk.0.ffn_gate", &[512, 256], "Q5_K"),
        ("blk.0.ffn_up", &[512, 256], "Q4_K"),
        ("blk.0.ffn_down", &[256, 512], "Q6_K"),
    ] {
        gguf.random(&format!("{name}.weight"), shape, kind);
    }
    gguf
}

/// 256 bytes, a merge and special tokens.
fn vocabulary(gguf: &mut GgufBuilder) {
    let visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut other = (0x100..).map(|code| char::from_u32(code).expect("a character"));
    let mut tokens: Vec<String> = (0..=u8::MAX)
        .map(|byte| if visible(&byte) { char::from(byte) } else { other.next().expect("another") }.to_string())
        .collect();
    tokens.extend(["ab", "<|start|>", "<|im_end|>", "<tool>"].map(str::to_owned));
    let kinds = [vec![1; 257], vec![3, 3, 4]].concat();
    gguf.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    gguf.set("tokenizer.ggml.pre", Meta::Text("smollm".into()));
    gguf.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    gguf.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    gguf.set("tokenizer.ggml.merges", Meta::Texts(vec!["a b".into()]));
    gguf.set("tokenizer.ggml.bos_token_id", Meta::U32(257));
    gguf.set("tokenizer.ggml.eos_token_id", Meta::U32(258));
    gguf.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    gguf.set("tokenizer.chat_template", Meta::Text("{{ messages[0]['content'] }}".into()));
}

/// A llama with a SentencePiece vocabulary. Converters write the unknown token as a control token, as in Gemma 3's files.
fn sentencepiece() -> GgufBuilder {
    let mut gguf = llama();
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain(bytes).chain(["a".to_owned()]);
    gguf.set("tokenizer.ggml.model", Meta::Text("llama".into()));
    gguf.set("tokenizer.ggml.tokens", Meta::Texts(tokens.collect()));
    gguf.set("tokenizer.ggml.token_type", Meta::I32s([vec![3; 3], vec![6; 256], vec![1]].concat()));
    let scores = [&6u32.to_le_bytes()[..], &260u64.to_le_bytes(), &[0; 4 * 260]].concat();
    gguf.set("tokenizer.ggml.scores", Meta::Raw(9, scores));
    for (key, id) in [("unknown", 0), ("bos", 1), ("eos", 2)] {
        gguf.set(&format!("tokenizer.ggml.{key}_token_id"), Meta::U32(id));
    }
    gguf.set("tokenizer.ggml.add_space_prefix", Meta::Bool(false));
    gguf
}

/// Files with what [`llama`] has not: another vocabulary, scalings of positions, windows, biases, shards.
pub(crate) fn variants() -> Vec<GgufBuilder> {
    let with = |keys: &[(&str, Meta)], tensors: &[&str]| {
        let mut gguf = llama();
        keys.iter().for_each(|(key, value)| gguf.set(key, value.clone()));
        tensors.iter().for_each(|name| gguf.random(name, &[4], "F32"));
        gguf
    };
    let flags = Meta::Raw(9, [&7u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 0]].concat());
    let text = |text: &str| Meta::Text(text.into());
    let (kind, window) = ("llama.rope.scaling.type", "llama.attention.sliding_window_pattern");
    let long = ["rope_factors_short.weight", "rope_factors_long.weight"];
    let doubled = ("llama.rope.scaling.factor", Meta::F32(2.0));
    let mut gemma = llama();
    gemma.metadata.iter_mut().for_each(|(key, _)| *key = key.replace("llama.", "gemma3."));
    gemma.set("general.architecture", text("gemma3"));
    vec![
        sentencepiece(),
        gemma,
        with(&[], &["rope_freqs.weight"]),
        with(&[("llama.rope.scaling.original_context_length", Meta::U32(32))], &long),
        with(&[("llama.rope.scaling.attn_factor", Meta::F32(2.0))], &[]),
        with(&[(kind, text("linear")), doubled.clone()], &["rope_freqs.weight"]),
        with(&[(kind, text("yarn")), doubled], &[]),
        with(&[(window, flags)], &[]),
        with(&[(window, Meta::I32s(vec![1, 0]))], &[]),
        with(&[(window, Meta::U32(6))], &[]),
        with(&[("tokenizer.ggml.pre", text("gpt-2"))], &[]),
        with(&[("tokenizer.ggml.pre", text("qwen2"))], &["blk.0.attn_output.bias", "blk.0.ffn_gate.bias"]),
        with(&[("split.count", Meta::U32(2)), ("split.no", Meta::U32(0))], &[]),
        with(&[("split.count", text("two"))], &[]),
    ]
}

#[test]
fn the_config_of_a_file_is_that_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = llama().write(&dir.path().join("model.gguf"));
    let (config, reported) = LlamaConfig::load_reporting(&path).unwrap();
    assert_eq!(reported, [""; 0]);
    assert_eq!((config.num_hidden_layers, config.head_dim, config.vocab_size), (2, 8, 260));
    assert_eq!((config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings), (1e-5, 1e6, true));
    assert_eq!(config.eos_token_ids, [258]);
    assert_eq!(in_folder(dir.path()).unwrap(), Some(path.clone()), "the only one of a folder");
    llama().write(&dir.path().join("other.gguf"));
    let error = in_folder(dir.path()).unwrap_err().to_string();
    assert!(error.contains("several GGUF files (model.gguf, other.gguf)"), "{error}");
}

/// Rows of queries and keys are interleaved in the file; blocks stay blocks, and decode like their numbers.
#[test]
fn weights_in_blocks_compute_what_their_numbers_compute() {
    let dir = tempfile::tempdir().unwrap();
    let path = llama().write(&dir.path().join("model.gguf"));
    let files = WeightFiles::open(&path).unwrap();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let blocks = files.blocks(name, &[16, 32]).unwrap().expect("Q5_0");
    let dense = files.mapped(name, &[16, 32]).unwrap();
    let quantized = medusa::model::stored::QuantizedWeight::from_blocks(blocks, Kind::Float);
    assert_eq!(quantized.dequantize(Kind::Float), dense);
    let file = GgufFile::open(&path).unwrap();
    assert!(file.entry("blk.1.attn_k.weight").is_some());
    let [blocks, numbers] = [Purpose::Training, Purpose::FineTuning(Kind::Float)]
        .map(|purpose| Llama::load(&path, Kind::Float, Device::Cpu, purpose).unwrap());
    let ids = Tensor::from_slice(&[1i64, 2, 3, 200]).view([1, 4]);
    let rows = RowMask::causal(4, &blocks.config, Device::Cpu);
    let [one, other] =
        [&blocks, &numbers].map(|llama| llama.logits(&llama.hidden_states(&ids, &rows, Adapters::Off), Adapters::Off));
    assert!((one - other).abs().max().double_value(&[]) < 1e-5);
    assert!(blocks.weights().len() < numbers.weights().len(), "blocks are not held as numbers");
}

/// Tied embeddings and an LM head of its own; q, k and v of different types, one of them dense.
#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA and F16C")]
fn decoding_on_the_cpus_kernels_multiplies_the_blocks() {
    let dir = tempfile::tempdir().unwrap();
    for (name, gguf) in [("narrow.gguf", llama()), ("wide.gguf", wide_llama())] {
        let path = gguf.write(&dir.path().join(name));
        for kind in [Kind::Float, Kind::BFloat16] {
            let [blocks, numbers] = [Purpose::Decoding, Purpose::Batches]
                .map(|purpose| Llama::load(&path, kind, Device::Cpu, purpose).unwrap());
            assert_eq!(CpuEngine::supports(&blocks), Ok(()), "{name}");
            let ids = Tensor::from_slice(&[1i64, 2, 3, 200, 259]).view([1, 5]);
            let rows = RowMask::causal(5, &blocks.config, Device::Cpu);
            let [ours, exact] = [&blocks, &numbers].map(|llama| {
                let states = llama.hidden_states(&ids, &rows, Adapters::Off);
                llama.logits(&states, Adapters::Off).to_kind(Kind::Double)
            });
            let off = ((&ours - &exact).norm() / exact.norm()).double_value(&[]);
            assert!(1e-5 < off && off < 0.1, "{name}, {kind:?}: activations are rounded to 8 bits: {off}");
            assert_eq!(blocks.embed(&ids), numbers.embed(&ids), "{name}");
            assert_eq!(
                blocks.lm_head_weight().to_kind(Kind::Float),
                numbers.lm_head_weight().to_kind(kind).to_kind(Kind::Float)
            );
            let embedded = Tensor::from_slice(&blocks.embed_numbers(&[200, 3])).to_kind(kind);
            assert_eq!(embedded, blocks.embed(&Tensor::from_slice(&[200i64, 3])).view([-1]), "{name}");
        }
    }
}

#[test]
fn text_becomes_the_ids_of_the_file_unless_a_tokenizer_lies_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = llama().write(&dir.path().join("model.gguf"));
    let tokenizer = TextTokenizer::load(&path).unwrap();
    assert_eq!(tokenizer.encode("ab1<|im_end|><tool>", true).unwrap(), [257, 256, i32::from(b'1'), 258, 259]);
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(257), Some(258)));
    assert!(tokenizer.is_special(258) && !tokenizer.is_special(259));
    let template = |path: &Path| folder::read_text(&path.join("chat_template.jinja")).unwrap();
    assert_eq!(template(&path), "{{ messages[0]['content'] }}");
    let beside = |name: &str, value: &Value| medusa::files::write_json(&dir.path().join(name), value).unwrap();
    let vocab = json!({"a": 0, "b": 1, "ab": 2});
    beside("tokenizer.json", &json!({"model": {"type": "BPE", "vocab": vocab, "merges": []}}));
    assert_eq!(TextTokenizer::load(&path).unwrap().encode("ab", true).unwrap(), [0, 1]);
    assert_eq!(folder::beside(&path), [dir.path().join("tokenizer.json")]);
}

#[test]
fn tokens_that_end_a_turn_do_so_whatever_their_type_and_those_of_phi_3_take_white_space() {
    let dir = tempfile::tempdir().unwrap();
    let mut gguf = llama();
    gguf.set("tokenizer.ggml.token_type", Meta::I32s([vec![1; 257], vec![3, 1, 4]].concat()));
    gguf.set("tokenizer.ggml.eos_token_id", Meta::U32(257));
    gguf.set("tokenizer.ggml.eot_token_id", Meta::U32(u32::MAX));
    let path = gguf.write(&dir.path().join("model.gguf"));
    assert_eq!(LlamaConfig::load(&path).unwrap().eos_token_ids, [257, 258]);
    let tokenizer = TextTokenizer::load(&path).unwrap();
    let newline = tokenizer.encode("\n", false).unwrap();
    assert_eq!(tokenizer.encode("<|im_end|>\na", false).unwrap(), [vec![258], newline, vec![i32::from(b'a')]].concat());
    gguf.set("general.name", Meta::Text("Phi-3 mini".into()));
    let tokenizer = TextTokenizer::load(&gguf.write(&path)).unwrap();
    assert_eq!(
        tokenizer.encode("<|im_end|>\na", false).unwrap(),
        [258, i32::from(b'a')],
        "white space goes to the token"
    );
}

#[test]
fn a_sentencepiece_vocabulary_has_bytes_and_an_unknown_token() {
    let mut gguf = sentencepiece();
    let dir = tempfile::tempdir().unwrap();
    let path = gguf.write(&dir.path().join("model.gguf"));
    let tokenizer = TextTokenizer::load(&path).unwrap();
    assert_eq!(tokenizer.encode("aé</s>", true).unwrap(), [1, 259, 3 + 0xc3, 3 + 0xa9, 2]);
    gguf.remove("tokenizer.ggml.unknown_token_id");
    let error = TextTokenizer::load(&gguf.write(&path)).unwrap_err().to_string();
    assert!(error.contains("expected one piece of the type UNKNOWN, got 0"), "{error}");
}

/// Medusa-2 of all weights writes a folder of its own, with the file's tokenizer and template.
#[test]
fn a_backbone_from_a_file_is_saved_as_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = llama().write(&dir.path().join("model.gguf"));
    let from_file = Llama::load(&path, Kind::Float, Device::Cpu, Purpose::FineTuning(Kind::Float)).unwrap();
    let saved = dir.path().join("saved");
    medusa::model::folder::save_folder(&saved, &from_file, &path).unwrap();
    let from_folder = Llama::load(&saved, Kind::Float, Device::Cpu, Purpose::FineTuning(Kind::Float)).unwrap();
    assert_eq!(from_file.config, from_folder.config);
    assert!(from_file.weights().iter().zip(from_folder.weights()).all(|((_, one), (_, other))| *one == other));
    let text = "ab1<|im_end|><tool>";
    let ids = [&path, &saved].map(|folder| TextTokenizer::load(folder).unwrap().encode(text, true).unwrap());
    assert_eq!(ids[0], ids[1]);
    assert!(saved.join("chat_template.jinja").is_file());
}
