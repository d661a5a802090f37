//! `medusa gpu-check`: what only a GPU can show of its own loop. `scripts/gpu_check` runs it and keeps what it prints, a JSON object a
//! line.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{CommonFlags, print_json};
use crate::decode::DecodeLoop;
use crate::decode::device::DeviceLoop;
use crate::decode::generate;
use crate::decode::likelihood::log_probability;
use crate::decode::sequence::Request;
use crate::decode::step::Drafting;
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::medusa::heads::{Heads, HeadsShape};
use crate::engine::cuda::engine::CudaEngine;
use crate::engine::cuda::layout::MAX_NODES;
use crate::engine::cuda::plan::BLOCK;
use crate::engine::sample::Sampling;
use crate::model::config::{LlamaConfig, RopeScaling};
use crate::model::llama::Llama;
use crate::numbers::{NonNegative, Probability};
use crate::nvidia::device::{self, Gpu};
use crate::torch::{guard, memory};
use crate::tree::accept::{Acceptance, TypicalAcceptance};
use crate::tree::sparse_tree::SparseTree;

/// Compare the GPU's own loop with its oracle and with libtorch's, and time its steps, on random weights.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  medusa gpu-check steps")]
pub struct GpuCheckArgs {
    /// What to check.
    #[arg(value_enum)]
    pub part: GpuCheck,
}

/// What a GPU can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuCheck {
    /// Every kernel of a step, beside its oracle on the same GPU.
    Kernels,
    /// The same in small shapes, for tools that slow them down.
    Brief,
    /// Greedy texts, by the GPU's loop and by libtorch's: they may part at near ties alone.
    Texts,
    /// Times of steps of Llama 2 7B's shape, and of a copy.
    Steps,
    /// 20,000 steps, and the memory before and after, which may hardly grow.
    Endurance,
}

/// Runs one part.
///
/// # Errors
/// Why this machine cannot; what the device says.
pub fn run(args: &GpuCheckArgs, common: &CommonFlags) -> anyhow::Result<()> {
    device::check()?;
    let on = common.device.resolve()?;
    guard("the check", || {
        tch::no_grad(|| match args.part {
            GpuCheck::Kernels => kernels(on, &STEPS),
            GpuCheck::Brief => kernels(on, &STEPS[..3]),
            GpuCheck::Texts => texts(on),
            GpuCheck::Steps => steps(on),
            GpuCheck::Endurance => endurance(on),
        })
    })?
}

/// Of every backbone here.
const HEADS: usize = 5;

/// A small backbone, or with the sizes of Llama 2 7B.
fn config(head_dim: i64, groups: i64, sliding_window: Option<i64>, layers: usize) -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 8 * head_dim,
        intermediate_size: 1024,
        num_hidden_layers: layers,
        num_attention_heads: 8,
        num_key_value_heads: groups,
        head_dim,
        vocab_size: 4096,
        max_position_embeddings: 4608,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window,
        tie_word_embeddings: false,
        attention_bias: false,
        mlp_bias: false,
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

fn llama_7b() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 4096,
        intermediate_size: 11008,
        num_attention_heads: 32,
        vocab_size: 32000,
        ..config(128, 32, None, 32)
    }
}

/// Random, with weights large enough that attention matters.
fn backbone(config: LlamaConfig, kind: Kind, on: Device) -> Llama {
    let llama = Llama::random(config, kind, on, 1);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(3.0);
    }
    llama.for_decoding()
}

fn heads(llama: &Llama) -> Heads {
    let (hidden_size, vocab_size) = (llama.config.hidden_size, llama.config.vocab_size);
    let shape = HeadsShape { medusa_num_heads: HEADS, medusa_num_layers: 1, hidden_size, vocab_size };
    Heads::random(shape, llama.kind(), llama.device(), 2).for_decoding()
}

/// `nodes` with the root: first a chain that needs every head, then a broad tree's.
fn tree(nodes: usize) -> anyhow::Result<SparseTree> {
    let broad = SparseTree::cartesian(&[8, 4, 2, 2])?;
    let chain = (1..=HEADS).map(|depth| vec![0; depth]);
    let beside = (1..broad.len()).map(|node| broad.path(node).to_vec()).filter(|path| path.iter().any(|&at| at > 0));
    Ok(SparseTree::new(chain.chain(beside).take(nodes - 1).collect())?)
}

fn prompt(length: i64, vocabulary: i64) -> Vec<i64> {
    (0..length).map(|at| (at * at * 31 + at * 7 + 1) % vocabulary).collect()
}

fn go_on() -> impl FnMut(&[i64]) -> ControlFlow<()> {
    |_| ControlFlow::Continue(())
}

/// Shapes that kernels are checked in: dtype, head size, key/value heads of eight, window.
const SHAPES: [(Kind, i64, i64, Option<i64>); 3] =
    [(Kind::BFloat16, 128, 8, None), (Kind::BFloat16, 64, 2, None), (Kind::Half, 128, 1, Some(100))];
/// Nodes of a tree, and tokens before it.
const STEPS: [(usize, i64); 5] = [(2, 1), (9, 63), (64, 64), (64, 700), (128, 4090)];
/// The farthest that a kernel may be from its oracle: both sum in float32 and round to 16 bits once, attention rounds its probabilities,
/// too. Integers may not differ at all.
const FARTHEST: f64 = 0.01;
/// But of what is drawn so many rows may: where a nucleus or a number ends at a border between two tokens, sums in another order take the
/// neighbour.
const FARTHEST_DRAWN: f64 = 2.0;

fn is_far(kernel: &str, distance: f64) -> bool {
    distance > if kernel == "draw" { FARTHEST_DRAWN } else { FARTHEST }
}

/// Steps of which each kernel runs beside its oracle, greedy, typical and drawn.
fn kernels(on: Device, steps: &[(usize, i64)]) -> anyhow::Result<()> {
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    let rules = [(Acceptance::Greedy, 0.0), (typical, 0.7), (Acceptance::Rejection, 0.7)];
    let mut wrong = BTreeSet::new();
    for (kind, head_dim, groups, window) in SHAPES {
        let llama = backbone(config(head_dim, groups, window, 1), kind, on);
        let heads = heads(&llama);
        for (&(nodes, context), (acceptance, temperature)) in steps.iter().zip(rules.into_iter().cycle()) {
            let tree = tree(nodes)?;
            let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
            let kernels = CudaEngine::kernels(&llama, Some(&medusa.on_device()), 1)?;
            let mut session = DeviceLoop::new(&llama, Some((&medusa, acceptance)), kernels.beside_oracle())?;
            let ids = prompt(context, llama.config.vocab_size);
            let temperature = NonNegative::new(temperature).expect("of the list above");
            let sampling = Sampling { temperature, top_p: Probability::new(0.9).expect("above 0") };
            session.decode(Drafting::On, &Request { sampling, ..Request::greedy(&ids, 5) }, &mut go_on())?;
            let found = session.engine().ops().distances();
            wrong.extend(found.iter().filter(|(name, of)| is_far(name, of.distance)).map(|(name, _)| name.clone()));
            let distances: serde_json::Map<_, _> =
                found.iter().map(|(name, of)| (name.clone(), json!(of.distance.min(f64::MAX)))).collect();
            print_json(&json!({
                "check": "kernels", "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "nodes": nodes,
                "context": context, "acceptance": format!("{acceptance:?}"), "distances": distances,
            }))?;
        }
    }
    anyhow::ensure!(wrong.is_empty(), "too far from their oracle: {wrong:?}");
    Ok(())
}

/// Tokens of each text.
const TEXT: usize = 128;
/// Of prompts: behind the last one, the text crosses the border where the cache grows, and recorded steps are recorded again.
const PROMPTS: [i64; 4] = [1, 40, 300, BLOCK - MAX_NODES as i64 - 60];

fn texts(on: Device) -> anyhow::Result<()> {
    texts_of_libtorch(on)?;
    let mut wrong = 0;
    for (kind, head_dim, groups, window) in SHAPES {
        let llama = backbone(config(head_dim, groups, window, 4), kind, on);
        let (heads, tree) = (heads(&llama), tree(64)?);
        let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
        let mut alone = DeviceLoop::on_gpu(&llama, None, &Request::greedy(&[], 0), 1)?;
        let mut engine = DeviceLoop::on_gpu(&llama, Some((&medusa, Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
        for length in PROMPTS {
            let ids = prompt(length, llama.config.vocab_size);
            let request = Request::greedy(&ids, TEXT);
            let slow = generate::plain(&llama, &request, &mut go_on())?.new_ids;
            let texts = [
                alone.decode(Drafting::Off, &request, &mut go_on())?.new_ids,
                engine.decode(Drafting::Off, &request, &mut go_on())?.new_ids,
                engine.decode(Drafting::On, &request, &mut go_on())?.new_ids,
            ];
            let partings =
                texts.iter().map(|text| parting(&llama, &ids, &slow, text)).collect::<Result<Vec<_>, _>>()?;
            wrong += partings.iter().filter(|parting| !parting.is_near_tie(slow.len())).count();
            print_json(&json!({
                "check": "texts", "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "prompt": length,
                "tokens": slow.len(), "alone": partings[0], "plain": partings[1], "medusa": partings[2],
            }))?;
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} texts part from those of libtorch's loop where its logits are no near tie");
    Ok(())
}

/// In float32, libtorch's own loop with a tree makes the text that it makes without.
fn texts_of_libtorch(on: Device) -> anyhow::Result<()> {
    let llama = backbone(config(64, 2, None, 4), Kind::Float, on);
    let (heads, tree) = (heads(&llama), tree(64)?);
    let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
    let ids = prompt(40, llama.config.vocab_size);
    let request = Request::greedy(&ids, 128);
    let plain = generate::plain(&llama, &request, &mut go_on())?.new_ids;
    let fast = generate::drafted(&llama, medusa, Acceptance::Greedy, &request, &mut go_on())?.new_ids;
    let same = plain == fast;
    print_json(&json!({"check": "libtorch", "dtype": "Float", "tokens": plain.len(), "same": same}))?;
    anyhow::ensure!(same, "in float32, libtorch's loop makes another text with a tree than without");
    Ok(())
}

/// How many tokens are the same, and where two texts part, by how much libtorch's logits are for the token of its own.
#[derive(Debug, Serialize)]
struct Parting {
    same: usize,
    margin: Option<f64>,
}

/// The largest margin that two ways of rounding to 16 bits may turn.
const NEAR_TIE: f64 = 0.1;

impl Parting {
    /// Whether the whole text of so many tokens is the same, up to what is nearly one.
    fn is_near_tie(&self, tokens: usize) -> bool {
        self.margin.map_or(self.same == tokens, |margin| margin.abs() <= NEAR_TIE) // NaN is none
    }
}

fn parting(llama: &Llama, prompt: &[i64], right: &[i64], got: &[i64]) -> anyhow::Result<Parting> {
    let same = got.iter().zip(right).take_while(|(a, b)| a == b).count();
    let margin = match (right.get(same), got.get(same)) {
        (Some(&right_one), Some(&other)) => {
            let before = [prompt, &right[..same]].concat();
            let log_p = |token| log_probability(llama, &before, &[token]);
            Some(log_p(right_one)? - log_p(other)?)
        }
        _ => None,
    };
    Ok(Parting { same, margin })
}

fn steps(on: Device) -> anyhow::Result<()> {
    let [copied, read] = memory_speeds(on)?;
    print_json(&json!({"check": "copy", "gigabytes_per_second": copied, "read_gigabytes_per_second": read}))?;
    let llama = backbone(llama_7b(), Kind::BFloat16, on);
    let heads = heads(&llama);
    for nodes in [1, 8, 16, 32, 64, 128] {
        let (tree, drafting) = (tree(nodes.max(2))?, if nodes == 1 { Drafting::Off } else { Drafting::On });
        let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
        let started = Instant::now();
        let mut engine = DeviceLoop::on_gpu(&llama, Some((&medusa, Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
        let start_seconds = started.elapsed().as_secs_f64();
        for context in [128, 1024, 4096] {
            let ids = prompt(context, llama.config.vocab_size);
            let mut decode = |tokens| engine.decode(drafting, &Request::greedy(&ids, tokens), &mut go_on());
            decode(8)?; // runs the step and records it
            let run = decode(200)?;
            print_json(&json!({
                "check": "steps", "nodes": nodes, "heads": if nodes == 1 { 0 } else { tree.max_depth() }, "context": context, "steps": run.accept_lengths.len(),
                "step_ms": run.tally().step_ms(), "start_seconds": start_seconds,
            }))?;
        }
    }
    Ok(())
}

/// Gigabytes a second: of a large copy, read and written, and of a large sum, read.
fn memory_speeds(on: Device) -> anyhow::Result<[f64; 2]> {
    const BYTES: i64 = 4 << 30;
    let gpu = Gpu::open(on)?;
    let from = Tensor::ones([BYTES / 4], (Kind::Float, on));
    let to = from.empty_like();
    let copied = median_seconds(&gpu, || to.shallow_clone().copy_(&from));
    let read = median_seconds(&gpu, || drop(from.sum(Kind::Float)));
    Ok([2.0 * BYTES as f64 / copied / 1e9, BYTES as f64 / read / 1e9])
}

/// Of nine times, after one that does not count.
fn median_seconds(gpu: &Gpu, work: impl Fn()) -> f64 {
    let mut seconds: Vec<f64> = (0..10)
        .map(|_| {
            let started = Instant::now();
            work();
            gpu.wait_for_torch();
            started.elapsed().as_secs_f64()
        })
        .skip(1)
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[4]
}

fn endurance(on: Device) -> anyhow::Result<()> {
    const STEPS: usize = 20_000;
    const MOST_GROWTH: i64 = 64 << 20; // bytes: what the driver takes for the steps that are recorded, and no kilobytes a step
    let llama = backbone(config(128, 8, None, 4), Kind::BFloat16, on);
    let (heads, tree) = (heads(&llama), tree(64)?);
    let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
    let mut engine = DeviceLoop::on_gpu(&llama, Some((&medusa, Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
    let gpu = Gpu::open(on)?;
    let (mut done, mut first) = (0, None);
    while done < STEPS {
        let ids = prompt(1 + done as i64 % 500, llama.config.vocab_size);
        done += engine.decode(Drafting::On, &Request::greedy(&ids, 2000), &mut go_on())?.accept_lengths.len();
        let resident = memory::process().map_or(0, |memory| memory.resident_bytes);
        let now = (gpu.free_bytes()?, resident);
        let (free, before) = *first.get_or_insert(now); // when everything was used once
        if done >= STEPS {
            let growth = [free.cast_signed() - now.0.cast_signed(), now.1.cast_signed() - before.cast_signed()];
            print_json(&json!({
                "check": "endurance", "steps": done, "device_growth_bytes": growth[0], "host_growth_bytes": growth[1],
            }))?;
            anyhow::ensure!(
                growth.iter().all(|&bytes| bytes <= MOST_GROWTH),
                "memory grows with steps: {growth:?} bytes"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_the_nodes_that_were_asked_for_and_use_every_head() {
        for nodes in [2, 8, 9, 16, 32, 64, 128] {
            let tree = tree(nodes).unwrap();
            assert_eq!((tree.len(), tree.max_depth()), (nodes, HEADS.min(nodes - 1)));
        }
    }

    #[test]
    fn texts_may_part_at_near_ties_and_tokens_be_drawn_at_borders() {
        let near = |same, margin| Parting { same, margin }.is_near_tie(9);
        assert!(near(9, None) && near(3, Some(0.05)) && near(3, Some(-0.05)));
        assert!(!near(8, None) && !near(3, Some(0.2)) && !near(3, Some(-0.2)) && !near(3, Some(f64::NAN)));
        assert!(!is_far("draw", 2.0) && is_far("draw", 3.0) && is_far("walk", 1.0) && is_far("embed", f64::INFINITY));
        let last = PROMPTS[PROMPTS.len() - 1];
        let fits = BLOCK - MAX_NODES as i64;
        assert!(last < fits && fits < last + TEXT as i64, "the last text crosses the border");
    }
}
