//! Published models and data, and what other programs compute of them; tests/fixtures/README.md has their origins.

use std::path::{Path, PathBuf};

/// A file or folder of tests/fixtures.
pub(crate) fn published(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}
