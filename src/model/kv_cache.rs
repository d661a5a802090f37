//! One generation's keys and values. Committed rows come first, rows of the running step (pending) behind them.

// L layers, G key/value heads, S room for tokens, D head size, P pending rows
use tch::{Device, Kind, Tensor};

use crate::model::config::LlamaConfig;
use crate::torch::bytes;

/// Room grows by whole blocks of tokens.
const BLOCK: i64 = 256;

/// Keys and values of all layers.
#[derive(Debug)]
pub struct KvCache {
    /// `[2L, G, S, D]`: keys of layer l at 2l, values at 2l + 1; one tensor, so that a path is compacted in one move.
    all: Tensor,
    /// Views of `all`, `[1, G, S, D]` each, made once because a view costs as much as a small product.
    layers: Vec<LayerCache>,
    len: i64,
}

/// Keys and values of one layer: views, so writing to them writes to the cache.
#[derive(Debug)]
pub struct LayerCache {
    /// `[2G, S, D]`: keys, then values.
    pub(super) both_gsd: Tensor,
    /// `[1, G, S, D]`.
    pub(super) keys_1gsd: Tensor,
    /// `[1, G, S, D]`.
    pub(super) values_1gsd: Tensor,
}

impl KvCache {
    /// An empty cache; room comes as it is needed.
    pub fn new(config: &LlamaConfig, kind: Kind, device: Device) -> Self {
        let planes = 2 * config.num_hidden_layers.cast_signed() as i64;
        let all = Tensor::zeros([planes, config.num_key_value_heads, BLOCK, config.head_dim], (kind, device));
        Self { layers: layer_views(&all), all, len: 0 }
    }

    /// Committed tokens.
    pub fn len(&self) -> i64 {
        self.len
    }

    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Committed keys and values, `[2L, G, len, D]`: keys of layer l at 2l, values at 2l + 1.
    pub fn committed(&self) -> Tensor {
        self.all.narrow(2, 0, self.len)
    }

    /// The first `count` pending rows become committed.
    pub fn commit(&mut self, count: i64) {
        self.len += count;
    }

    /// Of the pending rows just these become committed, in this order; the others are gone.
    pub fn commit_path(&mut self, path: &[i64]) {
        let count = path.len() as i64;
        if self.all.device() == Device::Cpu {
            self.move_rows(path);
        } else if !path.iter().copied().eq(0..count) {
            let pending = path.iter().max().map_or(0, |last| last + 1);
            let index = Tensor::from_slice(path).to_device(self.all.device());
            let kept = self.all.narrow(2, self.len, pending).index_select(2, &index);
            self.all.narrow(2, self.len, count).copy_(&kept);
        }
        self.len += count;
    }

    /// Tokens that fit, S.
    pub(super) fn room(&self) -> usize {
        self.all.size()[2].unsigned_abs() as usize
    }

    /// A layer's keys and values on the CPU, `[G, S, D]` each.
    pub(super) fn planes(&self, layer: usize) -> [&[u8]; 2] {
        let plane = self.plane_bytes();
        let (keys, values) = bytes::of(&self.all)[2 * layer * plane..][..2 * plane].split_at(plane);
        [keys, values]
    }

    /// As [`KvCache::planes`], to be written.
    pub(super) fn planes_mut(&mut self, layer: usize) -> [&mut [u8]; 2] {
        let plane = self.plane_bytes();
        let (keys, values) = bytes::of_mut(&mut self.all)[2 * layer * plane..][..2 * plane].split_at_mut(plane);
        [keys, values]
    }

    fn plane_bytes(&self) -> usize {
        self.all.numel() * self.all.kind().elt_size_in_bytes() / self.all.size()[0].unsigned_abs() as usize
    }

    /// Moves pending rows to the front, in place. A path leads from parents to children, so a row never moves behind one that is
    /// still to be read.
    fn move_rows(&mut self, path: &[i64]) {
        assert!(path.is_sorted(), "parents come before their children");
        let row = self.all.size()[3].unsigned_abs() as usize * self.all.kind().elt_size_in_bytes();
        let (len, room) = (self.len.unsigned_abs() as usize, self.room());
        for heads in bytes::of_mut(&mut self.all).chunks_exact_mut(room * row) {
            for (to, &from) in path.iter().enumerate().filter(|(to, from)| *to as i64 != **from) {
                let from = len + from.unsigned_abs() as usize;
                heads.copy_within(from * row..(from + 1) * row, (len + to) * row);
            }
        }
    }

    /// Of the committed tokens only the first `len` stay; fewer stay as they are.
    pub fn truncate(&mut self, len: i64) {
        self.len = self.len.min(len);
    }

    pub(super) fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    /// Makes room for `pending` rows behind the committed ones.
    pub(super) fn reserve(&mut self, pending: i64) {
        let room = self.all.size()[2];
        let needed = self.len + pending;
        if needed <= room {
            return;
        }
        let grown = round_up(needed.max(room + room / 2));
        let mut size = self.all.size();
        size[2] = grown;
        let all = Tensor::zeros(size, (self.all.kind(), self.all.device()));
        all.narrow(2, 0, self.len).copy_(&self.committed());
        self.layers = layer_views(&all);
        self.all = all;
    }
}

fn round_up(tokens: i64) -> i64 {
    (tokens + BLOCK - 1) / BLOCK * BLOCK
}

fn layer_views(all: &Tensor) -> Vec<LayerCache> {
    let plane = |at: i64| all.narrow(0, at, 1);
    let layer = |l: i64| LayerCache {
        both_gsd: all.narrow(0, 2 * l, 2).flatten(0, 1),
        keys_1gsd: plane(2 * l),
        values_1gsd: plane(2 * l + 1),
    };
    (0..all.size()[0] / 2).map(layer).collect()
}
