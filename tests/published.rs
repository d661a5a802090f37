//! Published models and data, and reference results from other programs; tests/fixtures/README.md lists their origins.

use std::path::{Path, PathBuf};

pub(crate) fn published(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}
