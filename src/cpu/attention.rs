//! Attention of new tokens to the KV cache and to each other, along any tree. A token's output does not depend on the other tokens of
//! the pass: its keys are always summed in the order of their positions.
#![expect(unsafe_code, reason = "rows of a cache, whose bounds are checked before the loops")]

// N new tokens, Q query heads, G key/value heads, R = Q/G, S room of the cache, D head size
use std::{array, ptr};

use super::lanes::{Instructions, LANES, Lanes, with_lanes};
use super::shared::Shared;
use super::team::Team;
use super::{AttentionShape, Number, Plane};

/// Products below which the work is not shared.
const WORTH_SHARING: usize = 1 << 15;
/// Queries of a part of the work, where one key has no more heads ([`Lanes::QUERIES`]).
const MOST_QUERIES: usize = 6;
/// Running sums of weighted values: each waits for its last addition.
const RUNNING_SUMS: usize = 4;

/// The cached tokens that a new token sees, in the order of their positions; at least one, itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenTokens(Vec<u32>);

impl FromIterator<usize> for SeenTokens {
    fn from_iter<I: IntoIterator<Item = usize>>(slots: I) -> Self {
        let slot = |slot| u32::try_from(slot).expect("a context has less than 2^32 tokens");
        let slots: Vec<u32> = slots.into_iter().map(slot).collect();
        assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "positions grow with slots");
        Self(slots)
    }
}

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
        let in_cache = |seen: &SeenTokens| seen.0.last().is_some_and(|&last| (last as usize) < keys.room);
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
    attend_with(instructions, queries, sequences, heads, (out, team));
}

fn attend_with(
    instructions: Instructions,
    queries: (&[f32], usize),
    sequences: &[SequenceTokens],
    heads: AttentionShape,
    (out, team): (&mut [f32], &Team),
) {
    let Some(first) = sequences.first() else { return };
    let ((q, stride), d) = (queries, first.planes[0].head_size);
    let width = heads.queries * d;
    let tokens: Vec<([Plane; 2], &[u32])> = (sequences.iter())
        .flat_map(|sequence| sequence.seen.iter().map(|seen| (sequence.planes, &seen.0[..])))
        .collect();
    assert!(
        out.len() == tokens.len() * width && q.len() >= tokens.len().saturating_sub(1) * stride + width,
        "[N, Q, D]"
    );
    assert!(heads.queries.is_multiple_of(heads.groups) && stride >= width, "one shape");
    assert!(sequences.iter().all(|sequence| sequence.planes[0].head_size == d), "heads of one size");
    sequences.iter().for_each(|sequence| sequence.check(heads));
    let shared = Shared::new(out);
    let heads_of_key = heads.queries / heads.groups;
    // With few tokens single heads, so that there is a part for every thread.
    let (tokens_of_part, heads_of_part) = match tokens.len() < 2 * team.size() {
        true => (1, 1),
        false => ((MOST_QUERIES / heads_of_key).max(1), heads_of_key),
    };
    let parts_of_tokens = heads.queries / heads_of_part;
    let part = |part: usize| {
        let first = part / parts_of_tokens * tokens_of_part;
        let heads_of_part = part % parts_of_tokens * heads_of_part..(part % parts_of_tokens + 1) * heads_of_part;
        let part_tokens = first..tokens.len().min(first + tokens_of_part);
        let places: Vec<(usize, usize)> =
            part_tokens.flat_map(|n| heads_of_part.clone().map(move |head| (n, head))).collect();
        for places in places.chunk_by(|(n, _), (m, _)| ptr::eq(tokens[*n].0[0].bytes, tokens[*m].0[0].bytes)) {
            let query = |&(n, head): &(usize, usize)| {
                let ([keys, values], slots) = tokens[n];
                let q_d = &q[n * stride + head * d..][..d];
                SingleQuery { q_d, keys, values, group: head / heads_of_key, slots, heads }
            };
            let queries: Vec<SingleQuery> = places.iter().map(query).collect();
            // SAFETY: each part has its own heads of its own tokens.
            let outs = places.iter().map(|&(n, head)| unsafe { shared.part(n * width + head * d, d) });
            let mut outs: Vec<&mut [f32]> = outs.collect();
            with_lanes!(instructions, lanes => match queries[0].keys.number {
                Number::Float32 => attend_all::<_, false>(lanes, &queries, &mut outs),
                Number::BFloat16 => attend_all::<_, true>(lanes, &queries, &mut outs),
            });
        }
    };
    let parts = tokens.len().div_ceil(tokens_of_part) * parts_of_tokens;
    let work = 2 * width * tokens.iter().map(|(_, slots)| slots.len()).sum::<usize>();
    if work >= WORTH_SHARING { team.run(parts, part) } else { (0..parts).for_each(part) }
}

/// Queries for the keys of one head of one sequence.
#[inline(always)]
fn attend_all<L: Lanes, const BF16: bool>(lanes: L, queries: &[SingleQuery], outs: &mut [&mut [f32]]) {
    let longest = queries.iter().map(|query| query.slots.len()).max().unwrap_or(0).next_multiple_of(LANES);
    let mut scores = vec![0.0; longest * L::QUERIES.min(queries.len())];
    for (queries, outs) in queries.chunks(L::QUERIES).zip(outs.chunks_mut(L::QUERIES)) {
        match queries.len() {
            1 => queries[0].attend::<L, BF16>(lanes, &mut scores, outs[0]),
            2 => attend_together::<L, BF16, 2>(lanes, queries, &mut scores, outs),
            3 => attend_together::<L, BF16, 3>(lanes, queries, &mut scores, outs),
            4 => attend_together::<L, BF16, 4>(lanes, queries, &mut scores, outs),
            5 => attend_together::<L, BF16, 5>(lanes, queries, &mut scores, outs),
            _ => attend_together::<L, BF16, 6>(lanes, queries, &mut scores, outs),
        }
    }
}

/// As [`SingleQuery::attend`] of each query, to the bit. The keys and values that all queries see first are read once.
#[inline(always)]
fn attend_together<L: Lanes, const BF16: bool, const M: usize>(
    lanes: L,
    queries: &[SingleQuery],
    scores: &mut [f32],
    outs: &mut [&mut [f32]],
) {
    let common = common_slots(queries);
    let mut largest = [lanes.all(f32::NEG_INFINITY); M];
    let room = scores.len() / M / LANES * LANES;
    common_scores::<L, BF16, M>(lanes, queries, common, (&mut *scores, room), &mut largest);
    let mut sums = [lanes.all(0.0); M];
    for m in 0..M {
        let (slots, scores) = (queries[m].slots.len(), &mut scores[m * room..]);
        let scores = &mut scores[..slots.next_multiple_of(LANES)];
        let largest = queries[m].scores_from::<L, BF16>(lanes, common, largest[m], scores);
        sums[m] = lanes.all(softmax(lanes, scores, largest, slots));
    }
    for chunk in 0..queries[0].q_d.len().div_ceil(LANES) {
        let mut weighted = [[lanes.all(0.0); RUNNING_SUMS]; M];
        common_values::<L, BF16, M>(lanes, &queries[0], common, chunk, (&*scores, room), &mut weighted);
        for m in 0..M {
            let value = queries[m].weighted_from::<L, BF16>(lanes, &scores[m * room..], chunk, common, weighted[m]);
            let end = outs[m].len().min((chunk + 1) * LANES);
            lanes.store(&mut outs[m][chunk * LANES..end], lanes.divide(value, sums[m]));
        }
    }
}

/// How many tokens all queries see first, in whole vectors.
fn common_slots(queries: &[SingleQuery]) -> usize {
    let first = queries[0].slots;
    let common = |other: &[u32]| match ptr::eq(first, other) {
        true => first.len(),
        false => first.iter().zip(other).take_while(|(a, b)| a == b).count(),
    };
    let common = queries.iter().map(|query| common(query.slots)).min().unwrap_or(0);
    common / LANES * LANES
}

/// Keys whose products with all queries are summed side by side.
const KEYS: usize = 4;

/// Scaled scores of the first `common` tokens that all queries see, to rows of `room` numbers.
#[inline(always)]
fn common_scores<L: Lanes, const BF16: bool, const M: usize>(
    lanes: L,
    queries: &[SingleQuery],
    common: usize,
    (scores, room): (&mut [f32], usize),
    largest: &mut [L::Vector; M],
) {
    let d = queries[0].q_d.len();
    let mut q = vec![[[0.0; LANES]; M]; d.div_ceil(LANES)];
    for (m, query) in queries.iter().enumerate() {
        query.q_d.chunks(LANES).zip(&mut q).for_each(|(from, to)| to[m][..from.len()].copy_from_slice(from));
    }
    for block in (0..common).step_by(LANES) {
        let keys = queries[0].sixteen(block);
        let mut sums = [[lanes.all(0.0); LANES]; M];
        for first in (0..LANES).step_by(KEYS) {
            let mut some = [[lanes.all(0.0); KEYS]; M];
            for (chunk, q) in q.iter().enumerate() {
                let count = (d - chunk * LANES).min(LANES);
                for key in 0..KEYS {
                    // SAFETY: `sixteen`'s tokens are in the plane, and the numbers end with the head.
                    let k = unsafe {
                        lanes.numbers_at::<BF16>(queries[0].keys.bytes, keys[first + key] + chunk * LANES, count)
                    };
                    for m in 0..M {
                        some[m][key] = lanes.multiply_add(lanes.load(&q[m]), k, some[m][key]);
                    }
                }
            }
            for m in 0..M {
                sums[m][first..first + KEYS].copy_from_slice(&some[m]);
            }
        }
        for m in 0..M {
            let scaled = queries[m].scaled(lanes, sums[m]);
            largest[m] = lanes.larger(largest[m], scaled);
            lanes.store(&mut scores[m * room + block..][..LANES], scaled);
        }
    }
}

/// Adds the first `common` values that all queries see, weighted, to the running sums of each.
#[inline(always)]
fn common_values<L: Lanes, const BF16: bool, const M: usize>(
    lanes: L,
    query: &SingleQuery,
    common: usize,
    chunk: usize,
    (p, room): (&[f32], usize),
    sums: &mut [[L::Vector; RUNNING_SUMS]; M],
) {
    let (first, d, count) = query.values_of(chunk);
    for (at, slots) in query.slots[..common].as_chunks::<RUNNING_SUMS>().0.iter().enumerate() {
        for i in 0..RUNNING_SUMS {
            // SAFETY: `check` has seen that the token is in the plane, and the numbers end with the head.
            let value = unsafe { lanes.numbers_at::<BF16>(query.values.bytes, first + slots[i] as usize * d, count) };
            for m in 0..M {
                let p = lanes.all(p[m * room + at * RUNNING_SUMS + i]);
                sums[m][i] = lanes.multiply_add(p, value, sums[m][i]);
            }
        }
    }
}

/// One head of one token.
struct SingleQuery<'a> {
    q_d: &'a [f32],
    keys: Plane<'a>,
    values: Plane<'a>,
    group: usize,
    slots: &'a [u32],
    heads: AttentionShape,
}

impl SingleQuery<'_> {
    /// `scores`: room for as many numbers as there are slots, in whole vectors.
    #[inline(always)]
    fn attend<L: Lanes, const BF16: bool>(&self, lanes: L, scores: &mut [f32], out_d: &mut [f32]) {
        let scores = &mut scores[..self.slots.len().next_multiple_of(LANES)];
        let largest = self.scores_from::<L, BF16>(lanes, 0, lanes.all(f32::NEG_INFINITY), scores);
        let sum = lanes.all(softmax(lanes, scores, largest, self.slots.len()));
        for (chunk, out) in out_d.chunks_mut(LANES).enumerate() {
            let weighted = self.weighted_from::<L, BF16>(lanes, scores, chunk, 0, [lanes.all(0.0); RUNNING_SUMS]);
            lanes.store(out, lanes.divide(weighted, sum));
        }
    }

    /// Scaled scores from slot `from` on, a multiple of 16; the largest of them and of `largest`. Behind the last token the last one's come again.
    #[inline(always)]
    fn scores_from<L: Lanes, const BF16: bool>(
        &self,
        lanes: L,
        from: usize,
        mut largest: L::Vector,
        scores: &mut [f32],
    ) -> f32 {
        for (block, scores) in scores.chunks_exact_mut(LANES).enumerate().skip(from / LANES) {
            let keys = self.sixteen(block * LANES);
            let mut sums = [lanes.all(0.0); LANES];
            for (chunk, q) in self.q_d.chunks(LANES).enumerate() {
                let (count, q) = (q.len(), lanes.load(q));
                for (sum, key) in sums.iter_mut().zip(keys) {
                    // SAFETY: `sixteen`'s tokens are in the plane, and the numbers end with the head.
                    let key = unsafe { lanes.numbers_at::<BF16>(self.keys.bytes, key + chunk * LANES, count) };
                    *sum = lanes.multiply_add(q, key, *sum);
                }
            }
            let scaled = self.scaled(lanes, sums);
            largest = lanes.larger(largest, scaled);
            lanes.store(scores, scaled);
        }
        lanes.largest(largest)
    }

    /// Scores of 16 tokens, of which the lanes of `sums` are the parts.
    #[inline(always)]
    fn scaled<L: Lanes>(&self, lanes: L, sums: [L::Vector; LANES]) -> L::Vector {
        let scaled = lanes.multiply(lanes.sum_each(sums), lanes.all(self.heads.scale));
        match self.heads.softcap {
            Some(cap) => capped(lanes, scaled, cap),
            None => scaled,
        }
    }

    /// Where the keys of 16 seen tokens start, from the `at`-th on; behind the last one, the last one again.
    #[inline(always)]
    fn sixteen(&self, at: usize) -> [usize; LANES] {
        let (d, last) = (self.keys.head_size, self.slots.len() - 1);
        let start = |slot: u32| (self.group * self.keys.room + slot as usize) * d;
        match self.slots.get(at..at + LANES) {
            Some(slots) if slots[LANES - 1] == slots[0] + (LANES as u32 - 1) => {
                let first = start(slots[0]); // side by side, as nearly all are
                array::from_fn(|lane| first + lane * d)
            }
            _ => array::from_fn(|lane| start(self.slots[(at + lane).min(last)])),
        }
    }

    /// Where the 16 numbers of the first slot's value from 16·`chunk` on are, how far the next slot's, and how many there are.
    #[inline(always)]
    fn values_of(&self, chunk: usize) -> (usize, usize, usize) {
        let d = self.values.head_size;
        (self.group * self.values.room * d + chunk * LANES, d, (d - chunk * LANES).min(LANES))
    }

    /// The values' 16 numbers from 16·`chunk` on, weighted, from slot `from` on, a multiple of 4, with the running `sums` of those before.
    #[inline(always)]
    fn weighted_from<L: Lanes, const BF16: bool>(
        &self,
        lanes: L,
        p: &[f32],
        chunk: usize,
        from: usize,
        mut sums: [L::Vector; RUNNING_SUMS],
    ) -> L::Vector {
        let (first, d, count) = self.values_of(chunk);
        let add = |sum: L::Vector, p: f32, slot: u32| {
            // SAFETY: `check` has seen that the token is in the plane, and the numbers end with the head.
            let value = unsafe { lanes.numbers_at::<BF16>(self.values.bytes, first + slot as usize * d, count) };
            lanes.multiply_add(lanes.all(p), value, sum)
        };
        let p = &p[from..self.slots.len()];
        let ((p_of_4, p_of_rest), (slots_of_4, rest)) =
            (p.as_chunks::<RUNNING_SUMS>(), self.slots[from..].as_chunks::<RUNNING_SUMS>());
        for (slots, p) in slots_of_4.iter().zip(p_of_4) {
            for i in 0..RUNNING_SUMS {
                sums[i] = add(sums[i], p[i], slots[i]);
            }
        }
        for (i, (&slot, &p)) in rest.iter().zip(p_of_rest).enumerate() {
            sums[i] = add(sums[i], p, slot);
        }
        lanes.add(lanes.add(sums[0], sums[1]), lanes.add(sums[2], sums[3]))
    }
}

/// `c·tanh(s / c) = c·(1 - 2 / (1 + e^(2s/c)))`.
#[inline(always)]
fn capped<L: Lanes>(lanes: L, scores: L::Vector, cap: f32) -> L::Vector {
    let (one, two) = (lanes.all(1.0), lanes.all(2.0));
    let exponential = lanes.exp(lanes.multiply(scores, lanes.all(2.0 / cap)));
    let tanh = lanes.subtract(one, lanes.divide(two, lanes.add(one, exponential)));
    lanes.multiply(tanh, lanes.all(cap))
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

    fn random(count: usize, seed: usize) -> Vec<f32> {
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
                let slots: Vec<SeenTokens> = seen.iter().map(|slots| slots.iter().copied().collect()).collect();
                let sequences: Vec<SequenceTokens> = (planes.chunks(2).zip(slots.chunks(2)))
                    .map(|(planes, seen)| SequenceTokens { planes: [plane(&planes[0]), plane(&planes[1])], seen })
                    .collect();
                attend((&q, width + 3), &sequences, heads, &mut out, &team);
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
                    _ => (0..=common + n).collect(),
                };
                let seen: Vec<SeenTokens> = (0..tokens).map(slots).collect();
                let heads = AttentionShape { queries, groups, scale: 0.3, softcap };
                let q = random(tokens * width, 3);
                let mut first: Option<Vec<f32>> = None;
                for instructions in Instructions::all_detected().into_iter().flatten() {
                    for team in [&alone, &together] {
                        let mut out = vec![f32::NAN; tokens * width];
                        let sequences = [SequenceTokens { planes, seen: &seen }];
                        attend_with(instructions, (&q, width), &sequences, heads, (&mut out, team));
                        assert_eq!(&out, first.get_or_insert_with(|| out.clone()), "{number:?}, {common} common");
                    }
                }
                assert!(first.is_some_and(|out| out.iter().all(|x| x.is_finite())));
            }
        }
    }
}
