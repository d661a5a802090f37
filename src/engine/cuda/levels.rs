//! The levels of a static tree, from the root down, as sequential heads fill them: at the nodes of level d that have children, head d
//! guesses these children. A node's guesses depend on the tokens on its path, so the levels are filled one after the other.
//!
//! The first ResBlock of a sequential head is a sum over what it reads: the hidden state and the token of each node on the path. A node
//! therefore inherits the sums of its parent for all heads that are still to guess, and only adds what its own token contributes.

// N nodes of a level that have children, C nodes of the level below, K heads, H hidden, W = 2(K - d)·H
use tch::{Device, Kind, Tensor};

use super::draft::DraftShape;
use crate::tree::sparse_tree::SparseTree;

/// A level of a tree. All int32.
#[derive(Debug)]
pub struct TreeLevel {
    /// `[N]`: its nodes with children.
    pub nodes_n: Tensor,
    /// `[N]`: the place of each one's parent among the N nodes of the level above; 0 for the root.
    pub parents_n: Tensor,
    /// The first node of the level below; the others follow.
    pub below: i64,
    /// `[C]`: the place of each one's parent among `nodes_n`.
    pub rows_c: Tensor,
}

impl TreeLevel {
    /// The levels of a tree but for the lowest one, which has no children.
    pub fn for_tree(tree: &SparseTree, device: Device) -> Vec<Self> {
        let inner: Vec<Vec<usize>> = (0..tree.max_depth()).map(|depth| tree.inner_nodes(depth)).collect();
        let row = |level: usize, node: usize| inner[level].binary_search(&node).expect("a parent has children");
        let place = |node: &usize| tree.parent(*node).map_or(0, |parent| row(tree.depth(parent), parent));
        let level = |nodes: &Vec<usize>| {
            let below: Vec<usize> = nodes.iter().flat_map(|&node| tree.children(node)).collect();
            Self {
                nodes_n: int32(nodes.iter().copied(), device),
                parents_n: int32(nodes.iter().map(place), device),
                below: below[0] as i64,
                rows_c: int32(below.iter().map(place), device),
            }
        };
        inner.iter().map(level).collect()
    }

    /// N.
    pub fn rows(&self) -> i64 {
        self.nodes_n.size()[0]
    }
}

fn int32(numbers: impl Iterator<Item = usize>, device: Device) -> Tensor {
    Tensor::from_slice(&numbers.map(|number| number as i64).collect::<Vec<_>>()).to_kind(Kind::Int).to_device(device)
}

impl DraftShape<'_> {
    /// N of each level.
    pub fn level_rows(&self) -> Vec<i64> {
        (0..self.tree.max_depth()).map(|depth| self.tree.inner_nodes(depth).len() as i64).collect()
    }

    /// `[N, W]` of each level: for every head from the level's own on, the outputs of its first block's linear layer, then those of its
    /// residual connection. Before them, as one row, what the hidden state adds to all heads.
    pub fn level_sums(&self, hidden_size: i64) -> Vec<[i64; 2]> {
        let width = |level: i64| 2 * (self.num_heads() - level) * hidden_size;
        let level_sizes = self.level_rows().into_iter().zip(0..).map(|(rows, level)| [rows, width(level)]);
        [[1, width(0)]].into_iter().chain(level_sizes).collect()
    }
}

/// The parts of a buffer, one after another, as matrices of these sizes.
pub fn matrices(buffer: &Tensor, sizes: &[[i64; 2]]) -> Vec<Tensor> {
    let mut end = 0;
    let part = |&[rows, width]: &[i64; 2]| {
        end += rows * width;
        buffer.narrow(0, end - rows * width, rows * width).view([rows, width])
    };
    sizes.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cuda::draft::DraftInput;

    fn ids(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.to_kind(Kind::Int64)).unwrap()
    }

    #[test]
    fn only_nodes_with_children_are_rows_and_children_know_their_parents_row() {
        let paths = [vec![0], vec![1], vec![2], vec![0, 0], vec![0, 3], vec![2, 1], vec![2, 1, 0], vec![2, 1, 5]];
        let tree = SparseTree::new(paths.to_vec()).unwrap();
        // Nodes: 0; 1, 2, 3; 4, 5 below 1, 6 below 3; 7, 8 below 6.
        let levels = TreeLevel::for_tree(&tree, Device::Cpu);
        let found: Vec<_> = levels
            .iter()
            .map(|level| (ids(&level.nodes_n), ids(&level.parents_n), level.below, ids(&level.rows_c)))
            .collect();
        assert_eq!(
            found,
            [
                (vec![0], vec![0], 1, vec![0, 0, 0]),
                (vec![1, 3], vec![0, 0], 4, vec![0, 0, 1]),
                (vec![6], vec![1], 7, vec![0, 0]),
            ]
        );
        let shape = DraftShape {
            tree: &tree,
            input: DraftInput::HiddenAndPath,
            blocks: 1,
            multiplied_out: 0,
            is_truncated: false,
            parameters: 0,
        };
        assert_eq!(shape.level_rows(), [1, 2, 1]);
        let sizes = shape.level_sums(10);
        assert_eq!(sizes, [[1, 60], [1, 60], [2, 40], [1, 20]]);
        let parts = matrices(&Tensor::arange(220, (Kind::Int64, Device::Cpu)), &sizes);
        assert_eq!(parts[2].size(), [2, 40]);
        assert_eq!(parts.iter().map(|part| part.int64_value(&[0, 0])).collect::<Vec<_>>(), [0, 60, 120, 200]);
    }
}
