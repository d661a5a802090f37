//! Promise: the kernels that stand for libtorch's calls on a GPU (the optimizer's update, the norm of gradients, weights from their codes,
//! masks of dropout) compute what these calls compute, whatever the sizes. They run in the emulator of `cuda_kernels`.
#![cfg(target_os = "linux")]

use medusa::fused::optim::{self, TableWork};
use medusa::fused::{dequantize, dropout, pass};
use medusa::model::stored::format::Codes;
use medusa::model::stored::nf4::{AbsmaxBits, BlockScales, Nf4, Tables};
use medusa::model::stored::{Quantization, Quantizer};
use medusa::nvidia::kernels::KernelDtype;
use medusa::nvidia::launch::Launch;
use medusa::torch::Generator;
use medusa::torch::dropout::{MaskStream, mask};
use medusa::torch::optim::adamw::{self, AdamW, Parameter};
use medusa::torch::optim::{AdamWConfig, OptimizerName};
use tch::{Device, Kind, Tensor};

use crate::cuda_kernels::emulator::{Emulator, Memory, Order};

const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];
const ORDERS: [Order; 2] = [Order::Forwards, Order::Backwards];
/// Sizes of parameters: none, one, less and more than a block of moments, a chunk of the kernels and its end, several chunks.
const SIZES: [&[i64]; 8] = [&[0], &[1], &[3, 5], &[257], &[4096], &[16_384], &[37, 1000], &[8197]];

fn run(launches: &[Launch], kind: Kind, order: Order) {
    let element = KernelDtype::of(kind).unwrap_or(KernelDtype::BFloat16);
    Emulator { element, head_size: 0 }.run_all(launches, order);
}

fn normal(seed: u64, size: &[i64]) -> Tensor {
    Generator::seeded(seed).normal(size, (Kind::Float, Device::Cpu))
}

/// Parameters of all [`SIZES`] in two groups, in memory that ends where they end; the last begins between two multiples of 16 bytes.
fn parameters(memory: &Memory) -> Vec<Parameter> {
    let value = |(at, size): (usize, &&[i64])| {
        let numbers = normal(at as u64, size);
        let value = match at + 1 == SIZES.len() {
            true => memory.poisoned(&[size[0] + 1], Kind::Float).narrow(0, 1, size[0]),
            false => memory.poisoned(size, Kind::Float),
        };
        value.shallow_clone().copy_(&numbers);
        Parameter::new(format!("p{at}"), &value).at_rate(if at % 2 == 0 { 1.0 } else { 0.1 })
    };
    SIZES.iter().enumerate().map(value).collect()
}

fn optimizer(name: OptimizerName, beta1: f64, parameters: &[Parameter]) -> AdamW {
    AdamW::new(AdamWConfig { name, betas: [beta1, 0.95], eps: 1e-8, weight_decay: 0.01 }, parameters)
}

/// Gradients of all magnitudes.
fn set_gradients(parameters: &[Parameter], step: u64) {
    for (at, parameter) in parameters.iter().enumerate() {
        let gradient = normal(100 * (step + 1) + at as u64, &parameter.value.size()).pow_tensor_scalar(3) * 0.01;
        parameter.gradient.shallow_clone().copy_(&gradient);
    }
}

/// The largest distance of two float32 tensors in units of the last bit.
fn units_apart(a: &Tensor, b: &Tensor) -> i64 {
    if a.numel() == 0 {
        return 0;
    }
    let ordered = |x: &Tensor| {
        let bits = x.detach().contiguous().view_dtype(Kind::Int).to_kind(Kind::Int64);
        bits.where_self(&bits.ge(0), &(-(&bits) - (1i64 << 31)))
    };
    (ordered(a) - ordered(b)).abs().max().int64_value(&[])
}

fn all(parameters: &[Parameter]) -> Vec<&Parameter> {
    parameters.iter().collect()
}

/// With the matrix of 37,000 numbers in two, as processes share it: the second is too short for 8-bit moments of its own.
fn in_pieces(parameters: Vec<Parameter>) -> Vec<Parameter> {
    let cut = |parameter: Parameter| match parameter.value.numel() {
        37_000 => vec![parameter.piece(0, 34_048), parameter.piece(34_048, 2_952)],
        _ => vec![parameter],
    };
    parameters.into_iter().flat_map(cut).collect()
}

#[test]
fn an_update_is_the_same_for_every_size_and_group_and_for_pieces() {
    let memory = Memory::default();
    for ((name, beta1), order) in [
        ((OptimizerName::AdamW, 0.9), ORDERS[0]),
        ((OptimizerName::AdamW, 0.3), ORDERS[1]),
        ((OptimizerName::AdamW8bit, 0.9), ORDERS[1]),
        ((OptimizerName::AdamW8bit, 0.9), ORDERS[0]),
    ] {
        let (ours, mut theirs) = (in_pieces(parameters(&memory)), in_pieces(parameters(&memory)));
        let (mut kernels, mut oracle) = (optimizer(name, beta1, &ours), optimizer(name, beta1, &theirs));
        for step in 0..3 {
            set_gradients(&ours, step);
            set_gradients(&theirs, step);
            let TableWork { launches, tensors: _tables } = optim::update(&mut kernels, &all(&ours), 0.01, 0.5);
            run(&launches, Kind::Float, order);
            oracle.step(&mut theirs, 0.01, 0.5);
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let what = format!("{name} {order:?} step {step}, {:?}", ours.value.size());
                // On some CPUs libtorch's square root is not the nearest: each update, of size 0.1 at most, may be one bit away.
                let bits = (step + 1) as f64 * 2f64.powi(-23);
                let far = (&ours.value - &theirs.value).abs() - (theirs.value.abs() + 0.1) * bits;
                assert!(far.numel() == 0 || far.max().double_value(&[]) <= 0.0, "{what}");
                assert_eq!(ours.gradient.abs().sum(Kind::Float).double_value(&[]), 0.0, "{what}");
            }
            for (place, (ours, theirs)) in kernels.state().into_iter().zip(oracle.state()).enumerate() {
                match ours.kind() {
                    Kind::Uint8 => assert_eq!(ours, theirs, "tensor {place} of the state at step {step}"),
                    _ => assert!(units_apart(ours, theirs) <= 1, "tensor {place} of the state at step {step}"),
                }
            }
        }
        assert_eq!(kernels.updates(), 3);
    }
}

/// The kernels among names that are counted for a GPU, and how many tables are copied there.
fn kernels_and_uploads(counted: &[&'static str]) -> (Vec<&'static str>, usize) {
    let beside = ["upload", "zeros", "full", "read"];
    let kernels = counted.iter().copied().filter(|name| !beside.contains(name)).collect();
    (kernels, counted.iter().filter(|&&name| name == "upload").count())
}

#[test]
fn what_is_counted_for_a_gpu_is_what_is_launched_there() {
    let memory = Memory::default();
    let parameters = parameters(&memory);
    let launched = |work: &TableWork| work.launches.iter().map(|launch| launch.kernel.name).collect::<Vec<_>>();
    for name in [OptimizerName::AdamW, OptimizerName::AdamW8bit] {
        let mut optimizer = optimizer(name, 0.9, &parameters);
        let counted = kernels_and_uploads(optim::update_kernels(&optimizer));
        let work = optim::update(&mut optimizer, &all(&parameters), 0.01, 0.5);
        assert_eq!(counted, (launched(&work), work.tensors.len()), "{name}");
    }
    assert_eq!(kernels_and_uploads(&optim::OF_NORM), (launched(&optim::norm(&all(&parameters)).0), 1));
    assert_eq!(kernels_and_uploads(&optim::OF_FINITE), (launched(&optim::finite(&all(&parameters)).0), 1));
}

#[test]
fn the_norm_of_gradients_is_that_of_libtorch_and_the_same_in_any_order_from_blocks() {
    let memory = Memory::default();
    let parameters = parameters(&memory);
    set_gradients(&parameters, 0);
    let norms = ORDERS.map(|order| {
        let (work, norm) = optim::norm(&all(&parameters));
        run(&work.launches, Kind::Float, order);
        norm.double_value(&[0])
    });
    let expected = adamw::gradient_norm(&parameters);
    assert_eq!(norms[0].to_bits(), norms[1].to_bits());
    assert!((norms[0] - expected).abs() < 1e-6 * expected, "{norms:?}, {expected}");
    for broken in [f64::NAN, f64::INFINITY] {
        let _ = parameters[6].gradient.get(36).narrow(0, 999, 1).fill_(broken);
        let (work, norm) = optim::norm(&all(&parameters));
        run(&work.launches, Kind::Float, ORDERS[0]);
        assert!(!norm.double_value(&[0]).is_finite());
    }
}

#[test]
fn the_first_parameter_that_is_not_finite_is_found() {
    let memory = Memory::default();
    let parameters = parameters(&memory);
    let found = |order| {
        let (work, first) = optim::finite(&all(&parameters));
        run(&work.launches, Kind::Float, order);
        let first = usize::try_from(first.int64_value(&[0])).expect("not below 0");
        assert_eq!(Some(first).filter(|&at| at < SIZES.len()), adamw::first_not_finite(&all(&parameters)));
        first
    };
    assert!(found(ORDERS[0]) >= SIZES.len());
    for (at, broken) in [(7, f64::NAN), (6, f64::INFINITY), (4, f64::NEG_INFINITY), (1, f64::NAN)] {
        let last = parameters[at].value.numel() as i64 - 1;
        let _ = parameters[at].value.detach().view(-1).narrow(0, last, 1).fill_(broken);
        assert_eq!(ORDERS.map(found), [at; 2]);
    }
}

#[test]
fn the_launches_of_an_optimizer_step_do_not_grow_with_the_parameters() {
    let many = |count: usize, size: i64| -> Vec<Parameter> {
        (0..count).map(|at| Parameter::new(format!("p{at}"), &normal(0, &[size]))).collect()
    };
    for (name, size, launches) in
        [(OptimizerName::AdamW, 5, 1), (OptimizerName::AdamW8bit, 5, 1), (OptimizerName::AdamW8bit, 4096, 1)]
    {
        for count in [1, 3, 500] {
            let parameters = many(count, size);
            let mut optimizer = optimizer(name, 0.9, &parameters);
            assert_eq!(optim::update(&mut optimizer, &all(&parameters), 0.1, 1.0).launches.len(), launches, "{name}");
            assert_eq!(optim::norm(&all(&parameters)).0.launches.len(), 2);
            assert_eq!(optim::finite(&all(&parameters)).0.launches.len(), 1);
        }
    }
    let mixed: Vec<Parameter> = many(3, 5).into_iter().chain(many(2, 5000)).collect();
    let mut optimizer = optimizer(OptimizerName::AdamW8bit, 0.9, &mixed);
    assert_eq!(optim::update(&mut optimizer, &all(&mixed), 0.1, 1.0).launches.len(), 2);
}

/// Launches by libtorch for each further slice of 131,072 numbers.
#[cfg(target_arch = "x86_64")]
fn launches_a_slice(work: impl Fn(Parameter)) -> usize {
    use crate::launches::calls::CallRecorder;
    let launches = |slices: i64| {
        let parameter = Parameter::new("w", &normal(0, &[slices, 1 << 17]));
        let recorder = CallRecorder::new();
        work(parameter);
        recorder.so_far().values().sum::<usize>()
    };
    launches(3) - launches(2)
}

#[test]
#[cfg(target_arch = "x86_64")]
fn libtorch_launches_more_for_every_slice() {
    let update = |name| {
        launches_a_slice(move |mut parameter| {
            let mut optimizer = optimizer(name, 0.9, std::slice::from_ref(&parameter));
            optimizer.step([&mut parameter], 0.1, 1.0);
        })
    };
    let counted = [
        update(OptimizerName::AdamW),
        update(OptimizerName::AdamW8bit),
        launches_a_slice(|parameter| assert!(adamw::gradient_norm([&parameter]) == 0.0)),
        launches_a_slice(|parameter| assert!(adamw::first_not_finite(&[&parameter]).is_none())),
    ];
    assert_eq!(counted, [12, 42, 2, 2]);
}

#[test]
fn nf4_weights_are_the_numbers_of_libtorch() {
    let (memory, tables) = (Memory::default(), Tables::new(Device::Cpu));
    for ((at, size), bits) in [[1, 1], [3, 67], [64, 64], [129, 128], [8, 2200]]
        .into_iter()
        .enumerate()
        .flat_map(|size| [(size, AbsmaxBits::Eight), (size, AbsmaxBits::ThirtyTwo)])
    {
        let weight_oi = normal(at as u64, &size);
        let _ = weight_oi.get(0).zero_();
        let nf4 = Nf4::quantize(&weight_oi, &tables, bits);
        let absmax = match &nf4.scales {
            BlockScales::Float32(absmax) => dequantize::Absmax::Float32(absmax),
            BlockScales::EightBit { differences, mean } => dequantize::Absmax::EightBit { differences, mean },
        };
        for (kind, order) in KINDS.into_iter().zip(ORDERS.into_iter().cycle()) {
            let y_oi = memory.poisoned(&size, kind);
            run(&[dequantize::nf4(&nf4.pairs, &nf4.table, absmax, &y_oi)], kind, order);
            assert_eq!(y_oi, nf4.dequantize(size, kind), "{size:?} {bits:?} {kind:?}");
        }
    }
}

#[test]
fn the_weights_of_a_backbone_are_the_numbers_of_libtorch() {
    let memory = Memory::default();
    for (at, size) in [[1, 1], [3, 67], [5, 8], [16, 2048], [3, 2056], [2, 4099]].into_iter().enumerate() {
        for quantization in [Quantization::Nf4, Quantization::Int8] {
            let weight = Quantizer::new(quantization, Device::Cpu).quantize(&normal(at as u64, &size));
            for (kind, order) in KINDS.into_iter().zip(ORDERS.into_iter().cycle()) {
                let y_oi = memory.poisoned(&size, kind);
                run(&[weight.launch(&y_oi).expect("a kernel")], kind, order);
                assert_eq!(y_oi, weight.by_libtorch(kind), "{size:?} {quantization} {kind:?}");
            }
        }
    }
}

#[test]
fn dropout_leaves_out_the_same_on_every_device() {
    let memory = Memory::default();
    for (at, size) in [1i64, 7, 8, 31, 32, 33, 8192, 20_001].into_iter().enumerate() {
        for (kind, order) in KINDS.into_iter().zip(ORDERS.into_iter().cycle()) {
            let (p, seed, stream) = ([0.0, 0.05, 0.5, 0.99][at % 4], u64::MAX - at as u64, (7u64 << 40) + at as u64);
            let drawn = memory.poisoned(&[size], kind);
            run(&[dropout::draw(&drawn, &MaskStream::new(p, seed, stream))], kind, order);
            assert_eq!(drawn, mask(&drawn, p, seed, stream), "{size} {kind:?}");
        }
    }
}

/// The largest difference, in units of the last bit of a dtype with numbers up to 8.
fn assert_near(got: &Tensor, expected: &Tensor, what: &str) {
    let unit = if got.kind() == Kind::BFloat16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let [got, expected] = [got, expected].map(|tensor| tensor.to_kind(Kind::Double));
    let far = ((got - &expected).abs() / (expected.abs() + 0.1)).max().double_value(&[]);
    assert!(far <= 2.0 * unit, "{what}: {far}");
}

#[test]
fn heads_are_rotated_as_by_libtorch() {
    let memory = Memory::default();
    // Rows, tokens, heads, all heads beside them, D, R: also halves that are no multiple of 8, numbers behind R, and one row of positions for all.
    let shapes = [
        [2, 9, 3, 5, 16, 16],
        [1, 1, 1, 1, 64, 64],
        [3, 5, 2, 3, 24, 20],
        [2, 7, 4, 4, 40, 16],
        [1, 130, 2, 6, 128, 128],
    ];
    for (at, [b, t, heads, beside, d, r]) in shapes.into_iter().enumerate() {
        for ((kind, order), has_rows) in KINDS[..2].iter().copied().zip(ORDERS).zip([at % 2 == 0, at % 2 != 0]) {
            let what = format!("{:?} {kind:?} {order:?}", shapes[at]);
            let of = |seed, size: &[i64]| memory.tensor(&normal(seed, size).to_kind(kind));
            let x_bthd = of(1, &[b, t, beside, d]).narrow(2, beside - heads, heads);
            let places = if has_rows { vec![b, t, 1, r] } else { vec![t, 1, r] };
            let (cos, sin) = (of(2, &places), of(3, &places));
            let roll = |x: &Tensor| (x * &cos).addcmul(&x.roll([r / 2], [-1]), &sin);
            let rest_bthd = x_bthd.narrow(-1, r, d - r);
            let expected = Tensor::cat(&[roll(&x_bthd.narrow(-1, 0, r)), rest_bthd], -1);
            let y_bthd = memory.poisoned(&[b, t, heads, d], kind);
            run(&[pass::rotate(&x_bthd, &y_bthd, &cos, &sin).expect("rows evenly apart")], kind, order);
            assert_near(&y_bthd, &expected, &what);
            run(&[pass::rotate(&x_bthd, &x_bthd, &cos, &sin).expect("rows evenly apart")], kind, order);
            assert_eq!(x_bthd, y_bthd, "in place, {what}");
        }
    }
}

#[test]
fn the_mlp_is_gated_as_by_libtorch() {
    let memory = Memory::default();
    for (at, [n, width]) in [[1, 1], [3, 7], [2, 64], [5, 2056], [2, 4099]].into_iter().enumerate() {
        for (kind, order) in KINDS[..2].iter().copied().zip(ORDERS) {
            let both_n2i = memory.tensor(&(normal(at as u64, &[n, 2 * width]) * 3.0).to_kind(kind));
            let [gate, up] = [0, 1].map(|half| both_n2i.narrow(1, half * width, width));
            let y_ni = memory.poisoned(&[n, width], kind);
            run(&[pass::silu_up(&gate, &up, &y_ni).expect("rows evenly apart")], kind, order);
            assert_near(&y_ni, &(gate.silu() * up), &format!("{n} rows of {width}, {kind:?}"));
        }
    }
}

#[test]
fn rows_that_are_not_evenly_apart_are_left_to_libtorch() {
    let x_bthd = normal(0, &[2, 3, 4, 8]).to_kind(Kind::BFloat16);
    let [cos, sin] = [1, 2].map(|seed| normal(seed, &[3, 1, 8]).to_kind(Kind::BFloat16));
    assert!(pass::rotate(&x_bthd.transpose(1, 2), &x_bthd, &cos, &sin).is_none(), "heads");
    assert!(pass::rotate(&x_bthd.narrow(1, 0, 2), &x_bthd, &cos, &sin).is_none(), "2 tokens of 3");
    let [of_rows, of_both] = [[2, 1, 1, 8], [2, 3, 1, 8]].map(|size| normal(3, &size).to_kind(Kind::BFloat16));
    assert!(pass::rotate(&x_bthd, &x_bthd, &of_rows, &of_rows).is_none(), "an angle for each row, for its 3 tokens");
    assert!(pass::rotate(&x_bthd, &x_bthd, &of_both, &of_both).is_some(), "an angle for each token of each row");
    assert!(pass::rotate(&x_bthd, &x_bthd, &cos.to_kind(Kind::Half), &sin).is_none(), "another dtype");
    let gate = x_bthd.transpose(2, 3);
    assert!(pass::silu_up(&gate, &gate, &x_bthd).is_none(), "columns");
}
