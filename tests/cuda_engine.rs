//! Promise: the CUDA loop decodes the texts of libtorch's loop for every backbone, heads, tree and acceptance rule, and
//! refuses unsupported requests with the reason. Without a GPU, the loop runs on the oracles of its kernels, in float32
//! on the CPU.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::rc::Rc;

use medusa::decode::DecodeLoop;
use medusa::decode::device::DeviceLoop;
use medusa::decode::error::DecodeError;
use medusa::decode::generate;
use medusa::decode::host_loop::HostLoop;
use medusa::decode::request::{FinishReason, Generation, Request};
use medusa::decode::step::Drafting;
use medusa::draft::Drafter;
use medusa::draft::heads::{Heads, HeadsShape};
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::engine::cpu::CpuEngine;
use medusa::engine::cuda::error::CudaError;
use medusa::engine::cuda::ops::Ops;
use medusa::engine::cuda::rule::StepKey;
use medusa::engine::cuda::shape::Shape;
use medusa::engine::cuda::target::LaunchTarget;
use medusa::engine::fastest::fastest;
use medusa::engine::sample::{Sampling, Stream};
use medusa::model::block_spec::QueryKeyNorm;
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::numbers::{NonNegative, Positive, Probability};
use medusa::nvidia::kernels::KernelDtype;
use medusa::nvidia::launch::Launch;
use medusa::torch::Generator;
use medusa::tree::accept::{Acceptance, TypicalAcceptance};
use medusa::tree::sparse_tree::SparseTree;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind};

use crate::backbone::Fixture;
#[cfg(target_os = "linux")]
use crate::cuda_kernels::emulator::{EmulatedTarget, Emulator};
use crate::decoding::World;
use crate::embedded_default::tiny;

pub(crate) const VOCABULARY: i64 = 12;

pub(crate) fn config(num_key_value_heads: i64, sliding_window: Option<i64>, context: i64) -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads,
        head_dim: 6,
        vocab_size: VOCABULARY,
        max_position_embeddings: context,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window,
        tie_word_embeddings: false,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        eos_token_ids: vec![],
    }
}

/// The same with biases of q, k and v.
pub(crate) fn qwen2(config: LlamaConfig) -> LlamaConfig {
    LlamaConfig { model_type: "qwen2".into(), biases: Biases { qkv: true, ..Biases::default() }, ..config }
}

/// The same with norms of queries and keys.
pub(crate) fn qwen3(config: LlamaConfig) -> LlamaConfig {
    let family = FamilyTraits { query_key_norm: Some(QueryKeyNorm::EachHead), ..FamilyTraits::default() };
    LlamaConfig { model_type: "qwen3".into(), family, ..config }
}

/// Random weights, large enough that attention matters and the text does not settle on one token. Biases and norms of queries and keys
/// are random, too.
pub(crate) fn backbone_of(config: LlamaConfig, kind: Kind, seed: u64) -> Llama {
    tch::set_num_threads(1); // tests run in parallel
    let llama = Llama::random(config, kind, Device::Cpu, seed);
    let mut generator = Generator::seeded(seed);
    for (name, weight) in &llama.weights() {
        if weight.dim() == 2 {
            let _ = weight.shallow_clone().g_mul_scalar_(8.0);
        } else if name.contains("self_attn") {
            weight.shallow_clone().copy_(&generator.normal(&weight.size(), (kind, Device::Cpu)));
        }
    }
    llama
}

fn backbone(config: LlamaConfig, seed: u64) -> Llama {
    backbone_of(config, Kind::Float, seed)
}

fn heads(llama: &Llama, medusa_num_heads: usize, medusa_num_layers: usize, shared: bool, seed: u64) -> Heads {
    let vocab_size = if shared { 0 } else { llama.config.vocab_size };
    let shape = HeadsShape {
        medusa_num_heads,
        medusa_num_layers,
        hidden_size: llama.config.hidden_size,
        vocab_size,
        ..HeadsShape::default()
    };
    let folder = tempfile::tempdir().expect("a folder");
    Heads::random(shape, Kind::Float, Device::Cpu, seed).save(folder.path()).expect("a file of a test");
    Heads::load(folder.path(), llama).expect("heads for this backbone")
}

fn request(prompt: &[i64], max_new_tokens: usize) -> Request<'_> {
    Request::greedy(prompt, max_new_tokens)
}

pub(crate) fn sampled(prompt: &[i64], max_new_tokens: usize, temperature: f64, seed: u64) -> Request<'_> {
    let temperature = NonNegative::new(temperature).expect("at least 0");
    let top_p = Probability::new(if seed.is_multiple_of(2) { 1.0 } else { 0.9 }).expect("above 0");
    Request {
        sampling: Sampling { top_p, ..Sampling::with_temperature(temperature) },
        stream: Stream { seed, ..Stream::default() },
        ..Request::greedy(prompt, max_new_tokens)
    }
}

pub(crate) fn go_on() -> impl FnMut(&[i64]) -> ControlFlow<()> {
    |_| ControlFlow::Continue(())
}

/// Decodes on the host with heads: the oracle.
fn with_heads(
    llama: &Llama,
    (drafter, acceptance): (&MedusaDrafter, Acceptance),
    request: &Request,
) -> Result<Generation, DecodeError> {
    generate::drafted(llama, drafter.clone(), acceptance, request, &mut go_on())
}

/// The CUDA loop with heads.
fn device_loop<'a>(
    llama: &'a Llama,
    (drafter, acceptance): (&MedusaDrafter<'a>, Acceptance),
    ops: Ops,
) -> Result<DeviceLoop<'a>, CudaError> {
    DeviceLoop::new(llama, Some((&drafter.on_device(), acceptance)), ops)
}

/// Compares everything except the times.
#[track_caller]
pub(crate) fn assert_same(got: &Generation, expected: &Generation, of: &str) {
    assert_eq!(got.new_ids, expected.new_ids, "{of}");
    assert_eq!(got.accept_lengths, expected.accept_lengths, "{of}");
    assert_eq!((got.finish_reason, &got.end), (expected.finish_reason, &expected.end), "{of}");
}

pub(crate) fn trees() -> [SparseTree; 4] {
    let sparse = [vec![0], vec![1], vec![2], vec![0, 0], vec![0, 1], vec![1, 0], vec![0, 0, 0], vec![0, 1, 2]];
    [
        SparseTree::chain(3).expect("a chain"),
        SparseTree::new(sparse.to_vec()).expect("a tree"),
        SparseTree::cartesian(&[10, 8]).expect("91 nodes"),
        SparseTree::cartesian(&[12, 9]).expect("121 nodes"),
    ]
}

/// Many random settings, the same in every run: backbones, heads, trees, rules, prompts and limits.
#[test]
fn texts_are_those_of_the_loop_on_libtorch() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let (mut several, mut to_eos, mut to_the_context, mut sampled_ones) = (0, 0, 0, 0);
    for world in 0..96u64 {
        let window = (world % 3 == 2).then(|| rng.random_range(1..10));
        let groups = [1, 2, 4][rng.random_range(0..3)];
        let mut config = config(groups, window, 64);
        config.eos_token_ids = (0..rng.random_range(0..2)).map(|_| rng.random_range(0..VOCABULARY)).collect();
        let family = [|config| config, qwen2, qwen3][(world / 12 % 3) as usize];
        let llama = backbone(family(config), world);
        let heads = heads(&llama, 3, 1 + (world % 2) as usize, world % 5 == 0, world + 1);
        let tree = &trees()[rng.random_range(0..4)];
        let typical = Acceptance::Typical(TypicalAcceptance { posterior_threshold: 0.2, posterior_alpha: 0.5 });
        let acceptance = [Acceptance::Greedy, typical, Acceptance::Rejection][(world % 3) as usize];
        let temperature = [0.0, 0.7, 1.1][rng.random_range(0..3)];
        let length = if world % 4 == 0 { rng.random_range(50..64) } else { rng.random_range(1..12) };
        let prompt: Vec<i64> = (0..length).map(|_| rng.random_range(0..VOCABULARY)).collect();
        let request = sampled(&prompt, rng.random_range(0..40), temperature, world);
        let medusa = (&MedusaDrafter::new(&llama, &heads, tree).expect("they fit"), acceptance);
        let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
        let family = &llama.config.model_type;
        let of = format!("world {world}, {family}, {acceptance:?}, temperature {temperature}, {} nodes", tree.len());

        let slow = generate::plain(&llama, &request, &mut go_on()).expect("a text");
        assert_same(&engine.decode(Drafting::Off, &request, &mut go_on()).expect("a text"), &slow, &of);
        let mut alone = DeviceLoop::new(&llama, None, Ops::Oracle).expect("it can decode this");
        assert_same(
            &alone.decode(Drafting::Off, &request, &mut go_on()).expect("a text"),
            &slow,
            &format!("{of}, without heads"),
        );
        let slow = with_heads(&llama, medusa, &request).expect("a text");
        let mut printed = vec![];
        let fast = engine.decode(Drafting::On, &request, &mut |ids: &[i64]| {
            printed.extend_from_slice(ids);
            ControlFlow::Continue(())
        });
        let fast = fast.expect("a text");
        assert_same(&fast, &slow, &of);
        assert_eq!(printed, fast.new_ids, "{of}");
        several += u32::from(fast.accept_lengths.iter().any(|&length| length > 1));
        to_eos += u32::from(fast.finish_reason == FinishReason::Eos);
        to_the_context += u32::from(prompt.len() + fast.new_ids.len() == 64);
        sampled_ones += u32::from(temperature > 0.0 && fast.new_ids.len() > 10);
    }
    let reached = [several, to_eos, to_the_context, sampled_ones];
    assert!(reached.iter().all(|&worlds| worlds >= 8), "the worlds hardly test anything: {reached:?}");
}

#[test]
fn every_family_and_the_trained_backbone_decode_as_on_libtorch() {
    tch::set_num_threads(1);
    let fixtures = [
        "llama_own_head",
        "llama_tied_theta_500000_mqa",
        "llama3_scaling",
        "llama_linear_scaling",
        "llama_wide_heads",
        "mistral_sliding_window",
        "mistral_no_window",
        "families/qwen2",
        "families/qwen2_yarn",
        "families/qwen3",
        "families/qwen3_tied_yarn",
    ];
    let load = |folder: &std::path::Path| {
        Llama::load(folder, Kind::Float, Device::Cpu, Purpose::Training).expect("a folder that loads")
    };
    let mut all: Vec<(&str, Llama)> =
        fixtures.iter().map(|name| (*name, load(Fixture::open(name).folder("config").path()))).collect();
    all.push(("data/tiny", load(&tiny("backbone"))));
    for (name, llama) in &all {
        let heads = heads(llama, 3, 1, false, 3);
        for tree in &trees() {
            let medusa = (&MedusaDrafter::new(llama, &heads, tree).expect("they fit"), Acceptance::Greedy);
            let mut engine = device_loop(llama, medusa, Ops::Oracle).expect("it can decode this");
            for prompt in [&[1, 5, 9, 4, 7, 30, 22, 11, 3][..], &[2]] {
                let of = format!("{name}, {} nodes, {} prompt tokens", tree.len(), prompt.len());
                let request = request(prompt, 24);
                let slow = generate::plain(llama, &request, &mut go_on()).expect("a text");
                assert_same(&engine.decode(Drafting::Off, &request, &mut go_on()).expect("a text"), &slow, &of);
                let expected = with_heads(llama, medusa, &request).expect("a text");
                let fast = engine.decode(Drafting::On, &request, &mut go_on()).expect("a text");
                assert_same(&fast, &expected, &of);
                assert_eq!(fast.new_ids, slow.new_ids, "{of}");
            }
        }
    }
}

#[test]
fn prompts_of_any_length_are_run_in_pieces() {
    let llama = backbone(config(2, None, 600), 5);
    let heads = heads(&llama, 3, 1, false, 6);
    let tree = &trees()[2];
    let medusa = (&MedusaDrafter::new(&llama, &heads, tree).expect("they fit"), Acceptance::Greedy);
    let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
    for length in [1, 2, 8, 9, 10, 33, 34, 128, 129, 130, 257, 385, 500] {
        let prompt: Vec<i64> = (0..length).map(|at| (at * at + length) % VOCABULARY).collect();
        let request = request(&prompt, 12);
        let expected = with_heads(&llama, medusa, &request).expect("a text");
        engine.reset();
        assert_same(
            &engine.decode(Drafting::On, &request, &mut go_on()).expect("a text"),
            &expected,
            &format!("{length} tokens"),
        );
    }
}

/// The engine's cache has blocks of 4096 tokens, of which a step reserves the last 128.
#[test]
fn a_conversation_goes_on_across_the_borders_from_blocks_to_the_contexts_end() {
    let context = 4200;
    let llama = backbone(config(1, None, context), 8);
    let heads = heads(&llama, 2, 1, false, 9);
    let tree = SparseTree::cartesian(&[6, 4]).expect("31 nodes");
    let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), Acceptance::Greedy);
    let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
    let drafter: Box<dyn Drafter> = Box::new(medusa.0.clone());
    let mut session = HostLoop::new(fastest(&llama), Some((drafter, medusa.1)));
    let mut text: Vec<i64> = vec![1];
    let mut rooms = vec![];
    assert_eq!(engine.engine().plan().room(), 4096);
    // Stops just before the border, just after it, and near the end of the context.
    for until in [3955, 4085, 4190] {
        text.extend((text.len() as i64..until).map(|at| (at * at / 7) % VOCABULARY));
        let request = request(&text, 30);
        let expected = session.decode(Drafting::On, &request, &mut go_on()).expect("a text");
        let said = engine.decode(Drafting::On, &request, &mut go_on()).expect("a text");
        assert_same(&said, &expected, &format!("behind {} tokens", text.len()));
        assert_eq!(engine.engine().len(), session.cached().len());
        text.extend(said.new_ids);
        rooms.push(engine.engine().plan().room());
    }
    assert_eq!(text.len(), 4200);
    assert_eq!(
        rooms,
        [4352, 4352, 4352],
        "the first answer goes over the border; then the context and a step fit, no whole block"
    );
}

#[test]
fn turns_of_a_conversation_are_requests_alone() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    for window in [None, Some(6)] {
        let mut config = config(2, window, 200);
        config.eos_token_ids = vec![5];
        let llama = backbone(config, 12);
        let heads = heads(&llama, 2, 1, false, 13);
        let tree = SparseTree::cartesian(&[12, 9]).expect("121 nodes");
        let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), Acceptance::Rejection);
        let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
        let mut text = vec![1];
        for turn in 0..16u64 {
            if turn % 5 == 4 {
                text.truncate(rng.random_range(1..=text.len())); // the user goes back
            }
            text.extend((0..rng.random_range(1..4)).map(|_| rng.random_range(0..VOCABULARY)));
            let request = sampled(&text, 8, if turn % 2 == 0 { 0.9 } else { 0.0 }, turn);
            let (said, alone) = if turn % 3 == 0 {
                (engine.decode(Drafting::Off, &request, &mut go_on()), generate::plain(&llama, &request, &mut go_on()))
            } else {
                (engine.decode(Drafting::On, &request, &mut go_on()), with_heads(&llama, medusa, &request))
            };
            let said = said.expect("a text");
            assert_same(&said, &alone.expect("a text"), &format!("window {window:?}, turn {turn}"));
            text.extend(said.new_ids);
        }
    }
}

#[test]
fn a_listener_that_has_heard_enough_ends_the_text() {
    let llama = backbone(config(2, None, 64), 14);
    let heads = heads(&llama, 2, 1, false, 15);
    let tree = SparseTree::cartesian(&[12, 9]).expect("121 nodes");
    let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), Acceptance::Greedy);
    let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
    let prompt = [1, 2, 3];
    let request = request(&prompt, 40);
    let whole = engine.decode(Drafting::On, &request, &mut go_on()).expect("a text");
    for limit in 1..5 {
        let listen = || {
            let mut heard = 0;
            move |_: &[i64]| {
                heard += 1;
                if heard == limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
        };
        let said = engine.decode(Drafting::On, &request, &mut listen()).expect("a text");
        assert_eq!((said.accept_lengths.len(), said.finish_reason), (limit, FinishReason::Stopped));
        assert!(whole.new_ids.starts_with(&said.new_ids));
        let plain = engine.decode(Drafting::Off, &request, &mut listen()).expect("a text");
        assert_eq!((plain.new_ids.len(), plain.finish_reason), (limit, FinishReason::Stopped));
    }
}

#[test]
fn what_the_device_cannot_decide_is_refused_with_its_reason() {
    let llama = backbone(config(2, None, 64), 16);
    let heads = heads(&llama, 2, 1, false, 17);
    let tree = SparseTree::cartesian(&[3, 2]).expect("10 nodes");
    let prompt = [1];
    let penalised = Request { repetition_penalty: Positive::new(1.3).expect("above 0"), ..request(&prompt, 5) };
    for (acceptance, request, reason) in [
        (Acceptance::Nucleus, sampled(&prompt, 5, 0.7, 1), "nucleus acceptance above temperature 0 has no kernel"),
        (Acceptance::Forced { rate: 2.0 }, request(&prompt, 5), "a forced acceptance rate has no kernel"),
        (Acceptance::Greedy, penalised, "a repetition penalty has no kernel"),
    ] {
        let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), acceptance);
        let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
        let error = engine.decode(Drafting::On, &request, &mut go_on()).unwrap_err().to_string();
        assert!(error.contains(reason) && error.ends_with("use --engine tch"), "{error}");
    }
    let wide = SparseTree::cartesian(&[12, 10]).expect("133 nodes");
    let medusa = (&MedusaDrafter::new(&llama, &heads, &wide).expect("they fit"), Acceptance::Greedy);
    let error = device_loop(&llama, medusa, Ops::Oracle).unwrap_err().to_string();
    assert!(error.starts_with("a step has at most 128 nodes with the root, the tree has 133"), "{error}");
    for (fixture, reason) in [
        ("llama_attention_bias", "has a bias in o_proj or in the MLP"),
        ("families/gemma3", "has norms that multiply by 1 + weight"),
        ("families/olmo2", "norms all heads of queries and keys together"),
        ("families/granite", "scales embeddings, residuals or logits"),
        ("families/smollm3", "has several kinds of layers"),
        ("families/qwen2_sliding_window", "has several kinds of layers"),
    ] {
        let folder = Fixture::open(fixture).folder("config");
        let other =
            Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training).expect("a folder that loads");
        let error = DeviceLoop::new(&other, None, Ops::Oracle).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("the backbone {reason}, which it has no kernels for")),
            "{fixture}: {error}"
        );
    }
    let packed = backbone(config(2, None, 64), 19).for_decoding();
    if CpuEngine::new(&packed).is_ok() {
        let error = DeviceLoop::new(&packed, None, Ops::Oracle).unwrap_err().to_string();
        assert!(error.starts_with("the backbone's weights are quantised, or laid out for the CPU"), "{error}");
    }
    let mut engine = DeviceLoop::new(&llama, None, Ops::Oracle).expect("plain decoding needs no heads");
    assert!(engine.decode(Drafting::Off, &request(&[], 5), &mut go_on()).is_err() && engine.engine().is_empty());
    let plain =
        engine.decode(Drafting::On, &request(&prompt, 5), &mut go_on()).expect("without heads, nothing is guessed");
    assert_eq!(plain.accept_lengths, [1; 5]);
}

#[test]
fn logits_with_nan_end_the_text_with_an_error() {
    let llama = backbone(config(2, None, 64), 20);
    let heads = heads(&llama, 2, 1, false, 21);
    let tree = SparseTree::cartesian(&[3, 2]).expect("10 nodes");
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    for (acceptance, temperature) in [(Acceptance::Greedy, 0.0), (typical, 0.7), (Acceptance::Rejection, 0.7)] {
        let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), acceptance);
        let mut engine = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
        let lm_head = llama.weights().into_iter().find(|(name, _)| name == "lm_head.weight").expect("its own").1;
        let whole = lm_head.copy();
        let _ = lm_head.shallow_clone().fill_(f64::NAN);
        let request = sampled(&[1, 2, 3], 5, temperature, 1);
        for said in
            [engine.decode(Drafting::Off, &request, &mut go_on()), engine.decode(Drafting::On, &request, &mut go_on())]
        {
            let error = said.unwrap_err().to_string();
            assert!(
                error.starts_with("logits contain NaN or infinity at new token 1; decode in another --dtype"),
                "{error}"
            );
        }
        lm_head.shallow_clone().copy_(&whole);
        assert!(engine.decode(Drafting::On, &request, &mut go_on()).is_ok(), "the next text is none of that one's");
    }
}

#[test]
fn an_engine_that_was_asked_for_and_cannot_run_says_why() {
    let world = World::new();
    let decode = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "8"];
    let error = world.complaint(&[&decode[..], &["--engine", "cuda"]].concat(), 1);
    let (first, cause) = error.split_once("caused by: ").expect("a cause");
    assert!(first.contains("error: --engine cuda cannot decode this"), "{error}");
    assert!(cause.contains("there is no GPU to decode on"), "{error}");
    // Without heads, distill decodes many texts together.
    let distill = ["distill", "--backbone", "b", "--prompts", "p.jsonl", "--out", "o", "--engine", "cuda"];
    let error = world.complaint(&distill, 2);
    assert!(error.contains("conversations are decoded together") && !world.path("o").exists(), "{error}");
}

#[test]
fn auto_takes_an_engine_of_the_host_where_there_is_no_gpu_without_a_word() {
    let world = World::new();
    let decode = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "8", "--json"];
    let run = |more: &[&str]| {
        let output = world.medusa(&[&decode[..], more].concat()).assert().success().get_output().clone();
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        let printed: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
        (said.lines().filter(|line| line.starts_with("engine ")).count(), said, printed)
    };
    let (lines, said, printed) = run(&[]);
    let engine = if cfg!(kernels) { "cpu" } else { "tch" };
    assert!(lines == 0, "a machine without a GPU needs no line: {said}");
    assert_eq!(printed["engine"], engine);
    for asked in ["tch", engine] {
        let (lines, said, printed) = run(&["--engine", asked]);
        assert!(lines == 0, "what was asked for needs no line: {said}");
        assert_eq!(printed["engine"], asked);
    }
    assert_eq!(run(&["--quiet"]).1, "");
    let said = String::from_utf8(world.medusa(&["doctor"]).output().expect("a program").stdout).expect("UTF-8");
    assert!(said.contains(&format!("engine       {engine} (there is no GPU to decode on")), "{said}");
    let doctor = world.json(&["doctor"]);
    assert_eq!(doctor[0]["engine"]["cuda"], false);
    assert!(doctor[0]["engine"]["reason"].as_str().is_some_and(|why| why.contains("no GPU")), "{doctor:?}");
}

#[test]
fn no_text_grows_beyond_the_context_that_was_asked_for() {
    let world = World::new();
    let decode = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "60"];
    let printed = world.json(&[&decode[..], &["--max-context", "20"]].concat());
    assert_eq!((printed[0]["steps"].as_u64(), &printed[0]["finish_reason"]), (Some(16), &serde_json::json!("length")));
    let error = world.complaint(&[&decode[..], &["--max-context", "65"]].concat(), 2);
    assert!(error.contains("--max-context 65 is longer than the backbone's context of 64 tokens"), "{error}");
    let error = world.complaint(&[&decode[..], &["--max-context", "4"]].concat(), 1);
    assert!(error.contains("the prompt has 4 tokens, but the backbone's context is 4"), "{error}");
}

/// Like `examples/gpu_check` on a GPU, but one kernel does nothing, which must be reported.
#[test]
#[cfg(target_os = "linux")]
fn a_kernel_that_is_wrong_is_reported_beside_its_oracle() {
    tch::set_num_threads(1);
    let small = LlamaConfig {
        hidden_size: 64,
        intermediate_size: 64,
        num_attention_heads: 2,
        head_dim: 64,
        num_hidden_layers: 1,
        vocab_size: 64,
        ..config(1, None, 200)
    };
    let llama = Llama::random(small, Kind::BFloat16, Device::Cpu, 3);
    let shape = HeadsShape {
        medusa_num_heads: 1,
        medusa_num_layers: 1,
        hidden_size: 64,
        vocab_size: 64,
        ..HeadsShape::default()
    };
    let heads = Heads::random(shape, Kind::BFloat16, Device::Cpu, 5);
    let tree = SparseTree::chain(1).expect("a chain");
    let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), Acceptance::Greedy);
    let emulator = Emulator { element: KernelDtype::BFloat16, head_size: 64 };
    let target = EmulatedTarget { emulator, broken: Some("tree_attention_few") };
    let ops = Ops::kernels(target, &Shape::of(&llama, Some(&medusa.0.on_device())), Device::Cpu).beside_oracle();
    let mut engine = device_loop(&llama, medusa, ops).expect("it can decode this");
    engine.decode(Drafting::On, &request(&[1, 2], 3), &mut go_on()).expect("a text");
    let found = engine.engine().ops().distances();
    for kernel in ["embed", "rms_norm", "linear 1/4", "linear 32x16", "walk", "compact", "fill_tree"] {
        assert!(found.contains_key(kernel), "{kernel} of {found:?}");
    }
    let (wrong, right): (Vec<_>, Vec<_>) = found.iter().partition(|(name, _)| *name == "attention");
    assert!((wrong[0].1.distance - 1.0).abs() < 1e-6, "nothing was written: {wrong:?}");
    assert!(right.iter().all(|(_, of)| of.distance < 0.01), "{right:?}");
}

/// The emulator; notes which kernels each step launches.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct NotedTarget {
    emulated: EmulatedTarget,
    steps: Rc<RefCell<Vec<Vec<&'static str>>>>,
    in_step: Cell<bool>,
}

#[cfg(target_os = "linux")]
impl LaunchTarget for NotedTarget {
    fn name(&self) -> &'static str {
        "the emulator"
    }

    fn launch(&self, launch: &Launch) -> Result<(), CudaError> {
        if self.in_step.get() {
            self.steps.borrow_mut().last_mut().expect("a step").push(launch.kernel.name);
        }
        self.emulated.launch(launch)
    }

    fn replay(&self, _: StepKey, step: &dyn Fn() -> Result<(), CudaError>) -> Result<(), CudaError> {
        self.steps.borrow_mut().push(vec![]);
        self.in_step.set(true);
        let done = step();
        self.in_step.set(false);
        done
    }
}

/// The kernels of the last step of a text, without the layers of the backbone beyond the first.
#[cfg(target_os = "linux")]
fn kernels_of_a_step(num_hidden_layers: usize, drafting: Drafting) -> Vec<&'static str> {
    let small = LlamaConfig {
        hidden_size: 64,
        intermediate_size: 64,
        num_attention_heads: 2,
        head_dim: 64,
        vocab_size: 64,
        num_hidden_layers,
        ..config(1, None, 200)
    };
    let llama = Llama::random(small, Kind::BFloat16, Device::Cpu, 3);
    let shape = HeadsShape {
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: 64,
        vocab_size: 64,
        ..HeadsShape::default()
    };
    let heads = Heads::random(shape, Kind::BFloat16, Device::Cpu, 5);
    let tree = SparseTree::cartesian(&[8, 3]).expect("33 nodes");
    let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), Acceptance::Greedy);
    let emulator = Emulator { element: KernelDtype::BFloat16, head_size: 64 };
    let steps = Rc::new(RefCell::new(vec![]));
    let emulated = EmulatedTarget { emulator, broken: None };
    let target = NotedTarget { emulated, steps: Rc::clone(&steps), in_step: Cell::default() };
    let ops = Ops::kernels(target, &Shape::of(&llama, Some(&medusa.0.on_device())), Device::Cpu);
    let mut engine = device_loop(&llama, medusa, ops).expect("it can decode this");
    engine.decode(drafting, &request(&[1, 2], 3), &mut go_on()).expect("a text");
    let last = steps.borrow_mut().pop();
    last.expect("a step")
}

#[test]
#[cfg(target_os = "linux")]
fn a_layer_is_five_kernels_and_seven_with_a_tree() {
    let layer = |drafting| {
        let [one, two] = [1, 2].map(|layers| kernels_of_a_step(layers, drafting));
        let beside = one.len() - (two.len() - one.len());
        (one[1..=two.len() - one.len()].to_vec(), beside)
    };
    let (plain, beside) = layer(Drafting::Off);
    let product = "linear_1_1";
    let normed = "normed_linear_1_1";
    assert_eq!(plain, [normed, "tree_attention_few", product, normed, product]);
    // embed, rms_norm and the LM head, best, walk, compact, advance, fill_tree
    assert_eq!(beside, 8);
    let (tree, beside) = layer(Drafting::On);
    let tile = "linear_32x64";
    assert_eq!(
        tree,
        ["rms_norm", tile, "tree_attention_many", tile, "rms_norm", tile, tile],
        "gated in the tile, added in the tile"
    );
    // also res_block, the heads' logits, and two of top_guesses
    assert_eq!(beside, 8 + 5);
}

/// Runs the whole loop on the kernels' own code, compiled for the CPU, each kernel next to its oracle on the same
/// inputs. In 16 bits, near ties can change texts; with these seeds the greedy texts are equal.
#[test]
#[cfg(target_os = "linux")]
fn the_loop_on_emulated_kernels_makes_the_oracles_texts() {
    let as_it_is: fn(LlamaConfig) -> LlamaConfig = |config| config;
    let worlds = [(Kind::BFloat16, as_it_is), (Kind::Half, as_it_is), (Kind::BFloat16, qwen3), (Kind::Half, qwen2)];
    for (world, (kind, family)) in worlds.into_iter().enumerate() {
        let small = LlamaConfig {
            hidden_size: 64,
            intermediate_size: 64,
            num_attention_heads: 2,
            head_dim: 64,
            vocab_size: 64,
            ..config(1, (world == 1).then_some(20), 200)
        };
        let llama = backbone_of(family(small), kind, 3 + world as u64);
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 2,
            hidden_size: 64,
            vocab_size: 64,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, kind, Device::Cpu, 5);
        let tree = SparseTree::cartesian(&[8, 3]).expect("33 nodes");
        let typical = Acceptance::Typical(TypicalAcceptance { posterior_threshold: 0.2, posterior_alpha: 0.5 });
        let rules = [(Acceptance::Greedy, 0.0), (typical, 0.8), (Acceptance::Rejection, 0.8)];
        // Rules do not depend on the family.
        let rules = if world < 2 { &rules[..] } else { &rules[..1] };
        for &(acceptance, temperature) in rules {
            let medusa = (&MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"), acceptance);
            let emulator = Emulator { element: KernelDtype::of(kind).expect("16 bits"), head_size: 64 };
            let target = EmulatedTarget { emulator, broken: None };
            let shape = Shape::of(&llama, Some(&medusa.0.on_device()));
            let beside = Ops::kernels(target, &shape, Device::Cpu).beside_oracle();
            let mut fast = device_loop(&llama, medusa, beside).expect("it can decode this");
            let mut slow = device_loop(&llama, medusa, Ops::Oracle).expect("it can decode this");
            let prompt: Vec<i64> = (0..12).map(|at| at * at % 64).collect();
            let request = sampled(&prompt, 5, temperature, 4);
            let of = format!("{}, {kind:?}, {acceptance:?}", llama.config.model_type);
            let texts = [
                (fast.decode(Drafting::On, &request, &mut go_on()), slow.decode(Drafting::On, &request, &mut go_on())),
                (
                    fast.decode(Drafting::Off, &request, &mut go_on()),
                    slow.decode(Drafting::Off, &request, &mut go_on()),
                ),
            ];
            for (got, expected) in texts.map(|(got, expected)| (got.expect("a text"), expected.expect("a text"))) {
                match acceptance {
                    Acceptance::Greedy => assert_same(&got, &expected, &of),
                    _ => assert_eq!(got.new_ids.len(), 5, "{of}"),
                }
            }
            let distances = fast.engine().ops().distances();
            assert!(distances.len() > 10, "{distances:?}");
            let far: Vec<_> = distances.into_iter().filter(|(_, found)| found.distance > 0.01).collect();
            assert!(far.is_empty(), "{of}: {far:?}");
        }
    }
}
