//! Keys and values of several generations that are decoded together. Rows behave like a Vec's: a new one comes last, the last
//! one takes the place of one that leaves.

// L layers, B rows, P rows of a product, G key/value heads, S room for tokens, D head size
use tch::{Device, Kind, Tensor};

use crate::model::block_spec::Windows;
use crate::model::config::LlamaConfig;
use crate::model::kv_cache::KvCache;
use crate::model::rope::{Rope, Rotation};

/// Room for tokens grows by whole blocks.
const BLOCK: i64 = 256;
/// Attention reads a multiple of so many tokens, so that a kernel sums a row's keys in the same lanes whatever the other rows' lengths.
const READ_AT_ONCE: i64 = 64;
/// A product of few rows is another kernel's than one of many, with other last bits: on the CPU, libtorch's changes last at 16
/// rows (seen with widths from 32 to 1536), oneDNN's packed one at 2. So there are always so many rows, the last ones spare.
const FEWEST_ROWS: i64 = 16;

/// Keys and values of all layers and rows. A row's tokens are left-aligned.
#[derive(Debug)]
pub struct BatchCache {
    /// `[L, B, 2G, S, D]`: keys, then values; as in [`KvCache`], so that a prompt's cache enters in one copy.
    all: Tensor,
    /// Views of `all`.
    layers: Vec<BatchLayer>,
    /// Tokens of each row.
    lengths: Vec<i64>,
    sliding_window: Option<i64>,
    /// No row has more tokens.
    context: i64,
}

/// Keys and values of one layer: views, so writing to them writes to the cache.
#[derive(Debug)]
pub struct BatchLayer {
    /// `[B·2G·S, D]`.
    flat_nd: Tensor,
    /// `[B, G, S, D]`.
    keys_bgsd: Tensor,
    /// `[B, G, S, D]`.
    values_bgsd: Tensor,
}

/// One step of all rows: a token each.
#[derive(Debug)]
pub struct BatchStep {
    /// How many rows there are.
    pub(super) rows: i64,
    /// Rows of the products: those, or [`FEWEST_ROWS`].
    pub(super) product_rows: i64,
    /// Tokens that attention reads.
    pub(super) read: i64,
    /// `[P]` of the product's rows, float32.
    positions_p: Tensor,
    /// `[B·2G]` int64: where the new keys and values go in [`BatchLayer::flat_nd`].
    at_n: Tensor,
    /// `[B, 1, 1, S]`: 0 where a row sees its token, else -inf.
    pub(super) mask_b11s: Tensor,
}

impl BatchCache {
    /// Without rows; room comes as it is needed.
    pub fn new(config: &LlamaConfig, kind: Kind, device: Device) -> Self {
        let (layers, planes) = (config.num_hidden_layers.cast_signed() as i64, 2 * config.num_key_value_heads);
        // Zeros everywhere: what is hidden by the mask is still multiplied, and must be finite.
        let all = Tensor::zeros([layers, 1, planes, BLOCK, config.head_dim], (kind, device));
        let Windows::EveryLayer(sliding_window) = config.block().windows;
        let context = config.max_position_embeddings;
        Self { layers: layer_views(&all), all, lengths: vec![], sliding_window, context }
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Committed keys and values of a row, `[2L, G, len, D]` as [`KvCache::committed`] has them.
    pub fn committed(&self, row: usize) -> Tensor {
        let [l, _, planes, _, d] = self.all.size()[..] else { panic!("[L, B, 2G, S, D]") };
        let row_lgsd = self.all.select(1, row as i64).narrow(2, 0, self.lengths[row]);
        row_lgsd.reshape([2 * l, planes / 2, self.lengths[row], d])
    }

    /// A generation enters with what it has computed so far, as the last row.
    pub fn push(&mut self, prompt: &KvCache) {
        self.reserve(self.rows() as i64 + 1, prompt.len());
        let [l, _, planes, _, d] = self.all.size()[..] else { panic!("[L, B, 2G, S, D]") };
        let row_lgsd = self.all.select(1, self.rows() as i64).narrow(2, 0, prompt.len());
        row_lgsd.shallow_clone().copy_(&prompt.committed().reshape([l, planes, prompt.len(), d]));
        self.lengths.push(prompt.len());
    }

    /// A row leaves; the last one takes its place.
    pub fn swap_remove(&mut self, row: usize) {
        let last = self.rows() - 1;
        if row != last {
            let tokens = |row: usize| self.all.select(1, row as i64).narrow(2, 0, self.lengths[last]);
            tokens(row).copy_(&tokens(last));
        }
        self.lengths.swap_remove(row);
    }

    /// Makes room for one more token a row, and says where it goes and what it sees.
    pub(super) fn step(&mut self) -> BatchStep {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        let rows = self.rows() as i64;
        self.reserve(rows, longest + 1);
        let [_, _, planes, room, _] = self.all.size()[..] else { panic!("[L, B, 2G, S, D]") };
        let plane = |(row, &length): (i64, &i64)| (0..planes).map(move |plane| (row * planes + plane) * room + length);
        let at: Vec<i64> = (0..rows).zip(&self.lengths).flat_map(plane).collect();
        let lengths_b = self.to_device(&self.lengths);
        let read = round_up(longest + 1, READ_AT_ONCE).min(room);
        let mask_b11s = self.mask(&lengths_b, read);
        let product_rows = rows.max(FEWEST_ROWS);
        let positions_p = padded(&lengths_b.to_kind(Kind::Float), product_rows);
        BatchStep { rows, product_rows, read, positions_p, at_n: self.to_device(&at), mask_b11s }
    }

    /// The tokens of the step become committed.
    pub(super) fn commit(&mut self) {
        self.lengths.iter_mut().for_each(|length| *length += 1);
    }

    pub(super) fn layer(&self, layer: usize) -> &BatchLayer {
        &self.layers[layer]
    }

    /// A row's token at position `lengths_b` sees itself and what is before it, within the sliding window if there is one.
    fn mask(&self, lengths_b: &Tensor, read: i64) -> Tensor {
        let behind_bs = lengths_b.unsqueeze(1) - Tensor::arange(read, (Kind::Int64, self.all.device()));
        let mut hidden_bs = behind_bs.lt(0);
        if let Some(window) = self.sliding_window {
            hidden_bs = hidden_bs.logical_or(&behind_bs.ge(window));
        }
        let mask_bs = Tensor::zeros(hidden_bs.size(), (self.all.kind(), self.all.device()));
        mask_bs.masked_fill(&hidden_bs, f64::NEG_INFINITY).unsqueeze(1).unsqueeze(1)
    }

    fn to_device(&self, values: &[i64]) -> Tensor {
        Tensor::from_slice(values).to_device(self.all.device())
    }

    /// Room for so many rows of so many tokens; what is there stays.
    fn reserve(&mut self, rows: i64, tokens: i64) {
        let size = self.all.size();
        let [l, has_rows, planes, has_tokens, d] = size[..] else { panic!("[L, B, 2G, S, D]") };
        if rows <= has_rows && tokens <= has_tokens {
            return;
        }
        let grown = |needed: i64, has: i64| if needed <= has { has } else { needed.max(2 * has) };
        let s = round_up(grown(tokens, has_tokens).min(self.context.max(tokens)), BLOCK).max(has_tokens);
        let b = grown(rows, has_rows);
        let all = Tensor::zeros([l, b, planes, s, d], (self.all.kind(), self.all.device()));
        all.narrow(1, 0, has_rows).narrow(3, 0, has_tokens).copy_(&self.all);
        self.layers = layer_views(&all);
        self.all = all;
    }
}

impl BatchStep {
    /// Rotations of the new tokens and the spare ones, `[P, 1, D]`.
    pub(super) fn rotation(&self, rope: &Rope) -> Rotation {
        rope.at(&self.positions_p)
    }

    /// `[B, …]` to `[P, …]`: spare rows of zeros.
    pub(super) fn with_spare_rows(&self, x: &Tensor) -> Tensor {
        padded(x, self.product_rows)
    }
}

impl BatchLayer {
    /// Takes the new tokens' keys and values, `[B, 2G, D]`; returns the keys and the values that they may see, `[B, G, S, D]` each.
    pub(super) fn write(&self, new_bgd: &Tensor, step: &BatchStep) -> [Tensor; 2] {
        let d = new_bgd.size()[2];
        let _ = self.flat_nd.shallow_clone().index_copy_(0, &step.at_n, &new_bgd.reshape([-1, d]));
        [&self.keys_bgsd, &self.values_bgsd].map(|all| all.narrow(0, 0, step.rows).narrow(2, 0, step.read))
    }
}

/// Zeros behind the rows of `x` (`[B]` or `[B, …]`).
fn padded(x: &Tensor, rows: i64) -> Tensor {
    let missing = rows - x.size()[0];
    if missing == 0 {
        return x.shallow_clone();
    }
    let mut size = x.size();
    size[0] = missing;
    Tensor::cat(&[x, &Tensor::zeros(size, (x.kind(), x.device()))], 0)
}

fn round_up(tokens: i64, unit: i64) -> i64 {
    (tokens + unit - 1) / unit * unit
}

fn layer_views(all: &Tensor) -> Vec<BatchLayer> {
    let [l, _, planes, _, d] = all.size()[..] else { panic!("[L, B, 2G, S, D]") };
    let layer = |at: i64| {
        let both_bgsd = all.select(0, at);
        BatchLayer {
            flat_nd: both_bgsd.view([-1, d]),
            keys_bgsd: both_bgsd.narrow(1, 0, planes / 2),
            values_bgsd: both_bgsd.narrow(1, planes / 2, planes / 2),
        }
    };
    (0..l).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use tch::no_grad;

    use super::*;
    use crate::model::attention::NewTokens;
    use crate::model::llama::Llama;
    use crate::model::lora::Adapters;

    /// A generation on its own: the oracle.
    struct Alone {
        cache: KvCache,
        next: i64,
    }

    impl Alone {
        fn new(llama: &Llama, prompt: &[i64]) -> Self {
            let mut alone = Self { cache: KvCache::new(&llama.config, llama.kind(), llama.device()), next: 0 };
            let _ = alone.extend(llama, prompt);
            alone
        }

        /// Returns the logits after the last token, `[V]`.
        fn extend(&mut self, llama: &Llama, tokens: &[i64]) -> Tensor {
            let n = tokens.len() as i64;
            let new = NewTokens::chain(n, &llama.config, llama.kind(), llama.device());
            let hidden_nh = llama.extend(&Tensor::from_slice(tokens), &new, &mut self.cache);
            self.cache.commit(n);
            let logits_v = llama.logits(&hidden_nh.narrow(0, n - 1, 1), Adapters::Off).squeeze_dim(0);
            self.next = logits_v.argmax(-1, false).int64_value(&[]);
            logits_v
        }
    }

    fn prompt(length: i64, seed: i64) -> Vec<i64> {
        (0..length).map(|i| (i * i + 7 * seed + 3 * i) % 50).collect()
    }

    /// Rows enter and leave at any time, grow over the blocks, and each computes what it computes alone.
    #[test]
    fn every_row_equals_its_own_generation() {
        tch::set_num_threads(1);
        for (sliding_window, seed) in [(None, 0), (Some(7), 1)] {
            let config = LlamaConfig { sliding_window, max_position_embeddings: 600, ..LlamaConfig::tiny() };
            let llama = Llama::random(config, Kind::Double, Device::Cpu, seed);
            let mut batch = BatchCache::new(&llama.config, Kind::Double, Device::Cpu);
            let mut rows: Vec<Alone> = vec![];
            let lengths = [3, 240, 1, 30, 254, 17];
            no_grad(|| {
                for step in 0..40 {
                    if step % 3 == 0 && step / 3 < lengths.len() {
                        let alone = Alone::new(&llama, &prompt(lengths[step / 3], step as i64));
                        batch.push(&alone.cache);
                        rows.push(alone);
                    }
                    if [8, 14, 20, 26, 32].contains(&step) {
                        batch.swap_remove(step % rows.len());
                        rows.swap_remove(step % rows.len());
                    }
                    let tokens: Vec<i64> = rows.iter().map(|row| row.next).collect();
                    let logits_bv = llama.extend_batch(&Tensor::from_slice(&tokens), &mut batch);
                    for (at, row) in rows.iter_mut().enumerate() {
                        let alone_v = row.extend(&llama, &[tokens[at]]);
                        let difference = (logits_bv.get(at as i64) - alone_v).abs().max().double_value(&[]);
                        assert!(difference < 1e-10, "window {sliding_window:?}, step {step}, row {at}: {difference}");
                    }
                }
                assert_eq!((batch.rows(), rows.len()), (1, 1));
                let difference = (batch.committed(0) - rows[0].cache.committed()).abs().max().double_value(&[]);
                assert!(difference < 1e-12, "{difference}");
            });
        }
    }

    /// In float32 too, whatever rows stand beside a row, and wherever it stands, its logits are the same bits.
    #[test]
    fn a_rows_bits_do_not_depend_on_the_others() {
        tch::set_num_threads(1);
        for hidden_size in [32, 512] {
            let config = LlamaConfig {
                hidden_size,
                intermediate_size: 3 * hidden_size,
                vocab_size: 300,
                max_position_embeddings: 600,
                head_dim: hidden_size / 4,
                ..LlamaConfig::tiny()
            };
            let llama = Llama::random(config, Kind::Float, Device::Cpu, 3).for_decoding();
            let alone = Alone::new(&llama, &prompt(20, 1));
            let others = [200, 5, 70].map(|length| Alone::new(&llama, &prompt(length, length)));
            let logits = |before: usize, after: usize| {
                let mut batch = BatchCache::new(&llama.config, Kind::Float, Device::Cpu);
                let around = |count: usize| (0..count).map(|at| &others[at % 3]);
                let rows: Vec<&Alone> = around(before).chain([&alone]).chain(around(after)).collect();
                rows.iter().for_each(|row| batch.push(&row.cache));
                let tokens = vec![9; rows.len()];
                let _ = llama.extend_batch(&Tensor::from_slice(&tokens), &mut batch);
                llama.extend_batch(&Tensor::from_slice(&tokens), &mut batch).get(before as i64)
            };
            no_grad(|| {
                let expected = logits(0, 0);
                for (before, after) in [(0, 1), (1, 0), (2, 1), (3, 5), (11, 4), (0, 31), (31, 0), (40, 23)] {
                    assert_eq!(
                        logits(before, after),
                        expected,
                        "hidden size {hidden_size}, {before} + 1 + {after} rows"
                    );
                }
            });
        }
    }
}
