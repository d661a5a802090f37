//! On the CPU the rows of a loss are padded to one of few numbers: oneDNN compiles and keeps products for each number of rows that it meets, and
//! glibc's heap finds no block to reuse among tensors of ever new sizes. Together they took several times the memory of a small model's heads.

// M targets of one head, P padded ones
use tch::{Device, Tensor};

/// Rows to compute for `m` targets: at most a sixteenth more, or 15.
fn padded_rows(m: i64) -> i64 {
    let step = (m.unsigned_abs().next_power_of_two() / 32).clamp(16, 256).cast_signed();
    (m + step - 1) / step * step
}

/// `[M, …]` to `[P, …]` on the CPU: the last row is repeated.
pub(super) fn padded(x_m: &Tensor) -> Tensor {
    let m = x_m.size()[0];
    let missing = padded_rows(m) - m;
    if missing == 0 || x_m.device() != Device::Cpu {
        return x_m.shallow_clone();
    }
    let last = x_m.narrow(0, m - 1, 1);
    Tensor::cat(&[x_m, &last.repeat_interleave_self_int(missing, 0, missing)], 0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tch::Kind;

    use super::*;

    #[test]
    fn numbers_of_rows_are_few_and_little_more_than_the_targets() {
        let all: Vec<i64> = (0..=8192).map(padded_rows).collect();
        assert!((0..).zip(&all).all(|(m, &rows)| (m..=m + (m / 16).max(15)).contains(&rows)), "{all:?}");
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 1 + 32 + 4 * 16);
    }

    #[test]
    fn the_last_row_is_repeated_and_no_rows_stay_none() {
        let rows = Tensor::arange(34, (Kind::Int64, Device::Cpu)).view([17, 2]);
        let padded_rows = padded(&rows);
        assert_eq!(padded_rows.size(), [32, 2]);
        assert_eq!(padded_rows.narrow(0, 0, 17), rows);
        assert_eq!(padded_rows.narrow(0, 17, 15), rows.narrow(0, 16, 1).repeat([15, 1]));
        assert_eq!(padded(&rows.narrow(0, 0, 0)).size(), [0, 2]);
    }
}
