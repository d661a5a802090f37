//! Rotary embedding and the gate of the MLP in a pass that keeps nothing for a gradient: one launch each. With a gradient, and where there are
//! no kernels, libtorch's calls in `model/` compute them.

// N rows, I width of the MLP, D head size, R rotated numbers of a head
use tch::{Kind, Tensor};

use super::{TensorKernels, kernels};
use crate::nvidia::kernels::Program;
use crate::nvidia::launch::{Argument, Launch, blocks, elements, size};
use crate::torch::rehearsal;

/// Threads of a block, with 8 numbers each.
const THREADS: i64 = 256;

/// `x` `[…, heads, D]` with its first R numbers rotated; `cos` and `signed_sin` are `[…, 1, R]`. `None` where libtorch computes it.
pub fn rotated(x: &Tensor, cos: &Tensor, signed_sin: &Tensor) -> Option<Tensor> {
    let kernels = kernels_of(&[x])?;
    let y = tch::no_grad(|| Tensor::empty(x.size(), (x.kind(), x.device())));
    kernels.launch(&rotate(x, &y, cos, signed_sin)?);
    Some(y)
}

/// As [`rotated`], in place; false where libtorch computes it.
pub fn rotate_in_place(x: &Tensor, cos: &Tensor, signed_sin: &Tensor) -> bool {
    let launch = || Some((kernels_of(&[x])?, rotate(x, x, cos, signed_sin)?));
    let found = launch();
    found.iter().for_each(|(kernels, launch)| kernels.launch(launch));
    found.is_some()
}

/// SiLU(gate)·up, both `[…, I]`; `None` where libtorch computes it.
pub fn gated(gate: &Tensor, up: &Tensor) -> Option<Tensor> {
    let kernels = kernels_of(&[gate, up])?;
    let y = tch::no_grad(|| Tensor::empty(gate.size(), (gate.kind(), gate.device())));
    kernels.launch(&silu_up(gate, up, &y)?);
    Some(y)
}

/// What libtorch computes in place of a kernel, which would run for 16-bit tensors without a gradient.
pub fn without_kernel(name: &'static str, x: &Tensor, compute: impl FnOnce() -> Tensor) -> Tensor {
    if x.kind() == Kind::Float || x.requires_grad() { compute() } else { rehearsal::in_place_of(&[name], compute) }
}

/// The kernels for 16-bit tensors without a gradient and with at least one number.
fn kernels_of(inputs: &[&Tensor]) -> Option<&'static TensorKernels> {
    let first = inputs.first()?;
    let fit = |x: &&Tensor| x.kind() != Kind::Float && x.numel() > 0 && !x.requires_grad();
    kernels(first.device(), first.kind()).filter(|_| inputs.iter().all(fit))
}

/// The launch that rotates `x` to `y`, which may be `x`; `None` if the rows of a tensor are not evenly apart, or the tables are not those of
/// the last axes of tokens.
pub fn rotate(x: &Tensor, y: &Tensor, cos: &Tensor, signed_sin: &Tensor) -> Option<Launch> {
    let (x_size, table_size) = (x.size(), cos.size());
    let ([tokens_of_x @ .., heads, d], [positions_of_table @ .., 1, r]) = (&x_size[..], &table_size[..]) else {
        return None;
    };
    let (heads, d, r) = (*heads, *d, *r);
    let tables_fit = [cos, signed_sin].iter().all(|table| table.kind() == x.kind() && table.is_contiguous());
    let ahead = positions_of_table.iter().take_while(|&&length| length == 1).count();
    if !tables_fit
        || signed_sin.size() != table_size
        || !tokens_of_x.ends_with(&positions_of_table[ahead..])
        || r > d
        || r % 2 != 0
    {
        return None;
    }
    let (tokens, positions) = (x.numel() as i64 / (heads * d), cos.numel() as i64 / r);
    let heads_are_close = |x: &Tensor| x.stride()[x.dim() - 2] == d || heads == 1;
    if !heads_are_close(x) || !heads_are_close(y) {
        return None;
    }
    let [x_stride, y_stride] = [row_stride(x, 2)?, row_stride(y, 2)?].map(Argument::Long);
    let arguments = vec![
        start(x),
        start(y),
        elements(cos),
        elements(signed_sin),
        size(heads),
        size(d),
        size(r),
        x_stride,
        y_stride,
        size(positions),
    ];
    Some(Launch::new(Program::Pass, "rotate", [tokens, 1, 1], THREADS, arguments))
}

/// The launch that writes SiLU(gate)·up to `y`; `None` if the rows of a tensor are not evenly apart.
pub fn silu_up(gate: &Tensor, up: &Tensor, y: &Tensor) -> Option<Launch> {
    let width = *gate.size().last()?;
    let [gate_stride, up_stride] = [row_stride(gate, 1)?, row_stride(up, 1)?].map(Argument::Long);
    let arguments = vec![start(gate), start(up), elements(y), size(width), gate_stride, up_stride];
    let grid = [gate.numel() as i64 / width, blocks(width, 8 * THREADS), 1];
    Some(Launch::new(Program::Pass, "silu_up", grid, THREADS, arguments))
}

/// The address of a tensor that may be a view.
fn start(x: &Tensor) -> Argument {
    Argument::Pointer(x.data_ptr() as u64)
}

/// Distance of the rows of a tensor, whose last `inner` axes are a row, if all are equally far apart.
fn row_stride(x: &Tensor, inner: usize) -> Option<i64> {
    let (size, stride) = (x.size(), x.stride());
    let outer = x.dim() - inner;
    let row: i64 = size[outer..].iter().product();
    if *stride.last()? != 1 {
        return None;
    }
    // Axes of length 1 have any stride.
    let axes: Vec<usize> = (0..outer).filter(|&axis| size[axis] > 1).collect();
    let even = axes.windows(2).all(|pair| stride[pair[0]] == stride[pair[1]] * size[pair[1]]);
    even.then(|| axes.last().map_or(row, |&axis| stride[axis]))
}
