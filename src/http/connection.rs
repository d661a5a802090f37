//! What all HTTP clients have in common: whom they trust, which proxy they go through, and how they read an answer's head.

use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use ureq::config::ConfigBuilder;
use ureq::http::request::Builder;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;
use ureq::{Agent, AsSendBody, Error, Proxy, ProxyProtocol};
use url::{Host, Url};

use super::connector::{HttpConnector, LaterResolver};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// An answer of any status, whose body has not been read.
pub type HttpAnswer = ureq::http::Response<ureq::Body>;

/// The settings of every client. Redirects are left to the caller: they would take the token along, or lose the body of a POST.
pub fn settings(proxy: Option<Proxy>) -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .max_redirects(0)
        .http_status_as_error(false)
        .tls_config(trusted())
        .proxy(proxy)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .user_agent(concat!("medusa-train/", env!("CARGO_PKG_VERSION")))
}

/// A client with these settings.
pub fn agent(settings: ConfigBuilder<AgentScope>) -> Agent {
    Agent::with_parts(settings.build(), HttpConnector::default(), LaterResolver)
}

/// Mozilla's root certificates, compiled in, and those of this machine (`SSL_CERT_FILE`, `SSL_CERT_DIR` or the system's
/// store). Broken certificates are skipped.
fn trusted() -> TlsConfig {
    let compiled = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().map(|root| Certificate::from_der(root));
    let found = rustls_native_certs::load_native_certs().certs;
    let found = found.iter().map(|root| Certificate::from_der(root).to_owned());
    let crypto = Arc::new(ring::default_provider());
    let roots = RootCerts::from(compiled.chain(found));
    TlsConfig::builder().root_certs(roots).unversioned_rustls_crypto_provider(crypto).build()
}

/// Sends a request.
///
/// # Errors
/// There is no answer, or none of HTTP.
pub fn send(agent: &Agent, request: Builder, body: impl AsSendBody) -> Result<HttpAnswer, Error> {
    agent.run(request.body(body)?)
}

/// A header of an answer; `None` also for one that is no UTF-8.
pub fn header<'r>(answer: &'r HttpAnswer, name: &str) -> Option<&'r str> {
    answer.headers().get(name).and_then(|value| std::str::from_utf8(value.as_bytes()).ok())
}

/// The proxy; `None` for the local machine and hosts in `NO_PROXY`.
///
/// # Errors
/// The variable whose value is not the address of an HTTP proxy. The value may hold a password.
pub fn proxy(endpoint: &Url, setting: &dyn Fn(&str) -> Option<String>) -> Result<Option<Proxy>, &'static str> {
    let Some((variable, address)) = proxy_setting(endpoint, setting) else { return Ok(None) };
    let proxy = Proxy::new(&address).ok().filter(|proxy| proxy.protocol() == ProxyProtocol::Http);
    proxy.map(Some).ok_or(variable)
}

/// The proxy's variable and address; `None` for the local machine and hosts in `NO_PROXY`.
fn proxy_setting(endpoint: &Url, setting: &dyn Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
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
            proxy_setting(&Url::parse(endpoint).unwrap(), &setting).map(|(name, _)| name)
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

    #[test]
    fn a_proxy_that_is_none_is_reported_with_its_variable() {
        let parsed = |address: &str| proxy(&Url::parse("https://hub.example").unwrap(), &|_| Some(address.to_owned()));
        for address in ["p:1", "http://p:1/", "http://me:secret@p:1"] {
            assert!(parsed(address).unwrap().is_some_and(|proxy| proxy.port() == 1), "{address}");
        }
        for address in ["http://", "socks5://p:1", "https://p:1", "http://me:se cret@p:1"] {
            assert_eq!(parsed(address), Err("HTTPS_PROXY"), "{address}");
        }
    }
}
