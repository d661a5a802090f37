//! New connections. Names are looked up for these only, not for each request as ureq does. A proxy is asked for a tunnel only where there is
//! TLS: many allow none to other ports than 443, and pass plain HTTP on.

use std::io::ErrorKind;
use std::mem;
use std::sync::Arc;

use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, DefaultConnector, NextTimeout, TcpConnector, Transport,
};

/// Why there is no answer, or only a part of it. Never the address, which may be signed.
pub fn reason(error: &Error) -> String {
    match error {
        Error::Timeout(_) => "timed out".to_owned(),
        Error::Io(why) => why.to_string(),
        Error::Other(why) => format!("connection failed: {why}"),
        other => other.to_string(),
    }
}

/// Whether there was no connection.
pub fn is_unconnected(error: &Error) -> bool {
    matches!(error, Error::Other(_))
}

/// Whether the connection ended before an answer began.
pub fn was_closed(error: &Error) -> bool {
    let kinds =
        [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::UnexpectedEof];
    matches!(error, Error::Io(why) if kinds.contains(&why.kind()))
}

/// Leaves names to [`HttpConnector`]: a request may go through a connection that is there.
#[derive(Debug)]
pub(super) struct LaterResolver;

impl Resolver for LaterResolver {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        Ok(self.empty())
    }
}

/// Its errors, and no others, are [`Error::Other`]: nothing was sent.
#[derive(Debug, Default)]
pub(super) struct HttpConnector {
    names: DefaultResolver,
    tcp: TcpConnector,
    ureqs: DefaultConnector,
}

impl Connector for HttpConnector {
    type Out = Box<dyn Transport>;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<Self::Out>, Error> {
        self.opened(details).map_err(|why| match why {
            Error::Other(_) => why, // a tunnel's connection to its proxy
            _ => Error::Other(reason(&why).into()),
        })
    }
}

impl HttpConnector {
    fn opened(&self, details: &ConnectionDetails<'_>) -> Result<Option<Box<dyn Transport>>, Error> {
        match details.config.proxy() {
            None => self.ureqs.connect(&self.resolved(details, details.uri)?, None),
            Some(_) if details.needs_tls() => self.ureqs.connect(details, None),
            Some(proxy) => {
                let opened = Connector::<()>::connect(&self.tcp, &self.resolved(details, proxy.uri())?, None)?;
                Ok(opened.map(|proxy| Box::new(PlainProxy::new(Box::new(proxy), details.uri)) as _))
            }
        }
    }

    /// The details with the addresses of a host. The lookup has no time limit: ureq would start a thread for one, and panic without.
    fn resolved<'d>(&self, details: &ConnectionDetails<'d>, host: &Uri) -> Result<ConnectionDetails<'d>, Error> {
        let addrs = self.names.resolve(host, details.config, NextTimeout::default())?;
        Ok(ConnectionDetails {
            addrs,
            uri: details.uri,
            config: details.config,
            request_level: details.request_level,
            resolver: details.resolver,
            now: details.now,
            timeout: details.timeout,
            current_time: Arc::clone(&details.current_time),
            run_connector: Arc::clone(&details.run_connector),
            register_shutdown: Arc::clone(&details.register_shutdown),
        })
    }
}

/// A connection to a proxy that passes on plain HTTP: a request names its whole address (RFC 9112, 3.2.2).
#[derive(Debug)]
struct PlainProxy {
    proxy: Box<dyn Transport>,
    /// Scheme, host and port of all requests.
    origin: String,
    /// Whether a request begins with the next output: what comes before was answered.
    is_next: bool,
}

impl PlainProxy {
    fn new(proxy: Box<dyn Transport>, target: &Uri) -> Self {
        let port = target.port().map(|port| format!(":{port}")).unwrap_or_default();
        Self { proxy, origin: format!("http://{}{port}", target.host().unwrap_or_default()), is_next: true }
    }
}

impl Transport for PlainProxy {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.proxy.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        if !mem::take(&mut self.is_next) {
            return self.proxy.transmit_output(amount, timeout);
        }
        let output = self.proxy.buffers().output();
        let (room, head) = (output.len(), &output[..amount]);
        let path = head.iter().position(|byte| *byte == b' ').map_or(0, |space| space + 1);
        let request = [&head[..path], self.origin.as_bytes(), &head[path..]].concat();
        request.chunks(room).try_for_each(|piece| {
            self.proxy.buffers().output()[..piece.len()].copy_from_slice(piece);
            self.proxy.transmit_output(piece.len(), timeout)
        })
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.is_next = true;
        self.proxy.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.proxy.is_open()
    }
}
