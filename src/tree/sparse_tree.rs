//! The sparse tree of candidates (paper section 2.1.2). No tensors here.
//!
//! A node is a path of child indices: `[0, 2]` is the third guess of head 2 after the best guess of head 1. The root, node 0, is
//! the LM head's token and is never listed. Nodes are sorted by depth, then path, so the children of a node are contiguous.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::bounds::TREE_NODES;
use crate::formats::FormatError;
use crate::formats::tree::TreeFile;

/// Choices that do not form a tree, or a tree that does not fit the heads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// No choices.
    #[error("the tree has no choices; expected at least one path such as [0]")]
    Empty,
    #[error("the tree lists an empty choice; the root is always there and is not written down")]
    ListedRoot,
    /// A node without its parent.
    #[error("tree choice {choice:?} has no parent {parent:?}; every prefix of a choice must be a choice")]
    MissingParent { choice: Vec<usize>, parent: Vec<usize> },
    /// A path is listed twice.
    #[error("tree choice {choice:?} is listed twice; each path may stand once")]
    Duplicate { choice: Vec<usize> },
    /// More than [`TREE_NODES`] nodes.
    #[error("the tree has {nodes} nodes; at most {TREE_NODES} can be verified in one pass")]
    TooManyNodes { nodes: usize },
    /// A level beyond the last head.
    #[error(
        "tree choice {choice:?} needs {} heads, but there are {num_heads}; build the tree from these heads' own calibration",
        choice.len()
    )]
    DeeperThanHeads {
        /// The first path that is too deep.
        choice: Vec<usize>,
        num_heads: usize,
    },
    /// A static tree is expected.
    #[error("the tree is chosen at each step (\"dynamic\"); expected a static tree, with \"choices\"")]
    IsDynamic,
    /// A size of a tree that is chosen at each step.
    #[error("a tree chosen at each step has {asked} {what}; expected 1 to {most} for these heads and this backbone")]
    BadDynamic { what: &'static str, asked: usize, most: usize },
    /// A guess beyond those that a head makes.
    #[error("tree choice {choice:?} asks for guess {}, but a head has {top_k} guesses (0 to {})", choice[choice.len() - 1], top_k.saturating_sub(1))]
    ChildOutOfRange {
        choice: Vec<usize>,
        /// Guesses per head.
        top_k: usize,
    },
}

/// A static tree of candidates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseTree {
    choices: Vec<Vec<usize>>,
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    path: Vec<usize>,
    parent: Option<usize>,
    children: Range<usize>,
}

/// A tree file cannot be read, or its choices do not form a tree.
#[derive(Debug, thiserror::Error)]
pub enum TreeFileError {
    #[error(transparent)]
    File(#[from] FormatError),
    #[error("{}: {source}", path.display())]
    Tree { path: PathBuf, source: TreeError },
}

impl SparseTree {
    /// Loads the tree from a `tree.json`, or from a bare JSON list of paths, as trees are published. Also returns the parsed
    /// file.
    ///
    /// # Errors
    /// [`TreeFileError`] names the file.
    pub fn load(path: &Path) -> Result<(Self, TreeFile), TreeFileError> {
        let file = TreeFile::load(path)?;
        let tree = if file.dynamic.is_some() { Err(TreeError::IsDynamic) } else { Self::new(file.choices.clone()) };
        Ok((tree.map_err(|source| TreeFileError::Tree { path: path.to_owned(), source })?, file))
    }

    /// The tree of these paths, given in any order. [`Self::choices`] keeps the order.
    ///
    /// # Errors
    /// [`TreeError`] unless the paths and the root form a tree.
    pub fn new(choices: Vec<Vec<usize>>) -> Result<Self, TreeError> {
        match choices.len() {
            0 => return Err(TreeError::Empty),
            nodes if nodes > TREE_NODES => return Err(TreeError::TooManyNodes { nodes }),
            _ if choices.iter().any(Vec::is_empty) => return Err(TreeError::ListedRoot),
            _ => {}
        }
        let mut paths = choices.clone();
        paths.sort_by(|a, b| order(a, b));
        if let Some(pair) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(TreeError::Duplicate { choice: pair[0].clone() });
        }
        let nodes = link(paths)?;
        Ok(Self { choices, nodes })
    }

    /// Only the root: nothing is guessed.
    pub fn root() -> Self {
        Self { choices: vec![], nodes: link(vec![]).expect("the root has its place") }
    }

    /// The tree of nodes that are sorted by depth, then parent, given the parent of each but the root. A node's children are its guesses
    /// 0, 1, ….
    ///
    /// # Panics
    /// If the nodes are in another order, or too many.
    pub fn from_parents(parents: &[usize]) -> Self {
        let is_sorted = parents.is_sorted() && parents.iter().zip(1..).all(|(&parent, node)| parent < node);
        assert!(is_sorted && parents.len() <= TREE_NODES, "at most {TREE_NODES} nodes by depth, then parent");
        let mut nodes = vec![Node { path: vec![], parent: None, children: 1..1 }];
        for (at, &parent) in (1..).zip(parents) {
            let siblings = &mut nodes[parent].children;
            *siblings = if siblings.start == siblings.end { at..at + 1 } else { siblings.start..at + 1 };
            let child = siblings.len() - 1;
            let path = [&nodes[parent].path[..], &[child]].concat();
            nodes.push(Node { path, parent: Some(parent), children: 0..0 });
        }
        Self { choices: nodes[1..].iter().map(|node| node.path.clone()).collect(), nodes }
    }

    /// Only the best guess of each of `depth` heads.
    ///
    /// # Errors
    /// [`TreeError`] if `depth` is 0 or too large.
    pub fn chain(depth: usize) -> Result<Self, TreeError> {
        Self::new((1..=depth).map(|length| vec![0; length]).collect())
    }

    /// All combinations of the first `widths[h]` guesses of each head h (the paper's dense tree).
    ///
    /// # Errors
    /// [`TreeError`] if there are no nodes, or too many.
    pub fn cartesian(widths: &[usize]) -> Result<Self, TreeError> {
        let level_sizes = widths.iter().scan(1usize, |size, &width| {
            *size = size.saturating_mul(width);
            Some(*size)
        });
        let nodes = level_sizes.fold(0usize, usize::saturating_add);
        if nodes > TREE_NODES {
            return Err(TreeError::TooManyNodes { nodes });
        }
        let mut choices = Vec::with_capacity(nodes);
        let mut level = vec![Vec::new()];
        for &width in widths {
            level = level.iter().flat_map(|path| (0..width).map(|child| [&path[..], &[child]].concat())).collect();
            choices.extend(level.iter().cloned());
        }
        Self::new(choices)
    }

    /// Number of nodes, root included.
    #[expect(clippy::len_without_is_empty, reason = "there is always a root")]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The paths without the root, in the order in which they were given (best first after a search).
    pub fn choices(&self) -> &[Vec<usize>] {
        &self.choices
    }

    /// Child indices from the root to the node; empty for the root.
    pub fn path(&self, node: usize) -> &[usize] {
        &self.nodes[node].path
    }

    /// The node's level; 0 for the root.
    pub fn depth(&self, node: usize) -> usize {
        self.path(node).len()
    }

    /// Rank of the node's guess at its head; `None` for the root.
    pub fn child_index(&self, node: usize) -> Option<usize> {
        self.path(node).last().copied()
    }

    /// The node's parent; `None` for the root.
    pub fn parent(&self, node: usize) -> Option<usize> {
        self.nodes[node].parent
    }

    /// The node's children.
    pub fn children(&self, node: usize) -> Range<usize> {
        self.nodes[node].children.clone()
    }

    /// The nodes of a level that have children.
    pub fn inner_nodes(&self, depth: usize) -> Vec<usize> {
        (0..self.len()).filter(|&node| self.depth(node) == depth && !self.children(node).is_empty()).collect()
    }

    /// Tree attention: a node sees itself and its ancestors.
    pub fn attends(&self, query: usize, key: usize) -> bool {
        self.path(query).starts_with(self.path(key))
    }

    /// Depth of the deepest node: the number of heads that the tree uses.
    pub fn max_depth(&self) -> usize {
        self.depth(self.len() - 1)
    }

    /// How many guesses the tree takes from each head that it uses.
    pub fn widths(&self) -> Vec<usize> {
        let mut widths = vec![0; self.max_depth()];
        for path in &self.choices {
            let (level, child) = (path.len() - 1, path[path.len() - 1]);
            widths[level] = widths[level].max(child + 1);
        }
        widths
    }

    /// Whether both trees hold the same paths, in any order.
    pub fn same_nodes(&self, other: &Self) -> bool {
        self.nodes == other.nodes
    }

    /// Checks that `num_heads` heads with `top_k` guesses each can fill the tree.
    ///
    /// # Errors
    /// [`TreeError`] names the first node that they cannot fill.
    pub fn check_fits(&self, num_heads: usize, top_k: usize) -> Result<(), TreeError> {
        for node in &self.nodes[1..] {
            if node.path.len() > num_heads {
                return Err(TreeError::DeeperThanHeads { choice: node.path.clone(), num_heads });
            }
            if node.path.last().is_some_and(|&child| child >= top_k) {
                return Err(TreeError::ChildOutOfRange { choice: node.path.clone(), top_k });
            }
        }
        Ok(())
    }
}

fn order(a: &[usize], b: &[usize]) -> std::cmp::Ordering {
    a.len().cmp(&b.len()).then_with(|| a.cmp(b))
}

/// Puts the root before the sorted paths and links parents with children.
fn link(paths: Vec<Vec<usize>>) -> Result<Vec<Node>, TreeError> {
    let mut nodes = vec![Node { path: Vec::new(), parent: None, children: 1..1 }];
    for path in paths {
        let (_, before) = path.split_last().unwrap_or((&0, &[]));
        let Ok(parent) = nodes.binary_search_by(|node| order(&node.path, before)) else {
            let parent = before.to_vec();
            return Err(TreeError::MissingParent { choice: path, parent });
        };
        let at = nodes.len();
        let siblings = &mut nodes[parent].children;
        *siblings = if siblings.start == siblings.end { at..at + 1 } else { siblings.start..at + 1 };
        nodes.push(Node { path, parent: Some(parent), children: 0..0 });
    }
    Ok(nodes)
}

#[cfg(test)]
pub(crate) mod strategy {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::SparseTree;

    /// Random trees: each new node is a child of a random node already there.
    pub(crate) fn trees(max_nodes: usize, max_depth: usize, top_k: usize) -> impl Strategy<Value = SparseTree> {
        proptest::collection::vec((any::<Index>(), 0..top_k), 1..=max_nodes).prop_map(move |grown| {
            let mut paths: Vec<Vec<usize>> = vec![vec![]];
            for (parent, child) in grown {
                let path = [&parent.get(&paths)[..], &[child]].concat();
                if path.len() <= max_depth && !paths.contains(&path) {
                    paths.push(path);
                }
            }
            SparseTree::new(paths.split_off(1)).expect("grown from the root")
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_whose_choices_are_no_tree_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        let file = TreeFile::new(vec![vec![0], vec![2, 0]], 1.0);
        file.save(&path).unwrap();
        let error = SparseTree::load(&path).unwrap_err().to_string();
        assert!(error.contains("t.json: tree choice [2, 0] has no parent [2]"), "{error}");
    }

    proptest! {
        #[test]
        fn a_node_sees_exactly_itself_and_its_ancestors(tree in strategy::trees(40, 5, 4)) {
            for query in 0..tree.len() {
                let seen: Vec<usize> = (0..tree.len()).filter(|&key| tree.attends(query, key)).collect();
                let mut walked: Vec<usize> = std::iter::successors(Some(query), |&node| tree.parent(node)).collect();
                walked.reverse();
                prop_assert_eq!(&seen, &walked);
                prop_assert_eq!(seen.len(), tree.depth(query) + 1);
            }
        }

        #[test]
        fn parents_come_first_and_children_lie_side_by_side(tree in strategy::trees(40, 5, 4)) {
            prop_assert_eq!(tree.parent(0), None);
            for node in 1..tree.len() {
                let parent = tree.parent(node).unwrap();
                prop_assert!(parent < node && tree.children(parent).contains(&node));
                prop_assert_eq!(tree.path(parent), &tree.path(node)[..tree.depth(node) - 1]);
            }
            let children: usize = (0..tree.len()).map(|node| tree.children(node).len()).sum();
            prop_assert_eq!(children, tree.len() - 1);
            prop_assert_eq!(tree.widths().len(), tree.max_depth());
        }

        #[test]
        fn the_order_of_choices_does_not_change_the_nodes(tree in strategy::trees(30, 4, 3), seed in any::<u64>()) {
            let mut choices = tree.choices().to_vec();
            let length = choices.len();
            for at in 0..length {
                choices.swap(at, (seed as usize).wrapping_mul(31).wrapping_add(at * 7) % length);
            }
            let shuffled = SparseTree::new(choices.clone()).unwrap();
            prop_assert_eq!(&shuffled.nodes, &tree.nodes);
            prop_assert_eq!(shuffled.choices(), &choices[..]);
        }
    }

    #[test]
    fn parents_alone_make_a_tree_whose_guesses_are_the_best_ones() {
        let tree = SparseTree::from_parents(&[0, 0, 1, 1, 2]);
        let choices = vec![vec![0], vec![1], vec![0, 0], vec![0, 1], vec![1, 0]];
        assert_eq!(tree, SparseTree::new(choices).unwrap());
        assert_eq!(SparseTree::from_parents(&[]), SparseTree::root());
        assert!(std::panic::catch_unwind(|| SparseTree::from_parents(&[0, 1, 0])).is_err());
    }

    #[test]
    fn siblings_do_not_see_each_other() {
        let tree = SparseTree::new(vec![vec![0], vec![1], vec![1, 0]]).unwrap();
        assert!(!tree.attends(2, 1) && !tree.attends(1, 2) && tree.attends(3, 2) && tree.attends(3, 0));
        assert_eq!((tree.children(0), tree.children(1), tree.children(2)), (1..3, 0..0, 3..4));
        assert_eq!(tree.widths(), [2, 1]);
    }

    #[test]
    fn chains_and_dense_trees_have_the_nodes_they_should() {
        assert_eq!(SparseTree::chain(3).unwrap().choices(), [vec![0], vec![0, 0], vec![0, 0, 0]]);
        let dense = SparseTree::cartesian(&[2, 3]).unwrap();
        assert_eq!((dense.len(), dense.max_depth(), dense.widths()), (1 + 2 + 6, 2, vec![2, 3]));
        assert_eq!(SparseTree::chain(0), Err(TreeError::Empty));
        assert!(matches!(SparseTree::cartesian(&[1000, 1000, 1000]), Err(TreeError::TooManyNodes { .. })));
    }

    #[test]
    fn what_is_no_tree_is_refused_with_its_reason() {
        let refused = |choices: &[&[usize]]| SparseTree::new(choices.iter().map(|c| c.to_vec()).collect()).unwrap_err();
        assert_eq!(refused(&[]), TreeError::Empty);
        assert_eq!(refused(&[&[0], &[]]), TreeError::ListedRoot);
        assert_eq!(refused(&[&[0], &[0]]), TreeError::Duplicate { choice: vec![0] });
        let orphan = refused(&[&[0], &[1, 0]]);
        assert_eq!(orphan, TreeError::MissingParent { choice: vec![1, 0], parent: vec![1] });
        assert_eq!(
            orphan.to_string(),
            "tree choice [1, 0] has no parent [1]; every prefix of a choice must be a choice"
        );
        let wide = SparseTree::new((0..=TREE_NODES).map(|child| vec![child]).collect()).unwrap_err();
        assert_eq!(wide, TreeError::TooManyNodes { nodes: TREE_NODES + 1 });
    }

    #[test]
    fn a_tree_that_the_heads_cannot_fill_is_refused() {
        let tree = SparseTree::new(vec![vec![0], vec![0, 4], vec![0, 4, 0]]).unwrap();
        assert_eq!(tree.check_fits(3, 5), Ok(()));
        let deep = tree.check_fits(2, 5).unwrap_err();
        assert!(deep.to_string().starts_with("tree choice [0, 4, 0] needs 3 heads, but there are 2"), "{deep}");
        assert!(matches!(tree.check_fits(3, 4), Err(TreeError::ChildOutOfRange { top_k: 4, .. })));
    }
}
