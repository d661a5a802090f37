//! Which positions of a text are multiplied together, and where their keys and values lie.

use super::seen::SeenTokens;

/// Positions of a block.
pub(super) const BLOCK: usize = 32;

/// A block of positions.
#[derive(Clone, Copy)]
pub(super) enum PositionBlock {
    /// Side by side from this slot on; all queries see them.
    Run(usize),
    /// See [`PositionBlocks::scattered`].
    Scattered(usize),
}

/// A block of positions that not all queries see, or that do not lie side by side.
pub(super) struct ScatteredBlock {
    pub(super) slots: [Option<u32>; BLOCK],
    /// Bit n: query n sees it.
    pub(super) masks: [u16; BLOCK],
}

/// What up to 16 queries see. Positions at which they see different slots are in several blocks.
pub(super) struct PositionBlocks {
    pub(super) blocks: Vec<PositionBlock>,
    pub(super) scattered: Vec<ScatteredBlock>,
    all: u16,
}

impl PositionBlocks {
    /// Of what each query sees.
    ///
    /// # Panics
    /// If there is no query.
    pub(super) fn new(queries: &[&SeenTokens]) -> Self {
        let first = queries.iter().map(|seen| seen.position).min().expect("a query") / BLOCK;
        let end = queries.iter().map(|seen| seen.position + seen.slots.len()).max().expect("a query").div_ceil(BLOCK);
        let all = (1u32 << queries.len()).wrapping_sub(1) as u16;
        let mut blocks = Self { blocks: Vec::with_capacity(end - first), scattered: vec![], all };
        for start in (first..end).map(|block| block * BLOCK) {
            let is_run = |seen: &&SeenTokens| seen.in_place().start <= start && start + BLOCK <= seen.in_place().end;
            match queries.iter().all(is_run) {
                true => blocks.blocks.push(PositionBlock::Run(start)),
                false => blocks.scatter(queries, start),
            }
        }
        blocks
    }

    /// Adds the positions from `start` on, in as many blocks as the queries see different slots.
    fn scatter(&mut self, queries: &[&SeenTokens], start: usize) {
        let before = self.scattered.len();
        // Whoever sees most comes last in a chain: the others see some of that.
        for (n, seen) in queries.iter().enumerate().rev() {
            let (from, to) = (start.max(seen.position), (start + BLOCK).min(seen.position + seen.slots.len()));
            if from < to {
                let slots = &seen.slots[from - seen.position..to - seen.position];
                let at = self.block_with(before, from - start, slots);
                self.scattered[at].add(n, from - start, slots);
            }
        }
    }

    /// The first of the scattered blocks from one on that has no other slots from place `at` on, or a new one.
    fn block_with(&mut self, from: usize, at: usize, slots: &[u32]) -> usize {
        let fits = |block: &ScatteredBlock| {
            block.slots[at..].iter().zip(slots).all(|(there, slot)| there.is_none_or(|there| there == *slot))
        };
        self.scattered[from..].iter().position(fits).map_or_else(
            || {
                self.blocks.push(PositionBlock::Scattered(self.scattered.len()));
                self.scattered.push(ScatteredBlock { slots: [None; BLOCK], masks: [0; BLOCK] });
                self.scattered.len() - 1
            },
            |found| from + found,
        )
    }

    /// Slots that some queries see and others do not.
    pub(super) fn partly_seen(&self) -> impl Iterator<Item = usize> {
        let places = self.scattered.iter().flat_map(|block| block.slots.iter().zip(&block.masks));
        places.filter_map(|(slot, mask)| slot.filter(|_| *mask != self.all).map(|slot| slot as usize))
    }
}

impl ScatteredBlock {
    /// Query `n` sees slots, from place `at` on.
    fn add(&mut self, n: usize, at: usize, slots: &[u32]) {
        for ((there, mask), slot) in self.slots[at..].iter_mut().zip(&mut self.masks[at..]).zip(slots) {
            (*there, *mask) = (Some(*slot), *mask | 1 << n);
        }
    }
}
