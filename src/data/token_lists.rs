//! A row that is tokens already: `input_ids`, and the lists beside them that say which carry loss and which are padding.

use std::ops::Range;

use super::raw_row::RawRow;
use super::rows::{IGNORE, RowProblem};

/// The columns of such a row.
pub(super) const LISTS: [&str; 6] =
    [INPUT_IDS, LABELS, "loss_mask", "assistant_masks", "completion_mask", ATTENTION_MASK];
/// A token carries loss where each of them that a row has is not 0, as TRL makes labels of its two.
const LOSS_MASKS: [&str; 3] = ["loss_mask", "assistant_masks", "completion_mask"];
pub(super) const INPUT_IDS: &str = "input_ids";
const LABELS: &str = "labels";
const ATTENTION_MASK: &str = "attention_mask";

/// The row of `input_ids`, where `list` gives the others of [`LISTS`] by their names. Padding is removed; masks that contradict the labels
/// are an error.
pub(super) fn row(
    mut input_ids: Vec<i64>,
    list: impl Fn(&'static str) -> Result<Option<Vec<i64>>, RowProblem>,
) -> Result<RawRow, RowProblem> {
    let ids = input_ids.len();
    let list = |key| match list(key)? {
        Some(list) if list.len() != ids => Err(RowProblem::LabelsLength { key, ids, labels: list.len() }),
        list => Ok(list),
    };
    let attended = list(ATTENTION_MASK)?.map_or(Ok(0..ids), |mask| attended(&mask))?;
    let mut masks = Vec::new();
    for key in LOSS_MASKS {
        masks.extend(list(key)?.map(|mask| (key, mask)));
    }
    let masked_by = |at: usize| masks.iter().find(|(_, mask)| mask[at] == 0).map(|(key, _)| *key);
    let mut labels = list(LABELS)?;
    match &labels {
        _ if masks.is_empty() => {}
        // The label of the first token is not used: nothing predicts that token.
        Some(labels) => attended.clone().skip(1).try_for_each(|at| agree(at, labels[at], masked_by(at)))?,
        None => {
            let label = |(at, &id): (usize, &i64)| if masked_by(at).is_some() { i64::from(IGNORE) } else { id };
            labels = Some(input_ids.iter().enumerate().map(label).collect());
        }
    }
    for at in attended.clone().skip(1) {
        labels.as_ref().map_or(Ok(()), |labels| is_of_token(at, labels[at], input_ids[at]))?;
    }
    for list in std::iter::once(&mut input_ids).chain(&mut labels) {
        list.truncate(attended.end);
        list.drain(..attended.start);
    }
    Ok(RawRow::Tokens { input_ids, labels })
}

fn agree(at: usize, label: i64, masked_by: Option<&str>) -> Result<(), RowProblem> {
    let wrong = |expected, got| Err(RowProblem::Value { key: format!("{LABELS}[{at}]"), expected, got });
    match masked_by {
        Some(mask) if label != i64::from(IGNORE) => wrong(
            "-100, as a mask of the row is 0 there; remove one of the two columns",
            format!("{label} beside {mask}"),
        ),
        None if label == i64::from(IGNORE) => {
            wrong("a token, as no mask of the row is 0 there; remove the masks or the labels", label.to_string())
        }
        _ => Ok(()),
    }
}

/// A label is the token at its place, as transformers has it: nothing is shifted before training.
fn is_of_token(at: usize, label: i64, token: i64) -> Result<(), RowProblem> {
    if label == token || label == i64::from(IGNORE) {
        return Ok(());
    }
    let got = format!("{label} where input_ids has {token}");
    Err(RowProblem::Value { key: format!("{LABELS}[{at}]"), expected: "the token at this place, or -100", got })
}

/// The places that are no padding.
fn attended(mask: &[i64]) -> Result<Range<usize>, RowProblem> {
    let is_token = |value: &i64| *value != 0;
    let first = mask.iter().position(is_token).unwrap_or(mask.len());
    let end = mask.iter().rposition(is_token).map_or(first, |last| last + 1);
    match mask[first..end].iter().position(|value| *value != 1) {
        None => Ok(first..end),
        Some(at) => Err(RowProblem::Value {
            key: format!("{ATTENTION_MASK}[{}]", first + at),
            expected: "1, or 0 for padding at the ends of the row",
            got: mask[first + at].to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lists: &[(&str, &[i64])]) -> Result<(Vec<i64>, Option<Vec<i64>>), String> {
        let list = |key| Ok(lists.iter().find(|(name, _)| *name == key).map(|(_, list)| list.to_vec()));
        match row(vec![5, 6, 7, 8], list).map_err(|problem| problem.to_string())? {
            RawRow::Tokens { input_ids, labels } => Ok((input_ids, labels)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_label_is_the_token_at_its_place() {
        let labelled = |labels: &[i64]| of(&[("labels", labels)]);
        assert!(labelled(&[-100, 6, -100, 8]).is_ok() && labelled(&[9, 6, 7, 8]).is_ok(), "nothing predicts the first");
        let shifted = labelled(&[6, 7, 8, -100]).unwrap_err();
        assert_eq!(shifted, "labels[1]: expected the token at this place, or -100, got 7 where input_ids has 6");
    }

    #[test]
    fn a_token_carries_loss_where_all_masks_say_so() {
        let all = vec![5, 6, 7, 8];
        assert_eq!(of(&[]), Ok((all.clone(), None)));
        for mask in LOSS_MASKS {
            assert_eq!(of(&[(mask, &[0, 1, 1, 0])]), Ok((all.clone(), Some(vec![-100, 6, 7, -100]))));
        }
        let both: [(&str, &[i64]); 2] = [("assistant_masks", &[0, 1, 1, 1]), ("completion_mask", &[0, 0, 1, 1])];
        assert_eq!(of(&both), Ok((all, Some(vec![-100, -100, 7, 8]))));
        let short = of(&[("assistant_masks", &[1])]).unwrap_err();
        assert_eq!(short, "assistant_masks: expected 4 values, one for each of input_ids, got 1");
    }

    #[test]
    fn labels_and_masks_agree() {
        let labels: (&str, &[i64]) = ("labels", &[5, -100, 7, 8]);
        assert!(of(&[labels, ("completion_mask", &[0, 0, 1, 1])]).is_ok(), "the first label is nobody's target");
        let more = of(&[labels, ("completion_mask", &[0, 0, 1, 0])]).unwrap_err();
        assert!(
            more.starts_with("labels[3]: expected -100, as a mask") && more.ends_with("got 8 beside completion_mask"),
            "{more}"
        );
        let fewer = of(&[labels, ("loss_mask", &[0, 1, 1, 1])]).unwrap_err();
        assert!(fewer.starts_with("labels[1]: expected a token") && fewer.ends_with("got -100"), "{fewer}");
    }

    #[test]
    fn padding_at_the_ends_is_removed() {
        let pad = |mask: &[i64]| of(&[("attention_mask", mask), ("labels", &[-100, 6, 7, 8])]);
        assert_eq!(pad(&[1, 1, 0, 0]), Ok((vec![5, 6], Some(vec![-100, 6]))));
        assert_eq!(pad(&[0, 1, 1, 1]), Ok((vec![6, 7, 8], Some(vec![6, 7, 8]))));
        assert_eq!(pad(&[0, 0, 0, 0]), Ok((vec![], Some(vec![]))));
        let hole = pad(&[1, 0, 1, 1]).unwrap_err();
        assert_eq!(hole, "attention_mask[1]: expected 1, or 0 for padding at the ends of the row, got 0");
        assert!(pad(&[1, 1, 2, 2]).unwrap_err().ends_with("got 2"), "several texts in one row");
    }
}
