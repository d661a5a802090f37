//! `--engine` and `--max-context`.

use std::num::NonZeroU32;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::numbers::above_zero;
use crate::session::engine::{EngineName, EngineOptions};

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

impl EngineFlags {
    /// The flags as options of a session.
    pub fn options(&self) -> EngineOptions {
        EngineOptions { engine: self.engine, max_context: self.max_context }
    }
}

impl ValueEnum for EngineName {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Auto, Self::Tch, Self::Cpu, Self::Cuda]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Auto => "The fastest engine that supports the request: cuda, else cpu, else tch",
            Self::Tch => "libtorch operations on any device; the reference for the other engines",
            Self::Cpu => "Custom CPU kernels (AVX2 with FMA and F16C, or AVX-512 with bfloat16 and VNNI)",
            Self::Cuda => "Custom CUDA kernels",
        };
        Some(PossibleValue::new(self.flag()).help(help))
    }
}
