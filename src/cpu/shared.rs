//! A slice that the parts of a parallel job write to, each to its own range.
#![expect(unsafe_code, reason = "what belongs to whom is the kernels' promise")]

use std::marker::PhantomData;

/// See the module.
#[derive(Debug)]
pub(super) struct Shared<'s, T> {
    first: *mut T,
    len: usize,
    slice: PhantomData<&'s mut [T]>,
}

// SAFETY: the functions that write are unsafe, and ask for parts that do not meet.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'s, T: Copy> Shared<'s, T> {
    /// Borrows it for a job.
    pub(super) fn new(slice: &'s mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Writes some numbers.
    ///
    /// # Safety
    /// No other part reads or writes them.
    pub(super) unsafe fn write(&self, at: usize, numbers: &[T]) {
        assert!(at + numbers.len() <= self.len, "within the slice");
        // SAFETY: within the slice, and nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), self.first.add(at), numbers.len()) }
    }

    /// Some of the numbers.
    ///
    /// # Safety
    /// No other part reads or writes them while the result lives.
    #[expect(clippy::mut_from_ref, reason = "that is what this is for")]
    pub(super) unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at + len <= self.len, "within the slice");
        // SAFETY: within the slice, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(at), len) }
    }
}
