//! AdamW (Loshchilov & Hutter, 2019), with the same equations as `torch.optim.AdamW` and accessible moments, which are
//! stored in float32 (in float64 of float64 weights), or in 8 bits between updates (Dettmers et al. 2021).

use tch::{Device, Kind, Tensor};

use crate::torch::optim::blockwise::{BLOCK, Blockwise, DynamicMap};
use crate::torch::optim::{AdamWConfig, OptimizerName};

/// Elements updated at a time: few enough to stay in the CPU's cache and to keep temporaries small. A multiple of the
/// block size.
const SLICE: i64 = 512 * BLOCK;
/// Smaller tensors keep float32 moments, as in bitsandbytes: quantizing them saves little, and they are often
/// sensitive.
const WORTH_8_BITS: u64 = 4096;

/// Names of the moments in saved files, as PyTorch has them.
const FIRST: &str = "exp_avg";
const SECOND: &str = "exp_avg_sq";

impl OptimizerName {
    /// Whether the moments of a parameter with so many numbers have 8 bits.
    fn has_8_bits(self, numbers: u64) -> bool {
        self == Self::AdamW8bit && numbers >= WORTH_8_BITS
    }

    /// Bytes of both moments of a tensor with this many elements of `element` bytes.
    pub fn moment_bytes(self, numbers: u64, element: u64) -> u64 {
        match self.has_8_bits(numbers) {
            true => 2 * Blockwise::bytes(numbers),
            false => 2 * element * numbers,
        }
    }
}

/// A trained tensor: its master weights in float32 or float64, and its gradient, accumulated over micro batches.
#[derive(Debug)]
pub struct Parameter {
    /// Name in saved files.
    pub name: String,
    /// A leaf of autograd.
    pub value: Tensor,
    /// Gradient of the current optimizer step, of `value`'s dtype and shape.
    pub gradient: Tensor,
    /// Factor on the optimizer's learning rate.
    pub rate_factor: f64,
    /// Whether weight decay applies. It does for matrices, and not for biases and norms (one axis), as in transformers' Trainer.
    decays: bool,
    /// Numbers of the whole parameter, which a piece is a part of.
    whole_numel: usize,
}

impl Parameter {
    /// Makes `value` require a gradient, which starts at 0.
    pub fn new(name: impl Into<String>, value: &Tensor) -> Self {
        Self::accumulating(name, value, value.detach().zeros_like())
    }

    /// As [`Parameter::new`], with the tensor in which the gradient is accumulated: zeros of `value`'s dtype and shape.
    pub fn accumulating(name: impl Into<String>, value: &Tensor, gradient: Tensor) -> Self {
        Self {
            name: name.into(),
            value: value.set_requires_grad(true),
            gradient,
            rate_factor: 1.0,
            decays: value.dim() > 1,
            whole_numel: value.numel(),
        }
    }

    /// The numbers `from..from + count` of the flattened parameter as one that is updated alone: value and gradient are views. It decays, and
    /// has moments of as many bits, as the whole. `from` is a multiple of [`BLOCK`], so that its 8-bit blocks are those of the whole.
    #[must_use]
    pub fn piece(&self, from: i64, count: i64) -> Self {
        assert!(from % BLOCK == 0, "a piece begins at {from}, within a block of moments");
        let part = |tensor: &Tensor| tensor.detach().view(-1).narrow(0, from, count);
        Self { name: self.name.clone(), value: part(&self.value), gradient: part(&self.gradient), ..*self }
    }

    /// Sets the learning rate to `factor` times the optimizer's.
    #[must_use]
    pub fn at_rate(self, factor: f64) -> Self {
        Self { rate_factor: factor, ..self }
    }
}

/// The Euclidean norm over the gradients of all parameters, summed in float64.
pub fn gradient_norm<'p>(parameters: impl IntoIterator<Item = &'p Parameter>) -> f64 {
    let squares: Vec<Tensor> = parameters
        .into_iter()
        .flat_map(|p| p.gradient.view(-1).split(SLICE, 0))
        .map(|slice| slice.dot(&slice).to_kind(Kind::Double))
        .collect();
    if squares.is_empty() { 0.0 } else { Tensor::stack(&squares, 0).sum(Kind::Double).double_value(&[]).sqrt() }
}

/// The first parameter with a value that is NaN or infinite.
pub fn first_not_finite(parameters: &[&Parameter]) -> Option<usize> {
    // A float64 sum of float32 numbers is finite exactly if all of them are, and of float64 numbers if these are below 1e300. It is computed
    // in slices, since a float64 sum of a whole W2 would need twice its memory.
    let sum =
        |value: &Tensor| value.view(-1).split(SLICE, 0).iter().map(|slice| slice.sum(Kind::Double)).sum::<Tensor>();
    let is_finite = |value: &Tensor| tch::no_grad(|| sum(value)).double_value(&[]).is_finite();
    parameters.iter().position(|parameter| !is_finite(&parameter.value))
}

/// AdamW over a fixed list of parameters.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    moments: Vec<Moments>,
    /// Updates made so far.
    step: i32,
}

/// The moments of a parameter, of its shape or flattened.
#[derive(Debug)]
pub struct Moments {
    /// Of the gradient.
    pub first: Moment,
    /// Of its square.
    pub second: Moment,
}

/// A moment, in as many bits as its partner.
#[derive(Debug)]
pub enum Moment {
    /// In the gradient's dtype.
    Wide(Tensor),
    EightBit(Blockwise),
}

impl AdamW {
    /// All moments start at 0.
    pub fn new<'p>(config: AdamWConfig, parameters: impl IntoIterator<Item = &'p Parameter>) -> Self {
        // Tables shared by all moments on a device.
        let mut maps: Vec<(Device, [DynamicMap; 2])> = vec![];
        let moments = |p: &Parameter| {
            let narrow = config.name.has_8_bits(p.whole_numel as u64);
            let maps = narrow.then(|| maps_on(p.value.device(), &mut maps));
            let zeros = |map: usize| Moment::zeros(&p.gradient, maps.map(|maps| &maps[map]));
            Moments { first: zeros(0), second: zeros(1) }
        };
        let moments = parameters.into_iter().map(moments).collect();
        Self { config, moments, step: 0 }
    }

    /// Updates all parameters at learning rate `rate` with gradients multiplied by `scale` (below 1 if the norm is
    /// clipped), then zeroes the gradients.
    pub fn step<'p>(&mut self, parameters: impl IntoIterator<Item = &'p mut Parameter>, rate: f64, scale: f64) {
        self.count_update();
        self.apply(parameters.into_iter().enumerate(), rate, scale);
    }

    /// The part of the update that was counted last in some parameters, each with its place in the list.
    pub fn apply<'p>(&self, parameters: impl IntoIterator<Item = (usize, &'p mut Parameter)>, rate: f64, scale: f64) {
        tch::no_grad(|| {
            for (at, parameter) in parameters {
                let moments = &self.moments[at];
                let update = self.update_of(parameter, rate, scale);
                let slices = |tensor: &Tensor| tensor.view(-1).split(SLICE, 0);
                let (values, gradients) = (slices(&parameter.value), slices(&parameter.gradient));
                let (firsts, seconds) = (moments.first.slices(), moments.second.slices());
                for (((value, gradient), first), second) in values.into_iter().zip(gradients).zip(firsts).zip(seconds) {
                    let (mut m, mut v) = (first.wide(), second.wide());
                    update.apply(value, gradient, &mut m, &mut v);
                    first.keep(&m);
                    second.keep(&v);
                }
            }
        });
    }

    /// Counts an update that something else makes, or [`AdamW::step`].
    pub fn count_update(&mut self) {
        self.step += 1;
    }

    /// The constants of a parameter's part in the update that was counted last.
    pub fn update_of(&self, parameter: &Parameter, rate: f64, scale: f64) -> Update {
        Update::new(&self.config, self.step, rate * parameter.rate_factor, scale).of(parameter)
    }

    /// The moments of each parameter.
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// Updates made so far.
    pub fn updates(&self) -> i32 {
        self.step
    }

    /// Which variant of AdamW.
    pub fn name(&self) -> OptimizerName {
        self.config.name
    }

    /// All state tensors, parameter after parameter.
    pub fn state(&self) -> Vec<&Tensor> {
        self.moments.iter().flat_map(|moments| [&moments.first, &moments.second]).flat_map(Moment::tensors).collect()
    }

    pub fn state_bytes(&self) -> usize {
        self.state().iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// The state tensors of a whole parameter, of which a piece may be updated here, in the order of [`AdamW::tensor`].
    pub fn tensors_of(&self, parameter: &Parameter) -> Vec<StateTensor> {
        let Parameter { name, value, .. } = parameter;
        let numel = value.numel() as i64;
        let tensor = |name: String, shape: Vec<i64>, kind, numbers| StateTensor { name, shape, kind, numbers };
        let moment_tensors = |moment: &str| match self.config.name.has_8_bits(numel.unsigned_abs()) {
            false => vec![tensor(format!("{name}.{moment}"), value.size(), value.kind(), 1)],
            true => vec![
                tensor(format!("{name}.{moment}.codes"), vec![numel], Kind::Uint8, 1),
                tensor(format!("{name}.{moment}.absmax"), vec![(numel + BLOCK - 1) / BLOCK], Kind::Float, BLOCK),
            ],
        };
        [FIRST, SECOND].into_iter().flat_map(moment_tensors).collect()
    }

    /// A state tensor of the `parameter`-th parameter, by its place among them.
    pub fn tensor(&self, parameter: usize, place: usize) -> &Tensor {
        let Moments { first, second, .. } = &self.moments[parameter];
        first.tensors().into_iter().chain(second.tensors()).nth(place).expect("a tensor of the state")
    }

    /// Sets the number of updates, when the state of a saved run is restored.
    pub fn set_updates(&mut self, updates: i32) {
        self.step = updates;
    }
}

/// The tables of a device: those that are there, or new ones.
fn maps_on(device: Device, all: &mut Vec<(Device, [DynamicMap; 2])>) -> &[DynamicMap; 2] {
    let at = all.iter().position(|(other, _)| *other == device).unwrap_or_else(|| {
        all.push((device, [DynamicMap::signed(device), DynamicMap::unsigned(device)]));
        all.len() - 1
    });
    &all[at].1
}

impl Moment {
    /// Zeros; in 8 bits if there is a map.
    fn zeros(like: &Tensor, map: Option<&DynamicMap>) -> Self {
        match map {
            None => Self::Wide(like.zeros_like()),
            Some(map) => Self::EightBit(Blockwise::zeros(like.numel() as i64, map)),
        }
    }

    /// Views of [`SLICE`] elements each.
    fn slices(&self) -> Vec<Self> {
        match self {
            Self::Wide(moment) => moment.view(-1).split(SLICE, 0).into_iter().map(Self::Wide).collect(),
            Self::EightBit(moment) => moment.split(SLICE).into_iter().map(Self::EightBit).collect(),
        }
    }

    /// The moment, dequantized if it is in 8 bits.
    fn wide(&self) -> Tensor {
        match self {
            Self::Wide(moment) => moment.shallow_clone(),
            Self::EightBit(moment) => moment.dequantize(),
        }
    }

    /// Stores the updated [`Moment::wide`].
    fn keep(self, updated: &Tensor) {
        if let Self::EightBit(mut moment) = self {
            moment.store(updated);
        }
    }

    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Wide(moment) => vec![moment],
            Self::EightBit(moment) => vec![&moment.codes, &moment.absmax],
        }
    }
}

/// A tensor of a whole parameter's state.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// `NAME.exp_avg` or `NAME.exp_avg_sq`; of 8-bit moments `….codes` (uint8) and `….absmax`.
    pub name: String,
    pub shape: Vec<i64>,
    pub kind: Kind,
    /// Numbers of the parameter for each element: 1, or a block's.
    numbers: i64,
}

impl StateTensor {
    /// The elements of a whole tensor, flattened, for `count` numbers of the parameter from `from` on, a multiple of [`BLOCK`].
    pub fn part(&self, whole: &Tensor, from: i64, count: i64) -> Tensor {
        whole.view(-1).narrow(0, from / self.numbers, (count + self.numbers - 1) / self.numbers)
    }
}

/// The constants of one update of a parameter.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    pub beta1: f64,
    pub beta2: f64,
    /// Factor on the gradient.
    pub scale: f64,
    /// 1 - rate·weight_decay.
    pub decay: f64,
    /// rate / (1 - beta1^t).
    pub step_size: f64,
    /// 1 / √(1 - beta2^t).
    pub second_correction: f64,
    pub eps: f64,
}

impl Update {
    fn new(config: &AdamWConfig, step: i32, rate: f64, scale: f64) -> Self {
        let [beta1, beta2] = config.betas;
        Self {
            beta1,
            beta2,
            scale,
            decay: 1.0 - rate * config.weight_decay,
            step_size: rate / (1.0 - beta1.powi(step)),
            second_correction: (1.0 - beta2.powi(step)).sqrt().recip(),
            eps: config.eps,
        }
    }

    /// Without weight decay where `parameter` has none.
    fn of(self, parameter: &Parameter) -> Self {
        if parameter.decays { self } else { Self { decay: 1.0, ..self } }
    }

    fn apply(&self, mut value: Tensor, mut gradient: Tensor, first: &mut Tensor, second: &mut Tensor) {
        let scaled = &gradient * self.scale;
        let _ = first.lerp_(&scaled, 1.0 - self.beta1);
        let _ = second.g_mul_scalar_(self.beta2).addcmul_(&(&scaled * (1.0 - self.beta2)), &scaled);
        let denominator = second.sqrt().g_mul_scalar_(self.second_correction).g_add_scalar_(self.eps);
        if self.decay != 1.0 {
            let _ = value.g_mul_scalar_(self.decay);
        }
        let _ = value.addcdiv_(&(&*first * -self.step_size), &denominator);
        let _ = gradient.zero_();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> AdamWConfig {
        AdamWConfig { name: OptimizerName::AdamW, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01 }
    }

    /// The update of Algorithm 2 in the paper, in float64, one number at a time.
    fn by_hand(gradients: &[f64], mut value: f64, weight_decay: f64) -> f64 {
        let (mut m, mut v) = (0.0, 0.0);
        for (t, g) in gradients.iter().enumerate() {
            let t = i32::try_from(t).unwrap() + 1;
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            let (m_hat, v_hat) = (m / (1.0 - 0.9f64.powi(t)), v / (1.0 - 0.95f64.powi(t)));
            value -= 0.1 * weight_decay * value;
            value -= 0.1 * m_hat / (v_hat.sqrt() + 1e-8);
        }
        value
    }

    #[test]
    fn updates_equal_the_published_algorithm_and_only_matrices_decay() {
        for (kind, rounding) in [(Kind::Float, 1e-6), (Kind::Double, 1e-14)] {
            updates_equal_the_published_algorithm(kind, rounding);
        }
    }

    fn updates_equal_the_published_algorithm(kind: Kind, rounding: f64) {
        let values = [[1, 2], [2, 1]].map(|shape| Tensor::from_slice(&[1f64, -2.0]).to_kind(kind).view(shape));
        let bias = Tensor::from_slice(&[1f64, -2.0]).to_kind(kind);
        let mut parameters = [("a", &values[0]), ("b", &values[1]), ("bias", &bias)].map(|(n, v)| Parameter::new(n, v));
        let mut adamw = AdamW::new(config(), &parameters);
        let gradients = [[0.5, -1.0], [0.1, 3.0], [-0.7, 0.2]];
        for gradient in gradients {
            for parameter in &mut parameters {
                parameter.gradient.copy_(&(Tensor::from_slice(&gradient).view_as(&parameter.value) * 4.0));
            }
            adamw.step(&mut parameters, 0.1, 0.25);
        }
        for (parameter, weight_decay) in parameters.iter().zip([0.01, 0.01, 0.0]) {
            for (i, start) in [1.0, -2.0].into_iter().enumerate() {
                let expected = by_hand(&gradients.map(|g| g[i]), start, weight_decay);
                let off = parameter.value.view(-1).double_value(&[i as i64]) - expected;
                assert!(off.abs() < rounding, "{kind:?}, {}: {off}", parameter.name);
            }
            let kinds: Vec<Kind> = adamw.tensors_of(parameter).iter().map(|moment| moment.kind).collect();
            assert_eq!(kinds, [kind; 2], "as they are saved");
        }
        assert!(adamw.state().iter().all(|moment| moment.kind() == kind));
    }

    /// An optimizer over one parameter of `n` ones.
    fn adamw(name: OptimizerName, n: i64) -> (AdamW, [Parameter; 1]) {
        let parameters = [Parameter::new("w", &Tensor::ones([n], (Kind::Float, Device::Cpu)))];
        (AdamW::new(config_of(name), &parameters), parameters)
    }

    fn config_of(name: OptimizerName) -> AdamWConfig {
        AdamWConfig { name, ..config() }
    }

    /// A different gradient for each step, with elements of all magnitudes.
    fn gradient(n: i64, step: i32) -> Tensor {
        let place = Tensor::arange(n, (Kind::Float, Device::Cpu));
        place.sin().pow_tensor_scalar(3) * f64::from(step + 1)
    }

    /// The state of the only parameter, by name.
    fn copied_state(adamw: &AdamW, parameter: &Parameter) -> Vec<(String, Tensor)> {
        let tensors = adamw.tensors_of(parameter);
        let copy = |(place, planned): (usize, StateTensor)| {
            let tensor = adamw.tensor(0, place).copy();
            assert_eq!((tensor.size(), tensor.kind()), (planned.shape, planned.kind), "{}", planned.name);
            (planned.name, tensor)
        };
        tensors.into_iter().enumerate().map(copy).collect()
    }

    fn restore(adamw: &mut AdamW, updates: i32, state: &[(String, Tensor)]) {
        adamw.set_updates(updates);
        for (place, (_, tensor)) in state.iter().enumerate() {
            adamw.tensor(0, place).shallow_clone().copy_(tensor);
        }
    }

    #[test]
    fn a_restored_state_goes_on_bit_for_bit() {
        for name in [OptimizerName::AdamW, OptimizerName::AdamW8bit] {
            let run = |restart: bool| {
                let (mut adamw, mut parameters) = adamw(name, 300_000);
                for step in 0..4 {
                    if restart && step == 2 {
                        let saved = copied_state(&adamw, &parameters[0]);
                        adamw = AdamW::new(adamw.config, &parameters);
                        restore(&mut adamw, 2, &saved);
                    }
                    parameters[0].gradient.copy_(&gradient(300_000, step));
                    adamw.step(&mut parameters, 0.1, 1.0);
                }
                (parameters[0].value.copy(), copied_state(&adamw, &parameters[0]))
            };
            assert_eq!(run(false), run(true), "{name}");
        }
    }

    /// Dequantizes 8-bit codes one number at a time.
    fn dequantized(codes: &Tensor, absmax: &Tensor, map: &[f32]) -> Vec<f32> {
        let (codes, absmax) = (Vec::<u8>::try_from(codes).unwrap(), Vec::<f32>::try_from(absmax).unwrap());
        codes.iter().enumerate().map(|(i, &code)| map[usize::from(code)] * absmax[i / 256]).collect()
    }

    /// Codes and absmax, one number at a time: the code nearest to the nearest of 65,536 points.
    fn quantized(values: &Tensor, map: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let values = Vec::<f32>::try_from(values).unwrap();
        let absmax: Vec<f32> =
            values.chunks(256).map(|block| block.iter().fold(0f32, |most, x| most.max(x.abs()))).collect();
        let code = |(i, x): (usize, &f32)| {
            let point = ((x * (1.0 / absmax[i / 256]) + 1.0) * 32767.5 + 0.5).floor() / 32767.5 - 1.0;
            let right = map.partition_point(|&code| code < point).clamp(1, 255);
            let nearer_left = point - map[right - 1] <= map[right] - point;
            u8::try_from(right - usize::from(nearer_left)).unwrap()
        };
        (values.iter().enumerate().map(code).collect(), absmax)
    }

    #[test]
    fn an_8_bit_update_is_a_float32_update_between_dequantised_and_quantised_moments() {
        let n = SLICE + 5000; // two slices, and a partial last block
        let (mut eight_bit, mut parameters) = adamw(OptimizerName::AdamW8bit, n);
        let (mut oracle, mut its_parameters) = adamw(OptimizerName::AdamW, n);
        let maps = [DynamicMap::signed(Device::Cpu), DynamicMap::unsigned(Device::Cpu)];
        let maps = maps.map(|map| Vec::<f32>::try_from(&map.codes).unwrap());
        for step in 0..3 {
            let before = copied_state(&eight_bit, &parameters[0]);
            let moment = |i: usize| dequantized(&before[2 * i].1, &before[2 * i + 1].1, &maps[i]);
            let moments = ["w.exp_avg", "w.exp_avg_sq"].map(str::to_owned).into_iter();
            let moments: Vec<_> = moments.enumerate().map(|(i, n)| (n, Tensor::from_slice(&moment(i)))).collect();
            restore(&mut oracle, step, &moments);
            for (adamw, parameters) in [(&mut eight_bit, &mut parameters), (&mut oracle, &mut its_parameters)] {
                parameters[0].gradient.copy_(&gradient(n, step));
                adamw.step(parameters, 0.1, 0.5);
            }
            assert_eq!(parameters[0].value, its_parameters[0].value, "step {step}");
            let after = copied_state(&eight_bit, &parameters[0]);
            let expected = copied_state(&oracle, &its_parameters[0]);
            for (i, map) in maps.iter().enumerate() {
                let (codes, absmax) = quantized(&expected[i].1, map);
                assert_eq!(Vec::<u8>::try_from(&after[2 * i].1).unwrap(), codes, "{} at step {step}", expected[i].0);
                assert_eq!(Vec::<f32>::try_from(&after[2 * i + 1].1).unwrap(), absmax);
            }
        }
    }

    #[test]
    fn pieces_are_updated_as_the_whole() {
        for name in [OptimizerName::AdamW, OptimizerName::AdamW8bit] {
            let n = 70_000;
            let bounds = [0, 65_536, 65_536 + 2048, n]; // the last two pieces alone would have too few numbers for 8 bits, or a part of a block
            let run = |in_pieces: bool| {
                let (_, [parameter]) = adamw(name, n);
                let mut parameters = match in_pieces {
                    true => bounds.windows(2).map(|at| parameter.piece(at[0], at[1] - at[0])).collect(),
                    false => vec![parameter.piece(0, n)],
                };
                let mut adamw = AdamW::new(config_of(name), &parameters);
                for step in 0..3 {
                    parameter.gradient.shallow_clone().copy_(&gradient(n, step));
                    adamw.step(&mut parameters, 0.1, 0.5);
                }
                let tensors = adamw.tensors_of(&parameter);
                let joined = |place| {
                    Tensor::cat(&(0..parameters.len()).map(|at| adamw.tensor(at, place)).collect::<Vec<_>>(), 0)
                };
                let state: Vec<Tensor> = (0..tensors.len()).map(joined).collect();
                let shapes: Vec<Vec<i64>> = tensors.into_iter().map(|tensor| tensor.shape).collect();
                assert_eq!(state.iter().map(Tensor::size).collect::<Vec<_>>(), shapes);
                (parameter.value.detach().copy(), state)
            };
            assert_eq!(run(true), run(false), "{name}");
        }
    }

    #[test]
    fn moments_in_8_bits_take_little_more_than_a_quarter_where_they_pay() {
        let bytes = |name: OptimizerName, n: i64| {
            let bytes = adamw(name, n).0.state_bytes();
            assert_eq!(name.moment_bytes(n.unsigned_abs(), 4), bytes as u64, "as planned");
            bytes
        };
        let ratio = bytes(OptimizerName::AdamW8bit, 1 << 20) as f64 / bytes(OptimizerName::AdamW, 1 << 20) as f64;
        assert!(ratio <= 0.27, "{ratio}");
        assert_eq!(bytes(OptimizerName::AdamW8bit, 4095), bytes(OptimizerName::AdamW, 4095));
        assert!(bytes(OptimizerName::AdamW8bit, 4096) < bytes(OptimizerName::AdamW, 4096));
    }

    #[test]
    fn the_norm_is_over_all_parameters() {
        let (a, b) =
            (Tensor::zeros([2], (Kind::Float, Device::Cpu)), Tensor::zeros([1, 1], (Kind::Float, Device::Cpu)));
        let mut parameters = [Parameter::new("a", &a), Parameter::new("b", &b)];
        let _ = parameters[0].gradient.fill_(2.0);
        let _ = parameters[1].gradient.fill_(1.0);
        assert!((gradient_norm(&parameters) - 3.0).abs() < 1e-12);
    }
}
