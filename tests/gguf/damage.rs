//! Damaged and lying files: each is one error that names the file and what is wrong.

use std::error::Error;
use std::path::Path;

use medusa::data::chat_template::ChatTemplate;
use medusa::data::tokenize::TextTokenizer;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use tch::{Device, Kind};

use super::builder::{GgufBuilder, Meta};
use super::llama;

/// What is done to a file, and part of the error.
type Damage = (&'static str, fn(&mut GgufBuilder));

fn array(kind: u32, count: u64, bytes: &[u8]) -> Meta {
    Meta::Raw(9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
}

fn text(length: u64, bytes: &[u8]) -> Meta {
    Meta::Raw(8, [&length.to_le_bytes()[..], bytes].concat())
}

const DAMAGES: &[Damage] = &[
    ("expected the bytes \"GGUF\"", |gguf| gguf.magic = *b"GGML"),
    ("expected GGUF version 2 or 3, got 1", |gguf| gguf.version = 1),
    ("expected GGUF version 2 or 3, got 4", |gguf| gguf.version = 4),
    ("big-endian", |gguf| gguf.version = 3u32.swap_bytes()),
    // Metadata.
    ("general.architecture: expected the name", |gguf| gguf.remove("general.architecture")),
    ("general.architecture: expected the name", |gguf| gguf.set("general.architecture", Meta::U32(1))),
    ("`model_type`: expected one of", |gguf| gguf.set("general.architecture", Meta::Text("gptq".into()))),
    ("is not supported: it has", |gguf| gguf.set("general.architecture", Meta::Text("qwen3_moe".into()))),
    ("general.alignment: expected a power of two", |gguf| gguf.set("general.alignment", Meta::U32(24))),
    ("general.alignment: expected a power of two", |gguf| gguf.set("general.alignment", Meta::U32(0))),
    ("type 77", |gguf| gguf.set("general.name", Meta::Raw(77, vec![0; 8]))),
    ("an array in an array", |gguf| gguf.set("general.name", array(9, 1, &[0; 24]))),
    ("cut off in the 1152921504606846976 elements", |gguf| gguf.set("general.name", array(4, 1 << 60, &[]))),
    ("cut off in the 18446744073709551615 elements", |gguf| gguf.set("general.name", array(8, u64::MAX, &[]))),
    ("elements of general.name: expected at most 4194304, got 5000000", |gguf| {
        gguf.set("general.name", array(0, 5_000_000, &vec![0; 5_000_000]));
    }),
    ("cut off in general.name", |gguf| gguf.set("general.name", text(1 << 50, b"x"))),
    ("bytes of general.name: expected at most 4194304, got 5000000", |gguf| {
        gguf.set("general.name", text(5_000_000, &vec![b'x'; 5_000_000]));
    }),
    ("general.name: not UTF-8", |gguf| gguf.set("general.name", text(2, &[0xff, 0xfe]))),
    ("general.name: expected at most 9223372036854775807", |gguf| {
        gguf.set("general.name", Meta::Raw(10, vec![0xff; 8]))
    }),
    ("metadata key \"general.architecture\" is there twice", |gguf| {
        gguf.metadata.push(("general.architecture".into(), Meta::U32(3)));
    }),
    ("metadata key 0: expected at most 1024, got 2000", |gguf| {
        gguf.metadata.insert(0, ("k".repeat(2000), Meta::U32(3)))
    }),
    // The config.
    ("`num_hidden_layers`: expected at most", |gguf| gguf.set("llama.block_count", Meta::U32(1 << 20))),
    ("num_hidden_layers: expected 2 as in the weights, got 1", |gguf| gguf.set("llama.block_count", Meta::U32(1))),
    ("no tensor \"model.layers.2", |gguf| gguf.set("llama.block_count", Meta::U32(3))),
    ("missing field `hidden_size`", |gguf| gguf.remove("llama.embedding_length")),
    ("num_key_value_heads", |gguf| gguf.set("llama.attention.head_count_kv", Meta::U32(3))),
    ("llama.attention.value_length: expected attention.key_length = 8, got 16", |gguf| {
        gguf.set("llama.attention.value_length", Meta::U32(16));
    }),
    ("llama.rope.freq_base: expected a number, got", |gguf| gguf.set("llama.rope.freq_base", Meta::Text("big".into()))),
    ("llama.rope.freq_base: expected a finite number, got inf", |gguf| {
        gguf.set("llama.rope.freq_base", Meta::F32(f32::INFINITY));
    }),
    ("llama.attention.layer_norm_rms_epsilon: expected a finite number, got NaN", |gguf| {
        gguf.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN));
    }),
    ("llama.attention.sliding_window_pattern: expected true or false for each layer, got 1", |gguf| {
        gguf.set("llama.attention.sliding_window_pattern", Meta::I32s(vec![1, 0]));
    }),
    ("llama.rope.scaling.attn_factor: expected 1, as there are no rope_factors tensors, got 1.5", |gguf| {
        gguf.set("llama.rope.scaling.attn_factor", Meta::F32(1.5));
    }),
    ("llama.rope.scaling.type: expected none or longrope beside rope_freqs", |gguf| {
        gguf.set("llama.rope.scaling.type", Meta::Text("linear".into()));
        gguf.set("llama.rope.scaling.factor", Meta::F32(4.0));
        gguf.random("rope_freqs.weight", &[4], "F32");
    }),
    ("model.gguf/config.json: `partial_rotary_factor`", |gguf| {
        gguf.set("llama.attention.head_count", Meta::Raw(11, i64::MAX.to_le_bytes().to_vec()));
    }),
    ("`partial_rotary_factor`", |gguf| gguf.set("llama.rope.dimension_count", Meta::U32(4))),
    ("`rope_scaling`: expected rope_type", |gguf| gguf.set("llama.rope.scaling.type", Meta::Text("spiral".into()))),
    ("`sliding_window`", |gguf| gguf.set("llama.attention.sliding_window", Meta::U32(16))),
    ("expected ids below vocab_size = 260", |gguf| gguf.set("tokenizer.ggml.eos_token_id", Meta::U32(9999))),
    // Tensors.
    ("tensor \"token_embd.weight\": expected the token embedding", |gguf| {
        gguf.tensors.remove(0);
    }),
    ("no tensor \"model.layers.0.mlp.down_proj.weight\"", |gguf| {
        gguf.tensors.retain(|tensor| tensor.name != "blk.0.ffn_down.weight");
    }),
    ("tensor \"blk.0.attn_q.weight\": expected one of F32", |gguf| gguf.tensors[3].kind = 16),
    ("got IQ2_XXS", |gguf| gguf.tensors[3].kind = 16),
    ("got type 200", |gguf| gguf.tensors[3].kind = 200),
    ("expected rows of whole blocks of 32", |gguf| gguf.tensors[3].shape = vec![64, 16]),
    ("expected shape [32, 32], got [16, 64]", |gguf| gguf.tensors[3].shape = vec![16, 64]),
    ("expected 1 to 4 axes, got 0", |gguf| gguf.tensors[3].shape = vec![]),
    ("expected 1 to 4 axes, got 5", |gguf| gguf.tensors[3].shape = vec![1, 1, 1, 32, 32]),
    ("expected a shape within the file", |gguf| gguf.tensors[3].shape = vec![1 << 40, 1 << 40]),
    ("expected a shape within the file", |gguf| gguf.tensors[3].shape = vec![0, 32]),
    ("expected an offset that is a multiple of 32, got 7", |gguf| gguf.tensors[3].offset = Some(7)),
    ("expected an offset behind the tensor before it", |gguf| gguf.tensors[3].offset = Some(32)),
    ("bytes within the file", |gguf| gguf.tensors[3].offset = Some(1 << 40)),
    ("bytes within the file", |gguf| gguf.tensors[3].offset = Some(u64::MAX - 31)),
    ("tensor \"blk.0.attn_q.weight\" is there twice", |gguf| gguf.tensors[4].name = "blk.0.attn_q.weight".into()),
    ("has no place in the backbone", |gguf| gguf.random("blk.0.ffn_gate_inp.weight", &[8, 32], "F32")),
    ("expected finite numbers", |gguf| gguf.tensors[1].data[..4].copy_from_slice(&f32::NAN.to_le_bytes())),
    // The tokenizer.
    ("tokenizer.ggml.model: expected llama (SentencePiece) or gpt2", |gguf| {
        gguf.set("tokenizer.ggml.model", Meta::Text("bert".into()));
    }),
    ("a tokenizer.json beside the file", |gguf| gguf.set("tokenizer.ggml.pre", Meta::Text("default".into()))),
    ("tokenizer.ggml.pre: expected text, got no such key", |gguf| gguf.remove("tokenizer.ggml.pre")),
    ("tokenizer.ggml.tokens: expected an array of text", |gguf| gguf.set("tokenizer.ggml.tokens", Meta::I32s(vec![1]))),
    ("tokenizer.ggml.token_type: expected a whole number for each of 260", |gguf| {
        gguf.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 9]));
    }),
    ("token \"ab\" is there twice", |gguf| {
        gguf.set("tokenizer.ggml.tokens", Meta::Texts(vec!["ab".into(); 260]));
    }),
    ("tokenizer.ggml.merges: expected an array of text", |gguf| gguf.remove("tokenizer.ggml.merges")),
    ("tokenizer.json", |gguf| gguf.set("tokenizer.ggml.merges", Meta::Texts(vec!["a unheard".into()]))),
    ("tokenizer.ggml.bos_token_id: expected an id below 260", |gguf| {
        gguf.set("tokenizer.ggml.bos_token_id", Meta::U32(4000))
    }),
    ("tokenizer.ggml.add_bos_token: expected true or false", |gguf| {
        gguf.set("tokenizer.ggml.add_bos_token", Meta::U32(1))
    }),
    ("tokenizer.chat_template: expected text", |gguf| gguf.set("tokenizer.chat_template", Meta::U32(1))),
    // Shards.
    ("split.count: expected at most 1024", |gguf| gguf.set("split.count", Meta::U32(60_000))),
    ("cannot read", |gguf| gguf.set("split.count", Meta::U32(2))),
    ("expected the first", |gguf| gguf.set("split.no", Meta::U32(1))),
    ("expected the shards with 99 tensors", |gguf| gguf.set("split.tensors.count", Meta::U32(99))),
];

/// The damaged files without their data.
pub(crate) fn damaged_files() -> impl Iterator<Item = Vec<u8>> {
    DAMAGES.iter().map(|(_, damage)| {
        let mut gguf = llama();
        damage(&mut gguf);
        gguf.header()
    })
}

/// Everything that a command reads of a backbone.
fn use_all(path: &Path) -> Result<(), String> {
    fn text(error: impl Error + Send + Sync + 'static) -> String {
        format!("{:#}", anyhow::Error::from(error))
    }
    Llama::load(path, Kind::Float, Device::Cpu, Purpose::Training).map_err(text)?;
    TextTokenizer::load(path).map_err(text)?;
    ChatTemplate::load(path).map_err(text)?;
    Ok(())
}

#[test]
fn each_damage_is_one_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    use_all(&llama().write(&path)).expect("the file as it should be");
    for (expected, damage) in DAMAGES {
        let mut gguf = llama();
        damage(&mut gguf);
        let error = use_all(&gguf.write(&path)).expect_err(expected);
        assert!(error.contains(expected) && error.contains("model"), "{expected}: {error}");
        assert!(error.lines().count() == 1, "{error}");
    }
    assert!(DAMAGES.len() >= 40);
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let whole = llama().bytes();
    for length in (0..whole.len() - 1).step_by(97) {
        medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, &whole[..length])).unwrap();
        let error = use_all(&path).expect_err("a part of a file");
        assert!(error.contains("model.gguf"), "{length}: {error}");
    }
}
