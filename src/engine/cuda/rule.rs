//! Kinds of steps: their nodes, those of the next step, and the acceptance rule.

use crate::tree::accept::TypicalAcceptance;

/// Which nodes the device accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Guesses that are the most probable token.
    Greedy,
    /// Guesses that are probable enough.
    Typical {
        /// ε and δ.
        rule: TypicalAcceptance,
        /// Above 0.
        temperature: f64,
    },
    /// Guesses that are drawn: speculative sampling, and of one node plain sampling.
    Draw {
        /// Above 0.
        temperature: f64,
        /// Probability of the nucleus that is drawn from.
        top_p: f64,
    },
}

/// Steps of one key launch the same kernels with the same arguments: one CUDA graph replays them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepKey {
    /// The step's nodes are the tree's; else it is one node.
    pub has_tree: bool,
    /// So are those of the step after it.
    pub then_tree: bool,
    /// Its numbers are arguments of kernels.
    pub rule: Rule,
}
