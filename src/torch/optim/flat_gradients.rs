//! The gradients of all parameters in one buffer a device and dtype, so that processes sum them in one operation, and its shares for processes that
//! each keep a part of the optimizer's state (ZeRO-1: Rajbhandari et al. 2020, arXiv 1910.02054).
//!
//! A parameter begins at a multiple of [`BLOCK`] numbers, and so does a share: a piece of a parameter has whole blocks of 8-bit moments, and
//! kernels read it in aligned vectors. What lies between parameters stays 0.

// W shares, n numbers of each
use tch::{Device, Kind, Tensor};

use crate::torch::optim::blockwise::BLOCK;

/// Zeros for the gradients of some parameters.
#[derive(Debug)]
pub struct FlatGradients {
    /// `[W·n]` each, in the dtype of the values.
    buffers_wn: Vec<Tensor>,
    extents: Vec<GradientExtent>,
    shares: i64,
}

/// Where a parameter's gradient is.
#[derive(Debug, Clone, Copy)]
struct GradientExtent {
    buffer: usize,
    from: i64,
    count: i64,
}

/// The part of a parameter that is in one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterPiece {
    /// By its place in the list that the buffers were made for.
    pub parameter: usize,
    /// The share, and the rank of the process that has it.
    pub share: usize,
    /// The first number, in the flattened parameter.
    pub from: i64,
    pub count: i64,
}

impl FlatGradients {
    /// For parameters with these values, in `shares` shares of equal size.
    pub fn zeros(values: &[&Tensor], shares: usize) -> Self {
        let mut sizes: Vec<((Kind, Device), i64)> = vec![];
        let place = |value: &&Tensor| {
            let (options, count) = ((value.kind(), value.device()), value.numel() as i64);
            let buffer = sizes.iter().position(|(of, _)| *of == options).unwrap_or(sizes.len());
            if buffer == sizes.len() {
                sizes.push((options, 0));
            }
            let from = sizes[buffer].1;
            sizes[buffer].1 += round_up(count, BLOCK);
            GradientExtent { buffer, from, count }
        };
        let extents = values.iter().map(place).collect();
        let shares = shares as i64;
        let zeros = |&(options, size): &(_, i64)| Tensor::zeros([round_up(size, BLOCK * shares)], options);
        Self { buffers_wn: sizes.iter().map(zeros).collect(), extents, shares }
    }

    /// The buffers, `[W·n]` each.
    pub fn buffers_wn(&self) -> &[Tensor] {
        &self.buffers_wn
    }

    /// The place of a parameter with shape `shape` in its buffer, as a view.
    pub fn of(&self, parameter: usize, shape: &[i64]) -> Tensor {
        let GradientExtent { buffer, from, count } = self.extents[parameter];
        self.buffers_wn[buffer].narrow(0, from, count).view(shape)
    }

    /// All pieces of all parameters, in order. A share has at most one piece of a parameter.
    pub fn pieces(&self) -> Vec<ParameterPiece> {
        let pieces_of = |(parameter, extent): (usize, &GradientExtent)| {
            let n = self.buffers_wn[extent.buffer].size()[0] / self.shares;
            let (begin, end) = (extent.from, extent.from + extent.count);
            (0..self.shares).filter_map(move |share| {
                let (first, last) = (begin.max(share * n), end.min((share + 1) * n));
                let (share, from, count) = (share as usize, first - begin, last - first);
                (count > 0).then_some(ParameterPiece { parameter, share, from, count })
            })
        };
        self.extents.iter().enumerate().flat_map(pieces_of).collect()
    }
}

fn round_up(count: i64, to: i64) -> i64 {
    (count + to - 1) / to * to
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn gradients_are_views_that_begin_at_blocks() {
        let values = [[3, 100], [1, 256], [7, 1]].map(|shape| Tensor::zeros(shape, (Kind::Float, Device::Cpu)));
        let flat = FlatGradients::zeros(&values.each_ref(), 1);
        for (parameter, number) in [(0, 1.0), (1, 2.0), (2, 3.0)] {
            let _ = flat.of(parameter, &values[parameter].size()).fill_(number);
        }
        let buffer = Vec::<f32>::try_from(&flat.buffers_wn()[0]).unwrap();
        let expected = [(300, 1.0), (212, 0.0), (256, 2.0), (7, 3.0), (249, 0.0)];
        assert_eq!(buffer, expected.map(|(count, number)| vec![number; count]).concat());
    }

    #[test]
    fn gradients_have_the_dtype_of_their_values() {
        let values = [Kind::Double, Kind::Float].map(|kind| Tensor::zeros([3], (kind, Device::Cpu)));
        let flat = FlatGradients::zeros(&values.each_ref(), 2);
        assert_eq!([0, 1].map(|parameter| flat.of(parameter, &[3]).kind()), [Kind::Double, Kind::Float]);
    }

    proptest! {
        #[test]
        fn pieces_of_all_shares_are_the_parameters(counts in prop::collection::vec(1_i64..2000, 1..6), shares in 1_usize..6) {
            let values: Vec<Tensor> = counts.iter().map(|&n| Tensor::zeros([n], (Kind::Float, Device::Cpu))).collect();
            let flat = FlatGradients::zeros(&values.iter().collect::<Vec<_>>(), shares);
            let size = flat.buffers_wn()[0].size()[0];
            prop_assert_eq!(size % (BLOCK * shares as i64), 0);
            let mut next = vec![0; counts.len()];
            for ParameterPiece { parameter, share, from, count } in flat.pieces() {
                prop_assert_eq!(from % BLOCK, 0);
                prop_assert_eq!(from, next[parameter], "pieces of parameter {} follow each other", parameter);
                next[parameter] += count;
                // The numbers of a piece are in its share.
                let _ = flat.of(parameter, &[counts[parameter]]).narrow(0, from, count).fill_(1.0);
                let sums = flat.buffers_wn()[0].view([shares as i64, -1]).sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
                prop_assert_eq!(sums.double_value(&[share as i64]), count as f64);
                let _ = flat.buffers_wn()[0].shallow_clone().zero_();
            }
            prop_assert_eq!(next, counts);
        }
    }
}
