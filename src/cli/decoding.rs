//! Flags of sampling, acceptance and stopping, shared by `generate`, `chat` and `bench`.

use std::num::NonZeroUsize;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};

use super::UsageError;
use super::numbers::{above_zero, positive, probability, temperature};
use crate::decode::request::Request;
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{NonNegative, Positive, Probability};
use crate::tree::accept::{Acceptance, TypicalAcceptance};

/// Sampling and acceptance.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Decoding")]
pub struct DecodingFlags {
    /// Maximum number of new tokens.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 is greedy. Above 0, --acceptance decides which guesses are accepted.
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: NonNegative,
    /// Draw from the K most probable tokens only [default: from all].
    #[arg(long, value_name = "K", value_parser = above_zero::<NonZeroUsize>)]
    pub top_k: Option<NonZeroUsize>,
    /// Nucleus sampling: draw from the smallest set of tokens whose probability reaches P [default: 1; 0.8 with --acceptance nucleus].
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub top_p: Option<Probability>,
    /// Penalty for tokens that already occur in the prompt or the output; 1 is none. As in transformers: positive logits are divided
    /// by it, negative ones multiplied.
    #[arg(long, value_name = "X", default_value = "1", value_parser = positive, allow_negative_numbers = true)]
    pub repetition_penalty: Positive,
    /// Acceptance rule at temperatures above 0.
    #[arg(long, value_enum, value_name = "RULE", default_value_t = AcceptanceName::Typical)]
    pub acceptance: AcceptanceName,
    /// ε of typical acceptance: a guess with at least this probability is always accepted.
    #[arg(long, value_name = "EPSILON", default_value = "0.09", value_parser = probability, allow_negative_numbers = true)]
    pub posterior_threshold: Probability,
    /// δ of typical acceptance: a guess is accepted above δ·exp(-entropy) [default: √ε].
    #[arg(long, value_name = "DELTA", value_parser = positive, allow_negative_numbers = true)]
    pub posterior_alpha: Option<Positive>,
}

/// Where generation stops.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Decoding")]
pub struct StopFlags {
    /// Stop before this string; may be repeated.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
}

/// `--acceptance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AcceptanceName {
    /// Only the most probable token, at any temperature. Not lossless above 0.
    Greedy,
    /// Tokens probable enough under the backbone (paper section 2.3.1). Not lossless.
    Typical,
    /// Tokens in the top-p nucleus; each step's first token is sampled from it. Not lossless.
    Nucleus,
    /// Tokens that the backbone samples itself. Lossless: the distribution of plain decoding, and with the same seed the same text.
    Rejection,
}

/// Default top-p of nucleus acceptance, as in the published code.
const NUCLEUS_TOP_P: f64 = 0.8;

impl DecodingFlags {
    /// The acceptance rule.
    ///
    /// # Errors
    /// [`UsageError`] for nucleus acceptance with top-p 1.
    pub fn acceptance(&self) -> Result<Acceptance, UsageError> {
        match self.acceptance {
            AcceptanceName::Greedy => Ok(Acceptance::Greedy),
            AcceptanceName::Typical => {
                let mut rule = TypicalAcceptance::with_threshold(self.posterior_threshold.get());
                rule.posterior_alpha = self.posterior_alpha.map_or(rule.posterior_alpha, Positive::get);
                Ok(Acceptance::Typical(rule))
            }
            AcceptanceName::Nucleus if self.top_p() == Probability::ONE => Err(UsageError(
                "--acceptance nucleus with --top-p 1 would accept every guess; give --top-p below 1, or --acceptance rejection".into(),
            )),
            AcceptanceName::Nucleus => Ok(Acceptance::Nucleus),
            AcceptanceName::Rejection => Ok(Acceptance::Rejection),
        }
    }

    fn top_p(&self) -> Probability {
        let nucleus = Probability::new(NUCLEUS_TOP_P).filter(|_| self.acceptance == AcceptanceName::Nucleus);
        self.top_p.or(nucleus).unwrap_or(Probability::ONE)
    }

    /// A request to continue `prompt`, sampling from `stream`.
    pub fn request<'p>(&self, prompt: &'p [i64], stream: Stream) -> Request<'p> {
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p() };
        let repetition_penalty = self.repetition_penalty;
        Request { sampling, repetition_penalty, stream, ..Request::greedy(prompt, self.max_new_tokens) }
    }
}
