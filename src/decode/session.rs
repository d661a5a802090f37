//! One text's keys and values, kept between requests: of a prompt, only what the cache does not hold yet is computed.

// N new tokens, H hidden size
use tch::Tensor;

use super::medusa::{Choice, Medusa, Pass, Verified};
use super::request::{DecodeError, Generation, OnTokens, Request, check_prompt};
use super::transcript::Transcript;
use crate::model::attention::NewTokens;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::guard;

/// Tokens of a prompt that are computed together: what attention takes of memory is bounded, whatever the prompt's length.
const PREFILL_CHUNK: usize = 512;

/// A text that is decoded request after request, such as a conversation. What a request makes does not depend on the ones before it
/// (up to rounding): the cache saves time and nothing else.
#[derive(Debug)]
pub struct Session<'a> {
    backbone: &'a Llama,
    cache: KvCache,
    /// The tokens that the cache holds.
    ids: Vec<i64>,
}

impl<'a> Session<'a> {
    /// With an empty cache.
    pub fn new(backbone: &'a Llama) -> Self {
        let cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
        Self { backbone, cache, ids: vec![] }
    }

    /// Tokens in the cache: the last prompt, and those new tokens that were computed (the last one may not be).
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.keep(0);
    }

    /// Decodes a token a step: greedily at temperature 0, else by sampling.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    pub fn plain(&mut self, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        self.run("plain decoding", request, on_tokens, |session, text| session.plain_steps(request, text))
    }

    /// Decodes with Medusa heads. Every step commits the root, which is the LM head's own token, and the accepted path below it.
    /// At temperature 0 the text is [`Session::plain`]'s, whatever the heads and the tree; only where two tokens are equally
    /// probable up to rounding (rare in float32, less so in 16 bits) may they differ, since a product's last bits depend on its
    /// number of rows.
    ///
    /// A node behind the context's end or `max_new_tokens` is computed with the others and never committed.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    pub fn medusa(
        &mut self,
        medusa: &Medusa,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError> {
        self.run("Medusa decoding", request, on_tokens, |session, text| session.medusa_steps(medusa, request, text))
    }

    fn run(
        &mut self,
        work: &str,
        request: &Request,
        on_tokens: &mut OnTokens,
        steps: impl FnOnce(&mut Self, &mut Transcript),
    ) -> Result<Generation, DecodeError> {
        let backbone = self.backbone;
        check_prompt(backbone, request.prompt)?;
        let mut text = Transcript::new(backbone, request, on_tokens);
        if let Err(panic) = guard(work, || tch::no_grad(|| steps(self, &mut text))) {
            self.reset(); // nobody knows how far the step came
            return Err(panic.into());
        }
        self.keep(request.prompt.len() + text.len());
        Ok(text.finish())
    }

    fn plain_steps(&mut self, request: &Request, text: &mut Transcript) {
        let backbone = self.backbone;
        let mut hidden_1h = self.prefill(request.prompt);
        let mut choice = Choice::new(request);
        let one = NewTokens::chain(1, &backbone.config, backbone.kind(), backbone.device());
        loop {
            let logits_1v = choice.penalty.of_text(&backbone.logits(&hidden_1h, Adapters::Off));
            let token = choice.sampler.next(&logits_1v);
            if text.commit(&[token.id]).is_break() {
                return;
            }
            hidden_1h = backbone.extend(&token.id_1, &one, &mut self.cache);
            self.cache.commit(1);
            self.ids.push(token.id);
            choice.penalty.see(&[token.id]);
        }
    }

    fn medusa_steps(&mut self, medusa: &Medusa, request: &Request, text: &mut Transcript) {
        let backbone = self.backbone;
        let mut hidden_1h = self.prefill(request.prompt);
        let mut choice = Choice::new(request);
        let mut root = medusa.first_root(&backbone.logits(&hidden_1h, Adapters::Off), &mut choice);
        for step in 0.. {
            if text.ends_with(root.id) {
                let _ = text.commit(&[root.id]); // the last one: nothing to verify
                return;
            }
            let tokens_n = medusa.candidates(&root.id_1, &hidden_1h, backbone);
            let hidden_nh = backbone.extend(&tokens_n, &medusa.nodes, &mut self.cache);
            let logits_nv = backbone.logits(&hidden_nh, Adapters::Off);
            let pass = Pass { step, tokens_n: &tokens_n, logits_nv: &logits_nv };
            let Verified { path, accepted, next } = medusa.verify(&pass, &mut choice);
            self.cache.commit_path(&path.iter().map(|&node| node as i64).collect::<Vec<_>>());
            self.ids.extend(&accepted);
            choice.penalty.see(&accepted);
            if text.commit(&accepted).is_break() {
                return;
            }
            hidden_1h = hidden_nh.narrow(0, path.last().map_or(0, |&node| node as i64), 1);
            root = next;
        }
    }

    /// Computes what of the prompt is not cached, its last token in any case; returns that one's hidden state, `[1, H]`.
    fn prefill(&mut self, prompt: &[i64]) -> Tensor {
        let shared = self.ids.iter().zip(prompt).take_while(|(cached, wanted)| cached == wanted).count();
        self.keep(shared.min(prompt.len() - 1));
        let rest = &prompt[self.ids.len()..];
        let hidden_1h = prefill(self.backbone, rest, &mut self.cache);
        self.ids.extend(rest);
        hidden_1h
    }

    /// The cache's first tokens stay, at most so many.
    fn keep(&mut self, tokens: usize) {
        self.ids.truncate(tokens);
        self.cache.truncate(self.ids.len() as i64);
    }
}

/// Runs a prompt, or the rest of one, behind a cache; returns the last token's hidden state, `[1, H]`.
pub(super) fn prefill(backbone: &Llama, tokens: &[i64], cache: &mut KvCache) -> Tensor {
    prefill_by(PREFILL_CHUNK, backbone, tokens, cache)
}

fn prefill_by(chunk: usize, backbone: &Llama, tokens: &[i64], cache: &mut KvCache) -> Tensor {
    let chain = |n: usize| NewTokens::chain(n as i64, &backbone.config, backbone.kind(), backbone.device());
    let whole = chain(chunk.min(tokens.len())); // one for all whole chunks: they share its mask
    let mut run = |piece: &[i64], new: &NewTokens| {
        let tokens_n = Tensor::from_slice(piece).to_device(backbone.device());
        let hidden_nh = backbone.extend(&tokens_n, new, cache);
        cache.commit(new.len());
        hidden_nh.narrow(0, new.len() - 1, 1)
    };
    let hidden = tokens.chunks(chunk).map(|piece| match piece.len() as i64 {
        n if n == whole.len() => run(piece, &whole),
        _ => run(piece, &chain(piece.len())),
    });
    hidden.last().expect("a prompt has at least one token that is not cached")
}

#[cfg(test)]
mod tests;
