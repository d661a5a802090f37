//! How fast a device multiplies matrices.

use std::time::{Duration, Instant};

use tch::{Cuda, Device, Kind, Tensor};

use super::guard::{TorchPanic, guard};
use super::onednn;

/// Rows of a product, as in a pass of training: fewer stay in the cache and are faster.
const ROWS: i64 = 2048;
const SHORTEST: Duration = Duration::from_millis(200);

/// Multiply-adds per second of a linear layer of this size `[outputs, inputs]`: the best of some products.
///
/// # Errors
/// Too little memory.
pub fn multiply_adds_per_second(device: Device, kind: Kind, size: [i64; 2]) -> Result<f64, TorchPanic> {
    guard("timing products", || {
        let [outputs, inputs] = size;
        let (x_ni, weight_oi) = (Tensor::zeros([ROWS, inputs], (kind, device)), Tensor::zeros(size, (kind, device)));
        let (began, mut fastest) = (Instant::now(), Duration::MAX);
        while began.elapsed() < SHORTEST {
            let start = Instant::now();
            let _ = onednn::linear(&x_ni, &weight_oi);
            if let Device::Cuda(index) = device {
                Cuda::synchronize(index as i64);
            }
            fastest = fastest.min(start.elapsed());
        }
        (ROWS * inputs * outputs) as f64 / fastest.as_secs_f64()
    })
}
