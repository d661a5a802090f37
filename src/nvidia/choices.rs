//! Caches the fastest kernel of each matrix product on disk, per GPU and driver.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::device::{Gpu, cublas_lt_version, driver_version};
use super::error::GpuError;
use super::gemm::{Product, TRIED, WORKSPACE_BYTES, Way};
use super::kernels::{KernelDtype, LINEAR_FEW, LINEAR_TILES, Program};
use crate::files;

/// Folder for compiled kernels and product timings.
pub(super) fn kernels_folder() -> Option<PathBuf> {
    files::user_cache().map(|folder| folder.join("cuda"))
}

/// The fastest implementation of each timed product.
#[derive(Debug, Default)]
pub struct Choices {
    ways: HashMap<Product, Way>,
    /// The cache file; `None` without a cache folder.
    file: Option<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
struct TimedProduct {
    product: Product,
    way: Way,
}

impl Choices {
    /// Loads what was timed before on this kind of GPU, for weights of dtype `element`. The file name depends on the kernels, the
    /// list of implementations, and the versions of the driver and of cublasLt, whose algorithms differ between versions.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn of(gpu: &Gpu, element: KernelDtype) -> Result<Self, GpuError> {
        let (driver, cublas_lt) = (driver_version()?, cublas_lt_version());
        let ways = format!("{LINEAR_FEW:?}\n{LINEAR_TILES:?}\n{TRIED}\n{WORKSPACE_BYTES}");
        let kernels = Program::Linear.source(element, 0); // no size of heads in this file
        let facts = format!("{}\n{}\n{driver}\n{cublas_lt}\n{element:?}\n{ways}\n{kernels}", gpu.name, gpu.arch);
        let name = format!("products-{}.json", &files::hex(&Sha256::digest(facts))[..16]);
        Ok(Self::open(kernels_folder().map(|folder| folder.join(name))))
    }

    /// Reads a cache file. An unreadable file counts as empty: its products are timed again.
    fn open(file: Option<PathBuf>) -> Self {
        let read = |path: &Path| serde_json::from_str::<Vec<TimedProduct>>(&std::fs::read_to_string(path).ok()?).ok();
        let timed = file.as_deref().and_then(read).unwrap_or_default();
        Self { ways: timed.into_iter().map(|timed| (timed.product, timed.way)).collect(), file }
    }

    /// Whether a product was timed and its fastest implementation is still among `ways`.
    pub fn has(&self, product: Product, ways: &[Way]) -> bool {
        self.ways.get(&product).is_some_and(|way| ways.contains(way))
    }

    /// The fastest implementation of a product, or the default if it was not timed.
    pub fn way(&self, product: Product) -> Way {
        self.ways.get(&product).copied().unwrap_or_else(|| Way::untimed(product))
    }

    /// Records the fastest implementation of a product.
    pub fn keep(&mut self, product: Product, way: Way) {
        self.ways.insert(product, way);
    }

    /// Writes the cache file. It only saves a second at the next start, so a failure to write it is ignored.
    pub fn save(&self) {
        let Some(file) = &self.file else { return };
        let timed: Vec<TimedProduct> = self.ways.iter().map(|(&product, &way)| TimedProduct { product, way }).collect();
        let written = file.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            let text = serde_json::to_string(&timed)?;
            files::write_atomic(file, |out| out.write_all(text.as_bytes()))
        });
        drop(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_timed_is_found_again_and_a_damaged_file_is_as_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("cuda/products.json");
        let product = |rows| Product { rows, outputs: 64, inputs: 64, to_float32: false };
        let mut choices = Choices::open(Some(file.clone()));
        let ways = [Way::CublasLt { algorithm: 2 }];
        assert!(!choices.has(product(1), &ways));
        choices.keep(product(1), Way::CublasLt { algorithm: 2 });
        choices.keep(product(9), Way::Tile { height: 64, width: 16 });
        choices.save();
        let again = Choices::open(Some(file.clone()));
        assert_eq!(again.way(product(1)), Way::CublasLt { algorithm: 2 });
        assert_eq!(again.way(product(9)), Way::Tile { height: 64, width: 16 });
        assert_eq!(again.way(product(2)), Way::untimed(product(2)));
        assert!(again.has(product(1), &ways) && !again.has(product(1), &[Way::CublasLt { algorithm: 0 }]));
        assert!(!again.has(product(9), &ways), "a way that is gone is found anew");
        files::write_atomic(&file, |out| out.write_all(b"[{")).expect("a file of a test");
        assert!(!Choices::open(Some(file)).has(product(1), &ways));
    }
}
