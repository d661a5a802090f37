//! The law of the tokens, counted over many draws.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const P: [f64; 5] = [0.05, 0.4, 0.0, 0.3, 0.25];
/// Unlike [`P`]: token 2 is never right, token 4 is never drawn.
const Q: [f64; 5] = [0.3, 0.2, 0.2, 0.3, 0.0];
const R: [f64; 5] = [0.1, 0.1, 0.1, 0.1, 0.6];

fn joined(guesses: Vec<DrawnChildren>) -> DrawnChildren {
    let mut all = DrawnChildren::default();
    for one in guesses {
        let first = all.sources.len();
        let moved = |guess: &Draw| Draw { source: guess.source.map(|source| first + source), ..*guess };
        all.guesses.extend(one.guesses.iter().map(moved));
        all.sources.extend(one.sources);
    }
    all
}

fn not_drawn(token: i64) -> DrawnChildren {
    DrawnChildren { guesses: vec![Draw { token, source: None }], sources: vec![] }
}

/// A rule of acceptance: the token after a node.
type Rule = fn(Vec<f64>, &DrawnChildren, &mut dyn FnMut() -> f64) -> Option<i64>;

fn lossless(p: Vec<f64>, children: &DrawnChildren, uniform: &mut dyn FnMut() -> f64) -> Option<i64> {
    next_token(p, children, uniform)
}

/// Wrong: a rejected guess leaves p as it is.
fn without_residual(p: Vec<f64>, children: &DrawnChildren, uniform: &mut dyn FnMut() -> f64) -> Option<i64> {
    let accepted = children.guesses.iter().find(|guess| {
        let q = guess.source.map_or(1.0, |source| children.sources[source][guess.token as usize]);
        uniform() * q < p[guess.token as usize]
    });
    accepted.map(|guess| guess.token).or_else(|| draw(&p, uniform).map(|token| token as i64))
}

/// How far the shares of 30,000 tokens are from `P`, in standard deviations of the worst token.
fn deviation(rule: Rule, guesses: impl Fn(&mut ChaCha8Rng) -> DrawnChildren) -> f64 {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (draws, mut counts) = (30_000, [0u32; 5]);
    for _ in 0..draws {
        let children = guesses(&mut rng);
        let token = rule(P.to_vec(), &children, &mut || rng.random()).expect("a distribution");
        counts[token as usize] += 1;
    }
    assert_eq!(counts[2], 0, "a token of probability 0");
    let off = |(count, p): (&u32, &f64)| {
        let expected = p * f64::from(draws);
        (f64::from(*count) - expected).abs() / (expected * (1.0 - p)).sqrt().max(1.0)
    };
    counts.iter().zip(&P).map(off).fold(0.0, f64::max)
}

#[test]
fn the_token_has_the_backbones_distribution_whatever_was_guessed() {
    let draw =
        |q: [f64; 5], count: usize, rng: &mut ChaCha8Rng| DrawnChildren::draw(q.to_vec(), count, || rng.random());
    for count in 1..=4 {
        let off = deviation(lossless, |rng| draw(Q, count, rng));
        assert!(off < 4.0, "{count} guesses of one source: {off}");
        let wrong = deviation(without_residual, |rng| draw(Q, count, rng));
        assert!(wrong > 10.0, "{count} guesses without the residual: {wrong}");
    }
    let off = deviation(lossless, |rng| joined(vec![draw(Q, 2, rng), draw(R, 2, rng)]));
    assert!(off < 4.0, "two sources: {off}");
    let off = deviation(lossless, |rng| joined(vec![not_drawn(3), draw(Q, 2, rng), not_drawn(1)]));
    assert!(off < 4.0, "drawn guesses and others: {off}");
    let short = |rng: &mut ChaCha8Rng| DrawnChildren::draw(vec![0.5, 0.5], 3, || rng.random());
    assert!(deviation(lossless, short) < 4.0, "a source with a smaller vocabulary");
}

#[test]
fn one_guess_is_accepted_as_often_as_the_distributions_overlap() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let accepted = |rng: &mut ChaCha8Rng| {
        let children = DrawnChildren::draw(Q.to_vec(), 1, || rng.random());
        next_token(P.to_vec(), &children, || rng.random()) == Some(children.guesses[0].token)
    };
    let rate = (0..30_000).filter(|_| accepted(&mut rng)).count() as f64 / 30_000.0;
    assert!((rate - (0.05 + 0.2 + 0.3)).abs() < 0.012, "{rate}"); // Σ min(p, q); four standard deviations
}

#[test]
fn a_source_that_equals_the_backbone_is_never_rejected() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for _ in 0..1000 {
        let children = DrawnChildren::draw(P.to_vec(), 1, || rng.random());
        assert_eq!(next_token(P.to_vec(), &children, || rng.random()), Some(children.guesses[0].token));
    }
}

#[test]
fn draws_without_replacement_end_where_the_tokens_do() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let children = DrawnChildren::draw(Q.to_vec(), 9, || rng.random());
    let mut tokens: Vec<i64> = children.guesses.iter().map(|guess| guess.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3]);
    assert!(DrawnChildren::draw(vec![f64::NAN; 3], 2, || rng.random()).guesses.is_empty());
    assert_eq!(next_token(vec![0.0; 3], &DrawnChildren::default(), || 0.5), None);
}
