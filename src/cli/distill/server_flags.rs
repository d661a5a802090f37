//! Flags of `medusa distill --endpoint`, and the model that they choose.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context;
use clap::Args;
use url::Url;

use crate::cli::numbers::above_zero;
use crate::cli::{CommonFlags, UsageError, interrupted};
use crate::http::EndpointError;
use crate::http::backoff::{Backoff, pause};
use crate::http::endpoint::{EndpointClient, ListedModel, parse_endpoint};

/// Models of a server that an error lists.
const SHOWN_MODELS: usize = 20;

/// Asking a server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub(in crate::cli) struct ServerFlags {
    /// Let an OpenAI-compatible server answer, such as http://127.0.0.1:8000. Conversations go to /v1/chat/completions, raw prompts to
    /// /v1/completions. With --strict, answers whose tokens are not those of --backbone are an error; without it they are counted.
    #[arg(long, value_name = "URL", value_parser = parse_endpoint)]
    pub(in crate::cli) endpoint: Option<Url>,
    /// Model to ask the server for [default: its only one].
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    pub(in crate::cli) model: Option<String>,
    /// Requests in flight.
    #[arg(long, value_name = "N", default_value = "64", value_parser = above_zero::<NonZeroUsize>, requires = "endpoint")]
    pub(in crate::cli) concurrency: NonZeroUsize,
    /// How often a request is sent again after a broken connection, a broken answer or status 408, 409, 425, 429 or 5xx. The waits grow from half
    /// a second to a minute, or are those that the server asks for.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "endpoint")]
    pub(in crate::cli) retries: u32,
    /// Longest wait for an answer; then the request is sent again.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = above_zero::<NonZeroU32>, requires = "endpoint")]
    pub(in crate::cli) timeout: NonZeroU32,
    /// File with the server's API key in its first line [default: the environment variable `MEDUSA_API_KEY`, else no key].
    #[arg(long, value_name = "F", requires = "endpoint")]
    pub(in crate::cli) api_key_file: Option<PathBuf>,
}

impl ServerFlags {
    /// The server's models, once it has loaded them. A server that is not there is not waited for: its address may be wrong.
    fn listed(&self, client: &EndpointClient, common: &CommonFlags) -> Result<Vec<ListedModel>, EndpointError> {
        let (mut backoff, stop) = (Backoff::new(self.retries), interrupted());
        loop {
            let listed = client.models();
            let wait = match &listed {
                Err(error @ EndpointError::Refused { .. }) if !stop.load(Ordering::Relaxed) => backoff.next(error),
                _ => None,
            };
            let (Some(wait), Err(error)) = (wait, &listed) else { return listed };
            common.say(format_args!(
                "{}/models: {error}; asking again in {:.1} s",
                client.endpoint(),
                wait.as_secs_f64()
            ));
            pause(wait, stop);
        }
    }

    /// The model to ask for, which the server must list.
    pub(super) fn model(&self, client: &EndpointClient, common: &CommonFlags) -> anyhow::Result<ListedModel> {
        let listed = match (self.listed(client, common), &self.model) {
            (Err(EndpointError::Refused { status: 404 | 405, .. }), Some(name)) => {
                common.say(format_args!("{} has no list of models: {name} is not checked", client.endpoint()));
                return Ok(ListedModel { id: name.clone(), max_model_len: None });
            }
            (listed, _) => listed.context("cannot list the server's models")?,
        };
        let names: Vec<&str> = listed.iter().map(|model| model.id.as_str()).take(SHOWN_MODELS).collect();
        let more = if listed.len() > SHOWN_MODELS { ", …" } else { "" };
        let has = format!("{} has {}{more}", client.endpoint(), client.clean(&names.join(", ")));
        match (&self.model, listed.as_slice()) {
            (_, []) => anyhow::bail!("{} lists no model", client.endpoint()),
            (None, [only]) => Ok(only.clone()),
            (None, _) => Err(UsageError(format!("--model: {has}; choose one")).into()),
            (Some(name), models) => match models.iter().find(|model| model.id == *name) {
                Some(model) => Ok(model.clone()),
                None => Err(UsageError(format!("--model {name}: {has}")).into()),
            },
        }
    }
}
