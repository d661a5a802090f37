//! The sockets: accepts connections, each with limits on time, and lets them end when the server stops.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::bounds::REQUEST_HEADER_BYTES;
use axum::Router;
use axum::extract::{ConnectInfo, Request};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

/// After an error of `accept`, such as too many open files, the next connection is accepted so much later.
const AFTER_ERROR: Duration = Duration::from_millis(50);
/// For the errors of requests that are cut.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Open at a time; others wait until one ends.
    pub connections: usize,
    /// For a request's headers, the wait for the next request on the same connection included.
    pub header_time: Duration,
    /// For a client that reads nothing of its answer.
    pub write_time: Duration,
    /// For the requests that are open when the server stops.
    pub drain_time: Duration,
}

/// What the server is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Serving,
    /// No new connections; open requests are finished.
    Draining,
    /// Open requests end with an error.
    Cutting,
}

/// Answers connections until `stop`, then lets the open requests finish; those that are still open after the drain time have to end.
/// Returns whether none was.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: ConnectionLimits,
    phase: &watch::Sender<Phase>,
    stop: impl Future<Output = ()>,
) -> bool {
    let open = GracefulShutdown::new();
    tokio::select! {
        () = accept_all(&listener, &routes, limits, &open) => {}
        () = stop => {}
    }
    drop(listener);
    phase.send_replace(Phase::Draining);
    let mut drained = std::pin::pin!(open.shutdown());
    if timeout(limits.drain_time, &mut drained).await.is_ok() {
        return true;
    }
    phase.send_replace(Phase::Cutting);
    let _ = timeout(LAST_WORDS, drained).await; // who does not read them has had the drain time
    false
}

/// Never returns.
async fn accept_all(listener: &TcpListener, routes: &Router, limits: ConnectionLimits, open: &GracefulShutdown) {
    let places = Arc::new(Semaphore::new(limits.connections));
    loop {
        match accept(listener, &places).await {
            Ok((stream, place)) => {
                tokio::spawn(answer(stream, routes.clone(), limits, open.watcher(), place));
            }
            Err(_) => sleep(AFTER_ERROR).await,
        }
    }
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

/// Answers a connection's requests, one after the other.
async fn answer(
    stream: TcpStream,
    routes: Router,
    limits: ConnectionLimits,
    watcher: Watcher,
    _place: OwnedSemaphorePermit,
) {
    let Ok(peer) = stream.peer_addr() else { return }; // it has gone already
    // Tokens are small packets, each of which is waited for.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.write_time));
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        let routes = routes.clone();
        async move { routes.oneshot(request.map(axum::body::Body::new)).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_header_size(REQUEST_HEADER_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    // An error is the client's: it went away, sent no HTTP, or took too long.
    let _ = watcher.watch(connection).await;
}
