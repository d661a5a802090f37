//! Estimates the probability that a path of guesses is right from joint counts. No tensors here.
//!
//! The paper multiplies the accuracies of a path's guesses, as if the heads were independent. But head errors correlate: where
//! head 1 is right the text is easy, and head 2 is right more often. So whole paths are counted, and a path's probability is
//!
//! > P(path·c) = P(path) · (n(path·c) + m·q(c)) / (n(path) + m), P(root) = 1
//!
//! with n the counts and m = `PSEUDO_COUNTS` (Dirichlet smoothing). q decides for paths that were seen rarely. It is the accuracy
//! of guess c given that all earlier heads were right with any guess, smoothed in the same way towards the accuracy of the head
//! alone. No factor exceeds 1, so a child is never more probable than its parent, and neither are siblings together.

/// Pseudo-count of the prior: a path seen this often weighs as much as the prior.
const PSEUDO_COUNTS: f64 = 5.0;

/// How often whole paths of guesses were right.
#[derive(Debug, Clone, PartialEq)]
pub struct PathCounts {
    /// `[h][c]`: accuracy of guess c of head h alone.
    accuracies: Vec<Vec<f64>>,
    /// The root and every path that was seen.
    seen: Vec<Seen>,
    /// `[h][c]`: how often guess c of head h was right after any right path.
    right_behind: Vec<Vec<f64>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Seen {
    count: f64,
    /// Indices of its children in `seen`, by guess. 0, the root's own index, marks a child that was not seen.
    children: Vec<usize>,
}

/// A path in [`PathCounts`], and its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathNode {
    /// The probability that the path is right.
    pub probability: f64,
    /// Number of guesses in the path.
    depth: usize,
    /// Index in `seen`, if the path was seen.
    at: Option<usize>,
}

impl PathCounts {
    /// No counts yet. Paths may use the guesses that have accuracies; heads count as independent, as in the paper.
    pub fn new(accuracies: &[Vec<f64>]) -> Self {
        let right_behind = accuracies.iter().map(|guesses| vec![0.0; guesses.len()]).collect();
        Self { accuracies: accuracies.to_vec(), seen: vec![Seen { count: 0.0, children: Vec::new() }], right_behind }
    }

    /// Counts one step, given the right guesses head by head; every prefix of that path was right too. The path ends at the first
    /// guess without an accuracy.
    pub fn add(&mut self, right: &[usize]) {
        self.seen[0].count += 1.0;
        let mut at = 0;
        for (head, &guess) in right.iter().enumerate() {
            if self.accuracies.get(head).is_none_or(|guesses| guess >= guesses.len()) {
                break;
            }
            at = self.child_of(at, head, guess);
            self.seen[at].count += 1.0;
            self.right_behind[head][guess] += 1.0;
        }
    }

    /// Counts as a calibration lists them: `total` steps, and paths along with all of their prefixes.
    pub fn listed<'a>(
        accuracies: &[Vec<f64>],
        total: u64,
        paths: impl IntoIterator<Item = (&'a [usize], u64)>,
    ) -> Self {
        let mut counts = Self::new(accuracies);
        counts.seen[0].count = total as f64;
        for (path, count) in paths {
            let known = |(head, &guess): (usize, &usize)| accuracies.get(head).is_some_and(|all| guess < all.len());
            let Some(&last) = path.last().filter(|_| path.iter().enumerate().all(known)) else { continue };
            let at = path.iter().enumerate().fold(0, |at, (head, &guess)| counts.child_of(at, head, guess));
            counts.seen[at].count = count as f64;
            counts.right_behind[path.len() - 1][last] += count as f64;
        }
        counts
    }

    /// Index of a path's child, which is created if it is new.
    fn child_of(&mut self, at: usize, head: usize, guess: usize) -> usize {
        let new = self.seen.len();
        let children = &mut self.seen[at].children;
        children.resize(self.accuracies[head].len(), 0);
        if children[guess] == 0 {
            children[guess] = new;
            self.seen.push(Seen { count: 0.0, children: Vec::new() });
            return new;
        }
        children[guess]
    }

    /// Number of steps counted.
    pub fn total(&self) -> f64 {
        self.seen[0].count
    }

    /// The accuracy of each guess of each head.
    pub fn accuracies(&self) -> &[Vec<f64>] {
        &self.accuracies
    }

    /// The empty path, which is always right.
    pub fn root(&self) -> PathNode {
        PathNode { probability: 1.0, depth: 0, at: Some(0) }
    }

    /// The next head's guesses after a path, best guess first.
    pub fn children(&self, parent: PathNode) -> impl Iterator<Item = PathNode> + '_ {
        let above = parent.at.map(|at| &self.seen[at]);
        let parent_count = above.map_or(0.0, |seen| seen.count);
        let general = self.general(parent.depth);
        general.into_iter().enumerate().map(move |(guess, general)| {
            let at = above.and_then(|seen| seen.children.get(guess).copied()).filter(|&at| at != 0);
            let count = at.map_or(0.0, |at| self.seen[at].count);
            let probability = parent.probability * smoothed(count, parent_count, general);
            PathNode { probability, depth: parent.depth + 1, at }
        })
    }

    /// Accuracies of a head's guesses given that all earlier heads were right.
    fn general(&self, head: usize) -> Vec<f64> {
        let Some(accuracies) = self.accuracies.get(head) else { return Vec::new() };
        let asked = match head {
            0 => self.total(),
            _ => self.right_behind[head - 1].iter().sum(),
        };
        accuracies.iter().zip(&self.right_behind[head]).map(|(alone, right)| smoothed(*right, asked, *alone)).collect()
    }
}

fn smoothed(count: f64, of: f64, prior: f64) -> f64 {
    // Exactly the prior where nothing was seen: a path's probability is then the paper's product.
    if of == 0.0 { prior } else { (count + PSEUDO_COUNTS * prior) / (of + PSEUDO_COUNTS) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::replay::strategy::runs;

    fn at(counts: &PathCounts, path: &[usize]) -> PathNode {
        path.iter().fold(counts.root(), |place, &guess| counts.children(place).nth(guess).unwrap())
    }

    #[test]
    fn the_formula_by_hand() {
        let mut counts = PathCounts::new(&[vec![0.6, 0.2], vec![0.4]]);
        for right in [&[0, 0][..], &[0, 0], &[0], &[1], &[]] {
            counts.add(right);
        }
        // Head 1: q = (n + 5a) / (5 + 5), then P = (n + 5q) / (5 + 5).
        let best = ((3.0 + 5.0 * (3.0 + 3.0) / 10.0) / 10.0, at(&counts, &[0]).probability);
        assert!((best.0 - best.1).abs() < 1e-12, "{best:?}");
        // Head 2 was right 2 times after the 4 right guesses of head 1: q = (2 + 5·0.4) / (4 + 5).
        let pair = (best.0 * (2.0 + 5.0 * (4.0 / 9.0)) / (3.0 + 5.0), at(&counts, &[0, 0]).probability);
        assert!((pair.0 - pair.1).abs() < 1e-12, "{pair:?}");
        let unseen = at(&counts, &[1]).probability * (5.0 * (4.0 / 9.0)) / (1.0 + 5.0);
        assert!((at(&counts, &[1, 0]).probability - unseen).abs() < 1e-12);
        assert_eq!(counts.children(at(&counts, &[0, 0])).count(), 0, "there is no head 3");
    }

    #[test]
    fn what_is_seen_often_is_believed() {
        let mut counts = PathCounts::new(&[vec![0.5], vec![0.5]]);
        (0..100_000).for_each(|step| counts.add(if step % 2 == 0 { &[0, 0] } else { &[] }));
        assert!((at(&counts, &[0, 0]).probability - 0.5).abs() < 1e-3, "independent heads would have 0.25");
    }

    proptest! {
        #[test]
        fn no_child_is_above_its_parent_nor_all_siblings_together(runs in runs(3, 3)) {
            let mut counts = PathCounts::new(&vec![vec![0.5, 0.3, 0.2]; 3]);
            runs.iter().flatten().for_each(|right| counts.add(right));
            let mut places = vec![counts.root()];
            while let Some(parent) = places.pop() {
                let children: Vec<PathNode> = counts.children(parent).collect();
                prop_assert!(children.iter().all(|child| child.probability <= parent.probability));
                prop_assert!(children.iter().map(|child| child.probability).sum::<f64>() <= parent.probability + 1e-12);
                places.extend(children);
            }
        }

        #[test]
        fn listed_counts_are_the_added_ones(runs in runs(3, 3)) {
            let accuracies = vec![vec![0.5, 0.3, 0.2]; 3];
            let mut counts = PathCounts::new(&accuracies);
            let mut listed = std::collections::BTreeMap::<&[usize], u64>::new();
            for right in runs.iter().flatten() {
                counts.add(right);
                (1..=right.len()).for_each(|length| *listed.entry(&right[..length]).or_default() += 1);
            }
            let relisted = PathCounts::listed(&accuracies, counts.total() as u64, listed.clone());
            for path in listed.keys() {
                prop_assert_eq!(at(&counts, path).probability, at(&relisted, path).probability);
            }
        }
    }
}
