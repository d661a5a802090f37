//! NCCL's numbers and layouts, as nccl.h has them.

pub(in crate::torch::process_group) mod fake;

use super::*;

/// The functions are those of the NCCL that libtorch_cuda loads; there is none here.
#[test]
fn without_libtorch_cuda_the_missing_function_is_named() {
    let error = NcclFunctions::load().expect_err("no GPU half of libtorch is loaded in tests").to_string();
    assert!(error.contains("ncclGetUniqueId"), "{error}");
}

#[test]
fn an_id_is_what_rank_0_sent() {
    let id = UniqueId(std::array::from_fn(|at| at as u8));
    assert_eq!(UniqueId::from_bytes(id.bytes()), Some(id));
    assert!(UniqueId::from_bytes(&[]).is_none());
}

/// nccl.h, `ncclDataType_t`.
#[test]
fn dtypes_have_the_numbers_of_nccl() {
    let kinds =
        [Kind::Int8, Kind::Uint8, Kind::Int, Kind::Int64, Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16];
    let numbers = kinds.map(|kind| kind_of(&Tensor::zeros([1], (kind, tch::Device::Cpu))).expect("a number"));
    assert_eq!(numbers, [0, 1, 2, 4, 6, 7, 8, 9]);
}

/// nccl.h: `size_t`, two unsigned and four int numbers, a pointer.
#[test]
fn the_config_has_the_layout_of_nccl_2_17() {
    assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, blocking)), (40, 16));
    assert_eq!(std::mem::offset_of!(NcclConfig, net_name), 32);
}
