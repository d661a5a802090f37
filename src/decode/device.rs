//! The loop on the CUDA engine, whose steps draft, verify and accept on the device. [`Session`](super::session::Session) is its oracle:
//! the same requests give the same texts, but for what another rounding turns.

use super::medusa::Medusa;
use super::request::{DecodeError, Generation, OnTokens, Request, check_prompt};
use super::transcript::Transcript;
use crate::engine::cuda::engine::{CudaEngine, DeviceStep};
use crate::engine::cuda::error::CudaError;
use crate::engine::cuda::ops::Ops;
use crate::engine::cuda::rule::Rule;
use crate::engine::sample::Sampler;
use crate::model::llama::Llama;
use crate::numbers::Positive;
use crate::nvidia::device;
use crate::torch::guard;
use crate::tree::accept::Acceptance;

/// A text that is decoded request after request on a GPU: as [`Session`](super::session::Session), plainly or with the heads that it was
/// made for.
#[derive(Debug)]
pub struct DeviceSession<'a> {
    backbone: &'a Llama,
    acceptance: Option<Acceptance>,
    engine: CudaEngine<'a>,
}

impl<'a> DeviceSession<'a> {
    /// For `backbone`, and for `medusa` if there are heads, computed by `ops`.
    ///
    /// # Errors
    /// [`CudaError::Unfit`] says what cannot be decoded.
    pub fn new(backbone: &'a Llama, medusa: Option<&Medusa<'a>>, ops: Ops) -> Result<Self, CudaError> {
        let draft = medusa.map(Medusa::on_device);
        let engine = CudaEngine::new(backbone, draft.as_ref(), ops)?;
        Ok(Self { backbone, acceptance: medusa.map(Medusa::acceptance), engine })
    }

    /// On the GPU where the backbone lies, for requests such as `request`, with a cache for texts of so many `tokens` to begin with.
    ///
    /// # Errors
    /// [`CudaError`]: no GPU, no rule for the request, no kernels, or too little memory.
    pub fn on_gpu(
        backbone: &'a Llama,
        medusa: Option<&Medusa<'a>>,
        request: &Request,
        tokens: i64,
    ) -> Result<Self, CudaError> {
        device::check()?;
        let acceptance = medusa.map(Medusa::acceptance);
        rule_of(request, acceptance)?;
        let draft = medusa.map(Medusa::on_device);
        Ok(Self { backbone, acceptance, engine: CudaEngine::on_gpu(backbone, draft.as_ref(), tokens)? })
    }

    /// The engine, with its memory plan and the length of its cache.
    pub fn engine(&self) -> &CudaEngine<'a> {
        &self.engine
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.engine.reset();
    }

    /// As [`Session::plain`](super::session::Session::plain).
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    pub fn plain(&mut self, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let rule = rule_of(request, None)?;
        self.run(request, on_tokens, |engine, text| {
            let mut token = start(engine, request, rule, false)?;
            while text.commit(&[token]).is_continue() {
                token = engine.step()?.next;
            }
            Ok(())
        })
    }

    /// As [`Session::medusa`](super::session::Session::medusa), with the heads, the tree and the acceptance that the session was made for.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    pub fn medusa(&mut self, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let acceptance = self.acceptance.ok_or(CudaError::Request("it was made without heads"))?;
        let rule = rule_of(request, Some(acceptance))?;
        self.run(request, on_tokens, |engine, text| {
            let mut root = start(engine, request, rule, true)?;
            while !text.ends_with(root) {
                let DeviceStep { accepted, next } = engine.step()?;
                if text.commit(&accepted).is_break() {
                    return Ok(());
                }
                root = next;
            }
            let _ = text.commit(&[root]); // the last one: nothing to verify
            Ok(())
        })
    }

    fn run(
        &mut self,
        request: &Request,
        on_tokens: &mut OnTokens,
        steps: impl FnOnce(&mut CudaEngine, &mut Transcript) -> Result<(), CudaError>,
    ) -> Result<Generation, DecodeError> {
        check_prompt(self.backbone, request.prompt)?;
        let mut text = Transcript::new(self.backbone, request, on_tokens);
        let done = guard("decoding on the GPU", || tch::no_grad(|| steps(&mut self.engine, &mut text)));
        if let Err(failure) = done.map_err(DecodeError::from).and_then(|done| Ok(done?)) {
            self.reset(); // nobody knows how far the step came
            return Err(failure);
        }
        self.engine.keep(request.prompt.len() + text.len());
        Ok(text.finish())
    }
}

fn start(engine: &mut CudaEngine, request: &Request, rule: Rule, with_tree: bool) -> Result<i64, CudaError> {
    let mut draws = Sampler::new(request.sampling, request.seed);
    engine.start(request.prompt, request.max_new_tokens, with_tree, rule, &mut draws)
}

/// The rule that the device follows; [`CudaError::Request`] where it has none. Without an acceptance: plain decoding.
fn rule_of(request: &Request, acceptance: Option<Acceptance>) -> Result<Rule, CudaError> {
    let refused = |why| Err(CudaError::Request(why));
    let temperature = request.sampling.temperature.get();
    if request.repetition_penalty != Positive::ONE {
        return refused("a repetition penalty changes logits with every token");
    }
    match acceptance {
        Some(Acceptance::Forced { .. }) => refused("a forced acceptance rate follows no rule of its own"),
        _ if temperature == 0.0 => Ok(Rule::Greedy),
        None | Some(Acceptance::Rejection) => Ok(Rule::Draw { temperature, top_p: request.sampling.top_p.get() }),
        Some(Acceptance::Greedy) => Ok(Rule::Greedy),
        Some(Acceptance::Typical(rule)) => Ok(Rule::Typical { rule, temperature }),
        Some(Acceptance::Nucleus) => refused("nucleus acceptance above temperature 0 has no kernel"),
    }
}
