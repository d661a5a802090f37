//! What the allocator of the CPU takes beside the tensors: holes between them.

use crate::torch::memory::KEPT_BLOCK;

/// glibc's heap leaves holes between freed tensors that aligned ones do not fit into: the tensors that a pass keeps, in
/// blocks that stay in the process (see [`crate::torch::memory::keep_freed_blocks`]), took 1.7 to 1.9 times their size
/// when measured.
const HEAP_HOLES: f64 = 1.75;

/// Where rows have very different lengths, tensors come in many sizes, for which the heap has more holes. Of four small models, measured peaks of
/// Medusa-1 were higher by 26 to 78 % of the temporaries, of which a run's program has a part.
const HOLES_OF_SIZES: f64 = 0.5;

/// Tensors that exist at the same time: their count, and the bytes of each.
pub type Tensors = Vec<(u64, u64)>;

/// Memory of tensors with the allocator's overhead, on the CPU (`on_host`) or on a GPU.
pub fn allocated(on_host: bool, tensors: impl IntoIterator<Item = (u64, u64)>) -> u64 {
    let allocated = |bytes: u64| if on_host && bytes < KEPT_BLOCK { scaled(bytes, HEAP_HOLES) } else { bytes };
    tensors.into_iter().map(|(count, bytes)| count * allocated(bytes)).sum()
}

/// Holes beside temporaries of so many bytes that come in many sizes.
pub fn holes_of_sizes(bytes: u64) -> u64 {
    scaled(bytes, HOLES_OF_SIZES)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "far below 2^52, and positive")]
fn scaled(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor) as u64
}
