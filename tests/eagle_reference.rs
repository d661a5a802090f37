//! Training of EAGLE-3 drafters matches an independent PyTorch program (`scripts/oracles/eagle_oracle.py`): losses and gradient norm of the steps, gradients
//! of step 0, the final weights, and the guesses of the trained drafter.

use std::path::Path;

use medusa::draft::eagle::weights::LM_HEAD;
use medusa::draft::heads::HEADS_FILE;
use medusa::draft::kinds;
use medusa::draft::token_map::TokenMap;
use medusa::dtype::DraftDtype;
use medusa::files::write_json;
use medusa::model::eagle_layer::EagleLayer;
use medusa::model::llama::Llama;
use medusa::model::taps::Taps;
use medusa::model::weights::{WeightFiles, save};
use tch::Tensor;

use crate::hydra_reference::{Oracle, backbone, ids, initial, rows, train};
use crate::published::published;

/// A run of the oracle.
struct EagleOracle(Oracle);

impl EagleOracle {
    fn taps(&self) -> Vec<i64> {
        ids(self.0.setting("tap_layers"))
    }

    /// Names and shapes of all weights.
    fn weights(&self, backbone: &Llama) -> Vec<(String, Vec<i64>)> {
        let outputs = self.0.draft_vocab_size().unwrap_or(backbone.config.vocab_size);
        let in_layer = EagleLayer::tensors(&backbone.config, self.taps().len());
        in_layer.into_iter().chain([(LM_HEAD.to_owned(), vec![outputs, backbone.config.hidden_size])]).collect()
    }

    /// The weights that the oracle starts from, in a folder with the taps beside them.
    fn save_initial(&self, folder: &Path, backbone: &Llama) {
        let map = self.0.token_map();
        let map = map.map(|tokens| TokenMap::new(tokens, tch::Device::Cpu));
        let start = |(name, size): (String, Vec<i64>)| {
            let lm_head_vh = || match &map {
                Some(map) => backbone.lm_head_weight().index_select(0, map.tokens_n()),
                None => backbone.lm_head_weight().copy(),
            };
            let tensor = match size[..] {
                _ if name == LM_HEAD => lm_head_vh(),
                [_] => initial(&name, &size, 0.1) + 1.0,
                _ => initial(&name, &size, (size[size.len() - 1] as f64).powf(-0.5)),
            };
            self.0.assert_norm("init", &name, &tensor, 1e-9);
            (name, tensor)
        };
        let tensors: Vec<(String, Tensor)> = self.weights(backbone).into_iter().map(start).collect();
        let d2t = map.as_ref().map(TokenMap::d2t);
        let named = tensors.iter().map(|(name, tensor)| (name.clone(), tensor));
        let named: Vec<_> = named.chain(d2t.iter().map(|d2t| ("d2t".to_owned(), d2t))).collect();
        save(&folder.join(HEADS_FILE), &named).expect("a file");
        let config = serde_json::json!({"eagle_aux_hidden_state_layer_ids": self.taps()});
        write_json(&folder.join("config.json"), &config).expect("a file");
    }

    fn recipe(&self, folder: &Path, steps: usize, micro_batch_size: usize) -> String {
        let [backbone, rows] = ["models/stories260K", "reference/losses/rows.jsonl"].map(published);
        let (ttt_steps, taps, loss) = (self.0.setting("ttt_steps"), self.0.setting("tap_layers"), self.0.loss());
        let size = self.0.draft_vocab_size().map_or_else(String::new, |size| format!("draft_vocab_size = {size}\n"));
        let (run, accumulation) = (folder.join("run"), 8 / micro_batch_size);
        format!(
            "[backbone]\npath = {backbone:?}\ndtype = \"float32\"\n\
             [heads]\narchitecture = \"eagle3\"\nttt_steps = {ttt_steps}\ntap_layers = {taps}\n{size}init_from = {folder:?}\n\
             [stage.medusa1]\n{loss}\
             [data]\ntrain = [{rows:?}]\nmax_length = 512\npacking = false\nshuffle = false\n\
             [optimizer]\nlearning_rate = 5e-4\n[schedule]\nname = \"constant\"\n\
             [train]\noutput_dir = {run:?}\nmax_steps = {steps}\nsave_every = {steps}\nmicro_batch_size = {micro_batch_size}\n\
             gradient_accumulation_steps = {accumulation}\n"
        )
    }

    /// The trained drafter guesses what the oracle's does, along the same paths, whose tokens are known to it.
    fn check_guesses(&self, result: &Path) {
        let mut backbone = backbone();
        backbone.set_taps(Taps::new(self.taps().into_iter().map(|layer| layer as usize)));
        let eagle = kinds::open(result).expect("a drafter").load(&backbone, DraftDtype::Float32).expect("its weights");
        let rows = rows();
        for expected in self.0.report["guesses"].as_array().expect("guesses") {
            let at = |key: &str| usize::try_from(expected[key].as_u64().expect("a number")).expect("an index");
            let (position, path) = (at("position"), ids(&expected["path"]));
            let text = [&ids(&rows[at("row")]["input_ids"])[..=position], &path].concat();
            let known = eagle.known_text(&backbone, &text);
            for (step, expected) in expected["guesses"].as_array().expect("levels").iter().enumerate() {
                let (_, outputs) = known.logits(step, &[position as i64]).topk(3, -1, true, true);
                let outputs: Vec<i64> = Vec::try_from(outputs.flatten(0, -1)).expect("outputs");
                let token = |&output: &i64| eagle.token_map().map_or(output, |map| map.tokens()[output as usize]);
                assert_eq!(outputs.iter().map(token).collect::<Vec<_>>(), ids(expected), "step {step}");
            }
        }
    }
}

/// `ways`: rows of a micro batch, and whether hidden states are cached.
fn check(name: &'static str, ways: &[(usize, bool)]) {
    let (oracle, backbone) = (EagleOracle(Oracle::in_folder("eagle", name)), backbone());
    let steps = oracle.0.report["steps"].as_array().expect("steps").len();
    for &(micro_batch_size, with_cache) in ways {
        let folder = tempfile::tempdir().expect("a temporary folder");
        oracle.save_initial(folder.path(), &backbone);
        let cache = format!("hidden_state_cache = {:?}\n", folder.path().join("cache"));
        let recipe = oracle.recipe(folder.path(), steps, micro_batch_size) + if with_cache { &cache } else { "" };
        let (lines, result) = train(&recipe);
        oracle.0.check_steps(&lines);
        let got = WeightFiles::open_file(&result.join(HEADS_FILE)).expect("our drafter");
        oracle.0.check_final_weights(&got, oracle.weights(&backbone));
        oracle.check_guesses(&result);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    oracle.save_initial(folder.path(), &backbone);
    train(&oracle.recipe(folder.path(), 1, 8));
    oracle.0.check_gradients_of(&folder.path().join("run"), oracle.weights(&backbone));
}

#[test]
fn twenty_steps_of_eagle_3_equal_pytorch() {
    check("eagle3", &[(8, false), (2, true)]);
}

#[test]
fn steps_with_a_reduced_vocabulary_equal_pytorch() {
    check("eagle3_truncated", &[(8, false)]);
}
