//! Stubs of the kernels for processors other than x86-64: no [`matrix::Matrix`] can be built, so none of them is ever called.

/// No memory is needed.
pub mod arena {
    use std::ops::Range;

    /// Holds nothing.
    #[derive(Debug, Default)]
    pub struct Arena;

    /// None.
    #[derive(Debug)]
    pub struct ArenaLines;

    impl Arena {
        /// None.
        pub fn lines(&mut self, _: usize, _: impl FnOnce(&mut [u8])) -> ArenaLines {
            ArenaLines
        }
    }

    impl ArenaLines {
        /// Of no lines.
        pub fn sum(&self, _: Range<usize>) -> u64 {
            0
        }
    }
}

/// No weights are laid out.
pub mod matrix {
    use super::super::{Number, team::Team};
    use super::arena::Arena;
    use crate::gguf::types::TensorType;

    /// There is none.
    #[derive(Debug)]
    pub enum Matrix {}

    impl Matrix {
        /// `None`.
        pub fn from_blocks(
            _: (&[u8], &'static TensorType),
            _: impl Fn(usize) -> f32,
            _: [usize; 2],
            _: &mut Arena,
        ) -> Option<Self> {
            None
        }

        /// `None`.
        pub fn in_8_bits(_: &[f32], _: [usize; 2], _: &mut Arena) -> Option<Self> {
            None
        }

        /// Of a matrix that is not there.
        #[must_use]
        pub fn above(self, _: Self) -> Self {
            match self {}
        }

        /// `None`.
        pub fn new(_: &[u8], _: Number, _: [usize; 2], _: &mut Arena) -> Option<Self> {
            None
        }

        /// Of a matrix that is not there.
        pub fn outputs(&self) -> usize {
            match *self {}
        }

        /// Of a matrix that is not there.
        pub fn inputs(&self) -> usize {
            match *self {}
        }

        /// Of a matrix that is not there.
        pub fn bytes(&self) -> usize {
            match *self {}
        }

        /// By a matrix that is not there.
        pub fn multiply_first(&self, _: usize, _: &[f32], _: &mut [f32], _: &Team) {
            match *self {}
        }

        /// By a matrix that is not there.
        pub fn multiply(&self, _: &[f32], _: &mut [f32], _: &Team) {
            match *self {}
        }
    }
}

/// No token attends.
pub(crate) mod attention {
    use super::super::{AttentionShape, Plane, team::Team};

    /// New tokens of one sequence.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct SequenceTokens<'a> {
        pub(crate) planes: [Plane<'a>; 2],
        pub(crate) seen: &'a [SeenTokens],
    }

    /// Cached tokens that a new one sees.
    #[derive(Debug)]
    pub struct SeenTokens;

    impl SeenTokens {
        /// Nothing is kept.
        pub fn new(_: usize, _: impl IntoIterator<Item = usize>) -> Self {
            Self
        }
    }

    /// Never called.
    pub(crate) fn attend(_: (&[f32], usize), _: &[SequenceTokens], _: AttentionShape, _: &mut [f32], _: &Team) {
        unreachable!("there is no matrix, so there is no pass")
    }
}

/// No row is computed.
pub(crate) mod rows {
    use super::super::{Number, team::Team};

    macro_rules! never {
        ($(fn $name:ident($($of:ty),*) $(-> $made:ty)?;)*) => {
            $(pub(crate) fn $name($(_: $of),*) $(-> $made)? {
                unreachable!("there is no matrix, so there is no pass")
            })*
        };
    }

    never! {
        fn write_numbers(Number, &[f32], &mut [u8]);
        fn rms_norm(&mut [f32], &[f32], f32);
        fn add(&mut [f32], &[f32]);
        fn add_to_each(&mut [f32], &[f32]);
        fn silu_product(&[f32], &mut [f32], usize);
        fn gelu_tanh_product(&[f32], &mut [f32], usize);
        fn add_silu(&mut [f32], &[f32]);
        fn rotation(i64, &[f32], f32) -> Vec<f32>;
        fn rotate(&mut [f32], usize, &[f32]);
        fn likeliest(&[f32], usize, usize, &Team) -> Vec<(usize, f32)>;
        fn largest(&[f32], usize) -> Vec<usize>;
    }
}
