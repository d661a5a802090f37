//! A decoding step with one new token for each row of a cache: positions, masks, and where the new keys and values are written.

// B rows, P rows of a product, G key/value heads, S room for tokens, D head size
use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::model::rope::{Ropes, RotationsByKind};
use crate::torch::upload;

/// Attention over all rows reads a multiple of so many tokens, so that a kernel sums a row's keys in the same lanes whatever the other
/// rows' lengths.
const READ_AT_ONCE: i64 = 64;
/// A product of few rows is another kernel's than one of many, with other last bits: on the CPU, libtorch's changes last at 16
/// rows (seen with widths from 32 to 1536), oneDNN's packed one at 2. So there are always so many rows, the last ones spare.
pub const FEWEST_ROWS: i64 = 16;
/// From one more row on, they change again.
pub const MOST_ROWS: i64 = 64;

/// A step of all rows, one token each.
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
    /// `[B·2G]` int64: where the new keys and values go in `LayerCache::flat_nd`.
    pub(super) at_n: Tensor,
    /// `[B]` int64: committed tokens of each row.
    pub(super) lengths_b: Tensor,
    /// By kind of layer.
    windows: Vec<Option<i64>>,
    /// Of keys and values.
    kind: Kind,
    /// By kind of layer, see [`BatchStep::mask_b11s`].
    masks_b11s: Vec<OnceCell<Tensor>>,
}

impl BatchStep {
    /// Behind rows of `lengths` tokens in a cache of so many planes (keys' and values', `2G`) of so much room, S.
    pub(super) fn new(
        lengths: &[i64],
        [planes, room]: [i64; 2],
        windows: &[Option<i64>],
        (kind, device): (Kind, Device),
    ) -> Self {
        let (rows, longest) = (lengths.len() as i64, lengths.iter().max().copied().unwrap_or(0));
        assert!(
            lengths.iter().all(|&length| length < room),
            "a text of {longest} tokens has no room for one more among {room}"
        );
        let plane = |(row, &length): (i64, &i64)| (0..planes).map(move |plane| (row * planes + plane) * room + length);
        let at: Vec<i64> = (0..rows).zip(lengths).flat_map(plane).collect();
        let lengths_b = upload(lengths, device);
        let read = ((longest / READ_AT_ONCE + 1) * READ_AT_ONCE).min(room);
        let product_rows = rows.max(FEWEST_ROWS);
        Self {
            rows,
            product_rows,
            read,
            positions_p: padded(&lengths_b.to_kind(Kind::Float), product_rows),
            at_n: upload(&at, device),
            lengths_b,
            windows: windows.to_vec(),
            kind,
            masks_b11s: windows.iter().map(|_| OnceCell::new()).collect(),
        }
    }

    /// Rotations of the new tokens and the spare ones.
    pub(super) fn rotations(&self, ropes: &Ropes) -> RotationsByKind {
        ropes.at(&self.positions_p)
    }

    /// The mask of the layers of one kind, `[B, 1, 1, S]`: 0 where a row sees its token, else -inf. Made when it is first asked for.
    pub(super) fn mask_b11s(&self, kind: usize) -> &Tensor {
        self.masks_b11s[kind].get_or_init(|| mask(&self.lengths_b, self.read, self.windows[kind], self.kind))
    }

    /// The sliding window of the layers of one kind.
    pub(super) fn window(&self, kind: usize) -> Option<i64> {
        self.windows[kind]
    }

    /// `[B, …]` to `[P, …]`: spare rows of zeros.
    pub(super) fn with_spare_rows(&self, x: &Tensor) -> Tensor {
        padded(x, self.product_rows)
    }
}

/// A row's token at position `lengths_b` sees itself and what is before it, within the sliding window if there is one.
fn mask(lengths_b: &Tensor, read: i64, sliding_window: Option<i64>, kind: Kind) -> Tensor {
    let device = lengths_b.device();
    let behind_bs = lengths_b.unsqueeze(1) - Tensor::arange(read, (Kind::Int64, device));
    let mut hidden_bs = behind_bs.lt(0);
    if let Some(window) = sliding_window {
        hidden_bs = hidden_bs.logical_or(&behind_bs.ge(window));
    }
    let mask_bs = Tensor::zeros(hidden_bs.size(), (kind, device));
    mask_bs.masked_fill(&hidden_bs, f64::NEG_INFINITY).unsqueeze(1).unsqueeze(1)
}

/// Zeros behind the rows of `x` (`[B]` or `[B, …]`), until there are `rows`.
pub fn padded(x: &Tensor, rows: i64) -> Tensor {
    let missing = rows - x.size()[0];
    if missing <= 0 {
        return x.shallow_clone();
    }
    let mut size = x.size();
    size[0] = missing;
    Tensor::cat(&[x, &Tensor::zeros(size, (x.kind(), x.device()))], 0)
}
