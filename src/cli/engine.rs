//! `--engine`: which loop decodes, the one on libtorch or the GPU's own, and why.

use std::num::NonZeroU32;

use anyhow::Context;
use clap::{Args, ValueEnum};

use super::CommonFlags;
use super::decoder::Decoder;
use crate::decode::device::DeviceSession;
use crate::decode::generate::{Medusa, Request};
use crate::decode::loops::Loop;
use crate::decode::session::Session;

/// Who decodes.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Decoding")]
pub struct EngineFlags {
    /// Which loop decodes; auto takes the GPU's own where it can, and says why not where it cannot.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = EngineName::Auto)]
    pub engine: EngineName,
    /// No text grows beyond so many tokens, prompt and all [default: the backbone's context].
    #[arg(long, value_name = "N")]
    pub max_context: Option<NonZeroU32>,
}

/// `--engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// The GPU's own where it can decode what is asked for, else libtorch's.
    Auto,
    /// On libtorch, on any device.
    Tch,
    /// The GPU's own, or an error.
    Cuda,
}

impl EngineFlags {
    /// The decoder with the context that the flags leave it.
    #[must_use]
    pub fn limit(&self, mut decoder: Decoder) -> Decoder {
        let context = &mut decoder.backbone.config.max_position_embeddings;
        *context = self.context(*context);
        decoder
    }

    /// What is left of a backbone's context.
    pub fn context(&self, of_backbone: i64) -> i64 {
        self.max_context.map_or(of_backbone, |limit| of_backbone.min(i64::from(limit.get())))
    }

    /// The loop for requests such as `request`, with `medusa` where there are heads. Says which one it is.
    ///
    /// # Errors
    /// With `--engine cuda`, why the GPU's own loop cannot decode this.
    pub fn take<'a>(
        &self,
        decoder: &'a Decoder,
        medusa: Option<&Medusa<'a>>,
        request: &Request,
        common: &CommonFlags,
    ) -> anyhow::Result<Loop<'a>> {
        let backbone = &decoder.backbone;
        let on_torch = || Loop::Torch(Session::new(backbone));
        if self.engine == EngineName::Tch {
            return Ok(on_torch());
        }
        // What was asked for is reserved whole; a backbone's own context may be longer than any text will be.
        let tokens = self.max_context.map_or(1, |_| backbone.config.max_position_embeddings);
        match DeviceSession::on_gpu(backbone, medusa, request, tokens) {
            Ok(session) => {
                common.say(format_args!("engine cuda: {}", session.engine().describe()));
                Ok(Loop::Cuda(Box::new(session)))
            }
            Err(why) if self.engine == EngineName::Cuda => Err(why).context("--engine cuda cannot decode this"),
            Err(why) => {
                common.say(format_args!("engine tch: {why}"));
                Ok(on_torch())
            }
        }
    }
}
