//! `--engine` and `--max-context`: which engine decodes, and up to which length.

use std::num::NonZeroU32;
use std::path::Path;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tch::Device;

use super::backbone::backbone_config;
use super::decoder::Decoder;
use super::drafter::Drafts;
use super::drafter::plan::DrafterPlan;
use super::drafter::row_times::set_row_times;
use super::numbers::above_zero;
use super::served::{ModelOptions, on_libtorch};
use super::{CommonFlags, UsageError};
use crate::decode::DecodeLoop;
use crate::decode::device::DeviceLoop;
use crate::decode::host_loop::HostLoop;
use crate::decode::request::Request;
use crate::draft::heads::import::folder_of;
use crate::engine::Engine;
use crate::engine::cpu::CpuEngine;
use crate::engine::cuda::error::CudaError;
use crate::engine::fastest::{fastest, fastest_for_batches};
use crate::engine::tch::TchEngine;
use crate::model::config::LlamaConfig;
use crate::model::loading::Purpose;
use crate::model::peft::ADAPTER_CONFIG;
use crate::model::stored::Quantization;
use crate::nvidia::device;
use crate::torch::{DeviceChoice, accelerator};

/// Flags of every decoding verb.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Decoding")]
pub struct EngineFlags {
    /// Decoding engine.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = EngineName::Auto)]
    pub engine: EngineName,
    /// Maximum sequence length in tokens, prompt included [default: the backbone's context, or the one of the heads' training if rotary
    /// embeddings depend on it].
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroU32>)]
    pub max_context: Option<NonZeroU32>,
}

/// `--engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// The fastest engine that supports the request: cuda, else cpu, else tch.
    Auto,
    /// libtorch operations on any device; the reference for the other engines.
    Tch,
    /// Custom CPU kernels (AVX2 with FMA, or AVX-512 with bfloat16).
    Cpu,
    /// Custom CUDA kernels.
    Cuda,
}

/// Whether a user would expect decoding on a GPU: there is a driver, and no setting selects the CPU.
fn expects_gpu(common: &CommonFlags) -> bool {
    common.device != DeviceChoice::Cpu && !accelerator::is_off() && Path::new("/proc/driver/nvidia/version").exists()
}

impl EngineName {
    /// As it is typed.
    pub fn flag(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).expect("every engine can be typed")
    }

    /// The name of the engine; `None` for [`EngineName::Auto`].
    pub fn asked(self) -> Option<String> {
        (self != Self::Auto).then(|| self.flag())
    }
}

impl EngineFlags {
    /// Loads the backbone and the drafters, and limits the context to `--max-context`. Reports one with other rotary embeddings than those in the
    /// heads' training.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load(
        &self,
        backbone: &Path,
        heads: Option<&Path>,
        drafters: Vec<DrafterPlan>,
        served: ModelOptions,
        common: &CommonFlags,
    ) -> anyhow::Result<Decoder> {
        self.check_quantization(served.quantization, heads)?;
        // libtorch's engine needs weights that are not repacked for the CPU kernels.
        let purpose = if self.engine == EngineName::Tch { Purpose::Batches } else { Purpose::Decoding };
        let config = backbone_config(backbone)?;
        let context = self.context(&config, served.context)?; // before the weights are read
        if let Some(trained) = served.context.filter(|trained| !config.same_rotary_embeddings([*trained, context])) {
            common.say(format_args!(
                "--max-context {context}: the heads were trained with the rotary embeddings of a context of {trained} tokens; their accuracy \
                 may differ"
            ));
        }
        // Before the heads are loaded: a prefix layer takes its rotary embeddings from the backbone.
        let served = ModelOptions { context: Some(context), ..served };
        let mut decoder = Decoder::load(purpose, backbone, heads, drafters, served, common)?;
        set_row_times((self.engine.flag(), &|decoder| self.on_host(decoder)), &mut decoder, backbone, common)?;
        Ok(decoder)
    }

    /// Refuses quantised weights for the engines that read dense ones. An adapter beside the heads makes the weights that it changes
    /// dense, so these engines may decode them.
    fn check_quantization(&self, quantization: Option<Quantization>, heads: Option<&Path>) -> Result<(), UsageError> {
        let has_adapter = heads.is_some_and(|heads| folder_of(heads).join(ADAPTER_CONFIG).exists());
        match (self.engine.asked(), quantization) {
            (Some(engine), Some(quantization)) if self.engine != EngineName::Tch && !has_adapter => Err(UsageError(
                format!("--engine {engine}: {}; use --engine tch, or --quantization none", on_libtorch(quantization)),
            )),
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
        let (engine, backbone_device) = (self.on_host(decoder)?, decoder.backbone.device());
        for why in no_gpu.iter().filter(|_| backbone_device != Device::Cpu || expects_gpu(common)) {
            common.say(format_args!("engine {}: {why}", engine.name()));
        }
        Ok(Box::new(HostLoop::new(engine, drafts.map(Drafts::on_host))))
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
    pub fn for_batches<'a>(&self, decoder: &'a Decoder) -> anyhow::Result<Box<dyn Engine + 'a>> {
        let backbone = &decoder.backbone;
        Ok(match self.engine {
            EngineName::Cpu => Box::new(CpuEngine::new(backbone).context("--engine cpu cannot decode this")?),
            EngineName::Auto => fastest_for_batches(backbone),
            EngineName::Tch | EngineName::Cuda => Box::new(TchEngine::for_batches(backbone)),
        })
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
