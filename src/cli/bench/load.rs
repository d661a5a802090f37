//! Throughput and latencies with several requests in flight (closed loop: the next request is sent when one is answered).

pub(super) mod flags;
pub(super) mod in_process;
pub(super) mod output;
pub(super) mod timeline;
