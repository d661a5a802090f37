//! The names by which clients may call the server.
//!
//! A page can let its own name point to a loopback address after it was loaded (DNS rebinding). To the browser, server and page then have one
//! origin: nothing holds the page back, and it reads the answers. The `Host` of its requests still is the page's name.

use std::collections::BTreeSet;
use std::net::IpAddr;

use axum::http::uri::Authority;

/// The names by which clients may call the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostNames {
    Any,
    /// Loopback names and addresses, and these, in lower case, without brackets and a dot at the end.
    Loopback(BTreeSet<String>),
}

impl HostNames {
    /// Loopback names and addresses, and `more`.
    pub fn loopback_and<'n>(more: impl IntoIterator<Item = &'n str>) -> Self {
        Self::Loopback(more.into_iter().map(normal).collect())
    }

    /// Whether a request may have this `Host`: a name or an address, with or without a port.
    pub fn admit(&self, host: &str) -> bool {
        let Self::Loopback(more) = self else { return true };
        name_of(host).is_some_and(|name| is_loopback(&name) || more.contains(&name))
    }
}

/// The name of a `Host`, which has nothing more than a port.
fn name_of(host: &str) -> Option<String> {
    let authority: Authority = host.parse().ok()?;
    let port = host.strip_prefix(authority.host())?;
    let is_port = port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    is_port.then(|| normal(authority.host()))
}

/// Browsers resolve `localhost` and the names below it themselves: nobody else can own one.
fn is_loopback(name: &str) -> bool {
    let is_address = name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    is_address || name == "localhost" || name.ends_with(".localhost")
}

/// A name without brackets, capitals and the dot at its end.
fn normal(name: &str) -> String {
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_and_the_given_ones_are_admitted() {
        let names = HostNames::loopback_and(["My.Example", "::2"]);
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "app.localhost:1",
            "127.0.0.1",
            "127.9.8.7:80",
            "[::1]:8000",
            "[::ffff:127.0.0.1]",
            "my.example:443",
            "[::2]",
        ] {
            assert!(names.admit(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "evil-localhost",
            "127.0.0.1.evil.example",
            "example",
            "128.0.0.1",
            "0.0.0.0",
            "[::3]",
            "my.example/",
            "evil.example@localhost",
            "localhost:evil",
            "localhost:65536",
            "[::1]evil",
            "[::1]:80@evil.example",
            "localhost\u{e9}",
        ] {
            assert!(!names.admit(host), "{host}");
        }
        assert!(HostNames::Any.admit("evil.example"));
    }
}
