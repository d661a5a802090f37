//! A tree file: a static tree, or the limits of a tree that is chosen at each step. No tensors here.

use std::path::Path;

use super::by_load::{AtLoad, ByLoad};
use super::sparse_tree::{SparseTree, TreeError, TreeFileError};
use crate::bounds::TREE_NODES;
use crate::formats::tree::{DynamicTree, TreeFile, TreeOfSequences};

/// What a drafter fills at each step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuessTree {
    /// The same tree at each step.
    Static(SparseTree),
    /// The likeliest nodes of each step.
    Dynamic(DynamicTree),
}

impl GuessTree {
    /// Loads a `tree.json`, or a bare JSON list of paths. Also returns the parsed file.
    ///
    /// # Errors
    /// [`TreeFileError`] names the file.
    pub fn load(path: &Path) -> Result<(Self, TreeFile), TreeFileError> {
        let file = TreeFile::load(path)?;
        let tree = match file.dynamic {
            Some(limits) => check(limits).map(|()| Self::Dynamic(limits)),
            None => SparseTree::new(file.choices.clone()).map(Self::Static),
        };
        Ok((tree.map_err(|source| TreeFileError::Tree { path: path.to_owned(), source })?, file))
    }

    /// The trees of a file by the number of texts that are decoded together: `alone` is the file's tree for one text. Without others, it is the
    /// tree for any number.
    ///
    /// # Errors
    /// [`TreeError`] names what is no tree.
    pub fn by_load(alone: Self, file: &TreeFile) -> Result<ByLoad<Self>, TreeError> {
        let for_sequences = |of: &TreeOfSequences| {
            let tree = match (of.dynamic, &of.choices) {
                (Some(limits), _) => Some(check(limits).map(|()| Self::Dynamic(limits))?),
                (None, choices) if choices.is_empty() => None,
                (None, choices) => Some(Self::Static(SparseTree::new(choices.clone())?)),
            };
            Ok(AtLoad { texts: of.sequences, tree })
        };
        let others = file.by_sequences.iter().map(for_sequences).collect::<Result<Vec<_>, _>>()?;
        let is_there = others.iter().any(|choice| choice.texts == 1);
        let for_one = (!is_there).then(|| AtLoad { texts: 1, tree: Some(alone.clone()) });
        Ok(ByLoad::new(others.into_iter().chain(for_one).collect()).unwrap_or_else(|| ByLoad::always(alone)))
    }

    /// The tree, if it is the same at each step.
    pub fn as_static(&self) -> Option<&SparseTree> {
        match self {
            Self::Static(tree) => Some(tree),
            Self::Dynamic(_) => None,
        }
    }

    /// Most nodes of a step, without the root.
    pub fn nodes(&self) -> usize {
        match self {
            Self::Static(tree) => tree.choices().len(),
            Self::Dynamic(limits) => limits.nodes,
        }
    }

    /// Most levels below the root.
    pub fn depth(&self) -> usize {
        match self {
            Self::Static(tree) => tree.max_depth(),
            Self::Dynamic(limits) => limits.depth,
        }
    }

    /// Checks that `num_heads` heads with `top_k` guesses each can fill the tree.
    ///
    /// # Errors
    /// [`TreeError`] names what they cannot fill.
    pub fn check_fits(&self, num_heads: usize, top_k: usize) -> Result<(), TreeError> {
        match self {
            Self::Static(tree) => tree.check_fits(num_heads, top_k),
            Self::Dynamic(limits) => {
                check(*limits)?;
                let sizes = [("levels", limits.depth, num_heads), ("guesses of a node (top_k)", limits.top_k, top_k)];
                match sizes.into_iter().find(|(_, asked, most)| asked > most) {
                    Some((what, asked, most)) => Err(TreeError::BadDynamic { what, asked, most }),
                    None => Ok(()),
                }
            }
        }
    }
}

fn check(limits: DynamicTree) -> Result<(), TreeError> {
    let DynamicTree { nodes, depth, top_k } = limits;
    match [("nodes", nodes), ("levels", depth), ("guesses of a node (top_k)", top_k)]
        .into_iter()
        .find(|(_, size)| *size == 0 || *size > TREE_NODES)
    {
        Some((what, asked)) => Err(TreeError::BadDynamic { what, asked, most: TREE_NODES }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_that_is_chosen_at_each_step_comes_back_and_its_limits_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        let limits = DynamicTree { nodes: 8, depth: 4, top_k: 10 };
        let file = TreeFile { expected_tokens_per_step: Some(2.5), ..TreeFile::chosen_at_each_step(limits) };
        file.save(&path).unwrap();
        assert_eq!(GuessTree::load(&path).unwrap(), (GuessTree::Dynamic(limits), file));
        let refused = SparseTree::load(&path).unwrap_err().to_string();
        assert!(refused.contains("t.json: the tree is chosen at each step"), "{refused}");
        let tree = GuessTree::Dynamic(limits);
        assert_eq!((tree.check_fits(4, 10), tree.nodes(), tree.depth()), (Ok(()), 8, 4));
        let deep = tree.check_fits(3, 10).unwrap_err().to_string();
        assert_eq!(deep, "a tree chosen at each step has 4 levels; expected 1 to 3 for these heads and this backbone");
        assert!(
            tree.check_fits(4, 9).unwrap_err().to_string().contains("10 guesses of a node (top_k); expected 1 to 9")
        );
        let tree_for = |sequences, choices: &[&[usize]]| TreeOfSequences {
            sequences,
            choices: choices.iter().map(|path| path.to_vec()).collect(),
            expected_tokens_per_second: 1.0,
            ..TreeOfSequences::default()
        };
        let by_sequences = vec![tree_for(4, &[&[0]]), tree_for(16, &[])];
        let file = TreeFile { by_sequences, ..TreeFile::chosen_at_each_step(limits) };
        file.save(&path).unwrap();
        let (tree, file) = GuessTree::load(&path).unwrap();
        let by_load = GuessTree::by_load(tree.clone(), &file).unwrap();
        let small = GuessTree::Static(SparseTree::chain(1).unwrap());
        assert_eq!([1, 5, 16].map(|texts| by_load.at(texts)), [Some(&tree), Some(&small), None]);
        let for_one = TreeFile { by_sequences: vec![tree_for(1, &[&[0]])], ..file.clone() };
        let by_load = GuessTree::by_load(tree.clone(), &for_one).unwrap();
        assert_eq!((by_load.at(1), by_load.choices().len()), (Some(&small), 1), "the file's own tree of one text");
        let file = TreeFile { by_sequences: vec![tree_for(4, &[&[0, 0]])], ..file };
        assert!(GuessTree::by_load(tree, &file).is_err(), "[0, 0] has no parent");
        TreeFile::chosen_at_each_step(DynamicTree { nodes: TREE_NODES, ..limits }).save(&path).unwrap();
        assert_eq!(GuessTree::load(&path).unwrap().0.nodes(), TREE_NODES);
        TreeFile::chosen_at_each_step(DynamicTree { nodes: 0, ..limits }).save(&path).unwrap();
        assert!(GuessTree::load(&path).unwrap_err().to_string().contains("0 nodes; expected 1 to 1024"));
    }
}
