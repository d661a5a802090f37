//! Runs kernels and their oracle on the same inputs and records the distance of their outputs. The step continues with the kernels'
//! output. Slow; only for checks.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::error::CudaResult;
use super::target::LaunchTarget;

/// Distance of each kernel from its oracle; matrix products have one entry per implementation.
#[derive(Debug, Default)]
pub struct Comparisons {
    by_kernel: RefCell<BTreeMap<String, KernelDistance>>,
}

/// Distance of one kernel from its oracle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelDistance {
    pub runs: usize,
    /// The largest distance so far. Floats: norm of the difference, relative to the norm of the oracle's output. Integers: number
    /// of entries that differ.
    pub distance: f64,
}

impl Comparisons {
    /// Distance of every kernel that ran, by name.
    pub fn by_kernel(&self) -> BTreeMap<String, KernelDistance> {
        self.by_kernel.borrow().clone()
    }

    /// Runs both on the same inputs: `written` is restored before the kernel runs.
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
