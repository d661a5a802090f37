//! How texts are decoded and where they end: the flags of `generate`, `chat` and `bench`, and what they mean.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};

use super::UsageError;
use crate::decode::request::Request;
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{NonNegative, Positive, Probability};
use crate::tree::accept::{Acceptance, TypicalAcceptance};

/// How to decode.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Decoding")]
pub struct DecodingFlags {
    /// Stop after so many new tokens.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_new_tokens: usize,
    /// 0 is greedy; above, plain decoding draws tokens, and --acceptance says what heads may guess.
    #[arg(long, value_name = "T", default_value = "0", value_parser = non_negative, allow_negative_numbers = true)]
    pub temperature: NonNegative,
    /// Draw only from the most probable tokens that together have this probability [default: 1; 0.8 with --acceptance nucleus].
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub top_p: Option<Probability>,
    /// Makes tokens that stand in prompt or text less likely, above 1 (Hugging Face's rule: logits are divided by it, negative ones
    /// multiplied).
    #[arg(long, value_name = "X", default_value = "1", value_parser = positive, allow_negative_numbers = true)]
    pub repetition_penalty: Positive,
    /// Which guesses are accepted at a temperature above 0.
    #[arg(long, value_enum, value_name = "RULE", default_value_t = AcceptanceName::Typical)]
    pub acceptance: AcceptanceName,
    /// ε of typical acceptance: a guess so probable is always accepted.
    #[arg(long, value_name = "EPSILON", default_value = "0.09", value_parser = probability, allow_negative_numbers = true)]
    pub posterior_threshold: Probability,
    /// δ of typical acceptance: the flatter the distribution, the less is enough [default: the square root of ε].
    #[arg(long, value_name = "DELTA", value_parser = positive, allow_negative_numbers = true)]
    pub posterior_alpha: Option<Positive>,
}

/// Where texts end.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Decoding")]
pub struct StopFlags {
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
}

/// `--acceptance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AcceptanceName {
    /// The most probable token, whatever the temperature. Not lossless above 0.
    Greedy,
    /// What is probable enough for the backbone's distribution (paper section 2.3.1). Not lossless.
    Typical,
    /// What lies in the top-p nucleus; each step's first token is drawn from it. Not lossless.
    Nucleus,
    /// What the backbone draws itself. Lossless: plain decoding's distribution, and with the same seed its very text.
    Rejection,
}

/// top-p of nucleus acceptance, as in the published code.
const NUCLEUS_TOP_P: f64 = 0.8;

pub(super) fn probability(text: &str) -> Result<Probability, String> {
    Probability::try_from(text.parse::<f64>().map_err(|e| e.to_string())?)
}

pub(super) fn non_negative(text: &str) -> Result<NonNegative, String> {
    NonNegative::try_from(text.parse::<f64>().map_err(|e| e.to_string())?)
}

pub(super) fn positive(text: &str) -> Result<Positive, String> {
    Positive::try_from(text.parse::<f64>().map_err(|e| e.to_string())?)
}

impl DecodingFlags {
    /// The rule they mean.
    ///
    /// # Errors
    /// [`UsageError`] for a nucleus of all tokens.
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

    /// What to decode from `prompt`; `stream` of what is drawn.
    pub fn request<'p>(&self, prompt: &'p [i64], stream: Stream) -> Request<'p> {
        let sampling = Sampling { temperature: self.temperature, top_p: self.top_p() };
        let repetition_penalty = self.repetition_penalty;
        Request { sampling, repetition_penalty, stream, ..Request::greedy(prompt, self.max_new_tokens) }
    }
}
