//! Which hidden states a pass returns beside the last one.

// N tokens, W = H·(1 + number of taps)
use tch::Tensor;

/// Hidden states that a drafter reads beside the last one. Tap `i` is the residual stream behind `i` decoder layers, before any norm, as
/// `hidden_states[i]` in transformers; tap 0 is the embedding.
///
/// A pass returns the states of a token as one row of W numbers: the hidden state after the final norm, then the taps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Taps {
    /// Ascending.
    layers: Vec<usize>,
}

impl Taps {
    /// `layers` in any order; one that is repeated counts once.
    pub fn new(layers: impl IntoIterator<Item = usize>) -> Self {
        let mut layers: Vec<usize> = layers.into_iter().collect();
        layers.sort_unstable();
        layers.dedup();
        Self { layers }
    }

    /// The taps, ascending.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Whether the last hidden state is returned alone.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// W, for a backbone with this hidden size.
    pub fn width(&self, hidden_size: i64) -> i64 {
        hidden_size * (1 + self.layers.len() as i64)
    }

    /// The column of a tap in the states; `None` of a layer that is no tap.
    pub fn column(&self, layer: usize, hidden_size: i64) -> Option<i64> {
        Some(hidden_size * (1 + self.layers.binary_search(&layer).ok()? as i64))
    }
}

/// The taps of a pass that is going on.
#[derive(Debug)]
pub(super) struct Tapped<'t> {
    taps: &'t Taps,
    states: Vec<Tensor>,
}

impl<'t> Tapped<'t> {
    pub(super) fn new(taps: &'t Taps) -> Self {
        Self { taps, states: vec![] }
    }

    /// Takes the residual stream behind `layers` decoder layers, if it is tapped.
    pub(super) fn take(&mut self, layers: usize, x: &Tensor) {
        if self.taps.layers.binary_search(&layers).is_ok() {
            self.states.push(x.shallow_clone());
        }
    }

    /// The states `[…, W]`, from the hidden states after the final norm, `[…, H]`.
    pub(super) fn with_last(self, hidden: Tensor) -> Tensor {
        if self.states.is_empty() {
            return hidden;
        }
        let taps = self.states.iter().map(|tap| tap.to_device(hidden.device()));
        Tensor::cat(&std::iter::once(hidden.shallow_clone()).chain(taps).collect::<Vec<_>>(), -1)
    }
}
