//! Which positions of a text are multiplied together, and where their keys and values lie.

use std::ops::Range;
use std::ptr;

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

/// What up to 16 queries see. Where they see different slots at a position, as the siblings of a tree do, these lie behind one another: a pair of
/// positions stays a pair and the pairs of a query stay in order, so that its sums have the same bits as in any other block. What does not fit is in
/// another block.
pub(super) struct PositionBlocks {
    pub(super) blocks: Vec<PositionBlock>,
    pub(super) scattered: Vec<ScatteredBlock>,
    all: u16,
}

/// Slots of up to 32 positions, from a place of the block on.
#[derive(Clone, Copy)]
struct Slots<'a> {
    first: usize,
    slots: &'a [u32],
}

/// By pair of positions, the pair of places that it has in a block.
type PairPlaces = [usize; BLOCK / 2];

impl PositionBlocks {
    /// Of what each query sees. Queries of one token follow one another.
    ///
    /// # Panics
    /// If there is no query.
    pub(super) fn new(queries: &[&SeenTokens]) -> Self {
        let (mut tokens, mut first_query) = (vec![], 0);
        for heads in queries.chunk_by(|one, next| ptr::eq(*one, *next)) {
            tokens.push((heads[0], bits(heads.len()) << first_query));
            first_query += heads.len();
        }
        let first = queries.iter().map(|seen| seen.position).min().expect("a query") / BLOCK;
        let end = queries.iter().map(|seen| seen.position + seen.slots.len()).max().expect("a query").div_ceil(BLOCK);
        let mut blocks = Self { blocks: Vec::with_capacity(end - first), scattered: vec![], all: bits(queries.len()) };
        for start in (first..end).map(|block| block * BLOCK) {
            let is_run =
                |(seen, _): &(&SeenTokens, u16)| seen.in_place().start <= start && start + BLOCK <= seen.in_place().end;
            match tokens.iter().all(is_run) {
                true => blocks.blocks.push(PositionBlock::Run(start)),
                false => blocks.scatter(&tokens, start),
            }
        }
        blocks
    }

    /// Adds the positions from `start` on.
    fn scatter(&mut self, tokens: &[(&SeenTokens, u16)], start: usize) {
        let before = self.scattered.len();
        // Whoever sees most comes last in a chain: the others see some of that.
        for (seen, queries) in tokens.iter().rev() {
            let (from, to) = (start.max(seen.position), (start + BLOCK).min(seen.position + seen.slots.len()));
            if from < to {
                let slots = Slots { first: from - start, slots: &seen.slots[from - seen.position..to - seen.position] };
                let (at, places) = self.block_for(before, slots);
                self.scattered[at].add(slots, &places, *queries);
            }
        }
    }

    /// The first of the scattered blocks from one on that has room for slots, or a new one.
    fn block_for(&mut self, from: usize, slots: Slots) -> (usize, PairPlaces) {
        let mut there = self.scattered.iter().enumerate().skip(from);
        there.find_map(|(at, block)| Some((at, block.places(slots)?))).unwrap_or_else(|| {
            let block = ScatteredBlock { slots: [None; BLOCK], masks: [0; BLOCK] };
            let (at, places) = (self.scattered.len(), block.places(slots).expect("an empty block"));
            self.blocks.push(PositionBlock::Scattered(at));
            self.scattered.push(block);
            (at, places)
        })
    }

    /// Slots that some queries see and others do not.
    pub(super) fn partly_seen(&self) -> impl Iterator<Item = usize> {
        let places = self.scattered.iter().flat_map(|block| block.slots.iter().zip(&block.masks));
        places.filter_map(|(slot, mask)| slot.filter(|_| *mask != self.all).map(|slot| slot as usize))
    }
}

/// The lowest `count` bits.
fn bits(count: usize) -> u16 {
    (1u32 << count).wrapping_sub(1) as u16
}

impl Slots<'_> {
    /// Pairs of positions.
    fn pairs(self) -> Range<usize> {
        self.first / 2..(self.first + self.slots.len()).div_ceil(2)
    }

    /// The slots of a pair.
    fn pair(self, pair: usize) -> [Option<u32>; 2] {
        let slot = |position: usize| self.slots.get(position.checked_sub(self.first)?).copied();
        [slot(2 * pair), slot(2 * pair + 1)]
    }
}

impl ScatteredBlock {
    /// Where slots can lie, if there is room: each pair behind the one before, and not before its position.
    fn places(&self, slots: Slots) -> Option<PairPlaces> {
        let (mut places, mut next) = ([0; BLOCK / 2], 0);
        for pair in slots.pairs() {
            let wanted = slots.pair(pair);
            places[pair] = (pair.max(next)..BLOCK / 2).find(|&place| self.takes(place, wanted))?;
            next = places[pair] + 1;
        }
        Some(places)
    }

    /// Whether a pair of places has these slots, or room for them.
    fn takes(&self, place: usize, wanted: [Option<u32>; 2]) -> bool {
        let there = &self.slots[2 * place..2 * place + 2];
        wanted.iter().zip(there).all(|(wanted, there)| wanted.is_none() || there.is_none() || wanted == there)
    }

    /// Queries see slots at their places.
    fn add(&mut self, slots: Slots, places: &PairPlaces, queries: u16) {
        for pair in slots.pairs() {
            for (at, slot) in (2 * places[pair]..).zip(slots.pair(pair)) {
                if slot.is_some() {
                    (self.slots[at], self.masks[at]) = (slot, self.masks[at] | queries);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the nodes of a tree behind `committed` tokens see, by each node's parent.
    fn tree(committed: usize, parents: &[Option<usize>]) -> Vec<SeenTokens> {
        let path = |node: usize| {
            let mut path: Vec<usize> = std::iter::successors(Some(node), |&node| parents[node]).collect();
            path.reverse();
            SeenTokens::new(0, (0..committed).chain(path.into_iter().map(|node| committed + node)))
        };
        (0..parents.len()).map(path).collect()
    }

    #[test]
    fn each_query_finds_its_pairs_of_positions_in_order() {
        let parents = [None, Some(0), Some(0), Some(0), Some(1), Some(1), Some(2), Some(4), Some(6), Some(8)];
        for committed in 0..70 {
            let seen = tree(committed, &parents);
            let queries: Vec<&SeenTokens> = seen.iter().collect();
            let blocks = PositionBlocks::new(&queries);
            for (n, seen) in seen.iter().enumerate() {
                let mut found: Vec<[Option<u32>; 2]> = vec![];
                for block in &blocks.blocks {
                    match *block {
                        PositionBlock::Run(slot) => {
                            found.extend(
                                (slot..slot + BLOCK).step_by(2).map(|at| [at, at + 1].map(|at| Some(at as u32))),
                            );
                        }
                        PositionBlock::Scattered(at) => {
                            let ScatteredBlock { slots, masks } = &blocks.scattered[at];
                            let seen = |at: usize| slots[at].filter(|_| masks[at] >> n & 1 == 1);
                            found.extend((0..BLOCK).step_by(2).map(|at| [seen(at), seen(at + 1)]));
                        }
                    }
                }
                found.retain(|pair| *pair != [None; 2]);
                let whole = Slots { first: 0, slots: &seen.slots };
                let expected: Vec<_> = whole.pairs().map(|pair| whole.pair(pair)).collect();
                assert_eq!(found, expected, "{committed} committed tokens, node {n}");
            }
        }
    }

    #[test]
    fn siblings_share_a_block() {
        let seen = tree(300, &[None; 8]);
        let queries: Vec<&SeenTokens> = seen.iter().flat_map(|seen| [seen; 2]).collect();
        let blocks = PositionBlocks::new(&queries);
        assert_eq!((blocks.blocks.len(), blocks.scattered.len()), (10, 1));
        assert_eq!(
            blocks.scattered[0].masks[..16],
            [
                0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xc000,
                0, 0x3000, 0
            ]
        );
        assert!(blocks.partly_seen().eq((300..308).rev()));
    }
}
