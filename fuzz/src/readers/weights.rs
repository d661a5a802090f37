//! Files of tensors: safetensors, their index, torch.save's, and the folders that hold them.

use std::cell::LazyCell;
use std::fs;
use std::io::{Cursor, Write};
use std::path::Path;

use medusa::data::chat_template::ChatTemplate;
use medusa::data::tokenize::TextTokenizer;
use medusa::draft::heads::import::HeadsFile;
use medusa::formats::captured_states::{CapturedError, CapturedFile, StateSizes};
use medusa::gguf;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::peft;
use medusa::model::weights::pickle::Pickled;
use medusa::model::weights::{WeightFiles, files_of, files_with};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::scratch::{checked, choice, file, folder, write};

/// Bytes of data that a header is given.
const MOST_DATA: u64 = 64 << 10;

/// A header's JSON, and behind a NUL the data, as a safetensors file: the length of the header is right, and the data are cut or filled
/// up to what the header's tensors need.
pub(super) fn safetensors_file(input: &[u8]) -> Vec<u8> {
    let at = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (header, mut data) = (&input[..at], input.get(at + 1..).unwrap_or_default().to_vec());
    if let Ok(Value::Object(tensors)) = serde_json::from_slice(header) {
        let end = |tensor: &Value| tensor["data_offsets"][1].as_u64();
        let needed = tensors.values().filter_map(end).filter(|&end| end <= MOST_DATA).max();
        data.resize(needed.map_or(data.len(), |needed| needed as usize), 0x3c);
    }
    [&(header.len() as u64).to_le_bytes(), header, &data].concat()
}

/// What is read of all kinds of weight files.
fn weights(path: &Path) {
    let Some(files) = checked(path, WeightFiles::open_file(path)) else { return };
    for tensor in files.tensors() {
        let name = tensor.name.as_str();
        let (kind, shape) = (files.kind(name), files.shape(name).expect("a tensor of the list"));
        let _ = checked(path, files.mapped(name, &shape));
        let _ = checked(path, files.integers(name));
        let _ = checked(path, files.is_zero(name));
        if tensor.bytes < MOST_DATA as usize {
            let _ = checked(path, files.tensor(name, &shape, kind.unwrap_or(Kind::Float), Device::Cpu));
            let _ = checked(path, files.stored(name, &shape, Device::Cpu));
        }
        let _ = (checked(path, files.check(name, &[1, 2])), files.same_memory(name, name), files.file_of(name));
        let _ = checked(path, files.same_bits(name, name));
    }
    let _ = checked(path, files.fingerprint());
    files.release();
}

pub(super) fn safetensors(input: &[u8]) {
    let (raw, rest) = choice(input);
    let bytes = if raw == 0xff { rest.to_vec() } else { safetensors_file(input) };
    weights(&file("safetensors", "model.safetensors", &bytes));
}

/// A GGUF file: behind a 0xff as it is, else with data behind its header. All that a backbone's folder says is read of it.
pub(super) fn gguf(input: &[u8]) {
    let (raw, header) = choice(input);
    let data = if raw == 0xff { vec![] } else { vec![0x3c; MOST_DATA as usize] };
    let path = file("gguf", "model.gguf", &[header, &data].concat());
    weights(&path);
    let _ = checked(&path, LlamaConfig::load_reporting(&path));
    let _ = checked(&path, TextTokenizer::load(&path));
    let _ = checked(&path, ChatTemplate::load(&path));
    let _ =
        (gguf::folder::paths(&path), gguf::folder::beside(&path), gguf::file::in_folder(gguf::folder::on_disk(&path)));
}

/// An index beside two shards; behind a `t`, one of torch.save's; without a byte, none.
pub(super) fn index(input: &[u8]) {
    let folder = folder("weights_index");
    for (name, tensor) in [("a.safetensors", "a"), ("b.safetensors", "b")] {
        let path = folder.join(name);
        if !path.exists() {
            let header = format!("{{\"{tensor}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}}}");
            write(&path, &safetensors_file(header.as_bytes()));
        }
    }
    let (form, rest) = choice(input);
    let names = ["model.safetensors.index.json", "pytorch_model.bin.index.json"];
    let (name, index) = if form == b't' { (names[1], rest) } else { (names[0], input) };
    names.iter().for_each(|name| drop(fs::remove_file(folder.join(name))));
    if !input.is_empty() {
        write(&folder.join(name), index);
        let _ = checked(&folder.join(name), WeightFiles::open_file(&folder.join(name)));
    }
    let _ = (checked(&folder, files_of(&folder)), checked(&folder, files_with(&folder, &["a"])));
    if let Some(files) = checked(&folder, WeightFiles::open(&folder)) {
        let _ = (files.names().len(), files.tensors());
        files.release();
    }
    let _ = checked(&folder, WeightFiles::open_tensors(&folder, &["a"]));
}

/// The header of a file of hidden states.
const OTHER_STATES: &[u8] = br#"{"hidden_states":{"dtype":"F32","shape":[1,2,4],"data_offsets":[0,32]},"token_ids":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}}"#;

pub(super) fn captured_states(input: &[u8]) {
    let path = file("captured_states", "hs_0.safetensors", &safetensors_file(input));
    let sizes = StateSizes { hidden_size: 4, vocab_size: 64 };
    let captured = CapturedFile::open(&path, sizes);
    let _ = captured.as_ref().err().map(CapturedError::kind);
    let Some(captured) = checked(&path, captured) else { return };
    let _ = (checked(&path, captured.token_ids(64)), checked(&path, captured.loss_mask()));
    let _ = captured.check_like(&captured);
    let other = file("captured_states", "hs_1.safetensors", &safetensors_file(OTHER_STATES));
    let _ = checked(&path, captured.check_like(&CapturedFile::open(&other, sizes).expect("states of ours")));
    if captured.tokens > 0 && captured.tokens < 64 {
        let mut states = vec![0; captured.state_bytes() * 2];
        let last = captured.tokens - 1;
        let _ = checked(&path, captured.read_states(captured.layers - 1, &[0, last], &mut states));
    }
}

/// Nothing here is a file, so errors have nothing to name.
pub(super) fn pickle(input: &[u8]) {
    let Ok(pickled) = Pickled::read(input) else { return };
    assert!(pickled.length <= input.len());
    let _ = (pickled.tensors(), pickled.storages().len(), pickled.texts(), pickled.says("little_endian"));
}

/// A file of torch.save: raw, as the zip or the stream that the bytes are, or as a zip whose pickle the bytes are.
pub(super) fn torch_file(input: &[u8]) {
    let (form, rest) = choice(input);
    let bytes = if form == b'z' { archive(rest) } else { rest.to_vec() };
    weights(&file("torch_file", "pytorch_model.bin", &bytes));
}

/// A zip with a pickle, and three storages of 256 bytes.
fn archive(pickle: &[u8]) -> Vec<u8> {
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let storage = [0x3c; 256];
    let parts: [(&str, &[u8]); 5] = [
        ("archive/data.pkl", pickle),
        ("archive/byteorder", b"little"),
        ("archive/data/0", &storage),
        ("archive/data/1", &storage),
        ("archive/data/2", &storage),
    ];
    for (name, bytes) in parts {
        zip.start_file(name, stored).and_then(|()| Ok(zip.write_all(bytes)?)).expect("a zip in memory");
    }
    zip.finish().expect("a zip in memory").into_inner()
}

/// A backbone of a few weights.
pub(super) const BACKBONE: &str = r#"{"model_type":"llama","hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
    "num_attention_heads":2,"num_key_value_heads":1,"head_dim":4,"vocab_size":16,"max_position_embeddings":32,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"tie_word_embeddings":false,"hidden_act":"silu","torch_dtype":"float32"}"#;

pub(super) fn backbone_config() -> LlamaConfig {
    let path = file("backbone", "config.json", BACKBONE.as_bytes());
    LlamaConfig::load(path.parent().expect("a folder")).expect("a config that is read")
}

/// adapter_config.json, and behind a NUL the header of adapter_model.safetensors.
pub(super) fn peft(input: &[u8]) {
    thread_local! {
        static CONFIG: LazyCell<LlamaConfig> = LazyCell::new(backbone_config);
    }
    let at = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (config, header) = (&input[..at], input.get(at + 1..).unwrap_or_default());
    let folder = folder("peft");
    write(&folder.join("adapter_config.json"), config);
    write(&folder.join("adapter_model.safetensors"), &safetensors_file(header));
    let mut backbone = CONFIG.with(|config| Llama::random((*config).clone(), Kind::Float, Device::Cpu, 0));
    let _ = checked(&folder, peft::attach(&mut backbone, &folder, None));
}

/// Heads: config.json, and behind a NUL a safetensors header.
pub(super) fn heads(input: &[u8]) {
    thread_local! {
        static CONFIG: LazyCell<LlamaConfig> = LazyCell::new(backbone_config);
    }
    let at = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (config, header) = (&input[..at], input.get(at + 1..).unwrap_or_default());
    let folder = folder("heads");
    write(&folder.join("config.json"), config);
    write(&folder.join("heads.safetensors"), &safetensors_file(header));
    let Some(heads) = checked(&folder, HeadsFile::open(&folder)) else { return };
    let _ = (checked(&folder, heads.check_alone()), heads.layout(), heads.base(), heads.files());
    let _ = checked(&folder, heads.parameters());
    let _ = checked(&folder, heads.bytes());
    let _ = checked(&folder, heads.prefix_tensors());
    let _ = checked(&folder, heads.prefix_tensor("prefix.layers.0.self_attn.q_proj.weight", &[8, 8]));
    let _ = (heads.path(), heads.kind(), heads.config().is_some(), checked(&folder, heads.sha256()));
    let fits = CONFIG.with(|config| checked(&folder, heads.check(config)));
    let shape = heads.shape();
    if fits.is_some() && shape.medusa_num_heads * (shape.medusa_num_layers + 1) < 64 {
        for place in shape.places() {
            let _ = checked(&folder, heads.tensor(place, Kind::Float));
            let _ = checked(&folder, heads.stored(place));
        }
        let _ = checked(&folder, heads.lm_head());
        let _ = checked(&folder, heads.compare_lm_head(|| Tensor::zeros([16, 8], (Kind::Float, Device::Cpu))));
    }
}
