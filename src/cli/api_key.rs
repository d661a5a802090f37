//! The key of a server that a verb asks: `--api-key-file`, else the environment.

use std::path::Path;

use super::UsageError;
use crate::http::api_key::{ApiKey, ApiKeyError};

/// The key, if there is one.
///
/// # Errors
/// A file that cannot be read; [`UsageError`] for one without a key, and for a key that no header can hold.
pub(super) fn find(file: Option<&Path>) -> anyhow::Result<Option<ApiKey>> {
    ApiKey::find(file).map_err(|error| match error {
        ApiKeyError::Read { .. } => error.into(),
        ApiKeyError::Empty { .. } | ApiKeyError::Characters { .. } => UsageError(error.to_string()).into(),
    })
}
