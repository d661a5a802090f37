//! How fast the CPU's kernels multiply weights of each format, or those of a backbone, beside how fast the memory is read.

// O outputs, I inputs, N rows of x
use std::hint::black_box;
use std::time::Instant;

use serde::Serialize;

use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::cpu::team::Team;
use crate::cpu::{self, Number};
use crate::gguf::types::TYPES;
use crate::model::linear::Linear;
use crate::model::llama::{Llama, MergedLayer};

/// Bytes of the weights of a format: more than most caches hold.
const BYTES: usize = 256 << 20;
/// Inputs of each output.
const INPUTS: usize = 2048;
/// Rows whose products are timed.
const ROWS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Each product is timed so often; the median counts.
const ROUNDS: usize = 5;

/// The products of this machine.
#[derive(Debug, Serialize)]
pub struct ProductSpeeds {
    pub threads: usize,
    /// 10^9 bytes per second that all threads together read.
    pub read_gigabytes_per_second: f64,
    pub products: Vec<ProductSpeed>,
}

/// Products with weights of one format, or with one kind of a backbone's weights.
#[derive(Debug, Serialize)]
pub struct ProductSpeed {
    pub weights: String,
    /// Weights that the product of one row reads, 10^9 bytes per second.
    pub gigabytes_per_second: f64,
    /// First of one row.
    pub rows: Vec<RowsTime>,
}

/// How long the product of some rows takes.
#[derive(Debug, Serialize)]
pub struct RowsTime {
    pub rows: usize,
    /// As long as that of one row, so many times.
    pub times: f64,
}

impl ProductSpeeds {
    /// Measures all formats, `progress` before each; `None` where the CPU lacks the kernels.
    pub fn measure(team: &Team, mut progress: impl FnMut(&str)) -> Option<Self> {
        if !cpu::available() {
            return None;
        }
        progress("memory");
        let read_gigabytes_per_second = read_speed(team);
        let mut products = vec![];
        for number in [Number::Float32, Number::BFloat16] {
            let weights = if number == Number::Float32 { "float32" } else { "bfloat16" };
            progress(weights);
            let row = vec![0; INPUTS * number.bytes()];
            let matrix =
                |outputs, arena: &mut Arena| Matrix::new(&row.repeat(outputs), number, [outputs, INPUTS], arena);
            products.push(format_speed(weights, row.len(), matrix, team)?);
        }
        for kind in TYPES.iter().filter(|kind| kind.codes().is_some()) {
            progress(kind.name);
            let row = vec![0; INPUTS / kind.numbers * kind.bytes];
            let matrix = |outputs, arena: &mut Arena| {
                Matrix::from_blocks((&row.repeat(outputs), kind), |_| 1.0, [outputs, INPUTS], arena)
            };
            products.push(format_speed(kind.name, row.len(), matrix, team)?);
        }
        Some(Self { threads: team.size(), read_gigabytes_per_second, products })
    }

    /// Measures the products of a backbone; `None` where they are not on the CPU's kernels.
    pub fn measure_backbone<'b>(backbone: &'b Llama, team: &Team, mut progress: impl FnMut(&str)) -> Option<Self> {
        let layers = backbone.merged_layers()?;
        let all = |linear: fn(&MergedLayer<'b>) -> &'b Linear| -> Option<Vec<&'b Matrix>> {
            layers.iter().map(|layer| linear(layer).matrix()).collect()
        };
        let products = [
            ("q, k, v", all(|layer| layer.qkv)?),
            ("o", all(|layer| layer.o)?),
            ("gate, up", all(|layer| layer.gate_up)?),
            ("down", all(|layer| layer.down)?),
            ("LM head", vec![backbone.lm_head().matrix()?]),
        ];
        progress("memory");
        let read_gigabytes_per_second = read_speed(team);
        let measure = |(name, matrices): (&str, Vec<&Matrix>)| {
            progress(name);
            speed(name, &matrices, team)
        };
        let products = products.into_iter().map(measure).collect();
        Some(Self { threads: team.size(), read_gigabytes_per_second, products })
    }
}

/// 10^9 bytes per second.
fn read_speed(team: &Team) -> f64 {
    let (lines, parts) = (BYTES / 64, 4 * team.size());
    // Written first: until then, every page is the same page of zeros, which the caches hold.
    let memory = Arena::default().lines(lines, |lines| lines.fill(lines[0]));
    let sum = |part: usize| _ = black_box(memory.sum(lines * part / parts..lines * (part + 1) / parts));
    BYTES as f64 / 1e9 / median_seconds(|| team.run(parts, sum))
}

/// Of matrices that `matrix` makes of so many outputs, each row of weights `row_bytes` long.
fn format_speed(
    weights: &str,
    row_bytes: usize,
    matrix: impl Fn(usize, &mut Arena) -> Option<Matrix>,
    team: &Team,
) -> Option<ProductSpeed> {
    const MATRICES: usize = 8;
    let (outputs, mut arena) = (BYTES / MATRICES / row_bytes, Arena::default());
    let matrices: Vec<Matrix> = (0..MATRICES).map(|_| matrix(outputs, &mut arena)).collect::<Option<_>>()?;
    Some(speed(weights, &matrices.iter().collect::<Vec<_>>(), team))
}

/// Of matrices of one shape, one after another.
fn speed(weights: &str, matrices: &[&Matrix], team: &Team) -> ProductSpeed {
    let seconds = ROWS.map(|rows| {
        let (x_ni, mut y_no) = (vec![0.5; rows * matrices[0].inputs()], vec![0.0; rows * matrices[0].outputs()]);
        median_seconds(|| matrices.iter().for_each(|matrix| matrix.multiply(&x_ni, &mut y_no, team)))
    });
    ProductSpeed {
        weights: weights.to_owned(),
        gigabytes_per_second: matrices.iter().map(|matrix| matrix.bytes()).sum::<usize>() as f64 / 1e9 / seconds[0],
        rows: ROWS.into_iter().zip(seconds).map(|(rows, time)| RowsTime { rows, times: time / seconds[0] }).collect(),
    }
}

fn median_seconds(mut run: impl FnMut()) -> f64 {
    run(); // pages are touched, threads awake
    let mut seconds = [(); ROUNDS].map(|()| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    seconds.sort_by(f64::total_cmp);
    seconds[ROUNDS / 2]
}
