//! The default engine on the host.

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
