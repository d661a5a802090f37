//! Tokens, steps and times of generations, and the paper's acceleration rate, overhead and speedup (appendix B.1).

use std::time::Duration;

/// Tokens, steps and time of one generation, or of several added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// New tokens.
    pub tokens: usize,
    /// Decoding steps after the prompt; plain decoding takes one per token.
    pub steps: usize,
    /// Time of the decoding steps.
    pub decoding: Duration,
    /// Time of the prompt's own forward pass.
    pub prefill: Duration,
}

impl Tally {
    /// Adds another generation's.
    pub fn add(&mut self, other: Tally) {
        self.tokens += other.tokens;
        self.steps += other.steps;
        self.decoding += other.decoding;
        self.prefill += other.prefill;
    }

    /// Mean tokens committed per step: the paper's acceleration rate; 0 without steps.
    pub fn tokens_per_step(&self) -> f64 {
        ratio(self.tokens as f64, self.steps as f64)
    }

    /// Tokens ÷ seconds of decoding.
    pub fn tokens_per_second(&self) -> f64 {
        ratio(self.tokens as f64, self.decoding.as_secs_f64())
    }

    /// Mean milliseconds of a step.
    pub fn step_ms(&self) -> f64 {
        ratio(self.decoding.as_secs_f64() * 1e3, self.steps as f64)
    }
}

/// Tokens that were generated for a text: all of them, also those that end it and are not part of it (the EOS, the tokens of a stop
/// string). vLLM's `usage.completion_tokens` counts them in the same way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GeneratedTokens {
    pub tokens: usize,
    /// The steps that committed them. The token after the prompt counts as a step.
    pub steps: usize,
}

impl GeneratedTokens {
    /// Accepted guesses: all tokens but the one of each step that the backbone chose without a guess.
    pub fn accepted(self) -> usize {
        self.tokens - self.steps
    }
}

/// Plain decoding and decoding with a drafter's guesses, of the same prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Without guesses.
    pub plain: Tally,
    /// With the drafter's guesses.
    pub drafted: Tally,
}

impl Comparison {
    /// Tokens that a step with guesses commits.
    pub fn acceleration_rate(&self) -> f64 {
        self.drafted.tokens_per_step()
    }

    /// How much longer a step with guesses takes than a plain one.
    pub fn overhead(&self) -> f64 {
        ratio(self.drafted.step_ms(), self.plain.step_ms())
    }

    /// How many times more tokens a second; the acceleration rate ÷ the overhead.
    pub fn speedup(&self) -> f64 {
        ratio(self.drafted.tokens_per_second(), self.plain.tokens_per_second())
    }
}

/// 0 where nothing was measured: JSON has no NaN.
fn ratio(of: f64, to: f64) -> f64 {
    if to > 0.0 { of / to } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(tokens: usize, steps: usize, millis: u64) -> Tally {
        Tally { tokens, steps, decoding: Duration::from_millis(millis), prefill: Duration::ZERO }
    }

    #[test]
    fn speedup_is_the_acceleration_rate_over_the_overhead() {
        let both = Comparison { plain: tally(300, 300, 600), drafted: tally(300, 100, 250) };
        assert_eq!((both.acceleration_rate(), both.overhead()), (3.0, 1.25));
        assert!((both.speedup() - both.acceleration_rate() / both.overhead()).abs() < 1e-12);
        assert_eq!(both.plain.tokens_per_second(), 500.0);
    }

    #[test]
    fn nothing_measured_is_zero_and_not_nan() {
        let none = Comparison::default();
        assert_eq!((none.acceleration_rate(), none.overhead(), none.speedup()), (0.0, 0.0, 0.0));
    }
}
