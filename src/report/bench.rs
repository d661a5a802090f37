//! `bench.json`: what `medusa bench --json` printed of these heads.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::ReportError;

/// What a page shows of it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Bench {
    #[serde(flatten)]
    pub(super) all: Group,
    #[serde(default)]
    pub(super) categories: BTreeMap<String, Group>,
    pub(super) device: String,
    pub(super) dtype: String,
    pub(super) tree_nodes: usize,
    /// Results in the file; of a sweep the first is shown.
    #[serde(skip)]
    pub(super) results: usize,
}

/// Plain and Medusa decoding of the same prompts.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Group {
    pub(super) plain: Side,
    pub(super) medusa: Side,
    pub(super) acceleration_rate: f64,
    pub(super) overhead: f64,
    pub(super) speedup: f64,
    pub(super) identical: Option<bool>,
}

/// One way of decoding.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Side {
    pub(super) tokens: usize,
    pub(super) tokens_per_second: f64,
    pub(super) step_ms: f64,
}

impl Bench {
    /// From the file's text; `None` of an empty one, which a shell makes before `medusa bench` has printed.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Option<Self>, ReportError> {
        let results = serde_json::Deserializer::from_str(text).into_iter().collect::<Result<Vec<Self>, _>>();
        let writer = "medusa bench --json";
        let mut results = results.map_err(|source| ReportError::Json { path: path.to_owned(), writer, source })?;
        let count = results.len();
        results.truncate(1);
        Ok(results.pop().map(|first| Self { results: count, ..first }))
    }
}
