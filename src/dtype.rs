//! The dtypes that a backbone computes in, and those of drafters, as recipes, flags and files name them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The dtype that a backbone computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Float32,
    /// 16 bits with float32's range.
    BFloat16,
    /// 16 bits, IEEE half precision.
    Float16,
    /// Only trained in, on the CPU: for checks that two runs are equal up to rounding.
    Float64,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::Float64 => 8,
            Dtype::Float32 => 4,
            Dtype::BFloat16 | Dtype::Float16 => 2,
        }
    }

    /// The dtype to use where nobody asked for one: float32 in place of float64.
    #[must_use]
    pub fn by_default(self) -> Self {
        if self == Dtype::Float64 { Dtype::Float32 } else { self }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Float32 => "float32",
            Dtype::BFloat16 => "bfloat16",
            Dtype::Float16 => "float16",
            Dtype::Float64 => "float64",
        })
    }
}

/// What the CPU's kernels hold the dense weights of drafters in. Guesses are verified: rounding changes how many of them are right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftDtype {
    /// The fastest: `Int8`.
    #[default]
    Auto,
    /// 8 bits, and a scale for 32 weights (GGUF's Q8_0); activations in 8 bits, too.
    Int8,
    BFloat16,
    Float32,
}

impl fmt::Display for DraftDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Int8 => "int8",
            Self::BFloat16 => "bfloat16",
            Self::Float32 => "float32",
        })
    }
}

/// Of `--draft-dtype`.
impl FromStr for DraftDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::Int8, Self::BFloat16, Self::Float32];
        let named = all.into_iter().find(|dtype| dtype.to_string() == text);
        named.ok_or_else(|| format!("expected auto, int8, bfloat16 or float32, got {text:?}"))
    }
}

/// Of `--dtype`: nothing decodes in float64.
impl FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];
        let named = all.into_iter().find(|dtype| dtype.to_string() == text);
        named.ok_or_else(|| format!("expected float32, bfloat16 or float16, got {text:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_of_drafters_have_names() {
        for name in ["auto", "int8", "bfloat16", "float32"] {
            assert_eq!(name.parse::<DraftDtype>().map(|dtype| dtype.to_string()), Ok(name.to_owned()));
        }
        assert!("float16".parse::<DraftDtype>().is_err_and(|why| why.contains("bfloat16 or float32, got \"float16\"")));
    }
}
