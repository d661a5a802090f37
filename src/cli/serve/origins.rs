//! `--cors-origin`.

use axum::http::HeaderValue;
use tower_http::cors::AllowOrigin;

use crate::cli::UsageError;

/// Whose pages may call the server; `None`: nobody's.
///
/// # Errors
/// [`UsageError`] for what is no origin.
pub(super) fn allowed(origins: &[String]) -> Result<Option<AllowOrigin>, UsageError> {
    if origins.is_empty() {
        return Ok(None);
    }
    if origins.iter().any(|origin| origin == "*") {
        return Ok(Some(AllowOrigin::any()));
    }
    Ok(Some(AllowOrigin::list(origins.iter().map(|origin| header(origin)).collect::<Result<Vec<_>, _>>()?)))
}

fn header(origin: &str) -> Result<HeaderValue, UsageError> {
    let parsed = url::Url::parse(origin).ok().filter(|url| url.origin().ascii_serialization() == origin);
    let value = parsed.and_then(|_| HeaderValue::try_from(origin).ok());
    value.ok_or_else(|| {
        UsageError(format!("--cors-origin {origin}: expected an origin such as https://example.org or http://localhost:3000, without a path, or *"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_no_path() {
        let all = |origins: &[&str]| allowed(&origins.iter().map(|&origin| origin.to_owned()).collect::<Vec<_>>());
        assert!(all(&[]).expect("none").is_none());
        assert!(all(&["*"]).expect("any").is_some());
        assert!(all(&["https://example.org", "http://localhost:3000"]).expect("two").is_some());
        for wrong in ["example.org", "https://example.org/", "https://example.org/page", ""] {
            assert!(all(&[wrong]).expect_err(wrong).to_string().contains("expected an origin"));
        }
    }
}
