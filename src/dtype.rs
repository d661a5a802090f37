//! The dtypes that a backbone computes in, as recipes, flags and files name them.

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
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::Float32 => 4,
            Dtype::BFloat16 | Dtype::Float16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Float32 => "float32",
            Dtype::BFloat16 => "bfloat16",
            Dtype::Float16 => "float16",
        })
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];
        let named = all.into_iter().find(|dtype| dtype.to_string() == text);
        named.ok_or_else(|| format!("expected float32, bfloat16 or float16, got {text:?}"))
    }
}
