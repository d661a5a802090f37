//! Training of sequential heads, and with soft targets, matches an independent PyTorch program (`scripts/oracles/hydra_oracle.py`): losses and
//! gradient norm of 20 steps, gradients of step 0, the final weights, and the guesses of the trained heads.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use medusa::data::Watch;
use medusa::draft::heads::import::HeadsFile;
use medusa::draft::heads::import::notices::Notice;
use medusa::draft::heads::layout::HeadsLayout;
use medusa::draft::heads::{HEADS_FILE, HeadInput, Heads, HeadsArchitecture, HeadsShape};
use medusa::formats::metrics::MetricsLine;
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::prefix_layer::PrefixLayer;
use medusa::model::weights::{WeightFiles, save};
use medusa::recipe::Recipe;
use medusa::train::checked::CheckedRun;
use medusa::train::ranks::Ranks;
use medusa::train::run::TrainRun;
use medusa::train::training_loop::{RunEvent, RunOutcome};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::published::published;

/// Relative, for losses and gradient norms: ten times what float32 and float64 differ by in PyTorch.
const TOLERANCE: f64 = 1e-5;
/// Absolute, for the final weights, which moved by 1e-2.
const WEIGHT_TOLERANCE: f64 = 1e-4;
const STRIDE: usize = 61;
const SMALL: usize = 256;

/// A run of an oracle.
pub(crate) struct Oracle {
    name: &'static str,
    pub(crate) report: Value,
    tensors: WeightFiles,
}

impl Oracle {
    fn open(name: &'static str) -> Self {
        Self::in_folder("hydra", name)
    }

    pub(crate) fn in_folder(folder: &str, name: &'static str) -> Self {
        let path = |extension: &str| published(&format!("{folder}/{name}.{extension}"));
        let text = fs::read_to_string(path("json")).expect("the oracle's report");
        Self {
            name,
            report: serde_json::from_str(&text).expect("JSON"),
            tensors: WeightFiles::open_file(&path("safetensors")).expect("the oracle's tensors"),
        }
    }

    pub(crate) fn setting(&self, key: &str) -> &Value {
        &self.report["settings"][key]
    }

    fn architecture(&self) -> HeadsArchitecture {
        serde_json::from_value(self.setting("architecture").clone()).expect("an architecture")
    }

    /// `[loss]` of the recipe.
    pub(crate) fn loss(&self) -> String {
        match self.setting("label_weight").as_f64().expect("a number") {
            1.0 => String::new(),
            0.0 => "[loss]\ntargets = \"backbone\"\n".to_owned(),
            labels => format!("[loss]\ntargets = {{ labels = {labels:?}, backbone = {:?} }}\n", 1.0 - labels),
        }
    }

    fn recipe(&self, run: &Path, steps: usize, micro_batch_size: usize) -> String {
        let [backbone, rows] = ["models/stories260K", "reference/losses/rows.jsonl"].map(published);
        let init = self.initial_heads(run);
        let init = init.map_or_else(String::new, |path| format!("init_from = {path:?}\n"));
        let (architecture, layers, loss) = (self.setting("architecture"), self.setting("layers"), self.loss());
        let accumulation = 8 / micro_batch_size;
        let shape = self.shape();
        let truncated = self.draft_vocab_size().map_or_else(String::new, |size| format!("draft_vocab_size = {size}\n"));
        let w2 = format!("shared_w2 = {}\n{truncated}", shape.shared_w2);
        format!(
            "[backbone]\npath = {backbone:?}\ndtype = \"float32\"\n\
             [heads]\narchitecture = {architecture}\nmedusa_num_heads = 4\nmedusa_num_layers = {layers}\n{w2}{init}\
             [stage.medusa1]\n{loss}\
             [data]\ntrain = [{rows:?}]\nmax_length = 512\npacking = false\nshuffle = false\n\
             [optimizer]\nlearning_rate = 5e-4\n[schedule]\nname = \"constant\"\n\
             [train]\noutput_dir = {run:?}\nmax_steps = {steps}\nsave_every = {steps}\nmicro_batch_size = {micro_batch_size}\n\
             gradient_accumulation_steps = {accumulation}\n"
        )
    }

    /// The heads that the oracle starts from, as a file beside `run`; Medusa heads start as ours.
    fn initial_heads(&self, run: &Path) -> Option<PathBuf> {
        let (shape, backbone, path) = (self.shape(), backbone(), run.with_extension("safetensors"));
        if !shape.reads().tokens {
            return None;
        }
        let map = self.token_map().map(|tokens| Tensor::from_slice(&tokens));
        let of_size = |(name, size): (String, Vec<i64>)| {
            let is_w2 = size == [shape.vocab_size, shape.hidden_size];
            let tensor = match size[..] {
                _ if is_w2 && map.is_some() => backbone.lm_head_weight().index_select(0, map.as_ref().expect("a map")),
                _ if is_w2 => backbone.lm_head_weight().copy(),
                [_] if name.contains("norm") => initial(&name, &size, 0.1) + 1.0,
                _ => initial(&name, &size, (size[size.len() - 1] as f64).powf(-0.5)),
            };
            self.assert_norm("init", &name, &tensor, 1e-9);
            (name, tensor)
        };
        let tensors: Vec<(String, Tensor)> = self.weights(&backbone).into_iter().map(of_size).collect();
        let mut named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        named.extend(map.iter().map(|map| ("token_map".to_owned(), map)));
        save(&path, &named).expect("a file");
        Some(path)
    }
}

impl Oracle {
    pub(crate) fn draft_vocab_size(&self) -> Option<i64> {
        self.setting("draft_vocab_size").as_i64()
    }

    /// The most frequent labels, by id; of equal frequency the lower ids.
    pub(crate) fn token_map(&self) -> Option<Vec<i64>> {
        let mut counts = vec![0; 512];
        for row in rows() {
            ids(&row["labels"]).iter().filter(|&&label| label >= 0).for_each(|&label| counts[label as usize] += 1);
        }
        let mut tokens: Vec<i64> = (0..512).collect();
        tokens.sort_by_key(|&token| (-counts[token as usize], token));
        tokens.truncate(usize::try_from(self.draft_vocab_size()?).expect("a size"));
        tokens.sort_unstable();
        Some(tokens)
    }

    fn shape(&self) -> HeadsShape {
        HeadsShape {
            architecture: self.architecture(),
            medusa_num_heads: 4,
            medusa_num_layers: usize::try_from(self.setting("layers").as_u64().expect("a number")).expect("a few"),
            hidden_size: 64,
            vocab_size: self.draft_vocab_size().unwrap_or(512),
            shared_w2: self.setting("shared_w2").as_bool().unwrap_or(false),
            w2_bias: self.setting("w2_bias").as_bool().expect("a flag"),
            ..HeadsShape::default()
        }
    }

    /// Names and shapes of all weights.
    fn weights(&self, backbone: &Llama) -> Vec<(String, Vec<i64>)> {
        let prefix =
            (self.architecture() == HeadsArchitecture::HydraPlusPlus).then(|| PrefixLayer::tensors(&backbone.config));
        self.shape().tensors().into_iter().chain(prefix.into_iter().flatten()).collect()
    }

    /// Compares the norm of a whole tensor, relative to `size`.
    pub(crate) fn assert_norm(&self, stage: &str, name: &str, tensor: &Tensor, tolerance: f64) {
        let expected = self.report["norms"][stage][name].as_f64().expect("a norm");
        assert_close(&format!("{}: norm of {stage}.{name}", self.name), norm(tensor), expected, tolerance);
    }

    /// Compares a tensor with the oracle's sample of it.
    fn assert_sample(&self, stage: &str, name: &str, tensor: &Tensor, tolerance: f64) {
        let numbers =
            |tensor: &Tensor| Vec::<f32>::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).expect("numbers");
        let all = numbers(tensor);
        let stride = if all.len() <= SMALL { 1 } else { STRIDE };
        let got: Vec<f32> = all.into_iter().step_by(stride).collect();
        let name = format!("{stage}.{name}");
        let size = self.tensors.shape(&name).expect("a sample");
        let expected = numbers(&self.tensors.tensor(&name, &size, Kind::Float, Device::Cpu).expect("a sample"));
        assert_eq!(got.len(), expected.len(), "{name}");
        let worst =
            got.iter().zip(&expected).map(|(got, expected)| f64::from((got - expected).abs())).fold(0.0, f64::max);
        assert!(worst <= tolerance, "{}, {name}: largest difference {worst:.2e} > {tolerance:.0e}", self.name);
    }

    fn train(
        &self,
        folder: &TempDir,
        steps: usize,
        micro_batch_size: usize,
        more: &str,
    ) -> (Vec<MetricsLine>, PathBuf) {
        train(&(self.recipe(&folder.path().join("run"), steps, micro_batch_size) + more))
    }

    pub(crate) fn check_steps(&self, lines: &[MetricsLine]) {
        let steps = self.report["steps"].as_array().expect("steps");
        assert_eq!(lines.len(), steps.len());
        for (line, expected) in lines.iter().zip(steps) {
            let what = |part: &str| format!("{}, step {}, {part}", self.name, line.step - 1);
            let number = |value: &Value| value.as_f64().expect("a number");
            assert_close(&what("loss"), line.loss, number(&expected["loss"]), TOLERANCE);
            let update = line.update.as_ref().expect("a training line");
            assert_close(&what("gradient norm"), update.grad_norm, number(&expected["grad_norm"]), TOLERANCE);
            for (head, top1) in expected["head_top1"].as_array().expect("accuracies").iter().enumerate() {
                let got = line.head_top1[head].expect("every head has labels");
                assert!((got - number(top1)).abs() < 1e-12, "{}", what(&format!("accuracy of head {}", head + 1)));
            }
            for (head, expected) in expected["head_losses"].as_array().expect("heads").iter().enumerate() {
                let got = line.head_losses[head].expect("every head has targets");
                assert_close(&what(&format!("head {}", head + 1)), got, number(expected), TOLERANCE);
            }
        }
    }

    fn check_gradients(&self, backbone: &Llama) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let _ = self.train(&folder, 1, 8, "");
        self.check_gradients_of(&folder.path().join("run"), self.weights(backbone));
    }

    /// AdamW's first moment after the one step of a run is a tenth of the clipped gradient.
    pub(crate) fn check_gradients_of(&self, run: &Path, weights: Vec<(String, Vec<i64>)>) {
        let moments = WeightFiles::open_file(&run.join("step-000001/optimizer.safetensors")).expect("a checkpoint");
        let clip = (1.0 / (self.report["steps"][0]["grad_norm"].as_f64().expect("a norm") + 1e-6)).min(1.0);
        for (name, size) in weights {
            let moment = moments.tensor(&format!("{name}.exp_avg"), &size, Kind::Float, Device::Cpu).expect("a moment");
            let gradient = moment * (10.0 / clip);
            let largest = gradient.abs().max().double_value(&[]);
            assert!(largest > 0.0, "{name}");
            self.assert_sample("gradient", &name, &gradient, TOLERANCE * largest);
            self.assert_norm("gradient", &name, &gradient, TOLERANCE);
        }
    }

    fn check_final(&self, result: &Path, backbone: &Llama) {
        let got = WeightFiles::open_file(&result.join(HEADS_FILE)).expect("our heads");
        let weights = self.weights(backbone);
        let map = got.mapped_as("token_map", &[self.draft_vocab_size().unwrap_or(0)], Kind::Int64).ok();
        assert_eq!(map.as_ref().map(|map| Vec::try_from(map).expect("int64")), self.token_map());
        assert_eq!(got.names().len(), weights.len() + usize::from(map.is_some()));
        self.check_final_weights(&got, weights);
    }

    pub(crate) fn check_final_weights(&self, got: &WeightFiles, weights: Vec<(String, Vec<i64>)>) {
        for (name, size) in weights {
            let value = got.tensor(&name, &size, Kind::Float, Device::Cpu).expect("a tensor");
            self.assert_sample("final", &name, &value, WEIGHT_TOLERANCE);
            self.assert_norm("final", &name, &value, WEIGHT_TOLERANCE);
        }
    }

    /// The trained heads guess what the oracle's do, each along the path that the guesses before it lead to.
    fn check_guesses(&self, result: &Path, backbone: &Llama) {
        let heads = Heads::load(result, backbone).expect("our heads");
        let rows = rows();
        for expected in self.report["guesses"].as_array().expect("guesses") {
            let at = |key: &str| usize::try_from(expected[key].as_u64().expect("a number")).expect("an index");
            let tokens = ids(&rows[at("row")]["input_ids"]);
            let mask = RowMask::causal(tokens.len() as i64, &backbone.config, Device::Cpu);
            let hidden_1th = backbone.hidden_states(&Tensor::from_slice(&tokens).unsqueeze(0), &mask, Adapters::Off);
            let states_1th = heads.states_of_rows(&hidden_1th, &[vec![tokens.len()]]);
            let state_1h = states_1th.narrow(1, at("position") as i64, 1).squeeze_dim(0);
            let path = ids(&expected["path"]);
            for (head, expected) in expected["guesses"].as_array().expect("levels").iter().enumerate() {
                let previous_1j = Tensor::from_slice(&path[..=head]).unsqueeze(0);
                let previous_nj = (self.architecture() != HeadsArchitecture::Medusa).then_some(&previous_1j);
                let input = HeadInput { hidden_nh: &state_1h, previous_nj };
                let got = heads.logits(head, &input, backbone).topk(3, -1, true, true).1.flatten(0, -1);
                let got = heads.token_map().map_or(got.shallow_clone(), |map| map.tokens_n().take(&got));
                assert_eq!(Vec::<i64>::try_from(got).expect("ids"), ids(expected), "{}, head {head}", self.name);
            }
        }
    }
}

/// Trains and returns the lines of metrics.jsonl and the folder of the result.
pub(crate) fn train(recipe: &str) -> (Vec<MetricsLine>, PathBuf) {
    let plan = Recipe::parse(Path::new("oracle.toml"), recipe).expect("a recipe").plan(Device::Cpu);
    let run = TrainRun::load(CheckedRun::load(plan, Watch::default()).expect("rows")).expect("a backbone");
    let mut lines = vec![];
    let mut report = |event: RunEvent| {
        if let RunEvent::Stepped(line) = event {
            lines.push(line.clone());
        }
    };
    match run.train(Ranks::alone(), false, &AtomicBool::new(false), &mut report).expect("a run") {
        RunOutcome::Finished(result) => (lines, result),
        other => panic!("finished, got {other:?}"),
    }
}

pub(crate) fn rows() -> Vec<Value> {
    let text = fs::read_to_string(published("reference/losses/rows.jsonl")).expect("rows");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

pub(crate) fn ids(value: &Value) -> Vec<i64> {
    serde_json::from_value(value.clone()).expect("ids")
}

fn norm(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).norm().double_value(&[])
}

fn assert_close(what: &str, got: f64, expected: f64, relative: f64) {
    let error = (got - expected).abs() / expected.abs();
    assert!(
        error <= relative,
        "{what}: got {got}, PyTorch has {expected}: relative error {error:.2e} > {relative:.0e}"
    );
}

/// Numbers in [-bound, bound), as the script's function of the same name makes them.
pub(crate) fn initial(name: &str, shape: &[i64], bound: f64) -> Tensor {
    let hash = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let number = |index: u64| {
        let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (2.0 * (z >> 40) as f64 / f64::from(1 << 24) - 1.0) * bound
    };
    let numbers: Vec<f64> = (0..shape.iter().product::<i64>().unsigned_abs()).map(number).collect();
    Tensor::from_slice(&numbers).to_kind(Kind::Float).view(shape)
}

pub(crate) fn backbone() -> Llama {
    Llama::load(&published("models/stories260K"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone")
}

/// `ways`: rows of a micro batch, and whether hidden states are cached.
fn check(name: &'static str, ways: &[(usize, bool)]) {
    let (oracle, backbone) = (Oracle::open(name), backbone());
    for &(micro_batch_size, with_cache) in ways {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = format!("hidden_state_cache = {:?}\n", folder.path().join("cache"));
        let steps = oracle.report["steps"].as_array().expect("steps").len();
        let (lines, result) = oracle.train(&folder, steps, micro_batch_size, if with_cache { &cache } else { "" });
        oracle.check_steps(&lines);
        oracle.check_final(&result, &backbone);
        oracle.check_guesses(&result, &backbone);
    }
    oracle.check_gradients(&backbone);
}

/// Files as Hydra's trainer saves them: float16 without a prefix layer, float32 with one.
#[test]
fn published_files_give_the_logits_that_they_give_in_pytorch() {
    let folder = |name: &str| published(&format!("hydra/{name}"));
    let backbone = Llama::load(&folder("backbone"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    for (arch, architecture, layout) in [
        ("mlp", HeadsArchitecture::Hydra, HeadsLayout::Hydra),
        ("prefix-mlp", HeadsArchitecture::HydraPlusPlus, HeadsLayout::HydraPlusPlus),
    ] {
        let from = folder(&format!("published_{arch}"));
        let expected = Tensor::read_safetensors(from.join("expected.safetensors")).expect("the oracle's tensors");
        let tensor = |name: &str| &expected.iter().find(|(found, _)| found == name).expect("a tensor").1;
        let heads = Heads::load(&from, &backbone).expect("heads");
        let HeadsShape { medusa_num_heads: 3, medusa_num_layers: 3, w2_bias: true, .. } = heads.shape() else {
            panic!("{:?}", heads.shape())
        };
        assert_eq!(heads.architecture(), architecture);
        let (hidden_th, tokens_t) = (tensor("hidden_states"), tensor("input_ids"));
        let states_th = heads.states_of_rows(&hidden_th.unsqueeze(0), &[vec![16]]).squeeze_dim(0);
        let logits_knv = tensor("logits");
        let n = logits_knv.size()[1];
        for head in 0..3 {
            let after: Vec<Tensor> = (1..=head + 1).map(|j| tokens_t.narrow(0, j, n)).collect();
            let previous_nj = Tensor::stack(&after, 1);
            let input = HeadInput { hidden_nh: &states_th.narrow(0, 0, n), previous_nj: Some(&previous_nj) };
            let got_nv = heads.logits(usize::try_from(head).expect("a head"), &input, &backbone);
            let worst = (got_nv - logits_knv.get(head)).abs().max().double_value(&[]);
            assert!(worst < 2e-6, "{arch}, head {head}: {worst}");
        }
        let file = HeadsFile::open(&from).expect("heads");
        assert_eq!(file.layout(), layout);
        let notices = file.notices().expect("notices");
        assert!(matches!(&notices[..], [Notice::Tied { heads, .. }] if heads == &[1, 2, 3]), "{notices:?}");
    }
}

#[test]
fn a_missing_tensor_of_the_prefix_layer_is_named_as_in_its_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = WeightFiles::open_file(&published("hydra/published_prefix-mlp/hydra_lm_head.pt")).expect("the heads");
    let missing = "prefix_embeding_layer.layers.0.mlp.up_proj.weight";
    let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor").copy();
    let kept = files.names().into_iter().filter(|name| *name != missing).map(|name| (name.to_owned(), read(name)));
    let kept: Vec<(String, Tensor)> = kept.collect();
    assert_eq!(kept.len() + 1, files.names().len());
    let kept: Vec<(String, &Tensor)> = kept.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
    save(&folder.path().join(HEADS_FILE), &kept).expect("a place for weights");
    let from = published("hydra/backbone");
    let backbone = Llama::load(&from, Kind::Float, Device::Cpu, Purpose::Decoding).expect("a backbone");
    let error = Heads::load(folder.path(), &backbone).expect_err("a missing tensor").to_string();
    assert!(error.contains(missing), "{error}");
}

#[test]
fn twenty_steps_of_hydra_heads_equal_pytorch() {
    check("hydra", &[(8, false)]);
}

#[test]
fn twenty_steps_of_hydra_heads_with_biases_of_w2_equal_pytorch() {
    check("hydra_w2_bias", &[(8, false)]);
}

#[test]
fn twenty_steps_of_hydra_plus_plus_heads_equal_pytorch() {
    check("hydra++", &[(8, false), (2, true)]);
}

/// Soft targets over 96 tokens, and Hydra heads with one W2 over them: one label in 7 is outside.
#[test]
fn steps_with_a_truncated_vocabulary_and_one_w2_equal_pytorch() {
    check("medusa_truncated", &[(8, false), (2, true)]);
    check("hydra_truncated", &[(8, false), (2, true)]);
}

#[test]
fn twenty_steps_with_soft_targets_equal_pytorch() {
    check("medusa_backbone", &[(8, false), (2, false)]);
    check("medusa_half", &[(8, false)]);
    check("hydra++_backbone", &[(8, true), (2, false)]);
}
