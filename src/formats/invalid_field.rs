//! A number that contradicts others in its file.

/// The number's key, what the others allow, and what it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidField {
    pub key: String,
    pub expected: String,
    pub got: String,
}

pub(super) fn invalid_field(
    key: impl Into<String>,
    expected: impl Into<String>,
    got: impl ToString,
) -> Result<(), InvalidField> {
    Err(InvalidField { key: key.into(), expected: expected.into(), got: got.to_string() })
}
