//! Whom a connection trusts, and which proxy it goes through.

use std::sync::Arc;

use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use ureq::Response;
use url::{Host, Url};

use crate::panics;

/// Mozilla's root certificates, compiled in, and those of this machine (`SSL_CERT_FILE`, `SSL_CERT_DIR` or the system's
/// store).
pub fn trusted() -> Arc<ClientConfig> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs); // broken certificates are skipped
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// A header of an answer; `None` also for one without a colon, on which ureq panics.
pub fn header<'r>(answer: &'r Response, name: &str) -> Option<&'r str> {
    panics::of_library(|| answer.header(name)).ok().flatten()
}

/// The proxy's variable and address; `None` for the local machine and hosts in `NO_PROXY`.
pub fn proxy(endpoint: &Url, setting: &dyn Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let names: [&'static str; 4] = match endpoint.scheme() {
        "https" => ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"],
        _ => ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"],
    };
    let host = endpoint.host_str()?;
    let is_local = match endpoint.host()? {
        Host::Domain(name) => name == "localhost",
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => address.is_loopback(),
    };
    let excepted = setting("NO_PROXY").or_else(|| setting("no_proxy")).unwrap_or_default();
    let is_excepted = excepted.split(',').map(|name| name.trim().trim_start_matches('.')).any(|name| {
        name == "*"
            || name == host
            || !name.is_empty() && host.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
    });
    let found = names.into_iter().find_map(|name| Some((name, setting(name)?)));
    found.filter(|_| !is_local && !is_excepted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_for_other_machines() {
        let found = |endpoint: &str, pairs: &[(&str, &str)]| {
            let setting = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            proxy(&Url::parse(endpoint).unwrap(), &setting).map(|(name, _)| name)
        };
        let both = [("HTTPS_PROXY", "http://p:1"), ("http_proxy", "http://p:2")];
        assert_eq!(found("https://huggingface.co", &both), Some("HTTPS_PROXY"));
        assert_eq!(found("http://hub.example", &both), Some("http_proxy"));
        assert_eq!(found("http://127.0.0.1:8", &both), None);
        assert_eq!(found("http://localhost:8", &both), None);
        let excepted = [("ALL_PROXY", "http://p:1"), ("NO_PROXY", "a.example, .huggingface.co")];
        assert_eq!(found("https://huggingface.co", &excepted), None);
        assert_eq!(found("https://hub.huggingface.co", &excepted), None);
        assert_eq!(found("https://nothuggingface.co", &excepted), Some("ALL_PROXY"));
    }
}
