//! A machine's part of work that several machines share.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The part of the prompts or rows that one machine takes: indices with the remainder `index` - 1 modulo `of`. Written as `2/4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Share {
    of: usize,
    /// Counted from 1.
    index: usize,
}

impl Share {
    /// All of it.
    pub const WHOLE: Self = Self { of: 1, index: 1 };

    /// Counted from 1.
    pub fn index(self) -> usize {
        self.index
    }

    /// How many shares there are.
    pub fn of(self) -> usize {
        self.of
    }

    /// Every share of the same work, this one too.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (1..=self.of).map(move |index| Self { index, ..self })
    }

    /// Indices of this share among `total`.
    pub fn ids(self, total: usize) -> impl Iterator<Item = usize> {
        (self.index - 1..total).step_by(self.of)
    }

    /// Whether an index is in this share.
    pub fn has(self, id: usize) -> bool {
        id % self.of == self.index - 1
    }
}

impl fmt::Display for Share {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parts {
            Some((index, of)) if (1..=of).contains(&index) => Ok(Self { of, index }),
            _ => Err(format!("expected i/n with i from 1 to n, such as 2/4, got {text:?}")),
        }
    }
}

impl TryFrom<String> for Share {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Share> for String {
    fn from(share: Share) -> Self {
        share.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_together_the_whole() {
        let share: Share = "2/4".parse().unwrap();
        let mut all: Vec<usize> = share.all().flat_map(|share| share.ids(10)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!(share.ids(10).collect::<Vec<_>>(), [1, 5, 9]);
        assert_eq!((0..10).filter(|id| share.has(*id)).collect::<Vec<_>>(), [1, 5, 9]);
        for wrong in ["0/4", "5/4", "4", "a/b", "1/0", "-1/2"] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }
}
