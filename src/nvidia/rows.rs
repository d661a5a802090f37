//! Launches of rows.cu that products are preceded or followed by.

// N rows, H hidden, I width of the MLP
use tch::Tensor;

use super::kernels::Program;
use super::launch::{Launch, blocks, eighths, elements, float};

/// `y = x / √(mean(x²) + eps) · weight`, row by row.
pub fn rms_norm(x_nh: &Tensor, weight_h: &Tensor, eps: f64, y_nh: &Tensor) -> Launch {
    let [n, h] = x_nh.size()[..] else { panic!("[N, H], got {x_nh:?}") };
    let arguments = vec![elements(x_nh), elements(weight_h), elements(y_nh), eighths(h), float(eps)];
    Launch::new(Program::Rows, "rms_norm", [n, 1, 1], 256, arguments)
}

/// `y = SiLU(gate) · up`: `[N, 2I]`, gate first, to `[N, I]`.
pub fn silu_mul(gate_up_ni: &Tensor, product_ni: &Tensor) -> Launch {
    let [n, i] = product_ni.size()[..] else { panic!("[N, I], got {product_ni:?}") };
    let arguments = vec![elements(gate_up_ni), elements(product_ni), eighths(i)];
    Launch::new(Program::Rows, "silu_mul", [blocks(i / 8, 256), n, 1], 256, arguments)
}
