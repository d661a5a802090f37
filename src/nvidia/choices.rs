//! Caches the times of each matrix product's kernels on disk, per GPU and driver.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cublas_lt::WORKSPACE_BYTES;
use super::device::{Gpu, cublas_lt_version, driver_version};
use super::error::GpuError;
use super::gemm::{GemmAlgorithm, Product, TRIED};
use super::kernels::{KernelDtype, LINEAR_FEW, LINEAR_TILES, Program};
use crate::files;

/// Folder for compiled kernels and product timings.
pub(super) fn kernels_folder() -> Option<PathBuf> {
    files::user_cache().map(|folder| folder.join("cuda"))
}

/// The implementations of each timed product.
#[derive(Debug, Default)]
pub struct Choices {
    timed: HashMap<Product, TimedProduct>,
    /// The cache file; `None` without a cache folder.
    file: Option<PathBuf>,
}

/// The time of one implementation of a product.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimedAlgorithm {
    pub way: GemmAlgorithm,
    pub microseconds: f32,
    /// Speed at which it reads its weights.
    pub gigabytes_per_second: f32,
}

/// A product with the times of its implementations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimedProduct {
    pub product: Product,
    /// Fastest first.
    pub ways: Vec<TimedAlgorithm>,
    /// Those of cublasLt that failed, and how. A product with one is timed again at the next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RejectedAlgorithm>,
}

/// An implementation that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RejectedAlgorithm {
    pub way: GemmAlgorithm,
    pub reason: String,
}

impl Choices {
    /// Loads what was timed before on this kind of GPU, for weights of dtype `element`. The file name depends on the kernels, the
    /// list of implementations, and the versions of the driver and of cublasLt, whose algorithms differ between versions.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn of(gpu: &Gpu, element: KernelDtype) -> Result<Self, GpuError> {
        let (driver, cublas_lt) = (driver_version()?, cublas_lt_version()?);
        let ways = format!("{LINEAR_FEW:?}\n{LINEAR_TILES:?}\n{TRIED}\n{WORKSPACE_BYTES}");
        let kernels = [Program::Linear, Program::Rows].map(|program| program.source(element, 0)).concat(); // no size of heads in them
        let facts = format!("{}\n{}\n{driver}\n{cublas_lt}\n{element:?}\n{ways}\n{kernels}", gpu.name, gpu.arch);
        let name = format!("products-{}.json", &files::hex(&Sha256::digest(facts))[..16]);
        Ok(Self::open(kernels_folder().map(|folder| folder.join(name))))
    }

    /// Reads a cache file. An unreadable file counts as empty: its products are timed again.
    fn open(file: Option<PathBuf>) -> Self {
        let read = |path: &Path| serde_json::from_str::<Vec<TimedProduct>>(&std::fs::read_to_string(path).ok()?).ok();
        let timed = file.as_deref().and_then(read).unwrap_or_default();
        Self { timed: timed.into_iter().map(|timed| (timed.product, timed)).collect(), file }
    }

    /// Whether a product was timed and its fastest implementation is still among `ways`.
    pub fn has(&self, product: Product, ways: &[GemmAlgorithm]) -> bool {
        self.fastest(product).is_some_and(|way| ways.contains(&way))
    }

    fn fastest(&self, product: Product) -> Option<GemmAlgorithm> {
        Some(self.timed.get(&product)?.ways.first()?.way)
    }

    /// The fastest implementation of a product, or the default if it was not timed.
    pub fn way(&self, product: Product) -> GemmAlgorithm {
        self.fastest(product).unwrap_or_else(|| GemmAlgorithm::untimed(product))
    }

    /// Records the times of a product's implementations.
    pub fn keep(&mut self, mut timed: TimedProduct) {
        timed.ways.sort_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
        self.timed.insert(timed.product, timed);
    }

    /// All times, in the order of the products' sizes.
    pub fn timed(&self) -> Vec<TimedProduct> {
        let mut timed: Vec<TimedProduct> = self.timed.values().cloned().collect();
        timed.sort_by_key(|timed| timed.product);
        timed
    }

    /// Writes the cache file, without products of which a way was refused. It only saves seconds at the next start, so a failure to write
    /// it is ignored.
    pub fn save(&self) {
        let Some(file) = &self.file else { return };
        let written = file.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            let complete: Vec<TimedProduct> =
                self.timed().into_iter().filter(|timed| timed.refused.is_empty()).collect();
            let text = serde_json::to_string(&complete)?;
            files::write_atomic(file, |out| out.write_all(text.as_bytes()))
        });
        drop(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvidia::gemm::WrittenSums;

    #[test]
    fn what_was_timed_is_found_again_and_a_damaged_file_is_as_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("cuda/products.json");
        let product = |rows| Product { rows, outputs: 64, inputs: 64, normed: false, written: WrittenSums::Rounded };
        let mut choices = Choices::open(Some(file.clone()));
        let ways = [GemmAlgorithm::CublasLt { algorithm: 2 }];
        assert!(!choices.has(product(1), &ways));
        let timed = |way, microseconds| TimedAlgorithm { way, microseconds, gigabytes_per_second: 1e3 / microseconds };
        let [slow, fast] = [
            timed(GemmAlgorithm::Few { most: 1, split: 1 }, 2.5),
            timed(GemmAlgorithm::CublasLt { algorithm: 2 }, 2.0),
        ];
        let timed_product = |rows, ways| TimedProduct { product: product(rows), ways, refused: vec![] };
        choices.keep(timed_product(9, vec![timed(GemmAlgorithm::Tile { height: 64, width: 16, splits: 1 }, 7.0)]));
        choices.keep(timed_product(1, vec![slow, fast]));
        choices.save();
        let again = Choices::open(Some(file.clone()));
        let refused = vec![RejectedAlgorithm { way: fast.way, reason: "CUBLAS_STATUS_EXECUTION_FAILED".to_owned() }];
        choices.keep(TimedProduct { refused, ..timed_product(3, vec![slow]) });
        choices.save();
        assert_eq!(choices.way(product(3)), slow.way);
        assert!(!Choices::open(Some(file.clone())).has(product(3), &[slow.way]), "timed again at the next start");
        choices.timed.remove(&product(3));
        assert_eq!(again.timed(), choices.timed());
        assert_eq!(again.timed()[0], timed_product(1, vec![fast, slow]));
        assert_eq!(again.way(product(1)), GemmAlgorithm::CublasLt { algorithm: 2 });
        assert_eq!(again.way(product(9)), GemmAlgorithm::Tile { height: 64, width: 16, splits: 1 });
        assert_eq!(again.way(product(2)), GemmAlgorithm::untimed(product(2)));
        assert!(again.has(product(1), &ways) && !again.has(product(1), &[GemmAlgorithm::CublasLt { algorithm: 0 }]));
        assert!(!again.has(product(9), &ways), "a way that is gone is found anew");
        files::write_atomic(&file, |out| out.write_all(b"[{")).expect("a file of a test");
        assert!(!Choices::open(Some(file)).has(product(1), &ways));
    }
}
