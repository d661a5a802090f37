//! The decoding loop on the CUDA engine, whose steps draft, verify and accept on the device.
//! [`HostLoop`](super::host_loop::HostLoop) is its oracle: the same request gives the same text, up to rounding between nearly equal
//! logits.

use super::DecodeLoop;
use super::error::{DecodeError, check_prompt};
use super::request::{Generation, OnTokens, Request};
use super::step::Drafting;
use super::transcript::Transcript;
use crate::engine::cuda::draft::DeviceDraft;
use crate::engine::cuda::engine::{CudaEngine, DeviceStep};
use crate::engine::cuda::error::CudaError;
use crate::engine::cuda::ops::Ops;
use crate::engine::cuda::rule::Rule;
use crate::engine::sample::{COLDEST, Sampler};
use crate::model::llama::Llama;
use crate::numbers::{Finite, Positive};
use crate::nvidia::device;
use crate::torch::guard;
use crate::tree::accept::Acceptance;

/// A [`DecodeLoop`] on a GPU, plain or with heads.
#[derive(Debug)]
pub struct DeviceLoop<'a> {
    backbone: &'a Llama,
    /// How the heads' guesses are accepted.
    acceptance: Option<Acceptance>,
    /// In the heads' tree.
    guesses: usize,
    engine: CudaEngine<'a>,
}

/// Heads with their tree, and which of their guesses are accepted.
type HeadsAndRule<'d, 'a> = Option<(&'d DeviceDraft<'a>, Acceptance)>;

impl<'a> DeviceLoop<'a> {
    /// A loop whose operations run on `ops`.
    ///
    /// # Errors
    /// [`CudaError::UnsupportedModel`] says what cannot be decoded.
    pub fn new(backbone: &'a Llama, drafts: HeadsAndRule<'_, 'a>, ops: Ops) -> Result<Self, CudaError> {
        let engine = CudaEngine::new(backbone, drafts.map(|(draft, _)| draft), ops)?;
        let acceptance = drafts.map(|(_, acceptance)| acceptance);
        Ok(Self { backbone, acceptance, guesses: guesses(drafts), engine })
    }

    /// A loop on the backbone's GPU, for requests such as `request`. The cache starts with room for `tokens`.
    ///
    /// # Errors
    /// [`CudaError`]: no GPU, no rule for the request, no kernels, or too little memory.
    pub fn on_gpu(
        backbone: &'a Llama,
        drafts: HeadsAndRule<'_, 'a>,
        request: &Request,
        tokens: i64,
    ) -> Result<Self, CudaError> {
        device::check()?;
        let acceptance = drafts.map(|(_, acceptance)| acceptance);
        rule_of(request, acceptance)?;
        let draft = drafts.map(|(draft, _)| draft);
        let engine = CudaEngine::on_gpu(backbone, draft, tokens)?;
        Ok(Self { backbone, acceptance, guesses: guesses(drafts), engine })
    }

    /// The engine, with its memory plan and the length of its cache.
    pub fn engine(&self) -> &CudaEngine<'a> {
        &self.engine
    }

    fn run(
        &mut self,
        acceptance: Option<Acceptance>,
        request: &Request,
        text: &mut Transcript,
        on_tokens: &mut OnTokens,
    ) -> Result<(), CudaError> {
        let (rule, engine) = (rule_of(request, acceptance)?, &mut self.engine);
        let mut draws = Sampler::new(request.sampling, request.stream);
        text.begin(engine.start(request.prompt, request.max_new_tokens, acceptance.is_some(), rule, &mut draws)?);
        let guesses = acceptance.map_or(0, |_| self.guesses);
        while text.emit(&mut |new| on_tokens(new.ids)).is_continue() {
            let DeviceStep { accepted, next } = engine.step()?;
            text.go_on(&accepted[1..], next, guesses);
        }
        Ok(())
    }
}

impl DecodeLoop for DeviceLoop<'_> {
    fn engine_name(&self) -> &'static str {
        "cuda"
    }

    fn scores_tokens(&self) -> bool {
        false
    }

    fn reset(&mut self) {
        self.engine.reset();
    }

    fn decode(
        &mut self,
        drafting: Drafting,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError> {
        check_prompt(&self.backbone.config, request.prompt)?;
        let acceptance = self.acceptance.filter(|_| drafting == Drafting::On);
        let acceptance = acceptance.map(|default| request.acceptance.unwrap_or(default));
        let mut text = Transcript::new(request, &self.backbone.config);
        let done =
            guard("decoding on the GPU", || tch::no_grad(|| self.run(acceptance, request, &mut text, on_tokens)));
        let tokens = text.ids().len();
        let done = done.map_err(DecodeError::from).and_then(|done| Ok(done?)).and_then(|()| text.finish());
        // After a failure the cache may hold part of a step, or NaN.
        self.engine.keep(if done.is_ok() { tokens } else { 0 });
        done
    }
}

/// The guesses of a step.
fn guesses(drafts: HeadsAndRule) -> usize {
    drafts.map_or(0, |(draft, _)| draft.shape.tree.len() - 1)
}

/// The device's rule for a request, or [`CudaError::Request`] if it has none; no acceptance means plain decoding.
fn rule_of(request: &Request, acceptance: Option<Acceptance>) -> Result<Rule, CudaError> {
    let refused = |why| Err(CudaError::Request(why));
    let temperature = request.sampling.temperature.get();
    let above_0 = temperature.max(COLDEST); // as the kernels take it
    if request.repetition_penalty != Positive::ONE {
        return refused("a repetition penalty has no kernel");
    }
    if [request.frequency_penalty, request.presence_penalty] != [Finite::ZERO; 2] {
        return refused("a frequency or presence penalty has no kernel");
    }
    if request.logprobs.is_some() {
        return refused("log-probabilities as the text comes have no kernel");
    }
    match acceptance {
        Some(Acceptance::Forced { .. }) => refused("a forced acceptance rate has no kernel"),
        _ if temperature == 0.0 => Ok(Rule::Greedy),
        // Under every rule: the same loop decodes plainly, too, which draws.
        _ if request.sampling.top_k.is_some() => refused("top-k has no kernel"),
        None | Some(Acceptance::Rejection) => {
            Ok(Rule::Draw { temperature: above_0, top_p: request.sampling.top_p.get() })
        }
        Some(Acceptance::Greedy) => Ok(Rule::Greedy),
        Some(Acceptance::Typical(rule)) => Ok(Rule::Typical { rule, temperature: above_0 }),
        Some(Acceptance::Nucleus) => refused("nucleus acceptance above temperature 0 has no kernel"),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::engine::sample::Sampling;
    use crate::numbers::NonNegative;
    use crate::tree::accept::TypicalAcceptance;

    #[test]
    fn what_needs_logits_on_the_host_is_left_to_libtorch() {
        let penalty = Finite::new(-0.5).expect("finite");
        let greedy = Request::greedy(&[1], 4);
        for (request, what) in [
            (Request { frequency_penalty: penalty, ..greedy }, "a frequency or presence penalty has no kernel"),
            (Request { presence_penalty: penalty, ..greedy }, "a frequency or presence penalty has no kernel"),
            (Request { logprobs: Some(0), ..greedy }, "log-probabilities as the text comes have no kernel"),
        ] {
            let refused = rule_of(&request, None).expect_err("there is no kernel").to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }

    #[test]
    fn top_k_above_temperature_0_is_left_to_libtorch() {
        let typical = Acceptance::Typical(TypicalAcceptance::with_threshold(0.09));
        let rule = |temperature, top_k, acceptance| {
            let unlimited = Sampling::with_temperature(NonNegative::new(temperature).expect("at least 0"));
            let sampling = Sampling { top_k: NonZeroUsize::new(top_k), ..unlimited };
            rule_of(&Request { sampling, ..Request::greedy(&[1], 4) }, acceptance)
        };
        for acceptance in [None, Some(Acceptance::Rejection), Some(typical)] {
            let refused = rule(1.0, 3, acceptance).expect_err("there is no kernel").to_string();
            assert!(refused.contains("top-k has no kernel"), "{refused}");
            assert!(rule(1.0, 0, acceptance).is_ok(), "{acceptance:?}");
            assert!(matches!(rule(0.0, 3, acceptance), Ok(Rule::Greedy)), "{acceptance:?}: nothing is drawn");
        }
    }
}
