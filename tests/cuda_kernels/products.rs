//! Matrix products with weights, and the ResBlocks of heads.

// Letters as in `cuda_kernels`

use super::*;

/// Room for the sums of a product with M outputs, and no more.
fn split_room(case: &Case, way: GemmAlgorithm, m: i64) -> SplitRoom {
    let [tiles, sums] = match way {
        GemmAlgorithm::Tile { height, width, splits } => {
            let tiles = (m + height - 1) / height;
            [tiles, splits * tiles * height * width]
        }
        _ => [1, 1],
    };
    let arrived = case.memory.tensor(&Tensor::zeros([tiles], (Kind::Int, Device::Cpu)));
    SplitRoom { sums: case.output_of(&[sums], Kind::Float), arrived }
}

/// Runs one implementation of a product, and its oracle.
fn check_product(case: &Case, way: GemmAlgorithm, [n, m, k]: [i64; 3], (normed, written): (bool, WrittenSums)) {
    let columns = if written == WrittenSums::Gated { m / 2 } else { m };
    let kind = if written == WrittenSums::Float32 { Kind::Float } else { case.kind };
    let y =
        if written == WrittenSums::Added { case.normal(&[n, columns]) } else { case.output_of(&[n, columns], kind) };
    let (x_nk, w_mk, [got, expected]) = (case.normal(&[n, k]), case.weights(&[m, k]), both(case, &y));
    let (norm_k, normed_nk, sums_nm) = (case.normal(&[k]), case.output(&[n, k]), case.output(&[n, m]));
    let of = |y_nm: &Tensor| {
        let [weight_k, normed_nk] = [&norm_k, &normed_nk].map(Tensor::shallow_clone);
        let ending = match written {
            WrittenSums::Rounded | WrittenSums::Float32 => Ending::Stored,
            WrittenSums::Added => Ending::Added,
            WrittenSums::Gated => Ending::Gated { sums_nm: sums_nm.shallow_clone() },
        };
        let norm = normed.then_some(InputNorm { weight_k, eps: 1e-5, normed_nk });
        Operands { norm, ending, ..Operands::new(&x_nk, &w_mk, y_nm) }
    };
    let room = split_room(case, way, m);
    case.run(&way.launches(&of(&got), &room));
    case.assert_equal(&room.arrived, &room.arrived.zeros_like());
    oracle::linear(&of(&expected));
    let size = (k as f64).sqrt();
    let scale = match written {
        WrittenSums::Float32 => 16.0 * size, // sums in another order
        WrittenSums::Rounded | WrittenSums::Added => 8e-3 * size,
        WrittenSums::Gated => 4.0 * size, // gate and up, which are rounded first, may be rounded to the other neighbour
    };
    case.assert_close(&got, &expected, if written == WrittenSums::Gated { 2.0 } else { 1.0 }, scale);
}

#[test]
fn products_are_those_of_every_row_and_weight() {
    // Columns that do not fill a tile, depths that do not fill a stage, and the tall tiles of a vocabulary.
    let weights = [(40, 8), (64, 64), (100, 328), (2100, 72)];
    let written = [WrittenSums::Float32, WrittenSums::Rounded, WrittenSums::Added, WrittenSums::Gated];
    cases(product(&[1, 2, 7, 8, 9, 20, 63, 65, 128], &weights), |case, (n, (m, k))| {
        if m > 1000 && ![1, 8, 9, 65].contains(&n) {
            return;
        }
        let plain = Product { rows: n, outputs: m, inputs: k, normed: false, written: WrittenSums::Rounded };
        let split = plain.own_ways().into_iter().filter_map(|way| match way {
            GemmAlgorithm::Tile { height, width, .. } if k == 8 || k == 328 => {
                Some(GemmAlgorithm::Tile { height, width, splits: 3 })
            }
            _ => None,
        });
        for (number, way) in plain.own_ways().into_iter().chain(split).enumerate() {
            let is_few = matches!(way, GemmAlgorithm::Few { .. });
            if !is_few && [2, 7, 8].contains(&n) {
                continue; // rows that fill a tile as little as one does
            }
            // Whatever is fused, one after the other; everything where it costs little.
            let all = product(if is_few { &[false, true][..] } else { &[false][..] }, &written);
            let count = if m < 1000 && (is_few || k == 8) { all.len() } else { 1 };
            let all = all.into_iter().cycle().skip(number + case.seed as usize).take(count);
            all.for_each(|fused| check_product(case, way, [n, m, k], fused));
        }
    });
}

/// Weights `[M, K]` of 19 distinct rows: random numbers of a whole large matrix take seconds to draw.
fn repeating_weights(case: &Case, [m, k]: [i64; 2]) -> Tensor {
    let rows = case.gaussian(&[19, k]).to_kind(case.kind);
    case.memory.weights(&rows.repeat([m / 19 + 1, 1]).narrow(0, 0, m))
}

#[test]
fn long_rows_use_every_slot_of_the_ring_again() {
    // Five rounds of each kernel: with SPLIT warps a column, a round is 256·SPLIT numbers. The last one is not full.
    let ways = [(1, 1), (4, 1), (8, 1), (1, 4), (4, 4), (8, 4), (1, 8)]
        .map(|(most, split)| GemmAlgorithm::Few { most, split });
    cases(ways, |case, way| {
        let GemmAlgorithm::Few { most, split } = way else { unreachable!("of the list above") };
        let k = 4 * 256 * split + 264;
        for fused in [(false, WrittenSums::Rounded), (true, WrittenSums::Gated)] {
            check_product(case, way, [most, 36, k], fused);
        }
    });
    cases([(1, 4360)], |case, (k, h)| {
        let (x_kh, w_mh, b_kh) = (case.normal(&[k, h]), repeating_weights(case, [k * h, h]), case.normal(&[k, h]));
        let [got, expected] = both(case, &case.output(&[k, h]));
        let w_khh = w_mh.view([k, h, h]);
        case.run(&[launches::res_block(BlockInput::Rows(&x_kh), &w_khh, &b_kh, &got)]);
        oracle::res_block(BlockInput::Rows(&x_kh), &w_khh, &b_kh, &expected);
        case.assert_close(&got, &expected, 1.0, 1.0);
    });
}

#[test]
fn heads_read_the_last_accepted_row_or_their_own() {
    cases(product(&[1, 5], &[8, 40, 264]), |case, (k, h)| {
        let state = case.state(9);
        state::write(&state, Slot::Last, 6);
        let (hidden_nh, x_kh) = (case.normal(&[7, h]), case.normal(&[k, h]));
        let (w_khh, b_kh) = (case.weights(&[k, h, h]), case.normal(&[k, h]));
        for input in [BlockInput::Last { hidden_nh: &hidden_nh, state: &state }, BlockInput::Rows(&x_kh)] {
            let [got, expected] = both(case, &case.output(&[k, h]));
            case.run(&[launches::res_block(input, &w_khh, &b_kh, &got)]);
            oracle::res_block(input, &w_khh, &b_kh, &expected);
            case.assert_close(&got, &expected, 1.0, 0.1);
        }
    });
}
