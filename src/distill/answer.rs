//! Who answers: plain decoding of many conversations together, or Medusa decoding, one at a time.

use std::ops::ControlFlow;

use crate::decode::batch::{Batch, RowEnded, RowRequest};
use crate::decode::generate::{self, DecodeError, FinishReason, Generation, Medusa, Request};
use crate::model::llama::Llama;
use crate::numbers::NonNegative;

/// Takes requests, and hands back what was said.
#[derive(Debug)]
pub enum Answerer<'a> {
    /// Plain decoding, several requests together.
    Together(Box<Batch<'a>>),
    /// Medusa decoding.
    OneByOne(OneByOne<'a>),
}

/// Medusa decoding of one request at a time.
#[derive(Debug)]
pub struct OneByOne<'a> {
    backbone: &'a Llama,
    medusa: &'a Medusa<'a>,
    temperature: NonNegative,
    ended: Option<RowEnded>,
    tokens: usize,
}

impl<'a> OneByOne<'a> {
    /// Above temperature 0, the acceptance of `medusa` decides; nothing is drawn.
    pub fn new(backbone: &'a Llama, medusa: &'a Medusa<'a>, temperature: NonNegative) -> Self {
        Self { backbone, medusa, temperature, ended: None, tokens: 0 }
    }

    fn enter(&mut self, request: &RowRequest) -> Result<(), DecodeError> {
        let (prompt, max_new_tokens) = (&request.prompt[..], request.max_new_tokens.get());
        let single = Request { prompt, max_new_tokens, temperature: self.temperature, seed: 0 };
        let mut new_ids = vec![];
        let mark = &request.end_mark;
        let generation = generate::medusa(self.backbone, self.medusa, &single, &mut |ids| {
            new_ids.extend_from_slice(ids);
            if place_of(mark, &new_ids).is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        self.tokens += generation.new_ids.len();
        self.ended = Some(ended(request, generation));
        Ok(())
    }
}

/// A step may commit tokens behind the end mark: they are dropped.
fn ended(request: &RowRequest, generation: Generation) -> RowEnded {
    let (key, mut new_ids) = (request.key, generation.new_ids);
    match place_of(&request.end_mark, &new_ids) {
        Some(at) => {
            new_ids.truncate(at);
            RowEnded { key, new_ids, end: request.end_mark.clone(), finish_reason: FinishReason::Eos }
        }
        None => {
            let end = generation.eos.into_iter().collect();
            RowEnded { key, new_ids, end, finish_reason: generation.finish_reason }
        }
    }
}

/// Where an end mark begins; an empty one is nowhere.
fn place_of(mark: &[i64], ids: &[i64]) -> Option<usize> {
    if mark.is_empty() { None } else { ids.windows(mark.len()).position(|window| window == mark) }
}

impl Answerer<'_> {
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Together(batch) => batch.has_room(),
            Self::OneByOne(one) => one.ended.is_none(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        match self {
            Self::Together(batch) => batch.is_idle(),
            Self::OneByOne(one) => one.ended.is_none(),
        }
    }

    /// New tokens so far.
    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Together(batch) => batch.tokens(),
            Self::OneByOne(one) => one.tokens,
        }
    }

    pub(super) fn enter(&mut self, request: RowRequest) -> Result<(), DecodeError> {
        match self {
            Self::Together(batch) => batch.enter(request),
            Self::OneByOne(one) => one.enter(&request),
        }
    }

    /// Goes on; returns what was said to its end.
    pub(super) fn step(&mut self) -> Result<Vec<RowEnded>, DecodeError> {
        match self {
            Self::Together(batch) => batch.step(),
            Self::OneByOne(one) => Ok(one.ended.take().into_iter().collect()),
        }
    }
}
