//! Trees and rotary tables in the layout that kernels read.

// N nodes, L layers, G key/value heads, S room for tokens, D head size
use tch::{Device, Kind, Tensor};

use crate::model::config::LlamaConfig;
use crate::model::rope::Rope;
use crate::tree::sparse_tree::SparseTree;

/// Largest number of nodes in a step: the bits of a row of [`Nodes::sees_n2`].
pub const MAX_NODES: usize = 128;

/// The nodes of a step: depths, parents, children and attention mask. All int32 except for the mask.
#[derive(Debug)]
pub struct Nodes {
    /// `[N]`: levels below the root.
    pub depths_n: Tensor,
    /// `[N]`: the parent; 0 for the root.
    pub parents_n: Tensor,
    /// `[N]`: rank of the node's guess at its head; 0 for the root.
    pub guesses_n: Tensor,
    /// `[N, 2]`: the first child, and one past the last.
    pub children_n2: Tensor,
    /// `[N, 2]` int64: bit `j % 64` of word `j / 64` is set if the node attends to node j.
    pub sees_n2: Tensor,
}

impl Nodes {
    /// The nodes of a tree.
    ///
    /// # Panics
    /// For more than [`MAX_NODES`] nodes.
    pub fn for_tree(tree: &SparseTree, device: Device) -> Self {
        assert!(tree.len() <= MAX_NODES, "a step has at most {MAX_NODES} nodes");
        let nodes = 0..tree.len();
        let children = |node| [tree.children(node).start, tree.children(node).end];
        let sees = |query: usize| nodes.clone().filter(move |&key| tree.attends(query, key)).collect();
        Self {
            depths_n: int32(nodes.clone().map(|node| tree.depth(node)), device),
            parents_n: int32(nodes.clone().map(|node| tree.parent(node).unwrap_or(0)), device),
            guesses_n: int32(nodes.clone().map(|node| tree.child_index(node).unwrap_or(0)), device),
            children_n2: int32(nodes.clone().flat_map(children), device).view([-1, 2]),
            sees_n2: bits(nodes.clone().map(sees), device),
        }
    }

    /// A chain of `n` tokens: plain decoding (1), or a piece of a prompt.
    ///
    /// # Panics
    /// For more than [`MAX_NODES`] tokens, or none.
    pub fn chain(n: usize, device: Device) -> Self {
        let tree = match n {
            1 => SparseTree::root(),
            _ => SparseTree::chain(n - 1).expect("at least one token below the root"),
        };
        Self::for_tree(&tree, device)
    }

    /// N, the number of nodes.
    pub fn len(&self) -> i64 {
        self.depths_n.size()[0]
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn int32(numbers: impl Iterator<Item = usize>, device: Device) -> Tensor {
    let numbers: Vec<i64> = numbers.map(|number| number as i64).collect();
    Tensor::from_slice(&numbers).to_kind(Kind::Int).to_device(device)
}

fn bits(rows: impl Iterator<Item = Vec<usize>>, device: Device) -> Tensor {
    let word = |set: &[usize], at| {
        set.iter().filter(|&&node| node / 64 == at).fold(0u64, |word, node| word | 1 << (node % 64))
    };
    let words: Vec<i64> = rows.flat_map(|set| [0, 1].map(|at| word(&set, at).cast_signed())).collect();
    Tensor::from_slice(&words).view([-1, 2]).to_device(device)
}

/// Cosines and sines of every position, in float32 but rounded to the backbone's dtype, as in its own rotary embedding.
#[derive(Debug)]
pub struct Rotations {
    /// `[S, D/2]`.
    pub cos_sd: Tensor,
    /// `[S, D/2]`.
    pub sin_sd: Tensor,
}

impl Rotations {
    /// Tables of the first `positions` positions, scaled according to `config`.
    pub fn new(config: &LlamaConfig, positions: i64, kind: Kind, device: Device) -> Self {
        let half = config.head_dim / 2;
        let rotation = rope(config, kind, device).at(&Tensor::arange(positions, (Kind::Float, device)));
        // Rotating a vector of ones in its first half and zeros in its second yields the cosines and the sines.
        let unit_d = Tensor::cat(&[Tensor::ones([half], (kind, device)), Tensor::zeros([half], (kind, device))], 0);
        let both_sd =
            rotation.apply(&unit_d.expand([positions, 1, 2 * half], false)).squeeze_dim(1).to_kind(Kind::Float);
        let part = |at| both_sd.narrow(1, at, half).contiguous();
        Self { cos_sd: part(0), sin_sd: part(half) }
    }
}

/// The rotary embeddings of all layers.
fn rope(config: &LlamaConfig, kind: Kind, device: Device) -> Rope {
    let layers = config.layer_kinds();
    let rotary = layers.only().and_then(|layer| layer.rotary.as_ref());
    Rope::new(rotary.expect("check_blocks refuses other backbones"), kind, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::RopeScaling;
    use crate::torch::Generator;

    #[test]
    fn rotations_are_the_ropes() {
        let config = LlamaConfig::tiny();
        for kind in [Kind::Float, Kind::BFloat16] {
            let rotations = Rotations::new(&config, 50, kind, Device::Cpu);
            let x_nd = Generator::seeded(1).normal(&[50, 1, config.head_dim], (Kind::Float, Device::Cpu)).to_kind(kind);
            let positions = Tensor::arange(50, (Kind::Float, Device::Cpu));
            let expected = rope(&config, kind, Device::Cpu).at(&positions).apply(&x_nd).to_kind(Kind::Float);
            let x_nd = x_nd.squeeze_dim(1).to_kind(Kind::Float);
            let halves = x_nd.chunk(2, 1);
            let first = &halves[0] * &rotations.cos_sd - &halves[1] * &rotations.sin_sd;
            let second = &halves[1] * &rotations.cos_sd + &halves[0] * &rotations.sin_sd;
            let got = Tensor::cat(&[first, second], 1).unsqueeze(1);
            // One value below 8 is rounded to the dtype, and one product is rounded before the sum.
            let tolerance = if kind == Kind::Float { 1e-6 } else { 0.06 };
            assert!((got - expected).abs().max().double_value(&[]) < tolerance, "{kind:?}");
        }
    }

    /// `yarn` and `longrope` stretch cosines and sines as well as frequencies.
    #[test]
    fn rotations_carry_the_magnitude_of_their_scaling() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            original_max_position_embeddings: 16,
            attention_factor: 1.25,
        };
        let longrope = RopeScaling::LongRope {
            short_factor: vec![1.0, 1.5, 2.0],
            long_factor: vec![2.0, 3.0, 4.0],
            original_max_position_embeddings: 16,
            longest: 64,
            attention_factor: 1.25,
        };
        for (rope_scaling, magnitude) in [(RopeScaling::Default, 1.0), (yarn, 1.25), (longrope, 1.25)] {
            let config = LlamaConfig { rope_scaling, ..LlamaConfig::tiny() };
            for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 0.01)] {
                let Rotations { cos_sd, sin_sd } = Rotations::new(&config, 50, kind, Device::Cpu);
                let magnitude_sd = (&cos_sd * &cos_sd + &sin_sd * &sin_sd).sqrt();
                let far = (magnitude_sd - magnitude).abs().max().double_value(&[]);
                assert!(far < tolerance, "{:?}, {kind:?}: {far}", config.rope_scaling);
            }
        }
    }

    #[test]
    fn bits_say_whom_a_node_sees() {
        let tree = SparseTree::cartesian(&[8, 8]).unwrap();
        let nodes = Nodes::for_tree(&tree, Device::Cpu);
        for (query, key) in (0..tree.len()).flat_map(|query| (0..tree.len()).map(move |key| (query, key))) {
            let word = nodes.sees_n2.int64_value(&[query as i64, (key / 64) as i64]).cast_unsigned();
            assert_eq!(word >> (key % 64) & 1 == 1, tree.attends(query, key), "{query} {key}");
        }
        assert_eq!(Vec::<i64>::try_from(Nodes::chain(3, Device::Cpu).sees_n2.view(-1)).unwrap(), [1, 0, 3, 0, 7, 0]);
    }
}
