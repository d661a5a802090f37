//! `medusa gpu-check`: what only a GPU can show of its own loop. `scripts/gpu_check` runs it and keeps what it prints, a JSON object a
//! line.

use std::ops::ControlFlow;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{CommonFlags, print_json};
use crate::decode::accept::Acceptance;
use crate::decode::cuda::device::{self, Gpu};
use crate::decode::cuda::engine::Engine;
use crate::decode::cuda::ops::Ops;
use crate::decode::generate::{self, Generation, Medusa, Request};
use crate::medusa::heads::{Heads, HeadsShape};
use crate::medusa::tree::SparseTree;
use crate::model::config::{LlamaConfig, RopeScaling};
use crate::model::llama::Llama;
use crate::torch::{guard, memory};

/// Compare the GPU's own loop with its oracle and with libtorch's, and time its steps, on random weights.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  medusa gpu-check steps")]
pub struct GpuCheckArgs {
    /// What to check.
    #[arg(value_enum)]
    pub part: Part,
}

/// What a GPU can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Every buffer of a step, by the kernels and by their oracle on the same GPU.
    Kernels,
    /// Greedy texts, by the GPU's loop and by libtorch's.
    Texts,
    /// Times of steps of Llama 2 7B's shape, and of a copy.
    Steps,
    /// 20,000 steps, and the memory before and after.
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
            Part::Kernels => kernels(on),
            Part::Texts => texts(on),
            Part::Steps => steps(on),
            Part::Endurance => endurance(on),
        })
    })?
}

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
    let shape = HeadsShape { medusa_num_heads: 5, medusa_num_layers: 1, hidden_size, vocab_size };
    Heads::random(shape, llama.kind(), llama.device(), 2).for_decoding()
}

/// The first nodes of a broad tree, `nodes` with the root.
fn tree(nodes: usize) -> anyhow::Result<SparseTree> {
    let broad = SparseTree::cartesian(&[8, 4, 2, 2])?;
    Ok(SparseTree::new((1..nodes).map(|node| broad.path(node).to_vec()).collect())?)
}

fn prompt(length: i64, vocabulary: i64) -> Vec<i64> {
    (0..length).map(|at| (at * at * 31 + at * 7 + 1) % vocabulary).collect()
}

fn go_on() -> impl FnMut(&[i64]) -> ControlFlow<()> {
    |_| ControlFlow::Continue(())
}

/// One layer, so that each buffer holds what one kernel made of inputs that both sides share.
fn kernels(on: Device) -> anyhow::Result<()> {
    for (kind, head_dim, groups, window) in
        [(Kind::BFloat16, 128, 8, None), (Kind::BFloat16, 64, 2, None), (Kind::Half, 128, 1, Some(100))]
    {
        let llama = backbone(config(head_dim, groups, window, 1), kind, on);
        let heads = heads(&llama);
        for (nodes, context) in [(2, 1), (9, 63), (64, 64), (64, 700), (128, 4090)] {
            let tree = tree(nodes)?;
            let medusa = Medusa::new(&llama, &heads, &tree, Acceptance::Greedy)?;
            let ids = prompt(context, llama.config.vocab_size);
            let request = Request::greedy(&ids, 3);
            let mut fast = Engine::on_gpu(&llama, Some(&medusa), &request)?;
            let mut slow = Engine::new(&llama, Some(&medusa), Ops::Oracle)?;
            let texts = [fast.medusa(&request, &mut go_on())?.new_ids, slow.medusa(&request, &mut go_on())?.new_ids];
            tch::Cuda::synchronize(0);
            let differences: Value = fast
                .buffers()
                .into_iter()
                .zip(slow.buffers())
                .map(|((name, got), (_, expected))| (name.to_owned(), json!(difference(got, expected))))
                .collect::<serde_json::Map<_, _>>()
                .into();
            print_json(&json!({
                "check": "kernels", "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "nodes": nodes,
                "context": context, "same_text": texts[0] == texts[1], "differences": differences,
            }))?;
        }
    }
    Ok(())
}

/// ‖got - expected‖ / ‖expected‖; of integers, how many differ.
fn difference(got: &Tensor, expected: &Tensor) -> f64 {
    if !got.is_floating_point() {
        return got.ne_tensor(expected).sum(Kind::Double).double_value(&[]);
    }
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let norm = expected.norm().double_value(&[]);
    (got - expected).norm().double_value(&[]) / norm.max(f64::MIN_POSITIVE)
}

fn texts(on: Device) -> anyhow::Result<()> {
    for (kind, head_dim, groups, window) in
        [(Kind::BFloat16, 128, 8, None), (Kind::Half, 64, 2, None), (Kind::Half, 128, 2, Some(64))]
    {
        let llama = backbone(config(head_dim, groups, window, 4), kind, on);
        let (heads, tree) = (heads(&llama), tree(64)?);
        let medusa = Medusa::new(&llama, &heads, &tree, Acceptance::Greedy)?;
        let mut engine = Engine::on_gpu(&llama, Some(&medusa), &Request::greedy(&[], 0))?;
        for length in [1, 40, 300] {
            let ids = prompt(length, llama.config.vocab_size);
            let request = Request::greedy(&ids, 128);
            let slow = generate::plain(&llama, &request, &mut go_on())?.new_ids;
            let [plain, fast] = [engine.plain(&request, &mut go_on())?, engine.medusa(&request, &mut go_on())?];
            let same = |run: &Generation| run.new_ids.iter().zip(&slow).take_while(|(a, b)| a == b).count();
            print_json(&json!({
                "check": "texts", "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "prompt": length,
                "tokens": slow.len(), "same_plain": same(&plain), "same_medusa": same(&fast),
            }))?;
        }
    }
    Ok(())
}

fn steps(on: Device) -> anyhow::Result<()> {
    print_json(&json!({"check": "copy", "gigabytes_per_second": copy_speed(on)}))?;
    let llama = backbone(llama_7b(), Kind::BFloat16, on);
    let heads = heads(&llama);
    for nodes in [1, 8, 16, 32, 64, 128] {
        let tree = tree(nodes.max(2))?;
        let medusa = Medusa::new(&llama, &heads, &tree, Acceptance::Greedy)?;
        let started = Instant::now();
        let mut engine = Engine::on_gpu(&llama, Some(&medusa), &Request::greedy(&[], 0))?;
        let start_seconds = started.elapsed().as_secs_f64();
        for context in [128, 1024, 4096] {
            let ids = prompt(context, llama.config.vocab_size);
            let mut decode = |tokens| {
                let request = Request::greedy(&ids, tokens);
                if nodes == 1 { engine.plain(&request, &mut go_on()) } else { engine.medusa(&request, &mut go_on()) }
            };
            decode(8)?; // runs the step and records it
            let run = decode(200)?;
            print_json(&json!({
                "check": "steps", "nodes": nodes, "context": context, "steps": run.accept_lengths.len(),
                "step_ms": run.tally().step_ms(), "start_seconds": start_seconds,
            }))?;
        }
    }
    Ok(())
}

/// Bytes read and written in a second, by a large copy.
fn copy_speed(on: Device) -> f64 {
    const BYTES: i64 = 4 << 30;
    let from = Tensor::ones([BYTES / 4], (Kind::Float, on));
    let to = from.empty_like();
    let copy = || {
        to.shallow_clone().copy_(&from);
        tch::Cuda::synchronize(0);
    };
    copy();
    let mut seconds: Vec<f64> = (0..9)
        .map(|_| {
            let started = Instant::now();
            copy();
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    2.0 * BYTES as f64 / seconds[4] / 1e9
}

fn endurance(on: Device) -> anyhow::Result<()> {
    const STEPS: usize = 20_000;
    let llama = backbone(config(128, 8, None, 4), Kind::BFloat16, on);
    let (heads, tree) = (heads(&llama), tree(64)?);
    let medusa = Medusa::new(&llama, &heads, &tree, Acceptance::Greedy)?;
    let mut engine = Engine::on_gpu(&llama, Some(&medusa), &Request::greedy(&[], 0))?;
    let gpu = Gpu::open(on)?;
    let (mut done, mut first) = (0, None);
    while done < STEPS {
        let ids = prompt(1 + done as i64 % 500, llama.config.vocab_size);
        done += engine.medusa(&Request::greedy(&ids, 2000), &mut go_on())?.accept_lengths.len();
        let resident = memory::process().map_or(0, |memory| memory.resident_bytes);
        let now = (gpu.free_bytes()?, resident);
        let (free, before) = *first.get_or_insert(now); // when everything was used once
        if done >= STEPS {
            print_json(&json!({
                "check": "endurance", "steps": done, "device_growth_bytes": free.cast_signed() - now.0.cast_signed(),
                "host_growth_bytes": now.1.cast_signed() - before.cast_signed(),
            }))?;
        }
    }
    Ok(())
}
