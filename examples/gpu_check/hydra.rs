//! Hydra heads on the GPU, from the smallest tree to Llama 2 7B's shape: each check needs what the one before it has shown.

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::generate;
use medusa::decode::host_loop::HostLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::draft::trained::TrainedDrafter;
use medusa::engine::fastest::fastest;
use medusa::tree::accept::Acceptance;
use medusa::tree::guess_tree::GuessTree;
use serde_json::json;
use tch::{Device, Kind};

use crate::kernels::{self, STEPS};
use crate::loops::parting;
use crate::random::{CHECKED, Checked, backbone, go_on, hydra_heads, llama_7b, prompt, tree};

/// One of bfloat16, one of float16.
const BACKBONES: [Checked; 2] = [CHECKED[0], CHECKED[2]];

/// Kernels beside their oracle, then texts, then times.
pub(crate) fn check(on: Device) -> anyhow::Result<()> {
    kernels::beside_oracle(on, &BACKBONES, hydra_heads, &STEPS)?;
    for nodes in [2, 64] {
        texts(on, nodes)?;
    }
    times(on)
}

/// Greedy texts, which may part from libtorch's at near ties, and the number of steps with the drafter on libtorch.
fn texts(on: Device, nodes: usize) -> anyhow::Result<()> {
    for checked in BACKBONES {
        let Checked { family, kind, head_dim, groups, .. } = checked;
        let llama = checked.backbone(4, on);
        let (heads, tree) = (hydra_heads(&llama), tree(nodes)?);
        let ids = prompt(40, llama.config.vocab_size);
        let request = Request::greedy(&ids, 128);
        let slow = generate::plain(&llama, &request, &mut go_on())?.new_ids;
        let draft = heads.matrices_for(&tree);
        let mut engine = DeviceLoop::on_gpu(&llama, Some((&draft, Acceptance::Greedy)), &request, 1)?;
        let said = engine.decode(Drafting::On, &request, &mut go_on())?;
        let guess_tree = GuessTree::Static(tree.clone());
        let drafter = heads.drafter(&llama, &guess_tree)?;
        let mut host = HostLoop::new(fastest(&llama), Some((drafter, Acceptance::Greedy)));
        let on_libtorch = host.decode(Drafting::On, &request, &mut go_on())?;
        let parting = parting(&llama, &ids, &slow, &said.new_ids)?;
        let is_near = parting.is_near_tie(slow.len());
        print_json(&json!({
            "check": "hydra_texts", "family": family, "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "nodes": nodes,
            "tokens": slow.len(), "hydra": parting, "steps": said.accept_lengths.len(), "libtorch_steps": on_libtorch.accept_lengths.len(),
        }))?;
        anyhow::ensure!(is_near, "a text parts from that of libtorch's loop where its logits are no near tie");
    }
    Ok(())
}

/// Times of steps with Llama 2 7B's shape behind 128 tokens.
fn times(on: Device) -> anyhow::Result<()> {
    let llama = backbone(llama_7b(), Kind::BFloat16, on);
    let heads = hydra_heads(&llama);
    let ids = prompt(128, llama.config.vocab_size);
    for nodes in [8, 64] {
        let tree = tree(nodes)?;
        let draft = heads.matrices_for(&tree);
        let request = |tokens| Request::greedy(&ids, tokens);
        let mut engine = DeviceLoop::on_gpu(&llama, Some((&draft, Acceptance::Greedy)), &request(0), 1)?;
        engine.decode(Drafting::On, &request(8), &mut go_on())?; // runs the step and records it as a graph
        let run = engine.decode(Drafting::On, &request(100), &mut go_on())?;
        print_json(&json!({
            "check": "hydra_steps", "nodes": nodes, "heads": tree.max_depth(), "context": ids.len(), "steps": run.accept_lengths.len(),
            "step_ms": run.tally().step_ms(),
        }))?;
    }
    Ok(())
}
