//! Trees by the number of texts that are decoded together: the more texts share a step, the more a guess costs. No tensors here.

/// A tree for some numbers of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtLoad<T> {
    /// Texts that are decoded together.
    pub texts: usize,
    /// `None`: the fastest step has no guesses.
    pub tree: Option<T>,
}

/// At least one tree, or the choice of none, by the number of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByLoad<T>(Vec<AtLoad<T>>);

impl<T> ByLoad<T> {
    /// The same tree for any number of texts.
    pub fn always(tree: T) -> Self {
        Self(vec![AtLoad { texts: 1, tree: Some(tree) }])
    }

    /// `None` without choices.
    pub fn new(mut choices: Vec<AtLoad<T>>) -> Option<Self> {
        choices.sort_by_key(|choice| choice.texts);
        (!choices.is_empty()).then_some(Self(choices))
    }

    /// The tree for so many texts: that of the nearest number, as a ratio; of two that are equally near, that of the larger one.
    pub fn at(&self, texts: usize) -> Option<&T> {
        self.0[self.nearest(texts)].tree.as_ref()
    }

    /// As [`ByLoad::at`], to be changed.
    pub fn at_mut(&mut self, texts: usize) -> Option<&mut T> {
        let nearest = self.nearest(texts);
        self.0[nearest].tree.as_mut()
    }

    /// All trees, to be changed.
    pub fn trees_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().filter_map(|choice| choice.tree.as_mut())
    }

    fn nearest(&self, texts: usize) -> usize {
        let ratio = |at: &usize| {
            let measured = self.0[*at].texts;
            texts.max(measured) as f64 / texts.min(measured).max(1) as f64
        };
        (0..self.0.len()).rev().min_by(|a, b| ratio(a).total_cmp(&ratio(b))).expect("at least one")
    }

    /// All choices, by rising numbers of texts.
    pub fn choices(&self) -> &[AtLoad<T>] {
        &self.0
    }

    /// The same choices of something that is made of each tree.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn try_map<'s, U, E>(&'s self, mut make: impl FnMut(&'s T) -> Result<U, E>) -> Result<ByLoad<U>, E> {
        let choice = |choice: &'s AtLoad<T>| {
            Ok(AtLoad { texts: choice.texts, tree: choice.tree.as_ref().map(&mut make).transpose()? })
        };
        Ok(ByLoad(self.0.iter().map(choice).collect::<Result<_, E>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_texts_has_the_tree_of_the_nearest_number() {
        let choice = |texts, tree| AtLoad { texts, tree };
        let mut trees = ByLoad::new(vec![choice(16, None), choice(1, Some("a")), choice(4, Some("b"))]).unwrap();
        let chosen: Vec<Option<&str>> = [0, 1, 2, 3, 7, 8, 9, 100].map(|texts| trees.at(texts).copied()).to_vec();
        let (a, b) = (Some("a"), Some("b"));
        assert_eq!(chosen, [a, a, b, b, b, None, None, None], "2 is as near to 1 as to 4");
        assert_eq!(trees.at_mut(5).map(|tree| *tree), b);
        assert_eq!((trees.at_mut(20), ByLoad::<u8>::new(vec![])), (None, None));
    }
}
