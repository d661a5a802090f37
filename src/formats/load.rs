//! `load.json`: the output of `medusa bench --json` with `--concurrency` or `--endpoint`: one result per line.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};

const WHAT: &str = "load results";
const EXPECTED: &str = "is no result of medusa bench --json with --concurrency or --endpoint; expected what it prints, one object a line: \
                        make it again";

/// Throughput and latencies with a number of requests in flight, of one drafter or of a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadResult {
    /// Requests in flight; the next one is sent when one is answered.
    pub concurrency: usize,
    #[serde(flatten)]
    pub source: LoadSource,
    /// Answered requests.
    pub requests: usize,
    /// Failed requests.
    pub errors: usize,
    /// Why the first of them failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
    /// Answers of status 429, after which a request was sent again.
    #[serde(default)]
    pub rate_limited: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Tokens of the prompts, as the server counts them.
    pub prompt_tokens: usize,
    /// Generated tokens of the answered requests, those that end a text included.
    pub tokens: usize,
    pub tokens_per_second: f64,
    pub requests_per_second: f64,
    /// Tokens that a decoding step commits to a text; absent where a server does not report them.
    pub tokens_per_step: Option<f64>,
    /// Time to first token.
    pub ttft_ms: Option<LatencyQuantiles>,
    /// Time per output token of each request: (end-to-end latency - time to first token) ÷ (tokens - 1).
    pub tpot_ms: Option<LatencyQuantiles>,
    /// Inter-token latency: the time between two steps, or chunks of a stream, that bring tokens.
    pub itl_ms: Option<LatencyQuantiles>,
    /// End-to-end latency of a request.
    pub e2el_ms: Option<LatencyQuantiles>,
    /// Whether the texts equal those of plain decoding; `None` above temperature 0 and for servers.
    pub identical: Option<bool>,
}

/// What answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LoadSource {
    Server {
        /// Its address, up to `/v1`.
        endpoint: String,
        model: String,
    },
    Process {
        /// As `--drafter` spells it, without paths; `plain` for plain decoding.
        drafter: String,
        /// Paths of the drafter's own weights.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        weights: Vec<String>,
        /// As `--device` spells it.
        device: String,
        /// Compute dtype of the backbone.
        dtype: String,
        /// `nf4` or `int8`; absent for weights that were not quantised.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        quantization: Option<String>,
        /// Engine: `tch` or `cpu`.
        engine: String,
    },
}

/// Of the latencies of all requests, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatencyQuantiles {
    pub median: f64,
    /// 95 % are at most this long.
    pub p95: f64,
}

impl LoadSource {
    /// The drafter or the model, for people.
    pub fn name(&self) -> String {
        match self {
            Self::Server { model, .. } => model.clone(),
            Self::Process { drafter, weights, .. } if weights.is_empty() => drafter.clone(),
            Self::Process { drafter, weights, .. } => format!("{drafter}:{}", weights.join("+")),
        }
    }

    /// Where it ran, for people.
    pub fn conditions(&self) -> String {
        match self {
            Self::Server { endpoint, .. } => endpoint.clone(),
            Self::Process { device, dtype, quantization, engine, .. } => {
                let quantized = quantization.as_ref().map_or_else(String::new, |name| format!(", weights in {name}"));
                format!("{dtype}{quantized} on {device}, engine {engine}")
            }
        }
    }
}

/// The results in a file; empty for an empty file, which a shell creates before `medusa bench` prints.
///
/// # Errors
/// [`FormatError`], with the path.
pub fn load(path: &Path) -> Result<Vec<LoadResult>, FormatError> {
    error::read_by(path, WHAT, EXPECTED, |text| serde_json::Deserializer::from_str(text).into_iter().collect())
}
