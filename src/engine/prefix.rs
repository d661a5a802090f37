//! What of a prompt is in the cache from the text before.

/// Tokens of a prompt that need not be computed: those that the cache holds, but never the prompt's last one.
pub fn cached_prefix(cached: &[i64], prompt: &[i64]) -> usize {
    cached.iter().zip(prompt).take_while(|(cached, wanted)| cached == wanted).count().min(prompt.len() - 1)
}
