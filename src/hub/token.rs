//! The user's token: sent in one header to one host, and never printed.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use super::HubError;
use super::cache::expanded;

/// A token of the Hub. Its `Debug` output omits the secret.
pub(super) struct Token {
    secret: String,
    /// Its source, for messages.
    pub(super) from: String,
}

impl Token {
    /// `HF_TOKEN`, else the file that `hf auth login` writes.
    pub(super) fn from_env(setting: &dyn Fn(&str) -> Option<String>, home: &Path) -> Result<Option<Self>, HubError> {
        if let Some(secret) = setting("HF_TOKEN") {
            return Self::new(&secret, "HF_TOKEN".into()).map(Some);
        }
        let path = setting("HF_TOKEN_PATH").map_or_else(|| home.join("token"), |path| expanded(&path));
        match std::fs::read_to_string(&path) {
            Ok(secret) if !secret.trim().is_empty() => Self::new(&secret, path.display().to_string()).map(Some),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(HubError::io("read the token's file", &path)(error)),
        }
    }

    fn new(secret: &str, from: String) -> Result<Self, HubError> {
        let secret = secret.trim().to_owned();
        // The HTTP library would quote an invalid header value in its error.
        if secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self { secret, from })
        } else {
            Err(HubError::setting(&from, "a token of the Hub (hf_…), without blanks"))
        }
    }

    /// The value of the `Authorization` header.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.secret)
    }

    /// Removes the token from a server's message, which may quote the request.
    pub(super) fn removed_from(&self, text: &str) -> String {
        text.replace(&self.secret, "(the token)")
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Token(from {})", self.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::new(" hf_secret\n", "HF_TOKEN".into()).unwrap();
        assert_eq!(token.header(), "Bearer hf_secret");
        assert!(!format!("{token:?} {:?}", token.removed_from("got hf_secret")).contains("secret"));
        let error = Token::new("hf_secret with blanks", "HF_TOKEN".into()).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
    }

    #[test]
    fn the_variable_goes_before_the_file() {
        let home = tempfile::tempdir().unwrap();
        let found = |value: Option<&str>| {
            Token::from_env(&|name| value.filter(|_| name == "HF_TOKEN").map(str::to_owned), home.path())
        };
        assert!(found(None).unwrap().is_none());
        crate::files::write_atomic(&home.path().join("token"), |out| std::io::Write::write_all(out, b"hf_file\n"))
            .unwrap();
        assert_eq!(found(None).unwrap().unwrap().header(), "Bearer hf_file");
        assert_eq!(found(Some("hf_variable")).unwrap().unwrap().header(), "Bearer hf_variable");
    }

    #[test]
    fn a_tokens_file_that_cannot_be_read_is_an_error() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("token")).unwrap();
        let error = Token::from_env(&|_| None, home.path()).unwrap_err().to_string();
        assert!(error.contains("cannot read the token's file") && error.contains("token: "), "{error}");
    }
}
