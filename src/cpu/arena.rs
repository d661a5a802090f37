//! Memory for weights in huge pages: with 4 KiB pages, TLB misses take a third of the time of reading the weights.
#![expect(unsafe_code, reason = "ranges of one mapping are handed out as slices")]

use std::ops::{Deref, Range};
use std::ptr;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

use super::lanes::{VectorLine, fetch};
use crate::torch::raise;

/// Asked of the system at once; a larger matrix has a block of its own.
const BLOCK: usize = 64 << 20;
/// The system's large pages on x86.
const LARGE_PAGE: usize = 2 << 20;

/// Hands out lines of large blocks.
#[derive(Debug, Default)]
pub struct Arena {
    block: Option<Arc<MmapRaw>>,
    /// The first line of the block that is free, in bytes.
    free: usize,
}

/// Lines of an arena. Its block stays as long as one of them.
#[derive(Debug)]
pub struct ArenaLines {
    block: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Arena {
    /// `len` lines, zero before `fill` writes to them.
    ///
    /// # Panics
    /// If the system has no memory.
    pub fn lines(&mut self, len: usize, fill: impl FnOnce(&mut [VectorLine])) -> ArenaLines {
        let bytes = len * size_of::<VectorLine>();
        let fits = |block: &Arc<MmapRaw>| self.free + bytes <= block.len();
        let block = self.block.take().filter(fits).unwrap_or_else(|| {
            let block = map(bytes.max(BLOCK) + LARGE_PAGE);
            self.free = (block.as_ptr() as usize).next_multiple_of(LARGE_PAGE) - block.as_ptr() as usize;
            block
        });
        let lines = ArenaLines { block: Arc::clone(&block), start: self.free, len };
        // SAFETY: this range is handed out for the first time, nobody else reads or writes it, and any bytes are a line.
        fill(unsafe { std::slice::from_raw_parts_mut(lines.first().cast_mut(), len) });
        self.free += bytes;
        self.block = Some(block);
        lines
    }
}

fn map(bytes: usize) -> Arc<MmapRaw> {
    let block = MmapMut::map_anon(bytes)
        .unwrap_or_else(|error| raise(&format!("can't allocate memory for weights: {bytes} bytes: {error}")));
    let block = MmapRaw::from(block);
    #[cfg(target_os = "linux")]
    let _ = block.advise(memmap2::Advice::HugePage); // where the system has none, reading is slower and as right
    Arc::new(block)
}

impl ArenaLines {
    /// Reads lines, in large pages and fetched ahead like weights; returns a sum of their words.
    pub fn sum(&self, lines: Range<usize>) -> u64 {
        const AHEAD: usize = 64;
        let sum_of = |line: &VectorLine| {
            fetch(ptr::from_ref(line).wrapping_add(AHEAD));
            let words = line.0.as_chunks::<8>().0.iter();
            words.fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
        };
        self[lines].iter().fold(0, |sum, line| sum.wrapping_add(sum_of(line)))
    }

    fn first(&self) -> *const VectorLine {
        self.block.as_ptr().wrapping_add(self.start).cast()
    }
}

impl Deref for ArenaLines {
    type Target = [VectorLine];

    fn deref(&self) -> &[VectorLine] {
        // SAFETY: the range is within the block, which lives as long as `self`, and nobody writes to it after `Arena::lines`.
        unsafe { std::slice::from_raw_parts(self.first(), self.len) }
    }
}
