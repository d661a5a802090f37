//! Kinds of steps: their nodes, those of the next step, and the acceptance rule.

use crate::tree::accept::TypicalAcceptance;

/// Which guesses the device accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Guesses that equal the most probable token.
    Greedy,
    /// Guesses that are probable enough.
    Typical {
        /// ε and δ.
        rule: TypicalAcceptance,
        /// Above 0.
        temperature: f64,
    },
    /// Guesses that equal the drawn token: speculative sampling, or plain sampling if there is only the root.
    Draw {
        /// Above 0.
        temperature: f64,
        /// Probability of the nucleus.
        top_p: f64,
    },
}

/// Steps with equal keys launch the same kernels with the same arguments, so one CUDA graph replays them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepKey {
    /// Whether the step's nodes are the tree's; otherwise it has one node.
    pub has_tree: bool,
    /// The same for the step after it.
    pub then_tree: bool,
    /// Its numbers are kernel arguments.
    pub rule: Rule,
}
