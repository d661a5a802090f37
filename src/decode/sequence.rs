//! The state of a text between two steps: its tokens, its sampler, and the root of the next step. Runs no engine and no drafter.

// H hidden size
use tch::Tensor;

use super::error::DecodeError;
use super::penalty::Penalty;
use super::request::{Generation, Request};
use super::transcript::Transcript;
use crate::draft::TextSoFar;
use crate::engine::sample::{Chosen, Sampler, Stream};
use crate::model::config::LlamaConfig;

/// A text between two steps.
#[derive(Debug)]
pub struct Sequence {
    /// The tokens, and where they end.
    pub(super) text: Transcript,
    /// Draws the text's tokens.
    pub(super) sampler: Sampler,
    /// Repetition penalty on tokens of prompt and text.
    pub(super) penalty: Penalty,
    /// Selects the text's random numbers.
    stream: Stream,
    /// The last token, which no engine has seen yet; `None` before the prompt is computed.
    root: Option<Chosen>,
    /// `[1, H]`: the hidden state that the root was chosen from, where a drafter may ask for it.
    hidden_1h: Option<Tensor>,
    /// Steps done.
    pub(super) steps: usize,
}

impl Sequence {
    /// Before its prompt is computed.
    pub(super) fn new(request: &Request, config: &LlamaConfig) -> Self {
        Self {
            text: Transcript::new(request, config),
            sampler: Sampler::new(request.sampling, request.stream),
            penalty: Penalty::new(request.repetition_penalty, request.prompt),
            stream: request.stream,
            root: None,
            hidden_1h: None,
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

    /// Adds the root to the penalised tokens, before the next token is chosen.
    pub(super) fn see_root(&mut self) {
        self.penalty.see(&[self.root().id]);
    }

    /// The drafter's view of the text in a row.
    pub(super) fn text_so_far(&self, row: usize) -> TextSoFar<'_> {
        let hidden_1h = self.hidden_1h.as_ref().expect("a drafted text keeps it");
        let sampling = self.sampler.sampling();
        TextSoFar { row, ids: self.text.ids(), root: self.root(), hidden_1h, sampling, stream: self.stream }
    }

    /// The token after the prompt, chosen from `hidden_1h` `[1, H]`.
    pub(super) fn begin(&mut self, root: Chosen, hidden_1h: Tensor) {
        self.text.begin(root.id);
        (self.root, self.hidden_1h) = (Some(root), Some(hidden_1h));
    }

    /// A step's accepted tokens, root first, and the token after them.
    pub(super) fn go_on(&mut self, accepted: &[i64], next: Chosen, hidden_1h: Option<Tensor>) {
        self.penalty.see(accepted);
        self.steps += 1;
        self.text.go_on(&accepted[1..], next.id);
        (self.root, self.hidden_1h) = (Some(next), hidden_1h);
    }
}
