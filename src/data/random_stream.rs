//! Random draws that are the same on every platform and with every version of rand.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// One of the 2⁶⁴ streams of a seed.
pub(super) struct RandomStream(ChaCha8Rng);

impl RandomStream {
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Self(random)
    }

    /// 0 to `count` - 1, by Lemire's multiplication.
    pub(super) fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.0.next_u64()) * count as u128) >> 64) as usize
    }
}

/// 0 to `count` - 1 in the order that a stream of `seed` draws, by Fisher and Yates' shuffle. An epoch is a stream.
pub(super) fn shuffled(count: usize, seed: u64, stream: u64) -> Vec<u32> {
    let mut draws = RandomStream::new(seed, stream);
    let mut order: Vec<u32> = (0..count as u32).collect();
    for last in (1..count).rev() {
        order.swap(last, draws.below(last + 1));
    }
    order
}
