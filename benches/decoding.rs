//! One forward pass of 1 to 64 new tokens after a cache of 128, with the CPU's kernels and with libtorch, its products alone, and the search of
//! a 63-node tree.
//!
//! `cargo bench --bench decoding`

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use medusa::cpu::Number;
use medusa::cpu::arena::Arena;
use medusa::cpu::matrix::Matrix;
use medusa::cpu::team::Team;
use medusa::engine::fastest::fastest;
use medusa::engine::tch::TchEngine;
use medusa::engine::{Engine, RowTokens};
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::kv_cache::KvCache;
use medusa::model::llama::Llama;
use medusa::model::new_tokens::NewTokens;
use medusa::tree::search;
use tch::{Device, Kind, Tensor};

fn config() -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 512,
        intermediate_size: 1376,
        num_hidden_layers: 8,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        head_dim: 64,
        vocab_size: 32_000,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window: None,
        tie_word_embeddings: true,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        eos_token_ids: vec![],
    }
}

fn passes(criterion: &mut Criterion) {
    for kind in [Kind::Float, Kind::BFloat16] {
        let backbone = || Llama::random(config(), kind, Device::Cpu, 0);
        let (own, libtorch) = (backbone().for_decoding(), backbone().for_batches());
        let engines: [(_, Box<dyn Engine>); 2] =
            [("own", fastest(&own)), ("libtorch", Box::new(TchEngine::new(&libtorch)))];
        for (name, engine) in engines {
            passes_of(criterion, &format!("forward/{kind:?}/{name}"), &*engine);
        }
    }
}

fn passes_of(criterion: &mut Criterion, name: &str, engine: &dyn Engine) {
    let backbone = engine.backbone();
    let (row, mut cache) = (0, KvCache::with_one_row(&backbone.config, backbone.kind(), backbone.device()));
    let prompt = NewTokens::chain(128, &backbone.config, backbone.kind(), Device::Cpu);
    let tokens_n = Tensor::arange(128, (Kind::Int64, Device::Cpu));
    let _ = tch::no_grad(|| engine.extend(&mut cache, &tokens_n, &[RowTokens { row, nodes: &prompt }]));
    cache.commit(row, 128);
    let mut group = criterion.benchmark_group(name);
    for n in [1i64, 4, 8, 16, 32, 64] {
        let offsets: Vec<i64> = (0..n).map(|node| node.min(1)).collect();
        let star = |query: usize, key: usize| key == 0 || key == query;
        let new = NewTokens::pattern(&offsets, star, &backbone.config, backbone.kind(), Device::Cpu);
        let tokens_n = Tensor::arange(n, (Kind::Int64, Device::Cpu));
        group.bench_with_input(BenchmarkId::from_parameter(n), &(), |b, ()| {
            b.iter(|| {
                tch::no_grad(|| {
                    let hidden_nh = engine.extend(&mut cache, &tokens_n, &[RowTokens { row, nodes: &new }]);
                    engine.logits(&hidden_nh).double_value(&[0, 0])
                })
            });
        });
    }
    group.finish();
}

/// All products of a pass, one after the other.
fn products(criterion: &mut Criterion) {
    let team = Team::shared();
    let shapes = product_shapes(&config());
    let widest = |of: usize| shapes.iter().map(|shape| shape[of]).max().expect("a product");
    for number in [Number::Float32, Number::BFloat16] {
        let mut arena = Arena::default();
        let weights = |[o, i]: [usize; 2]| vec![0x3c; o * i * number.bytes()]; // small numbers
        let mut matrix = |&shape: &[usize; 2]| Matrix::new(&weights(shape), number, shape, &mut arena);
        let Some(matrices) = shapes.iter().map(&mut matrix).collect::<Option<Vec<_>>>() else { return };
        let mut group = criterion.benchmark_group(format!("products/{number:?}"));
        for n in [1, 2, 4, 8, 16, 32, 64, 128, 512] {
            let (x, mut y) = (vec![0.5; n * widest(1)], vec![0.0; n * widest(0)]);
            group.bench_with_input(BenchmarkId::from_parameter(n), &(), |b, ()| {
                b.iter(|| {
                    for (matrix, [o, i]) in matrices.iter().zip(&shapes) {
                        matrix.multiply(&x[..n * i], &mut y[..n * o], team);
                    }
                });
            });
        }
        group.finish();
    }
}

/// `[O, I]` of queries, keys and values; attention's output; gate and up; down, of each layer; the LM head.
fn product_shapes(config: &LlamaConfig) -> Vec<[usize; 2]> {
    let [h, f, v] = [config.hidden_size, config.intermediate_size, config.vocab_size]
        .map(|size| usize::try_from(size).expect("a size"));
    let mut shapes = [[3 * h, h], [h, h], [2 * f, h], [h, f]].repeat(config.num_hidden_layers);
    shapes.push([v, h]);
    shapes
}

fn search(criterion: &mut Criterion) {
    let accuracies: Vec<Vec<f64>> =
        (0..5).map(|head| (0..10).map(|guess| 0.6 * 0.8f64.powi(head) / f64::from(guess + 1)).collect()).collect();
    criterion
        .bench_function("tree_search/63", |b| b.iter(|| search::search(&accuracies, 63).map(|found| found.tree.len())));
}

criterion_group!(benches, passes, products, search);
criterion_main!(benches);
