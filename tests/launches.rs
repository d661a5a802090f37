//! How many kernels one optimizer step launches on a GPU, counted on the CPU: benches/results/launches-2026-11-23.md.

#![expect(clippy::print_stdout, reason = "the counts; shown with --nocapture")]
#![cfg(target_arch = "x86_64")] // `calls` relies on how C++ returns a pointer there

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use medusa::data::Watch;
use medusa::draft::loss::fused::chunk_rows;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::recipe::Recipe;
use medusa::torch::optim::adamw::{AdamW, Parameter, gradient_norm};
use medusa::torch::optim::{AdamWConfig, OptimizerName};
use medusa::train::checked::CheckedRun;
use medusa::train::ranks::Ranks;
use medusa::train::run::TrainRun;
use medusa::train::training_loop::RunEvent;
use serde_json::json;
use tch::{Device, Kind, Tensor};

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
    /// Two rows in each sequence.
    packed: bool,
    optimizer: &'static str,
}

const SMALL: Sizes = Sizes {
    layers: 1,
    heads: 1,
    hidden: 32,
    vocab: 100,
    rows: 2,
    length: 24,
    accumulation: 1,
    packed: false,
    optimizer: "adamw",
};

impl Sizes {
    fn write(&self, small: &SmallRun) {
        let Self { layers, hidden, vocab, rows, length, accumulation, packed, .. } = self;
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
        small.write("rows.jsonl", (0..rows * accumulation * (1 + usize::from(*packed))).map(row).collect::<String>());
    }

    fn recipe(&self, small: &SmallRun) -> String {
        let Self { heads, rows, length, accumulation, packed, optimizer, .. } = self;
        let max_length = length * (1 + usize::from(*packed));
        let [backbone, data, run] = ["backbone", "rows.jsonl", "run"].map(|name| small.path(name));
        format!(
            "[backbone]\npath = {backbone:?}\ndtype = \"bfloat16\"\n\
             [heads]\nmedusa_num_heads = {heads}\nmedusa_num_layers = 1\n[stage.medusa1]\n\
             [data]\ntrain = [{data:?}]\nmax_length = {max_length}\npacking = {packed}\nshuffle = false\n\
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
        let mut report = |event: RunEvent| {
            if matches!(event, RunEvent::Stepped(_)) {
                after_steps.push(recorder.so_far());
            }
        };
        run.train(Ranks::alone(), false, &AtomicBool::new(false), &mut report).expect("a run");
        let [first, second] = &after_steps[..] else { panic!("two steps, got {}", after_steps.len()) };
        let of_step = second.iter().map(|(name, count)| (name.clone(), count - first.get(name).unwrap_or(&0)));
        of_step.filter(|(_, count)| *count > 0).collect()
    }
}

fn count(sizes: Sizes) -> usize {
    let launches = sizes.launches();
    println!("{sizes:?}: {} {launches:?}", launches.values().sum::<usize>());
    launches.values().sum()
}

/// With a chunk of few rows.
const VOCAB: i64 = 32_768;

/// How many launches a layer, a head and so on add.
#[derive(Debug)]
struct Costs {
    micro_batch: usize,
    layer: usize,
    head: usize,
    /// Of a head's logits, beyond its first.
    chunk: usize,
    update: usize,
}

impl Costs {
    fn measured() -> Self {
        let chunks = |chunks: i64| {
            let positions = usize::try_from(chunks * chunk_rows(VOCAB, true)).expect("a length");
            count(Sizes { rows: 1, length: positions + 2, vocab: VOCAB.unsigned_abs() as usize, ..SMALL }) // of a head's targets, the last two are missing
        };
        let (one, layers) = (count(SMALL), count(Sizes { layers: 2, ..SMALL }));
        let (heads, micro_batches) = (count(Sizes { heads: 2, ..SMALL }), count(Sizes { accumulation: 2, ..SMALL }));
        let (layer, head, of_micro_batch) = (layers - one, heads - one, micro_batches - one);
        let chunk = chunks(2) - chunks(1);
        Self { micro_batch: of_micro_batch - layer - head, layer, head, chunk, update: one - of_micro_batch }
    }

    /// Of an optimizer step of Medusa-1.
    fn step(&self, layers: usize, heads: usize, chunks: usize) -> usize {
        self.micro_batch + layers * self.layer + heads * (self.head + (chunks - 1) * self.chunk) + self.update
    }
}

/// The launches of a step on the shape of a 7B model are those of its parts: a step on the CPU with these sizes would take hours.
#[test]
fn a_step_on_a_7b_shape_launches_few_kernels() {
    let costs = Costs::measured();
    let three = count(Sizes { layers: 3, heads: 3, accumulation: 1, ..SMALL });
    assert_eq!(three, costs.step(3, 3, 1), "{costs:?}: the count is linear in layers and heads");
    // 8 rows of 2,048 tokens, three quarters of them labelled: 12,288 rows for each head, in chunks of 2^28 / 32,000.
    let seven_billion = costs.step(32, 5, 2);
    println!("a step of Medusa-1 on a 7B shape: {seven_billion} launches; {costs:?}");
    assert!(seven_billion < 1000, "{seven_billion}: {costs:?}");
}

/// What libtorch's operators launch in an update, where there is no kernel of ours: the oracle.
#[test]
fn an_update_by_libtorch_launches_kernels_for_each_slice_of_each_parameter() {
    const SLICE: i64 = 131_072;
    for name in [OptimizerName::AdamW, OptimizerName::AdamW8bit] {
        let config = AdamWConfig { name, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 };
        let launches = |slices: i64| {
            let weight = Tensor::zeros([slices * SLICE], (Kind::Float, Device::Cpu));
            let mut parameters = [Parameter::new("w", &weight)];
            let mut optimizer = AdamW::new(config, &parameters);
            let recorder = CallRecorder::new();
            let norm = gradient_norm(&parameters);
            optimizer.step(&mut parameters, 1e-3, 1.0 + norm);
            println!("{name}, {slices} slices: {:?}", recorder.so_far());
            recorder.so_far().values().sum::<usize>()
        };
        let [one, two, three] = [1, 2, 3].map(launches);
        println!("{name}: {} launches a slice", two - one);
        assert!(two - one > 10 && three - two == two - one, "{name}: {one}, {two}, {three}");
    }
}

#[test]
fn the_number_of_launches_does_not_grow_with_the_parameters_and_the_host_waits_once() {
    for optimizer in ["adamw", "adamw8bit"] {
        let small = Sizes { optimizer, hidden: 64, vocab: 200, ..SMALL }.launches();
        let large = Sizes { optimizer, hidden: 512, vocab: 2000, ..SMALL }.launches();
        assert_eq!(small, large, "{optimizer}");
        assert_eq!(small["read"], 1, "{optimizer}");
        let of_batch = small["upload"] - if optimizer == "adamw" { 2 } else { 3 }; // tables of the norm and of each update
        assert_eq!(of_batch, 1, "{optimizer}: a micro batch's integers");
        assert!(!small.contains_key("aten::_local_scalar_dense"), "{optimizer}: {small:?}");
    }
}

#[test]
fn packed_rows_add_few_copies_whatever_their_layers() {
    let uploads = |layers| Sizes { packed: true, layers, ..SMALL }.launches()["upload"];
    let (plain, packed) = (SMALL.launches()["upload"], uploads(1));
    assert_eq!(packed, uploads(3));
    assert_eq!(packed, plain + 2, "positions, and where texts begin");
}
