//! Parsers of numbers on the command line, with errors in words.

use std::str::FromStr;

use crate::engine::sample::COLDEST;
use crate::numbers::{Finite, NonNegative, Positive, Probability};

pub(super) fn probability(text: &str) -> Result<Probability, String> {
    Probability::try_from(number(text)?)
}

pub(super) fn finite(text: &str) -> Result<Finite, String> {
    Finite::try_from(number(text)?)
}

pub(super) fn positive(text: &str) -> Result<Positive, String> {
    Positive::try_from(number(text)?)
}

/// A sampling temperature.
pub(super) fn temperature(text: &str) -> Result<NonNegative, String> {
    let temperature = NonNegative::try_from(number(text)?)?;
    if temperature.get() > 0.0 && temperature.get() < COLDEST {
        return Err(format!("expected 0, which is greedy, or at least {COLDEST:.1e}, got {text}"));
    }
    Ok(temperature)
}

/// A whole number above 0, of a type that holds no other.
pub(super) fn above_zero<N: FromStr>(text: &str) -> Result<N, String> {
    let refused = match text.parse::<u128>() {
        Ok(1..) => "the number is too large",
        _ => "expected a whole number above 0",
    };
    text.parse().map_err(|_| refused.to_owned())
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "expected a number".into())
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU32, NonZeroUsize};

    use super::*;

    #[test]
    fn numbers_that_cannot_be_are_refused_in_words() {
        assert_eq!(above_zero("7"), Ok(NonZeroUsize::new(7).unwrap()));
        for text in ["0", "-1", "x", "1.5", ""] {
            assert_eq!(above_zero::<NonZeroUsize>(text), Err("expected a whole number above 0".into()), "{text}");
        }
        assert_eq!(above_zero::<NonZeroU32>("99999999999"), Err("the number is too large".into()));
        assert_eq!(positive("x").unwrap_err(), "expected a number");
    }

    #[test]
    fn a_temperature_that_float32_cannot_divide_by_is_refused() {
        for text in ["0", "1.2e-38", "0.7", "-0"] {
            assert!(temperature(text).is_ok(), "{text}");
        }
        for text in ["1e-39", "1e-38"] {
            let refused = temperature(text).unwrap_err();
            assert_eq!(refused, format!("expected 0, which is greedy, or at least 1.2e-38, got {text}"));
        }
        assert!(temperature("-1").unwrap_err().contains("at least 0, got -1"));
    }
}
