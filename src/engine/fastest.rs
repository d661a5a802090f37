//! The default engines on the host.

use super::Engine;
use super::cpu::CpuEngine;
use super::tch::TchEngine;
use crate::model::llama::Llama;

/// The CPU's own kernels if they support `backbone`, else libtorch.
pub fn fastest(backbone: &Llama) -> Box<dyn Engine + '_> {
    match CpuEngine::new(backbone) {
        Ok(engine) => Box::new(engine),
        Err(_) => Box::new(TchEngine::new(backbone)),
    }
}

/// As [`fastest`], for many texts at a time.
pub fn fastest_for_batches(backbone: &Llama) -> Box<dyn Engine + '_> {
    match CpuEngine::new(backbone) {
        Ok(engine) => Box::new(engine),
        Err(_) => Box::new(TchEngine::for_batches(backbone)),
    }
}
