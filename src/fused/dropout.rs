//! Dropout with a mask that is the same on every device.

use tch::Tensor;

use super::dequantize::numbers;
use super::kernels;
use crate::nvidia::kernels::Program;
use crate::nvidia::launch::{Argument, Launch, blocks};
use crate::torch::dropout::{MaskStream, mask};
use crate::torch::rehearsal;

/// Numbers that a block draws: 32 in each of 256 threads.
const NUMBERS: i64 = 8192;

/// Sets a fraction `p` of `x` to 0 and scales the rest by 1/(1 - p). Each `stream` of a seed has its own mask, see [`mask`].
pub fn dropout(x: &Tensor, p: f64, seed: u64, stream: u64) -> Tensor {
    let Some(kernels) = kernels(x.device(), x.kind()) else {
        return x * rehearsal::in_place_of(&["dropout_mask"], || mask(x, p, seed, stream));
    };
    let mask = Tensor::empty(x.size(), (x.kind(), x.device()));
    if mask.numel() > 0 {
        kernels.launch(&draw(&mask, &MaskStream::new(p, seed, stream)));
    }
    x * mask
}

/// Draws a mask.
pub fn draw(mask: &Tensor, of: &MaskStream) -> Launch {
    let count = mask.numel() as i64;
    let (to, as_float) = numbers(mask);
    let key = of.key.map(|word| Argument::Int(word.cast_signed()));
    let rest = [Argument::Int(of.threshold), Argument::Float(of.kept), as_float];
    let first = [to, Argument::Long(count), Argument::Long(of.stream.cast_signed())];
    let arguments = [&first[..], &key, &rest].concat();
    Launch::new(Program::Dropout, "dropout_mask", [blocks(count, NUMBERS), 1, 1], 256, arguments)
}
