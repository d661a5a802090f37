//! Which tokens of whole rows attend to which, and where each token stands in its text.

// B rows, T tokens of a row, N queries of a block, S keys up to its end
use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::model::config::LlamaConfig;
use crate::model::mask::{additive, readable};
use crate::model::rope::{Ropes, RotationsByKind};
use crate::model::stages::Stages;
use crate::torch::flash_attention::Segments;
use crate::torch::{rehearsal, upload};

/// Queries of a block where libtorch's causal kernel would compute the upper triangle too: on the CPU, up to its block of
/// [`KERNEL_KEYS`].
const CAUSAL_BLOCK: i64 = 64;
/// Keys that libtorch's CPU kernel treats at once.
const KERNEL_KEYS: i64 = 512;
/// Queries of a block of capped attention, whose scores are a tensor `[B, Q, N, S]`.
pub const CAPPED_BLOCK: i64 = 128;

/// Which tokens of whole rows attend to which, and the position of each token, on every stage of a backbone.
#[derive(Debug)]
pub struct RowMask {
    stages: Vec<StageRows>,
}

/// A [`RowMask`] on one device.
#[derive(Debug)]
pub(in crate::model) struct StageRows {
    /// By kind of layer.
    kinds: Vec<KindMask>,
    /// `[T]` or `[B, T]`, float32.
    positions: Tensor,
}

/// Which tokens of whole rows attend to which, in the layers of one kind.
#[derive(Debug)]
pub struct KindMask {
    /// Absent: a token sees all before it.
    pub(super) pattern: Option<Pattern>,
    /// Queries of a block, if attention runs a block of queries at a time.
    pub(super) block: Option<i64>,
    /// What [`KindMask::blocks`] returns; made by the first layer.
    block_masks: OnceCell<Vec<Tensor>>,
}

/// Rows of several texts that do not see each other, or a window that cuts.
#[derive(Debug)]
pub(super) struct Pattern {
    /// `[B, T]` or `[1, T]`, float32: where a token stands in its text.
    positions_bt: Tensor,
    /// Tokens of the texts of each row, and of its padding; `None`: a row is one text.
    texts: Option<Vec<Vec<i64>>>,
    /// A token sees itself and so many before it, less one.
    pub(super) window: Option<i64>,
    /// What [`Pattern::dense`] returns; made by the first layer.
    dense: OnceCell<Tensor>,
    /// What [`Pattern::segments`] returns; made by the first layer.
    segments: OnceCell<Segments>,
}

impl RowMask {
    /// Each row is one text; padding at its right end is seen by nothing before it.
    pub fn causal(t: i64, config: &LlamaConfig, device: Device) -> Self {
        let positions = Tensor::arange(t, (Kind::Float, device));
        let by_blocks = !rehearsal::is_gpu(device) && (CAUSAL_BLOCK + 1..=KERNEL_KEYS).contains(&t);
        let causal = by_blocks.then_some(CAUSAL_BLOCK);
        let capped = capped_block(config);
        let windowed = |window: Option<i64>| match window.filter(|&w| w < t) {
            Some(window) => KindMask::new(Some(Pattern::new(positions.unsqueeze(0), None, Some(window))), capped),
            None => KindMask::new(None, capped.or(causal)),
        };
        let kinds = config.layer_kinds().windows().into_iter().map(windowed).collect();
        Self { stages: vec![StageRows { kinds, positions }] }
    }

    /// Each row holds several texts (segments) that do not see each other; positions restart with each.
    /// `segment_lengths[b]` sums to at most `t`; what is left of a row is padding.
    pub fn packed(segment_lengths: &[Vec<usize>], t: i64, config: &LlamaConfig, device: Device) -> Self {
        if segment_lengths.iter().all(|row| row.len() == 1) {
            return Self::causal(t, config, device);
        }
        let texts: Vec<Vec<i64>> = segment_lengths.iter().map(|row| with_padding(row, t)).collect();
        let positions: Vec<f32> = texts.iter().flatten().flat_map(|&length| (0..length).map(|at| at as f32)).collect();
        let positions_bt = upload(&positions, device).view([-1, t]);
        let windowed = |window: Option<i64>| {
            let pattern = Pattern::new(positions_bt.shallow_clone(), Some(texts.clone()), window.filter(|&w| w < t));
            KindMask::new(Some(pattern), capped_block(config))
        };
        let kinds = config.layer_kinds().windows().into_iter().map(windowed).collect();
        Self { stages: vec![StageRows { kinds, positions: positions_bt }] }
    }

    /// That of one device, on every stage.
    pub(in crate::model) fn for_stages(stages: &Stages, on: impl Fn(Device) -> Self) -> Self {
        Self { stages: stages.devices().flat_map(|device| on(device).stages).collect() }
    }

    pub(in crate::model) fn stage(&self, stage: usize) -> &StageRows {
        &self.stages[stage]
    }

    /// The masks of all kinds of layers.
    #[cfg(test)]
    pub(super) fn kinds(&self) -> &[KindMask] {
        &self.stages[0].kinds
    }
}

impl StageRows {
    pub(in crate::model) fn rotations(&self, ropes: &Ropes) -> RotationsByKind {
        ropes.at(&self.positions)
    }

    /// Those of the positions so many tokens behind each token.
    pub(in crate::model) fn rotations_behind(&self, tokens: usize, ropes: &Ropes) -> RotationsByKind {
        ropes.at(&(&self.positions + tokens as f64))
    }

    /// The mask of the layers of one kind.
    pub(in crate::model) fn of(&self, kind: usize) -> &KindMask {
        &self.kinds[kind]
    }
}

impl KindMask {
    fn new(pattern: Option<Pattern>, block: Option<i64>) -> Self {
        Self { pattern, block, block_masks: OnceCell::new() }
    }

    /// What all queries of `q_bqtd` see: `[T, T]` or `[B, 1, T, T]`, 0 or -inf, in their dtype.
    pub(super) fn whole(&self, q_bqtd: &Tensor) -> Tensor {
        let t = q_bqtd.size()[2];
        match &self.pattern {
            Some(pattern) => pattern.dense(q_bqtd.kind()).shallow_clone(),
            None => Tensor::full([t, t], f64::NEG_INFINITY, (q_bqtd.kind(), q_bqtd.device())).triu(1),
        }
    }

    /// The masks of the blocks of `n` queries of `q_bqtd`, each with the keys up to its end: `[N, S]` or `[B, 1, N, S]`, 0 or -inf, in the
    /// queries' dtype.
    pub(super) fn blocks(&self, n: i64, q_bqtd: &Tensor) -> &[Tensor] {
        let (t, options) = (q_bqtd.size()[2], (q_bqtd.kind(), q_bqtd.device()));
        let block = |from: i64| {
            let end = t.min(from + n);
            match &self.pattern {
                Some(pattern) => pattern.dense(q_bqtd.kind()).narrow(2, from, end - from).narrow(3, 0, end),
                None => Tensor::full([end - from, end], f64::NEG_INFINITY, options).triu(from + 1),
            }
        };
        let blocks = || (0..t).step_by(usize::try_from(n).expect("above 0")).map(block).collect();
        self.block_masks.get_or_init(blocks)
    }
}

impl Pattern {
    fn new(positions_bt: Tensor, texts: Option<Vec<Vec<i64>>>, window: Option<i64>) -> Self {
        Self { positions_bt, texts, window, dense: OnceCell::new(), segments: OnceCell::new() }
    }

    /// `[B, 1, T, T]` or `[1, 1, T, T]`: 0 where a token is seen and -inf elsewhere, in the dtype of the first call.
    pub(super) fn dense(&self, kind: Kind) -> &Tensor {
        self.dense.get_or_init(|| readable(&additive(&self.sees_btt().unsqueeze(1), kind)))
    }

    /// Its texts as segments of `b` flattened rows.
    pub(super) fn segments(&self, b: i64) -> &Segments {
        let (t, device) = (self.positions_bt.size()[1], self.positions_bt.device());
        self.segments.get_or_init(|| match &self.texts {
            Some(texts) => Segments::new(&texts.concat(), device),
            None => Segments::new(&(0..b).map(|_| t).collect::<Vec<_>>(), device),
        })
    }

    /// `[B, T, T]` or `[1, T, T]` bool: a query sees keys of its text, at its own position and up to the window's before.
    fn sees_btt(&self) -> Tensor {
        let distance_btt = self.positions_bt.unsqueeze(2) - self.positions_bt.unsqueeze(1);
        let near_btt = distance_btt.ge(0).logical_and(&distance_btt.lt(self.window.unwrap_or(i64::MAX)));
        let Some(texts) = &self.texts else { return near_btt };
        let numbers = |row: &Vec<i64>| {
            (0..).zip(row).flat_map(|(text, &length)| (0..length).map(move |_| text)).collect::<Vec<i64>>()
        };
        let texts: Vec<i64> = texts.iter().flat_map(numbers).collect();
        let texts_bt = upload(&texts, self.positions_bt.device()).view_as(&self.positions_bt);
        near_btt.logical_and(&texts_bt.unsqueeze(2).eq_tensor(&texts_bt.unsqueeze(1)))
    }
}

/// [`CAPPED_BLOCK`] if the backbone caps attention's scores.
fn capped_block(config: &LlamaConfig) -> Option<i64> {
    config.block().heads.softcap.map(|_| CAPPED_BLOCK)
}

/// The lengths of a row's texts, and last that of its padding.
fn with_padding(lengths: &[usize], t: i64) -> Vec<i64> {
    let lengths: Vec<i64> = lengths.iter().map(|&length| length as i64).collect();
    let padding = t - lengths.iter().sum::<i64>();
    assert!(padding >= 0, "texts of {lengths:?} tokens in a row of {t}");
    lengths.into_iter().chain([padding]).collect()
}
