//! Throughput and latencies with several requests in flight (closed loop: the next request is sent when one is answered).

pub(super) mod flags;
pub(super) mod output;
