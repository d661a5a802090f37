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
    #[inline(always)]
    pub(super) unsafe fn write(&self, at: usize, numbers: &[T]) {
        self.check(at, numbers.len());
        // SAFETY: within the slice, and nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), self.first.add(at), numbers.len()) }
    }

    /// Some of the numbers.
    ///
    /// # Safety
    /// No other part reads or writes them while the result lives.
    #[expect(clippy::mut_from_ref, reason = "that is what this is for")]
    pub(super) unsafe fn part(&self, at: usize, len: usize) -> &mut [T] {
        self.check(at, len);
        // SAFETY: within the slice, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(at), len) }
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at <= self.len && len <= self.len - at, "{len} numbers from {at} on, of {}", self.len);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::cpu::team::Team;

    #[test]
    fn parts_write_their_own_numbers_and_whoever_leads_reads_them_all() {
        let team = Team::new(3);
        let mut numbers = vec![0usize; 700];
        for round in 0..300 {
            let shared = Shared::new(&mut numbers);
            team.run(7, |part| {
                let seven: Vec<usize> = (0..50).map(|at| part * 100 + at + round).collect();
                // SAFETY: each part has its own hundred numbers.
                unsafe {
                    shared.write(part * 100, &seven);
                    shared.part(part * 100 + 50, 50).copy_from_slice(&seven);
                }
            });
            assert!((0..700).all(|at| numbers[at] == at / 100 * 100 + at % 50 + round), "round {round}");
        }
    }

    #[test]
    fn numbers_outside_of_the_slice_are_refused() {
        let mut numbers = [0; 4];
        let shared = Shared::new(&mut numbers);
        for (at, len) in [(5, 0), (3, 2), (0, 5), (usize::MAX, 2), (2, usize::MAX)] {
            // SAFETY: nobody else reads or writes them.
            let part = AssertUnwindSafe(|| unsafe { shared.part(at, len).len() });
            assert!(catch_unwind(part).is_err(), "{len} from {at}");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { shared.part(4, 0).len() }, 0);
    }
}
