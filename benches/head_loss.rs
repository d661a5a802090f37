//! The fused head loss compared with the plain one, loss and gradients, for the rows of one core.
//!
//! `cargo bench --bench head_loss`

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use medusa::draft::heads::objective::{HeadPass, cross_entropy_sum};
use medusa::draft::heads::{Heads, HeadsShape};
use medusa::draft::loss::Targets;
use medusa::draft::loss::fused::{LevelGradients, OutputGradients, OutputLayer, level_loss};
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::llama::Llama;
use medusa::torch::Generator;
use tch::{Device, Kind, Tensor};

const POSITIONS: i64 = 512;

fn backbone(hidden_size: i64, vocab_size: i64) -> Llama {
    let config = LlamaConfig {
        model_type: "llama".into(),
        hidden_size,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: hidden_size / 4,
        vocab_size,
        max_position_embeddings: POSITIONS,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window: None,
        tie_word_embeddings: true,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        eos_token_ids: vec![],
    };
    Llama::random(config, Kind::Float, Device::Cpu, 0)
}

fn head_losses(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("head_loss");
    group.sample_size(10);
    for (hidden, vocab) in [(64, 512), (512, 32_000)] {
        let backbone = backbone(hidden, vocab);
        let shape = HeadsShape {
            medusa_num_heads: 1,
            medusa_num_layers: 1,
            hidden_size: hidden,
            vocab_size: vocab,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
        let mut generator = Generator::seeded(2);
        let hidden_nh = generator.normal(&[POSITIONS, hidden], (Kind::Float, Device::Cpu));
        let targets = Targets {
            positions_m: Tensor::arange(POSITIONS, (Kind::Int64, Device::Cpu)),
            tokens_m: generator.integers(vocab, &[POSITIONS]),
            previous_mj: None,
        };
        let parameters: Vec<Tensor> = heads.parameters().iter().map(|(_, p)| p.set_requires_grad(true)).collect();
        let sums: Vec<Tensor> = parameters.iter().map(|p| p.zeros_like().set_requires_grad(false)).collect();
        let name = format!("{hidden}x{vocab}");
        group.bench_with_input(BenchmarkId::new("fused", &name), &(), |b, ()| {
            let output = OutputGradients { weight_vh: Some(&sums[2]), ..OutputGradients::default() };
            let into = LevelGradients { blocks: sums[..2].iter().collect(), output, hidden_nh: None };
            let w2 = OutputLayer::plain(heads.head(0).w2().expect("own W2"));
            b.iter(|| {
                let head = HeadPass::new(heads.head(0), &backbone);
                level_loss(Some(&head), w2, &hidden_nh, &targets, Some((&into, 1.0))).loss.double_value(&[])
            });
        });
        group.bench_with_input(BenchmarkId::new("plain", &name), &(), |b, ()| {
            b.iter(|| {
                let loss = cross_entropy_sum(&heads, 0, &hidden_nh, &targets, &backbone);
                Tensor::run_backward(&[loss], &parameters, false, false).len()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, head_losses);
criterion_main!(benches);
