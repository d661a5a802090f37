//! New tokens behind a cache: a prompt's, a single one, or a tree's. Where they stand, and which of each other they see.

// N new tokens, S cached and new tokens, M committed tokens that a mask has room for, D head size, R query heads that share a
// key/value head
use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::cpu::attention::SeenTokens;
use crate::model::config::LlamaConfig;
use crate::model::mask::readable;
use crate::model::rope::{Ropes, RotationsByKind};
use crate::torch::upload;

/// Which new tokens see each other, and where they stand behind the cache. Made once, used at every step.
#[derive(Debug)]
pub struct NewTokens {
    /// Position of each new token, counted from the number of committed ones.
    offsets: Vec<i64>,
    /// Of each token: the new tokens that it sees, itself among them, in the order of their positions. `None`: a chain.
    ancestors: Option<Vec<Vec<usize>>>,
    /// The sliding window of each kind of layer.
    windows: Vec<Option<i64>>,
    groups: i64,
    kind: Kind,
    device: Device,
    /// By kind of layer: `[R·N, M + N]`, 0 where seen and -inf elsewhere; right-aligned, so that one buffer serves every cache length up to M.
    masks: RefCell<Vec<Option<Tensor>>>,
}

/// Whom the new tokens of one step see, behind a row of the cache.
#[derive(Debug)]
pub struct CacheMask {
    /// Committed tokens.
    pub(super) len: i64,
    /// New tokens.
    pub(super) new: i64,
    /// A prompt's first pass: plain causal attention, no mask needed.
    pub(super) first_causal: bool,
    /// `[R·N, S]`, 0 or -inf.
    pub(super) mask_ns: Option<Tensor>,
}

impl NewTokens {
    /// `n` tokens one after the other: a prompt, or with `n` = 1 plain decoding.
    pub fn chain(n: i64, config: &LlamaConfig, kind: Kind, device: Device) -> Self {
        Self::new((0..n).collect(), None, config, kind, device)
    }

    /// Any pattern: token i stands at position `len + offsets[i]`, sees all committed tokens (within a sliding window, if the
    /// backbone has one) and those new ones that `sees(i, j)` says.
    pub fn pattern(
        offsets: &[i64],
        sees: impl Fn(usize, usize) -> bool,
        config: &LlamaConfig,
        kind: Kind,
        device: Device,
    ) -> Self {
        let seen = |query| (0..offsets.len()).filter(|&key| sees(query, key)).collect();
        Self::seeing(offsets.to_vec(), (0..offsets.len()).map(seen).collect(), config, kind, device)
    }

    /// As [`NewTokens::pattern`]; `seen` lists the new tokens that each one sees.
    pub fn seeing(
        offsets: Vec<i64>,
        mut seen: Vec<Vec<usize>>,
        config: &LlamaConfig,
        kind: Kind,
        device: Device,
    ) -> Self {
        seen.iter_mut().for_each(|seen| seen.sort_by_key(|&key| offsets[key]));
        Self::new(offsets, Some(seen), config, kind, device)
    }

    fn new(
        offsets: Vec<i64>,
        ancestors: Option<Vec<Vec<usize>>>,
        config: &LlamaConfig,
        kind: Kind,
        device: Device,
    ) -> Self {
        let windows = config.layer_kinds().windows();
        let groups = config.num_attention_heads / config.num_key_value_heads;
        let masks = RefCell::new(windows.iter().map(|_| None).collect());
        Self { offsets, ancestors, windows, groups, kind, device, masks }
    }

    /// How many.
    pub fn len(&self) -> i64 {
        self.offsets.len() as i64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Where token `n` stands, counted from the number of committed ones.
    pub fn offset(&self, n: usize) -> i64 {
        self.offsets[n]
    }

    /// What token `n` sees behind `len` committed tokens, in the layers of one kind.
    pub fn seen(&self, n: usize, len: usize, kind: usize) -> SeenTokens {
        let at = len as i64 + self.offsets[n];
        let first = self.windows[kind].map_or(0, |window| (at - window + 1).max(0));
        let end = if self.ancestors.is_none() { len + n + 1 } else { len };
        let ancestors = self.ancestors.iter().flat_map(|ancestors| &ancestors[n]);
        let then = ancestors.filter(|&&key| len as i64 + self.offsets[key] >= first).map(|&key| len + key);
        let first = first.unsigned_abs() as usize;
        SeenTokens::new(first, (first.min(end)..end).chain(then))
    }

    /// Positions of the new tokens behind `len` committed ones.
    #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^24")]
    pub(super) fn positions(&self, len: i64) -> impl Iterator<Item = f32> {
        self.offsets.iter().map(move |offset| (len + offset) as f32)
    }

    /// Rotations of the new tokens' positions behind `len` committed ones.
    pub(super) fn rotations(&self, ropes: &Ropes, len: i64) -> RotationsByKind {
        ropes.at(&upload(&self.positions(len).collect::<Vec<_>>(), self.device))
    }

    /// By kind of layer, what the new tokens see behind `len` committed ones.
    pub(super) fn behind(&self, len: i64) -> Vec<CacheMask> {
        (0..self.windows.len()).map(|kind| self.behind_in(kind, len)).collect()
    }

    fn behind_in(&self, kind: usize, len: i64) -> CacheMask {
        let n = self.len();
        let window_cuts = self.windows[kind].is_some_and(|window| len + n > window);
        let free = !window_cuts && self.ancestors.is_none();
        let first_causal = free && len == 0 && n > 1;
        let mask_ns = (!(first_causal || free && n == 1)).then(|| self.mask(kind, len));
        CacheMask { len, new: n, first_causal, mask_ns }
    }

    /// `[R·N, len + N]`.
    fn mask(&self, kind: usize, len: i64) -> Tensor {
        let n = self.len();
        let buffer = &mut self.masks.borrow_mut()[kind];
        let room = buffer.as_ref().map_or(-1, |mask| mask.size()[1] - n);
        if room < len {
            *buffer = Some(self.right_aligned_mask(kind, len.max(2 * room).max(512)));
        }
        let mask = buffer.as_ref().expect("just made");
        readable(&mask.narrow(1, mask.size()[1] - n - len, len + n))
    }

    /// Columns: `room` committed tokens, the last of which is at position -1 relative to offset 0, then the new ones.
    fn right_aligned_mask(&self, kind: usize, room: i64) -> Tensor {
        let window = self.windows[kind].unwrap_or(i64::MAX);
        let (n, width) = (self.offsets.len(), (room + self.len()).unsigned_abs() as usize);
        let mut values = vec![f32::NEG_INFINITY; n * width];
        for (query, row) in values.chunks_exact_mut(width).enumerate() {
            let at = self.offsets[query];
            let (committed, new) = row.split_at_mut(width - n);
            let unseen = (at - window + 1 + room).clamp(0, room); // behind the window
            committed[unseen.unsigned_abs() as usize..].fill(0.0);
            let mut see = |key: usize| new[key] = if at - self.offsets[key] < window { 0.0 } else { f32::NEG_INFINITY };
            match &self.ancestors {
                Some(seen) => seen[query].iter().copied().for_each(&mut see),
                None => (0..=query).for_each(see),
            }
        }
        let mask_ns = Tensor::from_slice(&values).view([self.len(), room + self.len()]);
        mask_ns.repeat([self.groups, 1]).to_kind(self.kind).to_device(self.device)
    }
}
