//! Step times at Llama 2 7B's shape, and memory over many steps.

use std::collections::HashSet;
use std::time::Instant;

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::nvidia::device::Gpu;
use medusa::torch::memory;
use medusa::tree::accept::Acceptance;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::random::{backbone, config, go_on, heads, llama_7b, prompt, tree};

/// Times steps of trees of 1 to 128 nodes after 128 to 4096 tokens, and a copy.
pub(crate) fn time(on: Device) -> anyhow::Result<()> {
    let [copied, read] = memory_speeds(on)?;
    print_json(&json!({"check": "copy", "gigabytes_per_second": copied, "read_gigabytes_per_second": read}))?;
    let llama = backbone(llama_7b(), Kind::BFloat16, on);
    let heads = heads(&llama);
    let mut seen = HashSet::new();
    for nodes in [1, 8, 16, 32, 64, 128] {
        let (tree, drafting) = (tree(nodes.max(2))?, if nodes == 1 { Drafting::Off } else { Drafting::On });
        let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
        let started = Instant::now();
        let mut engine =
            DeviceLoop::on_gpu(&llama, Some((&medusa.on_device(), Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
        let start_seconds = started.elapsed().as_secs_f64();
        for timed in engine.engine().ops().timed_products() {
            if seen.insert(timed.product) {
                print_json(
                    &json!({"check": "products", "product": timed.product, "ways": timed.ways, "refused": timed.refused}),
                )?;
            }
        }
        for context in [128, 1024, 4096] {
            let ids = prompt(context, llama.config.vocab_size);
            let mut decode = |tokens| engine.decode(drafting, &Request::greedy(&ids, tokens), &mut go_on());
            decode(8)?; // runs the step and records it as a graph
            let run = decode(200)?;
            print_json(&json!({
                "check": "steps", "nodes": nodes, "heads": if nodes == 1 { 0 } else { tree.max_depth() }, "context": context, "steps": run.accept_lengths.len(),
                "step_ms": run.tally().step_ms(), "start_seconds": start_seconds,
            }))?;
        }
    }
    Ok(())
}

/// Gigabytes per second of a large copy (read and written) and of a large sum (read).
fn memory_speeds(on: Device) -> anyhow::Result<[f64; 2]> {
    const BYTES: i64 = 4 << 30;
    let gpu = Gpu::open(on)?;
    let from = Tensor::ones([BYTES / 4], (Kind::Float, on));
    let to = from.empty_like();
    let copied = median_seconds(&gpu, || to.shallow_clone().copy_(&from));
    let read = median_seconds(&gpu, || drop(from.sum(Kind::Float)));
    Ok([2.0 * BYTES as f64 / copied / 1e9, BYTES as f64 / read / 1e9])
}

/// The median of nine runs after one warm-up.
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

/// Decodes many texts one after another and checks that memory does not grow.
pub(crate) fn endure(on: Device) -> anyhow::Result<()> {
    const STEPS: usize = 20_000;
    const MOST_GROWTH: i64 = 64 << 20; // bytes: the driver's memory for recorded steps, but not kilobytes per step
    let llama = backbone(config(128, 8, None, 4), Kind::BFloat16, on);
    let (heads, tree) = (heads(&llama), tree(64)?);
    let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
    let mut engine =
        DeviceLoop::on_gpu(&llama, Some((&medusa.on_device(), Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
    let gpu = Gpu::open(on)?;
    let (mut done, mut first) = (0, None);
    while done < STEPS {
        let ids = prompt(1 + done as i64 % 500, llama.config.vocab_size);
        done += engine.decode(Drafting::On, &Request::greedy(&ids, 2000), &mut go_on())?.accept_lengths.len();
        let resident = memory::process().map_or(0, |memory| memory.resident_bytes);
        let now = (gpu.free_bytes()?, resident);
        let (free, before) = *first.get_or_insert(now); // after everything was used once
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
