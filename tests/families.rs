//! Promise: every family of backbones and every kind of rotary embedding computes what transformers computes: hidden states, logits,
//! greedy text with and without a tree, and the gradients of adapters.

use std::ops::ControlFlow;
use std::path::Path;

use medusa::decode::generate;
use medusa::decode::request::Request;
use medusa::draft::heads::{Heads, HeadsShape};
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::draft::ngram::NgramDrafter;
use medusa::engine::cpu::CpuEngine;
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE, attach};
use medusa::model::stored::Quantization;
use medusa::model::weights;
use medusa::tree::accept::Acceptance;
use medusa::tree::sparse_tree::SparseTree;
use tch::{Device, Kind, Reduction, Tensor};
use tempfile::TempDir;

use super::backbone::{
    FLOAT32_TOLERANCE, Fixture, SPELLINGS, assert_near, load, over_the_row, tensor, through_the_cache, write,
};

/// What scripts/fixtures/make_family_fixtures.py makes.
pub(crate) const FAMILIES: [&str; 20] = [
    "qwen2",
    "qwen2_sliding_window",
    "qwen2_yarn",
    "qwen3",
    "qwen3_tied_yarn",
    "gemma2",
    "gemma3",
    "gemma3_pattern",
    "phi3",
    "phi3_longrope_short_text",
    "phi3_longrope_long_text",
    "granite",
    "olmo2",
    "smollm3",
    "mistral_nemo",
    "mistral_default_window",
    "llama_yarn_attention_factor",
    "llama_yarn_mscale",
    "llama_dynamic_short_text",
    "llama_dynamic_long_text",
];
/// Without greedy tokens: the frequencies of one change with the length of the text, the other's text is long.
const WITHOUT_GREEDY: [&str; 2] = ["llama_dynamic_long_text", "mistral_default_window"];
/// What scripts/fixtures/make_lora_gradients.py makes gradients for.
const WITH_GRADIENTS: [&str; 3] = ["qwen3", "gemma3", "phi3"];
/// Against dequantised weights that are the same numbers, in other orders of summation.
const QUANTIZED_TOLERANCE: f64 = 1e-3;
/// Of a gradient in float32, relative to its largest element. The largest error was 7.3e-5 (Gemma 3 on NF4 weights, AVX-512).
const GRADIENT_TOLERANCE: f64 = 1e-3;
/// The largest element of every gradient in the fixtures is above this.
const SMALLEST_GRADIENT: f64 = 1e-2;

fn family(name: &str) -> Fixture {
    Fixture::open(&format!("families/{name}"))
}

fn origin(fixture: &Fixture) -> String {
    format!("scripts/fixtures/make_family_fixtures.py with seed {}", fixture.text("seed"))
}

/// The model with the rotary embeddings of the fixture's longest text.
fn load_family(fixture: &Fixture, folder: &Path, purpose: Purpose) -> Llama {
    let mut llama = load(folder, Kind::Float, purpose);
    llama.set_context(fixture.number("context"));
    llama
}

/// The last rows, as many as the reference has.
fn last_rows(got: &Tensor, expected: &Tensor) -> Tensor {
    let (all, rows) = (got.size()[0], expected.size()[0]);
    got.narrow(0, all - rows, rows)
}

#[test]
fn hidden_states_and_logits_are_those_of_transformers() {
    let _no_grad = tch::no_grad_guard();
    for name in FAMILIES {
        let fixture = family(name);
        for spelling in SPELLINGS {
            let folder = fixture.folder(spelling);
            for purpose in [Purpose::Training, Purpose::Decoding] {
                let llama = load_family(&fixture, folder.path(), purpose);
                let (hidden, logits) = over_the_row(&llama, &fixture.input_ids());
                for (part, got) in [("last_hidden_state", hidden), ("logits", logits)] {
                    let expected = fixture.reference(part);
                    let what = format!("{name}: {part} ({spelling}, for {purpose:?})");
                    assert_near(&what, &last_rows(&got, &expected), &expected, FLOAT32_TOLERANCE, &origin(&fixture));
                }
            }
        }
    }
}

#[test]
fn a_cache_in_any_chunks_and_a_tree_that_is_a_chain_equal_the_whole_row() {
    let _no_grad = tch::no_grad_guard();
    for name in FAMILIES {
        let fixture = family(name);
        let (folder, expected) = (fixture.folder("config"), fixture.reference("last_hidden_state"));
        let long = fixture.number("context") > 1000;
        let chunks: &[(i64, bool)] =
            if long { &[(1000, false)] } else { &[(1, false), (7, false), (7, true), (24, true), (100, false)] };
        for purpose in [Purpose::Training, Purpose::Decoding] {
            let llama = load_family(&fixture, folder.path(), purpose);
            for &(chunk, as_pattern) in chunks {
                let hidden = through_the_cache(&llama, &fixture.input_ids(), chunk, as_pattern);
                let what = format!("{name}: chunks of {chunk}, as a tree: {as_pattern}, for {purpose:?}");
                assert_near(&what, &last_rows(&hidden, &expected), &expected, FLOAT32_TOLERANCE, &origin(&fixture));
            }
        }
    }
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn the_cpus_kernels_run_every_family() {
    for name in FAMILIES {
        let fixture = family(name);
        let llama = load_family(&fixture, fixture.folder("config").path(), Purpose::Decoding);
        assert!(CpuEngine::supports(&llama).is_ok(), "{name}: {:?}", CpuEngine::supports(&llama));
    }
}

/// Whatever the head guesses, the right token is among it.
fn every_guess(llama: &Llama) -> SparseTree {
    let vocabulary = usize::try_from(llama.config.vocab_size).expect("a size");
    SparseTree::cartesian(&[vocabulary]).expect("a tree")
}

fn random_heads(llama: &Llama) -> Heads {
    let (hidden_size, vocab_size) = (llama.config.hidden_size, llama.config.vocab_size);
    let shape =
        HeadsShape { medusa_num_heads: 1, medusa_num_layers: 1, hidden_size, vocab_size, ..HeadsShape::default() };
    Heads::random(shape, Kind::Float, Device::Cpu, 6)
}

#[test]
fn greedy_tokens_are_those_of_transformers_plain_and_with_a_tree() {
    let _no_grad = tch::no_grad_guard();
    for name in FAMILIES.into_iter().filter(|name| !WITHOUT_GREEDY.contains(name)) {
        let fixture = family(name);
        let ids = |tensor: &Tensor| Vec::<i64>::try_from(tensor).expect("ids");
        let prompt = ids(&fixture.input_ids().narrow(0, 0, fixture.number("prompt_length")));
        let expected = ids(&fixture.reference("greedy_ids"));
        let request = Request { ends_at_eos: false, ..Request::greedy(&prompt, expected.len()) };
        for purpose in [Purpose::Training, Purpose::Decoding] {
            let llama = load_family(&fixture, fixture.folder("config").path(), purpose);
            let mut go_on = |_: &[i64]| ControlFlow::Continue(());
            let plain = generate::plain(&llama, &request, &mut go_on).expect("a text");
            assert_eq!(plain.new_ids, expected, "{name}: plain, for {purpose:?}; {}", origin(&fixture));

            let (heads, tree) = (random_heads(&llama), every_guess(&llama));
            let medusa = MedusaDrafter::new(&llama, &heads, &tree).expect("heads and a tree that fit");
            let fast = generate::drafted(&llama, medusa, Acceptance::Greedy, &request, &mut go_on).expect("a text");
            assert_eq!(fast.new_ids, expected, "{name}: with a tree, for {purpose:?}");
            assert!(fast.accept_lengths.len() <= expected.len() / 2 + 1, "{name}: {:?}", fast.accept_lengths);

            let ngram = NgramDrafter::new(&llama);
            let fast = generate::drafted(&llama, ngram, Acceptance::Greedy, &request, &mut go_on).expect("a text");
            assert_eq!(fast.new_ids, expected, "{name}: with prompt lookup, for {purpose:?}");
        }
    }
}

/// Adapters, gradients and quantised logits of a family.
struct Gradients {
    file: Fixture,
    backbone: TempDir,
    adapter: TempDir,
}

impl Gradients {
    fn open(name: &str) -> Self {
        let file = family(&format!("{name}_lora"));
        let adapter = tempfile::tempdir().expect("a temporary folder");
        write(&adapter.path().join(ADAPTER_CONFIG), file.text("adapter_config").as_bytes());
        let gradients = Self { file, backbone: family(name).folder("config_v4"), adapter };
        let matrices: Vec<(String, Tensor)> =
            gradients.adapter_names().into_iter().map(|name| (name.clone(), gradients.tensor(&name).get(0))).collect();
        let matrices: Vec<(String, &Tensor)> = matrices.iter().map(|(name, matrix)| (name.clone(), matrix)).collect();
        weights::save(&gradients.adapter.path().join(ADAPTER_FILE), &matrices).expect("a file of a test");
        gradients
    }

    fn adapter_names(&self) -> Vec<String> {
        let tensors = self.file.tensors();
        let mut names: Vec<String> = tensors.names().into_iter().map(ToString::to_string).collect();
        names.retain(|name| name.starts_with("base_model."));
        names.sort();
        names
    }

    fn tensor(&self, name: &str) -> Tensor {
        tensor(&self.file.tensors(), name)
    }

    fn near(&self, what: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_near(what, got, expected, tolerance, "scripts/fixtures/make_lora_gradients.py");
    }

    /// The largest element sets the tolerance, since elements are sums of products of its size.
    fn gradient_near(&self, what: &str, got: &Tensor, expected: &Tensor) {
        let largest = expected.abs().max().double_value(&[]);
        assert!(largest > SMALLEST_GRADIENT, "{what} is nearly 0: {largest}");
        self.near(what, got, expected, GRADIENT_TOLERANCE * largest);
    }

    /// The backbone with the adapter.
    fn load(&self, quantization: Option<Quantization>) -> Llama {
        let (folder, device) = (self.backbone.path(), Device::Cpu);
        let mut llama = Llama::load_quantized(folder, Kind::Float, device, Purpose::Training, quantization)
            .unwrap_or_else(|error| panic!("{error}"));
        attach(&mut llama, self.adapter.path(), None).unwrap_or_else(|error| panic!("{error}"));
        llama
    }

    /// Mean cross-entropy of the batch's next tokens.
    fn loss(&self, llama: &Llama) -> Tensor {
        let (ids_bt, labels_bt) = (self.tensor("input_ids"), self.tensor("labels"));
        let t = ids_bt.size()[1];
        let rows = RowMask::causal(t, &llama.config, Device::Cpu);
        let logits_btv = llama.logits(&llama.hidden_states(&ids_bt, &rows, Adapters::On), Adapters::On);
        let logits_nv = logits_btv.narrow(1, 0, t - 1).flatten(0, 1);
        let labels_n = labels_bt.narrow(1, 1, t - 1).flatten(0, 1);
        logits_nv.cross_entropy_loss::<Tensor>(&labels_n, None, Reduction::Mean, -100, 0.0)
    }

    /// Compares loss and gradients; `at` is 1 without quantisation, 2 with NF4.
    fn check(&self, name: &str, llama: &Llama, at: i64) {
        for (_, adapter) in llama.adapters() {
            let _ = adapter.parameters().map(|matrix| matrix.set_requires_grad(true));
        }
        let loss = self.loss(llama);
        loss.backward();
        self.near(&format!("{name}: loss {at}"), &loss.detach(), &self.tensor("losses").get(at - 1), FLOAT32_TOLERANCE);
        let mut compared = vec![];
        for (layer, adapter) in llama.adapters() {
            for (part, matrix) in ["lora_A", "lora_B"].into_iter().zip(adapter.parameters()) {
                let tensor = format!("base_model.model.{layer}.{part}.weight");
                let (what, expected) = (format!("{name}: gradient {at} of {tensor}"), self.tensor(&tensor).get(at));
                self.gradient_near(&what, &matrix.grad(), &expected);
                compared.push(tensor);
            }
        }
        compared.sort();
        assert_eq!(compared, self.adapter_names(), "{name}");
    }
}

#[test]
fn gradients_of_adapters_are_those_of_pytorch() {
    for name in WITH_GRADIENTS {
        let gradients = Gradients::open(name);
        gradients.check(name, &gradients.load(None), 1);
    }
}

#[test]
fn gradients_of_adapters_on_nf4_weights_are_those_of_pytorch() {
    for name in WITH_GRADIENTS {
        let gradients = Gradients::open(name);
        gradients.check(name, &gradients.load(Some(Quantization::Nf4)), 2);
    }
}

#[test]
fn gradients_of_norms_are_those_of_pytorch() {
    for name in WITH_GRADIENTS {
        let gradients = Gradients::open(name);
        let llama = gradients.load(None);
        let weights = llama.weights();
        let norms: Vec<&(String, &Tensor)> = weights.iter().filter(|(name, _)| name.contains("norm")).collect();
        for (_, weight) in &norms {
            let _ = weight.set_requires_grad(true);
        }
        gradients.loss(&llama).backward();
        let tensors = gradients.file.tensors();
        let in_file = tensors.names().into_iter().filter(|tensor| tensor.starts_with("gradient.")).count();
        assert_eq!(norms.len(), in_file, "{name}");
        for (norm, weight) in norms {
            let what = format!("{name}: gradient of {norm}");
            let expected = gradients.tensor(&format!("gradient.{norm}"));
            gradients.gradient_near(&what, &weight.grad(), &expected);
        }
    }
}

#[test]
fn quantised_backbones_compute_what_transformers_computes_with_dequantised_weights() {
    let _no_grad = tch::no_grad_guard();
    for name in WITH_GRADIENTS {
        let gradients = Gradients::open(name);
        let ids = family(name).input_ids();
        for quantization in [Quantization::Nf4, Quantization::Int8] {
            for purpose in [Purpose::Training, Purpose::Batches] {
                let folder = gradients.backbone.path();
                let llama = Llama::load_quantized(folder, Kind::Float, Device::Cpu, purpose, Some(quantization))
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
                let what = format!("{name}: logits on {quantization} weights, for {purpose:?}");
                let expected = gradients.tensor(&format!("{quantization}.logits"));
                gradients.near(&what, &over_the_row(&llama, &ids).1, &expected, QUANTIZED_TOLERANCE);
            }
        }
    }
}
