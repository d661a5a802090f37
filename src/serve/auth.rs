//! API keys.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// The keys that the server accepts. Only their hashes are kept, so that no message and no dump shows a key.
#[derive(Clone, Default)]
pub struct ApiKeys {
    sha256: Vec<[u8; 32]>,
}

impl ApiKeys {
    /// Of these keys; none lets everybody in.
    pub fn new<'k>(keys: impl IntoIterator<Item = &'k str>) -> Self {
        Self { sha256: keys.into_iter().map(hash).collect() }
    }

    /// Whether requests need a key.
    pub fn are_needed(&self) -> bool {
        !self.sha256.is_empty()
    }

    /// Whether the value of a request's `Authorization` header has one of the keys. Takes equally long for all wrong keys.
    pub fn admit(&self, authorization: Option<&str>) -> bool {
        if !self.are_needed() {
            return true;
        }
        let Some((scheme, key)) = authorization.and_then(|value| value.split_once(' ')) else { return false };
        let given = hash(key.trim());
        let is_known = self.sha256.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(&given));
        scheme.eq_ignore_ascii_case("Bearer") && is_known.into()
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.sha256.len())
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_keys_is_needed_as_a_bearer_token() {
        let keys = ApiKeys::new(["first", "second"]);
        for admitted in ["Bearer first", "Bearer second", "bearer first"] {
            assert!(keys.admit(Some(admitted)), "{admitted}");
        }
        for refused in
            [None, Some("first"), Some("Bearer "), Some("Bearer firs"), Some("Bearer first2"), Some("Basic first")]
        {
            assert!(!keys.admit(refused), "{refused:?}");
        }
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)", "no key and no hash");
    }

    #[test]
    fn without_keys_everybody_is_admitted() {
        assert!(ApiKeys::default().admit(None) && ApiKeys::new([]).admit(Some("Bearer anything")));
    }
}
