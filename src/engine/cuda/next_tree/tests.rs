//! The oracle fills trees with the guesses of the drafters on libtorch.

use proptest::prelude::*;
use tch::{Device, Kind};

use super::*;
use crate::draft::TextSoFar;
use crate::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use crate::draft::trained::TrainedDrafter;
use crate::engine::cuda::plan::DevicePlan;
use crate::engine::cuda::state;
use crate::engine::sample::{Chosen, Sampling, Stream};
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::numbers::NonNegative;
use crate::torch::Generator;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;
use crate::tree::sparse_tree::strategy::trees;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A backbone whose embeddings are large enough that guesses depend on the path.
fn backbone() -> Llama {
    tch::set_num_threads(1);
    let llama = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 4);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(150.0);
    }
    llama
}

/// The projection to the vocabulary.
#[derive(Debug, Clone, Copy)]
enum Output {
    Whole,
    LmHead,
    Biased,
    LowRank,
    Shared,
    SharedLowRank,
}

fn heads(backbone: &Llama, architecture: HeadsArchitecture, output: Output, layers: usize, seed: u64) -> Heads {
    let LlamaConfig { hidden_size, vocab_size, .. } = backbone.config;
    let shape = HeadsShape {
        architecture,
        medusa_num_heads: 4,
        medusa_num_layers: layers,
        hidden_size,
        vocab_size: if matches!(output, Output::LmHead) { 0 } else { vocab_size },
        w2_bias: matches!(output, Output::Biased),
        w2_rank: if matches!(output, Output::LowRank | Output::SharedLowRank) { 5 } else { 0 },
        shared_w2: matches!(output, Output::Shared | Output::SharedLowRank),
    };
    let random = Heads::random(shape, Kind::Float, Device::Cpu, seed);
    let tensors = random.parameters().into_iter().map(|(_, tensor)| tensor * 3.0).collect();
    Heads::from_tensors(shape, tensors, vocab_size)
}

/// The tokens that the device's own steps write, with oracles in place of kernels.
fn filled(backbone: &Llama, heads: &Heads, tree: &SparseTree, hidden_1h: &Tensor, root: i64) -> Vec<i64> {
    let draft = heads.matrices_for(tree);
    let shape = Shape::of(backbone, Some(&draft));
    let weights = DeviceWeights::new(backbone, Some(&draft)).unwrap();
    let memory = DeviceMemory::new(&DevicePlan::of(&shape, 64), &shape, Device::Cpu);
    let (last, buffers) = (3, &memory.buffers);
    buffers.hidden_nh.narrow(0, last, 1).copy_(hidden_1h);
    buffers.state.shallow_clone().copy_(&state::before_first(9, last, root, Device::Cpu));
    let next = Nodes::for_tree(tree, Device::Cpu);
    NextTree { ops: &Ops::Oracle, weights: &weights, memory: &memory }.fill(&next).unwrap();
    Vec::try_from(buffers.tokens_n.narrow(0, 0, next.len()).to_kind(Kind::Int64)).unwrap()
}

/// The tokens that the drafter on libtorch proposes.
fn proposed(backbone: &Llama, heads: &Heads, tree: &SparseTree, hidden_1h: &Tensor, root: i64) -> Vec<i64> {
    let (tree, root) = (GuessTree::Static(tree.clone()), Chosen::on_host(root));
    let mut drafter = heads.drafter(backbone, &tree).unwrap();
    let sampling = Sampling::with_temperature(NonNegative::ZERO);
    let text = TextSoFar {
        row: 0,
        ids: &[],
        root: &root,
        state_1w: hidden_1h,
        sampling,
        stream: Stream::default(),
        may_draw: false,
    };
    Vec::try_from(&drafter.propose(&[text])[0].tokens_n).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn trees_are_filled_with_the_guesses_of_libtorch(
        tree in trees(40, 4, 5),
        architecture in prop_oneof![1 => Just(HeadsArchitecture::Medusa), 3 => Just(HeadsArchitecture::Hydra)],
        output in prop_oneof![
            Just(Output::Whole), Just(Output::LmHead), Just(Output::Biased), Just(Output::LowRank), Just(Output::Shared),
            Just(Output::SharedLowRank)
        ],
        layers in 1usize..4,
        seed in 0u64..1000,
        root in 0i64..50,
    ) {
        if (architecture, matches!(output, Output::Biased)) == (HeadsArchitecture::Medusa, true) {
            return Ok(()); // refused
        }
        let backbone = backbone();
        let heads = heads(&backbone, architecture, output, layers, seed);
        let hidden_1h = Generator::seeded(seed).normal(&[1, backbone.config.hidden_size], FLOAT);
        let (got, expected) = tch::no_grad(|| {
            (filled(&backbone, &heads, &tree, &hidden_1h, root), proposed(&backbone, &heads, &tree, &hidden_1h, root))
        });
        prop_assert_eq!(got, expected);
    }
}

/// Otherwise the test above would not see a wrong path.
#[test]
fn guesses_depend_on_every_token_of_the_path() {
    let backbone = backbone();
    let heads = heads(&backbone, HeadsArchitecture::Hydra, Output::Whole, 2, 1);
    let hidden_1h = Generator::seeded(2).normal(&[1, backbone.config.hidden_size], FLOAT);
    let tree = SparseTree::cartesian(&[4, 2, 1, 1]).unwrap();
    let tokens = tch::no_grad(|| filled(&backbone, &heads, &tree, &hidden_1h, 7));
    for depth in 1..=4 {
        let first_children =
            (1..tree.len()).filter(|&node| tree.depth(node) == depth && tree.child_index(node) == Some(0));
        let mut guesses: Vec<i64> = first_children.map(|node| tokens[node]).collect();
        let parents = guesses.len();
        guesses.sort_unstable();
        guesses.dedup();
        assert!(guesses.len() > 1 || parents == 1, "level {depth}: {guesses:?} below {parents} nodes");
    }
    let other = tch::no_grad(|| filled(&backbone, &heads, &tree, &hidden_1h, 8));
    assert!(tokens[1..].iter().zip(&other[1..]).filter(|(a, b)| a != b).count() > tree.len() / 2);
}

/// The tensors that [`DeviceWeights`] allocates are those that the plan counts.
#[test]
fn copies_of_the_heads_weights_are_those_of_the_plan() {
    let (backbone, tree) = (backbone(), SparseTree::cartesian(&[3, 2, 2]).unwrap());
    let sizes_of = |tensors: Vec<&Tensor>| tensors.into_iter().map(Tensor::size).collect::<Vec<_>>();
    for (architecture, output) in [
        (HeadsArchitecture::Medusa, Output::Whole),
        (HeadsArchitecture::Medusa, Output::LowRank),
        (HeadsArchitecture::Hydra, Output::Biased),
        (HeadsArchitecture::Hydra, Output::LowRank),
        (HeadsArchitecture::Hydra, Output::SharedLowRank),
    ] {
        let heads = heads(&backbone, architecture, output, 2, 3);
        let draft = heads.matrices_for(&tree);
        let shape = Shape::of(&backbone, Some(&draft));
        let planned: Vec<Vec<i64>> =
            DevicePlan::of(&shape, 64).head_copies.into_iter().map(|size| size.shape).collect();
        let weights = DeviceWeights::new(&backbone, Some(&draft)).unwrap();
        let own: Vec<u64> = heads.parameters().into_iter().map(|(_, tensor)| tensor.data_ptr() as u64).collect();
        let is_copy = |tensor: &&Tensor| !own.contains(&(tensor.data_ptr() as u64));
        let all: Vec<&Tensor> = match weights.heads.as_ref().unwrap() {
            HeadWeights::AtOnce(heads) => heads.blocks.iter().flatten().chain(&heads.w2_vh).collect(),
            HeadWeights::ByLevel(heads) => [&heads.hidden_wh, &heads.bias_w]
                .into_iter()
                .chain(heads.levels.iter().map(|level| &level.token_wh))
                .chain(heads.levels.iter().flat_map(|level| level.blocks.iter().flatten()))
                .chain(heads.levels.iter().flat_map(|level| &level.w2_vh))
                .chain(heads.levels.iter().flat_map(|level| &level.output_bias_v))
                .collect(),
        };
        let mut copies: Vec<&Tensor> = all.into_iter().filter(is_copy).collect();
        copies.dedup_by_key(|copy| copy.data_ptr() as u64); // a shared one
        assert_eq!(sizes_of(copies), planned, "{architecture:?}, {output:?}");
    }
}
