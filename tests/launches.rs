//! How many kernels one optimizer step launches.

#![cfg(target_arch = "x86_64")] // `calls` relies on how C++ returns a pointer there

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use medusa::data::Watch;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::recipe::Recipe;
use medusa::train::checked::CheckedRun;
use medusa::train::run::TrainRun;
use medusa::train::training_loop::RunEvent;
use serde_json::json;
use tch::{Device, Kind};

use super::small_run::SmallRun;

pub(crate) mod calls;

use calls::CallRecorder;

/// Sizes of a Medusa-1 run in bfloat16.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    layers: usize,
    heads: usize,
    hidden: usize,
    vocab: usize,
    rows: usize,
    length: usize,
    accumulation: usize,
    optimizer: &'static str,
}

const SMALL: Sizes =
    Sizes { layers: 1, heads: 1, hidden: 32, vocab: 100, rows: 2, length: 24, accumulation: 1, optimizer: "adamw" };

impl Sizes {
    fn write(&self, small: &SmallRun) {
        let Self { layers, hidden, vocab, rows, length, accumulation, .. } = self;
        let config = json!({"model_type": "llama", "hidden_size": hidden, "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": vocab,
            "max_position_embeddings": 4096, "tie_word_embeddings": false});
        small.write("backbone/config.json", config.to_string());
        let config = LlamaConfig::load(&small.path("backbone")).expect("a config");
        small.save_backbone(&Llama::random(config, Kind::BFloat16, Device::Cpu, 3).weights());
        let row = |row: usize| {
            let ids: Vec<usize> = (0..*length).map(|t| (row * 97 + t * t) % vocab).collect();
            json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
        };
        small.write("rows.jsonl", (0..rows * accumulation).map(row).collect::<String>());
    }

    fn recipe(&self, small: &SmallRun) -> String {
        let Self { heads, rows, length, accumulation, optimizer, .. } = self;
        let [backbone, data, run] = ["backbone", "rows.jsonl", "run"].map(|name| small.path(name));
        format!(
            "[backbone]\npath = {backbone:?}\ndtype = \"bfloat16\"\n\
             [heads]\nmedusa_num_heads = {heads}\nmedusa_num_layers = 1\n[stage.medusa1]\n\
             [data]\ntrain = [{data:?}]\nmax_length = {length}\npacking = false\nshuffle = false\n\
             [optimizer]\nname = {optimizer:?}\nlearning_rate = 1e-3\n[schedule]\nname = \"constant\"\n\
             [train]\noutput_dir = {run:?}\nmax_steps = 2\nmicro_batch_size = {rows}\n\
             gradient_accumulation_steps = {accumulation}\n"
        )
    }

    /// The launches of the second step, by operator.
    fn launches(&self) -> BTreeMap<String, usize> {
        let small = SmallRun::new();
        self.write(&small);
        let plan = Recipe::parse(Path::new("recipe.toml"), &self.recipe(&small)).expect("a recipe").plan(Device::Cpu);
        let run = TrainRun::load(CheckedRun::load(plan, Watch::default()).expect("rows")).expect("a backbone");
        let recorder = CallRecorder::new();
        let mut after_steps = vec![];
        let mut tell = |event: RunEvent| {
            if matches!(event, RunEvent::Stepped(_)) {
                after_steps.push(recorder.so_far());
            }
        };
        run.train(false, &AtomicBool::new(false), &mut tell).expect("a run");
        let [first, second] = &after_steps[..] else { panic!("two steps, got {}", after_steps.len()) };
        let of_step = second.iter().map(|(name, count)| (name.clone(), count - first.get(name).unwrap_or(&0)));
        of_step.filter(|(_, count)| *count > 0).collect()
    }
}

#[test]
#[ignore = "prints counts; cargo test --test promises launches -- --ignored --nocapture"]
fn counts_of_steps() {
    let base = SMALL.launches();
    println!("base {} {base:?}", base.values().sum::<usize>());
    for sizes in [
        Sizes { layers: 2, ..SMALL },
        Sizes { layers: 3, ..SMALL },
        Sizes { heads: 2, ..SMALL },
        Sizes { heads: 3, ..SMALL },
        Sizes { accumulation: 2, ..SMALL },
        Sizes { hidden: 512, vocab: 1024, ..SMALL },
        Sizes { hidden: 512, vocab: 2048, ..SMALL },
        Sizes { length: 300, rows: 1, vocab: 32_000, ..SMALL },
        Sizes { length: 600, rows: 1, vocab: 32_000, ..SMALL },
        Sizes { hidden: 512, vocab: 1024, optimizer: "adamw8bit", ..SMALL },
        Sizes { hidden: 512, vocab: 2048, optimizer: "adamw8bit", ..SMALL },
    ] {
        let of = sizes.launches();
        let more: Vec<_> = of
            .iter()
            .filter_map(|(name, n)| {
                let was = base.get(name).unwrap_or(&0);
                (n != was).then(|| format!("{name} {was}->{n}"))
            })
            .collect();
        println!("{sizes:?}: {} {more:?}", of.values().sum::<usize>());
    }
}
