//! Which engine decodes, and up to which length.

use std::num::NonZeroU32;
use std::path::Path;

use tch::Device;

use super::decoder::Decoder;
use super::drafter::Drafts;
use super::drafter::plan::DrafterPlan;
use super::drafter::row_times::set_row_times;
use super::error::{SessionError, UsageError};
use super::opened::OpenedHeads;
use super::reporter::LoadContext;
use super::setup::{ModelSetup, on_libtorch};
use crate::decode::DecodeLoop;
use crate::decode::device::DeviceLoop;
use crate::decode::host_loop::HostLoop;
use crate::decode::request::Request;
use crate::engine::Engine;
use crate::engine::cpu::CpuEngine;
use crate::engine::cuda::error::CudaError;
use crate::engine::fastest::{fastest, fastest_for_batches};
use crate::engine::tch::TchEngine;
use crate::model::config::LlamaConfig;
use crate::model::loading::Purpose;
use crate::nvidia::device;
use crate::torch::{DeviceChoice, accelerator};
use crate::tree::accept::Acceptance;

/// How a session decodes.
#[derive(Debug, Clone, Copy, Default)]
pub struct EngineOptions {
    pub engine: EngineName,
    /// Maximum sequence length in tokens, prompt included; by default the backbone's context, or the one of the heads' training if rotary
    /// embeddings depend on it.
    pub max_context: Option<NonZeroU32>,
}

/// `--engine`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineName {
    /// The fastest engine that supports the request: cuda, else cpu, else tch.
    #[default]
    Auto,
    /// libtorch operations on any device; the reference for the other engines.
    Tch,
    /// Custom CPU kernels (AVX2 with FMA and F16C, or AVX-512 with bfloat16 and VNNI).
    Cpu,
    /// Custom CUDA kernels.
    Cuda,
}

/// Whether a user would expect decoding on a GPU: there is a driver, and no setting selects the CPU.
fn expects_gpu(device: DeviceChoice) -> bool {
    device != DeviceChoice::Cpu && !accelerator::is_off() && Path::new("/proc/driver/nvidia/version").exists()
}

impl EngineName {
    /// As it is typed.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tch => "tch",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl EngineOptions {
    /// Loads the backbone and the drafters, and limits the context. Reports one with other rotary embeddings than those in the heads'
    /// training.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load(
        &self,
        setup: ModelSetup,
        drafters: Vec<DrafterPlan>,
        context: LoadContext,
    ) -> Result<Decoder, SessionError> {
        self.check_quantization(&setup)?;
        // libtorch's engine needs weights that are not repacked for the CPU kernels.
        let purpose = if self.engine == EngineName::Tch { Purpose::Batches } else { Purpose::Decoding };
        let backbone = setup.backbone.clone();
        let tokens = self.context(&backbone.config, setup.context)?; // before the weights are read
        if let Some(trained) =
            setup.context.filter(|trained| !backbone.config.same_rotary_embeddings([*trained, tokens]))
        {
            context.reporter.notice(&format_args!(
                "--max-context {tokens}: the heads were trained with the rotary embeddings of a context of {trained} tokens; their accuracy \
                 may differ"
            ));
        }
        // Before the heads are loaded: a prefix layer takes its rotary embeddings from the backbone.
        let setup = ModelSetup { context: Some(tokens), ..setup };
        let mut decoder = Decoder::load(setup, purpose, drafters, context)?;
        let flag = self.engine.flag().to_owned();
        set_row_times((flag, &|decoder| self.on_host(decoder)), &mut decoder, &backbone, context.reporter)?;
        Ok(decoder)
    }

    /// Refuses quantised weights for the engine that reads dense ones. An adapter beside the heads makes the weights that it changes
    /// dense, so it may decode them.
    fn check_quantization(&self, setup: &ModelSetup) -> Result<(), SessionError> {
        let adapter = setup.heads.as_deref().map_or(Ok(None), OpenedHeads::adapter)?;
        match (self.engine, setup.quantization) {
            (EngineName::Cuda, Some(quantization)) if adapter.is_none() => Err(UsageError(format!(
                "--engine cuda: {}; use --engine tch, or --quantization none",
                on_libtorch(quantization)
            ))
            .into()),
            _ => Ok(()),
        }
    }

    /// The maximum sequence length: `--max-context`, else that of the heads' training if the rotary embeddings depend on it, else the backbone's.
    ///
    /// # Errors
    /// [`UsageError`] if the backbone's context is shorter.
    pub fn context(&self, backbone: &LlamaConfig, trained: Option<i64>) -> Result<i64, UsageError> {
        let longest = backbone.largest_context();
        match self.max_context.map(NonZeroU32::get) {
            Some(limit) if i64::from(limit) > longest => Err(UsageError(format!(
                "--max-context {limit} is longer than the backbone's context of {longest} tokens; lower or drop it"
            ))),
            limit => Ok(limit.map_or(trained.unwrap_or(backbone.max_position_embeddings), Into::into)),
        }
    }

    /// The decoding loop for requests like `request`, with the drafter if there is one. If a GPU is present but not
    /// used, prints the reason.
    ///
    /// # Errors
    /// The reason why the requested engine cannot decode this.
    pub fn take<'a>(
        &self,
        decoder: &'a Decoder,
        drafts: Option<Drafts<'a>>,
        request: &Request,
        context: LoadContext,
    ) -> Result<Box<dyn DecodeLoop + 'a>, SessionError> {
        let mut no_gpu = None;
        if matches!(self.engine, EngineName::Auto | EngineName::Cuda) {
            match self.on_gpu(decoder, drafts.as_ref(), request) {
                Ok(decoding) => {
                    context.reporter.notice(&format_args!("engine cuda: {}", decoding.engine().describe()));
                    return Ok(Box::new(decoding));
                }
                Err(why) if self.engine == EngineName::Cuda => return Err(SessionError::CudaEngine(why)),
                Err(why) => no_gpu = Some(why),
            }
        }
        let (engine, backbone_device) = (self.on_host(decoder)?, decoder.backbone.device());
        for why in no_gpu.iter().filter(|_| backbone_device != Device::Cpu || expects_gpu(context.device)) {
            context.reporter.notice(&format_args!("engine {}: {why}", engine.name()));
        }
        Ok(Box::new(HostLoop::new(engine, drafts.map(Drafts::on_host))))
    }

    /// As [`EngineOptions::take`], with the drafter of the session if it has one.
    ///
    /// # Errors
    /// As [`EngineOptions::take`]; a drafter that does not fit the backbone.
    pub fn decode_loop<'a>(
        &self,
        decoder: &'a Decoder,
        acceptance: Acceptance,
        request: &Request,
        context: LoadContext,
    ) -> Result<Box<dyn DecodeLoop + 'a>, SessionError> {
        let drafts =
            decoder.drafter().map(|drafter| Drafts::new(&decoder.backbone, drafter, acceptance)).transpose()?;
        self.take(decoder, drafts, request, context)
    }

    fn on_gpu<'a>(
        &self,
        decoder: &'a Decoder,
        drafts: Option<&Drafts<'a>>,
        request: &Request,
    ) -> Result<DeviceLoop<'a>, CudaError> {
        device::check()?;
        let backbone = &decoder.backbone;
        // A requested context is reserved in full; a backbone's own may be far longer than any text.
        let tokens = self.max_context.map_or(1, |_| backbone.config.max_position_embeddings);
        let draft = drafts.map(|drafts| drafts.drafter.on_device()).transpose()?;
        let heads = draft.as_ref().zip(drafts.map(|drafts| drafts.acceptance));
        DeviceLoop::on_gpu(backbone, heads, request, tokens)
    }

    /// The engine that decodes many texts at a time; the CUDA engine cannot.
    ///
    /// # Errors
    /// `--engine cpu` with a backbone that its kernels cannot run.
    pub fn for_batches<'a>(&self, decoder: &'a Decoder) -> Result<Box<dyn Engine + 'a>, SessionError> {
        let backbone = &decoder.backbone;
        Ok(match self.engine {
            EngineName::Cpu => Box::new(CpuEngine::new(backbone).map_err(SessionError::CpuEngine)?),
            EngineName::Auto => fastest_for_batches(backbone),
            EngineName::Tch | EngineName::Cuda => Box::new(TchEngine::for_batches(backbone)),
        })
    }

    fn on_host<'a>(&self, decoder: &'a Decoder) -> Result<Box<dyn Engine + 'a>, SessionError> {
        let backbone = &decoder.backbone;
        Ok(match self.engine {
            EngineName::Tch => Box::new(TchEngine::new(backbone)),
            EngineName::Cpu => Box::new(CpuEngine::new(backbone).map_err(SessionError::CpuEngine)?),
            EngineName::Auto | EngineName::Cuda => fastest(backbone),
        })
    }
}
