//! The key of a server's API: sent in one header, and never printed.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const VARIABLE: &str = "MEDUSA_API_KEY";

/// Its `Debug` output omits the secret.
#[derive(Clone)]
pub struct ApiKey(String);

/// Why there is no key, without what the file or variable holds.
#[derive(Debug, thiserror::Error)]
pub enum ApiKeyError {
    #[error("cannot read --api-key-file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("--api-key-file {} is empty; expected a key in its first line", path.display())]
    Empty { path: PathBuf },
    /// No header can hold it.
    #[error("the API key of {from}: expected letters, digits and signs without blanks")]
    Characters {
        /// The file or the variable.
        from: String,
    },
}

impl ApiKey {
    /// The first line of the file, else the environment variable.
    ///
    /// # Errors
    /// A file that cannot be read or has no key; a key that no header can hold.
    pub fn find(file: Option<&Path>) -> Result<Option<Self>, ApiKeyError> {
        let Some(path) = file else {
            let secret = std::env::var(VARIABLE).ok().filter(|secret| !secret.trim().is_empty());
            return secret.map(|secret| Self::new(&secret, VARIABLE)).transpose();
        };
        let text = fs::read_to_string(path).map_err(|source| ApiKeyError::Read { path: path.into(), source })?;
        let first = text.lines().map(str::trim).find(|line| !line.is_empty());
        let secret = first.ok_or_else(|| ApiKeyError::Empty { path: path.into() })?;
        Self::new(secret, &path.display().to_string()).map(Some)
    }

    fn new(secret: &str, from: &str) -> Result<Self, ApiKeyError> {
        let secret = secret.trim();
        // The HTTP library would quote an invalid header value in its error.
        match secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(secret.to_owned())),
            false => Err(ApiKeyError::Characters { from: from.to_owned() }),
        }
    }

    /// The value of the `Authorization` header.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Removes the key from a server's message, which may quote the request.
    pub(super) fn removed_from(&self, text: &str) -> String {
        text.replace(&self.0, "(the key)")
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ApiKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_key_is_read_from_the_first_line_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let write = |text: &str| crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        write("\n sk-secret \nsk-other\n");
        let key = ApiKey::find(Some(&path)).unwrap().expect("a key");
        assert_eq!(key.header(), "Bearer sk-secret");
        assert!(!format!("{key:?} {}", key.removed_from("wrong key sk-secret")).contains("secret"));
        write("sk secret\n");
        let error = ApiKey::find(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("without blanks") && !error.contains("secret"), "{error}");
        write(" \n");
        assert!(ApiKey::find(Some(&path)).unwrap_err().to_string().contains("is empty"));
    }
}
