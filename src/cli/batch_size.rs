//! How many conversations `medusa distill` decodes together without `--batch-size`: as many as fit the free memory. What makes them slow.

use std::num::NonZeroUsize;

use anyhow::Context;
use tch::Device;

use super::CommonFlags;
use super::print::gibibytes;
use crate::decode::batch_memory::BatchMemory;
use crate::engine::Engine;
use crate::fused::batch_attention;
use crate::model::llama::Llama;
use crate::plural::counted;
use crate::torch::{cuda_runtime, memory};

/// One of so many free bytes is for the beginnings of conversations.
const SHARE_FOR_PREFIXES: u64 = 16;
const MOST_FOR_PREFIXES: usize = 1 << 30;

/// A number of conversations, at most `waiting`, of at most `tokens` tokens each, with at most `guesses` in a step. Reports the choice.
///
/// # Errors
/// A GPU that does not tell its free memory.
pub(super) fn that_fits(
    engine: &dyn Engine,
    [tokens, guesses]: [usize; 2],
    waiting: usize,
    common: &CommonFlags,
) -> anyhow::Result<NonZeroUsize> {
    let backbone = engine.backbone();
    let options = (backbone.kind(), backbone.device());
    let of_batch = BatchMemory::new(&backbone.config, options, [tokens, guesses], engine.prompt_pass());
    let free = free_bytes(backbone.device()).context("the batch size depends on the free memory; set --batch-size")?;
    let size = of_batch.texts(free.map_or(u64::MAX, |free| free - for_prefixes(Some(free)) as u64));
    let size = NonZeroUsize::new(size.get().min(waiting)).unwrap_or(size);
    let conversations = counted(size.get(), "conversation");
    let why = free.map(|free| {
        format!(": {} are free, one of at most {tokens} tokens takes {}", gibibytes(free), gibibytes(of_batch.each))
    });
    if waiting > 0 {
        common.say(format_args!("decoding {conversations} together{}", why.unwrap_or_default()));
    }
    Ok(size)
}

/// Bytes for the beginnings of conversations, which their later turns go on from.
///
/// # Errors
/// A GPU that does not tell its free memory.
pub(super) fn of_prefixes(device: Device) -> anyhow::Result<usize> {
    Ok(for_prefixes(free_bytes(device)?))
}

fn for_prefixes(free: Option<u64>) -> usize {
    free.map_or(MOST_FOR_PREFIXES, |free| usize::try_from(free / SHARE_FOR_PREFIXES).unwrap_or(usize::MAX))
        .min(MOST_FOR_PREFIXES)
}

/// Says why many conversations together are slower on this GPU than on another one, or with another backbone.
pub(super) fn tell_slower(backbone: &Llama, common: &CommonFlags) {
    let config = &backbone.config;
    let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
    if let Some(why) = batch_attention::missing(backbone.device(), backbone.kind(), heads) {
        common.say(format_args!("libtorch's attention decodes here, and it is slower than our kernel: {why}"));
    }
}

/// `None` where the system does not say.
fn free_bytes(device: Device) -> anyhow::Result<Option<u64>> {
    if let Device::Cuda(index) = device {
        memory::release_cached(device);
        return Ok(Some(cuda_runtime::memory(index)?.1));
    }
    Ok(memory::machine().map(|(_, available)| available))
}
