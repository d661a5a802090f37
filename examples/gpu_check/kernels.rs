//! Compares every kernel of a step with its oracle.

use std::collections::BTreeSet;

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::draft::heads::Heads;
use medusa::engine::cuda::engine::CudaEngine;
use medusa::engine::sample::Sampling;
use medusa::model::llama::Llama;
use medusa::numbers::{NonNegative, Probability};
use medusa::tree::accept::{Acceptance, TypicalAcceptance};
use serde_json::json;
use tch::Device;

use crate::random::{Checked, go_on, prompt, tree};

/// Nodes of a tree, and tokens in the context.
pub(crate) const STEPS: [(usize, i64); 5] = [(2, 1), (9, 63), (64, 64), (64, 700), (128, 4090)];
/// The largest distance of a kernel from its oracle: both sum in float32 and round to 16 bits once, and attention also
/// rounds its probabilities. Integers must be equal.
const FARTHEST: f64 = 0.01;
/// The number of drawn tokens that may differ: if a nucleus or a random number ends at a border between two tokens,
/// another order of summation selects the neighbour.
const FARTHEST_DRAWN: f64 = 2.0;

fn is_far(kernel: &str, distance: f64) -> bool {
    distance > if kernel == "draw" { FARTHEST_DRAWN } else { FARTHEST }
}

/// Runs each kernel of these steps of these backbones next to its oracle, with greedy, typical and rejection acceptance.
pub(crate) fn beside_oracle(
    on: Device,
    backbones: &[Checked],
    heads: fn(&Llama) -> Heads,
    steps: &[(usize, i64)],
) -> anyhow::Result<()> {
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    let rules = [(Acceptance::Greedy, 0.0), (typical, 0.7), (Acceptance::Rejection, 0.7)];
    let mut wrong = BTreeSet::new();
    for &checked in backbones {
        let Checked { family, kind, head_dim, groups, .. } = checked;
        let llama = checked.backbone(1, on);
        let heads = heads(&llama);
        for (&(nodes, context), (acceptance, temperature)) in steps.iter().zip(rules.into_iter().cycle()) {
            let tree = tree(nodes)?;
            let draft = heads.matrices_for(&tree);
            let kernels = CudaEngine::kernels(&llama, Some(&draft), 1)?;
            let mut session = DeviceLoop::new(&llama, Some((&draft, acceptance)), kernels.beside_oracle())?;
            let ids = prompt(context, llama.config.vocab_size);
            let temperature = NonNegative::new(temperature).expect("of the list above");
            let sampling =
                Sampling { top_p: Probability::new(0.9).expect("above 0"), ..Sampling::with_temperature(temperature) };
            session.decode(Drafting::On, &Request { sampling, ..Request::greedy(&ids, 5) }, &mut go_on())?;
            let found = session.engine().ops().distances();
            wrong.extend(found.iter().filter(|(name, of)| is_far(name, of.distance)).map(|(name, _)| name.clone()));
            let distances: serde_json::Map<_, _> =
                found.iter().map(|(name, of)| (name.clone(), json!(of.distance.min(f64::MAX)))).collect();
            print_json(&json!({
                "check": "kernels", "heads": heads.architecture().name(), "family": family, "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "nodes": nodes,
                "context": context, "acceptance": format!("{acceptance:?}"), "distances": distances,
            }))?;
        }
    }
    anyhow::ensure!(wrong.is_empty(), "too far from their oracle: {wrong:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_may_be_drawn_at_borders() {
        assert!(!is_far("draw", 2.0) && is_far("draw", 3.0) && is_far("walk", 1.0) && is_far("embed", f64::INFINITY));
    }
}
