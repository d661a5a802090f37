//! Answers: follows a request's texts, and sends them whole or as they come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::Event;
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::api::Endpoint;
use super::api::answer::{AnswerHead, ChoicePart, ShownToken, Usage, finish_name};
use super::api::error::ApiError;
use super::api::request::TextRequest;
use super::connections::Phase;
use super::job::{EndedText, TextEvent, TextPiece};
use super::record::Record;
use super::service::{RequestedTexts, Service};

/// The last line of a stream.
const DONE: &str = "[DONE]";

/// An answer that comes into being.
#[derive(Debug)]
pub struct AnswerInProgress {
    head: AnswerHead,
    request: TextRequest,
    texts: RequestedTexts,
    choices: Vec<ChoiceSoFar>,
    deadline: Instant,
    /// From the request on.
    limit: Duration,
    phase: watch::Receiver<Phase>,
    record: Record,
    /// Whether there is nothing more to wait for; if the answer is dropped before, its client has gone.
    is_settled: bool,
    /// Whether the record has the usage.
    is_accounted: bool,
}

/// A text so far.
#[derive(Debug, Default)]
struct ChoiceSoFar {
    text: String,
    ids: Vec<i64>,
    logprobs: Vec<ShownToken>,
    /// Tokens that were emitted.
    emitted: usize,
    /// Characters of the tokens that were emitted, of a stream with log-probabilities.
    offset: usize,
    /// Whether a chunk was made of it.
    is_begun: bool,
    ended: Option<EndedText>,
}

impl ChoiceSoFar {
    fn new_tokens(&self) -> usize {
        self.ended.map_or(self.emitted, |text| text.generated.tokens)
    }
}

impl AnswerInProgress {
    /// Of texts that are on their way.
    pub fn new(
        service: &Arc<Service>,
        head: AnswerHead,
        request: TextRequest,
        texts: RequestedTexts,
        record: Record,
    ) -> Self {
        let choices = (0..request.texts()).map(|_| ChoiceSoFar::default()).collect();
        let (limit, phase) = (service.limits.time, service.phase.clone());
        let deadline = record.began() + limit;
        let (is_settled, is_accounted) = (false, false);
        Self { head, request, texts, choices, deadline, limit, phase, record, is_settled, is_accounted }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// [`ApiError`]: a text that could not be decoded, time that ran out, a server that stops.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
        let heard = self.hear_all().await;
        self.is_settled = true;
        heard?;
        let usage = self.account();
        let parts: Vec<ChoicePart> = (0..self.choices.len()).map(|index| self.whole_choice(index)).collect();
        Ok(self.head.whole(&parts, usage))
    }

    async fn hear_all(&mut self) -> Result<(), ApiError> {
        while !self.is_whole() {
            let (choice, event) = self.next().await?;
            let piece = self.take(choice, event)?;
            let so_far = &mut self.choices[choice];
            so_far.ids.extend(piece.ids);
            so_far.logprobs.extend(piece.logprobs);
        }
        Ok(())
    }

    fn whole_choice(&self, index: usize) -> ChoicePart<'_> {
        let choice = &self.choices[index];
        self.asked_for(ChoicePart {
            text: &choice.text,
            logprobs: Some(&choice.logprobs),
            token_ids: Some(&choice.ids),
            prompt_token_ids: self.prompt_ids(index),
            ..self.part(index)
        })
    }

    /// The answer in chunks. After an error, it is the last one.
    pub fn streamed(self) -> impl Stream<Item = Result<Event, axum::Error>> + Send {
        let first = self.first_chunks();
        stream::unfold((self, first), |(mut answer, mut chunks)| async move {
            while chunks.is_empty() {
                chunks = answer.next_chunks().await?;
            }
            let chunk = chunks.pop_front()?;
            Some((Ok(Event::default().data(chunk)), (answer, chunks)))
        })
    }

    fn first_chunks(&self) -> VecDeque<String> {
        let first_chunk = |index| self.head.first_chunk(index, self.prompt_ids(index));
        (0..self.choices.len()).filter_map(first_chunk).map(|chunk| chunk.to_string()).collect()
    }

    /// `None` after the last chunk.
    async fn next_chunks(&mut self) -> Option<VecDeque<String>> {
        if self.is_settled {
            return None;
        }
        let chunk = match self.next().await {
            Ok((choice, event)) => self.take(choice, event).map(|piece| self.chunk(choice, &piece)),
            Err(error) => Err(error),
        };
        let mut chunks = VecDeque::new();
        match chunk {
            Ok(chunk) => chunks.extend(chunk.map(|chunk| chunk.to_string())),
            Err(error) => {
                self.is_settled = true;
                self.record.failed(&error);
                chunks.push_back(error.to_json().to_string());
            }
        }
        if !self.is_settled && self.is_whole() {
            self.is_settled = true;
            let usage = self.account();
            chunks.extend(self.request.include_usage.then(|| self.head.usage_chunk(usage).to_string()));
            chunks.push_back(DONE.to_owned());
        }
        Some(chunks)
    }

    /// What a piece adds to its choice; `None` if a client would see nothing new.
    fn chunk(&mut self, index: usize, piece: &TextPiece) -> Option<Value> {
        let is_first = self.request.endpoint == Endpoint::Completions && !self.choices[index].is_begun;
        let prompt_token_ids = self.prompt_ids(index).filter(|_| is_first);
        let part = self.asked_for(ChoicePart {
            text: &piece.text,
            logprobs: Some(&piece.logprobs),
            token_ids: Some(&piece.ids),
            prompt_token_ids,
            ..self.part(index)
        });
        let has_tokens =
            part.logprobs.is_some_and(|shown| !shown.is_empty()) || part.token_ids.is_some_and(|ids| !ids.is_empty());
        let is_seen = !part.text.is_empty() || part.finish.is_some() || has_tokens;
        let chunk = is_seen.then(|| self.head.chunk(&part));
        let choice = &mut self.choices[index];
        choice.is_begun |= is_seen;
        choice.offset += piece.logprobs.iter().map(|token| token.text.chars().count()).sum::<usize>();
        chunk
    }

    /// Whether it is sent in chunks.
    pub fn is_streamed(&self) -> bool {
        self.request.stream
    }

    fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended.is_some())
    }

    /// What comes next of the texts.
    async fn next(&mut self) -> Result<(usize, TextEvent), ApiError> {
        tokio::select! {
            biased; // what came in time is sent
            event = self.texts.events.recv() => event.ok_or(ApiError::ShuttingDown),
            () = sleep_until(self.deadline) => Err(ApiError::TimeLimit { limit: self.limit }),
            _ = self.phase.wait_for(|phase| *phase == Phase::Cutting) => Err(ApiError::ShuttingDown),
        }
    }

    /// New tokens of a text.
    fn take(&mut self, index: usize, event: TextEvent) -> Result<TextPiece, ApiError> {
        let piece = match event {
            TextEvent::Piece(piece) => piece,
            TextEvent::Ended(piece, ended) => {
                self.choices[index].ended = Some(ended);
                piece
            }
            TextEvent::Refused(problem) => {
                return Err(ApiError::invalid("request", problem));
            }
            TextEvent::Failed(why) => {
                self.record.set("error", why);
                return Err(ApiError::Internal);
            }
        };
        let choice = &mut self.choices[index];
        choice.text.push_str(&piece.text);
        choice.emitted += piece.ids.len();
        Ok(piece)
    }

    /// What of a choice does not depend on its new tokens.
    fn part(&self, index: usize) -> ChoicePart<'_> {
        let ChoiceSoFar { offset, ended, .. } = self.choices[index];
        let finish = ended.map(|ended| ended.reason);
        ChoicePart {
            index,
            text: "",
            finish,
            logprobs: None,
            text_offset: offset,
            token_ids: None,
            prompt_token_ids: None,
        }
    }

    /// A part without what the request did not ask for.
    fn asked_for<'p>(&self, part: ChoicePart<'p>) -> ChoicePart<'p> {
        let logprobs = part.logprobs.filter(|_| self.request.logprobs.is_some());
        let token_ids = part.token_ids.filter(|_| self.request.return_token_ids);
        ChoicePart { logprobs, token_ids, ..part }
    }

    /// The tokens of a choice's prompt, where they are asked for.
    fn prompt_ids(&self, index: usize) -> Option<&[i64]> {
        self.request.return_token_ids.then(|| &self.texts.prompts[index / self.request.samples.get()][..])
    }

    /// The usage of all texts, which the record gets, too.
    fn account(&mut self) -> Usage {
        self.is_accounted = true;
        let usage = self.usage();
        let reasons: Vec<&str> = self.ended().map(|text| finish_name(text.reason)).collect();
        self.record.set("usage", usage.to_json());
        self.record.set("finish_reasons", reasons);
        self.record_texts();
        usage
    }

    /// What was decoded until the answer broke off.
    fn account_part(&mut self) {
        while let Ok((choice, event)) = self.texts.events.try_recv() {
            let _ = self.take(choice, event); // one that failed is in the record
        }
        self.record.set("usage", self.usage().counts());
        self.record_texts();
    }

    fn usage(&self) -> Usage {
        let sum = |pick: fn(EndedText) -> usize| self.ended().map(pick).sum::<usize>();
        let accepted = sum(|text| text.generated.accepted());
        Usage {
            prompt_tokens: self.texts.prompts.iter().map(|prompt| prompt.len()).sum(),
            cached_tokens: self.ended().step_by(self.request.samples.get()).map(|text| text.cached_tokens).sum(),
            completion_tokens: self.choices.iter().map(ChoiceSoFar::new_tokens).sum(),
            accepted_draft_tokens: accepted,
            rejected_draft_tokens: sum(|text| text.proposed) - accepted,
        }
    }

    fn ended(&self) -> impl Iterator<Item = EndedText> {
        self.choices.iter().filter_map(|choice| choice.ended)
    }

    fn record_texts(&self) {
        self.record.set_text("texts", || json!(self.choices.iter().map(|choice| &choice.text).collect::<Vec<_>>()));
    }
}

impl Drop for AnswerInProgress {
    fn drop(&mut self) {
        if !self.is_settled {
            self.record.set("aborted", true);
        }
        if !self.is_accounted {
            self.account_part();
        }
    }
}
