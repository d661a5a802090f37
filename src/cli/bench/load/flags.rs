//! Flags of `medusa bench` under load.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use url::Url;

use crate::bench::timeline::LoadLevel;
use crate::cli::UsageError;
use crate::cli::numbers::above_zero;
use crate::http::endpoint::parse_endpoint;

/// Levels of `--endpoint` without `--concurrency`.
const USUAL: [usize; 4] = [1, 2, 4, 8];
/// Requests of each client without `--requests`, at least.
const EACH: usize = 4;
/// Most clients of a server: each has a thread and a connection.
const MOST_CLIENTS: usize = 64;
/// Most texts that are decoded together without a server.
const MOST_TEXTS: usize = 1024;
/// Most requests at a level: the arrivals of every one are kept.
const MOST_REQUESTS: usize = 100_000;

/// Measuring under load.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Load")]
pub(in crate::cli) struct LoadFlags {
    /// Decode N requests together, for each N, plainly and with the drafter: throughput and latencies. The next request enters when one is
    /// answered. Of a conversation the first turn is asked.
    #[arg(
        long, value_name = "N,N…", value_delimiter = ',', value_parser = above_zero::<NonZeroUsize>,
        conflicts_with_all = ["repeats", "sweep", "nodes", "calibration", "force_acceptance_rate"]
    )]
    pub(in crate::cli) concurrency: Vec<NonZeroUsize>,
    /// Measure an OpenAI-compatible server, such as http://127.0.0.1:8000, with --concurrency clients [default: 1,2,4,8]. Prompts with
    /// messages or turns go to /v1/chat/completions, others to /v1/completions.
    #[arg(
        long, value_name = "URL", value_parser = parse_endpoint,
        conflicts_with_all = [
            "backbone", "heads", "drafter", "drafters", "tree", "repeats", "sweep", "nodes", "calibration", "force_acceptance_rate",
            "draft_tokens", "engine", "max_context", "acceptance", "posterior_threshold", "posterior_alpha", "quantization",
            "chat_template", "strict",
        ]
    )]
    pub(in crate::cli) endpoint: Option<Url>,
    /// Model to ask the server for [default: the first of /v1/models].
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) model: Option<String>,
    /// File with the server's API key in its first line [default: the environment variable `MEDUSA_API_KEY`, else no key].
    #[arg(long, value_name = "F")]
    pub(in crate::cli) api_key_file: Option<PathBuf>,
    /// Requests at each level; the prompts are repeated as often as that takes [default: one per prompt, and at least 4 per client].
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub(in crate::cli) requests: Option<NonZeroUsize>,
}

impl LoadFlags {
    /// Whether load is measured.
    pub(in crate::cli) fn is_set(&self) -> bool {
        self.endpoint.is_some() || !self.concurrency.is_empty()
    }

    /// Checks the flags with each other, and with `max_new_tokens`.
    ///
    /// # Errors
    /// [`UsageError`].
    pub(in crate::cli::bench) fn check(&self, max_new_tokens: usize) -> Result<(), UsageError> {
        if max_new_tokens == 0 {
            return Err(UsageError("--max-new-tokens 0: nothing to measure under load; expected at least 1".into()));
        }
        for LoadLevel { concurrency, requests } in self.levels(1) {
            if requests < concurrency.get() {
                return Err(UsageError(format!(
                    "--requests {requests} is fewer than --concurrency {concurrency}; expected at least one for each in flight"
                )));
            }
            self.check_bounds(concurrency.get(), requests)?;
        }
        Ok(())
    }

    fn check_bounds(&self, concurrency: usize, requests: usize) -> Result<(), UsageError> {
        let problem = match self.endpoint {
            Some(_) if concurrency > MOST_CLIENTS => {
                format!("--concurrency {concurrency}: --endpoint is measured with at most {MOST_CLIENTS} clients")
            }
            None if concurrency > MOST_TEXTS => {
                format!("--concurrency {concurrency}: at most {MOST_TEXTS} texts are decoded together")
            }
            _ if requests > MOST_REQUESTS => format!("--requests {requests}: expected at most {MOST_REQUESTS}"),
            _ => return Ok(()),
        };
        Err(UsageError(problem))
    }

    /// The levels, in the order of the command line.
    pub(in crate::cli::bench) fn levels(&self, prompts: usize) -> Vec<LoadLevel> {
        let usual = || USUAL.into_iter().filter_map(NonZeroUsize::new).collect();
        let all = if self.concurrency.is_empty() { usual() } else { self.concurrency.clone() };
        let level = |concurrency: NonZeroUsize| {
            let usual = prompts.max(concurrency.get().saturating_mul(EACH));
            LoadLevel { concurrency, requests: self.requests.map_or(usual, NonZeroUsize::get) }
        };
        all.into_iter().map(level).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(concurrency: &[usize], endpoint: Option<&str>, requests: Option<usize>) -> LoadFlags {
        let levels = concurrency.iter().copied().filter_map(NonZeroUsize::new).collect();
        let endpoint = endpoint.map(|text| parse_endpoint(text).expect("an address"));
        let requests = requests.and_then(NonZeroUsize::new);
        LoadFlags { concurrency: levels, endpoint, model: None, api_key_file: None, requests }
    }

    #[test]
    fn every_client_has_requests() {
        let levels = |flags: LoadFlags, prompts: usize| {
            let levels = flags.levels(prompts);
            levels.iter().map(|level| (level.concurrency.get(), level.requests)).collect::<Vec<_>>()
        };
        assert_eq!(levels(flags(&[1, 16], None, None), 10), [(1, 10), (16, 64)]);
        assert_eq!(levels(flags(&[], Some("http://h"), None), 5), [(1, 5), (2, 8), (4, 16), (8, 32)]);
        assert_eq!(levels(flags(&[4], None, Some(6)), 10), [(4, 6)]);
        let refused = |flags: LoadFlags| flags.check(1).map_err(|why| why.to_string());
        assert_eq!(refused(flags(&[65], None, None)), Ok(()));
        let few = refused(flags(&[4, 8], None, Some(6)));
        assert!(few.is_err_and(|why| why.contains("fewer than --concurrency 8")));
        assert!(refused(flags(&[65], Some("http://h"), None)).is_err_and(|why| why.contains("at most 64 clients")));
        assert!(refused(flags(&[1025], None, None)).is_err_and(|why| why.contains("at most 1024 texts")));
        let many = refused(flags(&[usize::MAX], None, None));
        assert!(many.is_err_and(|why| why.contains("--concurrency")), "what was given is named");
        assert!(refused(flags(&[1], None, Some(usize::MAX))).is_err_and(|why| why.contains("at most 100000")));
        assert!(flags(&[1], None, None).check(0).is_err());
    }
}
