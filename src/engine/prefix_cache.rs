//! Keys and values of the beginnings of texts, so that a prompt that begins like an earlier text is not computed again. They are kept in
//! blocks of tokens; texts with a common beginning share its blocks. Memory is bounded: the least recently used blocks go first. A memory of
//! texts only saves time, so it never takes a device's last bytes.

// L layers, G key/value heads, D head size
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use tch::Tensor;

use crate::torch::{guard, raise};

pub const BLOCK_TOKENS: usize = 16;

/// Blocks by the text up to their end.
#[derive(Debug)]
pub struct PrefixCache {
    blocks: HashMap<BlockName, PrefixBlock>,
    /// The names in the order in which blocks go. A block was used no later than the one before it, and of blocks that were used together the
    /// last goes first: no block stays without the one before it.
    order: BTreeMap<LastUse, BlockName>,
    bytes: usize,
    most_bytes: usize,
    /// Counts uses.
    clock: u64,
    /// The last block's number.
    numbered: u64,
}

/// A block's tokens, and the number of the block before it; 0 for the first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct BlockName {
    before: u64,
    tokens: Vec<i64>,
}

#[derive(Debug)]
struct PrefixBlock {
    /// `[L, 2G, 16, D]`: keys, then values.
    keys_values: Tensor,
    last_use: LastUse,
}

/// When a block was used, how far it is from the beginning, and its number.
type LastUse = (u64, Reverse<usize>, u64);

impl PrefixCache {
    /// Without blocks.
    pub fn new(most_bytes: usize) -> Self {
        Self { blocks: HashMap::new(), order: BTreeMap::new(), bytes: 0, most_bytes, clock: 0, numbered: 0 }
    }

    /// The keys and values of the longest known beginning of a text, block after block, at most `most` tokens.
    pub fn longest(&mut self, ids: &[i64], most: usize) -> Vec<Tensor> {
        self.clock += 1;
        let (mut before, mut found) = (0, vec![]);
        for (at, tokens) in ids[..most.min(ids.len())].chunks_exact(BLOCK_TOKENS).enumerate() {
            let Some((number, keys_values)) = self.use_block(before, at, tokens) else { break };
            found.push(keys_values);
            before = number;
        }
        found
    }

    /// Keeps the whole blocks of a text, the first ones if not all fit. `copy` is called for each that is not known yet, with its first token's
    /// place in the text. Where that runs out of memory, all texts are forgotten.
    pub fn keep(&mut self, ids: &[i64], copy: impl FnMut(usize) -> Tensor) {
        match guard("keeping the beginning of a text", || self.keep_blocks(ids, copy)) {
            Ok(()) => {}
            Err(panic) if panic.out_of_memory => self.clear(),
            Err(panic) => raise(&panic.reason),
        }
    }

    fn keep_blocks(&mut self, ids: &[i64], mut copy: impl FnMut(usize) -> Tensor) {
        self.clock += 1;
        let mut before = 0;
        for (at, tokens) in ids.chunks_exact(BLOCK_TOKENS).enumerate() {
            before = match self.use_block(before, at, tokens) {
                Some((number, _)) => number,
                None => {
                    let keys_values = copy(at * BLOCK_TOKENS);
                    if !self.make_room(bytes_of(&keys_values)) {
                        return;
                    }
                    self.add(before, at, tokens, keys_values)
                }
            };
        }
    }

    /// Lets blocks go until so many bytes fit; `false` if only blocks of the present text are left.
    fn make_room(&mut self, bytes: usize) -> bool {
        while self.bytes + bytes > self.most_bytes {
            let Some(first) = self.order.first_entry().filter(|first| first.key().0 < self.clock) else { return false };
            let gone = self.blocks.remove(&first.remove());
            self.bytes -= gone.map_or(0, |block| bytes_of(&block.keys_values));
        }
        true
    }

    /// Forgets all texts.
    pub fn clear(&mut self) {
        *self = Self { numbered: self.numbered, ..Self::new(self.most_bytes) };
    }

    /// Memory of the blocks.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of the `at`-th block of a text, and its keys and values.
    fn use_block(&mut self, before: u64, at: usize, tokens: &[i64]) -> Option<(u64, Tensor)> {
        let name = BlockName { before, tokens: tokens.to_vec() };
        let block = self.blocks.get_mut(&name)?;
        let (_, _, number) = block.last_use;
        self.order.remove(&block.last_use);
        block.last_use = (self.clock, Reverse(at), number);
        self.order.insert(block.last_use, name);
        Some((number, block.keys_values.shallow_clone()))
    }

    fn add(&mut self, before: u64, at: usize, tokens: &[i64], keys_values: Tensor) -> u64 {
        let name = BlockName { before, tokens: tokens.to_vec() };
        self.numbered += 1;
        let last_use = (self.clock, Reverse(at), self.numbered);
        self.bytes += bytes_of(&keys_values);
        self.order.insert(last_use, name.clone());
        self.blocks.insert(name, PrefixBlock { keys_values, last_use });
        self.numbered
    }
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    const OF_BLOCK: usize = 4;

    /// Keys and values that say where they come from.
    fn block(text: i64, at: usize) -> Tensor {
        Tensor::full([1], text * 1000 + at as i64, (Kind::Int, Device::Cpu))
    }

    fn text(first: i64, tokens: usize) -> Vec<i64> {
        (0..tokens as i64).map(|at| if at < 2 * BLOCK_TOKENS as i64 { at } else { first * at }).collect()
    }

    fn found(cache: &mut PrefixCache, ids: &[i64], most: usize) -> Vec<i64> {
        cache.longest(ids, most).iter().map(|block| block.int64_value(&[0])).collect()
    }

    #[test]
    fn texts_share_the_blocks_of_their_common_beginning() {
        let mut cache = PrefixCache::new(1 << 20);
        let [one, other] = [1, 2].map(|first| text(first, 4 * BLOCK_TOKENS + 5));
        cache.keep(&one, |at| block(1, at));
        assert_eq!(found(&mut cache, &one, usize::MAX), [1000, 1016, 1032, 1048]);
        assert_eq!(found(&mut cache, &other, usize::MAX), [1000, 1016]);
        cache.keep(&other, |at| block(2, at));
        assert_eq!(found(&mut cache, &other, usize::MAX), [1000, 1016, 2032, 2048]);
        assert_eq!(
            found(&mut cache, &one, 4 * BLOCK_TOKENS - 1),
            [1000, 1016, 1032],
            "whole blocks of the first tokens"
        );
        assert_eq!(cache.bytes(), 6 * OF_BLOCK);
        assert!(found(&mut cache, &[7; 200], usize::MAX).is_empty());
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first_and_the_end_of_a_text_before_its_beginning() {
        let mut cache = PrefixCache::new(5 * OF_BLOCK);
        let [one, other] = [1, 2].map(|first| text(first, 4 * BLOCK_TOKENS));
        cache.keep(&one, |at| block(1, at));
        cache.keep(&other, |at| block(2, at));
        assert_eq!(cache.bytes(), 5 * OF_BLOCK);
        assert_eq!(found(&mut cache, &one, usize::MAX), [1000, 1016, 1032]);
        assert_eq!(found(&mut cache, &other, usize::MAX), [1000, 1016, 2032, 2048]);
        let third: Vec<i64> = (0..3 * BLOCK_TOKENS as i64).map(|at| 50_000 + at).collect();
        let _ = cache.longest(&one, usize::MAX);
        cache.keep(&third, |at| block(3, at));
        assert_eq!(found(&mut cache, &third, usize::MAX), [3000, 3016, 3032]);
        assert_eq!(found(&mut cache, &one, usize::MAX), [1000, 1016]);
        assert_eq!(found(&mut cache, &other, usize::MAX), [1000, 1016]);
    }

    #[test]
    fn a_text_that_is_larger_than_the_memory_keeps_its_beginning() {
        let mut cache = PrefixCache::new(2 * OF_BLOCK);
        cache.keep(&text(1, 9 * BLOCK_TOKENS), |at| block(1, at));
        assert_eq!(found(&mut cache, &text(1, 9 * BLOCK_TOKENS), usize::MAX), [1000, 1016]);
        let mut none = PrefixCache::new(0);
        none.keep(&text(1, 9 * BLOCK_TOKENS), |at| block(1, at));
        assert_eq!(none.bytes(), 0);
    }

    #[test]
    fn what_does_not_fit_is_not_copied() {
        let (mut cache, mut copies) = (PrefixCache::new(2 * OF_BLOCK), vec![]);
        cache.keep(&text(1, BLOCK_TOKENS), |at| block(1, at));
        cache.keep(&text(2, 90 * BLOCK_TOKENS), |at| {
            copies.push(at);
            block(2, at)
        });
        assert_eq!(copies, [16, 32], "the first block is known, and the third is one too many");
        assert_eq!(found(&mut cache, &text(2, 90 * BLOCK_TOKENS), usize::MAX), [1000, 2016]);
    }

    #[test]
    fn memory_that_runs_out_while_a_text_is_kept_forgets_all_texts() {
        let mut cache = PrefixCache::new(1 << 20);
        cache.keep(&text(1, 3 * BLOCK_TOKENS), |at| block(1, at));
        cache.keep(&text(2, 4 * BLOCK_TOKENS), |at| match at {
            48 => Tensor::ones([1 << 55], (Kind::Float, Device::Cpu)), // libtorch's own error
            _ => block(2, at),
        });
        assert_eq!(cache.bytes(), 0);
        cache.keep(&text(2, 4 * BLOCK_TOKENS), |at| block(2, at));
        assert_eq!(found(&mut cache, &text(2, 4 * BLOCK_TOKENS), usize::MAX), [2000, 2016, 2032, 2048]);
    }
}
