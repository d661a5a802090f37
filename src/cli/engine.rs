//! `--engine` and `--max-context`: which engine decodes, and up to which length.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};

use super::CommonFlags;
use super::decoder::Decoder;
use super::drafter::{Drafts, ReadyDrafter};
use crate::decode::DecodeLoop;
use crate::decode::device::DeviceLoop;
use crate::decode::host_loop::HostLoop;
use crate::decode::request::Request;
use crate::engine::Engine;
use crate::engine::cpu::CpuEngine;
use crate::engine::cuda::error::CudaError;
use crate::engine::fastest::fastest;
use crate::engine::tch::TchEngine;
use crate::model::loading::Purpose;
use crate::nvidia::device;

/// Flags of every decoding verb.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Decoding")]
pub struct EngineFlags {
    /// Decoding engine.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = EngineName::Auto)]
    pub engine: EngineName,
    /// Maximum sequence length in tokens, prompt included [default: the backbone's context].
    #[arg(long, value_name = "N")]
    pub max_context: Option<NonZeroU32>,
}

/// `--engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// The fastest engine that supports the request: cuda, else cpu, else tch.
    Auto,
    /// libtorch operations on any device; the reference for the other engines.
    Tch,
    /// Custom CPU kernels (AVX-512 with bfloat16).
    Cpu,
    /// Custom CUDA kernels.
    Cuda,
}

impl EngineFlags {
    /// Loads what the engine decodes with. Texts end at `--max-context`.
    ///
    /// # Errors
    /// Those of [`Decoder::load`].
    pub fn load(
        &self,
        backbone: &Path,
        heads: Option<&PathBuf>,
        tree: Option<&PathBuf>,
        common: &CommonFlags,
    ) -> anyhow::Result<Decoder> {
        // Libtorch's engine takes weights that are not laid out for the CPU's kernels.
        let purpose = if self.engine == EngineName::Tch { Purpose::Batches } else { Purpose::Decoding };
        let mut decoder = Decoder::load(purpose, backbone, heads, tree, common)?;
        let context = &mut decoder.backbone.config.max_position_embeddings;
        *context = self.context(*context);
        Ok(decoder)
    }

    /// What is left of a backbone's context.
    pub fn context(&self, of_backbone: i64) -> i64 {
        self.max_context.map_or(of_backbone, |limit| of_backbone.min(i64::from(limit.get())))
    }

    /// The loop for requests such as `request`, with guesses if there are some. Says which engine it is on.
    ///
    /// # Errors
    /// Why the engine that was asked for cannot decode this.
    pub fn take<'a>(
        &self,
        decoder: &'a Decoder,
        drafts: Option<Drafts<'a>>,
        request: &Request,
        common: &CommonFlags,
    ) -> anyhow::Result<Box<dyn DecodeLoop + 'a>> {
        let mut no_gpu = None;
        if matches!(self.engine, EngineName::Auto | EngineName::Cuda) {
            match self.on_gpu(decoder, drafts.as_ref(), request) {
                Ok(decoding) => {
                    common.say(format_args!("engine cuda: {}", decoding.engine().describe()));
                    return Ok(Box::new(decoding));
                }
                Err(why) if self.engine == EngineName::Cuda => {
                    return Err(why).context("--engine cuda cannot decode this");
                }
                Err(why) => no_gpu = Some(why),
            }
        }
        let engine = self.on_host(decoder)?;
        no_gpu.iter().for_each(|why| common.say(format_args!("engine {}: {why}", engine.name())));
        Ok(Box::new(HostLoop::new(engine, drafts.map(|drafts| drafts.on_host(decoder)))))
    }

    fn on_gpu<'a>(
        &self,
        decoder: &'a Decoder,
        drafts: Option<&Drafts<'a>>,
        request: &Request,
    ) -> Result<DeviceLoop<'a>, CudaError> {
        device::check()?;
        let backbone = &decoder.backbone;
        // What was asked for is reserved whole; a backbone's own context may be longer than any text will be.
        let tokens = self.max_context.map_or(1, |_| backbone.config.max_position_embeddings);
        let heads = match drafts {
            None => None,
            Some(Drafts { drafter: ReadyDrafter::Medusa(drafter), acceptance }) => Some((drafter, *acceptance)),
            Some(Drafts { drafter: ReadyDrafter::Ngram, .. }) => {
                return Err(CudaError::Request("--drafter ngram looks up texts on the host"));
            }
        };
        DeviceLoop::on_gpu(backbone, heads, request, tokens)
    }

    fn on_host<'a>(&self, decoder: &'a Decoder) -> anyhow::Result<Box<dyn Engine + 'a>> {
        let backbone = &decoder.backbone;
        Ok(match self.engine {
            EngineName::Tch => Box::new(TchEngine::new(backbone)),
            EngineName::Cpu => Box::new(CpuEngine::new(backbone).context("--engine cpu cannot decode this")?),
            EngineName::Auto | EngineName::Cuda => fastest(backbone),
        })
    }
}
