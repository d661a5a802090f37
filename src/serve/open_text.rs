//! A text on its way: what came of it becomes events.

use std::ops::ControlFlow;
use std::time::Instant;

use super::api::answer::ShownToken;
use super::job::{EndedText, Job, TextEvent, TextPiece};
use super::metrics::ServerMetrics;
use crate::data::tokenize::{TextStream, TextTokenizer, TokenizeError, narrow};
use crate::decode::arrivals::{ArrivalLatency, TokenArrivals};
use crate::decode::error::DecodeError;
use crate::decode::likelihood::ScoredToken;
use crate::decode::request::{EmittedTokens, Generation};
use crate::decode::text::StreamedText;
use crate::engine::cuda::error::CudaError;

/// A text that is decoded.
#[derive(Debug)]
pub(super) struct OpenText<'a> {
    pub(super) job: Job,
    words: StreamedText<'a>,
    /// Shows single tokens, where log-probabilities are asked for.
    shown: Option<TextStream<'a>>,
    /// Tokens whose text is not emitted yet, and their log-probabilities.
    ids: Vec<i64>,
    logprobs: Vec<ShownToken>,
    /// Tokens that were emitted.
    emitted: usize,
    arrivals: TokenArrivals,
    failed: Option<TokenizeError>,
}

impl<'a> OpenText<'a> {
    pub(super) fn new(job: Job, tokenizer: &'a TextTokenizer) -> Self {
        Self {
            words: StreamedText::new(tokenizer, &job.text.prompt, job.text.settings.stop.clone()),
            shown: job.text.settings.logprobs.map(|_| tokenizer.stream_after(&narrow(&job.text.prompt))),
            ids: vec![],
            logprobs: vec![],
            emitted: 0,
            arrivals: TokenArrivals::begin(job.since),
            failed: None,
            job,
        }
    }

    /// Sends what new tokens complete; `Break` ends the text.
    pub(super) fn take(&mut self, tokens: EmittedTokens, metrics: &ServerMetrics) -> ControlFlow<()> {
        self.time(metrics);
        let taken = self.words.taken_tokens();
        let piece = self.piece(tokens);
        metrics.new_tokens.inc_by((self.words.taken_tokens() - taken) as u64);
        match piece {
            Ok(piece) => {
                let is_gone = !piece.is_empty() && !self.job.send(TextEvent::Piece(piece));
                if is_gone || self.words.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Err(error) => {
                self.failed = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn time(&mut self, metrics: &ServerMetrics) {
        match self.arrivals.arrive(Instant::now()) {
            ArrivalLatency::FirstToken(latency) => metrics.first_token.observe(latency.as_secs_f64()),
            ArrivalLatency::InterToken(latency) => metrics.between_tokens.observe(latency.as_secs_f64()),
        }
    }

    /// Counts a text that has left: the token that ended it, which was not emitted, its prompt, steps and draft tokens.
    pub(super) fn count(&self, generation: &Generation, metrics: &ServerMetrics) {
        let generated = self.words.generated(generation);
        metrics.new_tokens.inc_by(generated.tokens.saturating_sub(self.words.taken_tokens()) as u64);
        metrics.prompt_tokens.inc_by(self.job.text.prompt.len() as u64);
        metrics.cached_tokens.inc_by(generation.cached as u64);
        metrics.count_text(generated, generation.proposed);
    }

    fn piece(&mut self, tokens: EmittedTokens) -> Result<TextPiece, TokenizeError> {
        self.ids.extend(tokens.ids);
        for token in tokens.scored {
            let shown = self.show(token)?;
            self.logprobs.extend(shown);
        }
        let text = self.words.take(tokens.ids)?;
        Ok(self.complete_piece(text))
    }

    /// A piece with the tokens that it completes.
    fn complete_piece(&mut self, text: String) -> TextPiece {
        let new = self.words.emitted_tokens() - self.emitted;
        self.emitted += new;
        let ids = self.ids.drain(..new).collect();
        let logprobs = self.logprobs.drain(..new.min(self.logprobs.len())).collect();
        TextPiece { text, ids, logprobs }
    }

    /// A token and the likeliest ones at its place, as text.
    fn show(&mut self, token: &ScoredToken) -> Result<Option<ShownToken>, TokenizeError> {
        let Some(stream) = &mut self.shown else { return Ok(None) };
        let likeliest = token.likeliest.iter().map(|&(id, log_p)| {
            let (text, bytes) = text_and_bytes(stream, id)?;
            Ok((text, bytes, log_p))
        });
        let top = likeliest.collect::<Result<Vec<_>, TokenizeError>>()?;
        let (text, bytes) = text_and_bytes(stream, token.id)?;
        stream.push(narrow(&[token.id])[0])?;
        Ok(Some(ShownToken { text, bytes, logprob: token.log_p, top }))
    }

    /// Sends the end.
    pub(super) fn end(mut self, generation: Result<Generation, DecodeError>) {
        let (events, choice) = (self.job.events.clone(), self.job.choice);
        let event = match (self.failed.take(), generation) {
            (Some(error), _) => TextEvent::Failed(error.to_string()),
            (None, Err(error)) => failure(&error),
            (None, Ok(generation)) => {
                self.ended(generation).unwrap_or_else(|error| TextEvent::Failed(error.to_string()))
            }
        };
        let _ = events.send((choice, event)); // nobody may wait for it any more
    }

    /// The tokens that were held back, and what the whole text came to.
    fn ended(self, generation: Generation) -> Result<TextEvent, TokenizeError> {
        let Self { words, mut logprobs, emitted, .. } = self;
        let generated = words.generated(&generation);
        let finished = words.finish(generation)?;
        let (generation, text) = (finished.generation, finished.last);
        let ids = generation.new_ids[emitted.min(generation.new_ids.len())..].to_vec();
        logprobs.truncate(ids.len());
        let ended = EndedText {
            reason: generation.finish_reason,
            generated,
            cached_tokens: generation.cached,
            proposed: generation.proposed,
        };
        Ok(TextEvent::Ended(TextPiece { text, ids, logprobs }, ended))
    }
}

/// How a token is written, and what it adds to the text after `stream`: a special token adds nothing.
fn text_and_bytes(stream: &TextStream, id: i64) -> Result<(String, Vec<u8>), TokenizeError> {
    let id = narrow(&[id])[0];
    let text = stream.text_of(id)?;
    let bytes = if stream.is_special(id) { vec![] } else { text.clone().into_bytes() };
    Ok((text, bytes))
}

/// What a text's client hears of an error.
pub(super) fn failure(error: &DecodeError) -> TextEvent {
    match error {
        DecodeError::Cuda(CudaError::Request(why)) => TextEvent::Refused((*why).to_owned()),
        other => TextEvent::Failed(other.to_string()),
    }
}
