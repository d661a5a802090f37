//! A tree of guessed tokens that grows node by node. No tensors here.

/// The root's token and guesses below it. Node 0 is the root; siblings have different tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenTree {
    /// The root's is itself.
    parents: Vec<usize>,
    tokens: Vec<i64>,
}

/// The nodes of a tree by depth, siblings side by side, as in a [`SparseTree`](super::sparse_tree::SparseTree).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LevelNodes {
    /// The parent of each node but the root.
    pub parents: Vec<usize>,
    /// The token of each node, the root's first.
    pub tokens: Vec<i64>,
}

impl TokenTree {
    /// Only the root.
    pub fn new(root: i64) -> Self {
        Self { parents: vec![0], tokens: vec![root] }
    }

    /// Number of guesses: nodes without the root.
    pub fn guesses(&self) -> usize {
        self.tokens.len() - 1
    }

    /// The child of `parent` that holds `token`.
    pub fn child(&self, parent: usize, token: i64) -> Option<usize> {
        let own = |node: &usize| self.parents[*node] == parent && self.tokens[*node] == token;
        (parent + 1..self.tokens.len()).find(own)
    }

    /// Adds a child that `parent` does not have yet, and returns it.
    pub fn add(&mut self, parent: usize, token: i64) -> usize {
        debug_assert!(self.child(parent, token).is_none(), "token {token} twice below node {parent}");
        self.parents.push(parent);
        self.tokens.push(token);
        self.tokens.len() - 1
    }

    /// The nodes by depth; siblings stay in the order in which they were added.
    pub fn by_level(&self) -> LevelNodes {
        let mut children = vec![vec![]; self.tokens.len()];
        (1..self.tokens.len()).for_each(|node| children[self.parents[node]].push(node));
        let (mut order, mut parents) = (vec![0], vec![]);
        for place in 0..self.tokens.len() {
            let children = &children[order[place]]; // its own place comes before those of its children
            order.extend(children);
            parents.resize(parents.len() + children.len(), place);
        }
        LevelNodes { parents, tokens: order.iter().map(|&node| self.tokens[node]).collect() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::tree::sparse_tree::SparseTree;

    fn path(parents: &[usize], tokens: &[i64], mut node: usize) -> Vec<i64> {
        let mut path = vec![];
        while node > 0 {
            path.push(tokens[node]);
            node = parents[node];
        }
        path.reverse();
        path
    }

    #[test]
    fn levels_keep_siblings_together_in_their_order() {
        let mut tree = TokenTree::new(7);
        let first = tree.add(0, 30);
        tree.add(first, 10);
        let second = tree.add(0, 20);
        tree.add(second, 10);
        tree.add(first, 5);
        assert_eq!((tree.child(first, 5), tree.child(0, 5), tree.guesses()), (Some(5), None, 5));
        let LevelNodes { parents, tokens } = tree.by_level();
        assert_eq!((parents, tokens), (vec![0, 0, 1, 1, 2], vec![7, 30, 20, 10, 5, 10]));
    }

    proptest! {
        #[test]
        fn by_level_holds_the_same_paths_as_a_sparse_tree(grown in proptest::collection::vec((any::<Index>(), 0..3i64), 0..40)) {
            let mut tree = TokenTree::new(9);
            for (parent, token) in grown {
                let parent = parent.index(tree.guesses() + 1);
                if tree.child(parent, token).is_none() {
                    tree.add(parent, token);
                }
            }
            let nodes = tree.by_level();
            let own: Vec<usize> = [0].into_iter().chain(nodes.parents.iter().copied()).collect();
            let paths = |parents: &[usize], tokens: &[i64]| {
                let mut paths: Vec<_> = (0..tokens.len()).map(|node| path(parents, tokens, node)).collect();
                paths.sort();
                paths
            };
            prop_assert_eq!(paths(&own, &nodes.tokens), paths(&tree.parents, &tree.tokens));
            let sparse = SparseTree::from_parents(&nodes.parents);
            let parents: Vec<usize> = (1..sparse.len()).filter_map(|node| sparse.parent(node)).collect();
            prop_assert_eq!(parents, nodes.parents);
        }
    }
}
