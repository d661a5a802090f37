//! Flags of sampling, acceptance and stopping, shared by `generate`, `chat` and `bench`.

use std::num::NonZeroUsize;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};

use super::UsageError;
use super::numbers::{above_zero, finite, positive, probability, temperature};
use crate::decode::request::Request;
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{Finite, NonNegative, Positive, Probability};
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
    /// Subtract X from the logit of each token for every time that it occurs in the output; 0 is off. As in OpenAI's API.
    #[arg(long, value_name = "X", default_value = "0", value_parser = finite, allow_negative_numbers = true)]
    pub frequency_penalty: Finite,
    /// Subtract X from the logit of each token that occurs in the output; 0 is off. As in OpenAI's API.
    #[arg(long, value_name = "X", default_value = "0", value_parser = finite, allow_negative_numbers = true)]
    pub presence_penalty: Finite,
    /// Acceptance rule at temperatures above 0 [default: typical].
    #[arg(long, value_enum, value_name = "RULE")]
    pub acceptance: Option<AcceptanceName>,
    /// ε of typical acceptance: a guess with at least this probability is always accepted [default: 0.09].
    #[arg(long, value_name = "EPSILON", value_parser = probability, allow_negative_numbers = true)]
    pub posterior_threshold: Option<Probability>,
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

/// The rule of `--posterior-threshold` and `--posterior-alpha`.
pub(super) fn typical(
    posterior_threshold: Option<Probability>,
    posterior_alpha: Option<Positive>,
) -> TypicalAcceptance {
    let rule = posterior_threshold
        .map_or_else(TypicalAcceptance::default, |epsilon| TypicalAcceptance::with_threshold(epsilon.get()));
    TypicalAcceptance { posterior_alpha: posterior_alpha.map_or(rule.posterior_alpha, Positive::get), ..rule }
}

/// Default top-p of nucleus acceptance, as in the published code.
const NUCLEUS_TOP_P: f64 = 0.8;

impl DecodingFlags {
    /// The acceptance rule.
    ///
    /// # Errors
    /// [`UsageError`] for nucleus acceptance with top-p 1.
    pub fn acceptance(&self) -> Result<Acceptance, UsageError> {
        match self.rule() {
            AcceptanceName::Greedy => Ok(Acceptance::Greedy),
            AcceptanceName::Typical => {
                Ok(Acceptance::Typical(typical(self.posterior_threshold, self.posterior_alpha)))
            }
            AcceptanceName::Nucleus if self.top_p() == Probability::ONE => Err(UsageError(
                "--acceptance nucleus with --top-p 1 would accept every guess; give --top-p below 1, or --acceptance rejection".into(),
            )),
            AcceptanceName::Nucleus => Ok(Acceptance::Nucleus),
            AcceptanceName::Rejection => Ok(Acceptance::Rejection),
        }
    }

    /// The name of the acceptance rule.
    pub(super) fn rule(&self) -> AcceptanceName {
        self.acceptance.unwrap_or(AcceptanceName::Typical)
    }

    /// A notice that a flag was given and does nothing: because no token is drawn, nothing is guessed, or another rule accepts.
    pub(super) fn unused_sampling(&self, is_drafted: bool) -> Option<String> {
        let draw_flags = [("--top-k", self.top_k.is_some()), ("--top-p", self.top_p.is_some())];
        let typical_flags = [
            ("--posterior-threshold", self.posterior_threshold.is_some()),
            ("--posterior-alpha", self.posterior_alpha.is_some()),
        ];
        if self.temperature.get() == 0.0 {
            return effect_of(&[draw_flags, typical_flags].concat(), "at --temperature 0, which is greedy");
        }
        // Rejection is what plain decoding does.
        let guess_flags = [("--acceptance", self.acceptance.is_some_and(|rule| rule != AcceptanceName::Rejection))];
        match self.rule() {
            _ if !is_drafted => effect_of(&[&guess_flags[..], &typical_flags].concat(), "without a drafter"),
            AcceptanceName::Greedy => effect_of(
                &[draw_flags, typical_flags].concat(),
                "with --acceptance greedy, which does not sample; use --acceptance rejection or nucleus",
            ),
            AcceptanceName::Typical => effect_of(
                &draw_flags,
                "with --acceptance typical, which does not sample; use --acceptance rejection or nucleus",
            ),
            AcceptanceName::Nucleus | AcceptanceName::Rejection => {
                effect_of(&typical_flags, "without --acceptance typical")
            }
        }
    }

    /// Whether tokens are drawn at random.
    pub(super) fn draws(&self, is_drafted: bool) -> bool {
        let draws = !is_drafted || matches!(self.rule(), AcceptanceName::Nucleus | AcceptanceName::Rejection);
        self.temperature.get() > 0.0 && draws
    }

    fn top_p(&self) -> Probability {
        let nucleus = Probability::new(NUCLEUS_TOP_P).filter(|_| self.rule() == AcceptanceName::Nucleus);
        self.top_p.or(nucleus).unwrap_or(Probability::ONE)
    }

    /// A request to continue `prompt`, sampling from `stream`.
    pub fn request<'p>(&self, prompt: &'p [i64], stream: Stream) -> Request<'p> {
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p() };
        Request {
            sampling,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            stream,
            ..Request::greedy(prompt, self.max_new_tokens)
        }
    }
}

/// "FLAGS have no effect WHERE"; `None` if none is given.
fn effect_of(flags: &[(&str, bool)], place: &str) -> Option<String> {
    let flags: Vec<&str> = flags.iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| *flag).collect();
    let verb = if flags.len() == 1 { "has" } else { "have" };
    (!flags.is_empty()).then(|| format!("{} {verb} no effect {place}", flags.join(" and ")))
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    #[test]
    fn flags_without_an_effect_give_a_notice() {
        let notice = |is_drafted: bool, flags: &str| {
            let matches = DecodingFlags::augment_args(Command::new("generate"));
            let matches = matches.get_matches_from(["generate"].into_iter().chain(flags.split_whitespace()));
            DecodingFlags::from_arg_matches(&matches).expect("flags").unused_sampling(is_drafted)
        };
        let greedy = "--top-p has no effect at --temperature 0, which is greedy";
        assert_eq!(notice(false, "--top-p 0.9").as_deref(), Some(greedy));
        let typical = "--top-k and --top-p have no effect with --acceptance typical, which does not sample; use --acceptance rejection \
                       or nucleus";
        assert_eq!(notice(true, "--top-k 5 --top-p 1 --temperature 1").as_deref(), Some(typical));
        assert!(notice(true, "--top-k 5 --temperature 1 --acceptance greedy").is_some());
        for rule in ["greedy", "typical"] {
            let plain = notice(false, &format!("--temperature 1 --acceptance {rule}"));
            assert_eq!(plain.as_deref(), Some("--acceptance has no effect without a drafter"));
        }
        for (is_drafted, flags, place) in [
            (false, "--temperature 1", "without a drafter"),
            (true, "", "at --temperature 0, which is greedy"),
            (true, "--temperature 1 --acceptance rejection", "without --acceptance typical"),
        ] {
            let text = notice(is_drafted, &format!("--posterior-threshold 0.1 {flags}"));
            assert_eq!(text, Some(format!("--posterior-threshold has no effect {place}")));
        }
        for (is_drafted, flags) in [
            (false, "--top-k 5 --temperature 1"),
            (true, "--top-k 5 --temperature 1 --acceptance rejection"),
            (true, "--top-p 0.5 --temperature 1 --acceptance nucleus"),
            (true, "--temperature 1 --posterior-threshold 0.1 --posterior-alpha 0.2"),
            (false, "--temperature 1 --acceptance rejection"),
            (true, ""),
        ] {
            assert_eq!(notice(is_drafted, flags), None, "{flags}");
        }
    }
}
