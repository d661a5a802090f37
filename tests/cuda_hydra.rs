//! Promise: the CUDA loop with Hydra heads and a static tree decodes the texts of the drafter on libtorch, in as many steps. Heads with a
//! projection of low rank guess what they guess with the product. Without a GPU, the loop runs on the oracles of its kernels, and on the
//! kernels' own code in an emulator.

use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::generate;
use medusa::decode::host_loop::HostLoop;
use medusa::decode::request::{Generation, Request};
use medusa::decode::step::Drafting;
use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use medusa::draft::ngram::NgramDrafter;
use medusa::draft::token_map::TokenMap;
use medusa::draft::trained::TrainedDrafter;
use medusa::engine::cuda::error::CudaError;
use medusa::engine::cuda::ops::Ops;
use medusa::engine::cuda::plan::DevicePlan;
use medusa::engine::cuda::shape::{Shape, UnsupportedModel};
use medusa::engine::fastest::fastest;
use medusa::formats::tree::DynamicTree;
use medusa::model::llama::Llama;
use medusa::session::drafter::ReadyDrafter;
use medusa::tree::accept::{Acceptance, TypicalAcceptance};
use medusa::tree::guess_tree::GuessTree;
use medusa::tree::sparse_tree::SparseTree;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use crate::cuda_engine::{VOCABULARY, assert_same, backbone_of, config, go_on, qwen2, qwen3, sampled, trees};

const TYPICAL: Acceptance = Acceptance::Typical(TypicalAcceptance { posterior_threshold: 0.2, posterior_alpha: 0.5 });

/// How heads of a test differ.
#[derive(Debug, Clone, Copy)]
struct Variant {
    architecture: HeadsArchitecture,
    blocks: usize,
    /// Whether the backbone's lm_head is the output layer.
    is_shared: bool,
    w2_bias: bool,
    /// 0: none.
    w2_rank: i64,
}

const HYDRA: Variant =
    Variant { architecture: HeadsArchitecture::Hydra, blocks: 2, is_shared: false, w2_bias: false, w2_rank: 0 };

fn heads_of(llama: &Llama, num_heads: usize, variant: Variant, seed: u64) -> Heads {
    let Variant { architecture, blocks, is_shared, w2_bias, w2_rank } = variant;
    let shape = HeadsShape {
        architecture,
        medusa_num_heads: num_heads,
        medusa_num_layers: blocks,
        hidden_size: llama.config.hidden_size,
        vocab_size: if is_shared { 0 } else { llama.config.vocab_size },
        w2_bias: w2_bias && !is_shared,
        w2_rank,
        shared_w2: false,
    };
    let random = Heads::random(shape, llama.kind(), Device::Cpu, seed);
    let tensors = random.parameters().into_iter().map(|(_, tensor)| tensor * 2.0).collect();
    Heads::from_tensors(shape, tensors, llama.config.vocab_size)
}

/// Decodes with the drafter on libtorch: the oracle.
fn on_libtorch(
    llama: &Llama,
    (heads, tree): (&Heads, &SparseTree),
    acceptance: Acceptance,
    request: &Request,
) -> Generation {
    let tree = GuessTree::Static(tree.clone());
    let drafter = heads.drafter(llama, &tree).expect("they fit");
    let mut host = HostLoop::new(fastest(llama), Some((drafter, acceptance)));
    host.decode(Drafting::On, request, &mut go_on()).expect("a text")
}

fn device_loop<'a>(
    llama: &'a Llama,
    (heads, tree): (&Heads, &'a SparseTree),
    acceptance: Acceptance,
    ops: Ops,
) -> Result<DeviceLoop<'a>, CudaError> {
    DeviceLoop::new(llama, Some((&heads.matrices_for(tree), acceptance)), ops)
}

/// Many random settings, the same in every run.
#[test]
fn texts_are_those_of_the_drafter_on_libtorch() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut several = 0;
    for world in 0..48u64 {
        let family = [|config| config, qwen2, qwen3][(world / 8 % 3) as usize];
        let llama = backbone_of(family(config([1, 2, 4][rng.random_range(0..3)], None, 64)), Kind::Float, world);
        let variant = Variant {
            blocks: rng.random_range(1..4),
            is_shared: world % 5 == 0,
            w2_bias: world % 2 == 0,
            w2_rank: if world % 7 == 1 { 4 } else { 0 },
            ..HYDRA
        };
        let heads = heads_of(&llama, 3, variant, world + 1);
        let tree = &trees()[rng.random_range(0..4)];
        let acceptance = [Acceptance::Greedy, TYPICAL, Acceptance::Rejection][(world % 3) as usize];
        let temperature = [0.0, 0.7, 1.1][rng.random_range(0..3)];
        let prompt: Vec<i64> = (0..rng.random_range(1..40)).map(|_| rng.random_range(0..VOCABULARY)).collect();
        let request = sampled(&prompt, rng.random_range(1..30), temperature, world);
        let of = format!("world {world}, {variant:?}, {acceptance:?}, temperature {temperature}, {} nodes", tree.len());

        let slow = on_libtorch(&llama, (&heads, tree), acceptance, &request);
        let mut engine = device_loop(&llama, (&heads, tree), acceptance, Ops::Oracle).expect("it can decode this");
        assert_same(&engine.decode(Drafting::On, &request, &mut go_on()).expect("a text"), &slow, &of);
        let plain = generate::plain(&llama, &request, &mut go_on()).expect("a text");
        assert_same(&engine.decode(Drafting::Off, &request, &mut go_on()).expect("a text"), &plain, &of);
        several += u32::from(slow.accept_lengths.iter().any(|&length| length > 1));
    }
    assert!(several >= 16, "the worlds hardly test anything: {several}");
}

#[test]
fn turns_of_a_conversation_are_drafted_as_on_libtorch() {
    let llama = backbone_of(config(2, Some(6), 200), Kind::Float, 12);
    let heads = heads_of(&llama, 3, HYDRA, 13);
    let tree = SparseTree::cartesian(&[5, 3, 2]).expect("51 nodes");
    let mut engine = device_loop(&llama, (&heads, &tree), Acceptance::Greedy, Ops::Oracle).expect("it can decode this");
    let mut text = vec![1];
    for turn in 0..6 {
        text.extend([turn, 3, 5 + turn]);
        let request = sampled(&text, 9, 0.0, 1);
        let said = engine.decode(Drafting::On, &request, &mut go_on()).expect("a text");
        let expected = on_libtorch(&llama, (&heads, &tree), Acceptance::Greedy, &request);
        assert_same(&said, &expected, &format!("turn {turn}"));
        text.extend(said.new_ids);
    }
}

#[test]
fn logits_with_nan_end_the_text_with_an_error() {
    let llama = backbone_of(config(2, None, 64), Kind::Float, 20);
    let heads = heads_of(&llama, 2, HYDRA, 21);
    let tree = SparseTree::cartesian(&[3, 2]).expect("10 nodes");
    let mut engine = device_loop(&llama, (&heads, &tree), Acceptance::Greedy, Ops::Oracle).expect("it can decode this");
    let lm_head = llama.weights().into_iter().find(|(name, _)| name == "lm_head.weight").expect("its own").1;
    let whole = lm_head.copy();
    let _ = lm_head.shallow_clone().fill_(f64::NAN);
    let request = sampled(&[1, 2, 3], 5, 0.0, 1);
    let error = engine.decode(Drafting::On, &request, &mut go_on()).unwrap_err().to_string();
    assert!(error.starts_with("logits contain NaN or infinity at new token 1"), "{error}");
    lm_head.shallow_clone().copy_(&whole);
    let said = engine.decode(Drafting::On, &request, &mut go_on()).expect("the next text is none of that one's");
    assert_same(&said, &on_libtorch(&llama, (&heads, &tree), Acceptance::Greedy, &request), "after an error");
}

#[test]
fn heads_that_the_kernels_cannot_run_are_refused_with_the_engines_that_can() {
    let llama = backbone_of(config(2, None, 64), Kind::Float, 16);
    let tree = SparseTree::cartesian(&[3, 2]).expect("10 nodes");
    let refused = |variant: Variant| {
        let heads = heads_of(&llama, 2, variant, 17);
        device_loop(&llama, (&heads, &tree), Acceptance::Greedy, Ops::Oracle).unwrap_err()
    };
    let plus_plus = refused(Variant { architecture: HeadsArchitecture::HydraPlusPlus, ..HYDRA });
    assert!(matches!(plus_plus, CudaError::UnsupportedModel(UnsupportedModel::Prefix)), "{plus_plus:?}");
    let expected = "Hydra++ heads read a prefix layer, which the CUDA engine has no kernels for; use --engine tch, or --engine cpu on the CPU";
    assert_eq!(plus_plus.to_string(), expected);
    let truncated = heads_of(&llama, 2, HYDRA, 17)
        .with_token_map(TokenMap::new((0..VOCABULARY).collect(), Device::Cpu), VOCABULARY);
    let tree = GuessTree::Static(tree.clone());
    let drafter = ReadyDrafter::trained(&llama, &truncated, &tree).expect("they fit");
    let draft = drafter.on_device().expect("a static tree");
    let error = DeviceLoop::new(&llama, Some((&draft, Acceptance::Greedy)), Ops::Oracle).unwrap_err();
    assert!(error.to_string().starts_with("the heads guess among a part of the vocabulary"), "{error}");
    let biased = refused(Variant { architecture: HeadsArchitecture::Medusa, w2_bias: true, ..HYDRA });
    assert!(biased.to_string().starts_with("the heads' W2 has a bias"), "{biased}");
}

#[test]
fn drafters_that_need_the_host_are_refused_with_the_engines_that_can() {
    let llama = backbone_of(config(2, None, 64), Kind::Float, 16);
    let heads = heads_of(&llama, 2, HYDRA, 17);
    let tree = GuessTree::Dynamic(DynamicTree { nodes: 8, depth: 2, top_k: 3 });
    let dynamic = ReadyDrafter::trained(&llama, &heads, &tree).expect("they fit");
    for (drafter, what) in [
        (dynamic, "trees that are chosen at each step"),
        (ReadyDrafter::new(NgramDrafter::new(&llama), "prompt lookup", NgramDrafter::max_nodes()), "prompt lookup"),
    ] {
        let expected = format!(
            "the CUDA engine drafts with Medusa and Hydra heads in static trees, not with {what}; use --engine tch, or --engine cpu on the CPU"
        );
        assert_eq!(drafter.on_device().unwrap_err().to_string(), expected);
    }
    let tree = GuessTree::Static(SparseTree::cartesian(&[3, 2]).expect("10 nodes"));
    let fixed = ReadyDrafter::trained(&llama, &heads, &tree).expect("they fit");
    assert!(fixed.on_device().is_ok_and(|draft| draft.heads.is_some()));
}

/// B·A is multiplied out once, when the engine is built: the same texts as with a W2 of that product, and the memory plan counts it.
#[test]
fn heads_of_low_rank_decode_as_with_their_product() {
    let llama = backbone_of(config(2, None, 64), Kind::Float, 30);
    let tree = SparseTree::cartesian(&[4, 3, 2]).expect("41 nodes");
    for architecture in [HeadsArchitecture::Medusa, HeadsArchitecture::Hydra] {
        let low = heads_of(&llama, 3, Variant { architecture, w2_rank: 4, ..HYDRA }, 31);
        let full = at_full_rank(&low);
        let request = sampled(&[1, 7, 2, 9], 40, 0.0, 1);
        let decode = |heads: &Heads| {
            let mut engine =
                device_loop(&llama, (heads, &tree), Acceptance::Greedy, Ops::Oracle).expect("it can decode this");
            engine.decode(Drafting::On, &request, &mut go_on()).expect("a text")
        };
        let (got, expected) = (decode(&low), decode(&full));
        assert_same(&got, &expected, &format!("{architecture:?}"));
        assert_same(
            &got,
            &on_libtorch(&llama, (&low, &tree), Acceptance::Greedy, &request),
            &format!("{architecture:?}"),
        );
        let plan = |heads: &Heads| {
            let draft = heads.matrices_for(&tree);
            let shape = Shape::of(&llama, Some(&draft));
            DevicePlan::of(&shape, shape.room(64))
        };
        let (low, full) = (plan(&low), plan(&full));
        let product = 3 * (4 * VOCABULARY * llama.config.hidden_size).unsigned_abs();
        assert_eq!(low.bytes(), full.bytes() + product, "{architecture:?}");
        assert!(low.weight_bytes < full.weight_bytes, "{architecture:?}");
    }
}

/// The same heads with B·A as W2, in the order of the file's tensors.
fn at_full_rank(heads: &Heads) -> Heads {
    let tensors = (0..heads.num_heads()).flat_map(|head| {
        let (blocks, b_vr) = (heads.head(head).block_parameters(), heads.head(head).w2().expect("a matrix"));
        let (a_rh, blocks) = blocks.split_last().expect("A is last");
        let mut tensors: Vec<Tensor> = blocks.iter().map(|tensor| tensor.shallow_clone()).collect();
        tensors.push(b_vr.matmul(a_rh));
        tensors
    });
    Heads::from_tensors(HeadsShape { w2_rank: 0, ..heads.shape() }, tensors.collect(), heads.vocab_size())
}

/// Runs the whole loop on the kernels' own code, compiled for the CPU, each kernel next to its oracle on the same
/// inputs. In 16 bits, near ties can change texts; with these seeds they are equal.
#[test]
#[cfg(target_os = "linux")]
fn the_loop_on_emulated_kernels_makes_the_oracles_texts() {
    use medusa::model::config::LlamaConfig;
    use medusa::nvidia::kernels::KernelDtype;

    use crate::cuda_kernels::emulator::{EmulatedTarget, Emulator};

    let variants =
        [HYDRA, Variant { blocks: 1, w2_bias: true, w2_rank: 8, ..HYDRA }, Variant { is_shared: true, ..HYDRA }];
    for (world, variant) in variants.into_iter().enumerate() {
        let kind = [Kind::BFloat16, Kind::Half][world % 2];
        let small = LlamaConfig {
            hidden_size: 64,
            intermediate_size: 64,
            num_attention_heads: 2,
            head_dim: 64,
            vocab_size: 64,
            ..config(1, None, 200)
        };
        let llama = backbone_of(small, kind, 3 + world as u64);
        let heads = heads_of(&llama, 3, variant, 5);
        let tree = SparseTree::cartesian(&[5, 2, 2]).expect("36 nodes");
        let on_device = heads.matrices_for(&tree);
        let emulator = Emulator { element: KernelDtype::of(kind).expect("16 bits"), head_size: 64 };
        let target = EmulatedTarget { emulator, broken: None };
        let beside = Ops::kernels(target, &Shape::of(&llama, Some(&on_device)), Device::Cpu).beside_oracle();
        let [mut fast, mut slow] = [beside, Ops::Oracle].map(|ops| {
            DeviceLoop::new(&llama, Some((&on_device, Acceptance::Greedy)), ops).expect("it can decode this")
        });
        let prompt: Vec<i64> = (0..12).map(|at| at * at % 64).collect();
        let request = sampled(&prompt, 4, 0.0, 4);
        let [got, expected] =
            [&mut fast, &mut slow].map(|engine| engine.decode(Drafting::On, &request, &mut go_on()).expect("a text"));
        let of = format!("{variant:?}, {kind:?}");
        assert_same(&got, &expected, &of);
        let libtorchs = on_libtorch(&llama, (&heads, &tree), Acceptance::Greedy, &request);
        assert_eq!((got.new_ids, got.accept_lengths), (libtorchs.new_ids, libtorchs.accept_lengths), "{of}");
        let distances = fast.engine().ops().distances();
        let expected =
            ["embed_nodes", "first_block", "fill_level", "fill_tree", "top_guesses", "linear 1/4", "linear 8/4"];
        assert!(expected.iter().all(|kernel| distances.contains_key(*kernel)), "{distances:?}");
        assert_eq!(distances.contains_key("residual"), variant.blocks > 1, "{of}");
        let far: Vec<_> = distances.into_iter().filter(|(_, found)| found.distance > 0.01).collect();
        assert!(far.is_empty(), "{of}: {far:?}");
    }
}
