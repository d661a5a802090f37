//! Clients that each send a request when the one before is answered.

use std::io::BufReader;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::stream;
use super::timeline::{AnsweredRequest, LevelRun, LoadLevel, RequestTimeline};
use crate::bounds::STREAM_BYTES;
use crate::http::EndpointError;
use crate::http::backoff::pause;
use crate::http::connection::HttpAnswer;
use crate::http::endpoint::{EndpointClient, EndpointRequest};

/// Answers of status 429 until a request has failed.
const MOST_WAITS: usize = 20;
/// Wait where the server does not name one.
const USUAL_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// What came of a request.
#[derive(Debug)]
pub struct RequestOutcome {
    /// Answers of status 429, after each of which it was sent again.
    pub rate_limited: usize,
    pub answer: Result<AnsweredRequest, EndpointError>,
}

/// Sends the requests of a level, the prompts as often as that takes, until all are answered or `stop` is set. `on_end` learns how many
/// ended.
pub fn closed_loop(
    client: &EndpointClient,
    requests: &[EndpointRequest],
    level: LoadLevel,
    stop: &AtomicBool,
    on_end: &mut dyn FnMut(usize),
) -> LevelRun {
    let next = AtomicUsize::new(0);
    let (sender, outcomes) = mpsc::channel();
    let mut run = LevelRun::default();
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..level.concurrency.get() {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= level.requests || stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let outcome = answer(client, &requests[at % requests.len()], stop);
                    let _ = sender.send(outcome); // the receiver lives as long as the clients
                }
            });
        }
        drop(sender);
        for outcome in outcomes {
            run.rate_limited += outcome.rate_limited;
            match outcome.answer {
                Ok(answered) => run.answered.push(answered),
                Err(why) => run.failures.push(why.to_string()),
            }
            on_end(run.answered.len() + run.failures.len());
        }
    });
    run.elapsed = began.elapsed();
    run
}

/// Sends a request, again where the server is busy, and reads the stream that answers it. Its latencies include the waits.
pub fn answer(client: &EndpointClient, request: &EndpointRequest, stop: &AtomicBool) -> RequestOutcome {
    let timeline = RequestTimeline::begin(Instant::now());
    let mut rate_limited = 0;
    loop {
        if stop.load(Ordering::Relaxed) {
            let problem = "interrupted".to_owned();
            return RequestOutcome { rate_limited, answer: Err(EndpointError::Unreadable { problem }) };
        }
        let response = client.post(request);
        match response.as_ref().err().filter(|_| rate_limited < MOST_WAITS).and_then(wait) {
            Some(wait) => {
                rate_limited += 1;
                pause(wait, stop);
            }
            None => {
                let answer = response.and_then(|response| streamed(client, response, timeline, stop));
                return RequestOutcome { rate_limited, answer };
            }
        }
    }
}

fn streamed(
    client: &EndpointClient,
    response: HttpAnswer,
    timeline: RequestTimeline,
    stop: &AtomicBool,
) -> Result<AnsweredRequest, EndpointError> {
    let kind = response.body().mime_type().unwrap_or("no content type").trim().to_owned();
    if kind != "text/event-stream" {
        let kind = client.clean(&kind);
        let problem = format!("the server answered with {kind}, not with a stream (text/event-stream)");
        return Err(EndpointError::Unreadable { problem });
    }
    let answer = stream::read(&mut BufReader::new(response.into_body().into_reader()), STREAM_BYTES, timeline, stop);
    answer.map_err(|why| EndpointError::Unreadable { problem: client.clean(&why.to_string()) })
}

/// How long to wait before a request is sent again; `None` for any other error than status 429, where the server wants no other attempt, and
/// where the wait is too long.
fn wait(error: &EndpointError) -> Option<Duration> {
    let wait = error.retry_after().unwrap_or(USUAL_WAIT);
    (error.is_rate_limit() && error.is_temporary() && wait <= LONGEST_WAIT).then_some(wait)
}
