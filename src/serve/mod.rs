//! An OpenAI-compatible server. Prints nothing and knows no command line.
//!
//! One thread runs all [`connections`], whose requests the [`routes`] turn into [`job`]s: a job is one text. Another thread, the
//! [`worker`], decodes all texts together, and sends what comes of them to the [`answering`] requests.

pub mod acceptance;
pub mod answering;
pub mod api;
pub mod auth;
pub mod connections;
pub mod host_names;
pub mod job;
pub mod metrics;
mod open_text;
pub mod prompting;
pub mod record;
pub mod routes;
pub mod service;
#[cfg(test)]
mod tests;
pub mod worker;
