//! Measures the top-k accuracy of each head, which the tree search needs (paper section 2.3.3).

use std::ops::ControlFlow;

use tch::{Kind, Tensor};

use crate::data::IGNORE;
use crate::data::rows::TokenRow;
use crate::data::store::RowStore;
use crate::data::tokenize::narrow;
use crate::decode::error::DecodeError;
use crate::decode::generate;
use crate::decode::request::Request;
use crate::draft::medusa::fused_loss::ranks;
use crate::draft::medusa::heads::{HeadInput, Heads};
use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::guard;
use crate::tree::rank_counts::{RankCounts, RankedPosition};

mod error;

pub use error::CalibrationError;

/// Limits the memory of one head's logits: positions are processed in chunks below this size.
const MAX_LOGITS_BYTES: i64 = 64 << 20;

/// Runs the heads over `rows` and counts which of their `top_k` guesses is the target. Head h (0-based) at position t
/// predicts token t + h + 2, if that token's label is not [`IGNORE`]. `on_row` receives the number of finished rows.
///
/// # Errors
/// [`CalibrationError`], with the fault of the heads or the rows.
pub fn calibrate(
    backbone: &Llama,
    heads: &Heads,
    rows: &RowStore,
    top_k: usize,
    mut on_row: impl FnMut(usize),
) -> Result<RankCounts, CalibrationError> {
    check(backbone, heads, rows, top_k)?;
    let mut counts = RankCounts::new(heads.num_heads(), top_k);
    for (done, row) in rows.iter().enumerate() {
        let row = row?;
        check_tokens(done + 1, &row, backbone.config.vocab_size)?;
        let counted = guard("calibrating", || tch::no_grad(|| count_row(backbone, heads, &row, &mut counts)))?;
        counted.map_err(|NotFinite { head }| CalibrationError::NotFinite { row: done + 1, head: head + 1 })?;
        on_row(done + 1);
    }
    Ok(counts)
}

/// A row with a prompt and the backbone's own greedy answer, whose tokens are the targets (without the EOS, which no
/// step commits). Heads are used on such text; other text has tokens that this backbone would not generate.
///
/// # Errors
/// [`DecodeError`], with the fault of the prompt.
pub fn own_answer(backbone: &Llama, prompt: &[i64], max_new_tokens: usize) -> Result<TokenRow, DecodeError> {
    let request = Request::greedy(prompt, max_new_tokens);
    let answer = generate::plain(backbone, &request, &mut |_| ControlFlow::Continue(()))?;
    let new_ids = narrow(&answer.new_ids);
    let labels = [vec![IGNORE; prompt.len()], new_ids.clone()].concat();
    Ok(TokenRow { input_ids: [narrow(prompt), new_ids].concat(), labels })
}

fn check(backbone: &Llama, heads: &Heads, rows: &RowStore, top_k: usize) -> Result<(), CalibrationError> {
    let config = &backbone.config;
    heads.check_backbone(config)?;
    let (vocab_size, context) = (config.vocab_size, config.max_position_embeddings);
    if top_k == 0 || top_k as i64 > vocab_size {
        return Err(CalibrationError::BadTopK { top_k, vocab_size });
    }
    match (0..rows.len()).find(|&row| rows.length(row) as i64 > context) {
        Some(row) => Err(CalibrationError::RowTooLong { row: row + 1, length: rows.length(row), context }),
        None => Ok(()),
    }
}

fn check_tokens(row: usize, tokens: &TokenRow, vocab_size: i64) -> Result<(), CalibrationError> {
    let bad = tokens.input_ids.iter().position(|&id| !(0..vocab_size).contains(&i64::from(id)));
    bad.map_or(Ok(()), |position| {
        Err(CalibrationError::TokenOutOfRange { row, position, id: tokens.input_ids[position], vocab_size })
    })
}

/// A position with its targets.
#[derive(Debug, PartialEq, Eq)]
struct AskedPosition {
    position: usize,
    /// Whether the next token, a step's root, has a label, so that a decoding step could start here.
    is_step: bool,
    /// One per head.
    targets: Vec<Option<i64>>,
}

/// Each head's target at each position, without positions that have none.
fn asked_of(row: &TokenRow, num_heads: usize) -> Vec<AskedPosition> {
    let target = |at: usize| row.labels.get(at).filter(|&&label| label != IGNORE).map(|&label| i64::from(label));
    let asked = (0..row.input_ids.len()).map(|position| AskedPosition {
        position,
        is_step: target(position + 1).is_some(),
        targets: (0..num_heads).map(|head| target(position + head + 2)).collect(),
    });
    asked.filter(|asked| asked.is_step || asked.targets.iter().any(Option::is_some)).collect()
}

/// The logits of a head (0-based) contain NaN or infinity.
struct NotFinite {
    head: usize,
}

fn count_row(backbone: &Llama, heads: &Heads, row: &TokenRow, counts: &mut RankCounts) -> Result<(), NotFinite> {
    counts.add_tokens(row.input_ids.len());
    let asked = asked_of(row, heads.num_heads());
    if asked.is_empty() {
        return Ok(());
    }
    let ids: Vec<i64> = row.input_ids.iter().map(|&id| i64::from(id)).collect();
    let tokens_bt = Tensor::from_slice(&ids).unsqueeze(0).to_device(backbone.device());
    let mask = RowMask::causal(ids.len() as i64, &backbone.config, backbone.device());
    let hidden_1th = backbone.hidden_states(&tokens_bt, &mask, Adapters::Off);
    let hidden_th = heads.states_of_rows(&hidden_1th, &[vec![ids.len()]]).squeeze_dim(0);
    let chunk = (MAX_LOGITS_BYTES / (4 * backbone.config.vocab_size)).max(1) as usize;
    let mut positions = Vec::with_capacity(asked.len());
    for asked in asked.chunks(chunk) {
        let at: Vec<i64> = asked.iter().map(|asked| asked.position as i64).collect();
        let hidden_nh = hidden_th.index_select(0, &Tensor::from_slice(&at).to_device(backbone.device()));
        let of_head = |head: usize| {
            let previous_nj = previous_tokens(&ids, asked, heads.architecture().previous_tokens(head), backbone);
            let input = HeadInput { hidden_nh: &hidden_nh, previous_nj: previous_nj.as_ref() };
            let targets: Vec<i64> = asked.iter().map(|asked| asked.targets[head].unwrap_or(0)).collect();
            ranks_of(&heads.logits(head, &input, backbone), &targets, counts.top_k()).ok_or(NotFinite { head })
        };
        let by_head = (0..heads.num_heads()).map(of_head).collect::<Result<Vec<_>, _>>()?;
        positions.extend(asked.iter().enumerate().map(|(row, asked)| RankedPosition {
            is_step: asked.is_step,
            ranks: by_head.iter().zip(&asked.targets).map(|(ranks, target)| target.map(|_| ranks[row])).collect(),
        }));
    }
    counts.add_text(positions);
    Ok(())
}

/// The `count` tokens after each position, `[N, count]`; `None` if a head reads none. Those behind the end are 0: nothing is predicted from
/// them.
fn previous_tokens(ids: &[i64], asked: &[AskedPosition], count: usize, backbone: &Llama) -> Option<Tensor> {
    let at = |position: usize| ids.get(position).copied().unwrap_or(0);
    let after = |asked: &AskedPosition| (1..=count).map(|j| at(asked.position + j)).collect::<Vec<_>>();
    let tokens: Vec<i64> = asked.iter().flat_map(after).collect();
    (count > 0).then(|| Tensor::from_slice(&tokens).view([-1, count as i64]).to_device(backbone.device()))
}

/// The rank of each target among the logits of its row; `None` if a logit is NaN or infinite.
fn ranks_of(logits_nv: &Tensor, targets: &[i64], top_k: usize) -> Option<Vec<usize>> {
    // max keeps NaN.
    if !logits_nv.max().double_value(&[]).is_finite() {
        return None;
    }
    let kind = if logits_nv.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let logits_nv = logits_nv.to_kind(kind);
    let targets_n1 = Tensor::from_slice(targets).unsqueeze(1).to_device(logits_nv.device());
    let ranks_n = ranks(&logits_nv, &logits_nv.gather(1, &targets_n1, false), &targets_n1, top_k);
    let ranks: Vec<i64> = Vec::try_from(&ranks_n.to_kind(Kind::Int64)).expect("an int64 vector");
    Some(ranks.into_iter().map(|rank| rank as usize).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_lie_two_tokens_on_and_ignored_labels_ask_nobody() {
        let row = TokenRow { input_ids: vec![1, 2, 3, 4, 5], labels: vec![IGNORE, 2, IGNORE, 4, 5] };
        let asked = |position, is_step, targets: [Option<i64>; 2]| AskedPosition {
            position,
            is_step,
            targets: targets.to_vec(),
        };
        let expected = [
            asked(0, true, [None, Some(4)]),
            asked(1, false, [Some(4), Some(5)]),
            asked(2, true, [Some(5), None]),
            asked(3, true, [None, None]),
        ];
        assert_eq!(asked_of(&row, 2), expected);
    }
}
