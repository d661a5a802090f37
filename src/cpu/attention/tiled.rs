//! Attention to a cache of bfloat16 on AMX tiles, for up to 16 queries of one head of keys. Queries and weights are rounded to bfloat16, as flash
//! attention does on a GPU (arXiv 2205.14135); sums are float32.
//!
//! Keys and values are multiplied in blocks of 32 positions of the text. A tile adds up the products of a block, so a query's output depends on which
//! positions share a block, but neither on the other queries nor on the slots where a tree's tokens lie: a position that a query does not see has
//! weight 0 there, which changes no bit.
#![expect(
    unsafe_code,
    reason = "AMX has no stable intrinsics; rows of a cache, whose bounds are checked before the loops"
)]

// N queries, B blocks, D head size
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ptr;

use super::positions::{BLOCK, PositionBlock, PositionBlocks};
use super::seen::SeenTokens;
use crate::cpu::lanes::{Avx512, LANES, Lanes, VectorLine, fetch};
use crate::cpu::tiles::{self, ConfiguredTiles};
use crate::cpu::{AttentionShape, Number, Plane};

/// Most queries of a part.
pub(super) const QUERIES: usize = LANES;
/// Numbers of a head in a line.
const LINE: usize = 32;
/// Queries whose scores are brought from columns to rows together.
const QUAD: usize = 4;
/// Blocks whose values are laid out while the tiles multiply those before.
const GROUP: usize = 4;

type Tile = [VectorLine; LANES];
const ZERO_TILE: Tile = [VectorLine::ZERO; LANES];

/// The keys and values of one head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct CachedHead<'a> {
    pub(super) planes: [Plane<'a>; 2],
    pub(super) group: usize,
    /// Whether nobody read these keys and values before.
    pub(super) fetches: bool,
}

/// One head of one token.
#[derive(Clone, Copy)]
pub(super) struct TileQuery<'a> {
    pub(super) q_d: &'a [f32],
    pub(super) seen: &'a SeenTokens,
}

/// What a thread keeps between its parts.
struct TileBuffers {
    /// Of each 32 numbers of a head a tile: line p has the numbers 2p and 2p + 1 of each query.
    q: Vec<Tile>,
    /// The keys of a block that do not lie side by side.
    keys: Vec<u8>,
    /// A line for each position, of which lane n is query n.
    scores: Vec<VectorLine>,
    /// `[2·B, N]`: scores of 16 positions for each query.
    rows: Vec<VectorLine>,
    /// A tile for each block, of which line n is query n.
    weights: Vec<Tile>,
    /// Two groups of blocks, two tiles for each block: line p has numbers of the positions 2p and 2p + 1 in turn.
    values: Vec<[[Tile; 2]; GROUP]>,
}

thread_local! {
    static BUFFERS: RefCell<TileBuffers> =
        const { RefCell::new(TileBuffers { q: vec![], keys: vec![], scores: vec![], rows: vec![], weights: vec![], values: vec![] }) };
}

/// Whether the tiles can do it.
pub(super) fn available(plane: Plane) -> bool {
    plane.number == Number::BFloat16 && plane.head_size.is_multiple_of(LINE) && tiles::available()
}

/// `softmax(q·Kᵀ · scale)·V` of up to 16 queries, to `outs`.
pub(super) fn attend(
    lanes: Avx512,
    head: CachedHead,
    queries: &[TileQuery],
    heads: AttentionShape,
    outs: &mut [&mut [f32]],
) {
    let blocks = PositionBlocks::new(&queries.iter().map(|query| query.seen).collect::<Vec<_>>());
    if queries.len() > 1 && !head.partly_seen_are_finite(&blocks) {
        // 0 times such a value is not 0, so each query passes over what it does not see.
        for (query, out) in queries.chunks(1).zip(outs.chunks_mut(1)) {
            attend(lanes, head, query, heads, out);
        }
        return;
    }
    BUFFERS.with_borrow_mut(|buffers| {
        lanes.run(
            #[inline(always)]
            || buffers.attend(lanes, (head, &blocks), (queries, heads), outs),
        );
    });
}

impl<'a> CachedHead<'a> {
    /// Fetches the values of a block of slots, and the keys of the next one.
    #[inline(always)]
    fn fetch(&self, slot: usize) {
        let Plane { head_size, number, room, .. } = self.planes[0];
        let row = head_size * number.bytes();
        for (plane, slot) in [(1, slot), (0, slot + BLOCK)] {
            let first = self.planes[plane].bytes.as_ptr().wrapping_add((self.group * room + slot) * row);
            for line in (0..BLOCK * row).step_by(size_of::<VectorLine>()) {
                fetch(first.wrapping_add(line).cast());
            }
        }
    }

    /// Whether the values that only some queries see are finite.
    fn partly_seen_are_finite(&self, blocks: &PositionBlocks) -> bool {
        const EXPONENT: u16 = 0x7f80;
        let is_finite = |slot: usize| {
            let exponents = self.row(1, slot).as_chunks().0.iter().map(|number| u16::from_le_bytes(*number) & EXPONENT);
            exponents.fold(true, |finite, exponent| finite & (exponent != EXPONENT)) // no early end, so that it becomes vectors
        };
        blocks.partly_seen().all(is_finite)
    }

    /// A slot's key (plane 0) or value (plane 1), in bytes.
    #[inline(always)]
    fn row(&self, plane: usize, slot: usize) -> &'a [u8] {
        self.rows(plane, slot, 1)
    }

    /// As [`CachedHead::row`], of some slots side by side.
    #[inline(always)]
    fn rows(&self, plane: usize, slot: usize, count: usize) -> &'a [u8] {
        let Plane { bytes, room, head_size, number } = self.planes[plane];
        let bytes_of_row = head_size * number.bytes();
        &bytes[(self.group * room + slot) * bytes_of_row..][..count * bytes_of_row]
    }
}

impl TileBuffers {
    #[inline(always)]
    fn attend(
        &mut self,
        lanes: Avx512,
        (head, blocks): (CachedHead, &PositionBlocks),
        (queries, heads): (&[TileQuery], AttentionShape),
        outs: &mut [&mut [f32]],
    ) {
        self.make_room(blocks.blocks.len(), queries.len());
        self.write_queries(lanes, queries, heads.scale);
        self.write_scores(head, blocks);
        if let Some(cap) = heads.softcap {
            self.scores.iter_mut().for_each(|line| write(line, lanes.capped(numbers(line), cap)));
        }
        self.hide_unseen(blocks);
        let largest = self.write_rows(lanes, queries.len());
        self.write_weights(lanes, &largest[..queries.len()]);
        self.write_products(lanes, head, blocks, outs);
    }

    fn make_room(&mut self, blocks: usize, queries: usize) {
        self.scores.resize(blocks * BLOCK, VectorLine::ZERO);
        self.rows.resize(2 * blocks * queries.next_multiple_of(QUAD), VectorLine::ZERO);
        self.weights.resize(blocks, ZERO_TILE);
        self.values.resize(2, [[ZERO_TILE; 2]; GROUP]);
    }

    /// Lanes without a query keep what they had: nobody reads their scores.
    #[inline(always)]
    fn write_queries(&mut self, lanes: Avx512, queries: &[TileQuery], scale: f32) {
        self.q.resize(queries[0].q_d.len() / LINE, ZERO_TILE);
        for (n, query) in queries.iter().enumerate() {
            for (tile, q) in self.q.iter_mut().zip(query.q_d.as_chunks::<LINE>().0) {
                let (mut scaled, mut line) = ([0.0; LINE], [VectorLine::ZERO]);
                for half in [0, LANES] {
                    lanes.store(&mut scaled[half..], lanes.multiply(lanes.load(&q[half..]), lanes.all(scale)));
                }
                lanes.write_bfloat16_x(&scaled, &mut line);
                for (pair, line) in line[0].0.as_chunks::<4>().0.iter().zip(tile) {
                    line.0[4 * n..4 * n + 4].copy_from_slice(pair);
                }
            }
        }
    }

    #[inline(always)]
    fn write_scores(&mut self, head: CachedHead, blocks: &PositionBlocks) {
        let keys = head.planes[0];
        let row_bytes = keys.head_size * keys.number.bytes();
        self.keys.resize(BLOCK * row_bytes, 0);
        let _configured = ConfiguredTiles::new(LANES);
        for (block, scores) in blocks.blocks.iter().zip(self.scores.as_chunks_mut::<BLOCK>().0) {
            let rows = match *block {
                PositionBlock::Run(slot) => {
                    if head.fetches {
                        head.fetch(slot);
                    }
                    head.rows(0, slot, BLOCK)
                }
                PositionBlock::Scattered(at) => {
                    for (to, slot) in self.keys.chunks_exact_mut(row_bytes).zip(blocks.scattered[at].slots) {
                        if let Some(slot) = slot {
                            to.copy_from_slice(head.row(0, slot as usize));
                        }
                    }
                    &self.keys
                }
            };
            // SAFETY: 32 rows of keys are there, `q` has a tile for each 64 bytes of a row, and the tiles are configured.
            unsafe { multiply_keys(rows.as_ptr(), row_bytes, &self.q, scores) };
        }
    }

    /// Scores of what a query does not see become minus infinity.
    #[inline(always)]
    fn hide_unseen(&mut self, blocks: &PositionBlocks) {
        for (block, scores) in blocks.blocks.iter().zip(self.scores.as_chunks_mut::<BLOCK>().0) {
            let PositionBlock::Scattered(at) = *block else { continue };
            for (score, mask) in scores.iter_mut().zip(blocks.scattered[at].masks) {
                // SAFETY: a line is 64 aligned bytes; a value of `Avx512` was there.
                unsafe { _mm512_mask_store_ps(score.0.as_mut_ptr().cast(), !mask, _mm512_set1_ps(f32::NEG_INFINITY)) };
            }
        }
    }

    /// Brings the scores of each query together; returns the largest of each.
    #[inline(always)]
    fn write_rows(&mut self, lanes: Avx512, queries: usize) -> [f32; QUERIES] {
        let mut largest = [lanes.all(f32::NEG_INFINITY); QUERIES];
        let quads = queries.div_ceil(QUAD);
        let scores = self.scores.as_chunks::<LANES>().0;
        for (scores, rows) in scores.iter().zip(self.rows.chunks_exact_mut(quads * QUAD)) {
            for (quad, rows) in rows.as_chunks_mut::<QUAD>().0.iter_mut().enumerate() {
                // SAFETY: a value of `Avx512` is there, and each line has four quads.
                let transposed = unsafe { transposed_quad(scores, quad) };
                for n in 0..QUAD {
                    largest[quad * QUAD + n] = lanes.larger(largest[quad * QUAD + n], transposed[n]);
                    write(&mut rows[n], transposed[n]);
                }
            }
        }
        let mut numbers = [0.0; QUERIES];
        for (number, largest) in numbers.iter_mut().zip(largest) {
            *number = lanes.largest(largest);
        }
        numbers
    }

    /// e^(score - largest) in bfloat16.
    #[inline(always)]
    fn write_weights(&mut self, lanes: Avx512, largest: &[f32]) {
        let width = largest.len().next_multiple_of(QUAD);
        for (rows, tile) in self.rows.chunks_exact(2 * width).zip(&mut self.weights) {
            for (n, largest) in largest.iter().enumerate() {
                let largest = lanes.all(*largest);
                let low = lanes.exp(lanes.subtract(numbers(&rows[n]), largest));
                let high = lanes.exp(lanes.subtract(numbers(&rows[width + n]), largest));
                // SAFETY: a value of `Avx512` is there; both types are 64 bytes.
                tile[n] = unsafe { std::mem::transmute::<__m512bh, VectorLine>(_mm512_cvtne2ps_pbh(high, low)) };
            }
        }
    }

    /// Weights times values over the sums of weights, 32 numbers of a head after 32.
    #[inline(always)]
    fn write_products(&mut self, lanes: Avx512, head: CachedHead, blocks: &PositionBlocks, outs: &mut [&mut [f32]]) {
        let _configured = ConfiguredTiles::new(outs.len());
        for step in 0..head.planes[1].head_size / LINE {
            let mut sums = [ZERO_TILE; 3];
            let [mut now, mut next] = [0, 1];
            write_values(head, blocks, (step, 0), &mut self.values[now]);
            for (group, weights) in self.weights.chunks(GROUP).enumerate() {
                // SAFETY: no more blocks of weights than of values, and the tiles are configured.
                unsafe { add_values(weights, &self.values[now], &mut sums) };
                write_values(head, blocks, (step, group + 1), &mut self.values[next]);
                (now, next) = (next, now);
            }
            for (n, out) in outs.iter_mut().enumerate() {
                let (out, sum) = (&mut out[step * LINE..][..LINE], numbers(&sums[2][n]));
                let [low, high] = [lanes.divide(numbers(&sums[0][n]), sum), lanes.divide(numbers(&sums[1][n]), sum)];
                // SAFETY: a value of `Avx512` is there.
                let [first, second] = unsafe { in_order(low, high) };
                lanes.store(&mut out[..LANES], first);
                lanes.store(&mut out[LANES..], second);
            }
        }
    }
}

/// Lays 32 numbers of the values of a group of blocks out for the tiles; those that nobody sees are zero.
#[inline(always)]
fn write_values(
    head: CachedHead,
    blocks: &PositionBlocks,
    (step, group): (usize, usize),
    values: &mut [[Tile; 2]; GROUP],
) {
    let line_bytes = size_of::<VectorLine>();
    let row_bytes = head.planes[1].head_size * Number::BFloat16.bytes();
    for (block, tiles) in blocks.blocks.iter().skip(group * GROUP).zip(values) {
        match *block {
            PositionBlock::Run(slot) => {
                let rows = head.rows(1, slot, BLOCK)[step * line_bytes..].as_ptr();
                for pair in 0..LANES {
                    let even = rows.wrapping_add(2 * pair * row_bytes);
                    // SAFETY: 64 bytes each of 32 rows; a value of `Avx512` was there.
                    unsafe { interleave([even, even.wrapping_add(row_bytes)], tiles, pair) };
                }
            }
            PositionBlock::Scattered(at) => {
                let line = |slot: Option<u32>| match slot {
                    Some(slot) => head.row(1, slot as usize)[step * line_bytes..][..line_bytes].as_ptr(),
                    None => ptr::from_ref(&VectorLine::ZERO).cast(),
                };
                for (pair, [even, odd]) in blocks.scattered[at].slots.as_chunks().0.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { interleave([line(*even), line(*odd)], tiles, pair) };
                }
            }
        }
    }
}

/// The numbers of two lines in turn: eight groups of four pairs, those of even groups to a line of the first tile.
///
/// # Safety
/// 64 bytes each, and the CPU has AVX-512.
#[inline(always)]
unsafe fn interleave([even, odd]: [*const u8; 2], tiles: &mut [Tile; 2], line: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let (even, odd) = (_mm512_loadu_si512(even.cast()), _mm512_loadu_si512(odd.cast()));
        _mm512_store_si512(tiles[0][line].0.as_mut_ptr().cast(), _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(tiles[1][line].0.as_mut_ptr().cast(), _mm512_unpackhi_epi16(even, odd));
    }
}

/// Groups of four columns in turn, as [`interleave`] took them apart.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn in_order(even: __m512, odd: __m512) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        [_mm512_permutex2var_ps(even, first, odd), _mm512_permutex2var_ps(even, second, odd)]
    }
}

/// Lanes of four queries at 16 positions: those of each query.
///
/// # Safety
/// The CPU has AVX-512, and `quad` is less than four.
#[inline(always)]
unsafe fn transposed_quad(scores: &Tile, quad: usize) -> [__m512; QUAD] {
    // SAFETY: the caller's promise.
    unsafe {
        let part = |at: usize| _mm_load_ps(scores[at].0.as_ptr().cast::<f32>().add(QUAD * quad));
        let every_fourth = |at: usize| {
            let v = _mm512_castps128_ps512(part(at));
            let v = _mm512_insertf32x4::<1>(v, part(at + 4));
            let v = _mm512_insertf32x4::<2>(v, part(at + 8));
            _mm512_insertf32x4::<3>(v, part(at + 12))
        };
        let (a, b, c, d) = (every_fourth(0), every_fourth(1), every_fourth(2), every_fourth(3));
        let (ab, cd) = (_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpacklo_ps(c, d)));
        let (ab_high, cd_high) =
            (_mm512_castps_pd(_mm512_unpackhi_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(c, d)));
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high)),
        ]
    }
}

#[inline(always)]
fn numbers(line: &VectorLine) -> __m512 {
    // SAFETY: a line is 64 aligned bytes; a value of `Avx512` was there.
    unsafe { _mm512_load_ps(line.0.as_ptr().cast()) }
}

#[inline(always)]
fn write(line: &mut VectorLine, v: __m512) {
    // SAFETY: a line is 64 aligned bytes; a value of `Avx512` was there.
    unsafe { _mm512_store_ps(line.0.as_mut_ptr().cast(), v) };
}

/// `K·qᵀ` of 32 keys, to a line each.
///
/// # Safety
/// There are 32 rows, and [`ConfiguredTiles`] for 16 rows.
#[inline(always)]
unsafe fn multiply_keys(rows: *const u8, row_bytes: usize, q: &[Tile], scores: &mut [VectorLine; BLOCK]) {
    // SAFETY: reads are within the rows and the tiles of q, by the caller's promise; writes are 32 lines.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "2:",
            "tileloadd tmm6, [{q} + {line}]",
            "tileloadd tmm4, [{first} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{second} + {row}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {first}, 64",
            "add {second}, 64",
            "add {q}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{scores} + {line}], tmm0",
            "tilestored [{scores} + {line} + 1024], tmm1",
            first = inout(reg) rows => _,
            second = inout(reg) rows.wrapping_add(LANES * row_bytes) => _,
            q = inout(reg) q.as_ptr() => _,
            steps = inout(reg) q.len() => _,
            row = in(reg) row_bytes,
            line = in(reg) size_of::<VectorLine>(),
            scores = in(reg) scores.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// A tile of ones in bfloat16: weights times these are the sums of weights.
static ONES: Tile = {
    let (mut line, mut at) = (VectorLine::ZERO, 0);
    while at < 64 {
        (line.0[at], line.0[at + 1]) = (0x80, 0x3f);
        at += 2;
    }
    [line; LANES]
};

/// Adds the products of blocks of weights and values, and the weights, to sums.
///
/// # Safety
/// There are no fewer blocks of values, at least one of weights, and [`ConfiguredTiles`] for the queries.
#[inline(always)]
unsafe fn add_values(weights: &[Tile], values: &[[Tile; 2]; GROUP], sums: &mut [Tile; 3]) {
    // SAFETY: reads are within the blocks, by the caller's promise, and of the sums, to which is written.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {line}]",
            "tileloadd tmm1, [{sums} + {line} + 1024]",
            "tileloadd tmm2, [{sums} + {line} + 2048]",
            "tileloadd tmm7, [{ones} + {line}]",
            "2:",
            "tileloadd tmm4, [{weights} + {line}]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm5, [{values} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{values} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "add {weights}, 1024",
            "add {values}, 2048",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            weights = inout(reg) weights.as_ptr() => _,
            values = inout(reg) values.as_ptr() => _,
            blocks = inout(reg) weights.len() => _,
            line = in(reg) size_of::<VectorLine>(),
            ones = in(reg) ONES.as_ptr(),
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::attention::tests::random;
    use crate::cpu::attention::{SequenceTokens, attend_with};
    use crate::cpu::lanes::Instructions;
    use crate::cpu::team::Team;

    fn in_bfloat16(x: &[f32]) -> Vec<f64> {
        x.iter().map(|&x| f64::from(half::bf16::from_f32(x))).collect()
    }

    /// Keys and values `[G, S, D]`.
    struct Cache {
        planes: [Vec<f32>; 2],
        room: usize,
        d: usize,
    }

    impl Cache {
        fn new(groups: usize, room: usize, d: usize) -> Self {
            Self { planes: [1, 2].map(|seed| random(groups * room * d, seed)), room, d }
        }

        fn attend(&self, seen: &[SeenTokens], q: &[f32], heads: AttentionShape, threads: usize) -> Vec<f32> {
            let bytes = [0, 1].map(|plane: usize| {
                let mut bytes = vec![0; 2 * self.planes[plane].len()];
                Number::BFloat16.write(&self.planes[plane], &mut bytes);
                bytes
            });
            let plane = |bytes| Plane { bytes, number: Number::BFloat16, room: self.room, head_size: self.d };
            let sequences = [SequenceTokens { planes: [plane(&bytes[0]), plane(&bytes[1])], seen }];
            assert!(available(sequences[0].planes[0]));
            let mut out = vec![f32::NAN; seen.len() * heads.queries * self.d];
            let instructions = Instructions::detected().expect("AVX-512");
            let team = Team::new(threads);
            attend_with((instructions, true), (q, heads.queries * self.d), &sequences, heads, (&mut out, &team));
            out
        }
    }

    /// A chain, but for every third token, which sees only the first `common` and itself.
    fn tree(common: usize, tokens: usize) -> Vec<SeenTokens> {
        let slots = |n: usize| match n % 3 {
            2 => (0..common).chain([common + n]).collect(),
            _ => (0..=common + n).collect::<Vec<_>>(),
        };
        (0..tokens).map(|n| SeenTokens::new(0, slots(n))).collect()
    }

    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX")]
    fn attention_on_tiles_equals_its_formula_in_float64() {
        for (d, queries, groups, common, tokens) in
            [(32, 2, 2, 3, 1), (64, 9, 3, 40, 7), (96, 20, 1, 33, 2), (128, 4, 2, 300, 11)]
        {
            let cache = Cache::new(groups, common + tokens, d);
            let seen = tree(common, tokens);
            let q = random(tokens * queries * d, 3);
            let shape = AttentionShape { queries, groups, scale: 0.03, softcap: (d == 32).then_some(0.5) };
            let out = cache.attend(&seen, &q, shape, 2);
            for (at, out) in out.chunks_exact(d).enumerate() {
                let (n, group) = (at / queries, at % queries / (queries / groups));
                let scaled: Vec<f32> = q[at * d..][..d].iter().map(|q| q * shape.scale).collect();
                let q = in_bfloat16(&scaled);
                let row = |plane: usize, slot: u32| {
                    in_bfloat16(&cache.planes[plane][(group * cache.room + slot as usize) * d..][..d])
                };
                let score = |&slot: &u32| q.iter().zip(row(0, slot)).map(|(q, k)| q * k).sum::<f64>();
                let capped = |score: f64| shape.softcap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh());
                let weights: Vec<f64> = seen[n].slots.iter().map(|slot| capped(score(slot)).exp()).collect();
                for (i, out) in out.iter().enumerate() {
                    let sum =
                        seen[n].slots.iter().zip(&weights).map(|(&slot, weight)| weight * row(1, slot)[i]).sum::<f64>();
                    let expected = sum / weights.iter().sum::<f64>();
                    assert!(
                        (f64::from(*out) - expected).abs() < 6e-3,
                        "D {d}, row {at}, number {i}: {out}, {expected}"
                    );
                }
            }
        }
    }

    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX")]
    fn queries_on_tiles_give_the_same_bits_alone_together_and_in_other_slots() {
        for (queries, groups, common, tokens) in
            [(3, 1, 40, 5), (4, 4, 15, 7), (9, 3, 100, 13), (32, 1, 17, 2), (2, 1, 33, 9)]
        {
            let d = 64;
            let cache = Cache::new(groups, common + tokens, d);
            let shape = AttentionShape { queries, groups, scale: 0.125, softcap: None };
            let q = random(tokens * queries * d, 3);
            let seen = tree(common, tokens);
            let together = cache.attend(&seen, &q, shape, 1);
            assert!(together.iter().all(|x| x.is_finite()));
            assert_eq!(cache.attend(&seen, &q, shape, 300), together, "single heads");
            for (n, together) in together.chunks_exact(queries * d).enumerate() {
                let q = &q[n * queries * d..][..queries * d];
                assert_eq!(cache.attend(&seen[n..=n], q, shape, 2), together, "token {n} alone");
                // The seen tokens side by side, and what nobody sees is not a number.
                let mut moved = Cache::new(groups, common + tokens + 3, d);
                moved.planes.iter_mut().for_each(|plane| plane.fill(f32::NAN));
                for (plane, group) in [0, 1].into_iter().flat_map(|plane| (0..groups).map(move |group| (plane, group)))
                {
                    for (to, &from) in seen[n].slots.iter().enumerate() {
                        let from = (group * cache.room + from as usize) * d;
                        let row = cache.planes[plane][from..from + d].to_vec();
                        moved.planes[plane][(group * moved.room + to) * d..][..d].copy_from_slice(&row);
                    }
                }
                let seen = SeenTokens::new(0, 0..seen[n].slots.len());
                assert_eq!(moved.attend(&[seen], q, shape, 2), together, "token {n} in other slots");
            }
        }
    }

    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX")]
    fn a_value_that_is_not_finite_reaches_only_those_who_see_it() {
        let (d, common, tokens) = (64, 20, 4);
        let mut cache = Cache::new(1, common + tokens, d);
        let shape = AttentionShape { queries: 2, groups: 1, scale: 0.125, softcap: None };
        let q = random(tokens * 2 * d, 3);
        let seen = tree(common, tokens);
        let expected = cache.attend(&seen, &q, shape, 1);
        cache.planes[1][(common + 1) * d + 5] = f32::INFINITY; // seen by tokens 1 and 3
        for (at, out) in cache.attend(&seen, &q, shape, 1).iter().enumerate() {
            match [1, 3].contains(&(at / (2 * d))) && at % d == 5 {
                true => assert_eq!(*out, f32::INFINITY, "number {at}"),
                false => assert_eq!(*out, expected[at], "number {at}"),
            }
        }
    }
}
