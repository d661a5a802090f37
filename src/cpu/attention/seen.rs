//! Which cached tokens a new token sees.

use std::ops::Range;

/// The cached tokens that a new token sees, in the order of their positions; at least one, itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenTokens {
    /// Of the first one; the others follow one another.
    pub(super) position: usize,
    pub(super) slots: Vec<u32>,
    /// So many of the first ones lie side by side.
    pub(super) run: usize,
}

impl SeenTokens {
    /// Slots, of which the first one is at a position.
    ///
    /// # Panics
    /// If there are none, or later ones come first.
    pub fn new(position: usize, slots: impl IntoIterator<Item = usize>) -> Self {
        let slot = |slot| u32::try_from(slot).expect("a context has less than 2^32 tokens");
        let slots: Vec<u32> = slots.into_iter().map(slot).collect();
        assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "positions grow with slots");
        let run = slots.iter().zip(slots[0]..).take_while(|(slot, next)| *slot == next).count();
        Self { position, slots, run }
    }

    /// The first seen positions whose slots have their numbers.
    pub(super) fn in_place(&self) -> Range<usize> {
        let run = if self.slots[0] as usize == self.position { self.run } else { 0 };
        self.position..self.position + run
    }
}
