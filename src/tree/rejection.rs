//! Speculative sampling with the distributions that guesses were drawn from (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; several
//! guesses at a node: SpecInfer, Miao et al. 2024, arXiv 2305.09781, algorithm 2). Pure decisions on probabilities; no tensors here.

use std::rc::Rc;

/// The guesses below one node, in the order in which they were drawn.
#[derive(Debug, Clone, Default)]
pub struct DrawnChildren {
    /// A token may come twice, from different sources.
    pub guesses: Vec<Draw>,
    /// Distributions over the vocabulary: tokens that a list is too short for have probability 0. Each source draws **without
    /// replacement**: after a draw, its token gets probability 0, and the others share the rest.
    pub sources: Vec<Rc<Vec<f64>>>,
}

/// A guess, and how it came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    pub token: i64,
    /// Index into [`DrawnChildren::sources`]; `None` if the guess was not drawn.
    pub source: Option<usize>,
}

impl DrawnChildren {
    /// Draws up to `count` different guesses from `q`. There are fewer if fewer tokens have a probability.
    pub fn draw(q: Vec<f64>, count: usize, mut uniform: impl FnMut() -> f64) -> Self {
        let mut rest = q.clone();
        let draws = (0..count).map_while(|_| {
            let token = draw(&rest, &mut uniform)?;
            rest[token] = 0.0;
            Some(Draw { token: token as i64, source: Some(0) })
        });
        let guesses = draws.collect();
        Self { guesses, sources: vec![Rc::new(q)] }
    }
}

/// The token after a node, given its guesses: one of them, or a token that none of them holds. `None` if `p` has no mass.
///
/// The token is distributed as `p`, the backbone's distribution, which is normalised. Draw x₁ was drawn from q₁, the next one from q₂,
/// and so on; a guess that was not drawn has q(x) = 1. With p₁ = `p`, guess xᵢ is accepted with probability min(1, pᵢ(xᵢ)/qᵢ(xᵢ)); if
/// it is rejected, pᵢ₊₁ = norm(max(0, pᵢ - qᵢ)). After the last guess, the token is drawn from what is left.
///
/// Proof, by induction from the last guess to the first: given everything that was drawn and rejected before guess i, the token that
/// results is distributed as pᵢ. Behind the last guess this is how it is drawn. Before that, xᵢ is distributed as qᵢ given what was drawn
/// before (qᵢ is a source without its earlier draws), so
///
/// ```text
/// P(token = t) = qᵢ(t)·min(1, pᵢ(t)/qᵢ(t)) + P(xᵢ rejected)·pᵢ₊₁(t)
///              = min(pᵢ(t), qᵢ(t)) + (1 - Σₛ min(pᵢ(s), qᵢ(s)))·max(0, pᵢ(t) - qᵢ(t)) / Σₛ max(0, pᵢ(s) - qᵢ(s))
///              = min(pᵢ(t), qᵢ(t)) + max(0, pᵢ(t) - qᵢ(t)) = pᵢ(t),
/// ```
///
/// because Σₛ max(0, pᵢ(s) - qᵢ(s)) = Σₛ (pᵢ(s) - min(pᵢ(s), qᵢ(s))) = 1 - Σₛ min(pᵢ(s), qᵢ(s)). A guess that the tree leaves out may
/// stand in the list: if it is accepted, the path ends there. But whether a node is in the tree must not depend on the guesses below it,
/// or these would no longer be distributed as their qᵢ.
pub fn next_token(mut p: Vec<f64>, children: &DrawnChildren, mut uniform: impl FnMut() -> f64) -> Option<i64> {
    let mut sources: Vec<Vec<f64>> = children.sources.iter().map(|q| q.to_vec()).collect();
    for guess in &children.guesses {
        let at = guess.token as usize;
        let q = match guess.source {
            Some(source) => {
                let q = normalized(&sources[source]);
                sources[source][at] = 0.0;
                q
            }
            None => [vec![0.0; at], vec![1.0]].concat(),
        };
        if uniform() * q[at] < p[at] {
            return Some(guess.token);
        }
        p = residual(&p, &q);
    }
    draw(&p, uniform).map(|token| token as i64)
}

/// norm(max(0, p - q)). Where p and q differ only by rounding, nothing is left, and p stays.
fn residual(p: &[f64], q: &[f64]) -> Vec<f64> {
    let q = q.iter().copied().chain(std::iter::repeat(0.0));
    let rest: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    if rest.iter().sum::<f64>() > 0.0 { normalized(&rest) } else { p.to_vec() }
}

fn normalized(weights: &[f64]) -> Vec<f64> {
    let mass: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / mass).collect()
}

/// Draws an index with a probability in proportion to its weight; `None` if there is no weight.
fn draw(weights: &[f64], mut uniform: impl FnMut() -> f64) -> Option<usize> {
    let drawn = uniform() * weights.iter().sum::<f64>();
    let mut below = 0.0;
    let chosen = weights.iter().position(|weight| {
        below += weight;
        below > drawn
    });
    // Rounding may put `drawn` at the last sum.
    chosen.or_else(|| weights.iter().rposition(|weight| *weight > 0.0))
}

#[cfg(test)]
mod tests;
