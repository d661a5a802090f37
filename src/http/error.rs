//! Errors of servers.

use std::time::Duration;

/// Statuses below 500 that ask for another try: a request that took too long, a conflict, one that came too early, a rate limit.
const TEMPORARY: [u16; 4] = [TIMED_OUT, 409, 425, TOO_MANY_REQUESTS];
/// Statuses from 500 on that no other try changes: not implemented, an unknown version of HTTP.
const PERMANENT: [u16; 2] = [501, 505];

/// Statuses of one request: malformed, too large, not to be processed.
const OF_THE_REQUEST: [u16; 3] = [400, 413, 422];

const TIMED_OUT: u16 = 408;
const FAILED: u16 = 500;
pub(super) const TOO_MANY_REQUESTS: u16 = 429;

/// Why a server did not answer. No text holds the API key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// There is no connection, or it ended before the answer did.
    #[error("no answer from {endpoint}: {reason}")]
    Unreachable {
        /// As it is shown.
        endpoint: String,
        reason: String,
    },
    /// A status that is no success.
    #[error("status {status}: {message}")]
    Refused {
        status: u16,
        /// The server's.
        message: String,
        /// The wait that the server asks for.
        retry_after: Option<Duration>,
        /// Whether the server asks for another attempt (`x-should-retry`), whatever the status is.
        should_retry: Option<bool>,
    },
    /// The answer is cut off, or is something else than was asked for.
    #[error("{problem}")]
    Unreadable { problem: String },
    /// The proxy of an environment variable. Its value may hold a password.
    #[error("{variable}: expected an address such as http://host:port")]
    Proxy { variable: &'static str },
}

impl EndpointError {
    /// Whether the same request may be answered later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Unreadable { .. } => true,
            Self::Refused { status, should_retry, .. } => should_retry
                .unwrap_or_else(|| TEMPORARY.contains(status) || *status >= 500 && !PERMANENT.contains(status)),
            Self::Proxy { .. } => false,
        }
    }

    /// Whether the server refuses this request, and may answer others: it is malformed, too long, or took too much time and shall not come
    /// again.
    pub fn is_of_the_request(&self) -> bool {
        match self {
            Self::Refused { status, should_retry, .. } => {
                OF_THE_REQUEST.contains(status) && *should_retry != Some(true)
                    || *status == TIMED_OUT && *should_retry == Some(false)
            }
            _ => false,
        }
    }

    /// Whether the request itself may be why the server fails each time: the server is there, and cannot answer it. Other statuses from 500
    /// on mean that a server, or one behind it, is away.
    pub fn may_be_of_the_request(&self) -> bool {
        matches!(self, Self::Unreadable { .. } | Self::Refused { status: FAILED, .. })
    }

    /// The status, if there is one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The wait that a busy server asks for; `None` for every other error and where it names no wait.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether the server limits the rate of requests (status 429).
    pub fn is_rate_limit(&self) -> bool {
        self.status() == Some(TOO_MANY_REQUESTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, should_retry: Option<bool>) -> EndpointError {
        EndpointError::Refused { status, message: String::new(), retry_after: None, should_retry }
    }

    #[test]
    fn a_request_is_refused_unless_the_server_asks_for_it_again() {
        for (status, should_retry, expected) in [
            (400, None, true),
            (413, Some(false), true),
            (422, Some(true), false),
            (400, Some(true), false),
            (408, None, false),
            (408, Some(false), true),
            (500, Some(false), false),
            (401, None, false),
        ] {
            assert_eq!(refused(status, should_retry).is_of_the_request(), expected, "{status}, {should_retry:?}");
        }
    }

    #[test]
    fn a_server_that_is_away_says_nothing_of_the_request() {
        assert!(refused(500, None).may_be_of_the_request());
        assert!(EndpointError::Unreadable { problem: "half".into() }.may_be_of_the_request());
        for status in [400, 401, 404, 429, 502, 503, 504] {
            assert!(!refused(status, None).may_be_of_the_request(), "{status}");
        }
    }
}
