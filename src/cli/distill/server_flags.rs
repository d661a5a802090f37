//! Flags of `medusa distill --endpoint`, and the model that they choose.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use clap::Args;
use url::Url;

use crate::cli::numbers::above_zero;
use crate::cli::{CommonFlags, Interrupted, UsageError};
use crate::distill::FEW_REFUSED;
use crate::distill::output::Output;
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
    /// /v1/completions. What is otherwise counted is an error with --strict: a question that the server refuses, an answer of another model, and one
    /// whose tokens are not those of --backbone or cannot be compared with them.
    #[arg(long, value_name = "URL", value_parser = parse_endpoint)]
    pub(in crate::cli) endpoint: Option<Url>,
    /// Model to ask the server for [default: its only one].
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    pub(in crate::cli) model: Option<String>,
    /// Requests in flight.
    #[arg(long, value_name = "N", default_value = "64", value_parser = above_zero::<NonZeroUsize>, requires = "endpoint")]
    pub(in crate::cli) concurrency: NonZeroUsize,
    /// How often a request is sent again after a broken connection, a broken answer or status 408, 409, 425, 429 or 5xx, unless the server says
    /// otherwise (x-should-retry). The waits grow from half a second to a minute, or are those that the server asks for.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "endpoint")]
    pub(in crate::cli) retries: u32,
    /// Longest time from the connection to the last byte of an answer; then the request is sent again.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = above_zero::<NonZeroU32>, requires = "endpoint")]
    pub(in crate::cli) timeout: NonZeroU32,
    /// Questions of --out that the server may refuse, by a content filter, with status 400, 413 or 422, or with status 500 or no answer of
    /// OpenAI's form to every attempt; one more ends the run [default: one in a
    /// hundred conversations, at least 10; none with --strict].
    #[arg(long, value_name = "N", requires = "endpoint", conflicts_with = "strict")]
    pub(in crate::cli) max_refused: Option<usize>,
    /// File with the server's API key in its first line [default: the environment variable `MEDUSA_API_KEY`, else no key].
    #[arg(long, value_name = "F", requires = "endpoint")]
    pub(in crate::cli) api_key_file: Option<PathBuf>,
}

impl ServerFlags {
    /// The server's models, once it has loaded them. A server that is not there is not waited for: its address may be wrong.
    fn listed(
        &self,
        client: &EndpointClient,
        stop: &AtomicBool,
        common: &CommonFlags,
    ) -> Result<Vec<ListedModel>, EndpointError> {
        let mut backoff = Backoff::new(self.retries);
        loop {
            let listed = client.models();
            let wait = match &listed {
                Err(error @ EndpointError::Refused { .. }) if !stop.load(Ordering::Relaxed) => backoff.next(error),
                _ => None,
            };
            let (Some(wait), Err(error)) = (wait, &listed) else { return listed };
            common.say(format_args!(
                "{}/models: {error}; asking again in {:.1} s",
                client.shown_endpoint(),
                wait.as_secs_f64()
            ));
            pause(wait, stop);
        }
    }

    /// The most refused questions, of a folder with so many conversations.
    pub(super) fn most_refused(&self, output: &Output, is_strict: bool) -> usize {
        let usual = if is_strict { 0 } else { (output.conversations() / 100).max(FEW_REFUSED) };
        self.max_refused.unwrap_or(usual)
    }

    /// The model to ask for, which the server must list. `stop` ends the waits for a server that is loading it.
    pub(super) fn model(
        &self,
        client: &EndpointClient,
        stop: &AtomicBool,
        common: &CommonFlags,
    ) -> anyhow::Result<ListedModel> {
        let listed = self.listed(client, stop, common);
        if stop.load(Ordering::Relaxed) {
            return Err(Interrupted("interrupted before the first question".to_owned()).into());
        }
        let endpoint = client.shown_endpoint();
        let listed = match (listed, &self.model) {
            (Err(EndpointError::Refused { status: 404 | 405, .. }), Some(name)) => {
                common.say(format_args!("{endpoint} has no list of models: {} is not checked", client.clean(name)));
                return Ok(ListedModel { id: name.clone(), max_model_len: None });
            }
            (listed, _) => listed.context("cannot list the server's models")?,
        };
        let names: Vec<&str> = listed.iter().map(|model| model.id.as_str()).take(SHOWN_MODELS).collect();
        let more = if listed.len() > SHOWN_MODELS { ", …" } else { "" };
        let has = format!("{endpoint} has {}{more}", client.clean(&names.join(", ")));
        match (&self.model, listed.as_slice()) {
            (_, []) => anyhow::bail!("{endpoint} lists no model"),
            (None, [only]) if client.clean(&only.id) == only.id => Ok(only.clone()),
            (None, _) => Err(UsageError(format!("--model: {has}; choose one")).into()),
            (Some(name), models) => match models.iter().find(|model| model.id == *name) {
                Some(model) => Ok(model.clone()),
                None => Err(UsageError(format!("--model {}: {has}", client.clean(name))).into()),
            },
        }
    }
}
