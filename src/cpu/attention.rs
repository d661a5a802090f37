//! Attention of new tokens to the KV cache and to each other, along any tree. A token's output does not depend on the other tokens of
//! the pass: its keys are always summed in the order of their positions.
#![expect(unsafe_code, reason = "rows of a cache, whose bounds are checked before the loops")]

// N new tokens, Q query heads, G key/value heads, R = Q/G, S room of the cache, D head size
use std::ops::Range;
use std::{array, ptr};

use super::lanes::{Avx512, Instructions, LANES, Lanes, VectorLine, fetch, with_lanes};
use super::shared::Shared;
use super::team::Team;
use super::{AttentionShape, Number, Plane};

mod positions;
mod seen;
mod tiled;

pub(crate) use seen::SeenTokens;
use tiled::{CachedHead, TileQuery};

/// Products below which the work is not shared.
const WORTH_SHARING: usize = 1 << 15;
/// Queries of a part of the work, where one key has no more heads ([`Lanes::QUERIES`]).
const MOST_QUERIES: usize = 6;
/// Running sums of weighted values: each waits for its last addition.
const RUNNING_SUMS: usize = 2;
/// Numbers of a head that are multiplied together.
const STEP: usize = 2 * LANES;

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceTokens<'a> {
    /// The sequence's keys and values.
    pub(crate) planes: [Plane<'a>; 2],
    /// What each of the tokens sees.
    pub(crate) seen: &'a [SeenTokens],
}

impl SequenceTokens<'_> {
    fn check(&self, heads: AttentionShape) {
        let [keys, values] = self.planes;
        let shape = |plane: Plane| (plane.number, plane.room, plane.head_size, plane.bytes.len());
        assert_eq!(shape(keys), shape(values), "one shape");
        let numbers = heads.groups * keys.room * keys.head_size;
        assert_eq!(keys.bytes.len(), numbers * keys.number.bytes(), "[G, S, D]");
        let in_cache = |seen: &SeenTokens| seen.slots.last().is_some_and(|&last| (last as usize) < keys.room);
        assert!(self.seen.iter().all(in_cache), "in the cache"); // slots grow, so the last one is the largest
    }
}

/// Queries `[N, Q, D]`, of rows of `stride` numbers, to `out` `[N, Q, D]`: `softmax(q·Kᵀ · scale)·V` over what each token sees of its own
/// sequence. The sequences' tokens follow one another.
///
/// # Panics
/// If a shape does not fit, or a token sees what is not in the cache.
pub(crate) fn attend(
    queries: (&[f32], usize),
    sequences: &[SequenceTokens],
    heads: AttentionShape,
    out: &mut [f32],
    team: &Team,
) {
    let instructions = Instructions::detected().expect("there is a matrix, so the CPU has the kernels");
    let on_tiles = sequences.first().is_some_and(|sequence| tiled::available(sequence.planes[0]));
    attend_with((instructions, on_tiles), queries, sequences, heads, (out, team));
}

fn attend_with(
    (instructions, on_tiles): (Instructions, bool),
    queries: (&[f32], usize),
    sequences: &[SequenceTokens],
    heads: AttentionShape,
    (out, team): (&mut [f32], &Team),
) {
    let Some(first) = sequences.first() else { return };
    let ((q, stride), d) = (queries, first.planes[0].head_size);
    let width = heads.queries * d;
    let tokens: Vec<([Plane; 2], &SeenTokens)> =
        (sequences.iter()).flat_map(|sequence| sequence.seen.iter().map(|seen| (sequence.planes, seen))).collect();
    assert!(
        out.len() == tokens.len() * width && q.len() >= tokens.len().saturating_sub(1) * stride + width,
        "[N, Q, D]"
    );
    assert!(heads.queries.is_multiple_of(heads.groups) && stride >= width, "one shape");
    assert!(sequences.iter().all(|sequence| sequence.planes[0].head_size == d), "heads of one size");
    sequences.iter().for_each(|sequence| sequence.check(heads));
    let shared = Shared::new(out);
    let heads_of_key = heads.queries / heads.groups;
    let most_queries = if on_tiles { tiled::QUERIES } else { MOST_QUERIES };
    // With few tokens single heads, so that there is a part for every thread.
    let (tokens_of_part, heads_of_part) = match tokens.len() * heads.groups < team.size() {
        true => (1, 1),
        false => ((most_queries / heads_of_key).max(1), heads_of_key),
    };
    let parts_of_head = tokens.len().div_ceil(tokens_of_part);
    // Head after head: the keys of one head stay in the second cache for all tokens.
    let part = |part: usize| {
        let first = part % parts_of_head * tokens_of_part;
        let heads_of_part = part / parts_of_head * heads_of_part..(part / parts_of_head + 1) * heads_of_part;
        let part_tokens = first..tokens.len().min(first + tokens_of_part);
        let places: Vec<(usize, usize)> =
            part_tokens.flat_map(|n| heads_of_part.clone().map(move |head| (n, head))).collect();
        let same_cache = |n: usize, m: usize| ptr::eq(tokens[n].0[0].bytes, tokens[m].0[0].bytes);
        for places in places.chunk_by(|(n, _), (m, _)| same_cache(*n, *m)) {
            let first = places[0].0;
            let fetches = first == 0 || !same_cache(first - 1, first);
            let query = |&(n, head): &(usize, usize)| {
                let ([keys, values], seen) = tokens[n];
                let q_d = &q[n * stride + head * d..][..d];
                SingleQuery { q_d, keys, values, group: head / heads_of_key, seen, heads, fetches }
            };
            let queries: Vec<SingleQuery> = places.iter().map(query).collect();
            // SAFETY: each part has its own heads of its own tokens.
            let outs = places.iter().map(|&(n, head)| unsafe { shared.part(n * width + head * d, d) });
            let mut outs: Vec<&mut [f32]> = outs.collect();
            if let (true, Instructions::Avx512(lanes)) = (on_tiles, instructions) {
                attend_on_tiles(lanes, &queries, &mut outs);
                continue;
            }
            with_lanes!(instructions, lanes => match queries[0].keys.number {
                Number::Float32 => attend_all::<_, false>(lanes, &queries, &mut outs),
                Number::BFloat16 => attend_all::<_, true>(lanes, &queries, &mut outs),
            });
        }
    };
    let parts = parts_of_head * heads.queries / heads_of_part;
    let work = 2 * width * tokens.iter().map(|(_, seen)| seen.slots.len()).sum::<usize>();
    if work >= WORTH_SHARING { team.run(parts, part) } else { (0..parts).for_each(part) }
}

/// [`tiled::attend`] of all queries for the keys of one head of one sequence.
fn attend_on_tiles(lanes: Avx512, queries: &[SingleQuery], outs: &mut [&mut [f32]]) {
    let SingleQuery { keys, values, group, heads, fetches, .. } = queries[0];
    let head = CachedHead { planes: [keys, values], group, fetches };
    for (queries, outs) in queries.chunks(tiled::QUERIES).zip(outs.chunks_mut(tiled::QUERIES)) {
        let queries: Vec<TileQuery> =
            queries.iter().map(|&SingleQuery { q_d, seen, .. }| TileQuery { q_d, seen }).collect();
        tiled::attend(lanes, head, &queries, heads, outs);
    }
}

/// Queries for the keys of one head of one sequence.
#[inline(always)]
fn attend_all<L: Lanes, const BF16: bool>(lanes: L, queries: &[SingleQuery], outs: &mut [&mut [f32]]) {
    let longest = queries.iter().map(|query| query.seen.slots.len()).max().unwrap_or(0).next_multiple_of(LANES);
    let steps = queries[0].q_d.len().div_ceil(STEP);
    let mut buffers = AttentionBuffers {
        q: vec![],
        scores: vec![0.0; longest * L::QUERIES.min(queries.len())],
        room: longest,
        largest: vec![],
        weighted: vec![],
        steps,
    };
    for (queries, outs) in queries.chunks(L::QUERIES).zip(outs.chunks_mut(L::QUERIES)) {
        buffers.q.clear();
        queries.iter().for_each(|query| push_steps::<BF16>(query.q_d, &mut buffers.q));
        buffers.largest = vec![lanes.all(f32::NEG_INFINITY); queries.len()];
        buffers.weighted = vec![[[lanes.all(0.0); 2]; RUNNING_SUMS]; queries.len() * steps];
        attend_together::<L, BF16>(lanes, queries, &mut buffers, outs);
    }
}

/// What is computed for some queries, query after query.
struct AttentionBuffers<V> {
    /// By step.
    q: Vec<StepOfHead>,
    /// Rows of `room` numbers.
    scores: Vec<f32>,
    room: usize,
    largest: Vec<V>,
    /// By step.
    weighted: Vec<[[V; 2]; RUNNING_SUMS]>,
    steps: usize,
}

/// Queries whose common keys and values are read once; each gets the bits that it gets alone.
#[inline(always)]
fn attend_together<L: Lanes, const BF16: bool>(
    lanes: L,
    queries: &[SingleQuery],
    buffers: &mut AttentionBuffers<L::Vector>,
    outs: &mut [&mut [f32]],
) {
    let common = common_slots(queries);
    scores_of::<L, BF16>(lanes, (queries, 0), 0..common, buffers);
    for (first, token) in by_token(queries) {
        scores_of::<L, BF16>(lanes, (token, first), common..token[0].seen.slots.len(), buffers);
    }
    let mut sums = vec![lanes.all(0.0); queries.len()];
    for (m, query) in queries.iter().enumerate() {
        let slots = query.seen.slots.len();
        let scores = &mut buffers.scores[m * buffers.room..][..slots.next_multiple_of(LANES)];
        sums[m] = lanes.all(softmax(lanes, scores, lanes.largest(buffers.largest[m]), slots));
    }
    values_of::<L, BF16>(lanes, (queries, 0), 0..common, buffers);
    for (first, token) in by_token(queries) {
        values_of::<L, BF16>(lanes, (token, first), common..token[0].seen.slots.len(), buffers);
    }
    for ((out, weighted), &sum) in outs.iter_mut().zip(buffers.weighted.chunks_exact(buffers.steps)).zip(&sums) {
        for ([first, second], out) in weighted.iter().zip(out.chunks_mut(STEP)) {
            let mut values = [[0.0; LANES]; 2];
            lanes.store(&mut values[0], lanes.divide(lanes.add(first[0], second[0]), sum));
            lanes.store(&mut values[1], lanes.divide(lanes.add(first[1], second[1]), sum));
            write_step::<BF16>(&values, out);
        }
    }
}

/// The queries of each token, and where they begin: they see the same tokens.
fn by_token<'q, 'a>(queries: &'q [SingleQuery<'a>]) -> impl Iterator<Item = (usize, &'q [SingleQuery<'a>])> {
    let mut end = 0;
    queries.chunk_by(|a, b| ptr::eq(a.seen, b.seen)).map(move |token| {
        end += token.len();
        (end - token.len(), token)
    })
}

/// [`write_scores`] of a number of queries.
#[inline(always)]
fn scores_of<L: Lanes, const BF16: bool>(
    lanes: L,
    queries: (&[SingleQuery], usize),
    slots: Range<usize>,
    buffers: &mut AttentionBuffers<L::Vector>,
) {
    match queries.0.len() {
        1 => write_scores::<L, BF16, 1>(lanes, queries, slots, buffers),
        2 => write_scores::<L, BF16, 2>(lanes, queries, slots, buffers),
        3 => write_scores::<L, BF16, 3>(lanes, queries, slots, buffers),
        4 => write_scores::<L, BF16, 4>(lanes, queries, slots, buffers),
        5 => write_scores::<L, BF16, 5>(lanes, queries, slots, buffers),
        _ => write_scores::<L, BF16, 6>(lanes, queries, slots, buffers),
    }
}

/// [`add_values`] of a number of queries.
#[inline(always)]
fn values_of<L: Lanes, const BF16: bool>(
    lanes: L,
    queries: (&[SingleQuery], usize),
    slots: Range<usize>,
    buffers: &mut AttentionBuffers<L::Vector>,
) {
    match queries.0.len() {
        1 => add_values::<L, BF16, 1>(lanes, queries, slots, buffers),
        2 => add_values::<L, BF16, 2>(lanes, queries, slots, buffers),
        3 => add_values::<L, BF16, 3>(lanes, queries, slots, buffers),
        4 => add_values::<L, BF16, 4>(lanes, queries, slots, buffers),
        5 => add_values::<L, BF16, 5>(lanes, queries, slots, buffers),
        _ => add_values::<L, BF16, 6>(lanes, queries, slots, buffers),
    }
}

/// How many tokens all queries see first, side by side, in whole vectors.
fn common_slots(queries: &[SingleQuery]) -> usize {
    let first = queries[0].seen.slots[0];
    match queries.iter().all(|query| query.seen.slots[0] == first) {
        true => queries.iter().map(|query| query.seen.run).min().unwrap_or(0) / LANES * LANES,
        false => 0,
    }
}

/// 32 numbers of a head in the order of [`Lanes::step_at`].
type StepOfHead = [[f32; LANES]; 2];

/// Vector and lane of a number of a step.
#[inline(always)]
fn place<const BF16: bool>(at: usize) -> [usize; 2] {
    if BF16 { [at % 2, at / 2] } else { [at / LANES, at % LANES] }
}

/// The steps of a head; what is left of the last one is zero.
#[inline(always)]
fn push_steps<const BF16: bool>(q_d: &[f32], steps: &mut Vec<StepOfHead>) {
    for numbers in q_d.chunks(STEP) {
        let (mut padded, mut step) = ([0.0; STEP], [[0.0; LANES]; 2]);
        padded[..numbers.len()].copy_from_slice(numbers);
        for at in 0..STEP {
            step[place::<BF16>(at)[0]][place::<BF16>(at)[1]] = padded[at];
        }
        steps.push(step);
    }
}

/// Writes a step to the numbers of a head that it has.
#[inline(always)]
fn write_step<const BF16: bool>(step: &StepOfHead, out: &mut [f32]) {
    let mut numbers = [0.0; STEP];
    for at in 0..STEP {
        numbers[at] = step[place::<BF16>(at)[0]][place::<BF16>(at)[1]];
    }
    out.copy_from_slice(&numbers[..out.len()]);
}

/// Keys whose products with all queries are summed side by side.
const KEYS: usize = 4;

/// Scaled scores of slots, from a multiple of 16 on, that some queries see, of which the first one is the `first` of all, and the largest of them.
/// Behind the last token the last one's come again.
#[inline(always)]
fn write_scores<L: Lanes, const BF16: bool, const M: usize>(
    lanes: L,
    (queries, first): (&[SingleQuery], usize),
    slots: Range<usize>,
    buffers: &mut AttentionBuffers<L::Vector>,
) {
    let (keys, d, steps) = (queries[0].keys.bytes, queries[0].q_d.len(), buffers.steps);
    // By step.
    let queries_of = |step: usize| array::from_fn(|m| buffers.q[(first + m) * steps + step]);
    let q: Vec<[StepOfHead; M]> = (0..steps).map(queries_of).collect();
    for block in slots.step_by(LANES) {
        let starts = queries[0].sixteen(block);
        if queries[0].fetches {
            queries[0].fetch_rows(block);
        }
        let mut sums = [[lanes.all(0.0); LANES]; M];
        for four in (0..LANES).step_by(KEYS) {
            let mut some = [[lanes.all(0.0); KEYS]; M];
            for (step, q) in q.iter().enumerate() {
                let count = (d - step * STEP).min(STEP);
                for key in 0..KEYS {
                    // SAFETY: `sixteen`'s tokens are in the plane, and the numbers end with the head.
                    let k = unsafe { lanes.step_at::<BF16>(keys, starts[four + key] + step * STEP, count) };
                    for m in 0..M {
                        let sum = lanes.multiply_add(lanes.load(&q[m][0]), k[0], some[m][key]);
                        some[m][key] = lanes.multiply_add(lanes.load(&q[m][1]), k[1], sum);
                    }
                }
            }
            for m in 0..M {
                sums[m][four..four + KEYS].copy_from_slice(&some[m]);
            }
        }
        for m in 0..M {
            let scaled = queries[m].scaled(lanes, sums[m]);
            buffers.largest[first + m] = lanes.larger(buffers.largest[first + m], scaled);
            lanes.store(&mut buffers.scores[(first + m) * buffers.room + block..][..LANES], scaled);
        }
    }
}

/// Slots whose values stay in the first cache while all steps of a head are added up.
const VALUES: usize = 64;

/// Adds the values of slots, from a multiple of 16 on, that some queries see, weighted, to the running sums of each, step by step.
#[inline(always)]
fn add_values<L: Lanes, const BF16: bool, const M: usize>(
    lanes: L,
    (queries, first): (&[SingleQuery], usize),
    slots: Range<usize>,
    buffers: &mut AttentionBuffers<L::Vector>,
) {
    let (query, end, room) = (&queries[0], slots.end, buffers.room);
    let (values, d) = (query.values.bytes, query.values.head_size);
    let start = query.group * query.values.room * d;
    let p: [*const f32; M] = array::from_fn(|m| buffers.scores[(first + m) * room..][..end].as_ptr());
    for block in slots.step_by(VALUES) {
        let block = block..end.min(block + VALUES);
        for step in 0..buffers.steps {
            let (start, count) = (start + step * STEP, (d - step * STEP).min(STEP));
            let mut sums = [[[lanes.all(0.0); 2]; RUNNING_SUMS]; M];
            for (m, sums) in sums.iter_mut().enumerate() {
                *sums = buffers.weighted[(first + m) * buffers.steps + step];
            }
            let (slots_of_2, rest) = query.seen.slots[block.clone()].as_chunks::<RUNNING_SUMS>();
            let mut at = block.start;
            for slots in slots_of_2 {
                for (i, &slot) in slots.iter().enumerate() {
                    // SAFETY: `check` has seen that the token is in the plane, the numbers end with the head, and rows have `end` numbers.
                    unsafe {
                        let value = lanes.step_at::<BF16>(values, start + slot as usize * d, count);
                        add_value::<L, M>(lanes, value, (p, at + i), i, &mut sums);
                    }
                }
                at += RUNNING_SUMS;
            }
            for &slot in rest {
                // SAFETY: as above.
                unsafe {
                    let value = lanes.step_at::<BF16>(values, start + slot as usize * d, count);
                    add_value::<L, M>(lanes, value, (p, at), 0, &mut sums);
                }
            }
            for (m, sums) in sums.into_iter().enumerate() {
                buffers.weighted[(first + m) * buffers.steps + step] = sums;
            }
        }
    }
}

/// Adds a value to a running sum of each query, weighted with the number `at` of each row.
///
/// # Safety
/// The rows are so long.
#[inline(always)]
unsafe fn add_value<L: Lanes, const M: usize>(
    lanes: L,
    value: [L::Vector; 2],
    (rows, at): ([*const f32; M], usize),
    i: usize,
    sums: &mut [[[L::Vector; 2]; RUNNING_SUMS]; M],
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let p = lanes.all(unsafe { *rows[m].add(at) });
        sums[m][i][0] = lanes.multiply_add(p, value[0], sums[m][i][0]);
        sums[m][i][1] = lanes.multiply_add(p, value[1], sums[m][i][1]);
    }
}

/// One head of one token.
struct SingleQuery<'a> {
    q_d: &'a [f32],
    keys: Plane<'a>,
    values: Plane<'a>,
    group: usize,
    seen: &'a SeenTokens,
    heads: AttentionShape,
    /// Whether nobody read these keys and values before.
    fetches: bool,
}

impl SingleQuery<'_> {
    /// Scores of 16 tokens, of which the lanes of `sums` are the parts.
    #[inline(always)]
    fn scaled<L: Lanes>(&self, lanes: L, sums: [L::Vector; LANES]) -> L::Vector {
        let scaled = lanes.multiply(lanes.sum_each(sums), lanes.all(self.heads.scale));
        match self.heads.softcap {
            Some(cap) => lanes.capped(scaled, cap),
            None => scaled,
        }
    }

    /// Where the keys of 16 seen tokens start, from the `at`-th on; behind the last one, the last one again.
    #[inline(always)]
    fn sixteen(&self, at: usize) -> [usize; LANES] {
        let (d, last) = (self.keys.head_size, self.seen.slots.len() - 1);
        let start = |slot: u32| (self.group * self.keys.room + slot as usize) * d;
        match self.seen.slots.get(at..at + LANES) {
            Some(slots) if slots[LANES - 1] == slots[0] + (LANES as u32 - 1) => {
                let first = start(slots[0]); // side by side, as nearly all are
                array::from_fn(|lane| first + lane * d)
            }
            _ => array::from_fn(|lane| start(self.seen.slots[(at + lane).min(last)])),
        }
    }

    /// Fetches the values of 16 tokens from the `at`-th on, and the keys of the next 16, if they lie side by side.
    #[inline(always)]
    fn fetch_rows(&self, at: usize) {
        let (d, size) = (self.keys.head_size, self.keys.number.bytes());
        let first = (self.group * self.keys.room + self.seen.slots[at] as usize) * d * size;
        let row = LANES * d * size;
        for (plane, from) in [(self.values, first), (self.keys, first + row)] {
            for byte in (from..from + row).step_by(size_of::<VectorLine>()) {
                fetch(plane.bytes.as_ptr().wrapping_add(byte).cast());
            }
        }
    }
}

/// Scores to e^(score - largest), in place; returns their sum. Those from `len` on become 0.
#[inline(always)]
fn softmax<L: Lanes>(lanes: L, scores: &mut [f32], largest: f32, len: usize) -> f32 {
    scores[len..].fill(f32::NEG_INFINITY);
    let mut sums = lanes.all(0.0);
    for chunk in scores.chunks_exact_mut(LANES) {
        let p = lanes.exp(lanes.subtract(lanes.load(chunk), lanes.all(largest)));
        sums = lanes.add(sums, p);
        lanes.store(chunk, p);
    }
    lanes.sum(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn random(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    }

    /// In float64, for one head of one token.
    fn oracle(q: &[f32], slots: &[usize], row: impl Fn(usize, usize) -> Vec<f64>, scale: f64) -> Vec<f64> {
        let dot = |k: &[f64]| q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>() * scale;
        let p: Vec<f64> = slots.iter().map(|&slot| dot(&row(0, slot)).exp()).collect();
        let value = |d: usize| slots.iter().zip(&p).map(|(&slot, p)| p * row(1, slot)[d]).sum::<f64>();
        (0..q.len()).map(|d| value(d) / p.iter().sum::<f64>()).collect()
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn attention_equals_its_formula_in_float64() {
        let team = Team::new(2);
        let seen: Vec<Vec<usize>> =
            vec![(0..1).collect(), (3..40).chain([41, 47]).collect(), (0..64).collect(), vec![5, 9, 60]];
        for number in [Number::Float32, Number::BFloat16] {
            for (d, queries, groups) in [(8, 4, 4), (20, 6, 2), (64, 2, 1)] {
                let (room, width) = (64, queries * d);
                let stored = |seed| {
                    let mut bytes = vec![0; groups * room * d * number.bytes()];
                    number.write(&random(groups * room * d, seed), &mut bytes);
                    bytes
                };
                let planes = [1, 2, 4, 5].map(stored); // keys and values of two sequences
                let read = |bytes: &[u8]| match number {
                    Number::Float32 => f64::from(f32::from_ne_bytes(bytes.try_into().expect("4 bytes"))),
                    Number::BFloat16 => f64::from(half::bf16::from_ne_bytes(bytes.try_into().expect("2 bytes"))),
                };
                // Two tokens of each sequence.
                let row = |n: usize, plane: usize, group: usize, slot: usize| -> Vec<f64> {
                    let plane = 2 * (n / 2) + plane;
                    let first = (group * room + slot) * d * number.bytes();
                    planes[plane][first..][..d * number.bytes()].chunks_exact(number.bytes()).map(read).collect()
                };
                let (q, mut out) = (random(seen.len() * (width + 3), 3), vec![0.0; seen.len() * width]);
                let plane = |bytes| Plane { bytes, number, room, head_size: d };
                let heads = AttentionShape { queries, groups, scale: 0.3, softcap: None };
                let slots: Vec<SeenTokens> =
                    seen.iter().map(|slots| SeenTokens::new(0, slots.iter().copied())).collect();
                let sequences: Vec<SequenceTokens> = (planes.chunks(2).zip(slots.chunks(2)))
                    .map(|(planes, seen)| SequenceTokens { planes: [plane(&planes[0]), plane(&planes[1])], seen })
                    .collect();
                let kernels = Instructions::detected().expect("AVX2");
                attend_with((kernels, false), (&q, width + 3), &sequences, heads, (&mut out, &team));
                for (n, head) in (0..seen.len()).flat_map(|n| (0..queries).map(move |head| (n, head))) {
                    let group = head / (queries / groups);
                    let q_d = &q[n * (width + 3) + head * d..][..d];
                    let expected = oracle(q_d, &seen[n], |plane, slot| row(n, plane, group, slot), f64::from(0.3f32));
                    for (got, expected) in out[n * width + head * d..][..d].iter().zip(expected) {
                        assert!(
                            (f64::from(*got) - expected).abs() < 2e-5,
                            "{number:?}, D {d}, token {n}, head {head}: {got}, {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Trees behind common tokens of several lengths: with many threads each query goes alone, with one thread they go together.
    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn queries_give_the_same_bits_alone_and_together_with_all_vectors() {
        let (alone, together, [room, d]) = (Team::new(6), Team::new(1), [80, 20]);
        for (number, softcap) in [(Number::Float32, None), (Number::BFloat16, Some(2.0))] {
            for (queries, groups, common, tokens) in
                [(3, 1, 40, 5), (4, 4, 15, 7), (4, 2, 16, 6), (8, 1, 17, 4), (2, 1, 33, 9)]
            {
                let width = queries * d;
                let plane = |seed| {
                    let mut bytes = vec![0; groups * room * d * number.bytes()];
                    number.write(&random(groups * room * d, seed), &mut bytes);
                    bytes
                };
                let [keys, values] = [1, 2].map(plane);
                let planes = [&keys, &values].map(|bytes| Plane { bytes, number, room, head_size: d });
                // A chain, but for every third token, which sees only the common ones and itself.
                let slots = |n: usize| match n % 3 {
                    2 => (0..common).chain([common + n]).collect(),
                    _ => (0..=common + n).collect::<Vec<_>>(),
                };
                let seen: Vec<SeenTokens> = (0..tokens).map(|n| SeenTokens::new(0, slots(n))).collect();
                let heads = AttentionShape { queries, groups, scale: 0.3, softcap };
                let q = random(tokens * width, 3);
                let mut first: Option<Vec<f32>> = None;
                for instructions in Instructions::all_detected() {
                    for team in [&alone, &together] {
                        let mut out = vec![f32::NAN; tokens * width];
                        let sequences = [SequenceTokens { planes, seen: &seen }];
                        attend_with((instructions, false), (&q, width), &sequences, heads, (&mut out, team));
                        assert_eq!(&out, first.get_or_insert_with(|| out.clone()), "{number:?}, {common} common");
                    }
                }
                assert!(first.is_some_and(|out| out.iter().all(|x| x.is_finite())));
            }
        }
    }
}
