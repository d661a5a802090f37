//! Rehearses on the CPU what a GPU would launch. A thread that rehearses takes the code paths of a GPU, and where these launch a kernel
//! of ours, its oracle runs in the kernel's place and is counted as one launch: tests/launches.rs counts a training step on a machine
//! without a GPU. On other threads it costs one read of a thread-local variable for each of these places.

use std::cell::{Cell, RefCell};

use tch::Device;

thread_local! {
    static LAUNCHES: RefCell<Option<Vec<&'static str>>> = const { RefCell::new(None) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether code for `device` is that of a GPU.
pub fn is_gpu(device: Device) -> bool {
    device != Device::Cpu || LAUNCHES.with_borrow(Option::is_some)
}

/// Computes what these kernels or copies do on a GPU. What an oracle calls is part of its kernel and is not counted again.
pub fn in_place_of<T>(names: &[&'static str], oracle: impl FnOnce() -> T) -> T {
    if is_in_place() {
        return oracle();
    }
    let counts =
        LAUNCHES.with_borrow_mut(|launches| launches.as_mut().map(|launches| launches.extend(names)).is_some());
    INSIDE.set(counts);
    let _outside_again = OutsideAgain; // also if the oracle panics with an error of libtorch, which `guard` catches
    oracle()
}

/// Ends the oracle's part when it is dropped.
struct OutsideAgain;

impl Drop for OutsideAgain {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Whether this thread computes an oracle in a kernel's place.
pub fn is_in_place() -> bool {
    INSIDE.get()
}

/// The kernels whose place was taken so far.
pub fn launches() -> Vec<&'static str> {
    LAUNCHES.with_borrow(|launches| launches.clone().unwrap_or_default())
}

/// Rehearses on this thread from now on.
pub fn begin() {
    LAUNCHES.replace(Some(vec![]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracles_count_as_launches_once_a_thread_rehearses() {
        let oracle = || in_place_of(&["a", "b"], || (is_in_place(), in_place_of(&["c"], is_in_place)));
        assert_eq!((oracle(), is_gpu(Device::Cpu), launches()), ((false, false), false, vec![]));
        begin();
        assert_eq!((oracle(), is_in_place(), is_gpu(Device::Cpu)), ((true, true), false, true));
        assert_eq!(launches(), ["a", "b"]);
        let failed = super::super::guard("the oracle", || in_place_of(&["d"], || super::super::raise("no memory")));
        assert!(failed.is_err() && !is_in_place());
    }
}
