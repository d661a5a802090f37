//! Row-wise kernels of a layer: norms, activations, rotary embeddings, top-k. A row's output does not depend on the other rows.
#![expect(unsafe_code, reason = "rows of a job write to places of their own")]

// N rows, H hidden, F intermediate size, D head size
use super::Number;
use super::lanes::{LANES, Lanes, with_lanes};
use super::shared::Shared;
use super::team::Team;

/// Numbers of rows that are worth sharing among threads.
pub(super) const WORTH_SHARING: usize = 1 << 14;

/// Runs `work` on parts of rows of `width` numbers, with the number of each part's first row.
pub(crate) fn in_parts(rows: &mut [f32], width: usize, team: &Team, work: impl Fn(usize, &mut [f32]) + Sync) {
    if rows.len() < WORTH_SHARING {
        return work(0, rows);
    }
    let part_rows = (rows.len() / width).div_ceil(2 * team.size());
    let (parts, len) = (rows.len().div_ceil(part_rows * width), rows.len());
    let rows = Shared::new(rows);
    team.run(parts, |part| {
        let at = part * part_rows * width;
        // SAFETY: parts do not meet.
        work(part * part_rows, unsafe { rows.part(at, (part_rows * width).min(len - at)) });
    });
}

/// Puts what `of` gives of the numbers of two rows in place of the first one's.
#[inline(always)]
fn change_each<L: Lanes>(lanes: L, x: &mut [f32], y: &[f32], of: impl Fn(L::Vector, L::Vector) -> L::Vector) {
    let ((whole, rest), at) = (x.as_chunks_mut::<LANES>(), y.len() / LANES * LANES);
    for (x, y) in whole.iter_mut().zip(y.as_chunks::<LANES>().0) {
        let changed = of(lanes.load(x), lanes.load(y));
        lanes.store(x, changed);
    }
    let changed = of(lanes.load(rest), lanes.load(&y[at..]));
    lanes.store(rest, changed);
}

/// [`Number::write`], compiled for the vectors of this CPU.
pub(crate) fn write_numbers(number: Number, x: &[f32], bytes: &mut [u8]) {
    with_lanes!(_lanes => number.write(x, bytes));
}

/// `x / rms(x) · weight` for each row, in place.
pub(crate) fn rms_norm(x_nh: &mut [f32], weight_h: &[f32], eps: f32) {
    assert_eq!(x_nh.len() % weight_h.len(), 0, "whole rows");
    with_lanes!(lanes => for x_h in x_nh.chunks_exact_mut(weight_h.len()) {
        let scale = lanes.all((sum_of_squares(lanes, x_h) / x_h.len() as f32 + eps).sqrt().recip());
        change_each(lanes, x_h, weight_h, #[inline(always)] |x, weight| {
            lanes.multiply(lanes.multiply(x, scale), weight)
        });
    });
}

#[inline(always)]
fn sum_of_squares<L: Lanes>(lanes: L, x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = lanes.all(0.0);
    for chunk in chunks {
        let x = lanes.load(chunk);
        sums = lanes.multiply_add(x, x, sums);
    }
    lanes.sum(sums) + rest.iter().map(|x| x * x).sum::<f32>()
}

/// `x += y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "of one shape");
    with_lanes!(lanes => change_each(lanes, x, y, #[inline(always)] |x, y| lanes.add(x, y)));
}

/// Adds a bias `[O]` to each row of `[N, O]`.
pub(crate) fn add_to_each(y_no: &mut [f32], bias_o: &[f32]) {
    y_no.chunks_exact_mut(bias_o.len()).for_each(|y_o| add(y_o, bias_o));
}

/// `silu(gate) · up`: `[N, 2F]`, gate before up in each row, to `[N, F]`.
pub(crate) fn silu_product(gate_up_nf: &[f32], out_nf: &mut [f32], f: usize) {
    assert_eq!(gate_up_nf.len(), 2 * out_nf.len(), "[N, 2F] and [N, F]");
    for (gate_up, out_f) in gate_up_nf.chunks_exact(2 * f).zip(out_nf.chunks_exact_mut(f)) {
        let (gate_f, up_f) = gate_up.split_at(f);
        with_lanes!(lanes => silu_product_of_row(lanes, gate_f, up_f, out_f));
    }
}

#[inline(always)]
fn silu_product_of_row<L: Lanes>(lanes: L, gate_f: &[f32], up_f: &[f32], out_f: &mut [f32]) {
    let one = lanes.all(1.0);
    out_f.copy_from_slice(gate_f);
    change_each(
        lanes,
        out_f,
        up_f,
        #[inline(always)]
        |gate, up| {
            let sigmoid = lanes.divide(one, lanes.add(one, lanes.exp(lanes.subtract(lanes.all(0.0), gate))));
            lanes.multiply(lanes.multiply(gate, sigmoid), up)
        },
    );
}

/// `gelu(gate) · up` with GELU's tanh approximation; shapes as in [`silu_product`].
pub(crate) fn gelu_tanh_product(gate_up_nf: &[f32], out_nf: &mut [f32], f: usize) {
    assert_eq!(gate_up_nf.len(), 2 * out_nf.len(), "[N, 2F] and [N, F]");
    for (gate_up, out_f) in gate_up_nf.chunks_exact(2 * f).zip(out_nf.chunks_exact_mut(f)) {
        let (gate_f, up_f) = gate_up.split_at(f);
        with_lanes!(lanes => gelu_tanh_product_of_row(lanes, gate_f, up_f, out_f));
    }
}

/// `x·(1 + tanh(u)) / 2 = x·sigmoid(2u)` with `u = √(2/π)·(x + 0.044715·x³)`.
#[inline(always)]
fn gelu_tanh_product_of_row<L: Lanes>(lanes: L, gate_f: &[f32], up_f: &[f32], out_f: &mut [f32]) {
    const MINUS_TWO_ROOT: f32 = -1.595_769; // -2·√(2/π)
    let one = lanes.all(1.0);
    out_f.copy_from_slice(gate_f);
    change_each(
        lanes,
        out_f,
        up_f,
        #[inline(always)]
        |gate, up| {
            let cubic = lanes.multiply(lanes.multiply(gate, gate), lanes.multiply(gate, lanes.all(0.044_715)));
            let minus_2u = lanes.multiply(lanes.all(MINUS_TWO_ROOT), lanes.add(gate, cubic));
            let sigmoid = lanes.divide(one, lanes.add(one, lanes.exp(minus_2u)));
            lanes.multiply(lanes.multiply(gate, sigmoid), up)
        },
    );
}

/// `x + silu(y)` to `x`, both `[N, H]`: the end of a ResBlock.
pub(crate) fn add_silu(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "of one shape");
    for (x, y) in x.chunks_mut(LANES).zip(y.chunks(LANES)) {
        let mut gated = [0.0; LANES];
        with_lanes!(lanes => silu_product_of_row(lanes, y, &[1.0; LANES][..y.len()], &mut gated[..y.len()]));
        x.iter_mut().zip(gated).for_each(|(x, gated)| *x += gated);
    }
}

/// Cosines, then sines of a position times `magnitude`, for pairs (i, i + R/2) of a head: rotary embeddings as transformers computes them.
pub(crate) fn rotation(position: i64, frequencies: &[f32], magnitude: f32) -> Vec<f32> {
    let angles = frequencies.iter().map(|frequency| position as f32 * frequency);
    angles.clone().map(|angle| angle.cos() * magnitude).chain(angles.map(|angle| angle.sin() * magnitude)).collect()
}

/// Rotates the first R numbers of heads `[…, D]` in place by a [`rotation`] (`[R]`).
pub(crate) fn rotate(heads: &mut [f32], d: usize, rotation: &[f32]) {
    with_lanes!(lanes => for head in heads.chunks_exact_mut(d) {
        rotate_head(lanes, head, rotation);
    });
}

#[inline(always)]
fn rotate_head<L: Lanes>(lanes: L, head: &mut [f32], rotation: &[f32]) {
    let (cos, sin) = rotation.split_at(rotation.len() / 2);
    let (first, second) = head[..rotation.len()].split_at_mut(cos.len());
    let pairs = first.chunks_mut(LANES).zip(second.chunks_mut(LANES));
    for ((first, second), (cos, sin)) in pairs.zip(cos.chunks(LANES).zip(sin.chunks(LANES))) {
        let [a, b, cos, sin] = [lanes.load(first), lanes.load(second), lanes.load(cos), lanes.load(sin)];
        lanes.store(first, lanes.subtract(lanes.multiply(a, cos), lanes.multiply(b, sin)));
        lanes.store(second, lanes.add(lanes.multiply(b, cos), lanes.multiply(a, sin)));
    }
}

/// Indices of the `count` largest numbers, largest first, of equals the first. NaN counts as larger than any number.
pub(crate) fn largest(x: &[f32], count: usize) -> Vec<usize> {
    with_lanes!(lanes => largest_of_row(lanes, x, count))
}

#[inline(always)]
fn largest_of_row<L: Lanes>(lanes: L, x: &[f32], count: usize) -> Vec<usize> {
    let mut best: Vec<(f32, usize)> = Vec::with_capacity(count + 1);
    for (chunk, numbers) in x.chunks(LANES).enumerate() {
        let mut places = match best.last() {
            Some(&(least, _)) if best.len() == count => lanes.above(numbers, least),
            _ => (1u32 << numbers.len()).wrapping_sub(1) as u16,
        };
        while places != 0 {
            let lane = places.trailing_zeros() as usize; // nearly always, there is none
            places &= places - 1;
            let number = numbers[lane];
            let at = best.partition_point(|&(other, _)| other.is_nan() || other >= number);
            if at < count {
                best.insert(at, (number, chunk * LANES + lane));
                best.truncate(count);
            }
        }
    }
    best.into_iter().map(|(_, at)| at).collect()
}

/// Logits of rows that one part of a job reads at least: below this, waiting for the others takes longer than the work.
const LOGITS_OF_PART: usize = 1 << 13;

/// The `count` largest of each row of logits `[N, V]`, as [`largest`], with the logarithms of their probabilities.
pub(crate) fn likeliest(logits_nv: &[f32], v: usize, count: usize, team: &Team) -> Vec<(usize, f32)> {
    let count = count.min(v);
    let rows = logits_nv.len() / v;
    let mut likeliest = vec![(0, 0.0); rows * count];
    let part_rows = LOGITS_OF_PART.div_ceil(v);
    let out = Shared::new(&mut likeliest);
    team.run(rows.div_ceil(part_rows), |part| {
        for row in part * part_rows..rows.min((part + 1) * part_rows) {
            let logits_v = &logits_nv[row * v..(row + 1) * v];
            let total = log_sum_exp(logits_v);
            let with_log_p: Vec<_> =
                largest(logits_v, count).into_iter().map(|at| (at, logits_v[at] - total)).collect();
            // SAFETY: each row has its own place.
            unsafe { out.write(row * count, &with_log_p) };
        }
    });
    likeliest
}

/// The logarithm of the sum of e^x over all numbers; NaN if one of them is.
fn log_sum_exp(x: &[f32]) -> f32 {
    with_lanes!(lanes => log_sum_exp_of_row(lanes, x))
}

#[inline(always)]
fn log_sum_exp_of_row<L: Lanes>(lanes: L, x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (mut largest, mut sums) = (lanes.all(f32::NEG_INFINITY), lanes.all(0.0));
    for chunk in chunks {
        largest = lanes.larger(largest, lanes.load(chunk));
    }
    let largest = lanes.largest(largest).max(rest.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let shift = lanes.all(largest);
    for chunk in chunks {
        sums = lanes.add(sums, lanes.exp(lanes.subtract(lanes.load(chunk), shift)));
    }
    let sum = lanes.sum(sums) + rest.iter().map(|x| (x - largest).exp()).sum::<f32>();
    largest + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 9.0).collect()
    }

    fn close(a: &[f32], b: impl Iterator<Item = f64>) {
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((f64::from(*a) - b).abs() < 2e-6 * b.abs().max(1.0), "number {at}: {a}, expected {b}");
        }
    }

    #[test]
    fn parts_are_whole_rows_and_each_row_is_in_one() {
        let width = 96;
        for (rows, threads) in [(1, 2), (WORTH_SHARING / width + 1, 1), (173, 2), (511, 3), (600, 16)] {
            let mut x = vec![-1.0; rows * width];
            in_parts(&mut x, width, &Team::new(threads), |first, part| {
                for (row, x) in (first..).zip(part.chunks_exact_mut(width)) {
                    x.iter_mut().for_each(|x| *x += row as f32);
                }
            });
            let expected = (0..rows).flat_map(|row| vec![row as f32 - 1.0; width]);
            assert!(x.into_iter().eq(expected), "{rows} rows, {threads} threads");
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn rows_equal_their_formulas_in_float64() {
        for h in [5, 16, 37] {
            let (x, weight) = (numbers(2 * h), numbers(h));
            let mut out = x.clone();
            rms_norm(&mut out, &weight, 1e-5);
            for (x, out) in x.chunks_exact(h).zip(out.chunks_exact(h)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / h as f64;
                close(out, x.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * f64::from(w) / (mean + 1e-5).sqrt()));
            }
            let silu = |x: f32| f64::from(x) / (1.0 + f64::from(-x).exp());
            let (gate_up, mut product) = (numbers(4 * h), vec![0.0; 2 * h]);
            silu_product(&gate_up, &mut product, h);
            for (gate_up, product) in gate_up.chunks_exact(2 * h).zip(product.chunks_exact(h)) {
                close(product, (0..h).map(|i| silu(gate_up[i]) * f64::from(gate_up[h + i])));
            }
            let mut sum = x.clone();
            add_silu(&mut sum, &numbers(2 * h));
            close(&sum, x.iter().zip(numbers(2 * h)).map(|(&x, y)| f64::from(x) + silu(y)));
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn the_likeliest_of_many_rows_are_those_of_each() {
        let (v, team) = (3000, Team::new(2));
        let rows = numbers(7 * v);
        let each: Vec<_> = rows.chunks_exact(v).flat_map(|row| likeliest(row, v, 5, &team)).collect();
        assert_eq!(likeliest(&rows, v, 5, &team), each);
        let (at, log_p) = each[0];
        assert_eq!((at, each.len()), (largest(&rows[..v], 1)[0], 35));
        assert!((log_p - (rows[at] - log_sum_exp(&rows[..v]))).abs() < 1e-6);
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn the_sum_of_exponentials_neither_overflows_nor_loses_nan() {
        for count in [1, 15, 16, 300] {
            for shift in [0.0, 500.0, -500.0] {
                let x: Vec<f32> = numbers(count).into_iter().map(|x| x + shift).collect();
                let expected = x.iter().map(|&x| f64::from(x - shift).exp()).sum::<f64>().ln() + f64::from(shift);
                close(&[log_sum_exp(&x)], [expected].into_iter());
            }
        }
        for at in [0, 20, 35] {
            let mut x = numbers(36);
            x[at] = f32::NAN;
            assert!(log_sum_exp(&x).is_nan());
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn the_largest_come_first_and_of_equals_the_first() {
        let x = numbers(300);
        let mut order: Vec<usize> = (0..300).collect();
        order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
        for count in [1, 2, 7, 50] {
            assert_eq!(largest(&x, count), order[..count]);
        }
        assert_eq!(largest(&[f32::NEG_INFINITY; 3], 1), [0]);
        for at in [0, 15, 16, 170, 299] {
            let mut x = x.clone();
            (x[at], x[order[1]]) = (f32::NAN, f32::INFINITY);
            assert_eq!(largest(&x, 1), [at], "NaN is first");
            assert_eq!(largest(&x, 2)[0], at);
        }
    }
}
