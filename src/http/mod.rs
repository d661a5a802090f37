//! HTTP clients: which certificates, proxies and connections they use, and a client of OpenAI-compatible servers with its key.

pub mod api_key;
pub mod backoff;
pub mod connection;
pub mod connector;
pub mod endpoint;
mod error;

pub use error::EndpointError;
