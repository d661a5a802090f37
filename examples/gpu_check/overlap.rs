//! Decodes with kernels that start before the one before them has ended, and with kernels that do not: the same numbers, bit by bit, or a
//! kernel reads what is not written yet.

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::engine::cuda::engine::CudaEngine;
use medusa::engine::sample::{Sampling, Stream};
use medusa::numbers::{NonNegative, Probability};
use medusa::nvidia::device::Gpu;
use medusa::tree::accept::{Acceptance, TypicalAcceptance};
use serde_json::json;
use tch::Device;

use crate::random::{CHECKED, Checked, go_on, heads, hydra_heads, prompt, tree};

/// Texts of each backbone, and tokens of a text.
const TEXTS: usize = 4;
const TOKENS: usize = 256;

/// Recorded steps of trees and plain ones, with all rules of acceptance, sampled by the same random numbers.
///
/// # Errors
/// A text that differs.
pub(crate) fn check(on: Device) -> anyhow::Result<()> {
    if !Gpu::open(on)?.overlaps_kernels {
        return print_json(
            &json!({"check": "overlap", "skipped": "this GPU starts no kernel before the one before it has ended"}),
        );
    }
    let rules = [Acceptance::Greedy, Acceptance::Typical(TypicalAcceptance::default()), Acceptance::Rejection];
    let mut wrong = 0;
    for (at, checked) in CHECKED.into_iter().enumerate() {
        let Checked { family, kind, head_dim, groups, .. } = checked;
        let llama = checked.backbone(4, on);
        let (heads, tree) = (if at % 2 == 0 { heads(&llama) } else { hydra_heads(&llama) }, tree(64)?);
        let draft = heads.matrices_for(&tree);
        for acceptance in rules {
            // One after the other: the second reads which product is the fastest from what the first has kept.
            let [overlapping, one_by_one] = [true, false].map(|overlaps_kernels| {
                let gpu = Gpu { overlaps_kernels, ..Gpu::open(on)? };
                let kernels = CudaEngine::kernels_of(gpu, &llama, Some(&draft), 1)?;
                let mut session = DeviceLoop::new(&llama, Some((&draft, acceptance)), kernels)?;
                texts(&mut session, llama.config.vocab_size, acceptance)
            });
            let (overlapping, one_by_one) = (overlapping?, one_by_one?);
            let differing = overlapping.iter().zip(&one_by_one).filter(|(a, b)| a != b).count();
            wrong += differing;
            print_json(&json!({
                "check": "overlap", "family": family, "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups,
                "heads": heads.architecture().name(), "acceptance": format!("{acceptance:?}"), "texts": one_by_one.len(),
                "differing": differing,
            }))?;
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} texts differ between kernels that overlap and kernels that do not");
    Ok(())
}

/// Texts with the tree and without it.
fn texts(session: &mut DeviceLoop, vocabulary: i64, acceptance: Acceptance) -> anyhow::Result<Vec<Vec<i64>>> {
    let temperature = if acceptance == Acceptance::Greedy { 0.0 } else { 0.8 };
    let temperature = NonNegative::new(temperature).expect("of the line above");
    let sampling =
        Sampling { top_p: Probability::new(0.9).expect("above 0"), ..Sampling::with_temperature(temperature) };
    let mut texts = vec![];
    for index in 0..TEXTS as u64 {
        let ids = prompt(30 * index as i64 + 1, vocabulary);
        let stream = Stream { index, ..Stream::default() };
        let request = Request { sampling, stream, ..Request::greedy(&ids, TOKENS) };
        for drafting in [Drafting::On, Drafting::Off] {
            texts.push(session.decode(drafting, &request, &mut go_on())?.new_ids);
        }
    }
    Ok(texts)
}
