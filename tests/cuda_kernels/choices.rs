//! Choices from logits: the most probable token, guesses, posteriors, draws.

// Letters as in `cuda_kernels`

use super::*;

/// Logits with many ties: only 20 distinct values.
fn logits_with_ties(case: &Case, size: &[i64]) -> Tensor {
    case.memory.tensor(&case.below(20, size).to_kind(Kind::Float))
}

/// Runs launches over the rows of logits with scratch memory that is just as large as they need, and poisoned.
fn run_in_slices(case: &Case, logits_nv: &Tensor, launches: impl FnOnce(&SliceRoom) -> Vec<Launch>) {
    let (n, v) = logits_nv.size2().expect("[N, V]");
    let [parts, arrived, places, counts] = SliceRoom::sizes([n, v]).map(|(size, kind)| case.output_of(&size, kind));
    let _ = arrived.shallow_clone().zero_();
    let room = SliceRoom { parts, arrived, places, counts };
    case.run(&launches(&room));
    case.assert_equal(&room.arrived, &room.arrived.zeros_like());
}

/// Compares the kernel with its oracle.
fn check_best(case: &Case, logits_nv: &Tensor) -> Vec<i64> {
    let [got, expected] = both(case, &case.output_of(&[logits_nv.size()[0]], Kind::Int));
    run_in_slices(case, logits_nv, |room| vec![launches::best(logits_nv, room, &got)]);
    oracle::best(logits_nv, &expected);
    case.assert_equal(&got, &expected);
    Vec::try_from(got.to_kind(Kind::Int64)).expect("one axis")
}

#[test]
fn the_first_of_equals_comes_first() {
    cases(product(&[1, 2, 5], &[5, 50, 4096, 4097, 32_000]), |case, (n, v)| {
        let p = 16.min(v);
        for logits_nv in [logits_with_ties(case, &[n, v]), case.floats(&[n, v])] {
            check_best(case, &logits_nv);
            let [got, expected] = both(case, &case.output_of(&[n, p], Kind::Int));
            let parts = case.memory.poisoned(&launches::guess_parts([n, v], p, Device::Cpu).size(), Kind::Int64);
            let bias_v = (n != 2).then(|| case.normal(&[v]));
            case.run(&launches::top_guesses(&logits_nv, bias_v.as_ref(), &parts, &got));
            oracle::top_guesses(&logits_nv, bias_v.as_ref(), &expected);
            case.assert_equal(&got, &expected);
        }
    });
}

#[test]
fn probabilities_and_entropies_are_those_of_a_softmax() {
    cases(product(&[1, 9, 128], &[(5, 1.0), (1500, 0.7), (4097, 2.0)]), |case, (n, (v, temperature))| {
        let (nodes, tokens_n) = (case.nodes(n), case.below(v.min(70), &[n]));
        let logits_nv = case.memory.tensor(&(case.floats(&[n, v]) * 4));
        if v > 100 {
            let _ = logits_nv.narrow(1, 70, 20).fill_(f64::NEG_INFINITY); // impossible tokens
        }
        let [log_p, log_p_oracle] = both(case, &case.output_of(&[n], Kind::Float));
        let [entropy, entropy_oracle] = both(case, &case.output_of(&[n], Kind::Float));
        let numbers = [&log_p, &entropy];
        run_in_slices(case, &logits_nv, |room| {
            vec![launches::posterior(&logits_nv, room, &tokens_n, &nodes, temperature, numbers)]
        });
        oracle::posterior(&logits_nv, &tokens_n, &nodes, temperature, [&log_p_oracle, &entropy_oracle]);
        case.assert_close(&log_p, &log_p_oracle, 1.0, 8.0);
        case.assert_close(&entropy, &entropy_oracle, 1.0, 8.0);
    });
}

/// The tokens drawn by the kernel and by its oracle.
fn draw_both(case: &Case, logits_nv: &Tensor, [temperature, top_p]: [f64; 2]) -> [Tensor; 2] {
    let n = logits_nv.size()[0];
    let (nodes, state) = (case.nodes(n), case.state(40));
    let places = StepPositions { nodes: &nodes, state: &state };
    let uniforms_u = case.memory.tensor(&case.uniform(&[7]));
    let draws = Draws { temperature, top_p, uniforms_u: &uniforms_u };
    let [got, expected] = both(case, &case.output_of(&[n], Kind::Int));
    run_in_slices(case, logits_nv, |room| launches::draw(logits_nv, room, places, draws, &got).into());
    oracle::draw(logits_nv, places, draws, &expected);
    [got, expected]
}

#[test]
fn a_token_is_drawn_where_the_number_of_its_position_falls() {
    let (rows, at_borders) = (Cell::new(0), Cell::new(0));
    // Temperatures and nuclei: all tokens, some, one; nearly all of a flat distribution; a nucleus that float32 can hardly tell from all.
    const HOW: [[f64; 2]; 6] = [[1.0, 1.0], [0.7, 0.9], [1.5, 0.3], [1.0, 1e-3], [9.0, 0.999], [1.0, 1.0 - 1e-7]];
    let in_slices = product(&[(1, 4097), (3, 9001)], &[HOW[0], HOW[1], HOW[4]]);
    let all = product(&[(1, 5), (2, 1500)], &HOW).into_iter().chain(in_slices);
    cases(all, |case, ((n, v), how)| {
        for logits_nv in [logits_with_ties(case, &[n, v]), case.memory.tensor(&(case.floats(&[n, v]) * 2))] {
            let [got, expected] = draw_both(case, &logits_nv, how);
            rows.set(rows.get() + n);
            at_borders
                .set(at_borders.get() + i64::try_from(got.ne_tensor(&expected).sum(Kind::Int64)).expect("a number"));
        }
    });
    // Because of float32's last bits, a nucleus of thousands of tokens may end one token later, which moves all later
    // borders: rare, but valid.
    assert!(at_borders.get() <= 2, "{} of {} rows are drawn otherwise", at_borders.get(), rows.get());
}

#[test]
fn of_what_is_no_number_no_token_is_chosen() {
    cases([5, 1500, 4097], |case, v| {
        let logits_nv = case.floats(&[5, v]);
        for (row, bad) in [(1, f64::NAN), (3, f64::INFINITY)] {
            let _ = logits_nv.i((row, v - 2)).fill_(bad);
        }
        let _ = logits_nv.i(2).fill_(f64::NEG_INFINITY);
        let _ = logits_nv.i((4, 1)).fill_(f64::NEG_INFINITY); // a finite row with one impossible token stays valid
        let is_chosen = |chosen: Vec<i64>| chosen.iter().map(|&token| (0..v).contains(&token)).collect::<Vec<_>>();
        let best = check_best(case, &logits_nv);
        assert_eq!((best[1], best[2], best[3]), (-1, -1, -1), "{}", case.name);
        assert_eq!(is_chosen(best), [true, false, false, false, true], "{}", case.name);
        for top_p in [1.0, 0.9] {
            for drawn in draw_both(case, &logits_nv, [0.7, top_p]) {
                let drawn = Vec::<i64>::try_from(drawn.to_kind(Kind::Int64)).expect("one axis");
                assert_eq!((drawn[1], drawn[2], drawn[3]), (-1, -1, -1), "{}", case.name);
                assert_eq!(is_chosen(drawn), [true, false, false, false, true], "{}", case.name);
            }
        }
    });
}
