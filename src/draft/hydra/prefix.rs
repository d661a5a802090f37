//! The prefix layer of Hydra++ heads while texts are decoded: its keys and values, and the state that the heads read. The rows are those of
//! the backbone's KV cache.

// N tokens, H hidden
use tch::Tensor;

use crate::model::kv_cache::KvCache;
use crate::model::prefix_layer::PrefixLayer;

/// What the prefix layer knows of each text.
#[derive(Debug)]
pub struct PrefixRows {
    cache: KvCache,
    /// Of each row: the layer's output `[1, H]` for the last committed token; `None` before the first, and after [`PrefixRows::truncate`].
    last: Vec<Option<Tensor>>,
}

impl PrefixRows {
    /// Without rows.
    pub fn new(layer: &PrefixLayer) -> Self {
        Self { cache: layer.cache(), last: vec![] }
    }

    /// Adds an empty row behind the others.
    pub fn push(&mut self) {
        self.cache.push();
        self.last.push(None);
    }

    /// Runs the layer over the hidden states `[N, H]` of tokens that were committed to a row.
    pub fn commit(&mut self, layer: &PrefixLayer, row: usize, hidden_nh: &Tensor) {
        let output_nh = tch::no_grad(|| layer.extend(hidden_nh, &mut self.cache, row));
        self.last[row] = Some(output_nh.narrow(0, output_nh.size()[0] - 1, 1));
    }

    /// Keeps only the first `tokens` tokens of a row.
    pub fn truncate(&mut self, row: usize, tokens: usize) {
        self.cache.truncate(row, tokens as i64);
        self.last[row] = None;
    }

    /// Removes a row; the last row takes its place.
    pub fn swap_remove(&mut self, row: usize) {
        self.cache.swap_remove(row);
        self.last.swap_remove(row);
    }

    /// What the heads read in place of the hidden state that the row's root was chosen from, `[1, H]`.
    ///
    /// # Panics
    /// If no token was committed since the row was truncated: a prompt's last token always is.
    pub fn state(&self, row: usize) -> &Tensor {
        self.last[row].as_ref().expect("the last token of a text is committed before guesses are asked for")
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::model::config::LlamaConfig;
    use crate::torch::Generator;

    #[test]
    fn the_state_of_a_row_is_that_of_its_text() {
        let layer = PrefixLayer::new(&LlamaConfig::tiny(), (Kind::Double, Device::Cpu), 4);
        let texts = Generator::seeded(5).normal(&[3, 20, 32], (Kind::Double, Device::Cpu));
        let mut rows = PrefixRows::new(&layer);
        let expected = |text: i64, tokens: i64| {
            let hidden_1th = texts.narrow(0, text, 1).narrow(1, 0, tokens);
            let mask = layer.mask(&[vec![tokens as usize]], tokens);
            layer.over_rows(&hidden_1th, &mask).narrow(1, tokens - 1, 1).squeeze_dim(0)
        };
        let is = |rows: &PrefixRows, row: usize, (text, tokens): (i64, i64)| {
            let difference = (rows.state(row) - expected(text, tokens)).abs().max().double_value(&[]);
            assert!(difference < 1e-12, "row {row}: {difference}");
        };
        let commit = |rows: &mut PrefixRows, row: usize, (text, from, tokens): (i64, i64, i64)| {
            rows.commit(&layer, row, &texts.get(text).narrow(0, from, tokens));
        };
        for row in 0..3 {
            rows.push();
            commit(&mut rows, row, (row as i64, 0, 7 + row as i64));
        }
        commit(&mut rows, 1, (1, 8, 3));
        (0..3).zip([(0, 7), (1, 11), (2, 9)]).for_each(|(row, text)| is(&rows, row, text));
        rows.truncate(1, 5);
        commit(&mut rows, 1, (1, 5, 1));
        is(&rows, 1, (1, 6));
        rows.swap_remove(0);
        is(&rows, 0, (2, 9));
        commit(&mut rows, 0, (2, 9, 4));
        (0..2).zip([(2, 13), (1, 6)]).for_each(|(row, text)| is(&rows, row, text));
    }
}
