//! When the tokens of a text arrive: the latencies of a server's metrics and of benchmarks under load, by one definition. The terms are those of
//! `vllm bench serve`.

use std::time::{Duration, Instant};

/// When a text was requested, and when its first and its last tokens arrived.
#[derive(Debug, Clone)]
pub struct TokenArrivals {
    requested: Instant,
    first_and_last: Option<[Instant; 2]>,
}

/// The latency of tokens that arrived together: those of a decoding step, or of a chunk of a stream. A step with guesses brings several
/// tokens and has one latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalLatency {
    /// Time to first token (TTFT): the prompt and any wait included.
    FirstToken(Duration),
    /// Inter-token latency (ITL): time since the arrival before.
    InterToken(Duration),
}

impl TokenArrivals {
    /// Of a text that is requested now.
    pub fn begin(now: Instant) -> Self {
        Self { requested: now, first_and_last: None }
    }

    /// When the text was requested.
    pub fn requested(&self) -> Instant {
        self.requested
    }

    /// New tokens arrive.
    pub fn arrive(&mut self, now: Instant) -> ArrivalLatency {
        let (first, latency) = match self.first_and_last {
            None => (now, ArrivalLatency::FirstToken(now - self.requested)),
            Some([first, last]) => (first, ArrivalLatency::InterToken(now - last)),
        };
        self.first_and_last = Some([first, now]);
        latency
    }

    /// TTFT; `None` without tokens.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        self.first_and_last.map(|[first, _]| first - self.requested)
    }

    /// Time per output token (TPOT) of a text of `tokens` generated tokens that ended at `end`: time from the first token to the end ÷ tokens
    /// after the first one. `None` for fewer than two tokens.
    pub fn time_per_output_token(&self, end: Instant, tokens: usize) -> Option<Duration> {
        let [first, _] = self.first_and_last?;
        let after_first = u32::try_from(tokens.checked_sub(1)?).ok().filter(|after| *after > 0)?;
        Some((end - first) / after_first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_several_tokens_has_one_latency() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut arrivals = TokenArrivals::begin(began);
        assert_eq!((arrivals.time_to_first_token(), arrivals.time_per_output_token(at(9), 2)), (None, None));
        let latencies = [100, 140, 260].map(|millis| arrivals.arrive(at(millis)));
        let [first, next, last] = [100, 40, 120].map(Duration::from_millis);
        let expected =
            [ArrivalLatency::FirstToken(first), ArrivalLatency::InterToken(next), ArrivalLatency::InterToken(last)];
        assert_eq!((latencies, arrivals.time_to_first_token()), (expected, Some(first)));
        assert_eq!(arrivals.time_per_output_token(at(280), 10), Some(Duration::from_millis(20)));
        assert_eq!(arrivals.time_per_output_token(at(280), 1), None);
    }
}
