//! Losses and gradients against the plain ones in float32 and float64, and those of 16 bits against float32.

use std::num::NonZeroUsize;

use tch::Device;

use super::*;
use crate::draft::heads::objective::{HeadPass, cross_entropy_sum};
use crate::draft::heads::{HeadInput, Heads, HeadsArchitecture, HeadsConfig, HeadsShape};
use crate::draft::loss::{SoftTargets, cross_entropy_of, divergence_of, soft_loss_sums};
use crate::draft::token_map::TokenMap;
use crate::model::adapters::attach_new;
use crate::model::config::{FamilyTraits, LlamaConfig};
use crate::model::lora::LoraConfig;
use crate::numbers::Fraction;
use crate::torch::Generator;

fn backbone() -> Llama {
    backbone_in(Kind::Float, LogitSpec::default())
}

fn backbone_in(kind: Kind, logits: LogitSpec) -> Llama {
    let family = FamilyTraits { logits, ..FamilyTraits::default() };
    let config =
        LlamaConfig { hidden_size: 24, vocab_size: 40_000, tie_word_embeddings: true, family, ..LlamaConfig::tiny() };
    Llama::random(config, kind, Device::Cpu, 5)
}

/// How far apart two ways to compute the same may be in `kind`, if it is `far` in float32.
fn rounding(kind: Kind, far: f64) -> f64 {
    if kind == Kind::Double { far * 1e-7 } else { far }
}

/// Llama's, Granite's and Gemma 2's way from products to logits.
const LOGITS: [LogitSpec; 3] = [
    LogitSpec { divisor: 1.0, softcap: None },
    LogitSpec { divisor: 0.5, softcap: None },
    LogitSpec { divisor: 1.0, softcap: Some(0.2) },
];

fn heads(layers: usize, shared_lm_head: bool, backbone: &Llama) -> Heads {
    heads_with(layers, shared_lm_head, None, backbone)
}

/// With a truncated vocabulary of every second token, if its size is given.
fn untrained(layers: usize, shared_lm_head: bool, truncated: Option<usize>, backbone: &Llama) -> Heads {
    let number = |n| NonZeroUsize::new(n).unwrap();
    let (medusa_num_heads, medusa_num_layers) = (number(2), number(layers));
    let architecture = HeadsArchitecture::Medusa;
    let config = HeadsConfig {
        medusa_num_heads,
        medusa_num_layers,
        init_from: None,
        shared_lm_head,
        w2_rank: None,
        shared_w2: false,
        draft_vocab_size: truncated.and_then(NonZeroUsize::new),
        architecture,
        dropout: Fraction::ZERO,
    };
    let map = truncated.map(|size| TokenMap::new((0..size as i64).map(|at| 2 * at).collect(), Device::Cpu));
    Heads::new(&config, &backbone.logit_weight(), map)
}

/// [`untrained`] heads, moved away from their start.
fn heads_with(layers: usize, shared_lm_head: bool, truncated: Option<usize>, backbone: &Llama) -> Heads {
    let heads = untrained(layers, shared_lm_head, truncated, backbone);
    let mut generator = Generator::seeded(1);
    for (_, tensor) in heads.parameters() {
        let noise = generator.normal_like(tensor) * 0.05;
        let _ = tch::no_grad(|| tensor.shallow_clone().g_add_(&noise));
    }
    heads
}

/// 600 targets with 40,000 logits each are three chunks.
fn targets() -> Targets {
    let mut generator = Generator::seeded(2);
    targets_of(generator.permutation(700).narrow(0, 0, 600), generator.integers(40_000, &[600]))
}

fn targets_of(positions_m: Tensor, tokens_m: Tensor) -> Targets {
    Targets { positions_m, tokens_m, previous_mj: None }
}

#[test]
fn chunks_have_rows_enough_on_the_cpu_and_a_gibibyte_of_logits_on_a_gpu() {
    let rows = |on_host| [512, 32_000, 128_000].map(|vocabulary| chunk_rows(vocabulary, on_host));
    assert_eq!(rows(true), [8192, 256, 256]);
    assert_eq!(rows(false), [524_288, 8388, 2097]);
}

#[test]
fn the_fused_loss_and_its_gradients_equal_the_plain_ones() {
    let families = [true, false].map(|shared| LOGITS[1..].iter().map(move |&logits| (Kind::Float, 1, shared, logits)));
    let cases = [(1, false), (2, false), (1, true)].map(|(layers, shared)| (Kind::Float, layers, shared, LOGITS[0]));
    let in_float64 = [(Kind::Double, 2, false, LOGITS[0]), (Kind::Double, 1, true, LOGITS[2])];
    for (kind, layers, shared, logits) in cases.into_iter().chain(families.into_iter().flatten()).chain(in_float64) {
        let backbone = backbone_in(kind, logits);
        losses_of_a_head_equal_the_plain_ones(&heads(layers, shared, &backbone), &targets(), &backbone);
    }
}

/// Granite divides the products and Gemma 2 caps the logits: of heads as of the LM head.
#[test]
fn untrained_heads_have_the_logits_of_the_lm_head() {
    let hidden = Generator::seeded(3).normal(&[7, 24], (Kind::Float, Device::Cpu));
    for logits in LOGITS {
        let backbone = backbone_in(Kind::Float, logits);
        let expected = backbone.logits(&hidden, Adapters::Off);
        for shared_lm_head in [false, true] {
            let heads = untrained(1, shared_lm_head, None, &backbone);
            let got = heads.logits(1, &HeadInput::alone(&hidden), &backbone);
            assert!(got.allclose(&expected, 1e-5, 1e-6, false), "{logits:?}, shared: {shared_lm_head}");
        }
    }
}

/// W2 has a bias, as in published Hydra heads.
#[test]
fn losses_of_sequential_heads_equal_the_plain_ones() {
    let previous_mj = Some(Generator::seeded(8).integers(40_000, &[600, 2]));
    let targets = Targets { previous_mj, ..targets() };
    let cases = [(1, 40_000, true, 0), (2, 40_000, false, 0), (1, 0, false, 0), (1, 40_000, false, 6)];
    let in_float64 = [(Kind::Double, (1, 40_000, true, 0))];
    for (kind, (medusa_num_layers, vocab_size, w2_bias, w2_rank)) in
        cases.map(|case| (Kind::Float, case)).into_iter().chain(in_float64)
    {
        let shape = HeadsShape {
            architecture: HeadsArchitecture::Hydra,
            medusa_num_heads: 2,
            medusa_num_layers,
            hidden_size: 24,
            vocab_size,
            w2_bias,
            w2_rank,
            shared_w2: false,
        };
        let heads = Heads::random(shape, kind, Device::Cpu, 1);
        losses_of_a_head_equal_the_plain_ones(&heads, &targets, &backbone_in(kind, LogitSpec::default()));
    }
}

#[test]
fn gradients_of_a_shared_w2_are_summed_over_the_heads() {
    let (targets, backbone) = (targets(), backbone());
    let hidden = Generator::seeded(3).normal(&[700, 24], (Kind::Float, Device::Cpu));
    for w2_rank in [0, 6] {
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size: 24,
            vocab_size: 40_000,
            w2_rank,
            shared_w2: true,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
        let inputs: Vec<&Tensor> = heads.parameters().into_iter().map(|(_, tensor)| tensor).collect();
        inputs.iter().for_each(|input| drop(input.set_requires_grad(true)));
        let plain = (0..2).map(|head| cross_entropy_sum(&heads, head, &hidden, &targets, &backbone)).sum::<Tensor>();
        let expected = Tensor::run_backward(&[plain * 0.01], &inputs, false, false);
        let got: Vec<Tensor> = inputs.iter().map(|p| p.detach().zeros_like()).collect();
        let (block_sums, shared) = got.split_at(4); // W1 and b1 of each head
        let (down, w2) = shared.split_at(shared.len() - 1);
        for (head, own) in block_sums.chunks(2).enumerate() {
            let head = heads.head(head);
            let into = LevelGradients {
                blocks: own.iter().chain(down).collect(),
                output: OutputGradients { weight_vh: w2.first(), ..OutputGradients::default() },
                hidden_nh: None,
            };
            let output = HeadPass::new(head, &backbone).output().unwrap();
            let _ = level_loss(Some(&HeadPass::new(head, &backbone)), output, &hidden, &targets, Some((&into, 0.01)));
        }
        for (expected, got) in expected.iter().zip(&got) {
            let largest = expected.abs().max().double_value(&[]);
            assert!(expected.allclose(got, 0.0, 2e-5 * largest, false), "{:?}", expected.size());
        }
    }
}

/// Loss of head 2, and the gradients of its parameters and of the hidden states.
fn losses_of_a_head_equal_the_plain_ones(heads: &Heads, targets: &Targets, backbone: &Llama) {
    let kind = backbone.kind();
    let hidden = Generator::seeded(3).normal(&[700, 24], (kind, Device::Cpu));
    let (head, oracle_hidden) = (heads.head(1), hidden.copy().set_requires_grad(true));
    let mut inputs = head.parameters();
    inputs.push(&oracle_hidden);
    for input in &inputs {
        let _ = input.set_requires_grad(true);
    }
    let plain = cross_entropy_sum(heads, 1, &oracle_hidden, targets, backbone);
    let expected = Tensor::run_backward(&[&plain * 0.01], &inputs, false, false);
    let got: Vec<Tensor> = inputs.iter().map(|p| p.detach().zeros_like()).collect();
    let (blocks, [own @ .., dhidden_nh]) = got.split_at(head.block_parameters().len()) else {
        panic!("no hidden states")
    };
    let into = LevelGradients {
        blocks: blocks.iter().collect(),
        output: OutputGradients { weight_vh: own.first(), bias_v: own.get(1), adapter: None },
        hidden_nh: Some(dhidden_nh),
    };
    let output =
        HeadPass::new(head, backbone).output().unwrap_or_else(|| OutputLayer::lm_head(backbone, Adapters::Off));
    let sums = level_loss(Some(&HeadPass::new(head, backbone)), output, &hidden, targets, Some((&into, 0.01)));
    let (loss, oracle) = (sums.loss.double_value(&[]), plain.double_value(&[]));
    assert!((loss - oracle).abs() / oracle < rounding(kind, 1e-6), "{kind:?}: {loss} {oracle}");
    for (expected, got) in expected.iter().zip(&got) {
        assert_eq!((expected.kind(), got.kind()), (kind, kind));
        let difference = (expected - got).abs().max().double_value(&[]);
        let largest = expected.abs().max().double_value(&[]);
        let most = rounding(kind, 2e-5) * largest;
        assert!(difference < most, "{kind:?}, {:?}: {difference} of {largest}", expected.size());
    }
}

#[test]
fn the_lower_token_of_equal_logits_is_guessed_first() {
    let mut generator = Generator::seeded(6);
    let mut digits = |size: &[i64]| (generator.integers(5, size) - 2).to_kind(Kind::BFloat16);
    let (hidden, weight_vh) = (digits(&[400, 4]), digits(&[300, 4])); // 33 logits among 300 tokens
    let logits = hidden.matmul(&weight_vh.tr()).to_kind(Kind::Float);
    let positions_m = Tensor::arange(400, (Kind::Int64, Device::Cpu));
    let sorted = logits.sort_stable(true, 1, true).1;
    for rank in 0..6 {
        let targets = targets_of(positions_m.shallow_clone(), sorted.select(1, rank).contiguous());
        if rank == 0 {
            assert_eq!(targets.tokens_m, logits.argmax(1, false));
        }
        let sums = level_loss(None, OutputLayer::plain(&weight_vh), &hidden, &targets, None);
        let expected: Vec<i64> = (0..TOP as i64).map(|guess| if rank <= guess { 400 } else { 0 }).collect();
        assert_eq!(Vec::<i64>::try_from(&sums.hits).unwrap(), expected, "rank {rank}");
    }
}

#[test]
fn ranks_below_the_top_equal_those_of_all_rows() {
    let mut generator = Generator::seeded(7);
    for (rows, vocabulary, values) in [(300, 700, 40), (3, 100_000, 90_000), (70, 5000, 3)] {
        let logits_cv = generator.integers(values, &[rows, vocabulary]).to_kind(Kind::Float);
        let rank_c1 = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).remainder(9).unsqueeze(1);
        let tokens_c1 = logits_cv.topk(9, 1, true, true).1.gather(1, &rank_c1, false);
        let target_c1 = logits_cv.gather(1, &tokens_c1, false);
        let top = TOP as f64;
        let expected = ranks_of_all(&logits_cv, &target_c1, &tokens_c1).clamp_max(top);
        let got = ranks(&logits_cv, &target_c1, &tokens_c1, TOP).clamp_max(top);
        assert_eq!(Vec::<f32>::try_from(&got).unwrap(), Vec::<f32>::try_from(&expected).unwrap());
    }
}

/// Gradients of W1, b1, W2 and the hidden states from a head that computes in `kind`, times `scale`.
fn gradients_in(kind: Kind, scale: f64) -> Vec<Tensor> {
    let shape = HeadsShape {
        medusa_num_heads: 1,
        medusa_num_layers: 1,
        hidden_size: 32,
        vocab_size: 32_000,
        ..HeadsShape::default()
    };
    let backbone = backbone();
    let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
    let mut generator = Generator::seeded(2);
    let hidden_nh = generator.normal(&[2048, 32], (Kind::Float, Device::Cpu)) * 3.0;
    let targets = targets_of(generator.permutation(2048), generator.integers(32_000, &[2048]));
    let values: Vec<Tensor> = heads.parameters().iter().map(|(_, value)| value.set_requires_grad(true)).collect();
    let sums: Vec<Tensor> = values.iter().chain([&hidden_nh]).map(|p| p.detach().zeros_like()).collect();
    let into = LevelGradients {
        blocks: sums[..2].iter().collect(),
        output: OutputGradients { weight_vh: Some(&sums[2]), ..OutputGradients::default() },
        hidden_nh: Some(&sums[3]),
    };
    let (head, into) = (HeadPass::new(heads.head(0), &backbone), Some((&into, scale)));
    level_loss(Some(&head), OutputLayer::plain(&values[2]), &hidden_nh.to_kind(kind), &targets, into);
    sums
}

/// 4e-6 is the scale of 2·10^5 targets; the second is that times a λ0 of 0.01.
#[test]
fn gradients_of_16_bits_are_those_of_float32() {
    let in_float32 = gradients_in(Kind::Float, 1.0);
    for (kind, scale, most) in [(Kind::Half, 4e-6, 0.005), (Kind::Half, 4e-8, 0.005), (Kind::BFloat16, 4e-6, 0.02)] {
        let got = gradients_in(kind, scale);
        for ((name, got), expected) in ["W1", "b1", "W2", "hidden"].iter().zip(&got).zip(&in_float32) {
            let expected = expected * scale;
            let off = ((got - &expected).norm() / expected.norm()).double_value(&[]);
            assert!(off < most, "{kind:?}, times {scale}: {name} is off by {off}");
        }
    }
}

/// Of an adapted LM head's A and B and of the hidden states, as [`gradients_in`]: of the cross-entropy, then of the divergence.
fn lm_gradients_in(kind: Kind, scale: f64) -> Vec<Tensor> {
    let mut backbone = backbone();
    attach_new(&mut backbone, &toml::from_str("rank = 4\nalpha = 8").unwrap(), 3);
    let [a, b] = backbone.lm_head().adapter().unwrap().parameters();
    let mut generator = Generator::seeded(4);
    tch::no_grad(|| b.shallow_clone().copy_(&(generator.normal_like(b) * 0.05)));
    let hidden = generator.normal(&[700, 24], (Kind::Float, Device::Cpu));
    let teacher = (&hidden + generator.normal_like(&hidden) * 0.1).to_kind(kind);
    drop(generator);
    let gradients_for = |goal| {
        let got = [a, b, &hidden].map(|tensor| tensor.detach().zeros_like());
        let output = OutputGradients { adapter: Some([&got[0], &got[1]]), ..OutputGradients::default() };
        let into = LevelGradients { blocks: vec![], output, hidden_nh: Some(&got[2]) };
        let (lm_head, into) = (OutputLayer::lm_head(&backbone, Adapters::On), Some((&into, scale)));
        match goal {
            0 => drop(level_loss(None, lm_head, &hidden.to_kind(kind), &targets(), into)),
            _ => drop(distillation_loss(lm_head, [&hidden.to_kind(kind), &teacher], &targets(), into)),
        }
        got
    };
    [0, 1].into_iter().flat_map(gradients_for).collect()
}

#[test]
fn gradients_of_an_lm_head_of_16_bits_are_those_of_float32() {
    let in_float32 = lm_gradients_in(Kind::Float, 4e-8);
    for (kind, most) in [(Kind::Half, 0.005), (Kind::BFloat16, 0.02)] {
        for ((at, got), expected) in lm_gradients_in(kind, 4e-8).iter().enumerate().zip(&in_float32) {
            let off = ((got - expected).norm() / expected.norm()).double_value(&[]);
            assert!(off < most, "{kind:?}, gradient {at} is off by {off}");
        }
    }
}

#[test]
fn hits_equal_those_of_top_k() {
    let backbone = backbone();
    let heads = heads(1, true, &backbone);
    let hidden = Generator::seeded(3).normal(&[700, 24], (Kind::Float, Device::Cpu)) * 5.0;
    let positions_m = Tensor::arange(700, (Kind::Int64, Device::Cpu));
    let logits = heads.logits(0, &HeadInput::alone(&hidden), &backbone);
    // targets that are the 1st, 2nd … 7th guess in turn
    let guesses = logits.topk(7, 1, true, true).1;
    let tokens_m = guesses.gather(1, &positions_m.remainder(7).unsqueeze(1), false).squeeze_dim(1);
    let sums = level_loss(
        Some(&HeadPass::new(heads.head(0), &backbone)),
        OutputLayer::plain(&backbone.lm_head_weight()),
        &hidden,
        &targets_of(positions_m, tokens_m),
        None,
    );
    assert_eq!(Vec::<i64>::try_from(&sums.hits).unwrap(), [100, 200, 300, 400, 500]);
}

/// The LM head has an adapter, and its loss flows back into the hidden states.
#[test]
fn losses_of_the_lm_head_and_their_gradients_equal_the_plain_ones() {
    LOGITS.into_iter().for_each(|logits| lm_losses_equal_the_plain_ones(Kind::Float, logits));
    lm_losses_equal_the_plain_ones(Kind::Double, LOGITS[2]);
}

fn lm_losses_equal_the_plain_ones(kind: Kind, logits: LogitSpec) {
    let mut backbone = backbone_in(kind, logits);
    let config: LoraConfig = toml::from_str("rank = 4\nalpha = 8").unwrap();
    attach_new(&mut backbone, &config, 3);
    let [a, b] = backbone.lm_head().adapter().unwrap().parameters();
    let mut generator = Generator::seeded(4);
    tch::no_grad(|| b.shallow_clone().copy_(&(generator.normal_like(b) * 0.05)));
    let hidden = generator.normal(&[700, 24], (kind, Device::Cpu));
    let teacher = &hidden + generator.normal_like(&hidden) * 0.1;
    drop(generator);
    let hidden = hidden.set_requires_grad(true);
    let targets = targets();
    let student = backbone.logits(&hidden, Adapters::On);
    let plain = [
        cross_entropy_of(&student, &targets),
        divergence_of(&student, &backbone.logits(&teacher, Adapters::Off), &targets),
    ];
    let output = || OutputLayer::lm_head(&backbone, Adapters::On);
    for (goal, plain) in plain.iter().enumerate() {
        let expected = Tensor::run_backward(&[plain * 0.01], &[a, b, &hidden], true, false);
        let got = [a, b, &hidden].map(|tensor| tensor.detach().zeros_like());
        let into = LevelGradients {
            blocks: vec![],
            output: OutputGradients { adapter: Some([&got[0], &got[1]]), ..OutputGradients::default() },
            hidden_nh: Some(&got[2]),
        };
        let into = Some((&into, 0.01));
        let loss = match goal {
            0 => level_loss(None, output(), &hidden.detach(), &targets, into).loss,
            _ => distillation_loss(output(), [&hidden.detach(), &teacher], &targets, into),
        };
        let (loss, oracle) = (loss.double_value(&[]), plain.double_value(&[]));
        assert!((loss - oracle).abs() / oracle < rounding(kind, 1e-5), "{kind:?}: {loss} {oracle}");
        for (expected, got) in expected.iter().zip(&got) {
            let difference = (expected - got).abs().max().double_value(&[]);
            let largest = expected.abs().max().double_value(&[]);
            assert!(
                difference < rounding(kind, 2e-5) * largest,
                "{kind:?}, {logits:?}, goal {goal}, {:?}: {difference} of {largest}",
                expected.size()
            );
        }
    }
}

/// 500 targets, of which every third has no label; the teacher is three rows on.
fn soft_targets() -> SoftTargets {
    soft_targets_among(40_000)
}

fn soft_targets_among(outputs: i64) -> SoftTargets {
    let mut generator = Generator::seeded(2);
    let positions_m = generator.permutation(697).narrow(0, 0, 500);
    let tokens_m = generator.integers(outputs, &[500]);
    let is_unlabelled = Tensor::arange(500, (Kind::Int64, Device::Cpu)).remainder(3).eq(0);
    let teacher_m = &positions_m + 3;
    let tokens_m = tokens_m.masked_fill(&is_unlabelled, -100);
    SoftTargets { targets: Targets { positions_m, tokens_m, previous_mj: None }, teacher_m }
}

/// The LM head, which has an adapter, teaches a head with its own W2 and one that shares the LM head.
#[test]
fn losses_of_soft_targets_and_their_gradients_equal_the_plain_ones() {
    let cases = [
        (Kind::Float, false, LOGITS[0], [0.3, 0.7], None),
        (Kind::Float, true, LOGITS[0], [5.0, 0.1], None),
        (Kind::Float, false, LOGITS[2], [0.0, 1.0], None),
        (Kind::Float, true, LOGITS[1], [1.0, 0.0], None),
        (Kind::Float, false, LOGITS[2], [0.3, 0.7], Some(15_000)),
        (Kind::Double, true, LOGITS[0], [0.3, 0.7], None),
        (Kind::Double, false, LOGITS[2], [0.3, 0.7], Some(15_000)),
    ];
    for (kind, shared, logits, [labels, teacher], truncated) in cases {
        let mut backbone = backbone_in(kind, logits);
        attach_new(&mut backbone, &toml::from_str("rank = 4\nalpha = 8").unwrap(), 3);
        let [a, b] = backbone.lm_head().adapter().unwrap().parameters();
        let heads = heads_with(1, shared, truncated, &backbone);
        let mut generator = Generator::seeded(4);
        tch::no_grad(|| b.shallow_clone().copy_(&(generator.normal_like(b) * 0.05)));
        let hidden = generator.normal(&[700, 24], (kind, Device::Cpu));
        drop(generator);
        let lm_head = OutputLayer::lm_head(&backbone, Adapters::Training { seed: 7 });
        let lm_head = lm_head.with_tokens(heads.token_map().map(TokenMap::tokens_n));
        let objective = SoftObjective { lm_head, teacher_nh: &hidden.copy(), labels, backbone: teacher };
        soft_losses_equal_the_plain_ones(HeadPass::new(heads.head(1), &backbone), [a, b], &hidden, objective);
    }
}

fn soft_losses_equal_the_plain_ones(pass: HeadPass, ab: [&Tensor; 2], hidden: &Tensor, objective: SoftObjective) {
    let HeadPass { head, backbone, .. } = pass;
    let tokens_n = objective.lm_head.tokens_n;
    let soft = soft_targets_among(tokens_n.map_or(40_000, |tokens_n| tokens_n.size()[0]));
    let output = head.w2().map_or_else(|| ab.to_vec(), |w2| vec![w2]);
    let parameters: Vec<&Tensor> = head.block_parameters().into_iter().chain(output).chain([hidden]).collect();
    for parameter in &parameters {
        let _ = parameter.set_requires_grad(true);
    }
    let x_mh = head.hidden(&hidden.index_select(0, &soft.targets.positions_m));
    let w2_logits = |w2: &Tensor| logits_of(x_mh.matmul(&w2.tr()), head.logit_spec(backbone));
    let student_mv = head.w2().map_or_else(|| backbone.logits(&x_mh, Adapters::On), w2_logits);
    let [cross_entropy, divergence] = soft_loss_sums(&student_mv, hidden, &soft, backbone, tokens_n);
    let plain = &cross_entropy * objective.labels + &divergence * objective.backbone;
    let expected = Tensor::run_backward(&[plain * 0.01], &parameters, false, false);
    let got: Vec<Tensor> = parameters.iter().map(|p| p.detach().zeros_like()).collect();
    let [blocks @ .., dhidden] = &got[..] else { panic!("no hidden states") };
    let (blocks, output) = blocks.split_at(head.block_parameters().len());
    let output = match output {
        [w2] => OutputGradients { weight_vh: Some(w2), ..OutputGradients::default() },
        [a, b] => OutputGradients { adapter: Some([a, b]), ..OutputGradients::default() },
        _ => panic!("W2, or A and B"),
    };
    let into = LevelGradients { blocks: blocks.iter().collect(), output, hidden_nh: Some(dhidden) };
    let output = HeadPass::new(head, backbone).output().unwrap_or(objective.lm_head);
    let sums = soft_level_loss(&pass, output, &hidden.detach(), &soft, objective, Some((&into, 0.01)));
    for (got, expected) in [(&sums.loss, &cross_entropy), (&sums.divergence, &divergence)] {
        let (got, expected) = (got.double_value(&[]), expected.double_value(&[]));
        assert!((got - expected).abs() / expected < rounding(hidden.kind(), 1e-5), "{got} {expected}");
    }
    let evaluated = soft_level_loss(&pass, output, &hidden.detach(), &soft, objective, None);
    let (student_mv, target_m1) = (student_mv.detach(), soft.targets.tokens_m.clamp_min(0).unsqueeze(1));
    let ranks_m = ranks_of_all(&student_mv, &student_mv.gather(1, &target_m1, false), &target_m1);
    let off_m = (evaluated.ranks_m - ranks_m).abs().masked_fill(&soft.targets.tokens_m.lt(0), 0);
    assert!(off_m.max().double_value(&[]) <= 2.0, "ranks of {} targets", off_m.numel()); // rounding changes places
    for (expected, got) in expected.iter().zip(&got) {
        let difference = (expected - got).abs().max().double_value(&[]);
        let largest = expected.abs().max().double_value(&[]);
        let most = rounding(hidden.kind(), 2e-5) * largest;
        assert!(difference < most, "{:?}: {difference} of {largest}", expected.size());
    }
}

/// Gradients of a head in `kind` whose labels are rare: their weight is a hundred times that of the teacher's targets.
fn soft_gradients_in(kind: Kind, scale: f64) -> Vec<Tensor> {
    let backbone = backbone();
    let heads = heads(1, false, &backbone);
    let hidden = Generator::seeded(4).normal(&[700, 24], (Kind::Float, Device::Cpu)) * 3.0;
    let values: Vec<Tensor> = heads.parameters().iter().map(|(_, value)| value.set_requires_grad(true)).collect();
    let got: Vec<Tensor> = values[..3].iter().chain([&hidden]).map(|p| p.detach().zeros_like()).collect();
    let output = OutputGradients { weight_vh: Some(&got[2]), ..OutputGradients::default() };
    let into = LevelGradients { blocks: got[..2].iter().collect(), output, hidden_nh: Some(&got[3]) };
    let lm_weight = backbone.lm_head_weight().to_kind(kind);
    let (head, output) = (HeadPass::new(heads.head(0), &backbone), OutputLayer::plain(&values[2]));
    let hidden_nh = hidden.to_kind(kind);
    let lm_head = OutputLayer::plain(&lm_weight);
    let objective = SoftObjective { lm_head, teacher_nh: &hidden_nh, labels: 1.0, backbone: 0.01 };
    soft_level_loss(&head, output, &hidden_nh, &soft_targets(), objective, Some((&into, scale)));
    got
}

#[test]
fn gradients_of_soft_targets_of_16_bits_are_those_of_float32() {
    let in_float32 = soft_gradients_in(Kind::Float, 1.0);
    for (kind, scale, most) in [(Kind::Half, 4e-6, 0.005), (Kind::Half, 4e-8, 0.005), (Kind::BFloat16, 4e-6, 0.02)] {
        for ((at, got), expected) in soft_gradients_in(kind, scale).iter().enumerate().zip(&in_float32) {
            let expected = expected * scale;
            let off = ((got - &expected).norm() / expected.norm()).double_value(&[]);
            assert!(off < most, "{kind:?}, times {scale}, gradient {at} is off by {off}");
        }
    }
}

/// A position without a label counts neither as hit nor as miss. Its token is -100, for which token 0 stands in the computation: it is made
/// the best guess there.
#[test]
fn hits_of_soft_targets_are_those_of_the_labels() {
    let backbone = backbone();
    let heads = heads(1, false, &backbone);
    let hidden = Generator::seeded(3).normal(&[700, 24], (Kind::Float, Device::Cpu)) * 5.0;
    let SoftTargets { targets, teacher_m } = soft_targets();
    let unlabelled_u = targets.positions_m.masked_select(&targets.tokens_m.lt(0));
    let hidden = hidden.index_fill(0, &unlabelled_u, 0.5);
    let x_1h = heads.head(0).hidden(&hidden.index_select(0, &unlabelled_u.narrow(0, 0, 1)));
    tch::no_grad(|| heads.head(0).w2().unwrap().get(0).copy_(&(x_1h.squeeze() * 100.0)));
    let best = heads.logits(0, &HeadInput { hidden_nh: &hidden, previous_nj: None }, &backbone).argmax(1, false);
    assert_eq!(best.index_select(0, &unlabelled_u).max(), Tensor::from(0_i64));
    let best = best.index_select(0, &targets.positions_m);
    let tokens_m = best.where_self(&targets.tokens_m.ge(0), &targets.tokens_m);
    let soft = SoftTargets { targets: Targets { tokens_m, ..targets }, teacher_m };
    let lm_head = OutputLayer::lm_head(&backbone, Adapters::Off);
    let objective = SoftObjective { lm_head, teacher_nh: &hidden, labels: 0.0, backbone: 1.0 };
    let (head, output) =
        (HeadPass::new(heads.head(0), &backbone), HeadPass::new(heads.head(0), &backbone).output().unwrap());
    let sums = soft_level_loss(&head, output, &hidden, &soft, objective, None);
    assert_eq!(Vec::<i64>::try_from(&sums.hits).unwrap(), [333; TOP]);
}
