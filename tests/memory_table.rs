//! The table of planned memory in docs/training.md is the one that the plans give for published models.
#![expect(clippy::print_stdout, reason = "the table for the page; shown with --nocapture")]

use std::num::NonZeroUsize;
use std::path::Path;

use medusa::draft::heads::HeadsConfig;
use medusa::draft::planned::{DrafterConfig, PlannedDrafter, Teachers};
use medusa::engine::cuda::draft::{DraftInput, DraftShape};
use medusa::engine::cuda::plan::DevicePlan;
use medusa::engine::cuda::shape::Shape;
use medusa::memory::layer::LayerPass;
use medusa::memory::plan::{MemoryPlan, WorldPlan};
use medusa::memory::stages::balanced;
use medusa::memory::weights::StageShape;
use medusa::model::config::LlamaConfig;
use medusa::model::lora::{LoraConfig, TargetModules};
use medusa::model::stored::Quantization;
use medusa::numbers::{Fraction, Positive};
use medusa::torch::optim::OptimizerName;
use medusa::train::memory_plan::Workload;
use medusa::train::plan::BackboneTraining;
use medusa::tree::sparse_tree::SparseTree;
use serde_json::json;
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
pub(crate) const GIB: f64 = (1_u64 << 30) as f64;

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

pub(crate) fn lora() -> BackboneTraining {
    let lora = LoraConfig {
        rank: NonZeroUsize::new(32).expect("a constant"),
        alpha: Positive::new(16.0).expect("a constant"),
        dropout: Fraction::new(0.05).expect("a constant"),
        target_modules: TargetModules::default(),
        init_from: None,
    };
    BackboneTraining::Lora { lora, self_distillation: false }
}

pub(crate) fn heads(shared_lm_head: bool) -> HeadsConfig {
    let table = json!({"medusa_num_heads": HEADS, "medusa_num_layers": 1, "shared_lm_head": shared_lm_head});
    serde_json::from_value(table).expect("a table of heads")
}

fn trained(
    config: &LlamaConfig,
    quantization: Option<Quantization>,
    trained: &BackboneTraining,
    shared_lm_head: bool,
) -> u64 {
    peak_of_stage(config, quantization, trained, shared_lm_head, StageShape::whole(config.num_hidden_layers))
}

/// One packed row in a micro batch.
fn peak_of_stage(
    config: &LlamaConfig,
    quantization: Option<Quantization>,
    trained: &BackboneTraining,
    shared_lm_head: bool,
    stage: StageShape,
) -> u64 {
    let drafter = heads(shared_lm_head).for_backbone(config);
    MemoryPlan::of(&workload(config, quantization, trained, &*drafter, stage)).peak_bytes()
}

fn workload<'w>(
    config: &'w LlamaConfig,
    quantization: Option<Quantization>,
    trained: &'w BackboneTraining,
    drafter: &'w dyn PlannedDrafter,
    stage: StageShape,
) -> Workload<'w> {
    Workload {
        pass: one_packed_row(config, quantization, trained),
        stage,
        drafter,
        teachers: Teachers { for_drafter: false, for_backbone: trained.has_teacher() },
        optimizer: OptimizerName::AdamW8bit,
        world: WorldPlan::ALONE,
        unequal: false,
        cached: false,
        loaded: None,
        answers_twice: false,
    }
}

#[test]
fn a_second_copy_that_answers_is_in_the_plan_where_training_needs_less() {
    let small = SmallRun::new();
    small.write("backbone/config.json", config_of("lmsys/vicuna-7b-v1.5").to_string());
    let config = LlamaConfig::load(&small.path("backbone")).expect("a config");
    let (drafter, whole) = (heads(true).for_backbone(&config), StageShape::whole(config.num_hidden_layers));
    let work = workload(&config, Some(Quantization::Nf4), &BackboneTraining::Frozen, &*drafter, whole);
    let [once, twice] =
        [false, true].map(|answers_twice| MemoryPlan::of(&Workload { answers_twice, ..work }).peak_bytes());
    let backbone = MemoryPlan::of(&work).groups[0].weight_bytes;
    assert!(once < 2 * backbone, "the heads are small");
    assert_eq!(twice, 2 * backbone, "both copies, and no heads yet");
}

/// In 16 bits on a GPU.
pub(crate) fn one_packed_row<'w>(
    config: &'w LlamaConfig,
    quantization: Option<Quantization>,
    trained: &'w BackboneTraining,
) -> LayerPass<'w> {
    LayerPass {
        config,
        element: 2,
        quantization,
        blocks: None,
        trained: trained.layers(),
        recompute: !trained.is_frozen(),
        rows: 1,
        length: ROW,
        masked: true,
        flash: true,
        on_host: false,
    }
}

/// With heads and a tree of 64 nodes.
fn decoded(config: &LlamaConfig) -> u64 {
    let tree = SparseTree::cartesian(&[7, 2, 1, 1, 1]).expect("64 nodes with the root");
    let tensors = heads(false).shape([config.vocab_size, config.hidden_size]).tensors();
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
    assert_in_docs(&table());
}

fn assert_in_docs(table: &str) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/training.md");
    println!("{table}");
    assert!(
        std::fs::read_to_string(page).expect("a page").contains(table),
        "docs/training.md has another than\n{table}"
    );
}

/// Runs that one GPU of 80 GB has no memory for, or little to spare.
const SPREAD: [(&str, &str, Option<Quantization>, bool); 6] = [
    ("lmsys/vicuna-33b-v1.3", "Medusa-2, LoRA", None, true),
    ("meta-llama/Llama-3.1-70B", "Medusa-1, nf4", Some(Quantization::Nf4), false),
    ("meta-llama/Llama-3.1-70B", "Medusa-2, LoRA, nf4", Some(Quantization::Nf4), true),
    ("meta-llama/Llama-3.1-70B", "Medusa-1, int8", Some(Quantization::Int8), false),
    ("meta-llama/Llama-3.1-70B", "Medusa-1", None, false),
    ("meta-llama/Llama-3.1-70B", "Medusa-2, LoRA", None, true),
];

/// `device_map = "auto"` over the fewest GPUs of 80 GB, from two on.
#[test]
fn the_table_of_stages_is_in_the_docs() {
    let room = GPUS[1].1;
    let small = SmallRun::new();
    let mut text = "| model | training | GPUs of 80 GB | layers on each | planned peak on each, GiB |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for (model, name, quantization, is_joint) in SPREAD {
        small.write("backbone/config.json", config_of(model).to_string());
        let config = LlamaConfig::load(&small.path("backbone")).expect("a published config");
        let trained = if is_joint { lora() } else { BackboneTraining::Frozen };
        let peak = |stage| peak_of_stage(&config, quantization, &trained, false, stage);
        let stages = |gpus| -> Vec<(usize, f64)> {
            let counts: Vec<usize> =
                balanced(config.num_hidden_layers, gpus, peak).into_iter().map(NonZeroUsize::get).collect();
            StageShape::all(&counts).into_iter().map(|stage| (stage.layers, peak(stage) as f64 / GIB)).collect()
        };
        let fits = |stages: &Vec<(usize, f64)>| stages.iter().all(|(_, gib)| *gib <= room);
        let stages = (2..=8).map(stages).find(fits).expect("eight GPUs are enough");
        let list = |of: &dyn Fn(&(usize, f64)) -> String| stages.iter().map(of).collect::<Vec<_>>().join(", ");
        let (layers, peaks) = (list(&|stage| stage.0.to_string()), list(&|stage| format!("{:.0}", stage.1)));
        let model = model.rsplit('/').next().expect("a name");
        text += &format!("| {model} | {name} | {} | {layers} | {peaks} |\n", stages.len());
    }
    assert_in_docs(&text);
}
