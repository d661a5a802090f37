//! Waits between the attempts of a request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::EndpointError;

/// Wait after the first failure; it doubles with each further one.
const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);
/// A server that asks for a longer wait is not waited for.
const LONGEST_ASKED: Duration = Duration::from_secs(300);
/// How often a wait looks whether the user asks to stop.
const GLANCE: Duration = Duration::from_millis(100);

/// The attempts of one request. Waits grow exponentially, and each is drawn from the upper half of its length, so that requests that failed
/// together do not come again together.
#[derive(Debug)]
pub struct Backoff {
    failures: u32,
    most: u32,
}

impl Backoff {
    /// A request that is sent again at most `retries` times.
    pub fn new(retries: u32) -> Self {
        Self { failures: 0, most: retries }
    }

    /// How long to wait before the next attempt; `None` if there shall be none: the error is permanent, the attempts are used up, or the
    /// server asks for a wait of more than five minutes.
    pub fn next(&mut self, error: &EndpointError) -> Option<Duration> {
        let asked = error.retry_after().unwrap_or_default();
        if !error.is_temporary() || self.failures == self.most || asked > LONGEST_ASKED {
            return None;
        }
        let backoff = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures += 1;
        // Nobody comes before the time that the server named, and not all at that time.
        Some(if asked.is_zero() { backoff.mul_f64(jitter(0.5)) } else { asked + FIRST.mul_f64(jitter(0.0)) })
    }

    /// Attempts that failed, the last one included.
    pub fn attempts(&self) -> u32 {
        self.failures + 1
    }
}

/// A share from `least` to 1.
fn jitter(least: f64) -> f64 {
    least + (1.0 - least) * rand::random::<f64>()
}

/// Sleeps, unless the user asks to stop.
pub fn pause(wait: Duration, stop: &AtomicBool) {
    let end = Instant::now() + wait;
    while !stop.load(Ordering::Relaxed) {
        match end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            Some(left) => thread::sleep(left.min(GLANCE)),
            None => break,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, retry_after: Option<u64>) -> EndpointError {
        let retry_after = retry_after.map(Duration::from_secs);
        EndpointError::Refused { status, message: String::new(), retry_after, should_retry: None }
    }

    #[test]
    fn waits_double_up_to_a_minute_and_are_drawn_from_their_upper_half() {
        let mut backoff = Backoff::new(12);
        let mut longest = 500;
        for _ in 0..12 {
            let wait = backoff.next(&refused(503, None)).expect("a further attempt").as_millis();
            assert!((longest / 2..=longest).contains(&wait), "{wait} of {longest} ms");
            longest = (longest * 2).min(60_000);
        }
        assert_eq!((backoff.next(&refused(503, None)), backoff.attempts()), (None, 13));
        let draws: Vec<_> = (0..8).map(|_| Backoff::new(1).next(&refused(503, None))).collect();
        assert!(draws.iter().any(|draw| *draw != draws[0]), "{draws:?}");
    }

    #[test]
    fn a_wait_that_the_server_names_is_kept_unless_it_is_too_long() {
        let wait = Backoff::new(1).next(&refused(429, Some(7))).expect("a further attempt");
        assert!((7.0..=7.5).contains(&wait.as_secs_f64()), "{wait:?}");
        assert_eq!(Backoff::new(1).next(&refused(429, Some(301))), None);
        assert!(Backoff::new(1).next(&refused(429, Some(0))).is_some_and(|wait| wait.as_millis() >= 250));
    }

    #[test]
    fn what_no_attempt_changes_is_not_tried_again() {
        let tried = |error: &EndpointError| Backoff::new(1).next(error).is_some();
        for status in [400, 401, 403, 404, 413, 422, 501] {
            assert!(!tried(&refused(status, None)), "{status}");
        }
        for status in [408, 425, 429, 500, 502, 503, 504, 529] {
            assert!(tried(&refused(status, None)), "{status}");
        }
        assert!(tried(&EndpointError::Unreadable { problem: String::new() }));
        for (status, should_retry) in [(408, false), (503, false), (400, true)] {
            let error = EndpointError::Refused {
                status,
                message: String::new(),
                retry_after: None,
                should_retry: Some(should_retry),
            };
            assert_eq!(tried(&error), should_retry, "{status}: the server's wish counts");
        }
    }
}
