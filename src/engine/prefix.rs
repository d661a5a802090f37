//! Prefix reuse between consecutive prompts.

/// Number of leading prompt tokens that are already in the cache. Never all of them: the last token's logits are needed.
pub fn cached_prefix(cached: &[i64], prompt: &[i64]) -> usize {
    cached.iter().zip(prompt).take_while(|(cached, wanted)| cached == wanted).count().min(prompt.len() - 1)
}
