//! The outputs of a product, shared out among the threads of a team.
#![expect(unsafe_code, reason = "each part of a job writes to outputs of its own")]

use std::ops::Range;

use super::lanes::LANES;
use super::shared::Shared;
use super::team::Team;

/// Lines of weights that a part of a job reads at least.
const LINES_OF_PART: usize = 1 << 10;
/// Two parts a thread: if one thread is slow, the other takes a part of its. The first lines of a part come late, so no more.
const PARTS_OF_THREAD: usize = 2;

/// Where the outputs of products go: `[N, outputs]`.
pub(super) struct Outputs<'y> {
    y: Shared<'y, f32>,
    row_length: usize,
    /// Column of the product's first output.
    column: usize,
}

impl<'y> Outputs<'y> {
    pub(super) fn new(y_no: &'y mut [f32], row_length: usize) -> Self {
        Self { y: Shared::new(y_no), row_length, column: 0 }
    }

    /// The columns from `column` on, for the next product.
    pub(super) fn after(self, column: usize) -> Self {
        Self { column, ..self }
    }

    /// Writes some outputs of a row, from `first` on.
    ///
    /// # Safety
    /// No other part reads or writes them.
    #[inline(always)]
    pub(super) unsafe fn write(&self, row: usize, first: usize, outputs: &[f32]) {
        let at = row * self.row_length + self.column + first;
        // SAFETY: the caller's promise.
        unsafe {
            match outputs.first_chunk::<LANES>() {
                Some(strip) if outputs.len() == LANES => self.y.write(at, strip), // a known length needs no call
                _ => self.y.write(at, outputs),
            }
        }
    }
}

/// Runs `part` on ranges of all `outputs`, whose lengths are multiples of `unit` but for the last one's. The weights are `lines` long and
/// are multiplied in `passes` passes.
pub(super) fn share(
    [outputs, unit]: [usize; 2],
    [lines, passes]: [usize; 2],
    team: &Team,
    part: impl Fn(Range<usize>) + Sync,
) {
    let parts = (lines / LINES_OF_PART).clamp(1, PARTS_OF_THREAD * team.size());
    // As many for each thread.
    let parts = if parts > team.size() { parts / team.size() * team.size() } else { parts };
    let at_once = outputs.div_ceil(parts).next_multiple_of(unit);
    let parts = outputs.div_ceil(at_once);
    let part = |index: usize| part(index * at_once..outputs.min((index + 1) * at_once));
    // Below this, waiting for the others takes longer than the work.
    let worth_sharing = lines * passes >= 2 * LINES_OF_PART;
    if worth_sharing { team.run(parts, part) } else { (0..parts).for_each(part) }
}
