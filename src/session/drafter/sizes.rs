//! How many guesses of the drafters without weights are worth their time, by the step times of the machine.

use super::spec::DrafterName;
use crate::draft::lookahead::LookaheadSize;
use crate::draft::ngram::NgramDrafter;
use crate::draft::recycling::RecyclingDrafter;
use crate::tree::row_times::{RowTimes, StepRows};

/// The largest number of guesses per step that is worth its time, if the drafter guesses as well as assumed.
pub fn most_guesses(name: DrafterName, times: &RowTimes) -> usize {
    match name {
        DrafterName::Ngram => times.fastest(StepRows::OF_ONE, NgramDrafter::assumed()),
        DrafterName::Recycling => times.fastest(StepRows::OF_ONE, RecyclingDrafter::assumed()),
        DrafterName::Lookahead => lookahead_guesses(lookahead_size(times), times).0,
        DrafterName::Plain
        | DrafterName::Medusa
        | DrafterName::Hydra
        | DrafterName::HydraPlusPlus
        | DrafterName::Eagle3
        | DrafterName::Model => 0,
    }
}

/// Tokens of a drafter's window, which are computed in each step beside its guesses.
pub fn window_tokens(name: DrafterName, times: &RowTimes) -> usize {
    if name == DrafterName::Lookahead { lookahead_size(times).window() } else { 0 }
}

/// The published window, or none.
pub fn lookahead_size(times: &RowTimes) -> LookaheadSize {
    let sizes = [LookaheadSize::PUBLISHED, LookaheadSize::WITHOUT_WINDOW];
    let [(_, published), (_, without)] = sizes.map(|size| lookahead_guesses(size, times));
    sizes[usize::from(published <= without)]
}

/// The most guesses with a size, and how many times as fast as plain decoding that is.
fn lookahead_guesses(size: LookaheadSize, times: &RowTimes) -> (usize, f64) {
    times.fastest_with_speed(StepRows { texts: 1, beside: size.window() }, size.assumed())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::row_times::examples::row_times;

    #[test]
    fn slow_rows_make_small_trees() {
        let sizes = |known: &[(usize, f64)]| {
            let times = row_times(known);
            let names = [DrafterName::Ngram, DrafterName::Recycling, DrafterName::Lookahead];
            (names.map(|name| most_guesses(name, &times)), lookahead_size(&times).columns)
        };
        assert_eq!(sizes(&[(1, 1.0), (64, 1.0)]), ([12, 80, 28], 7), "a GPU with nothing else to do");
        // A model with 1.5 billion weights in bfloat16 on two cores: 81 rows take six times as long as one.
        let ([ngram, recycling, _], columns) = sizes(&[(1, 1.0), (13, 1.65), (81, 6.0)]);
        assert!((4..=12).contains(&ngram) && (2..=16).contains(&recycling) && columns == 0, "{ngram} {recycling}");
        assert_eq!(sizes(&[(1, 1.0), (2, 2.0), (64, 64.0)]), ([0; 3], 0), "every row as long as the first");
    }
}
