//! Finds numbers of a weight that are not finite. They are looked for where weights are read, because a step may hide them: libtorch's fused
//! attention ignores NaN in queries and keys.

use tch::Tensor;

/// A number that is not finite, and its place.
#[derive(Debug, PartialEq)]
pub(super) struct NonFinite {
    pub(super) value: f64,
    pub(super) at: Vec<i64>,
}

/// The first number that is not finite. A tensor without one is read once, on its device.
pub(super) fn first_not_finite(tensor: &Tensor) -> Option<NonFinite> {
    if tensor.numel() == 0 {
        return None;
    }
    let (least, most) = tensor.aminmax(None, false);
    if least.double_value(&[]).is_finite() && most.double_value(&[]).is_finite() {
        return None;
    }
    let at = Vec::<i64>::try_from(tensor.isfinite().logical_not().nonzero().get(0)).expect("one number at least");
    Some(NonFinite { value: tensor.double_value(&at), at })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn one_number_among_many_is_found_in_every_dtype() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let tensor = Tensor::arange(70_000, (Kind::Float, Device::Cpu)).sin().view([700, 100]).to_kind(kind);
                assert_eq!(first_not_finite(&tensor), None);
                let _ = tensor.get(699).get(37).fill_(value);
                let found = first_not_finite(&tensor).expect("it is there");
                assert_eq!((found.value.to_string(), found.at), (value.to_string(), vec![699, 37]));
            }
        }
        assert_eq!(first_not_finite(&Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))), None);
    }
}
