//! `--allowed-host`.

use std::net::IpAddr;

use clap::Args;

use crate::serve::auth::ApiKeys;
use crate::serve::host_names::HostNames;

/// The names by which clients may call the server.
#[derive(Debug, Clone, Args)]
pub(super) struct AllowedHostFlags {
    /// Answer only requests to this host name, the value of --host and loopback names; may be repeated; * allows all [default: all, except on a
    /// loopback address without an API key: there loopback names and --host, so that no web page can call the server by a name of its own].
    #[arg(long, help_heading = "Server", value_name = "NAME", value_parser = host_name)]
    allowed_host: Vec<String>,
}

impl AllowedHostFlags {
    /// The names of a server that listens on `host`, which is this address.
    pub(super) fn names(&self, host: &str, address: IpAddr, keys: &ApiKeys) -> HostNames {
        let is_open_to_pages = address.is_loopback() && !keys.are_needed();
        let is_checked = is_open_to_pages || !self.allowed_host.is_empty();
        match is_checked && !self.allowed_host.iter().any(|name| name == "*") {
            true => HostNames::loopback_and(self.allowed_host.iter().map(String::as_str).chain([host])),
            false => HostNames::Any,
        }
    }
}

/// A name or an address without scheme, port and path.
fn host_name(text: &str) -> Result<String, String> {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_name = !text.is_empty() && text.bytes().all(is_of_name);
    let is_address = text.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    match is_name || is_address || text == "*" {
        true => Ok(text.to_owned()),
        false => Err("expected a host name such as gpu.example.org without scheme, port and path, or *".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn names(allowed: &[&str], address: Ipv4Addr, keys: &ApiKeys) -> HostNames {
        let allowed_host = allowed.iter().map(|&name| host_name(name).expect("a name")).collect();
        AllowedHostFlags { allowed_host }.names("box", address.into(), keys)
    }

    #[test]
    fn names_are_checked_where_a_page_could_call_or_where_they_are_given() {
        let (none, key) = (ApiKeys::default(), ApiKeys::new(["sesame"]));
        let (loopback, every) = (Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED);
        assert_eq!(names(&[], loopback, &none), HostNames::loopback_and(["box"]));
        assert_eq!(names(&["*"], loopback, &none), HostNames::Any);
        assert_eq!(names(&[], loopback, &key), HostNames::Any);
        assert_eq!(names(&[], every, &none), HostNames::Any);
        for (address, keys) in [(loopback, &none), (loopback, &key), (every, &none)] {
            assert_eq!(names(&["a.org", "::2"], address, keys), HostNames::loopback_and(["::2", "a.org", "box"]));
        }
    }

    #[test]
    fn a_host_name_has_no_scheme_port_or_path() {
        for name in ["a.org", "a", "10.0.0.1", "::1", "[::1]", "*"] {
            assert_eq!(host_name(name).as_deref(), Ok(name));
        }
        for wrong in ["", "http://a.org", "a.org:80", "a.org/", "*.a.org", "a b", "\u{e9}.org"] {
            assert!(host_name(wrong).is_err_and(|why| why.contains("expected a host name")), "{wrong}");
        }
    }
}
