//! A number of a file that cannot be right beside the others.

/// The number's key, what the others allow, and what it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misfit {
    pub key: String,
    pub expected: String,
    pub got: String,
}

pub(super) fn misfit(key: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Result<(), Misfit> {
    Err(Misfit { key: key.into(), expected: expected.into(), got: got.to_string() })
}
