//! Attention of new tokens to the KV cache and to each other, along any tree. A token's output does not depend on the other tokens of
//! the pass: its keys are always summed in the order of their positions.
#![expect(unsafe_code, reason = "rows of a cache, whose bounds are checked before the loops")]

// N new tokens, Q query heads, G key/value heads, R = Q/G, S room of the cache, D head size
use std::array;

use super::lanes::{LANES, Lanes, with_lanes};
use super::shared::Shared;
use super::team::Team;
use super::{AttentionShape, Number, Plane};

/// Products below which the work is not shared.
const WORTH_SHARING: usize = 1 << 15;

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
    // The heads of one key where there are enough tokens, else single heads.
    let heads_of_part = if tokens.len() < 2 * team.size() { 1 } else { heads.queries / heads.groups };
    let part = |part: usize| {
        let first = part * heads_of_part;
        let (n, first) = (first / heads.queries, first % heads.queries);
        let ([keys, values], slots) = tokens[n];
        let mut scores = vec![0.0; slots.len().next_multiple_of(LANES)];
        for head in first..first + heads_of_part {
            let group = head / (heads.queries / heads.groups);
            let q_d = &q[n * stride + head * d..][..d];
            // SAFETY: each part has its own heads of its own token.
            let out_d = unsafe { shared.part(n * width + head * d, d) };
            let one = SingleQuery { q_d, keys, values, group, slots, heads };
            with_lanes!(lanes => match keys.number {
                Number::Float32 => one.attend::<_, false>(lanes, &mut scores, out_d),
                Number::BFloat16 => one.attend::<_, true>(lanes, &mut scores, out_d),
            });
        }
    };
    let parts = tokens.len() * heads.queries / heads_of_part;
    let work = 2 * width * tokens.iter().map(|(_, slots)| slots.len()).sum::<usize>();
    if work >= WORTH_SHARING { team.run(parts, part) } else { (0..parts).for_each(part) }
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
        let largest = self.scores::<L, BF16>(lanes, scores);
        let sum = lanes.all(softmax(lanes, scores, largest, self.slots.len()));
        for (chunk, out) in out_d.chunks_mut(LANES).enumerate() {
            let weighted = lanes.divide(self.weighted::<L, BF16>(lanes, scores, chunk), sum);
            lanes.store(out, weighted);
        }
    }

    /// Scaled scores, and the largest; behind the last token the last one's come again.
    #[inline(always)]
    fn scores<L: Lanes, const BF16: bool>(&self, lanes: L, scores: &mut [f32]) -> f32 {
        let mut largest = lanes.all(f32::NEG_INFINITY);
        for (block, scores) in scores.chunks_exact_mut(LANES).enumerate() {
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
            let scaled = lanes.multiply(lanes.sum_each(sums), lanes.all(self.heads.scale));
            let scaled = match self.heads.softcap {
                Some(cap) => capped(lanes, scaled, cap),
                None => scaled,
            };
            largest = lanes.larger(largest, scaled);
            lanes.store(scores, scaled);
        }
        lanes.largest(largest)
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

    /// The values' 16 numbers from 16·`chunk` on, weighted: four running sums, since each waits for its last addition.
    #[inline(always)]
    fn weighted<L: Lanes, const BF16: bool>(&self, lanes: L, p: &[f32], chunk: usize) -> L::Vector {
        let d = self.values.head_size;
        let (first, count) = (self.group * self.values.room * d + chunk * LANES, (d - chunk * LANES).min(LANES));
        let add = |sum: L::Vector, p: f32, slot: u32| {
            // SAFETY: `check` has seen that the token is in the plane, and the numbers end with the head.
            let value = unsafe { lanes.numbers_at::<BF16>(self.values.bytes, first + slot as usize * d, count) };
            lanes.multiply_add(lanes.all(p), value, sum)
        };
        let mut sums = [lanes.all(0.0); 4];
        let ((p_of_4, _), (slots_of_4, rest)) = (p.as_chunks::<4>(), self.slots.as_chunks::<4>());
        for (slots, p) in slots_of_4.iter().zip(p_of_4) {
            for i in 0..4 {
                sums[i] = add(sums[i], p[i], slots[i]);
            }
        }
        for (i, &slot) in rest.iter().enumerate() {
            sums[i] = add(sums[i], p[4 * slots_of_4.len() + i], slot);
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
}
