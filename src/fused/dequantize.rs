//! Quantised weights as numbers, one launch for each. The oracles are the calls of libtorch in `model/stored/`.

use tch::{Kind, Tensor};

use crate::nvidia::kernels::{KernelDtype, Program};
use crate::nvidia::launch::{Argument, Launch, blocks, floats, size, tensor};
use crate::torch::optim::blockwise::Blockwise;

/// Threads of a block.
const THREADS: i64 = 256;

/// The absmax of each block of 64 weights.
#[derive(Debug, Clone, Copy)]
pub enum Absmax<'t> {
    /// `[C]`, float32.
    Float32(&'t Tensor),
    /// Quantised once more: the differences to their mean.
    EightBit { differences: &'t Blockwise, mean: &'t Tensor },
}

impl Absmax<'_> {
    /// Number of blocks.
    fn count(&self) -> usize {
        match self {
            Self::Float32(absmax) => absmax.numel(),
            Self::EightBit { differences, .. } => differences.codes.numel(),
        }
    }
}

/// `y` from NF4: `pairs` `[C, 32]` uint8 has two codes in a byte, and `table` `[256]` int64 the two float32 that a byte stands for. `y` has at most
/// as many numbers as there are codes.
///
/// # Panics
/// If the kernel would read or write behind a tensor.
pub fn nf4(pairs: &Tensor, table: &Tensor, absmax: Absmax, y: &Tensor) -> Launch {
    let (none, scales) = (Argument::Pointer(0), absmax.count());
    assert!(
        pairs.numel() == 32 * scales && y.numel() <= 64 * scales,
        "{scales} blocks of 64 codes, got {pairs:?} for {y:?}"
    );
    let [codes, map, scales, mean] = match absmax {
        Absmax::Float32(absmax) => [none, none, floats(absmax), none],
        Absmax::EightBit { differences, mean } => {
            let codes = tensor(&differences.codes, Kind::Uint8);
            [codes, floats(&differences.map.codes), floats(&differences.absmax), floats(mean)]
        }
    };
    let count = y.numel() as i64;
    let (to, as_float) = numbers(y);
    let arguments = vec![
        tensor(pairs, Kind::Uint8),
        tensor(table, Kind::Int64),
        codes,
        map,
        scales,
        mean,
        to,
        Argument::Long(count),
        as_float,
    ];
    Launch::new(Program::Dequantize, "nf4_weight", [blocks(count, 4096), 1, 1], THREADS, arguments)
}

/// `y_oi` from int8 codes `[O, I]` and the absmax of each row.
pub fn int8(codes_oi: &Tensor, absmax_o: &Tensor, y_oi: &Tensor) -> Launch {
    let (outputs, inputs) = y_oi.size2().expect("[O, I]");
    let (to, as_float) = numbers(y_oi);
    let arguments = vec![tensor(codes_oi, Kind::Int8), floats(absmax_o), to, size(inputs), as_float];
    Launch::new(Program::Dequantize, "int8_weight", [outputs, blocks(inputs, 8 * THREADS), 1], THREADS, arguments)
}

/// A tensor of 16 bits or of float32, and whether it is of float32.
pub(super) fn numbers(y: &Tensor) -> (Argument, Argument) {
    let kind = y.kind();
    assert!(kind == Kind::Float || KernelDtype::of(kind).is_some(), "kernels write 16 bits or float32, got {y:?}");
    (tensor(y, kind), Argument::Int(i32::from(kind == Kind::Float)))
}
