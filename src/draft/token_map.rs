//! The tokens that heads with a truncated vocabulary can guess. Output i of a head is the logit of the i-th of these tokens.

// N tokens that heads can guess, V vocabulary
use std::cmp::Reverse;

use tch::{Device, Tensor};

use crate::model::weights::{WeightFiles, WeightsError};

/// Name of the tensor in our files and in vLLM's.
pub const TOKEN_MAP: &str = "token_map";

/// Name of the tensor in the files of EAGLE's authors: of each output, the token's id less the output's number.
pub const D2T: &str = "d2t";

/// Token ids by output, and back.
#[derive(Debug)]
pub struct TokenMap {
    tokens: Vec<i64>,
    /// `[N]`, int64, on the heads' device.
    tokens_n: Tensor,
    /// By token id; shorter than V if the last tokens have no output.
    outputs: Vec<Option<i64>>,
}

impl TokenMap {
    /// A map of distinct tokens.
    pub fn new(tokens: Vec<i64>, device: Device) -> Self {
        let last = tokens.iter().max().map_or(0, |&token| token as usize + 1);
        let mut outputs = vec![None; last];
        tokens.iter().zip(0..).for_each(|(&token, output)| outputs[token as usize] = Some(output));
        Self { tokens_n: Tensor::from_slice(&tokens).to_device(device), tokens, outputs }
    }

    /// The `size` tokens with the highest counts, by id; among equal counts the lower ids.
    pub fn most_frequent(counts: &[u64], size: usize) -> Vec<i64> {
        let mut tokens: Vec<usize> = (0..counts.len()).collect();
        tokens.sort_by_key(|&token| (Reverse(counts[token]), token));
        tokens.truncate(size);
        tokens.sort_unstable();
        tokens.into_iter().map(|token| token as i64).collect()
    }

    /// The tokens of the map in a file, if it has one.
    ///
    /// # Errors
    /// [`WeightsError`] if it is not a list of integers.
    pub fn in_file(file: &WeightFiles) -> Result<Option<Vec<i64>>, WeightsError> {
        match (file.contains(TOKEN_MAP), file.contains(D2T)) {
            (true, _) => file.integers(TOKEN_MAP).map(Some),
            (false, true) => {
                Ok(Some(file.integers(D2T)?.into_iter().zip(0..).map(|(ahead, output)| output + ahead).collect()))
            }
            (false, false) => Ok(None),
        }
    }

    /// The map as [`D2T`]; its tokens must ascend.
    pub fn d2t(&self) -> Tensor {
        Tensor::from_slice(&self.tokens.iter().zip(0..).map(|(token, output)| token - output).collect::<Vec<i64>>())
    }

    /// The token ids, in the order of the outputs.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// The token ids, `[N]`, int64.
    pub fn tokens_n(&self) -> &Tensor {
        &self.tokens_n
    }

    /// The output of a token; `None` if heads cannot guess it.
    pub fn output_of(&self, token: i64) -> Option<i64> {
        usize::try_from(token).ok().and_then(|token| *self.outputs.get(token)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_lower_ids_and_tokens_that_never_occur_fill_up() {
        let counts = [0, 3, 1, 3, 0, 1];
        assert_eq!(TokenMap::most_frequent(&counts, 1), [1]);
        assert_eq!(TokenMap::most_frequent(&counts, 3), [1, 2, 3]);
        assert_eq!(TokenMap::most_frequent(&counts, 5), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn outputs_and_tokens_lead_to_each_other() {
        let map = TokenMap::new(vec![2, 5, 9], Device::Cpu);
        let outputs: Vec<Option<i64>> = [0, 2, 5, 9, 10, -100].into_iter().map(|token| map.output_of(token)).collect();
        assert_eq!(outputs, [None, Some(0), Some(1), Some(2), None, None]);
    }
}
