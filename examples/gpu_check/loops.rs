//! Greedy texts of the CUDA engine and of libtorch.

use medusa::cli::print_json;
use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::generate;
use medusa::decode::likelihood::log_probability;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::engine::cuda::layout::MAX_NODES;
use medusa::engine::cuda::shape::BLOCK;
use medusa::model::llama::Llama;
use medusa::tree::accept::Acceptance;
use serde::Serialize;
use serde_json::json;
use tch::{Device, Kind};

use crate::random::{CHECKED, Checked, backbone, config, go_on, heads, prompt, tree};

/// Tokens per text.
const TEXT: usize = 128;
/// Prompt lengths. After the last one, the text crosses the point where the cache grows and steps are recorded again.
const PROMPTS: [i64; 4] = [1, 40, 300, BLOCK - MAX_NODES as i64 - 60];

/// Compares the greedy texts of both loops.
pub(crate) fn texts(on: Device) -> anyhow::Result<()> {
    texts_of_libtorch(on)?;
    let mut wrong = 0;
    for checked in CHECKED {
        let Checked { family, kind, head_dim, groups, .. } = checked;
        let llama = checked.backbone(4, on);
        let (heads, tree) = (heads(&llama), tree(64)?);
        let medusa = MedusaDrafter::new(&llama, &heads, &tree)?;
        let mut alone = DeviceLoop::on_gpu(&llama, None, &Request::greedy(&[], 0), 1)?;
        let mut engine =
            DeviceLoop::on_gpu(&llama, Some((&medusa.on_device(), Acceptance::Greedy)), &Request::greedy(&[], 0), 1)?;
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
                "check": "loops", "family": family, "dtype": format!("{kind:?}"), "head_dim": head_dim, "groups": groups, "prompt": length,
                "tokens": slow.len(), "alone": partings[0], "plain": partings[1], "medusa": partings[2],
            }))?;
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} texts part from those of libtorch's loop where its logits are no near tie");
    Ok(())
}

/// In float32, libtorch's own loop decodes the same text with a tree as without.
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

/// The number of equal tokens and, if two texts differ, by how much libtorch prefers its own token there.
#[derive(Debug, Serialize)]
pub(crate) struct Parting {
    same: usize,
    margin: Option<f64>,
}

/// The largest margin of log probability that rounding to 16 bits may reverse.
const NEAR_TIE: f64 = 0.1;

impl Parting {
    /// Whether all `tokens` tokens are equal, or the first difference is nearly a tie.
    pub(crate) fn is_near_tie(&self, tokens: usize) -> bool {
        self.margin.map_or(self.same == tokens, |margin| margin.abs() <= NEAR_TIE) // NaN is no tie
    }
}

pub(crate) fn parting(llama: &Llama, prompt: &[i64], right: &[i64], got: &[i64]) -> anyhow::Result<Parting> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_may_part_at_near_ties() {
        let near = |same, margin| Parting { same, margin }.is_near_tie(9);
        assert!(near(9, None) && near(3, Some(0.05)) && near(3, Some(-0.05)));
        assert!(!near(8, None) && !near(3, Some(0.2)) && !near(3, Some(-0.2)) && !near(3, Some(f64::NAN)));
    }

    #[test]
    fn the_last_text_crosses_the_border_where_the_cache_grows() {
        let last = PROMPTS[PROMPTS.len() - 1];
        let fits = BLOCK - MAX_NODES as i64;
        assert!(last < fits && fits < last + TEXT as i64);
    }
}
