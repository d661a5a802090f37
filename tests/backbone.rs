//! Promise: a Hugging Face folder computes what transformers computes, and an unusable folder is refused with the
//! reason.

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use medusa::engine::RowTokens;
use medusa::engine::fastest::fastest;
use medusa::files::write_atomic;
use medusa::model::attention::RowMask;
use medusa::model::config::LlamaConfig;
use medusa::model::kv_cache::KvCache;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::new_tokens::NewTokens;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::published::published;

/// Float32 sums in different order over two to five layers; measured differences are below 1e-5.
pub(crate) const FLOAT32_TOLERANCE: f64 = 1e-4;
/// Half precision has 11 significant bits, bfloat16 8: for logits up to 10, after two layers.
const HALF_TOLERANCE: f64 = 0.05;
const BFLOAT16_TOLERANCE: f64 = 0.4;

const FIXTURES: [&str; 8] = [
    "llama_own_head",
    "llama_tied_theta_500000_mqa",
    "llama3_scaling",
    "llama_linear_scaling",
    "llama_wide_heads",
    "llama_attention_bias",
    "mistral_sliding_window",
    "mistral_no_window",
];
/// A fixture has its config in both formats.
pub(crate) const SPELLINGS: [&str; 2] = ["config", "config_v4"];

/// A small model and transformers' output for it, from `scripts/fixtures/make_fixtures.py`.
pub(crate) struct Fixture {
    path: PathBuf,
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/{name}.safetensors"));
        let bytes = std::fs::read(&path).expect("a fixture of the project");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
        let metadata = metadata.metadata().clone().expect("its birth certificate");
        Self { path, bytes, metadata }
    }

    pub(crate) fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a whole file")
    }

    /// The weights without the reference values.
    fn weights(&self) -> Vec<(String, TensorView<'_>)> {
        let mut all = self.tensors().tensors();
        all.retain(|(name, _)| !name.starts_with("reference."));
        all
    }

    /// The model as a Hugging Face folder.
    pub(crate) fn folder(&self, spelling: &str) -> TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write(&folder.path().join("config.json"), self.metadata[spelling].as_bytes());
        safetensors::serialize_to_file(self.weights(), None, &folder.path().join("model.safetensors"))
            .expect("a written file");
        folder
    }

    pub(crate) fn reference(&self, name: &str) -> Tensor {
        tensor(&self.tensors(), &format!("reference.{name}"))
    }

    pub(crate) fn input_ids(&self) -> Tensor {
        self.reference("input_ids")
    }

    /// A text of its metadata.
    pub(crate) fn text(&self, key: &str) -> &str {
        &self.metadata[key]
    }

    /// A number of its metadata.
    pub(crate) fn number(&self, key: &str) -> i64 {
        self.text(key).parse().expect("a number")
    }

    /// The fixture's origin, for failure messages.
    fn origin(&self) -> String {
        format!(
            "{} (torch {}, transformers {}, seed {}; made again by `python3 scripts/fixtures/make_fixtures.py`)",
            self.path.display(),
            self.metadata["torch"],
            self.metadata["transformers"],
            self.metadata["seed"]
        )
    }
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    write_atomic(path, |out| out.write_all(bytes)).expect("a written file");
}

pub(crate) fn tensor(tensors: &SafeTensors, name: &str) -> Tensor {
    let view = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let shape: Vec<i64> = view.shape().iter().map(|&d| i64::try_from(d).expect("a number in range")).collect();
    let kind = match view.dtype() {
        safetensors::Dtype::F32 => Kind::Float,
        safetensors::Dtype::I64 => Kind::Int64,
        other => panic!("{name}: a reference of dtype {other:?}"),
    };
    Tensor::from_data_size(view.data(), &shape, kind)
}

/// Checks that every element is within `tolerance`; reports the largest difference, its first position and the
/// reference's origin.
pub(crate) fn assert_near(what: &str, got: &Tensor, expected: &Tensor, tolerance: f64, origin: &str) {
    assert_eq!(got.size(), expected.size(), "{what}: shape, against {origin}");
    let difference = (got.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs();
    let largest = difference.max().double_value(&[]);
    if largest <= tolerance {
        return; // false for NaN
    }
    let bad = difference.le(tolerance).logical_not().nonzero();
    let first = Vec::<i64>::try_from(bad.get(0)).expect("a number in range");
    panic!(
        "{what}: {} of {} elements differ by more than {tolerance}, at most by {largest}, first at {first:?}: got {}, expected {}, from {origin}",
        bad.size()[0],
        difference.numel(),
        got.double_value(&first),
        expected.double_value(&first)
    );
}

pub(crate) fn load(folder: &Path, kind: Kind, purpose: Purpose) -> Llama {
    Llama::load(folder, kind, Device::Cpu, purpose).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// Hidden states `[T, H]` and logits `[T, V]` of one row, in one pass.
pub(crate) fn over_the_row(llama: &Llama, ids_t: &Tensor) -> (Tensor, Tensor) {
    let rows = RowMask::causal(ids_t.size()[0], &llama.config, Device::Cpu);
    let hidden_th = llama.hidden_states(&ids_t.unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
    let logits_tv = llama.logits(&hidden_th, Adapters::Off);
    (hidden_th, logits_tv)
}

/// Hidden states `[T, H]` of one row through a cache, `chunk` tokens at a time, each chunk as a chain or as an
/// equivalent tree.
pub(crate) fn through_the_cache(llama: &Llama, ids_t: &Tensor, chunk: i64, as_pattern: bool) -> Tensor {
    let kind = llama.kind();
    let engine = fastest(llama);
    let (row, mut cache) = (0, KvCache::with_one_row(&llama.config, llama.kind(), llama.device()));
    let mut parts = Vec::new();
    for ids in ids_t.split(chunk, 0) {
        let n = ids.size()[0];
        let offsets: Vec<i64> = (0..n).collect();
        let new = match as_pattern {
            false => NewTokens::chain(n, &llama.config, kind, Device::Cpu),
            true => NewTokens::pattern(&offsets, |query, key| key <= query, &llama.config, kind, Device::Cpu),
        };
        parts.push(engine.extend(&mut cache, &ids, &[RowTokens { row, nodes: &new }]));
        cache.commit(row, n);
    }
    assert_eq!(cache.len(row), ids_t.size()[0]);
    Tensor::cat(&parts, 0)
}

#[test]
fn the_table_of_weights_is_that_of_the_files() {
    for name in FIXTURES {
        let fixture = Fixture::open(name);
        let shape = |view: &TensorView<'_>| view.shape().iter().map(|&d| d as i64).collect::<Vec<_>>();
        let in_file: BTreeMap<_, _> =
            fixture.weights().iter().map(|(name, view)| (name.clone(), shape(view))).collect();
        let config = LlamaConfig::load(fixture.folder("config").path()).expect("a config");
        assert_eq!(config.tensors().into_iter().collect::<BTreeMap<_, _>>(), in_file, "{name}");
        let llama = Llama::random(config, Kind::Float, Device::Cpu, 0);
        let in_memory = llama.weights().into_iter().map(|(name, tensor)| (name, tensor.size()));
        assert!(in_memory.eq(llama.config.tensors()), "{name}");
    }
}

#[test]
fn every_fixture_computes_what_transformers_computed() {
    let _no_grad = tch::no_grad_guard();
    for name in FIXTURES {
        let fixture = Fixture::open(name);
        for spelling in SPELLINGS {
            let folder = fixture.folder(spelling);
            for purpose in [Purpose::Training, Purpose::Decoding] {
                let llama = load(folder.path(), Kind::Float, purpose);
                let (hidden, logits) = over_the_row(&llama, &fixture.input_ids());
                let what = |tensor: &str| format!("{name}: {tensor} ({spelling}, for {purpose:?})");
                let near = |tensor: &str, got: &Tensor| {
                    let expected = fixture.reference(tensor);
                    assert_near(&what(tensor), got, &expected, FLOAT32_TOLERANCE, &fixture.origin());
                };
                near("last_hidden_state", &hidden);
                near("logits", &logits);
            }
        }
    }
}

#[test]
fn a_cache_in_any_chunks_and_a_tree_that_is_a_chain_equal_the_whole_row() {
    let _no_grad = tch::no_grad_guard();
    for name in FIXTURES {
        let fixture = Fixture::open(name);
        let folder = fixture.folder("config");
        let expected = fixture.reference("last_hidden_state");
        for purpose in [Purpose::Training, Purpose::Decoding] {
            let llama = load(folder.path(), Kind::Float, purpose);
            for (chunk, as_pattern) in [(1, false), (7, false), (7, true), (24, false), (24, true), (100, false)] {
                let hidden = through_the_cache(&llama, &fixture.input_ids(), chunk, as_pattern);
                let what = format!("{name}: chunks of {chunk}, as a tree: {as_pattern}, for {purpose:?}");
                assert_near(&what, &hidden, &expected, FLOAT32_TOLERANCE, &fixture.origin());
            }
        }
    }
}

#[test]
fn half_precision_is_near() {
    let _no_grad = tch::no_grad_guard();
    for name in FIXTURES {
        let fixture = Fixture::open(name);
        let folder = fixture.folder("config");
        for (kind, tolerance) in [(Kind::BFloat16, BFLOAT16_TOLERANCE), (Kind::Half, HALF_TOLERANCE)] {
            for purpose in [Purpose::Training, Purpose::Decoding] {
                let llama = load(folder.path(), kind, purpose);
                let (_, logits) = over_the_row(&llama, &fixture.input_ids());
                assert_eq!(logits.kind(), kind);
                let what = format!("{name}: logits in {kind:?}, for {purpose:?}");
                assert_near(&what, &logits, &fixture.reference("logits"), tolerance, &fixture.origin());
            }
        }
    }
}

#[test]
fn the_folder_that_is_read_and_the_names_that_are_written_agree() {
    for name in FIXTURES {
        let fixture = Fixture::open(name);
        let folder = fixture.folder("config");
        let llama = load(folder.path(), Kind::Float, Purpose::Training);
        let mut ours: Vec<String> = llama.weights().into_iter().map(|(name, _)| name).collect();
        let mut theirs: Vec<String> = fixture.weights().into_iter().map(|(name, _)| name).collect();
        ours.sort();
        theirs.sort();
        assert_eq!(ours, theirs, "{name}");
    }
}

/// Real models and PyTorch's output for them.
mod stories {
    use super::*;

    struct Stories {
        folder: PathBuf,
        cases: Vec<Case>,
        tensors: Vec<u8>,
    }

    #[derive(serde::Deserialize)]
    struct Case {
        prompt: String,
        input_ids: Vec<i64>,
        greedy_new_ids: Vec<i64>,
    }

    #[derive(serde::Deserialize)]
    struct Reference {
        cases: Vec<Case>,
    }

    fn stories(name: &str) -> Stories {
        let text = std::fs::read_to_string(published(&format!("reference/{name}.json"))).expect("a readable file");
        let Reference { cases } = serde_json::from_str(&text).expect("JSON of the expected form");
        let tensors = std::fs::read(published(&format!("reference/{name}.safetensors"))).expect("a readable file");
        Stories { folder: published("models").join(name), cases, tensors }
    }

    fn check_states(name: &str) {
        let _no_grad = tch::no_grad_guard();
        let stories = stories(name);
        let references = SafeTensors::deserialize(&stories.tensors).expect("a whole file");
        let origin = format!("tests/fixtures/reference/{name}.safetensors");
        for purpose in [Purpose::Training, Purpose::Decoding] {
            let llama = load(&stories.folder, Kind::Float, purpose);
            for (at, case) in stories.cases.iter().enumerate() {
                let (hidden, logits) = over_the_row(&llama, &Tensor::from_slice(&case.input_ids));
                for (part, got) in [("last_hidden_state", hidden), ("logits", logits)] {
                    let what = format!("{name}: {part} of {:?}, for {purpose:?}", case.prompt);
                    let expected = tensor(&references, &format!("{at}.{part}"));
                    assert_near(&what, &got, &expected, FLOAT32_TOLERANCE, &origin);
                }
            }
        }
    }

    #[test]
    fn stories_in_one_float32_file_computes_what_transformers_computed() {
        check_states("stories260K");
    }

    #[test]
    fn stories_in_bfloat16_shards_with_its_own_head_computes_what_transformers_computed() {
        check_states("stories260K-bf16-untied-sharded");
    }

    /// Decodes the prompt, then one token at a time.
    fn greedy(llama: &Llama, prompt: &[i64], count: usize) -> Vec<i64> {
        let engine = fastest(llama);
        let (row, mut cache) = (0, KvCache::with_one_row(&llama.config, llama.kind(), llama.device()));
        let mut next = prompt.to_vec();
        let mut ids = Vec::new();
        while ids.len() < count {
            let n = i64::try_from(next.len()).expect("a number in range");
            let new = NewTokens::chain(n, &llama.config, Kind::Float, Device::Cpu);
            let hidden_nh = engine.extend(&mut cache, &Tensor::from_slice(&next), &[RowTokens { row, nodes: &new }]);
            cache.commit(row, n);
            let id = engine.logits(&hidden_nh.narrow(0, n - 1, 1)).argmax(-1, false).int64_value(&[0]);
            ids.push(id);
            next = vec![id];
        }
        ids
    }

    #[test]
    fn greedy_tokens_of_stories_are_those_of_transformers() {
        let _no_grad = tch::no_grad_guard();
        let Stories { folder, cases, .. } = stories("stories260K");
        assert_eq!(cases.len(), 5);
        for purpose in [Purpose::Training, Purpose::Decoding] {
            let llama = load(&folder, Kind::Float, purpose);
            assert_eq!(llama.config.eos_token_ids, [1, 2], "generation_config.json has a list");
            for case in &cases {
                let got = greedy(&llama, &case.input_ids, case.greedy_new_ids.len());
                assert_eq!(got, case.greedy_new_ids, "{:?}, for {purpose:?}", case.prompt);
            }
        }
    }
}

/// Error messages for damaged folders.
mod refusals {
    use super::*;

    fn refusal(folder: &Path) -> String {
        match Llama::load(folder, Kind::Float, Device::Cpu, Purpose::Training) {
            Ok(_) => panic!("{} was loaded", folder.display()),
            Err(error) => error.to_string(),
        }
    }

    fn assert_says(folder: &TempDir, facts: &[&str]) {
        let error = refusal(folder.path());
        for fact in facts {
            assert!(error.contains(fact), "expected {fact:?} in: {error}");
        }
    }

    fn good() -> (Fixture, TempDir) {
        let fixture = Fixture::open("llama_own_head");
        let folder = fixture.folder("config");
        (fixture, folder)
    }

    fn edit_config(folder: &TempDir, from: &str, to: &str) {
        let path = folder.path().join("config.json");
        let text = std::fs::read_to_string(&path).expect("a readable file");
        assert!(text.contains(from), "{from} in {text}");
        write(&path, text.replace(from, to).as_bytes());
    }

    /// Writes model.safetensors with a header of our own.
    fn write_raw(folder: &TempDir, header_bytes: u64, header: &str, data: &[u8]) {
        let bytes = [&header_bytes.to_le_bytes()[..], header.as_bytes(), data].concat();
        write(&folder.path().join("model.safetensors"), &bytes);
    }

    #[test]
    fn a_folder_without_weights_says_what_was_looked_for() {
        let (_, folder) = good();
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        assert_says(&folder, &["model.safetensors", "model.safetensors.index.json"]);
    }

    #[test]
    fn a_folder_without_config_says_so() {
        let (_, folder) = good();
        std::fs::remove_file(folder.path().join("config.json")).unwrap();
        assert_says(&folder, &["config.json"]);
    }

    #[test]
    fn a_config_that_is_no_json_says_where() {
        let (_, folder) = good();
        write(&folder.path().join("config.json"), b"{\"model_type\": ");
        assert_says(&folder, &["config.json", "line 1"]);
    }

    #[test]
    fn an_index_that_names_files_elsewhere_is_refused() {
        let (_, folder) = good();
        for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".."] {
            let index = serde_json::json!({"weight_map": {"lm_head.weight": name}});
            write(&folder.path().join("model.safetensors.index.json"), index.to_string().as_bytes());
            let _ = std::fs::remove_file(folder.path().join("model.safetensors"));
            assert_says(&folder, &["model.safetensors.index.json", "names of files beside it", name]);
        }
    }

    #[test]
    fn a_missing_shard_is_named_with_the_index() {
        let (fixture, folder) = good();
        let weights = fixture.weights();
        let (first, second) = weights.split_at(3);
        let shard = |at: usize| format!("model-0000{at}-of-00002.safetensors");
        let named = |part: &[(String, TensorView)], at: usize| -> Vec<(String, String)> {
            part.iter().map(|(name, _)| (name.clone(), shard(at))).collect()
        };
        let map: HashMap<String, String> = named(first, 1).into_iter().chain(named(second, 2)).collect();
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        write(&folder.path().join("model.safetensors.index.json"), index.to_string().as_bytes());
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        safetensors::serialize_to_file(first.to_vec(), None, &folder.path().join(shard(1))).unwrap();
        assert_says(&folder, &[&shard(2), "model.safetensors.index.json", "1 of 2"]);
        safetensors::serialize_to_file(second.to_vec(), None, &folder.path().join(shard(2))).unwrap();
        load(folder.path(), Kind::Float, Purpose::Training);
        // The index may name a tensor that its shard lacks.
        safetensors::serialize_to_file(second[1..].to_vec(), None, &folder.path().join(shard(2))).unwrap();
        assert_says(&folder, &[&shard(2), &second[0].0]);
    }

    #[test]
    fn a_truncated_file_is_refused() {
        let (_, folder) = good();
        let path = folder.path().join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        for keep in [0, 4, 100, bytes.len() - 1] {
            write(&path, &bytes[..keep]);
            assert_says(&folder, &["model.safetensors", &keep.to_string()]);
        }
    }

    #[test]
    fn a_header_larger_than_the_file_or_the_limit_is_refused() {
        let (_, folder) = good();
        for header_bytes in [1000, 200_000_000, u64::MAX] {
            write_raw(&folder, header_bytes, "{}", &[]);
            assert_says(&folder, &["model.safetensors", "safetensors file"]);
        }
    }

    #[test]
    fn overlapping_tensors_are_refused() {
        let (_, folder) = good();
        let header = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}"#;
        write_raw(&folder, header.len() as u64, header, &[0; 24]);
        assert_says(&folder, &["model.safetensors"]);
    }

    #[test]
    fn a_tensor_of_another_shape_is_named_with_both_shapes() {
        let (_, folder) = good();
        edit_config(&folder, "\"vocab_size\": 97", "\"vocab_size\": 98");
        assert_says(&folder, &["model.safetensors", "model.embed_tokens.weight", "[98, 48]", "[97, 48]"]);
        edit_config(&folder, "\"vocab_size\": 98", "\"vocab_size\": 97");
        edit_config(&folder, "\"intermediate_size\": 48", "\"intermediate_size\": 50");
        assert_says(&folder, &["model.layers.0.mlp.gate_proj.weight", "[50, 48]", "[48, 48]"]);
    }

    #[test]
    fn a_tensor_that_is_not_there_is_named() {
        let (fixture, folder) = good();
        let name = "model.layers.1.self_attn.o_proj.weight";
        let rest: Vec<_> = fixture.weights().into_iter().filter(|(other, _)| other != name).collect();
        safetensors::serialize_to_file(rest, None, &folder.path().join("model.safetensors")).unwrap();
        assert_says(&folder, &["model.safetensors", name]);
    }

    #[test]
    fn a_tensor_of_integers_is_named_with_its_dtype() {
        let (fixture, folder) = good();
        let name = "model.layers.0.self_attn.q_proj.weight";
        let numbers = vec![1u8; 48 * 48];
        let mut weights = fixture.weights();
        for (other, view) in &mut weights {
            if other == name {
                *view = TensorView::new(safetensors::Dtype::I8, vec![48, 48], &numbers).unwrap();
            }
        }
        safetensors::serialize_to_file(weights, None, &folder.path().join("model.safetensors")).unwrap();
        assert_says(&folder, &["model.safetensors", name, "I8"]);
    }
}

#[test]
fn a_config_that_leaves_out_layers_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let whole = crate::embedded_default::tiny("backbone");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(whole.join(name), folder.path().join(name)).expect("a copy");
    }
    let path = folder.path().join("config.json");
    let config = std::fs::read_to_string(&path).expect("a config");
    let layers = LlamaConfig::load(folder.path()).expect("a config").num_hidden_layers;
    let fewer = config.replace(&format!("\"num_hidden_layers\": {layers}"), "\"num_hidden_layers\": 1");
    write(&path, fewer.as_bytes());
    let error =
        Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Decoding).expect_err("a layer is missing");
    let error = error.to_string();
    assert!(
        error.contains(&format!("config.json: num_hidden_layers: expected {layers} as in the weights, got 1")),
        "{error}"
    );
}

#[test]
fn a_value_of_another_type_is_reported_by_its_key() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("config.json");
    let whole = std::fs::read_to_string(crate::embedded_default::tiny("backbone").join("config.json"));
    let whole: Value = serde_json::from_str(&whole.expect("a config")).expect("JSON");
    for (key, value, printed) in [
        ("eos_token_id", json!("1"), "eos_token_id: expected a token's id, or a list of them"),
        ("hidden_act", json!(5), "hidden_act: invalid type: integer `5`, expected a string"),
        ("rope_scaling", json!([]), "rope_scaling: invalid length 0, expected an object"),
        ("rope_scaling", json!({"factor": "2"}), "rope_scaling.factor: invalid type: string \"2\", expected f64"),
    ] {
        let mut config = whole.clone();
        config[key] = value;
        write(&path, config.to_string().as_bytes());
        let error = LlamaConfig::load(folder.path()).expect_err("a wrong type").to_string();
        assert!(error.contains(&format!("config.json: {printed}")), "{error}");
    }
}
