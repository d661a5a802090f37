//! Products of 16-bit matrices whose results are needed in float32. All devices sum in float32; they differ in what they store. Those of
//! float64 matrices stay in float64.

use tch::{Device, Kind, Tensor};

use super::{accelerator, onednn, rehearsal, wide};

/// How such a product is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float32Products {
    /// In 16 bits, and cast afterwards. The oracle of the other.
    Cast,
    /// In float32, by operators that libtorch has for NVIDIA GPUs of compute capability 8.0 or higher (`mm.dtype`, `addmm.dtype_out`).
    Stored,
}

impl Float32Products {
    /// How a device stores them.
    pub fn on(device: Device) -> Self {
        if accelerator::is_ampere(device) { Self::Stored } else { Self::Cast }
    }

    /// `a·b` in float32; the matrices have one dtype.
    pub fn of(self, a: &Tensor, b: &Tensor) -> Tensor {
        match self {
            Self::Cast => rehearsal::in_place_of(&["aten::mm.dtype"], || a.matmul(b).to_kind(wide(a.kind()))),
            Self::Stored => a.mm_dtype(b, Kind::Float),
        }
    }

    /// `sum += a·b`, `sum` in float32 (float64 of float64); the matrices have one dtype.
    pub fn add(self, sum: &Tensor, a: &Tensor, b: &Tensor) {
        let mut sum = sum.shallow_clone();
        let _ = match self {
            _ if a.kind() == sum.kind() => sum.addmm_(a, b),
            Self::Cast => {
                rehearsal::in_place_of(&["aten::addmm.dtype_out"], || sum.g_add_(&a.matmul(b).to_kind(Kind::Float)))
            }
            Self::Stored => sum.addmm_dtype_out(&sum, a, b, Kind::Float),
        };
    }

    /// `x·Wᵀ` in float32, plus `y·Uᵀ` if those are given. [`Self::Cast`] rounds once: it adds in 16 bits and casts the sum.
    pub fn linear(self, x: [&Tensor; 2], y: Option<[&Tensor; 2]>) -> Tensor {
        let [x_ni, weight_oi] = x;
        match self {
            Self::Cast => {
                let launches = ["aten::mm.dtype", "aten::addmm.dtype_out"];
                rehearsal::in_place_of(&launches[..1 + usize::from(y.is_some())], || {
                    let mut sum = onednn::linear(x_ni, weight_oi);
                    if let Some([y_nr, weight_or]) = y {
                        let _ = sum.addmm_(y_nr, &weight_or.tr());
                    }
                    sum.to_kind(wide(x_ni.kind()))
                })
            }
            Self::Stored => {
                let sum = self.of(x_ni, &weight_oi.tr());
                if let Some([y_nr, weight_or]) = y {
                    self.add(&sum, y_nr, &weight_or.tr());
                }
                sum
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::{Generator, guard};

    /// Matrices `[5, 70]` and `[70, 9]`.
    fn matrices(kind: Kind) -> [Tensor; 2] {
        let mut random = Generator::seeded(1);
        [[5, 70], [70, 9]].map(|size| random.normal(&size, (wide(kind), Device::Cpu)).to_kind(kind))
    }

    #[test]
    fn a_cast_product_is_the_float64_one_up_to_the_dtypes_rounding() {
        for (kind, most) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5), (Kind::BFloat16, 0.1), (Kind::Half, 0.02)] {
            let [a, b] = matrices(kind);
            let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
            let sum = Tensor::ones([5, 9], (wide(kind), Device::Cpu));
            Float32Products::Cast.add(&sum, &a, &b);
            let linear = Float32Products::Cast.linear([&a, &b.tr().contiguous()], None);
            for got in [sum - 1.0, linear, Float32Products::Cast.of(&a, &b)] {
                assert_eq!(got.kind(), wide(kind));
                let off = (got - &exact).abs().max().double_value(&[]);
                assert!(off < most, "{kind:?}: {off}");
            }
        }
    }

    #[test]
    fn the_cpu_casts() {
        assert_eq!(Float32Products::on(Device::Cpu), Float32Products::Cast);
    }

    /// libtorch looks the operator up with our arguments and has no kernel for the CPU.
    #[test]
    fn operators_that_store_float32_are_in_the_dispatcher() {
        let [a, b] = matrices(Kind::BFloat16);
        let sum = Tensor::zeros([5, 9], (Kind::Float, Device::Cpu));
        let refused = |body: &dyn Fn()| guard("a product", body).expect_err("a CPU").reason;
        let product = refused(&|| drop(Float32Products::Stored.of(&a, &b)));
        let add = refused(&|| Float32Products::Stored.add(&sum, &a, &b));
        for (reason, operator) in [(product, "aten::mm.dtype"), (add, "aten::addmm.dtype_out")] {
            let expected = format!("Could not run '{operator}' with arguments from the 'CPU' backend");
            assert!(reason.starts_with(&expected), "{reason}");
        }
    }
}
