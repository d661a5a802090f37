//! AdamW (Loshchilov & Hutter, 2019), equation for equation as `torch.optim.AdamW`, with its moments in sight.

use tch::{Kind, Tensor};

use crate::torch::optim::OptimizerConfig;

/// Elements updated at a time: what an update touches stays in the cache, and temporaries stay small.
const SLICE: i64 = 1 << 17;

/// What an optimizer trains: a float32 master, and its gradient, accumulated over micro batches.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in the file it is saved to.
    pub name: String,
    /// The value. A leaf of autograd.
    pub value: Tensor,
    /// The gradient of this optimizer step so far; of `value`'s shape, float32.
    pub gradient: Tensor,
    /// Its learning rate is the optimizer's times this.
    pub rate_factor: f64,
}

impl Parameter {
    /// Marks `value` as trained; the gradient starts at 0.
    pub fn new(name: impl Into<String>, value: &Tensor) -> Self {
        Self {
            name: name.into(),
            value: value.set_requires_grad(true),
            gradient: value.detach().zeros_like(),
            rate_factor: 1.0,
        }
    }

    /// The same with a learning rate `factor` times the optimizer's.
    #[must_use]
    pub fn at_rate(self, factor: f64) -> Self {
        Self { rate_factor: factor, ..self }
    }
}

/// The Euclidean norm over the gradients of all parameters, summed in float64.
pub fn gradient_norm(parameters: &[Parameter]) -> f64 {
    let squares: Vec<Tensor> = parameters
        .iter()
        .flat_map(|p| p.gradient.view(-1).split(SLICE, 0))
        .map(|slice| slice.dot(&slice).to_kind(Kind::Double))
        .collect();
    if squares.is_empty() { 0.0 } else { Tensor::stack(&squares, 0).sum(Kind::Double).double_value(&[]).sqrt() }
}

/// AdamW over a fixed list of parameters.
#[derive(Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    moments: Vec<Moments>,
    /// Updates made.
    step: i32,
}

#[derive(Debug)]
struct Moments {
    name: String,
    first: Tensor,
    second: Tensor,
}

impl AdamW {
    /// Moments at 0 for each of `parameters`.
    pub fn new(config: OptimizerConfig, parameters: &[Parameter]) -> Self {
        let moments = parameters.iter().map(|p| Moments {
            name: p.name.clone(),
            first: p.gradient.zeros_like(),
            second: p.gradient.zeros_like(),
        });
        Self { config, moments: moments.collect(), step: 0 }
    }

    /// One update at learning rate `rate`, with every gradient multiplied by `scale` (1, or less where the norm is clipped);
    /// gradients are 0 afterwards.
    pub fn step(&mut self, parameters: &mut [Parameter], rate: f64, scale: f64) {
        self.step += 1;
        tch::no_grad(|| {
            for (parameter, moments) in parameters.iter_mut().zip(&mut self.moments) {
                let update = Update::new(&self.config, self.step, rate * parameter.rate_factor, scale);
                let slices = |tensor: &Tensor| tensor.view(-1).split(SLICE, 0);
                let (values, gradients) = (slices(&parameter.value), slices(&parameter.gradient));
                let (firsts, seconds) = (slices(&moments.first), slices(&moments.second));
                for (((value, gradient), first), second) in values.into_iter().zip(gradients).zip(firsts).zip(seconds) {
                    update.apply(value, gradient, first, second);
                }
            }
        });
    }

    /// Updates made.
    pub fn updates(&self) -> i32 {
        self.step
    }

    /// Every state tensor by name, for saving.
    pub fn state(&self) -> Vec<(String, &Tensor)> {
        let of_one = |m: &Moments| [format!("{}.exp_avg", m.name), format!("{}.exp_avg_sq", m.name)];
        let tensors = self.moments.iter().flat_map(|m| [&m.first, &m.second]);
        self.moments.iter().flat_map(of_one).zip(tensors).collect()
    }

    /// Goes on from a saved state: `read` gives the tensor of a name and shape.
    ///
    /// # Errors
    /// Whatever `read` says.
    pub fn restore<E>(
        &mut self,
        updates: i32,
        mut read: impl FnMut(&str, &[i64]) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        for moments in &mut self.moments {
            let name = &moments.name;
            moments.first.copy_(&read(&format!("{name}.exp_avg"), &moments.first.size())?);
            moments.second.copy_(&read(&format!("{name}.exp_avg_sq"), &moments.second.size())?);
        }
        self.step = updates;
        Ok(())
    }
}

/// The constants of one update.
struct Update {
    beta1: f64,
    beta2: f64,
    scale: f64,
    /// 1 - rate·weight_decay.
    decay: f64,
    /// rate / (1 - beta1^t).
    step_size: f64,
    /// 1 / √(1 - beta2^t).
    second_correction: f64,
    eps: f64,
}

impl Update {
    fn new(config: &OptimizerConfig, step: i32, rate: f64, scale: f64) -> Self {
        let [beta1, beta2] = config.betas.map(crate::numbers::Fraction::get);
        Self {
            beta1,
            beta2,
            scale,
            decay: 1.0 - rate * config.weight_decay.get(),
            step_size: rate / (1.0 - beta1.powi(step)),
            second_correction: (1.0 - beta2.powi(step)).sqrt().recip(),
            eps: config.eps.get(),
        }
    }

    fn apply(&self, mut value: Tensor, mut gradient: Tensor, mut first: Tensor, mut second: Tensor) {
        let scaled = &gradient * self.scale;
        let _ = first.lerp_(&scaled, 1.0 - self.beta1);
        let _ = second.g_mul_scalar_(self.beta2).addcmul_(&(&scaled * (1.0 - self.beta2)), &scaled);
        let denominator = second.sqrt().g_mul_scalar_(self.second_correction).g_add_scalar_(self.eps);
        if self.decay != 1.0 {
            let _ = value.g_mul_scalar_(self.decay);
        }
        let _ = value.addcdiv_(&(&first * -self.step_size), &denominator);
        let _ = gradient.zero_();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn config() -> OptimizerConfig {
        let toml = "learning_rate = 0.1\nweight_decay = 0.01\nbetas = [0.9, 0.95]";
        toml::from_str(toml).unwrap()
    }

    /// The update as Algorithm 2 of the paper writes it, in float64, one number at a time.
    fn by_hand(gradients: &[f64], mut value: f64) -> f64 {
        let (mut m, mut v) = (0.0, 0.0);
        for (t, g) in gradients.iter().enumerate() {
            let t = i32::try_from(t).unwrap() + 1;
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            let (m_hat, v_hat) = (m / (1.0 - 0.9f64.powi(t)), v / (1.0 - 0.95f64.powi(t)));
            value -= 0.1 * 0.01 * value;
            value -= 0.1 * m_hat / (v_hat.sqrt() + 1e-8);
        }
        value
    }

    #[test]
    fn updates_equal_the_published_algorithm() {
        let value = Tensor::from_slice(&[1f32, -2.0]);
        let mut parameters = [Parameter::new("w", &value)];
        let mut adamw = AdamW::new(config(), &parameters);
        let gradients = [[0.5, -1.0], [0.1, 3.0], [-0.7, 0.2]];
        for gradient in gradients {
            parameters[0].gradient.copy_(&(Tensor::from_slice(&gradient) * 4.0));
            adamw.step(&mut parameters, 0.1, 0.25);
        }
        for (i, start) in [1.0, -2.0].into_iter().enumerate() {
            let expected = by_hand(&gradients.map(|g| g[i]), start);
            assert!((value.double_value(&[i as i64]) - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn a_restored_state_goes_on_bit_for_bit() {
        let run = |restart: bool| {
            let value = Tensor::ones([300_000], (Kind::Float, Device::Cpu));
            let mut parameters = [Parameter::new("w", &value)];
            let mut adamw = AdamW::new(config(), &parameters);
            for step in 0..4 {
                if restart && step == 2 {
                    let saved: Vec<(String, Tensor)> = adamw.state().into_iter().map(|(n, t)| (n, t.copy())).collect();
                    adamw = AdamW::new(config(), &parameters);
                    let read =
                        |name: &str, _: &[i64]| Ok::<_, ()>(saved.iter().find(|(n, _)| n == name).unwrap().1.copy());
                    adamw.restore(2, read).unwrap();
                }
                let gradient = Tensor::arange(300_000, (Kind::Float, Device::Cpu)).sin() * f64::from(step + 1);
                parameters[0].gradient.copy_(&gradient);
                adamw.step(&mut parameters, 0.1, 1.0);
            }
            value
        };
        assert_eq!(run(false), run(true));
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
