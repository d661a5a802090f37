//! Seeded random tensors. libtorch has one generator per process, so a [`Generator`] locks it from seeding to the last draw: no other thread
//! can draw in between.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

static HOLDER: Mutex<()> = Mutex::new(());

/// libtorch's generator, seeded and locked. A thread that holds one and asks for a second deadlocks.
#[derive(Debug)]
pub struct Generator {
    _held: MutexGuard<'static, ()>,
}

#[expect(clippy::disallowed_methods, reason = "the one place that draws")]
impl Generator {
    /// Waits for other threads to finish drawing, then seeds the generator.
    pub fn seeded(seed: u64) -> Self {
        let held = HOLDER.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(seed.cast_signed());
        Self { _held: held }
    }

    /// Normal, mean 0, standard deviation 1.
    pub fn normal(&mut self, shape: &[i64], options: (Kind, Device)) -> Tensor {
        Tensor::randn(shape, options)
    }

    /// Normal, mean 0, standard deviation 1, with `like`'s size, dtype and device.
    pub fn normal_like(&mut self, like: &Tensor) -> Tensor {
        like.randn_like()
    }

    /// Uniform in `[-bound, bound)`.
    pub fn uniform(&mut self, bound: f64, shape: &[i64], options: (Kind, Device)) -> Tensor {
        Tensor::empty(shape, options).uniform_(-bound, bound)
    }

    /// Integers from 0 to `below` - 1.
    pub fn integers(&mut self, below: i64, shape: &[i64]) -> Tensor {
        Tensor::randint(below, shape, (Kind::Int64, Device::Cpu))
    }

    /// The integers from 0 to `n` - 1 in a random order.
    pub fn permutation(&mut self, n: i64) -> Tensor {
        Tensor::randperm(n, (Kind::Int64, Device::Cpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_beside_other_threads() {
        let drawn = |seed| {
            let mut generator = Generator::seeded(seed);
            let options = (Kind::Float, Device::Cpu);
            Tensor::cat(&(0..50).map(|_| generator.normal(&[40], options)).collect::<Vec<_>>(), 0)
        };
        let alone = drawn(7);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|i| scope.spawn(move || drawn(7 + i % 2))).collect();
            for (i, thread) in threads.into_iter().enumerate() {
                assert_eq!(thread.join().unwrap() == alone, i % 2 == 0, "thread {i}");
            }
        });
    }
}
