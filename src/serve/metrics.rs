//! What `/metrics` reports, in Prometheus' text format.

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
    exponential_buckets,
};

use crate::decode::stats::GeneratedTokens;

/// Counters of a server. A clone counts into the same ones.
#[derive(Debug, Clone)]
pub struct ServerMetrics {
    registry: Registry,
    requests: IntCounterVec,
    /// Apart by endpoint: probes of the health would hide the texts.
    request_seconds: HistogramVec,
    /// Tokens of prompts, those that the prefix cache had among them.
    pub prompt_tokens: IntCounter,
    /// Tokens of prompts that were taken from the prefix cache.
    pub cached_tokens: IntCounter,
    /// Generated tokens, those that end a text included.
    pub new_tokens: IntCounter,
    /// Draft tokens that the backbone verified.
    pub proposed_tokens: IntCounter,
    /// Draft tokens that were accepted.
    pub accepted_tokens: IntCounter,
    /// Decoding steps, counted for each text.
    pub steps: IntCounter,
    /// Texts that are decoded.
    pub running: IntGauge,
    /// Texts that wait for a place in the batch.
    pub waiting: IntGauge,
    /// Bytes of the prefix cache.
    pub prefix_bytes: IntGauge,
    /// Tokens that a text's step commits, the mean of a text.
    pub tokens_per_step: Histogram,
    /// Seconds from a checked request to the first token of a text.
    pub first_token: Histogram,
    /// Seconds between two steps that bring tokens of a text.
    pub between_tokens: Histogram,
}

impl ServerMetrics {
    /// All at 0.
    ///
    /// # Errors
    /// [`prometheus::Error`] if two have the same name: our bug.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("medusa".into()), None)?;
        let counter = |name, help| register(&registry, IntCounter::new(name, help)?);
        let gauge = |name, help| register(&registry, IntGauge::new(name, help)?);
        let histogram = |name: &str, help: &str, buckets| {
            register(&registry, Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?)
        };
        let by_endpoint = Opts::new("requests_total", "Requests by endpoint and HTTP status.");
        let times = HistogramOpts::new("request_seconds", "From the request to the end of its answer, by endpoint.");
        let times = HistogramVec::new(times.buckets(seconds(0.01)?), &["endpoint"])?;
        Ok(Self {
            request_seconds: register(&registry, times)?,
            requests: register(&registry, IntCounterVec::new(by_endpoint, &["endpoint", "status"])?)?,
            prompt_tokens: counter("prompt_tokens_total", "Tokens of prompts.")?,
            cached_tokens: counter("prefix_cached_tokens_total", "Tokens of prompts that the prefix cache had.")?,
            new_tokens: counter("generation_tokens_total", "Generated tokens, those that end a text included.")?,
            proposed_tokens: counter("draft_tokens_total", "Draft tokens that the backbone verified.")?,
            accepted_tokens: counter("accepted_draft_tokens_total", "Draft tokens that were accepted.")?,
            steps: counter("decode_steps_total", "Decoding steps, counted for each text.")?,
            running: gauge("texts_running", "Texts that are decoded.")?,
            waiting: gauge("texts_waiting", "Texts that wait for a place in the batch.")?,
            prefix_bytes: gauge("prefix_cache_bytes", "Memory of the prefix cache.")?,
            tokens_per_step: histogram("tokens_per_step", "Mean tokens per step of a text.", tokens_per_step())?,
            first_token: histogram(
                "time_to_first_token_seconds",
                "From the request to its first token.",
                seconds(0.001)?,
            )?,
            between_tokens: histogram(
                "time_between_tokens_seconds",
                "Inter-token latency: time between two steps that bring tokens of a text.",
                seconds(0.0001)?,
            )?,
            registry,
        })
    }

    /// Counts a request that has ended, `seconds` after its headers came.
    pub fn count_request(&self, endpoint: &str, status: u16, seconds: f64) {
        self.requests.with_label_values(&[endpoint, &status.to_string()]).inc();
        self.request_seconds.with_label_values(&[endpoint]).observe(seconds);
    }

    /// Counts the steps of a text that has left, and its draft tokens.
    pub fn count_text(&self, generated: GeneratedTokens, proposed: usize) {
        let GeneratedTokens { tokens, steps } = generated;
        self.steps.inc_by(steps as u64);
        self.proposed_tokens.inc_by(proposed as u64);
        self.accepted_tokens.inc_by(generated.accepted() as u64);
        if steps > 0 {
            self.tokens_per_step.observe(tokens as f64 / steps as f64);
        }
    }

    /// The page.
    ///
    /// # Errors
    /// [`prometheus::Error`] if a metric cannot be written: our bug.
    pub fn page(&self) -> prometheus::Result<Vec<u8>> {
        let mut page = vec![];
        TextEncoder::new().encode(&self.registry.gather(), &mut page)?;
        Ok(page)
    }
}

fn register<C: prometheus::core::Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// From `shortest` on, each twice as long, over more than four decades.
fn seconds(shortest: f64) -> prometheus::Result<Vec<f64>> {
    exponential_buckets(shortest, 2.0, 15)
}

fn tokens_per_step() -> Vec<f64> {
    (2..=16).map(|half| f64::from(half) / 2.0).collect()
}
