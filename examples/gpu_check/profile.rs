//! Decoding steps that a profiler records, kernel by kernel.

use std::ops::ControlFlow;

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::nvidia::device::Gpu;
use medusa::tree::accept::Acceptance;
use serde_json::json;
use tch::{Device, Kind};

use crate::random::{backbone, go_on, heads, llama_7b, prompt, tree};

/// Tokens of the prompt.
const CONTEXT: i64 = 128;
/// New tokens: the prompt's pass and two plain steps. A profiler takes a second for many kernels.
const TOKENS: usize = 3;

/// A few steps behind a prompt, plain or with a tree of 64 nodes; the prompt and everything before it are not recorded.
pub(crate) fn steps(on: Device, drafting: Drafting) -> anyhow::Result<()> {
    let llama = backbone(llama_7b(), Kind::BFloat16, on);
    let (heads, tree) = (heads(&llama), tree(64)?);
    let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
    let mut engine =
        DeviceLoop::on_gpu(&llama, Some((&medusa.on_device(), Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
    let ids = prompt(CONTEXT, llama.config.vocab_size);
    engine.decode(drafting, &Request::greedy(&ids, 8), &mut go_on())?; // chooses the ways of the products, and records the step as a graph
    engine.reset();
    let gpu = Gpu::open(on)?;
    let (mut calls, mut started) = (0, Ok(()));
    engine.decode(drafting, &Request::greedy(&ids, TOKENS), &mut |_| {
        if calls == 0 {
            started = gpu.start_profiler();
        }
        calls += 1;
        ControlFlow::Continue(())
    })?;
    started?;
    gpu.stop_profiler()?;
    print_json(&json!({"check": "profiled", "context": CONTEXT, "steps": calls - 1}))?;
    Ok(())
}
