//! What all requests share, and how one becomes jobs.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::acceptance::AcceptanceRules;
use super::api::Endpoint;
use super::api::error::ApiError;
use super::api::request::TextRequest;
use super::auth::ApiKeys;
use super::connections::Phase;
use super::host_names::HostNames;
use super::job::{Job, TextEvent, TextSettings, WantedText};
use super::prompting::Prompting;
use super::record::Recorder;
use crate::engine::sample::Stream;
use crate::plural::counted;

/// Seconds after which a client may ask again when the queue is full.
const RETRY_AFTER: u64 = 1;

/// Limits of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestLimits {
    pub body_bytes: usize,
    /// For its body to arrive.
    pub body_time: Duration,
    /// Of each text.
    pub new_tokens: Option<NonZeroUsize>,
    /// From the request's headers to the end of its answer.
    pub time: Duration,
}

/// What all requests share.
#[derive(Debug)]
pub struct Service {
    /// The name by which clients ask for the model.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    pub prompting: Prompting,
    pub limits: RequestLimits,
    pub keys: ApiKeys,
    pub hosts: HostNames,
    pub recorder: Recorder,
    /// To the thread that decodes.
    pub jobs: Sender<Job>,
    /// Of texts that are decoded or wait.
    pub places: Arc<Semaphore>,
    /// The number of all places.
    pub capacity: usize,
    /// KiB of bodies that are read or parsed at a time, small ones not counted.
    pub bodies: Arc<Semaphore>,
    pub phase: watch::Receiver<Phase>,
    pub acceptance: AcceptanceRules,
}

/// A body that was read.
#[derive(Debug)]
pub struct RequestBody {
    pub json: Bytes,
    /// Of [`Service::bodies`], where it is not small.
    pub memory: Option<OwnedSemaphorePermit>,
}

/// A request, and the tokens of its prompts.
#[derive(Debug)]
pub struct CheckedRequest {
    pub request: TextRequest,
    pub prompts: Vec<Arc<[i64]>>,
}

/// The texts of a request on their way: the prompts' tokens, and what hears of the texts.
#[derive(Debug)]
pub struct RequestedTexts {
    pub prompts: Vec<Arc<[i64]>>,
    pub events: UnboundedReceiver<(usize, TextEvent)>,
}

impl Service {
    /// Ends when open requests are to end.
    pub async fn cut(&self) {
        let _ = self.phase.clone().wait_for(|phase| *phase == Phase::Cutting).await; // or when nobody can say so any more
    }

    /// Checks a request and turns its prompts into tokens, which takes the longer the longer they are. The body's memory is given back
    /// only then: a small body can become a large value.
    ///
    /// # Errors
    /// [`ApiError`]: what is wrong with it.
    pub fn checked(&self, endpoint: Endpoint, body: RequestBody) -> Result<CheckedRequest, ApiError> {
        let request = match endpoint {
            Endpoint::Chat => TextRequest::chat(&body.json)?,
            Endpoint::Completions => TextRequest::completion(&body.json)?,
        };
        let prompts = self.prompts(&request)?;
        Ok(CheckedRequest { request, prompts })
    }

    fn prompts(&self, request: &TextRequest) -> Result<Vec<Arc<[i64]>>, ApiError> {
        if request.model != self.model {
            return Err(ApiError::UnknownModel { model: request.model.clone() });
        }
        self.acceptance.check(request)?;
        if let (Some(asked), Some(limit)) = (request.max_new_tokens, self.limits.new_tokens)
            && asked > limit.get()
        {
            return Err(ApiError::field(
                "max_tokens",
                format!("at most {limit}, the limit of this server"),
                asked.to_string(),
            ));
        }
        if request.texts() > self.capacity {
            let param = if request.prompts.len() > 1 { "prompt" } else { "n" };
            let expected = format!("at most {} in a request", counted(self.capacity, "text"));
            return Err(ApiError::field(param, expected, request.texts().to_string()));
        }
        request.prompts.iter().map(|prompt| Ok(self.prompting.tokens(prompt)?.into())).collect()
    }

    /// Hands the texts of a request to the thread that decodes.
    ///
    /// # Errors
    /// [`ApiError`]: a full queue, or a server that stops.
    pub fn enter(&self, request: &TextRequest, prompts: Vec<Arc<[i64]>>) -> Result<RequestedTexts, ApiError> {
        let texts = u32::try_from(request.texts()).map_err(|_| ApiError::Internal)?;
        let full = |_| ApiError::QueueFull {
            texts: request.texts(),
            places: self.places.available_permits(),
            retry_after: RETRY_AFTER,
        };
        let mut places = self.places.clone().try_acquire_many_owned(texts).map_err(full)?;
        let (sender, events) = unbounded_channel();
        let settings = Arc::new(self.settings(request));
        let (seed, samples) = (request.seed.unwrap_or_else(rand::random), request.samples.get());
        let since = Instant::now();
        for choice in 0..request.texts() {
            let (index, sample) = (choice / samples, choice % samples);
            let job = Job {
                text: WantedText {
                    prompt: prompts[index].clone(),
                    settings: settings.clone(),
                    stream: Stream { seed, index: index as u64, turn: 0, sample: sample as u64 },
                },
                choice,
                events: sender.clone(),
                since,
                place: places.split(1).ok_or(ApiError::Internal)?,
            };
            self.jobs.send(job).map_err(|_| ApiError::ShuttingDown)?;
        }
        Ok(RequestedTexts { prompts, events })
    }

    fn settings(&self, request: &TextRequest) -> TextSettings {
        let most = self.limits.new_tokens.map_or(usize::MAX, NonZeroUsize::get);
        let wanted = request.max_new_tokens.or(request.endpoint.default_tokens());
        TextSettings {
            max_new_tokens: wanted.map_or(most, |wanted| wanted.min(most)),
            sampling: request.sampling,
            repetition_penalty: request.repetition_penalty,
            frequency_penalty: request.frequency_penalty,
            presence_penalty: request.presence_penalty,
            stop: request.stop.clone(),
            logprobs: request.logprobs,
            acceptance: self.acceptance.chosen(request),
        }
    }
}

/// At least one.
pub fn kibibytes(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024).max(1)).unwrap_or(u32::MAX)
}
