//! The table of docs/scaling.md is the one that the plans give for published models.
#![expect(clippy::print_stdout, reason = "the table for the page; shown with --nocapture")]

use std::path::Path;

use medusa::draft::planned::{DrafterConfig, Teachers};
use medusa::memory::plan::{MemoryPlan, WorldPlan};
use medusa::memory::weights::StageShape;
use medusa::model::config::LlamaConfig;
use medusa::model::stored::Quantization;
use medusa::torch::optim::{OptimizerName, ZeroStage};
use medusa::train::memory_plan::Workload;
use medusa::train::plan::BackboneTraining;

use super::memory_table::{GIB, heads, lora, one_packed_row};
use super::paper_recipes::config_of;
use super::small_run::SmallRun;

const SIZES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Processes of the column of bytes.
const SENDERS: usize = 8;

/// A model and a way to train it.
const RUNS: [(&str, &str, Option<Quantization>, bool, bool); 9] = [
    ("lmsys/vicuna-7b-v1.5", "Medusa-1", None, false, false),
    ("lmsys/vicuna-7b-v1.5", "Medusa-1, shared LM head", None, false, true),
    ("lmsys/vicuna-7b-v1.5", "Medusa-2, LoRA", None, true, false),
    ("lmsys/vicuna-13b-v1.5", "Medusa-1", None, false, false),
    ("lmsys/vicuna-13b-v1.5", "Medusa-2, LoRA", None, true, false),
    ("lmsys/vicuna-33b-v1.3", "Medusa-1", None, false, false),
    ("lmsys/vicuna-33b-v1.3", "Medusa-2, LoRA", None, true, false),
    ("meta-llama/Llama-3.1-70B", "Medusa-1, nf4", Some(Quantization::Nf4), false, false),
    ("meta-llama/Llama-3.1-70B", "Medusa-2, LoRA, nf4", Some(Quantization::Nf4), true, false),
];

fn plan(
    config: &LlamaConfig,
    quantization: Option<Quantization>,
    trained: &BackboneTraining,
    shared_lm_head: bool,
    size: usize,
) -> MemoryPlan {
    let drafter = heads(shared_lm_head).for_backbone(config);
    MemoryPlan::of(&Workload {
        pass: one_packed_row(config, quantization, trained),
        stage: StageShape::whole(config.num_hidden_layers),
        drafter: &*drafter,
        teachers: Teachers { for_drafter: false, for_backbone: trained.has_teacher() },
        optimizer: OptimizerName::AdamW,
        world: WorldPlan { size, zero_stage: ZeroStage::One },
        unequal: false,
        cached: false,
        loaded: None,
        answers_twice: false,
    })
}

#[test]
fn the_table_of_several_processes_is_in_the_docs() {
    let small = SmallRun::new();
    let sizes = SIZES.map(|size| size.to_string()).join(" | ");
    let mut table = format!("| model | training | {sizes} | sent, GB |\n|{}\n", " --- |".repeat(SIZES.len() + 3));
    for (model, name, quantization, is_joint, shared_lm_head) in RUNS {
        small.write("backbone/config.json", config_of(model).to_string());
        let config = LlamaConfig::load(&small.path("backbone")).expect("a published config");
        let trained = if is_joint { lora() } else { BackboneTraining::Frozen };
        let plan = |size| plan(&config, quantization, &trained, shared_lm_head, size);
        let peaks = SIZES.map(|size| format!("{:.0}", plan(size).peak_bytes() as f64 / GIB)).join(" | ");
        let model = model.rsplit('/').next().expect("a name");
        table += &format!("| {model} | {name} | {peaks} | {:.1} |\n", plan(SENDERS).sent_bytes as f64 / 1e9);
    }
    println!("{table}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scaling.md");
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains(&table), "docs/scaling.md has another than\n{table}");
}
