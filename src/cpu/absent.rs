//! In place of the kernels on processors that are not x86-64: no matrix can be made, so nothing that needs one is ever called.

/// No memory is needed.
pub mod arena {
    /// Holds nothing.
    #[derive(Debug, Default)]
    pub struct Arena;
}

/// No weights are laid out.
pub mod matrix {
    use super::super::{Number, team::Team};
    use super::arena::Arena;

    /// There is none.
    #[derive(Debug)]
    pub enum Matrix {}

    impl Matrix {
        /// `None`.
        pub fn new(_: &[u8], _: Number, _: [usize; 2], _: &mut Arena) -> Option<Self> {
            None
        }

        /// Of a matrix that is not there.
        pub fn outputs(&self) -> usize {
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
    use super::super::{Number, team::Team};

    /// One layer's keys or values.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Plane<'c> {
        pub(crate) bytes: &'c [u8],
        pub(crate) number: Number,
        pub(crate) room: usize,
        pub(crate) head_size: usize,
    }

    /// Cached tokens that a new one sees.
    #[derive(Debug)]
    pub struct SeenTokens;

    impl FromIterator<usize> for SeenTokens {
        fn from_iter<I: IntoIterator<Item = usize>>(_: I) -> Self {
            Self
        }
    }

    /// Shapes of an attention.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct AttentionShape {
        pub(crate) queries: usize,
        pub(crate) groups: usize,
        pub(crate) scale: f32,
    }

    /// Never called.
    pub(crate) fn attend(
        _: (&[f32], usize),
        _: [Plane<'_>; 2],
        _: &[SeenTokens],
        _: AttentionShape,
        _: &mut [f32],
        _: &Team,
    ) {
        unreachable!("there is no matrix, so there is no pass")
    }
}

/// No row is computed.
pub(crate) mod rows {
    const NEVER: &str = "there is no matrix, so there is no pass";

    pub(crate) fn rms_norm(_: &[f32], _: &[f32], _: f32, _: &mut [f32]) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn add(_: &mut [f32], _: &[f32]) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn add_to_each(_: &mut [f32], _: &[f32]) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn silu_product(_: &[f32], _: &mut [f32], _: usize) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn add_silu(_: &mut [f32], _: &[f32]) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn rotation(_: i64, _: &[f32]) -> Vec<f32> {
        unreachable!("{NEVER}")
    }

    pub(crate) fn rotate(_: &mut [f32], _: &[f32]) {
        unreachable!("{NEVER}")
    }

    pub(crate) fn largest(_: &[f32], _: usize) -> Vec<usize> {
        unreachable!("{NEVER}")
    }
}
