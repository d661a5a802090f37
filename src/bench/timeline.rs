//! When a request was sent and when its text came, and what the requests of a level make together.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use crate::decode::arrivals::{ArrivalLatency, TokenArrivals};
use crate::formats::load::{LatencyQuantiles, LoadResult, LoadSource};

/// How many requests are in flight, and how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadLevel {
    pub concurrency: NonZeroUsize,
    pub requests: usize,
}

/// The moments of one request.
#[derive(Debug, Clone)]
pub struct RequestTimeline {
    arrivals: TokenArrivals,
    /// Between arrivals.
    gaps: Vec<Duration>,
}

impl RequestTimeline {
    /// A request that is sent now.
    pub fn begin(now: Instant) -> Self {
        Self { arrivals: TokenArrivals::begin(now), gaps: vec![] }
    }

    /// New tokens came.
    pub fn arrive(&mut self, now: Instant) {
        if let ArrivalLatency::InterToken(gap) = self.arrivals.arrive(now) {
            self.gaps.push(gap);
        }
    }

    /// The answer is complete.
    pub fn end(self, now: Instant, counts: TokenCounts) -> AnsweredRequest {
        AnsweredRequest { ended: now, timeline: self, counts }
    }
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCounts {
    pub prompt: usize,
    /// Generated ones, those that end the text included.
    pub new: usize,
    /// Decoding steps that made them, if that is known.
    pub steps: Option<usize>,
}

/// A request with its answer.
#[derive(Debug, Clone)]
pub struct AnsweredRequest {
    timeline: RequestTimeline,
    ended: Instant,
    counts: TokenCounts,
}

impl AnsweredRequest {
    fn ttft(&self) -> Option<Duration> {
        self.timeline.arrivals.time_to_first_token()
    }

    fn tpot(&self) -> Option<Duration> {
        self.timeline.arrivals.time_per_output_token(self.ended, self.counts.new)
    }

    fn latency(&self) -> Duration {
        self.ended - self.timeline.arrivals.requested()
    }

    /// How often tokens came.
    #[cfg(test)]
    pub fn arrivals(&self) -> usize {
        self.ttft().map_or(0, |_| self.timeline.gaps.len() + 1)
    }
}

/// All requests of a level.
#[derive(Debug, Clone, Default)]
pub struct LevelRun {
    pub answered: Vec<AnsweredRequest>,
    /// Reasons, in the order of the failures.
    pub failures: Vec<String>,
    pub rate_limited: usize,
    /// From the first request to the last answer.
    pub elapsed: Duration,
}

impl LevelRun {
    /// Its figures.
    pub fn result(&self, concurrency: usize, source: LoadSource) -> LoadResult {
        let sum = |pick: fn(&TokenCounts) -> usize| self.answered.iter().map(|request| pick(&request.counts)).sum();
        let tokens: usize = sum(|counts| counts.new);
        let seconds = self.elapsed.as_secs_f64();
        let per_second = |count: usize| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let each = |pick: fn(&AnsweredRequest) -> Option<Duration>| quantiles(self.answered.iter().filter_map(pick));
        LoadResult {
            concurrency,
            source,
            requests: self.answered.len(),
            errors: self.failures.len(),
            first_error: self.failures.first().cloned(),
            rate_limited: self.rate_limited,
            seconds,
            prompt_tokens: sum(|counts| counts.prompt),
            tokens,
            tokens_per_second: per_second(tokens),
            requests_per_second: per_second(self.answered.len()),
            tokens_per_step: self.tokens_per_step(),
            ttft_ms: each(AnsweredRequest::ttft),
            tpot_ms: each(AnsweredRequest::tpot),
            itl_ms: quantiles(self.answered.iter().flat_map(|request| request.timeline.gaps.iter().copied())),
            e2el_ms: each(|request| Some(request.latency())),
            identical: None,
        }
    }

    /// Over the requests whose steps are known.
    fn tokens_per_step(&self) -> Option<f64> {
        let known = || self.answered.iter().filter_map(|request| Some((request.counts.new, request.counts.steps?)));
        let (tokens, steps) = known().fold((0, 0), |(tokens, steps), (new, more)| (tokens + new, steps + more));
        (steps > 0).then(|| tokens as f64 / steps as f64)
    }
}

/// `None` without durations.
fn quantiles(durations: impl Iterator<Item = Duration>) -> Option<LatencyQuantiles> {
    let mut sorted: Vec<f64> = durations.map(|duration| duration.as_secs_f64() * 1e3).collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    // Between two values in proportion, as NumPy's percentile does it.
    let quantile = |share: f64| {
        let at = share * last as f64;
        let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        below + (above - below) * at.fract()
    };
    Some(LatencyQuantiles { median: quantile(0.5), p95: quantile(0.95) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> LoadSource {
        LoadSource::Server { endpoint: "http://h/v1".into(), model: "m".into() }
    }

    /// A request whose tokens come at these milliseconds, the last of them at its end.
    fn request(began: Instant, millis: &[u64], counts: TokenCounts) -> AnsweredRequest {
        let at = |millis: &u64| began + Duration::from_millis(*millis);
        let mut timeline = RequestTimeline::begin(began);
        millis.iter().for_each(|millis| timeline.arrive(at(millis)));
        timeline.end(millis.last().map_or(began, at), counts)
    }

    #[test]
    fn latencies_are_those_of_the_fields_terms() {
        let counts = TokenCounts { prompt: 3, new: 9, steps: Some(3) };
        let answered = vec![request(Instant::now(), &[100, 140, 260], counts)];
        let run = LevelRun { answered, elapsed: Duration::from_secs(2), ..LevelRun::default() };
        let result = run.result(4, source());
        let same = |value| Some(LatencyQuantiles { median: value, p95: value });
        assert_eq!((result.ttft_ms, result.tpot_ms, result.e2el_ms), (same(100.0), same(20.0), same(260.0)));
        let gaps = result.itl_ms.expect("two gaps");
        assert!((gaps.median - 80.0).abs() < 1e-9 && (gaps.p95 - 116.0).abs() < 1e-9, "{gaps:?}");
        assert_eq!((result.tokens_per_second, result.requests_per_second), (4.5, 0.5));
        assert_eq!((result.tokens_per_step, result.prompt_tokens), (Some(3.0), 3));
    }

    #[test]
    fn what_was_not_measured_is_absent() {
        let began = Instant::now();
        let none = TokenCounts::default();
        let one = TokenCounts { new: 1, ..none };
        let answered = vec![request(began, &[], none), request(began, &[7], one)];
        let result = LevelRun { answered, ..LevelRun::default() }.result(1, source());
        assert_eq!((result.tpot_ms, result.itl_ms, result.tokens_per_step), (None, None, None));
        assert_eq!(result.ttft_ms.map(|ttft| ttft.median), Some(7.0));
        let nothing = LevelRun { failures: vec!["a".into(), "b".into()], ..LevelRun::default() }.result(1, source());
        assert_eq!((nothing.e2el_ms, nothing.errors, nothing.first_error.as_deref()), (None, 2, Some("a")));
        assert_eq!((nothing.tokens_per_second, nothing.requests_per_second), (0.0, 0.0));
    }

    #[test]
    fn quantiles_are_numpys() {
        let found = quantiles((1..=20).rev().map(Duration::from_millis)).expect("there are some");
        assert!((found.median - 10.5).abs() < 1e-9 && (found.p95 - 19.05).abs() < 1e-9, "{found:?}");
    }
}
