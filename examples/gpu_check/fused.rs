//! Compares the kernels that stand for libtorch's calls in training with these calls on the same GPU, and times both.

use std::time::Instant;

use medusa::cli::print_json;
use medusa::fused::{self, dropout::dropout, optim, pass};
use medusa::model::stored::{Quantization, Quantizer};
use medusa::torch::Generator;
use medusa::torch::dropout::mask;
use medusa::torch::optim::adamw::{AdamW, Parameter, gradient_norm};
use medusa::torch::optim::{AdamWConfig, OptimizerName};
use serde_json::json;
use tch::{Device, Kind, Tensor};

/// Timed runs of each way, after one that is not timed; the median counts.
const RUNS: usize = 5;
/// The largest distance from libtorch's result, relative to its largest number.
pub(crate) const FARTHEST: f64 = 0.01;

/// Sizes of the check.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FusedSizes {
    pub(crate) hidden: i64,
    pub(crate) mlp: i64,
    pub(crate) vocab: i64,
    pub(crate) tokens: i64,
}

/// Llama 2 7B's shapes.
pub(crate) const SIZES: FusedSizes = FusedSizes { hidden: 4096, mlp: 11_008, vocab: 32_000, tokens: 4096 };

/// Runs every operation both ways.
///
/// # Errors
/// A GPU without kernels, or a result that is too far from libtorch's.
pub(crate) fn beside_libtorch(on: Device, sizes: FusedSizes) -> anyhow::Result<()> {
    if let Some(why) = [Kind::Float, Kind::BFloat16, Kind::Half].iter().find_map(|&kind| fused::unavailable(on, kind)) {
        anyhow::bail!("{why}");
    }
    let mut far = vec![];
    for way in [optimizer(on, sizes, OptimizerName::AdamW), optimizer(on, sizes, OptimizerName::AdamW8bit)] {
        far.extend(way.print()?);
    }
    for both in weights(on, sizes).into_iter().chain(parts_of_a_pass(on, sizes)) {
        far.extend(both.print()?);
    }
    anyhow::ensure!(far.is_empty(), "too far from libtorch: {far:?}");
    Ok(())
}

/// An operation's two ways.
struct BothWays {
    operation: String,
    distance: f64,
    /// `None` on a CPU, where no kernel runs.
    kernel_ms: Option<f64>,
    libtorch_ms: f64,
    /// That the kernel reads and writes.
    bytes: f64,
}

impl BothWays {
    /// Prints a line; returns the operation if it is too far.
    fn print(self) -> anyhow::Result<Option<String>> {
        let Self { operation, distance, kernel_ms, libtorch_ms, bytes } = self;
        print_json(&json!({
            "check": "fused", "operation": operation, "distance": distance.min(f64::MAX), "kernel_ms": kernel_ms, "libtorch_ms": libtorch_ms,
            "gb_per_s": kernel_ms.map(|kernel_ms| bytes / kernel_ms / 1e6),
        }))?;
        Ok((distance.is_nan() || distance > FARTHEST).then_some(operation))
    }

    /// Of an operation that can be repeated.
    fn of(operation: &str, bytes: i64, kernel: impl Fn() -> Tensor, libtorch: impl Fn() -> Tensor) -> Self {
        let (first, expected) = (kernel(), libtorch());
        let distance = distance(&first, &expected);
        let kernel_ms = first.device().is_cuda().then(|| milliseconds(&kernel));
        let libtorch_ms = milliseconds(&libtorch);
        Self { operation: operation.to_owned(), distance, kernel_ms, libtorch_ms, bytes: bytes as f64 }
    }
}

/// What a kernel computes; libtorch's result stands for it on a CPU only.
fn of_kernel(computed: Option<Tensor>, on: Device, libtorch: impl Fn() -> Tensor) -> Tensor {
    computed.unwrap_or_else(|| {
        assert!(!on.is_cuda(), "a kernel does not run for its shape");
        libtorch()
    })
}

/// The largest difference, relative to the largest number that is expected.
pub(crate) fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    let [got, expected] = [got, expected].map(|tensor| tensor.to_kind(Kind::Float));
    let largest = expected.abs().max().double_value(&[]);
    (got - expected).abs().max().double_value(&[]) / largest.max(f64::MIN_POSITIVE)
}

/// The median over [`RUNS`].
fn milliseconds<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..=RUNS)
        .map(|_| {
            wait();
            let began = Instant::now();
            let _ = work();
            wait();
            began.elapsed().as_secs_f64() * 1e3
        })
        .skip(1)
        .collect();
    times.sort_by(f64::total_cmp);
    times[RUNS / 2]
}

fn wait() {
    if tch::Cuda::is_available() {
        tch::Cuda::synchronize(0);
    }
}

pub(crate) fn normal(seed: u64, size: &[i64], kind: Kind, on: Device) -> Tensor {
    Generator::seeded(seed).normal(size, (kind, on))
}

/// Norm and update of the parameters of two heads.
fn optimizer(on: Device, FusedSizes { hidden, vocab, .. }: FusedSizes, name: OptimizerName) -> BothWays {
    let sizes = [vec![hidden, hidden], vec![hidden], vec![vocab, hidden], vec![hidden - 1, 3]];
    let parameters = || -> Vec<Parameter> {
        let value = |(at, size): (usize, &Vec<i64>)| normal(at as u64, size, Kind::Float, on);
        sizes.iter().enumerate().map(|of| Parameter::new(format!("p{}", of.0), &value(of))).collect()
    };
    let fill = |parameters: &[Parameter]| {
        for (at, parameter) in parameters.iter().enumerate() {
            parameter.gradient.shallow_clone().copy_(&normal(50 + at as u64, &parameter.value.size(), Kind::Float, on));
        }
    };
    let (mut ours, mut theirs) = (parameters(), parameters());
    let config = AdamWConfig { name, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    let (mut kernels, mut oracle) = (AdamW::new(config, &ours), AdamW::new(config, &theirs));
    let mut farthest = 0f64;
    let clip = |norm: f64| (1.0 / (norm + 1e-6)).min(1.0); // as in training; timed gradients are 0
    let mut step = |ours: &mut [Parameter]| {
        let norm = optim::gradient_norm(&ours.iter().collect::<Vec<_>>()).double_value(&[0]);
        optim::step(&mut kernels, &mut ours.iter_mut().collect::<Vec<_>>(), 0.01, clip(norm));
        norm
    };
    let mut oracle_step = |theirs: &mut [Parameter]| {
        let norm = gradient_norm(&*theirs);
        oracle.step(&mut *theirs, 0.01, clip(norm));
        norm
    };
    for _ in 0..2 {
        fill(&ours);
        fill(&theirs);
        let (norm, expected) = (step(&mut ours), oracle_step(&mut theirs));
        farthest = farthest.max((norm - expected).abs() / expected);
    }
    farthest = ours.iter().zip(&theirs).map(|(a, b)| distance(&a.value, &b.value)).fold(farthest, f64::max);
    let numbers: i64 = sizes.iter().map(|size| size.iter().product::<i64>()).sum();
    let of_moments = if name == OptimizerName::AdamW { 16 } else { 4 };
    BothWays {
        operation: format!("gradient norm and {name}"),
        distance: farthest,
        kernel_ms: on.is_cuda().then(|| milliseconds(|| step(&mut ours))),
        libtorch_ms: milliseconds(|| oracle_step(&mut theirs)),
        bytes: (numbers * (20 + of_moments)) as f64,
    }
}

/// Weights of the MLP from their codes.
fn weights(on: Device, FusedSizes { hidden, mlp, .. }: FusedSizes) -> Vec<BothWays> {
    let of = |(quantization, kind): (Quantization, Kind)| {
        let weight_oi = normal(1, &[mlp, hidden], kind, on) * 0.02;
        let weight = Quantizer::new(quantization, on).quantize(&weight_oi);
        let bytes = mlp * hidden * (16 + quantization.format().bits().cast_signed()) / 8;
        BothWays::of(
            &format!("{quantization} to {kind:?}"),
            bytes,
            || weight.dequantize(kind),
            || weight.by_libtorch(kind),
        )
    };
    Quantization::ALL.into_iter().zip([Kind::BFloat16, Kind::Half]).map(of).collect()
}

/// Rotary embedding, the gate of the MLP and dropout, over some tokens.
fn parts_of_a_pass(on: Device, FusedSizes { hidden, mlp, tokens, .. }: FusedSizes) -> Vec<BothWays> {
    let kind = Kind::BFloat16;
    let of = |seed, size: &[i64]| normal(seed, size, kind, on);
    let (x_thd, d) = (of(1, &[tokens, hidden / 128, 128]), 128);
    let (cos, sin) = (of(2, &[tokens, 1, d]), of(3, &[tokens, 1, d]));
    let rotate = || (&x_thd * &cos).addcmul(&x_thd.roll([d / 2], [-1]), &sin);
    let (gate, up) = (of(4, &[tokens, mlp]), of(5, &[tokens, mlp]));
    let gated = || gate.silu() * &up;
    let ones = of(6, &[tokens, hidden]).ones_like();
    vec![
        BothWays::of(
            "rotary embedding",
            4 * tokens * hidden,
            || of_kernel(pass::rotated(&x_thd, &cos, &sin), on, rotate),
            rotate,
        ),
        BothWays::of("SiLU(gate)·up", 6 * tokens * mlp, || of_kernel(pass::gated(&gate, &up), on, gated), gated),
        BothWays::of("dropout", 8 * tokens * hidden, || dropout(&ones, 0.05, 7, 9), || &ones * mask(&ones, 0.05, 7, 9)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_cpu_both_ways_are_libtorch() {
        let sizes = FusedSizes { hidden: 128, mlp: 192, vocab: 64, tokens: 5 };
        beside_libtorch(Device::Cpu, sizes).unwrap();
    }

    #[test]
    fn a_result_that_is_far_or_no_number_is_reported() {
        let both =
            |distance| BothWays { operation: "x".into(), distance, kernel_ms: None, libtorch_ms: 1.0, bytes: 1.0 };
        assert_eq!([0.0, 0.02, f64::NAN].map(|far| both(far).print().unwrap().is_some()), [false, true, true]);
    }
}
