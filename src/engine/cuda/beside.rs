//! Kernels beside their oracle: both compute what a step asks for from the same inputs, and how far apart they are is written down. The
//! step goes on with what the kernels wrote. Slow, and for checks alone.

// N rows, M outputs, K inputs of a product
use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::error::CudaError;
use super::ops::Ops;
use crate::nvidia::gemm::Product;

/// See [`Ops::Beside`].
#[derive(Debug)]
pub struct Beside {
    kernels: Ops,
    found: RefCell<BTreeMap<String, Found>>,
}

/// What became of one kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// How often it ran.
    pub runs: usize,
    /// The largest distance from its oracle: of numbers, the norm of the difference to that of what is right; of integers, how many differ.
    pub distance: f64,
}

impl Beside {
    /// `kernels` and their oracle.
    pub fn new(kernels: Ops) -> Self {
        Self { kernels, found: RefCell::default() }
    }

    /// What became of each kernel so far; of products, of each way.
    pub fn found(&self) -> BTreeMap<String, Found> {
        self.found.borrow().clone()
    }

    pub(super) fn kernels(&self) -> &Ops {
        &self.kernels
    }

    pub(super) fn kernels_mut(&mut self) -> &mut Ops {
        &mut self.kernels
    }

    /// Runs both. What they write is for both what it was before.
    pub(super) fn compare(
        &self,
        name: &str,
        written: &[&Tensor],
        run: impl Fn(&Ops) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let copies = || written.iter().map(|tensor| tensor.copy()).collect::<Vec<_>>();
        self.kernels.wait()?;
        let before = copies();
        run(&Ops::Oracle)?;
        let expected = copies();
        written.iter().zip(&before).for_each(|(tensor, before)| tensor.shallow_clone().copy_(before));
        self.kernels.wait()?;
        run(&self.kernels)?;
        self.kernels.wait()?;
        let mut all = self.found.borrow_mut();
        let found = all.entry(name.to_owned()).or_insert(Found { runs: 0, distance: 0.0 });
        found.runs += 1;
        found.distance =
            written.iter().zip(&expected).map(|(got, right)| distance(got, right)).fold(found.distance, f64::max);
        Ok(())
    }

    /// A product, by every way that there is.
    pub(super) fn linear(&self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Result<(), CudaError> {
        for way in self.kernels.ways(Product::of(x_nk, w_mk, y_nm))? {
            self.compare(&format!("linear {way}"), &[y_nm], |ops| ops.linear_by(way, x_nk, w_mk, y_nm))?;
        }
        Ok(())
    }
}

/// See [`Found::distance`]; what is no number is as far as can be.
fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    if !got.is_floating_point() {
        return got.ne_tensor(expected).sum(Kind::Double).double_value(&[]);
    }
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let norm = expected.norm().double_value(&[]);
    let distance = (got - expected).norm().double_value(&[]) / norm.max(f64::MIN_POSITIVE);
    if distance.is_nan() { f64::INFINITY } else { distance }
}
