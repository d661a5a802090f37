//! `medusa serve`: an OpenAI-compatible server.

use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use anyhow::Context;
use axum::Router;
use clap::Args;
use tch::Device;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, watch};

use self::allowed_hosts::AllowedHostFlags;
use self::api_keys::ApiKeyFlags;
use self::limits::LimitFlags;
use super::decoding::{self, AcceptanceName};
use super::drafter::DrafterFlags;
use super::engine::EngineFlags;
use super::numbers::{positive, probability};
use super::served::ServedFlags;
use super::signals::hangup_ends;
use super::{CommonFlags, UsageError, interrupted};
use crate::decode::batch::SequenceBatch;
use crate::decode::request::Request;
use crate::decode::texts::{SerialDecoder, TextDecoder};
use crate::hub;
use crate::numbers::{Positive, Probability};
use crate::plural::counted;
use crate::serve::acceptance::AcceptanceRules;
use crate::serve::connections::{ConnectionLimits, Phase, serve};
use crate::serve::metrics::ServerMetrics;
use crate::serve::prompting::Prompting;
use crate::serve::record::Recorder;
use crate::serve::routes::{routes, seconds_since_1970};
use crate::serve::service::{Service, kibibytes};
use crate::serve::worker::Worker;
use crate::session::drafter::Drafts;
use crate::session::drafter::plan::deciding_heads;
use crate::session::engine::EngineName;
use crate::session::opened::OpenedBackbone;
use crate::session::{Decoder, batch_size};
use crate::tree::accept::{Acceptance, TypicalAcceptance};

mod access_log;
mod allowed_hosts;
mod api_keys;
mod limits;
mod origins;

/// Bodies of the largest size that are read and parsed at a time: as values they may take fifty times as much memory.
const BODIES: usize = 2;
/// Tokens of prompts that are computed between two steps: no text waits longer for the prompts of others.
const PROMPT_TOKENS: NonZeroUsize = NonZeroUsize::new(512).expect("above 0");

/// Serve a backbone with its heads: an OpenAI-compatible HTTP server.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa serve --backbone B --heads checkpoints/first --tree tree.json\n  curl http://127.0.0.1:8000/v1/completions \\\n    -H 'Content-Type: application/json' \\\n    -d '{\"model\": \"B\", \"prompt\": \"Once upon a time\"}'\n\nEvery request is one line of JSON on stdout. SIGTERM and Ctrl-C let the open requests finish (--drain-timeout); a second one ends the server at once."
)]
pub struct ServeArgs {
    /// Backbone: a folder, a GGUF file or a Hugging Face Hub id (owner/name, owner/name@revision or owner/name:Q4_K_M).
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// Heads: a folder such as a run's `final/`, or a Hub id. Without: plain decoding.
    #[arg(long, value_name = "H")]
    pub heads: Option<PathBuf>,
    /// Tree of guesses: a file from `medusa tree` (with --latency --sequences it has a tree for each load), or dynamic:N for the N likeliest
    /// guesses of each step [default: a chain of each head's best guess].
    #[arg(long, value_name = "T")]
    pub tree: Option<PathBuf>,
    /// Address to listen on; 0.0.0.0 is every address of the machine.
    #[arg(long, help_heading = "Server", value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one, which a line on stderr names.
    #[arg(long, help_heading = "Server", value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// The name by which clients ask for the model [default: the Hub id, or the name of the backbone's folder].
    #[arg(long, help_heading = "Server", value_name = "NAME")]
    pub model_name: Option<String>,
    #[command(flatten)]
    keys: ApiKeyFlags,
    /// Allow pages of this origin, such as `https://example.org`, to call the server from a browser; may be repeated; * allows all.
    #[arg(long, help_heading = "Server", value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    #[command(flatten)]
    hosts: AllowedHostFlags,
    /// Log prompts (as token ids) and answers, too.
    #[arg(long, help_heading = "Server")]
    pub log_texts: bool,
    #[command(flatten)]
    limits: LimitFlags,
    #[command(flatten)]
    pub(super) drafter: DrafterFlags,
    /// Acceptance rule at temperatures above 0; a request may ask for another one ("acceptance").
    #[arg(long, help_heading = "Decoding", value_enum, value_name = "RULE", default_value_t = AcceptanceName::Rejection)]
    pub acceptance: AcceptanceName,
    /// ε of typical acceptance [default: 0.09].
    #[arg(long, help_heading = "Decoding", value_name = "EPSILON", value_parser = probability)]
    pub posterior_threshold: Option<Probability>,
    /// δ of typical acceptance [default: √ε].
    #[arg(long, help_heading = "Decoding", value_name = "DELTA", value_parser = positive)]
    pub posterior_alpha: Option<Positive>,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    served: ServedFlags,
}

/// Serves until a signal, then lets the open requests finish.
///
/// # Errors
/// An address that cannot be listened on; an error in the backbone, the heads, the tree or the flags.
pub fn run(args: &ServeArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let acceptance = args.acceptance()?;
    let origins = origins::allowed(&args.cors_origin)?;
    let keys = args.keys.read()?;
    let listener = args.listen()?; // before the weights are read
    let plan = args.drafter.plan(args.heads.as_deref(), args.tree.as_deref())?;
    args.check_acceptance(plan.is_some())?;
    let backbone = OpenedBackbone::open(&args.backbone)?;
    let heads = deciding_heads(plan.as_ref(), args.heads.as_deref())?;
    let setup = args.served.options().resolve(backbone, heads, common)?;
    let decoder = args.engine.options().load(setup, plan.into_iter().collect(), common.context())?;
    let metrics = ServerMetrics::new()?;
    let log = access_log::start();
    let (decoding, at_a_time) = args.decoding(&decoder, acceptance, common)?;
    let capacity = at_a_time.get().saturating_add(args.limits.max_queue).min(Semaphore::MAX_PERMITS);
    let address = listener.local_addr()?;
    let (jobs, waiting) = channel();
    let (phase, heard) = watch::channel(Phase::Serving);
    let service = Arc::new(Service {
        model: args.model_name(),
        created: seconds_since_1970(),
        prompting: Prompting {
            tokenizer: decoder.tokenizer.clone(),
            template: decoder.template.clone(),
            context: usize::try_from(decoder.backbone.config.max_position_embeddings)?,
        },
        limits: args.limits.request(),
        hosts: args.hosts.names(&args.host, address.ip(), &keys),
        keys,
        recorder: Recorder { sink: log.sink(), metrics: metrics.clone(), logs_texts: args.log_texts },
        jobs,
        places: Arc::new(Semaphore::new(capacity)),
        capacity,
        bodies: Arc::new(Semaphore::new(BODIES * kibibytes(args.limits.request().body_bytes) as usize)),
        phase: heard,
        acceptance: AcceptanceRules { server_rule: decoder.drafter().map(|_| acceptance), typical: args.typical() },
    });
    let server = HttpServer::new(listener, routes(&service, origins), args.limits.connections(), phase)?;
    announce(&service, address, common);
    drop(service); // the routes have it; when they are gone, the worker ends
    let serving = thread::Builder::new().name("http".into()).spawn(move || server.run())?;
    Worker::new(decoding, &decoder.tokenizer, metrics).run(&waiting);
    let drained = serving.join().map_err(|_| anyhow::anyhow!("the server's thread panicked"))??;
    log.finish();
    if !drained {
        common.say(format_args!("requests were still open after {} s and got an error", args.limits.drain_timeout));
    }
    Ok(())
}

/// What the thread of the connections needs.
struct HttpServer {
    runtime: Runtime,
    stop: StopSignals,
    listener: TcpListener,
    routes: Router,
    limits: ConnectionLimits,
    phase: watch::Sender<Phase>,
}

impl HttpServer {
    /// From here on the first signal ends the server in good order.
    fn new(
        listener: TcpListener,
        routes: Router,
        limits: ConnectionLimits,
        phase: watch::Sender<Phase>,
    ) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = runtime.block_on(async { StopSignals::catch() })?;
        Ok(Self { runtime, stop, listener, routes, limits, phase })
    }

    /// Serves until a signal; returns whether all open requests were finished.
    fn run(self) -> anyhow::Result<bool> {
        self.runtime.block_on(async {
            self.listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(self.listener)?;
            Ok(serve(listener, self.routes, self.limits, &self.phase, self.stop.first()).await)
        })
    }
}

/// Ctrl-C, SIGTERM and SIGHUP: the first one ends the server, a second one the process.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

impl StopSignals {
    fn catch() -> anyhow::Result<Self> {
        let caught = Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: hangup_ends().then(|| signal(SignalKind::hangup())).transpose()?,
        };
        interrupted(); // until here a signal ends the process
        Ok(caught)
    }

    async fn first(mut self) {
        let hung_up = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = hung_up => {}
        }
    }
}

impl ServeArgs {
    fn acceptance(&self) -> Result<Acceptance, UsageError> {
        match self.acceptance {
            AcceptanceName::Greedy => Ok(Acceptance::Greedy),
            AcceptanceName::Typical => Ok(Acceptance::Typical(self.typical())),
            AcceptanceName::Rejection => Ok(Acceptance::Rejection),
            AcceptanceName::Nucleus => Err(UsageError(
                "--acceptance nucleus: requests without top_p would accept every guess; use rejection or typical"
                    .into(),
            )),
        }
    }

    /// Refuses flags of acceptance where there are no guesses.
    fn check_acceptance(&self, is_drafted: bool) -> Result<(), UsageError> {
        let given = [
            ("--acceptance", !self.acceptance()?.draws()),
            ("--posterior-threshold", self.posterior_threshold.is_some()),
            ("--posterior-alpha", self.posterior_alpha.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given && !is_drafted) {
            Some((flag, _)) => Err(UsageError(format!(
                "{flag} has no effect without a drafter; leave it out, or give --heads or --drafter"
            ))),
            None => Ok(()),
        }
    }

    fn typical(&self) -> TypicalAcceptance {
        decoding::typical(self.posterior_threshold, self.posterior_alpha)
    }

    fn listen(&self) -> anyhow::Result<TcpListener> {
        let address = (self.host.as_str(), self.port);
        TcpListener::bind(address)
            .with_context(|| format!("cannot listen on {}:{}; choose another --host or --port", self.host, self.port))
    }

    fn model_name(&self) -> String {
        self.model_name.clone().unwrap_or_else(|| match hub::origin(&self.backbone) {
            Some(origin) => origin.id,
            None => {
                let folder = self.backbone.canonicalize().unwrap_or_else(|_| self.backbone.clone());
                folder.file_name().map_or_else(|| "backbone".to_owned(), |name| name.to_string_lossy().into_owned())
            }
        })
    }

    /// How texts are decoded, and how many at a time.
    fn decoding<'d>(
        &self,
        decoder: &'d Decoder,
        acceptance: Acceptance,
        common: &CommonFlags,
    ) -> anyhow::Result<(Box<dyn TextDecoder + 'd>, NonZeroUsize)> {
        if self.engine.engine == EngineName::Cuda {
            common.say("engine cuda: one text at a time; --engine tch decodes many together");
            let (engine, request) = (self.engine.options(), Request::greedy(&[], 0));
            let decoding = engine.decode_loop(decoder, acceptance, &request, common.context())?;
            return Ok((Box::new(SerialDecoder::new(decoding)), NonZeroUsize::MIN));
        }
        let batch = self.batch(decoder, acceptance, common)?;
        let size = batch.size();
        common.say(format_args!("engine {}: at most {} at a time", batch.engine_name(), counted(size.get(), "text")));
        Ok((Box::new(batch), size))
    }

    fn batch<'d>(
        &self,
        decoder: &'d Decoder,
        acceptance: Acceptance,
        common: &CommonFlags,
    ) -> anyhow::Result<SequenceBatch<'d>> {
        let backbone = &decoder.backbone;
        let drafts = decoder.drafter().map(|drafter| Drafts::for_batches(backbone, drafter, acceptance)).transpose()?;
        let engine = self.engine.options().for_batches(decoder)?;
        let guesses = drafts.as_ref().map_or(0, |(_, guesses)| *guesses);
        let tokens = usize::try_from(backbone.config.max_position_embeddings)?.saturating_add(guesses);
        let fits = || batch_size::for_server(&*engine, [tokens, guesses], common);
        let size = self.limits.max_texts.map_or_else(fits, Ok)?;
        let drafts = drafts.map(|(drafter, _)| (drafter, acceptance));
        let prefixes = batch_size::prefix_bytes(&*engine)?;
        let batch = SequenceBatch::new(engine, drafts, size).with_prompt_tokens(PROMPT_TOKENS);
        let batch = prefixes.into_iter().fold(batch, SequenceBatch::with_prefix_cache);
        let room = NonZeroUsize::new(tokens).filter(|_| backbone.device() != Device::Cpu);
        Ok(room.into_iter().fold(batch, SequenceBatch::with_room))
    }
}

fn announce(service: &Service, address: SocketAddr, common: &CommonFlags) {
    if !address.ip().is_loopback() && !service.keys.are_needed() {
        common.say("no API key is set: whoever reaches this address can use the server (--api-key-file)");
    }
    common.say(format_args!("serving {} on http://{address}/v1", service.model));
}
