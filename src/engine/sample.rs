//! Sampling with temperature, top-k and top-p. Random numbers come from the host, so they are the same on every device; only the
//! probabilities may differ by rounding. Where the logits are on a GPU, tokens are chosen there, by the same rule.

// B rows, V vocabulary
use std::cmp::Ordering;
use std::num::NonZeroUsize;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use super::draw::draw;
use crate::model::llama::{NO_TOKEN, most_probable};
use crate::numbers::{NonNegative, Probability};
use crate::torch::upload;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: NonNegative,
    /// Keeps so many of the most probable tokens; `None` keeps all.
    pub top_k: Option<NonZeroUsize>,
    /// Nucleus sampling (Holtzman et al. 2019): keeps the most probable tokens that together reach this probability; 1 keeps all. With
    /// `top_k`, of the probability of those that it keeps, as vLLM and transformers do.
    pub top_p: Probability,
}

impl Sampling {
    /// Sampling without top-k and top-p.
    pub fn with_temperature(temperature: NonNegative) -> Self {
        Self { temperature, top_k: None, top_p: Probability::ONE }
    }
}

/// A token that was chosen, or [`NO_TOKEN`].
#[derive(Debug)]
pub struct Chosen {
    /// On the host.
    pub id: i64,
    /// `[1]`, on the backbone's device, if the token was chosen there.
    id_1: Option<Tensor>,
}

impl Chosen {
    /// The most probable token of logits `[1, V]`.
    pub fn best(logits_1v: &Tensor) -> Self {
        let id_1 = most_probable(logits_1v);
        Self { id: id_1.int64_value(&[0]), id_1: Some(id_1) }
    }

    /// A token known on host and device; `id_1` is `[1]`.
    pub fn in_both(id: i64, id_1: Tensor) -> Self {
        Self { id, id_1: Some(id_1) }
    }

    /// A token known on the host only.
    pub fn on_host(id: i64) -> Self {
        Self { id, id_1: None }
    }

    /// The token on `device`: `[1]`, int64.
    pub fn on_device(&self, device: Device) -> Tensor {
        self.id_1.as_ref().map_or_else(|| Tensor::from_slice(&[self.id]).to_device(device), Tensor::shallow_clone)
    }
}

/// Selects one of many independent streams of random numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stream {
    /// `--seed`.
    pub seed: u64,
    /// The prompt's index in its file.
    pub index: u64,
    /// The turn of the conversation.
    pub turn: u64,
    /// Which of several texts from the same prompt.
    pub sample: u64,
}

/// Draws the tokens of one text.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler that draws from `stream`.
    pub fn new(sampling: Sampling, stream: Stream) -> Self {
        Self { sampling, rng: generator(stream) }
    }

    /// A sampler for the guesses after `tokens` tokens of a text. It is independent of the text's own sampler and of other places.
    pub fn for_guesses(sampling: Sampling, stream: Stream, tokens: usize) -> Self {
        let mut rng = generator(stream);
        rng.set_stream(tokens as u64 + 1); // 0 is the text's own
        Self { sampling, rng }
    }

    /// Temperature, top-k and top-p.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// The next token for logits `[1, V]`. Above temperature 0, it consumes one random number.
    pub fn next(&mut self, logits_1v: &Tensor) -> Chosen {
        if self.sampling.temperature.get() == 0.0 {
            return Chosen::best(logits_1v);
        }
        Chosen::on_host(next_of_each(logits_1v, &mut [self])[0])
    }

    /// The next `count` random numbers, from 0 to below 1: those that the next `count` tokens would consume.
    pub fn uniforms(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.uniform()).collect()
    }

    /// The next random number.
    pub fn uniform(&mut self) -> f64 {
        self.rng.random()
    }

    /// Draws a token from probabilities `[V]`.
    fn draw(&mut self, p_v: &[f32]) -> i64 {
        token_of(p_v, least_kept(p_v, self.sampling), self.rng.random())
    }
}

fn generator(stream: Stream) -> ChaCha8Rng {
    let Stream { seed, index, turn, sample } = stream;
    let mut key = [0; 32];
    let numbers = [seed, index, turn, sample].map(u64::to_le_bytes);
    key.chunks_exact_mut(8).zip(numbers).for_each(|(bytes, number)| bytes.copy_from_slice(&number));
    ChaCha8Rng::from_seed(key)
}

/// The distribution of the token after each row of logits `[N, V]`, above temperature 0: probabilities within the nucleus, 0 outside it.
/// `None` for a row with NaN.
pub fn distributions(logits_nv: &Tensor, sampling: Sampling) -> Vec<Option<Vec<f64>>> {
    let p_nv = tempered(logits_nv, sampling.temperature.get()).softmax(-1, Kind::Float);
    let vocabulary = p_nv.size()[1].unsigned_abs() as usize;
    let p: Vec<f32> = Vec::try_from(p_nv.reshape([-1])).expect("one axis of float32");
    p.chunks_exact(vocabulary).map(|p_v| kept(p_v, sampling)).collect()
}

/// Probabilities `[V]`, those outside the nucleus set to 0 and the others normalised; `None` if one is NaN.
fn kept(p_v: &[f32], sampling: Sampling) -> Option<Vec<f64>> {
    let least = least_kept(p_v, sampling);
    let kept = |(id, &p): (usize, &f32)| if by_probability(&(p, id), &least).is_gt() { 0.0 } else { f64::from(p) };
    let mut p: Vec<f64> = p_v.iter().enumerate().map(kept).collect();
    let mass: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= mass);
    (mass.is_finite() && mass > 0.0).then_some(p)
}

/// The token that `uniform` (from 0 to below 1) selects from the nucleus: in id order, each token takes up a share of that range
/// equal to its probability within the nucleus. [`NO_TOKEN`] if probabilities are NaN.
pub(crate) fn token_at(p_v: &[f32], top_p: f64, uniform: f64) -> i64 {
    token_of(p_v, least_in_nucleus(p_v, top_p), uniform)
}

/// As [`token_at`], of the tokens down to `least`.
fn token_of(p_v: &[f32], least: (f32, usize), uniform: f64) -> i64 {
    let kept = || p_v.iter().enumerate().filter(|(id, p)| !by_probability(&(**p, *id), &least).is_gt());
    let mass: f64 = kept().map(|(_, &p)| f64::from(p)).sum();
    if !(mass.is_finite() && mass > 0.0) {
        return NO_TOKEN;
    }
    // Rounding may put the product at the mass, which is the last sum.
    let drawn = (uniform * mass).min(mass.next_down());
    let mut below = 0.0;
    let chosen = kept().find(|(_, p)| {
        below += f64::from(**p);
        below > drawn
    });
    chosen.map_or(NO_TOKEN, |(id, _)| id as i64)
}

/// The lowest temperature above 0: the least normal number of float32, in which logits are divided.
pub(crate) const COLDEST: f64 = f32::MIN_POSITIVE as f64;

/// Logits `[…, V]` in float32, divided by a temperature above 0. The largest of each row becomes 0, so that none overflows.
pub(crate) fn tempered(logits: &Tensor, temperature: f64) -> Tensor {
    below_largest(logits) / temperature.max(COLDEST)
}

/// Logits `[…, V]` in float32, the largest of each row subtracted.
fn below_largest(logits: &Tensor) -> Tensor {
    let logits = logits.to_kind(Kind::Float);
    &logits - logits.amax([-1].as_slice(), true)
}

/// The entropy of each row of log-probabilities `[N, V]`: `[N]` float64. A token of probability 0 adds nothing.
pub(crate) fn entropies(log_p_nv: &Tensor) -> Tensor {
    let terms_nv = (log_p_nv.exp() * log_p_nv).masked_fill(&log_p_nv.eq(f64::NEG_INFINITY), 0.0);
    -terms_nv.sum_dim_intlist(-1, false, Kind::Double)
}

/// The next token for each row of logits `[B, V]`, each row with its own sampler. A row's token does not depend on the other rows.
pub fn next_of_each(logits_bv: &Tensor, samplers: &mut [&mut Sampler]) -> Vec<i64> {
    let is_greedy = |sampler: &Sampler| sampler.sampling.temperature.get() == 0.0;
    let greedy = samplers.iter().filter(|sampler| is_greedy(sampler)).count();
    if greedy == samplers.len() {
        return if greedy == 0 { vec![] } else { on_host(&most_probable(logits_bv)) };
    }
    if greedy == 0 {
        return drawn_of_each(logits_bv, samplers);
    }
    let best = on_host(&most_probable(logits_bv));
    let mut drawing: Vec<(i64, &mut Sampler)> = vec![];
    for (row, sampler) in (0..).zip(samplers.iter_mut()).filter(|(_, sampler)| !is_greedy(sampler)) {
        drawing.push((row, sampler));
    }
    let (rows, mut drawing): (Vec<i64>, Vec<&mut Sampler>) = drawing.into_iter().unzip();
    let tokens = drawn_of_each(&logits_bv.index_select(0, &upload(&rows, logits_bv.device())), &mut drawing);
    let mut next = best;
    rows.into_iter().zip(tokens).for_each(|(row, token)| next[row.unsigned_abs() as usize] = token);
    next
}

/// As [`next_of_each`] where all temperatures are above 0.
fn drawn_of_each(logits_bv: &Tensor, samplers: &mut [&mut Sampler]) -> Vec<i64> {
    if logits_bv.device() == Device::Cpu {
        drawn_on_host(logits_bv, samplers)
    } else {
        on_host(&drawn_in_place(logits_bv, samplers))
    }
}

/// As [`drawn_of_each`], on the device of the logits: `[B]`, int64. Rows of the same top-k and top-p share a pass.
fn drawn_in_place(logits_bv: &Tensor, samplers: &mut [&mut Sampler]) -> Tensor {
    let device = logits_bv.device();
    let uniforms: Vec<f64> = samplers.iter_mut().map(|sampler| sampler.uniform()).collect();
    let (p_bv, uniforms_b) = (probabilities(logits_bv, samplers), upload(&uniforms, device));
    let kept = |row: usize| (samplers[row].sampling.top_k, samplers[row].sampling.top_p.get());
    let mut left: Vec<usize> = (0..samplers.len()).collect();
    let ids_b = uniforms_b.empty_like().to_kind(Kind::Int64);
    while let Some(&first) = left.first() {
        let (top_k, top_p) = kept(first);
        let (same, others): (Vec<usize>, Vec<usize>) = left.into_iter().partition(|&row| kept(row) == (top_k, top_p));
        if same.len() == samplers.len() {
            return draw(&p_bv, top_k, top_p, &uniforms_b);
        }
        let rows_s = upload(&same.iter().map(|&row| row as i64).collect::<Vec<_>>(), device);
        let [p_sv, uniforms_s] = [&p_bv, &uniforms_b].map(|x| x.index_select(0, &rows_s));
        let _ = ids_b.shallow_clone().index_copy_(0, &rows_s, &draw(&p_sv, top_k, top_p, &uniforms_s));
        left = others;
    }
    ids_b
}

/// As [`drawn_of_each`]: the oracle of [`drawn_in_place`], and faster on a CPU.
fn drawn_on_host(logits_bv: &Tensor, samplers: &mut [&mut Sampler]) -> Vec<i64> {
    let p_bv = probabilities(logits_bv, samplers);
    let vocabulary = p_bv.size()[1].unsigned_abs() as usize;
    let p: Vec<f32> = Vec::try_from(p_bv.reshape([-1])).expect("one axis of float32");
    p.chunks_exact(vocabulary).zip(samplers).map(|(p_v, sampler)| sampler.draw(p_v)).collect()
}

/// Probabilities of logits `[B, V]`, each row at its sampler's temperature.
fn probabilities(logits_bv: &Tensor, samplers: &[&mut Sampler]) -> Tensor {
    let divisor = |sampler: &&mut Sampler| sampler.sampling.temperature.get().max(COLDEST) as f32;
    let divisors: Vec<f32> = samplers.iter().map(divisor).collect();
    let logits_bv = below_largest(logits_bv);
    // Not by `tempered`, even for one temperature: a GPU divides by a number and by a tensor with different rounding.
    (&logits_bv / upload(&divisors, logits_bv.device()).unsqueeze(1)).softmax(-1, Kind::Float)
}

fn on_host(ids_b: &Tensor) -> Vec<i64> {
    Vec::try_from(ids_b).expect("one axis of int64")
}

/// More probable tokens first; ties go to the lower id.
fn by_probability(a: &(f32, usize), b: &(f32, usize)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The least probable token that top-k and top-p keep.
fn least_kept(p_v: &[f32], sampling: Sampling) -> (f32, usize) {
    let top_p = sampling.top_p.get();
    let Some(top_k) = sampling.top_k.filter(|top_k| top_k.get() < p_v.len()) else {
        return least_in_nucleus(p_v, top_p);
    };
    let mut tokens: Vec<(f32, usize)> = p_v.iter().copied().zip(0..).collect();
    tokens.select_nth_unstable_by(top_k.get() - 1, by_probability);
    tokens.truncate(top_k.get());
    tokens.sort_unstable_by(by_probability);
    let all: f64 = tokens.iter().map(|(p, _)| f64::from(*p)).sum();
    let mut mass = 0.0;
    let reaches = |(p, _): &&(f32, usize)| {
        mass += f64::from(*p);
        top_p < 1.0 && mass >= top_p * all
    };
    *tokens.iter().find(reaches).unwrap_or(&tokens[tokens.len() - 1])
}

/// The least probable token of the nucleus, which is the smallest set of most probable tokens that reaches `top_p`. Bisects by
/// probability instead of sorting the vocabulary.
fn least_in_nucleus(p_v: &[f32], top_p: f64) -> (f32, usize) {
    if top_p >= 1.0 {
        return (0.0, usize::MAX);
    }
    let mut tokens: Vec<(f32, usize)> = p_v.iter().copied().zip(0..).collect();
    let (mut inside, mut end, mut mass) = (0, tokens.len(), 0.0);
    while end - inside > 1 {
        let middle = (end - inside) / 2;
        let range = &mut tokens[inside..end];
        range.select_nth_unstable_by(middle, by_probability);
        let upper: f64 = range[..middle].iter().map(|(p, _)| f64::from(*p)).sum();
        if mass + upper >= top_p {
            end = inside + middle;
        } else {
            (inside, mass) = (inside + middle, mass + upper);
        }
    }
    tokens[inside]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::torch::Generator;

    fn sampling(temperature: f64, top_p: f64) -> Sampling {
        Sampling {
            temperature: NonNegative::new(temperature).unwrap(),
            top_k: None,
            top_p: Probability::new(top_p).expect("above 0, at most 1"),
        }
    }

    fn often(logits: &[f32], sampling: Sampling) -> Vec<f64> {
        let logits_1v = Tensor::from_slice(logits).unsqueeze(0);
        let mut sampler = Sampler::new(sampling, Stream { seed: 3, ..Stream::default() });
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..4000 {
            counts[sampler.next(&logits_1v).id as usize] += 1.0 / 4000.0;
        }
        counts
    }

    #[test]
    fn a_token_of_probability_0_has_no_part_in_the_entropy() {
        let logits_nv = Tensor::from_slice2(&[[3f32, 3.0, f32::NEG_INFINITY], [0.0, 1.0, 2.0]]);
        let entropies = Vec::<f64>::try_from(entropies(&tempered(&logits_nv, 1e-38).log_softmax(-1, Kind::Float)));
        assert_eq!(entropies.unwrap(), [f64::from(2f32.ln()), 0.0]);
    }

    #[test]
    fn without_probability_no_token_is_drawn() {
        assert_eq!(token_of(&[0.0, 0.0], (0.0, 1), 0.5), NO_TOKEN);
        assert_eq!(token_of(&[0.0, 0.25], (0.0, 0), 0.5), 1);
    }

    #[test]
    fn at_temperature_0_each_row_gets_its_most_probable_token() {
        let logits = [[1f32, 3.0, 2.0], [4.0, 0.0, 1.0]];
        for (rows, expected) in [(0, vec![]), (1, vec![1]), (2, vec![1, 0])] {
            let logits_bv = Tensor::from_slice2(&logits).narrow(0, 0, rows);
            let mut samplers: Vec<Sampler> =
                (0..rows).map(|_| Sampler::new(sampling(0.0, 1.0), Stream::default())).collect();
            assert_eq!(next_of_each(&logits_bv, &mut samplers.iter_mut().collect::<Vec<_>>()), expected);
        }
    }

    #[test]
    fn a_sum_that_is_exactly_top_p_ends_the_nucleus() {
        let two = Sampling { top_k: NonZeroUsize::new(2), ..sampling(1.0, 0.5) };
        assert_eq!(least_kept(&[0.25, 0.25, 0.125], two), (0.25, 0));
    }

    #[test]
    fn samples_come_as_often_as_their_probability_says() {
        let p = [0.5, 0.05, 0.15, 0.3];
        let logits = p.map(|p: f32| 2.0 * p.ln()); // temperature 2 undoes the square
        for (top_p, expected) in [(1.0, p), (0.9, [0.526, 0.0, 0.158, 0.316]), (0.5, [1.0, 0.0, 0.0, 0.0])] {
            for (often, p) in often(&logits, sampling(2.0, top_p)).iter().zip(expected) {
                assert!((often - f64::from(p)).abs() < 0.025, "{often} for {p}, top-p {top_p}"); // three standard deviations
            }
        }
    }

    #[test]
    fn top_k_keeps_the_most_probable_tokens_and_top_p_is_of_their_probability() {
        let p = [0.5, 0.05, 0.15, 0.3];
        let logits = p.map(|p: f32| p.ln());
        let limited = |top_k, top_p| Sampling { top_k: NonZeroUsize::new(top_k), ..sampling(1.0, top_p) };
        let cases = [
            (limited(1, 1.0), [1.0, 0.0, 0.0, 0.0]),
            (limited(2, 1.0), [0.625, 0.0, 0.0, 0.375]),
            (limited(3, 0.8), [0.625, 0.0, 0.0, 0.375]), // 0.8 of 0.95 is less than 0.5 + 0.3
            (limited(9, 0.9), [0.526, 0.0, 0.158, 0.316]),
            (limited(4, 1.0), [0.5, 0.05, 0.15, 0.3]),
        ];
        for (sampling, expected) in cases {
            let p = distributions(&Tensor::from_slice(&logits).unsqueeze(0), sampling).swap_remove(0).expect("no NaN");
            let drawn = often(&logits, sampling);
            for token in 0..4 {
                assert!((p[token] - expected[token]).abs() < 1e-3, "{sampling:?}: {p:?}");
                assert!((drawn[token] - expected[token]).abs() < 0.025, "{sampling:?}: {drawn:?}"); // three standard deviations
            }
        }
        let equal = limited(2, 1.0);
        let p = distributions(&Tensor::from_slice(&[0f32; 4]).unsqueeze(0), equal).swap_remove(0).expect("no NaN");
        assert_eq!(p, [0.5, 0.5, 0.0, 0.0], "of equals, the first");
    }

    #[test]
    fn a_row_draws_the_same_whatever_stands_beside_it() {
        let logits_bv = Generator::seeded(1).normal(&[5, 40], (Kind::Float, tch::Device::Cpu));
        let sampler = |row: u64| Sampler::new(sampling(0.8, 0.9), Stream { seed: 1, index: row, ..Stream::default() });
        let mut samplers: Vec<Sampler> = (0..5).map(sampler).collect();
        let mut together: Vec<&mut Sampler> = samplers.iter_mut().collect();
        let drawn = [(); 3].map(|()| next_of_each(&logits_bv, &mut together));
        for row in 0..5 {
            let mut alone = sampler(row as u64);
            let expected = [(); 3].map(|()| alone.next(&logits_bv.narrow(0, row, 1)).id);
            assert_eq!([0, 1, 2].map(|draw: usize| drawn[draw][row as usize]), expected);
        }
        assert!(drawn[0] != drawn[1] || drawn[1] != drawn[2], "five rows never draw the same three times");
    }

    #[test]
    fn rows_of_different_settings_draw_what_each_draws_alone() {
        let all: Vec<Sampling> = settings().chain([sampling(0.0, 1.0), sampling(0.0, 0.5)]).collect();
        let rows = all.len() as i64;
        let logits_bv = Generator::seeded(2).normal(&[rows, 60], (Kind::Float, Device::Cpu)) * 3.0;
        let row_samplers = || -> Vec<Sampler> {
            let sampler = |(index, &sampling)| Sampler::new(sampling, Stream { index, ..Stream::default() });
            (0..).zip(&all).map(sampler).collect()
        };
        let mut alone = row_samplers();
        let expected: Vec<Vec<i64>> = (0..20)
            .map(|_| (0..).zip(&mut alone).map(|(row, one)| one.next(&logits_bv.narrow(0, row, 1)).id).collect())
            .collect();
        assert_eq!(drawn(&logits_bv, row_samplers(), 20, next_of_each), expected);
        let above_0 = logits_bv.narrow(0, 0, rows - 2);
        let drawing: Vec<Sampler> = row_samplers().into_iter().take(all.len() - 2).collect();
        let expected: Vec<&[i64]> = expected.iter().map(|row| &row[..all.len() - 2]).collect();
        assert_eq!(ids(drawn(&above_0, drawing, 20, drawn_in_place)), expected, "in place");
    }

    /// Probabilities of five rows, and the settings of the tests below.
    fn settings() -> impl Iterator<Item = Sampling> {
        let limited =
            |(temperature, top_p, top_k)| Sampling { top_k: NonZeroUsize::new(top_k), ..sampling(temperature, top_p) };
        [
            (1.0, 1.0, 0),
            (0.3, 1.0, 0),
            (0.8, 0.9, 0),
            (1.5, 0.5, 0),
            (1.0, 1.0, 3),
            (1.0, 0.8, 7),
            (0.7, 0.95, 90),
            (0.01, 0.9, 2),
        ]
        .into_iter()
        .map(limited)
    }

    fn samplers(sampling: Sampling, rows: u64, seed: u64) -> Vec<Sampler> {
        (0..rows).map(|index| Sampler::new(sampling, Stream { seed, index, ..Stream::default() })).collect()
    }

    /// What the function draws `count` times from the same logits, with one sampler for each row.
    fn drawn<T>(
        logits_bv: &Tensor,
        mut row_samplers: Vec<Sampler>,
        count: usize,
        draw: impl Fn(&Tensor, &mut [&mut Sampler]) -> T,
    ) -> Vec<T> {
        let mut row_samplers: Vec<&mut Sampler> = row_samplers.iter_mut().collect();
        (0..count).map(|_| draw(logits_bv, &mut row_samplers)).collect()
    }

    fn ids(ids_b: Vec<Tensor>) -> Vec<Vec<i64>> {
        ids_b.into_iter().map(|ids_b| Vec::try_from(ids_b).expect("one axis of int64")).collect()
    }

    /// Also where many tokens are equally probable: bfloat16 logits are multiples of a power of two.
    #[test]
    fn tokens_drawn_in_place_are_those_drawn_on_the_host() {
        for (vocabulary, seed) in [(1, 1), (2, 2), (50, 3), (700, 4)] {
            let normal = Generator::seeded(seed).normal(&[5, vocabulary], (Kind::Float, Device::Cpu));
            for logits_bv in
                [&normal * 3.0, (&normal * 2.0).round(), normal.zeros_like(), (&normal * 3.0).to_kind(Kind::BFloat16)]
            {
                for sampling in settings() {
                    let row_samplers = || samplers(sampling, 5, seed);
                    let on_host = drawn(&logits_bv, row_samplers(), 40, drawn_on_host);
                    assert_eq!(
                        ids(drawn(&logits_bv, row_samplers(), 40, drawn_in_place)),
                        on_host,
                        "{vocabulary}, {sampling:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_row_with_nan_draws_no_token_in_place_and_the_others_do() {
        let logits_bv = Generator::seeded(6).normal(&[4, 30], (Kind::Float, Device::Cpu));
        for (row, value) in [(0, f64::NAN), (2, f64::INFINITY)] {
            let _ = logits_bv.select(0, row).narrow(0, 7, 1).fill_(value);
        }
        let _ = logits_bv.select(0, 3).narrow(0, 1, 29).fill_(f64::NEG_INFINITY);
        for sampling in settings() {
            let on_host = drawn(&logits_bv, samplers(sampling, 4, 9), 3, drawn_on_host);
            assert_eq!(ids(drawn(&logits_bv, samplers(sampling, 4, 9), 3, drawn_in_place)), on_host);
            assert!(
                on_host.iter().all(|row| [row[0], row[2], row[3]] == [NO_TOKEN, NO_TOKEN, 0] && row[1] != NO_TOKEN)
            );
        }
    }

    /// Pearson's chi-square of what is drawn in place, against the distribution that [`distributions`] computes by another way.
    #[test]
    fn tokens_drawn_in_place_follow_the_distribution() {
        const ROWS: i64 = 200;
        let logits_1v = Generator::seeded(11).normal(&[1, 24], (Kind::Float, Device::Cpu));
        let logits_bv = logits_1v.expand([ROWS, 24], false);
        for sampling in settings() {
            let p = distributions(&logits_1v, sampling).swap_remove(0).expect("no NaN");
            let mut counts = [0.0; 24];
            let all = ids(drawn(&logits_bv, samplers(sampling, ROWS.unsigned_abs(), 12), 100, drawn_in_place)).concat();
            all.iter().for_each(|&id| counts[usize::try_from(id).expect("a token")] += 1.0);
            // Tokens that are expected fewer than five times count as one.
            let (mut chi_square, mut cells, mut rare) = (0.0, 0.0, [0.0, 0.0]);
            for (count, expected) in counts.into_iter().zip(&p).map(|(count, p)| (count, p * all.len() as f64)) {
                assert!(expected > 0.0 || count == 0.0, "a token that is not kept was drawn");
                if expected < 5.0 {
                    rare = [rare[0] + count, rare[1] + expected];
                } else {
                    (chi_square, cells) = (chi_square + (count - expected).powi(2) / expected, cells + 1.0);
                }
            }
            if rare[1] > 0.0 {
                (chi_square, cells) = (chi_square + (rare[0] - rare[1]).powi(2) / rare[1].max(1.0), cells + 1.0);
            }
            let (mean, deviation) = (cells - 1.0, (2.0 * (cells - 1.0_f64)).sqrt());
            assert!(chi_square <= mean + 4.0 * deviation + 1e-9, "{chi_square} of {cells} cells: {sampling:?}");
        }
    }

    proptest! {
        #[test]
        fn the_nucleus_is_a_sorted_list_cut_off(weights in proptest::collection::vec(0u8..20, 1..60), top_p in 0.01f64..1.0) {
            let total: f32 = weights.iter().map(|&w| f32::from(w)).sum::<f32>().max(1.0);
            let p: Vec<f32> = weights.iter().map(|&w| f32::from(w) / total).collect();
            let mut sorted: Vec<(f32, usize)> = p.iter().copied().zip(0..).collect();
            sorted.sort_by(by_probability);
            let mut mass = 0.0;
            let expected = sorted.iter().find(|(p, _)| { mass += f64::from(*p); mass >= top_p });
            let expected = expected.unwrap_or(&sorted[sorted.len() - 1]);
            let got = least_in_nucleus(&p, top_p);
            let mass_to = |last: usize| sorted[..=last].iter().map(|(p, _)| f64::from(*p)).sum::<f64>();
            let at = |token: &(f32, usize)| sorted.iter().position(|other| other == token).expect("a token");
            let by_rounding = (mass_to(at(&got).min(at(expected))) - top_p).abs() < 1e-9; // sums in another order
            prop_assert!(got == *expected || by_rounding, "{got:?}, expected {expected:?}");
        }
    }
}
