//! Segments, and where the kernels run.

pub(crate) mod emulation;

use super::*;

#[test]
fn segments_begin_where_texts_do_and_empty_ones_are_left_out() {
    let Segments { bounds, longest } = Segments::new(&[3, 0, 2, 0], Device::Cpu);
    assert_eq!((bounds.kind(), longest), (Kind::Int, 3));
    assert_eq!(Vec::<i32>::try_from(&bounds).unwrap(), [0, 3, 5]);
}

#[test]
fn it_runs_on_no_cpu() {
    assert!(!runs_on(&Tensor::zeros([4, 2, 64], (Kind::BFloat16, Device::Cpu))));
}
