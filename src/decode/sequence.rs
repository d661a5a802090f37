//! The state of a text between two steps: its tokens, its sampler, and the root of the next step. Runs no engine and no drafter.

// W a token's states (see [`crate::model::taps`])
use tch::Tensor;

use super::error::DecodeError;
use super::likelihood::{ScoredToken, score_tokens};
use super::penalty::Penalty;
use super::request::{Generation, Request};
use super::transcript::Transcript;
use crate::draft::TextSoFar;
use crate::engine::sample::{Chosen, Sampler, Stream};
use crate::model::config::LlamaConfig;
use crate::model::llama::NO_TOKEN;
use crate::tree::accept::Acceptance;

/// What a step adds to a text.
#[derive(Debug)]
pub(super) struct SequenceStep {
    /// The accepted tokens, root first.
    pub(super) accepted: Vec<i64>,
    /// The token after them.
    pub(super) next: Chosen,
    /// `[1, H]`: what it was chosen from, where a drafter may ask for it.
    pub(super) state_1w: Option<Tensor>,
    /// Guesses that were verified.
    pub(super) proposed: usize,
    /// The accepted tokens below the root and the one after them, if that is asked for.
    pub(super) scored: Vec<ScoredToken>,
}

/// A text between two steps.
#[derive(Debug)]
pub struct Sequence {
    /// The tokens, and where they end.
    pub(super) text: Transcript,
    /// Draws the text's tokens.
    pub(super) sampler: Sampler,
    /// Penalties on tokens of prompt and text, the root not among them.
    pub(super) penalty: Penalty,
    /// Which guesses are accepted, unless the loop decides.
    acceptance: Option<Acceptance>,
    /// Of so many of the likeliest tokens, log-probabilities are asked for beside those of the text's own; `None` if of none.
    logprobs: Option<usize>,
    /// Selects the text's random numbers.
    stream: Stream,
    /// The last token, which no engine has seen yet; `None` before the prompt is computed.
    root: Option<Chosen>,
    /// `[1, W]`: the states that the root was chosen from, where a drafter may ask for it.
    state_1w: Option<Tensor>,
    pub(super) steps: usize,
}

impl Sequence {
    /// Before its prompt is computed.
    pub(super) fn new(request: &Request, config: &LlamaConfig) -> Self {
        Self {
            text: Transcript::new(request, config),
            sampler: Sampler::new(request.sampling, request.stream),
            penalty: Penalty::new(request),
            acceptance: request.acceptance,
            logprobs: request.logprobs,
            stream: request.stream,
            root: None,
            state_1w: None,
            steps: 0,
        }
    }

    /// See [`Transcript::finish`].
    pub(super) fn finish(self) -> Result<Generation, DecodeError> {
        self.text.finish()
    }

    /// Whether the token after its prompt is chosen.
    pub(super) fn has_begun(&self) -> bool {
        self.root.is_some()
    }

    /// The tokens whose keys and values a step needs in the cache: all but the root.
    pub(super) fn computed(&self) -> &[i64] {
        let ids = self.text.ids();
        &ids[..ids.len() - usize::from(self.has_begun())]
    }

    /// The last token, which no engine has seen yet.
    pub(super) fn root(&self) -> &Chosen {
        self.root.as_ref().expect("the prompt is computed")
    }

    /// Which guesses are accepted; `default` where the text has no rule of its own.
    pub(super) fn acceptance(&self, default: Acceptance) -> Acceptance {
        self.acceptance.unwrap_or(default)
    }

    /// Whether its rule chooses a token without guesses as plain decoding does.
    pub(super) fn chooses_as_plain(&self, default: Acceptance) -> bool {
        self.acceptance(default).draws() || self.sampler.sampling().temperature.get() == 0.0
    }

    /// Logits `[1, V]` after the last token, penalised.
    pub(super) fn penalised(&self, logits_1v: &Tensor) -> Tensor {
        let root = self.root.as_ref().map(|root| root.id);
        self.penalty.apply_to_text(logits_1v, root.as_slice())
    }

    /// `tokens` after rows of logits `[N, V]`, scored if the request asks for it.
    pub(super) fn scored(&self, tokens: &[i64], logits_nv: impl FnOnce() -> Tensor) -> Vec<ScoredToken> {
        let chosen = tokens.iter().take_while(|&&token| token != NO_TOKEN).count();
        match self.logprobs.filter(|_| chosen > 0) {
            Some(count) => score_tokens(&logits_nv().narrow(0, 0, chosen as i64), &tokens[..chosen], count),
            None => vec![],
        }
    }

    /// The drafter's view of the text in a row.
    pub(super) fn text_so_far(&self, row: usize, default: Acceptance) -> TextSoFar<'_> {
        let state_1w = self.state_1w.as_ref().expect("a drafted text keeps it");
        let (sampling, may_draw) = (self.sampler.sampling(), self.acceptance(default) == Acceptance::Rejection);
        TextSoFar { row, ids: self.text.ids(), root: self.root(), state_1w, sampling, stream: self.stream, may_draw }
    }

    /// The token after the prompt, chosen from `state_1w` `[1, H]`.
    pub(super) fn begin(&mut self, root: Chosen, state_1w: Tensor, scored: Vec<ScoredToken>) {
        self.text.begin(root.id);
        self.text.score(scored);
        (self.root, self.state_1w) = (Some(root), Some(state_1w));
    }

    /// What a step came to.
    pub(super) fn go_on(&mut self, step: SequenceStep) {
        let SequenceStep { accepted, next, state_1w, proposed, scored } = step;
        self.penalty.see(&accepted);
        self.steps += 1;
        self.text.go_on(&accepted[1..], next.id, proposed);
        self.text.score(scored);
        (self.root, self.state_1w) = (Some(next), state_1w);
    }
}
