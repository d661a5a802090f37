//! `medusa bench --endpoint`: measures an OpenAI-compatible server as its clients see it. Needs no libtorch.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Map, Value, json};

use super::args::BenchArgs;
use super::load::output::LoadOutput;
use crate::bench::clients;
use crate::bounds::RESPONSE_BYTES;
use crate::cli::progress::Counter;
use crate::cli::{CommonFlags, Interrupted, api_key, interrupted, prompts};
use crate::data::prompts::PromptInput;
use crate::formats::load::LoadSource;
use crate::http::endpoint::{AnswerWait, CHAT_COMPLETIONS, COMPLETIONS, ClientLimits, EndpointClient, EndpointRequest};
use crate::numbers::{Finite, Positive};

/// More idle connections than there are clients; a request may wait long for its first token. A connection that was closed in the meantime is no
/// failure of the server.
const LIMITS: ClientLimits =
    ClientLimits { idle: 128, wait: AnswerWait::NextBytes(Duration::from_secs(600)), resends: 2 };

/// Measures the server of `--endpoint` at each level of concurrency.
///
/// # Errors
/// An error in the command line, the prompts or the first, unmeasured request; a level without an answer; [`Interrupted`].
pub fn run(args: &BenchArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let endpoint = args.load.endpoint.clone().context("--endpoint is given")?;
    args.load.check(args.decoding.max_new_tokens)?;
    let key = api_key::find(args.load.api_key_file.as_deref())?;
    let prompts = prompts::read(args.prompts(), common)?;
    let client = EndpointClient::new(endpoint, key, LIMITS)?;
    let stop = interrupted();
    let model = args.load.model.clone().map_or_else(|| first_model(&client), Ok)?;
    let settings = settings(args, &model, common);
    let requests: Vec<EndpointRequest> = prompts.iter().map(|prompt| request(&prompt.input, &settings)).collect();
    let first = clients::answer(&client, &requests[0], stop).answer;
    if stop.load(Ordering::Relaxed) {
        return Err(Interrupted("interrupted before the first measured request".into()).into());
    }
    first.context("the first request, which is not measured, failed")?;
    let mut output = LoadOutput::new(args, common);
    let ended = args.load.levels(requests.len()).into_iter().try_for_each(|level| {
        let counter = Counter::new(level.requests, 0, "requests", common);
        let note = format!("{} in flight", level.concurrency);
        let run = clients::closed_loop(&client, &requests, level, stop, &mut |done| counter.set(done, &note));
        drop(counter);
        if stop.load(Ordering::Relaxed) {
            return Err(Interrupted(format!("interrupted at --concurrency {}", level.concurrency)).into());
        }
        let source = LoadSource::Server { endpoint: client.shown_endpoint(), model: client.clean(&model) };
        output.add(vec![run.result(level.concurrency.get(), source)])?;
        match run.failures.first().filter(|_| run.answered.is_empty()) {
            Some(why) => anyhow::bail!("--concurrency {}: every request failed; the first: {why}", level.concurrency),
            None => Ok(()),
        }
    });
    output.print_table()?;
    ended
}

/// The first model of `/v1/models`.
fn first_model(client: &EndpointClient) -> anyhow::Result<String> {
    let why = || format!("{}/models names no model; give --model NAME", client.shown_endpoint());
    let models = client.models().with_context(why)?;
    models.into_iter().next().map(|model| model.id).with_context(why)
}

/// What all requests have in common. Only what the user asks for is sent besides what every server knows.
fn settings(args: &BenchArgs, model: &str, common: &CommonFlags) -> Map<String, Value> {
    let decoding = &args.decoding;
    let always = [
        ("model", json!(model)),
        ("stream", json!(true)),
        ("stream_options", json!({"include_usage": true})),
        ("max_tokens", json!(decoding.max_new_tokens)),
        ("temperature", json!(decoding.temperature.get())),
    ];
    let penalty = Some(decoding.repetition_penalty).filter(|penalty| *penalty != Positive::ONE);
    let unless_zero =
        |penalty: Finite| Some(penalty).filter(|penalty| *penalty != Finite::ZERO).map(|penalty| json!(penalty.get()));
    let asked = [
        ("top_p", decoding.top_p.map(|share| json!(share.get()))),
        ("top_k", decoding.top_k.map(|count| json!(NonZeroUsize::get(count)))),
        ("repetition_penalty", penalty.map(|penalty| json!(penalty.get()))),
        ("frequency_penalty", unless_zero(decoding.frequency_penalty)),
        ("presence_penalty", unless_zero(decoding.presence_penalty)),
        ("seed", common.seed_was_given.then(|| json!(common.seed))),
    ];
    let asked = asked.into_iter().filter_map(|(name, value)| Some((name, value?)));
    always.into_iter().chain(asked).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// A prompt with the settings. Of several turns the first is asked.
fn request(input: &PromptInput, settings: &Map<String, Value>) -> EndpointRequest {
    let path = if input.needs_template() { CHAT_COMPLETIONS } else { COMPLETIONS };
    let mut body = settings.clone();
    body.extend(input.to_openai());
    EndpointRequest { path, body: Value::Object(body).to_string(), answer_bytes: RESPONSE_BYTES }
}
