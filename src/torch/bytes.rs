//! A tensor's memory as bytes, and bytes as a tensor, without a copy.
//!
//! tch's tensors are shared handles, and safe code writes to one through any of them: a view, a shallow clone. No slice of a tensor is
//! protected by the borrow of its handle. Readers keep a contract ([`raw`]); writers use memory that no other handle shares: a new tensor
//! ([`filled`]), or the caller's guarantee to [`raw_mut`].
#![expect(unsafe_code, reason = "tch gives the address of a tensor's memory and takes one; only here")]

use tch::{Device, Kind, Tensor};

/// The bytes of a contiguous CPU tensor, in memory order.
///
/// Contract: nothing writes to the tensor's memory through another handle while the slice lives. The compiler cannot check it; every reader
/// in this crate keeps it by writing to no tensor but its own new result.
///
/// # Panics
/// If the tensor is on another device or not contiguous.
pub fn raw(tensor: &Tensor) -> &[u8] {
    assert!(
        tensor.device() == Device::Cpu && tensor.is_contiguous(),
        "bytes of a tensor need it contiguous on the CPU"
    );
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: a contiguous CPU tensor owns `numel` elements from `data_ptr`, and the borrow keeps the tensor alive.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }
}

/// The bytes of a contiguous CPU tensor, writable.
///
/// # Safety
/// No other handle of the same memory (a view, a shallow clone) may be used while the slice lives.
///
/// # Panics
/// If the tensor is on another device or not contiguous.
pub unsafe fn raw_mut(tensor: &mut Tensor) -> &mut [u8] {
    let length = raw(tensor).len();
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as in `raw`; the caller guarantees that nothing else uses the memory.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), length) }
}

/// The numbers of a contiguous float32 CPU tensor.
///
/// # Panics
/// As [`raw`], and for another dtype.
pub fn numbers(tensor: &Tensor) -> &[f32] {
    assert_eq!(tensor.kind(), Kind::Float, "float32 numbers");
    // SAFETY: a float32 tensor's memory is float32 numbers.
    unsafe { std::slice::from_raw_parts(raw(tensor).as_ptr().cast(), tensor.numel()) }
}

/// A new float32 CPU tensor, whose numbers may be any until `fill` writes them: libtorch would write zeros with all of OpenMP's threads,
/// which then spin beside those of `fill`.
pub fn filled(shape: &[i64], fill: impl FnOnce(&mut [f32])) -> Tensor {
    let mut tensor = Tensor::empty(shape, (Kind::Float, Device::Cpu));
    let numel = tensor.numel();
    // SAFETY: the memory is libtorch's and any bytes are float32 numbers; the new tensor has no other handle.
    fill(unsafe { std::slice::from_raw_parts_mut(raw_mut(&mut tensor).as_mut_ptr().cast(), numel) });
    tensor
}

/// A CPU tensor over `bytes`, which it does not own.
///
/// # Safety
/// `bytes` must outlive every tensor that shares this one's memory, must be aligned to `kind`'s size, and must never be written
/// through the tensor if it is read-only.
///
/// # Panics
/// If the length of `bytes` does not match `shape` and `kind`, or `bytes` is not aligned.
pub unsafe fn view(bytes: &[u8], shape: &[i64], kind: Kind) -> Tensor {
    let size = kind.elt_size_in_bytes();
    let elements: usize = shape.iter().map(|&d| usize::try_from(d).expect("a shape has no negative length")).product();
    assert_eq!(bytes.len(), elements * size, "bytes of a {kind:?} tensor of shape {shape:?}");
    assert!(bytes.as_ptr().addr().is_multiple_of(size), "a {kind:?} tensor needs aligned bytes");
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    // SAFETY: the memory holds exactly these elements; the caller guarantees its lifetime.
    unsafe { Tensor::from_blob(bytes.as_ptr(), shape, &strides, kind, Device::Cpu) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_tensor_are_its_elements() {
        let tensor = Tensor::from_slice2(&[[1f32, 2.0], [3.0, 4.0]]);
        let expected: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(raw(&tensor), expected);
        // SAFETY: `tensor` lives to the end of the test, and the view is only read.
        assert_eq!(unsafe { view(raw(&tensor), &[2, 2], Kind::Float) }, tensor);
    }
}
