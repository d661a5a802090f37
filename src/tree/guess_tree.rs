//! A tree file: a static tree, or the limits of a tree that is chosen at each step. No tensors here.

use std::path::Path;

use super::sparse_tree::{MAX_NODES, SparseTree, TreeError, TreeFileError};
use crate::formats::tree::{DynamicTree, TreeFile};

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
        .find(|(_, size)| *size == 0 || *size > MAX_NODES)
    {
        Some((what, asked)) => Err(TreeError::BadDynamic { what, asked, most: MAX_NODES }),
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
        TreeFile::chosen_at_each_step(DynamicTree { nodes: 0, ..limits }).save(&path).unwrap();
        assert!(GuessTree::load(&path).unwrap_err().to_string().contains("0 nodes; expected 1 to 1024"));
    }
}
