//! Promise: packing changes the speed of training but not its results, and leaves little padding.

#![expect(
    clippy::print_stdout,
    reason = "these tests print the losses and rates that they compare: cargo test -- --nocapture"
)]

use std::num::NonZeroUsize;
use std::path::Path;

use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::loader::{Batch, Loader};
use medusa::data::pack::{self, Sequences};
use medusa::data::rows::TokenRow;
use medusa::data::store::RowStore;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, LoadSettings};
use medusa::draft::heads::objective::cross_entropy_sum;
use medusa::draft::heads::{Heads, HeadsConfig};
use medusa::draft::loss::{self, Targets};
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::torch::Generator;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Device, Kind, Tensor};

use super::embedded_default::tiny;

use crate::published::published;

const NUM_HEADS: usize = 4;
const TOLERANCE: f64 = 1e-5; // float32: padded and packed rows add products in another order

fn load(patterns: &[String], backbone: &Path, template: &str, max_length: usize) -> RowStore {
    let tokenizer = TextTokenizer::load(backbone).expect("a tokenizer");
    let choice = TemplateChoice::try_from(template.to_owned()).expect("a template");
    let template = ChatTemplate::choose(&choice, backbone).expect("a template");
    let settings = LoadSettings {
        tokenizer: Some(&tokenizer),
        template: template.as_ref(),
        ..LoadSettings::new(tokenizer.vocab_size(), NonZeroUsize::new(max_length).expect("not 0"))
    };
    data::load(patterns, &settings).expect("rows").0
}

/// Mean losses of the LM head and of every head, over all targets.
fn losses(sequences: Sequences, llama: &Llama, heads: &Heads) -> Vec<f64> {
    let mut sums = vec![(0.0, 0); NUM_HEADS + 1];
    for batch in Loader::new(sequences, 4, 1, None).eval_batches() {
        let batch = batch.expect("rows in memory");
        let hidden_nh = hidden_states(&batch, llama);
        let states_nh = states(&hidden_nh, &batch, heads);
        for (ahead, (sum, count)) in (1..).zip(&mut sums) {
            let targets = batch.targets(ahead);
            *count += targets.tokens.len();
            let tensor = |ids: &[i64]| Tensor::from_slice(ids);
            let previous = if ahead == 1 { 0 } else { heads.shape().reads().tokens_of(ahead - 2) };
            let tokens = batch.tokens_after(&targets.positions, previous);
            let previous_mj = (previous > 0).then(|| tensor(&tokens).view([-1, previous as i64]));
            let (positions_m, tokens_m) = (tensor(&targets.positions), tensor(&targets.tokens));
            let targets = Targets { positions_m, tokens_m, previous_mj };
            let of_batch = match ahead {
                1 => loss::cross_entropy_of(&llama.logits(&hidden_nh, Adapters::Off), &targets),
                _ => cross_entropy_sum(heads, ahead - 2, &states_nh, &targets, llama),
            };
            *sum += of_batch.double_value(&[]);
        }
    }
    sums.into_iter().map(|(sum, count)| sum / count as f64).collect()
}

fn hidden_states(batch: &Batch, llama: &Llama) -> Tensor {
    let (b, t) = (batch.rows as i64, batch.length as i64);
    let tokens_bt = Tensor::from_slice(&batch.input_ids).view([b, t]);
    let rows = RowMask::packed(&batch.segment_lengths, t, &llama.config, Device::Cpu);
    llama.hidden_states(&tokens_bt, &rows, Adapters::Off).view([b * t, -1])
}

/// What the heads read: of Hydra++ heads the prefix layer's output.
fn states(hidden_nh: &Tensor, batch: &Batch, heads: &Heads) -> Tensor {
    let hidden_bth = hidden_nh.view([batch.rows as i64, batch.length as i64, -1]);
    heads.states_of_rows(&hidden_bth, &batch.segment_lengths).flatten(0, 1)
}

#[test]
fn packed_rows_have_the_losses_of_rows_alone() {
    ["medusa", "hydra", "hydra++"].into_iter().for_each(losses_of_packed_rows_are_those_of_rows_alone);
}

fn losses_of_packed_rows_are_those_of_rows_alone(architecture: &str) {
    let llama =
        Llama::load(&tiny("backbone"), Kind::Float, Device::Cpu, Purpose::Training).expect("the embedded default");
    let config = format!("medusa_num_heads = {NUM_HEADS}\nmedusa_num_layers = 1\narchitecture = {architecture:?}");
    let config: HeadsConfig = toml::from_str(&config).expect("heads");
    let heads = Heads::new(&config, &llama.lm_head_weight(), None).with_new_prefix(&llama, 5);
    let mut generator = Generator::seeded(3);
    for (_, parameter) in heads.parameters() {
        let noise = generator.normal_like(parameter) * 0.02;
        let _ = tch::no_grad(|| parameter.shallow_clone().g_add_(&noise)); // equal heads would hide a shift
    }
    let rows = load(&[tiny("eval.jsonl").display().to_string()], &tiny("backbone"), "tokenizer", 256);
    let (packed, report) = pack::pack(rows.clone(), 256);
    let (single, _) = pack::one_each(rows, 256);
    assert!(report.rows > 2 * report.sequences, "{report:?}");
    let (packed, single) = tch::no_grad(|| (losses(packed, &llama, &heads), losses(single, &llama, &heads)));
    println!("{} rows in {} sequences, {:.1} % full", report.rows, report.sequences, 100.0 * report.fill_rate());
    for (ahead, (packed, single)) in packed.iter().zip(&single).enumerate() {
        let name = if ahead == 0 { "LM head".to_owned() } else { format!("head {ahead}") };
        println!("{name}: packed {packed:.7}, alone {single:.7}");
        assert!((packed - single).abs() < TOLERANCE, "{name}: packed {packed}, alone {single}");
    }
}

/// Row lengths distributed like those of conversations: many short, some long.
fn log_normal(count: usize, most: usize) -> RowStore {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let mut uniform = || (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    let length = |a: f64, b: f64| {
        let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        ((6.0 + normal).exp() as usize).clamp(2, most)
    };
    let row = |length: usize| TokenRow { input_ids: vec![1; length], labels: vec![1; length] };
    RowStore::in_memory((0..count).map(|_| row(length(uniform(), uniform()))))
}

#[test]
fn rows_of_all_lengths_fill_their_sequences() {
    let (_, report) = pack::pack(log_normal(5000, 2048), 2048);
    println!(
        "log-normal: {} rows in {} sequences, {:.2} % full",
        report.rows,
        report.sequences,
        100.0 * report.fill_rate()
    );
    assert!(report.fill_rate() >= 0.95, "{report:?}");
}

#[test]
fn sharegpts_conversations_fill_their_sequences() {
    let file = published("data/sharegpt_500.json").display().to_string();
    let rows = load(&[file], &published("models/tokenizer-mistral-v1-32000"), "vicuna", 2048);
    let (_, report) = pack::pack(rows, 2048);
    println!(
        "sharegpt_500: {} rows in {} sequences, {:.2} % full",
        report.rows,
        report.sequences,
        100.0 * report.fill_rate()
    );
    assert!(report.fill_rate() >= 0.95, "{report:?}");
}
