//! Runs kernels and their oracle on the same inputs and records the distance of their outputs. The step continues with the kernels'
//! output. Slow; only for checks.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::error::CudaResult;
use super::target::LaunchTarget;

/// Distances of each kernel from its oracle; of products, of each way.
#[derive(Debug, Default)]
pub struct Comparisons {
    by_kernel: RefCell<BTreeMap<String, KernelDistance>>,
}

/// How far one kernel was from its oracle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelDistance {
    /// How often it ran.
    pub runs: usize,
    /// The largest distance: of numbers, the norm of the difference to that of what is right; of integers, how many differ.
    pub distance: f64,
}

impl Comparisons {
    /// Of every kernel that ran, by its name.
    pub fn by_kernel(&self) -> BTreeMap<String, KernelDistance> {
        self.by_kernel.borrow().clone()
    }

    /// Runs both. What they write is for both what it was before.
    pub(super) fn compare(
        &self,
        name: &str,
        written: &[&Tensor],
        target: &dyn LaunchTarget,
        oracle: impl FnOnce(),
        kernel: impl FnOnce() -> CudaResult,
    ) -> CudaResult {
        let copies = || written.iter().map(|tensor| tensor.copy()).collect::<Vec<_>>();
        target.wait()?;
        let before = copies();
        oracle();
        let expected = copies();
        written.iter().zip(&before).for_each(|(tensor, before)| tensor.shallow_clone().copy_(before));
        target.wait()?;
        kernel()?;
        target.wait()?;
        let mut all = self.by_kernel.borrow_mut();
        let found = all.entry(name.to_owned()).or_insert(KernelDistance { runs: 0, distance: 0.0 });
        found.runs += 1;
        found.distance =
            written.iter().zip(&expected).map(|(got, right)| distance(got, right)).fold(found.distance, f64::max);
        Ok(())
    }
}

/// See [`KernelDistance::distance`]; NaN is infinitely far.
fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    if !got.is_floating_point() {
        return got.ne_tensor(expected).sum(Kind::Double).double_value(&[]);
    }
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let norm = expected.norm().double_value(&[]);
    let distance = (got - expected).norm().double_value(&[]) / norm.max(f64::MIN_POSITIVE);
    if distance.is_nan() { f64::INFINITY } else { distance }
}
