//! Range-checked numbers. Deserialising a recipe rejects a value out of range with its line and column, so nothing checks it again.

use serde::{Deserialize, Serialize};

macro_rules! checked_number {
    ($name:ident, $what:literal, $ok:expr) => {
        #[doc = concat!("A number that is ", $what, ".")]
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(try_from = "f64", into = "f64")]
        pub struct $name(f64);

        impl $name {
            #[doc = concat!("`None` unless the value is ", $what, ".")]
            pub fn new(value: f64) -> Option<Self> {
                let ok: fn(f64) -> bool = $ok;
                ok(value).then_some(Self(value))
            }

            /// The plain number.
            pub fn get(self) -> f64 {
                self.0
            }
        }

        impl TryFrom<f64> for $name {
            type Error = String;

            fn try_from(value: f64) -> Result<Self, String> {
                Self::new(value).ok_or_else(|| format!(concat!("expected a number that is ", $what, ", got {}"), value))
            }
        }

        impl From<$name> for f64 {
            fn from(number: $name) -> f64 {
                number.0
            }
        }
    };
}

checked_number!(Finite, "finite", f64::is_finite);
checked_number!(Positive, "finite and above 0", |x| x.is_finite() && x > 0.0);
checked_number!(NonNegative, "finite and at least 0", |x| x.is_finite() && x >= 0.0);
checked_number!(Fraction, "at least 0 and below 1", |x| (0.0..1.0).contains(&x));
checked_number!(Probability, "above 0 and at most 1", |x| x > 0.0 && x <= 1.0);

impl Finite {
    /// Nothing.
    pub const ZERO: Self = Self(0.0);
}

impl Positive {
    /// What multiplies nothing.
    pub const ONE: Self = Self(1.0);
}

impl NonNegative {
    /// Nothing.
    pub const ZERO: Self = Self(0.0);

    /// One.
    pub const ONE: Self = Self(1.0);
}

impl Fraction {
    /// Nothing.
    pub const ZERO: Self = Self(0.0);
}

impl Probability {
    /// What is certain.
    pub const ONE: Self = Self(1.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_values_are_refused() {
        assert!(
            Positive::new(0.0).is_none() && Positive::new(f64::NAN).is_none() && Positive::new(f64::INFINITY).is_none()
        );
        assert!(NonNegative::new(-1e-9).is_none() && NonNegative::new(0.0).is_some());
        assert!(Finite::new(-2.0).is_some() && Finite::new(f64::NAN).is_none() && Finite::new(f64::INFINITY).is_none());
        assert!(Fraction::new(1.0).is_none() && Fraction::new(0.0).is_some());
        assert!(Probability::new(0.0).is_none() && Probability::new(1.0) == Some(Probability::ONE));
    }
}
