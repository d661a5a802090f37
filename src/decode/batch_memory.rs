//! How many texts can be decoded together: what a batch takes of memory beside the backbone's weights. Pure arithmetic.

// V vocabulary, e bytes of a number
use std::num::NonZeroUsize;

use tch::{Device, Kind};

use crate::engine::PromptPass;
use crate::engine::prefill::PREFILL_CHUNK;
use crate::memory::size::Size;
use crate::memory::widths::Widths;
use crate::model::config::LlamaConfig;
use crate::model::kv_cache;
use crate::torch::memory;

/// Most texts that are decoded together without `--batch-size`. On a CPU, products of more rows are no faster for each row, and the bits of a
/// text depend on the batch from 65 rows on. On a GPU, steps are bound by arithmetic and by reading the cache (computed, not measured).
const MOST_ON_CPU: usize = 32;
const MOST_ON_GPU: usize = 256;
/// Bytes that choosing a token takes for each token of the vocabulary: logits in two dtypes, probabilities, their sorted copy with int64 ids,
/// float64 sums, and masks.
const CHOICE: u64 = 64;
/// As [`CHOICE`], for each guess of a tree: logits in two dtypes.
const OF_GUESS: u64 = 8;

/// Memory of a batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchMemory {
    /// Of a text: its row of the cache, and its logits.
    pub each: u64,
    /// Of a pass over prompts.
    pub pass: u64,
    most: usize,
}

impl BatchMemory {
    /// Of texts of at most `tokens` tokens, prompt included, each with at most `guesses` in a step.
    pub fn new(
        config: &LlamaConfig,
        (kind, device): (Kind, Device),
        [tokens, guesses]: [usize; 2],
        pass: PromptPass,
    ) -> Self {
        let (widths, e, on_gpu) = (Widths::of(config), kind.elt_size_in_bytes() as u64, device != Device::Cpu);
        let room = kv_cache::room_for(i64::try_from(tokens).unwrap_or(i64::MAX)).unsigned_abs();
        // A cache that grows is copied; on a GPU it is allocated once.
        let copies = if on_gpu { 1 } else { 2 };
        let row = (copies * Size::for_cache(config, 1, kind).bytes()).saturating_mul(room);
        let tokens_of_pass = match pass {
            PromptPass::OfOne => PREFILL_CHUNK.min(tokens),
            PromptPass::OfSeveral { tokens } => tokens,
        };
        Self {
            each: row
                .saturating_add(widths.v * CHOICE)
                .saturating_add(guesses as u64 * (widths.v * OF_GUESS + widths.passing() * e)),
            pass: tokens_of_pass as u64 * widths.passing() * e,
            most: if on_gpu { MOST_ON_GPU } else { MOST_ON_CPU },
        }
    }

    /// How many texts fit into so many free bytes, up to the number from which on more are no faster; at least one.
    pub fn texts(&self, free: u64) -> NonZeroUsize {
        let left = (free as f64 * memory::USABLE) as u64;
        let fit = usize::try_from(left.saturating_sub(self.pass) / self.each).unwrap_or(self.most);
        NonZeroUsize::new(fit.min(self.most)).unwrap_or(NonZeroUsize::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON_GPU: (Kind, Device) = (Kind::BFloat16, Device::Cuda(0));
    const PASS: PromptPass = PromptPass::OfSeveral { tokens: 4096 };

    #[test]
    fn a_text_of_llama_2_7b_takes_half_a_mebibyte_per_token() {
        let memory = BatchMemory::new(&LlamaConfig::llama_2_7b(), ON_GPU, [1024, 0], PASS);
        assert_eq!(memory.each, 1024 * (512 << 10) + 32000 * CHOICE);
        assert!((600 << 20..1 << 30).contains(&memory.pass), "{}", memory.pass);
        // 13.5 GB of 80 are weights.
        assert_eq!(memory.texts(66_000_000_000).get(), 108);
        assert_eq!(
            BatchMemory::new(&LlamaConfig::llama_2_7b(), ON_GPU, [4096, 0], PASS).texts(66_000_000_000).get(),
            27
        );
        assert_eq!(
            BatchMemory::new(&LlamaConfig::llama_2_7b(), ON_GPU, [200, 0], PASS).texts(66_000_000_000).get(),
            MOST_ON_GPU
        );
    }

    #[test]
    fn a_batch_has_at_least_one_text_and_on_a_cpu_at_most_32() {
        let on_cpu =
            BatchMemory::new(&LlamaConfig::llama_2_7b(), (Kind::Float, Device::Cpu), [4096, 0], PromptPass::OfOne);
        assert_eq!(on_cpu.texts(0).get(), 1);
        assert_eq!(on_cpu.texts(u64::MAX).get(), 32);
        assert_eq!(on_cpu.texts(34 << 30).get(), 3, "8 GiB each while the cache grows");
    }

    #[test]
    fn a_context_that_no_memory_holds_takes_all_of_it() {
        for tokens in [1 << 62, i64::MAX as usize, usize::MAX] {
            let memory = BatchMemory::new(&LlamaConfig::llama_2_7b(), ON_GPU, [tokens, 63], PASS);
            assert_eq!((memory.each, memory.texts(1 << 40).get()), (u64::MAX, 1), "{tokens}");
        }
    }
}
