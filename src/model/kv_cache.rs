//! The KV cache, one row per text. Rows behave like a `Vec`'s elements under `push` and `swap_remove`. A row's tokens are left-aligned: the
//! committed ones, then those of the current step (pending).
#![expect(unsafe_code, reason = "the CPU's kernels write to the cache's memory, of which libtorch has views")]

// L layers, B rows, G key/value heads, S room for tokens, D head size
use tch::{Device, Kind, Tensor};

use crate::model::batch_step::BatchStep;
use crate::model::config::LlamaConfig;
use crate::torch::{bytes, upload};

/// Room for tokens grows by whole blocks.
const BLOCK: i64 = 256;

/// Keys and values of all layers and rows.
#[derive(Debug)]
pub struct KvCache {
    /// `[L, B, 2G, S, D]`: keys, then values.
    all: Tensor,
    /// L, B, 2G, S, D: asked for at every layer of a step.
    sizes: [usize; 5],
    /// Views of `all`, made once because a view costs as much as a small product.
    layers: Vec<LayerCache>,
    /// Committed tokens of each row.
    lengths: Vec<i64>,
    /// The sliding window of each kind of layer.
    windows: Vec<Option<i64>>,
    /// No row has more committed tokens.
    context: i64,
}

/// A cache's memory on the CPU, fetched from libtorch once per pass rather than once per layer.
#[derive(Debug)]
pub struct CacheBytes<'c> {
    sizes: [usize; 5],
    /// Of a number.
    element: usize,
    bytes: &'c mut [u8],
}

/// Keys and values of one layer: views, so writing to them writes to the cache.
#[derive(Debug)]
pub struct LayerCache {
    rows: Vec<RowCache>,
    /// `[B, 2G, S, D]`: keys, then values.
    pub(super) both_bgsd: Tensor,
    /// `[B·2G·S, D]`.
    flat_nd: Tensor,
    /// `[B, G, S, D]`.
    keys_bgsd: Tensor,
    /// `[B, G, S, D]`.
    values_bgsd: Tensor,
}

/// Keys and values of one row in one layer.
#[derive(Debug)]
pub struct RowCache {
    /// `[2G, S, D]`: keys, then values.
    pub(super) both_gsd: Tensor,
    /// `[1, G, S, D]`.
    pub(super) keys_1gsd: Tensor,
    /// `[1, G, S, D]`.
    pub(super) values_1gsd: Tensor,
}

impl KvCache {
    /// Without rows and without memory, which comes as it is needed.
    pub fn new(config: &LlamaConfig, kind: Kind, device: Device) -> Self {
        let (layers, planes) = (config.num_hidden_layers.cast_signed() as i64, 2 * config.num_key_value_heads);
        let all = Tensor::zeros([layers, 0, planes, BLOCK, config.head_dim], (kind, device));
        let windows = config.layer_kinds().windows();
        let context = config.max_position_embeddings;
        Self { sizes: sizes(&all), layers: layer_views(&all), all, lengths: vec![], windows, context }
    }

    /// With one empty row, row 0.
    pub fn with_one_row(config: &LlamaConfig, kind: Kind, device: Device) -> Self {
        let mut cache = Self::new(config, kind, device);
        cache.push();
        cache
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Adds an empty row behind the others; returns its index.
    pub fn push(&mut self) -> usize {
        let row = self.rows();
        self.reserve(row as i64 + 1, 0); // may run out of memory: then there is no row
        // What another text left here is masked, but 0 times its NaN would be NaN.
        let _ = self.all.select(1, row as i64).zero_();
        self.lengths.push(0);
        row
    }

    /// Removes a row; the last one takes its place.
    pub fn swap_remove(&mut self, row: usize) {
        let last = self.rows() - 1;
        if row != last {
            let all_of = |row: usize| self.all.select(1, row as i64);
            all_of(row).copy_(&all_of(last)); // also what is masked: see `push`
        }
        self.lengths.swap_remove(row);
    }

    /// Committed tokens of a row.
    pub fn len(&self, row: usize) -> i64 {
        self.lengths[row]
    }

    /// A copy of a row's committed keys and values, `[L, 2G, len, D]`: keys, then values.
    #[cfg(test)]
    pub fn committed(&self, row: usize) -> Tensor {
        self.all.select(1, row as i64).narrow(2, 0, self.lengths[row]).copy()
    }

    /// Overwrites a row's committed keys and values.
    #[cfg(test)]
    pub fn mark_committed(&mut self, row: usize, value: f64) {
        let _ = self.all.select(1, row as i64).narrow(2, 0, self.lengths[row]).fill_(value);
    }

    /// A copy of the keys and values of `tokens` of a row's committed tokens from token `from` on: `[L, 2G, N, D]`, keys, then values.
    pub fn copied(&self, row: usize, from: usize, tokens: usize) -> Tensor {
        assert!((from + tokens) as i64 <= self.lengths[row], "committed tokens");
        self.all.select(1, row as i64).narrow(2, from as i64, tokens as i64).copy()
    }

    /// Commits tokens whose keys and values are given, as [`KvCache::copied`] returns them.
    pub fn append(&mut self, row: usize, parts: &[Tensor]) {
        let tokens = |part: &Tensor| part.size()[2];
        self.reserve_tokens(row, parts.iter().map(tokens).sum());
        for part in parts {
            self.all.select(1, row as i64).narrow(2, self.lengths[row], tokens(part)).copy_(part);
            self.lengths[row] += tokens(part);
        }
    }

    /// Commits the first `count` pending tokens of a row.
    pub fn commit(&mut self, row: usize, count: i64) {
        self.lengths[row] += count;
    }

    /// Commits these of a row's pending tokens, in this order, and drops the others.
    pub fn commit_path(&mut self, row: usize, path: &[usize]) {
        assert!(path.is_sorted(), "parents come before their children");
        let in_place = path.iter().copied().eq(0..path.len());
        if !in_place && self.all.device() == Device::Cpu {
            self.move_on_cpu(row, path);
        } else if !in_place {
            let pending = path.last().map_or(0, |&last| last as i64 + 1);
            let index: Vec<i64> = path.iter().map(|&node| node as i64).collect();
            let row_lgsd = self.all.select(1, row as i64);
            let new_lgsd = row_lgsd.narrow(2, self.lengths[row], pending);
            let kept = new_lgsd.index_select(2, &upload(&index, self.all.device()));
            row_lgsd.narrow(2, self.lengths[row], path.len() as i64).copy_(&kept);
        }
        self.lengths[row] += path.len() as i64;
    }

    /// Moves a row's pending tokens to the front, in place. A path leads from parents to children, so none moves behind one that is
    /// still to be read.
    fn move_on_cpu(&mut self, row: usize, path: &[usize]) {
        let [layers, _, _, room, d] = self.sizes;
        let (len, mut cache) = (self.lengths[row].unsigned_abs() as usize, self.bytes_mut());
        let token = d * cache.element;
        for layer in 0..layers {
            for head in cache.planes_mut(layer, row).into_iter().flat_map(|plane| plane.chunks_exact_mut(room * token))
            {
                for (to, &from) in path.iter().enumerate().filter(|(to, from)| to != *from) {
                    head.copy_within((len + from) * token..(len + from + 1) * token, (len + to) * token);
                }
            }
        }
    }

    /// Keeps the first `len` committed tokens of a row.
    pub fn truncate(&mut self, row: usize, len: i64) {
        self.lengths[row] = self.lengths[row].min(len);
    }

    /// Makes room for `pending` tokens behind the committed ones of a row.
    pub fn reserve_tokens(&mut self, row: usize, pending: i64) {
        self.reserve(self.rows() as i64, self.lengths[row] + pending);
    }

    /// All of it on the CPU, as bytes.
    pub fn bytes_mut(&mut self) -> CacheBytes<'_> {
        let element = self.all.kind().elt_size_in_bytes();
        // SAFETY: the other handles are `layers`. They are lent to this room only, for passes that borrow the cache and keep none, and
        // the slice borrows it mutably.
        CacheBytes { sizes: self.sizes, element, bytes: unsafe { bytes::raw_mut(&mut self.all) } }
    }

    /// Makes room for one more token a row.
    pub(super) fn step(&mut self) -> BatchStep {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        self.reserve(self.rows() as i64, longest + 1);
        let [_, _, planes, room, _] = self.sizes.map(|size| size as i64);
        let options = (self.all.kind(), self.all.device());
        BatchStep::new(&self.lengths, [planes, room], &self.windows, options)
    }

    pub(super) fn row(&self, layer: usize, row: usize) -> &RowCache {
        &self.layers[layer].rows[row]
    }

    /// One layer of all rows.
    pub(super) fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    /// Makes room for a number of rows and tokens; what is there stays.
    pub fn reserve(&mut self, rows: i64, tokens: i64) {
        let [l, has_rows, planes, has_tokens, d] = self.sizes.map(|size| size as i64);
        if rows <= has_rows && tokens <= has_tokens {
            return;
        }
        let s = match tokens <= has_tokens {
            true => has_tokens,
            false => room_for(tokens.max((has_tokens + has_tokens / 2).min(self.context))),
        };
        let b = if rows <= has_rows { has_rows } else { rows.max(2 * has_rows) };
        // Zeros everywhere: what a mask hides is still multiplied, and must be finite.
        let all = Tensor::zeros([l, b, planes, s, d], (self.all.kind(), self.all.device()));
        all.narrow(1, 0, has_rows).narrow(3, 0, has_tokens).copy_(&self.all);
        (self.sizes, self.layers) = (sizes(&all), layer_views(&all));
        self.all = all;
    }
}

impl CacheBytes<'_> {
    /// Tokens that fit into a row, S.
    pub fn room(&self) -> usize {
        self.sizes[3]
    }

    /// A row's keys and values in a layer, `[G, S, D]` each.
    pub fn planes(&self, layer: usize, row: usize) -> [&[u8]; 2] {
        let (from, plane) = self.place(layer, row);
        let (keys, values) = self.bytes[from..][..2 * plane].split_at(plane);
        [keys, values]
    }

    /// As [`CacheBytes::planes`], to be written.
    pub fn planes_mut(&mut self, layer: usize, row: usize) -> [&mut [u8]; 2] {
        let (from, plane) = self.place(layer, row);
        let (keys, values) = self.bytes[from..][..2 * plane].split_at_mut(plane);
        [keys, values]
    }

    /// Where a row's keys in a layer begin, and how many bytes they take; as many of values follow.
    fn place(&self, layer: usize, row: usize) -> (usize, usize) {
        let [_, b, planes, room, d] = self.sizes;
        let plane = planes / 2 * room * d * self.element;
        ((layer * b + row) * 2 * plane, plane)
    }
}

impl LayerCache {
    /// Takes the new tokens' keys and values, `[B, 2G, D]`; returns the keys and the values that they may see, `[B, G, S, D]` each.
    pub(super) fn write(&self, new_bgd: &Tensor, step: &BatchStep) -> [Tensor; 2] {
        let d = new_bgd.size()[2];
        let _ = self.flat_nd.shallow_clone().index_copy_(0, &step.at_n, &new_bgd.reshape([-1, d]));
        [&self.keys_bgsd, &self.values_bgsd].map(|all| all.narrow(0, 0, step.rows).narrow(2, 0, step.read))
    }
}

/// Room of a row of `tokens` tokens: whole blocks.
pub fn room_for(tokens: i64) -> i64 {
    tokens.saturating_add(BLOCK - 1) / BLOCK * BLOCK
}

fn sizes(all: &Tensor) -> [usize; 5] {
    let sizes: Vec<usize> = all.size().iter().map(|size| size.unsigned_abs() as usize).collect();
    sizes.try_into().expect("[L, B, 2G, S, D]")
}

fn layer_views(all: &Tensor) -> Vec<LayerCache> {
    let [l, b, planes, s, d] = all.size()[..] else { panic!("[L, B, 2G, S, D]") };
    let layer = |at: i64| {
        let both_bgsd = all.select(0, at);
        let keys_bgsd = both_bgsd.narrow(1, 0, planes / 2);
        let values_bgsd = both_bgsd.narrow(1, planes / 2, planes / 2);
        let row = |row: i64| RowCache {
            both_gsd: both_bgsd.select(0, row),
            keys_1gsd: keys_bgsd.narrow(0, row, 1),
            values_1gsd: values_bgsd.narrow(0, row, 1),
        };
        let (rows, flat_nd) = ((0..b).map(row).collect(), both_bgsd.view([b * planes * s, d]));
        LayerCache { rows, both_bgsd, flat_nd, keys_bgsd, values_bgsd }
    };
    (0..l).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use tch::no_grad;

    use super::*;
    use crate::model::llama::Llama;
    use crate::model::lora::Adapters;
    use crate::model::new_tokens::NewTokens;

    /// A generation on its own: the oracle.
    struct Alone {
        cache: KvCache,
        next: i64,
    }

    impl Alone {
        fn new(llama: &Llama, prompt: &[i64]) -> Self {
            let mut alone = Self { cache: KvCache::with_one_row(&llama.config, llama.kind(), llama.device()), next: 0 };
            let _ = alone.extend(llama, prompt);
            alone
        }

        /// Returns the logits after the last token, `[V]`.
        fn extend(&mut self, llama: &Llama, tokens: &[i64]) -> Tensor {
            let n = tokens.len() as i64;
            let new = NewTokens::chain(n, &llama.config, llama.kind(), llama.device());
            let hidden_nh = llama.extend(&Tensor::from_slice(tokens), &new, &mut self.cache, 0);
            self.cache.commit(0, n);
            let logits_v = llama.logits(&hidden_nh.narrow(0, n - 1, 1), Adapters::Off).squeeze_dim(0);
            self.next = logits_v.argmax(-1, false).int64_value(&[]);
            logits_v
        }
    }

    fn prompt(length: i64, seed: i64) -> Vec<i64> {
        (0..length).map(|i| (i * i + 7 * seed + 3 * i) % 50).collect()
    }

    /// What was computed alone becomes the last row.
    fn enter(batch: &mut KvCache, alone: &Alone) {
        let (row, n) = (batch.push(), alone.cache.len(0));
        batch.reserve_tokens(row, n);
        batch.all.select(1, row as i64).narrow(2, 0, n).copy_(&alone.cache.committed(0));
        batch.commit(row, n);
    }

    /// A token behind each row; logits after it, with spare rows behind them.
    fn step_of_all(llama: &Llama, batch: &mut KvCache, tokens: &[i64]) -> Tensor {
        let hidden_ph = llama.extend_rows(&Tensor::from_slice(tokens), batch);
        (0..batch.rows()).for_each(|row| batch.commit(row, 1));
        llama.logits(&hidden_ph, Adapters::Off)
    }

    /// Where memory ran out, a new cache takes the old one's place.
    #[test]
    fn a_cache_without_rows_takes_no_memory() {
        let mut cache = KvCache::new(&LlamaConfig::tiny(), Kind::Float, Device::Cpu);
        assert_eq!((cache.all.numel(), cache.rows()), (0, 0));
        assert_eq!((cache.push(), cache.push(), cache.all.size()[1]), (0, 1, 2));
    }

    #[test]
    fn committed_tokens_are_a_copy() {
        let mut cache = KvCache::with_one_row(&LlamaConfig::tiny(), Kind::Float, Device::Cpu);
        cache.commit(0, 3);
        let before = cache.committed(0);
        cache.bytes_mut().planes_mut(0, 0)[0].fill(1);
        assert_eq!(before.abs().max().double_value(&[]), 0.0);
        assert_ne!(cache.committed(0), before);
    }

    /// A mask hides what a longer text left behind a shorter one's tokens, but 0 times NaN is NaN.
    #[test]
    fn a_row_keeps_nothing_of_the_text_before_it() {
        let mut cache = KvCache::new(&LlamaConfig::tiny(), Kind::Float, Device::Cpu);
        for (row, len) in [(0, 40), (1, 20)] {
            cache.push();
            cache.commit(row, len);
        }
        let _ = cache.all.select(1, 0).fill_(f64::NAN);
        cache.swap_remove(0);
        assert_eq!((cache.len(0), cache.all.select(1, 0).isnan().any().int64_value(&[])), (20, 0));
        let _ = cache.all.select(1, 1).fill_(f64::NAN);
        let row = cache.push() as i64;
        assert_eq!(cache.all.select(1, row).isnan().any().int64_value(&[]), 0);
    }

    /// Rows enter and leave at any time, grow over the blocks, and each computes what it computes alone.
    #[test]
    fn every_row_equals_its_own_generation() {
        tch::set_num_threads(1);
        let windowed = LlamaConfig { sliding_window: Some(7), ..LlamaConfig::tiny() };
        for (config, seed) in LlamaConfig::tiny_of_each_family().into_iter().chain([windowed]).zip(0..) {
            let config = LlamaConfig { max_position_embeddings: 600, ..config };
            let llama = Llama::random(config, Kind::Double, Device::Cpu, seed);
            let mut batch = KvCache::new(&llama.config, Kind::Double, Device::Cpu);
            let mut rows: Vec<Alone> = vec![];
            let lengths = [3, 240, 1, 30, 254, 17];
            no_grad(|| {
                for step in 0..40 {
                    if step % 3 == 0 && step / 3 < lengths.len() {
                        let alone = Alone::new(&llama, &prompt(lengths[step / 3], step as i64));
                        enter(&mut batch, &alone);
                        rows.push(alone);
                    }
                    if [8, 14, 20, 26, 32].contains(&step) {
                        batch.swap_remove(step % rows.len());
                        rows.swap_remove(step % rows.len());
                    }
                    let tokens: Vec<i64> = rows.iter().map(|row| row.next).collect();
                    let logits_bv = step_of_all(&llama, &mut batch, &tokens);
                    for (at, row) in rows.iter_mut().enumerate() {
                        let alone_v = row.extend(&llama, &[tokens[at]]);
                        let difference = (logits_bv.get(at as i64) - alone_v).abs().max().double_value(&[]);
                        assert!(difference < 1e-10, "{}, step {step}, row {at}: {difference}", llama.config.model_type);
                    }
                }
                assert_eq!((batch.rows(), rows.len()), (1, 1));
                let difference = (batch.committed(0) - rows[0].cache.committed(0)).abs().max().double_value(&[]);
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
                let mut batch = KvCache::new(&llama.config, Kind::Float, Device::Cpu);
                let around = |count: usize| (0..count).map(|at| &others[at % 3]);
                let rows: Vec<&Alone> = around(before).chain([&alone]).chain(around(after)).collect();
                rows.iter().for_each(|row| enter(&mut batch, row));
                let tokens = vec![9; rows.len()];
                let _ = step_of_all(&llama, &mut batch, &tokens);
                step_of_all(&llama, &mut batch, &tokens).get(before as i64)
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
