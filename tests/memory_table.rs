//! The table of planned memory in docs/training.md is the one that the plans give for published models.
#![expect(clippy::print_stdout, reason = "the table for the page; shown with --nocapture")]

use std::num::NonZeroUsize;
use std::path::Path;

use medusa::draft::medusa::heads::{HeadsArchitecture, HeadsShape};
use medusa::engine::cuda::draft::{DraftInput, DraftShape};
use medusa::engine::cuda::plan::DevicePlan;
use medusa::engine::cuda::shape::Shape;
use medusa::model::config::LlamaConfig;
use medusa::model::lora::{LoraConfig, TargetModules};
use medusa::model::quantization::Quantization;
use medusa::numbers::{Fraction, Positive};
use medusa::torch::optim::OptimizerName;
use medusa::train::memory_plan::{MemoryPlan, Workload};
use medusa::train::plan::BackboneTraining;
use medusa::tree::sparse_tree::SparseTree;
use tch::Kind;

use super::paper_recipes::config_of;
use super::small_run::SmallRun;

const MODELS: [&str; 4] =
    ["lmsys/vicuna-7b-v1.5", "lmsys/vicuna-13b-v1.5", "lmsys/vicuna-33b-v1.3", "meta-llama/Llama-3.1-70B"];
const HEADS: usize = 5;
const ROW: u64 = 2048;
const CONTEXT: i64 = 4096;
/// Memory of a GPU as it is sold, in GB, and what a process can use of it, in GiB: a 24 GB card, an H100 and an H200, less a CUDA context.
const GPUS: [(u32, f64); 3] = [(24, 23.0), (80, 78.0), (141, 139.0)];
const GIB: f64 = (1_u64 << 30) as f64;

/// One way to use a model.
struct Way {
    name: &'static str,
    plan: fn(&LlamaConfig) -> u64,
}

const WAYS: [Way; 6] = [
    Way { name: "Medusa-1", plan: |config| trained(config, None, &BackboneTraining::Frozen, false) },
    Way {
        name: "Medusa-1, nf4",
        plan: |config| trained(config, Some(Quantization::Nf4), &BackboneTraining::Frozen, false),
    },
    Way {
        name: "Medusa-1, nf4, shared LM head",
        plan: |config| trained(config, Some(Quantization::Nf4), &BackboneTraining::Frozen, true),
    },
    Way { name: "Medusa-2, LoRA", plan: |config| trained(config, None, &lora(), false) },
    Way { name: "Medusa-2, LoRA, nf4", plan: |config| trained(config, Some(Quantization::Nf4), &lora(), false) },
    Way { name: "decoding", plan: decoded },
];

fn lora() -> BackboneTraining {
    let lora = LoraConfig {
        rank: NonZeroUsize::new(32).expect("a constant"),
        alpha: Positive::new(16.0).expect("a constant"),
        dropout: Fraction::new(0.05).expect("a constant"),
        target_modules: TargetModules::default(),
        init_from: None,
    };
    BackboneTraining::Lora { lora, self_distillation: false }
}

fn heads(config: &LlamaConfig, shared_lm_head: bool) -> HeadsShape {
    HeadsShape {
        architecture: HeadsArchitecture::Medusa,
        medusa_num_heads: HEADS,
        medusa_num_layers: 1,
        hidden_size: config.hidden_size,
        vocab_size: if shared_lm_head { 0 } else { config.vocab_size },
        w2_bias: false,
        w2_rank: 0,
        shared_w2: false,
    }
}

/// One packed row in a micro batch.
fn trained(
    config: &LlamaConfig,
    quantization: Option<Quantization>,
    trained: &BackboneTraining,
    shared_lm_head: bool,
) -> u64 {
    let plan = MemoryPlan::of(&Workload {
        config,
        element: 2,
        quantization,
        heads: heads(config, shared_lm_head),
        heads_drop: false,
        trained,
        soft_targets: false,
        optimizer: OptimizerName::AdamW8bit,
        recompute: !trained.is_frozen(),
        rows: 1,
        length: ROW,
        masked: true,
        flash: true,
        cached: false,
        on_host: false,
    });
    plan.peak_bytes()
}

/// With heads and a tree of 64 nodes.
fn decoded(config: &LlamaConfig) -> u64 {
    let tree = SparseTree::cartesian(&[7, 2, 1, 1, 1]).expect("64 nodes with the root");
    let tensors = heads(config, false).tensors();
    let parameters = tensors.iter().map(|(_, size)| size.iter().product::<i64>()).sum();
    let draft = DraftShape {
        tree: &tree,
        input: DraftInput::Hidden,
        blocks: 1,
        multiplied_out: 0,
        is_truncated: false,
        parameters,
    };
    let shape = Shape { config, kind: Kind::BFloat16, draft: Some(draft) };
    let plan = DevicePlan::of(&shape, shape.room(CONTEXT));
    plan.weight_bytes + plan.bytes()
}

/// In GiB, and the smallest GPU that has as much.
fn cell(bytes: u64) -> String {
    let gib = bytes as f64 / GIB;
    let gpu = GPUS.into_iter().find(|(_, room)| gib <= *room);
    format!("{gib:.0} GiB{}", gpu.map_or(String::new(), |(gpu, _)| format!(" ({gpu})")))
}

fn table() -> String {
    let small = SmallRun::new();
    let row = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let header = std::iter::once("model".to_owned()).chain(WAYS.iter().map(|way| way.name.to_owned())).collect();
    let mut text = row(header) + &row(vec!["---".into(); WAYS.len() + 1]);
    for model in MODELS {
        small.write("backbone/config.json", config_of(model).to_string());
        let config = LlamaConfig::load(&small.path("backbone")).expect("a published config");
        let name = model.rsplit('/').next().expect("a name").to_owned();
        text += &row(std::iter::once(name).chain(WAYS.iter().map(|way| cell((way.plan)(&config)))).collect());
    }
    text
}

#[test]
fn the_table_of_planned_memory_is_in_the_docs() {
    let (page, table) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/training.md"), table());
    println!("{table}");
    assert!(
        std::fs::read_to_string(page).expect("a page").contains(&table),
        "docs/training.md has another than\n{table}"
    );
}
