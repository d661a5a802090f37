//! How many texts are decoded together where the caller does not say: as many as fit the free memory. What makes them slow.

use std::num::NonZeroUsize;

use tch::Device;

use super::error::SessionError;
use super::reporter::Reporter;
use crate::decode::batch_memory::BatchMemory;
use crate::engine::Engine;
use crate::fused::batch_attention;
use crate::model::llama::Llama;
use crate::plural::{counted, gibibytes};
use crate::torch::cuda_runtime::{self, CudaRuntimeError};
use crate::torch::memory;

/// One of so many free bytes is for the beginnings of conversations.
const SHARE_FOR_PREFIXES: u64 = 16;
const MOST_FOR_PREFIXES: usize = 1 << 30;

/// A number of conversations, at most `waiting`, of at most `tokens` tokens each, with at most `guesses` in a step. Reports the choice.
///
/// # Errors
/// A GPU that does not report its free memory.
pub fn that_fits(
    engine: &dyn Engine,
    [tokens, guesses]: [usize; 2],
    waiting: usize,
    reporter: &dyn Reporter,
) -> Result<NonZeroUsize, SessionError> {
    let BatchFit { size, each, free } =
        fit(engine, [tokens, guesses]).map_err(unknown_memory("the batch size", "--batch-size"))?;
    let size = NonZeroUsize::new(size.get().min(waiting)).unwrap_or(size);
    let conversations = counted(size.get(), "conversation");
    let why = free.map(|free| {
        format!(": {} are free, one of at most {tokens} tokens takes {}", gibibytes(free), gibibytes(each))
    });
    if waiting > 0 {
        reporter.notice(&format_args!("decoding {conversations} together{}", why.unwrap_or_default()));
    }
    Ok(size)
}

/// The number of texts that a server decodes together. Reports a context that the free memory does not hold.
///
/// # Errors
/// A GPU that does not report its free memory.
pub fn for_server(
    engine: &dyn Engine,
    [tokens, guesses]: [usize; 2],
    reporter: &dyn Reporter,
) -> Result<NonZeroUsize, SessionError> {
    let BatchFit { size, each, free } =
        fit(engine, [tokens, guesses]).map_err(unknown_memory("the number of texts", "--max-texts"))?;
    if let Some(free) = free.filter(|free| each > *free) {
        reporter.notice(&format_args!(
            "warning: a text as long as the context ({tokens} tokens) takes {}, and {} are free: the server ends if a text grows so long",
            gibibytes(each),
            gibibytes(free)
        ));
    }
    Ok(size)
}

/// Texts that fit the free memory beside the beginnings that are kept.
struct BatchFit {
    size: NonZeroUsize,
    /// Bytes of a text.
    each: u64,
    /// `None` where the system does not say.
    free: Option<u64>,
}

fn unknown_memory(what: &'static str, flag: &'static str) -> impl FnOnce(CudaRuntimeError) -> SessionError {
    move |source| SessionError::FreeMemory { what, flag, source }
}

fn fit(engine: &dyn Engine, [tokens, guesses]: [usize; 2]) -> Result<BatchFit, CudaRuntimeError> {
    let backbone = engine.backbone();
    let options = (backbone.kind(), backbone.device());
    let batch = BatchMemory::new(&backbone.config, options, [tokens, guesses], engine.prompt_pass());
    let free = free_bytes(backbone.device())?;
    let size = batch.texts(free.map_or(u64::MAX, |free| free - for_prefixes(Some(free)) as u64));
    Ok(BatchFit { size, each: batch.each, free })
}

/// Bytes for the beginnings of conversations, which their later turns go on from. `None` where that could change an answer that must not
/// depend on the batch: on a CPU, if bits depend on the pass that they were computed in.
///
/// # Errors
/// A GPU that does not report its free memory.
pub fn prefix_bytes(engine: &dyn Engine) -> Result<Option<usize>, CudaRuntimeError> {
    match engine.backbone().device() {
        Device::Cpu if !engine.same_bits_in_any_pass() => Ok(None),
        device => Ok(Some(for_prefixes(free_bytes(device)?))),
    }
}

fn for_prefixes(free: Option<u64>) -> usize {
    free.map_or(MOST_FOR_PREFIXES, |free| usize::try_from(free / SHARE_FOR_PREFIXES).unwrap_or(usize::MAX))
        .min(MOST_FOR_PREFIXES)
}

/// Says why many conversations together are slower on this GPU than on another one, or with another backbone.
pub fn report_slower(backbone: &Llama, reporter: &dyn Reporter) {
    let config = &backbone.config;
    let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
    if let Some(why) = batch_attention::missing(backbone.device(), backbone.kind(), heads) {
        reporter.notice(&format_args!("libtorch's attention decodes here, and it is slower than our kernel: {why}"));
    }
}

/// `None` where the system does not say.
fn free_bytes(device: Device) -> Result<Option<u64>, CudaRuntimeError> {
    if let Device::Cuda(index) = device {
        memory::release_cached(device);
        return Ok(Some(cuda_runtime::memory(index)?.1));
    }
    Ok(memory::machine().map(|(_, available)| available))
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::engine::cpu::CpuEngine;
    use crate::engine::tch::TchEngine;
    use crate::model::config::LlamaConfig;

    fn backbone() -> Llama {
        Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1)
    }

    /// In bfloat16, libtorch's passes of 70 and of 6 tokens give the last 6 other bits from a hidden size of 1024 on.
    #[test]
    fn libtorch_on_a_cpu_takes_nothing_from_other_conversations() {
        let llama = backbone();
        assert_eq!(prefix_bytes(&TchEngine::for_batches(&llama)).unwrap(), None);
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn kernels_take_the_beginnings_of_other_conversations() {
        let llama = backbone().for_decoding();
        let bytes = prefix_bytes(&CpuEngine::new(&llama).expect("kernels")).unwrap();
        assert!(bytes.is_some_and(|bytes| (1..=MOST_FOR_PREFIXES).contains(&bytes)), "{bytes:?}");
    }
}
