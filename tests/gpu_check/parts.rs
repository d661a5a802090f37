//! The parts of the stages, without a GPU.

use std::path::Path;

use medusa::engine::cuda::shape::Shape;
use medusa::model::config::LlamaConfig;
use medusa::model::loading::Purpose;
use medusa::recipe::Recipe;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{SCRIPT, python, run, words};
use crate::backbone::{load, over_the_row};

#[test]
fn each_documented_command_has_less_than_nine_minutes() {
    let sum =
        "import stages, sys; print(sum(sum(parts.values()) for parts in stages.seconds_of(sys.argv[1:]).values()))";
    for command in [["smoke", "engine", "profile"], ["training", "distill", "texts"]] {
        let seconds: u32 = python(sum, &command).trim().parse().expect("a number");
        assert!(seconds <= 480, "{command:?}: {seconds}");
        assert!(words(&std::fs::read(SCRIPT).expect("the script")).contains(&command.join(" ")));
    }
}

#[test]
fn the_model_that_is_trained_on_the_gpu_computes_what_the_embedded_one_does_and_has_kernels() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = run(Path::new(SCRIPT), &["--inside", "wider-heads", "--folder", folder.path().to_str().expect("UTF-8")]);
    assert!(made.status.success(), "{}", words(&made.stderr));
    let wider = folder.path().join("wider_heads");
    let config = LlamaConfig::load(&wider).expect("a config");
    assert_eq!(Shape { config: &config, kind: Kind::BFloat16, draft: None }.check_kernels(), Ok(()));
    let ids_t = Tensor::from_slice(&[0i64, 300, 17, 801, 42, 1200, 5, 77, 640, 300]);
    let embedded = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    let [expected, got] = [embedded.as_path(), &wider]
        .map(|folder| over_the_row(&load(folder, Kind::Float, Purpose::Training), &ids_t).1);
    let distance = (&got - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
    assert!(distance < 0.01, "{distance}: only the queries' weights are rounded");
}

#[test]
fn the_recipes_of_its_stages_are_valid() {
    let code = "import pathlib, sys, trained\nscratch = pathlib.Path('/nowhere')\n\
                print({'tiny': trained.tiny_recipe}.get(sys.argv[1], lambda of: trained.recipe_text(sys.argv[1], of))(scratch))";
    for stage in ["medusa1", "medusa2", "tiny"] {
        let text = python(code, &[stage]);
        let recipe = Recipe::parse(Path::new("recipe.toml"), &text).unwrap_or_else(|error| panic!("{stage}: {error}"));
        let plan = recipe.plan(tch::Device::Cpu);
        assert!(plan.train.output_dir.starts_with("/nowhere"), "{}", plan.train.output_dir.display());
        assert!(Path::new(&plan.backbone.path).starts_with("/nowhere"), "{}", plan.backbone.path);
    }
}

/// What `processes.run` or another function of the scripts returns.
fn returned(code: &str) -> Value {
    serde_json::from_str(&python(code, &[])).expect("JSON")
}

#[test]
fn a_process_that_nobody_can_wait_for_ends_the_part() {
    let printed = returned(
        "import json, processes\nprocesses.SECONDS_TO_DIE = 0.2\n\
         print(json.dumps(processes.run(['sh', '-c', 'echo early; setsid sleep 5 & sleep 60'], 0.3)))",
    );
    assert_eq!(printed["failed"], "not done after 0 s, and a process that it started goes on: early", "{printed}");
}

#[test]
fn an_error_of_the_scripts_is_the_parts_own() {
    let printed = returned(
        "import json, stages, types\nstages.trained.PARTS['bench'] = lambda *_: {}['speedup']\n\
         of = types.SimpleNamespace(program=None, scratch=None)\nprint(json.dumps(stages.attempt('bench', of, 5, {})))",
    );
    let failed = printed["failed"].as_str().expect("a message");
    assert!(failed.starts_with("KeyError: 'speedup'\nTraceback"), "{failed}");
}

#[test]
fn a_distillation_that_is_stopped_reports_its_speed_so_far() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("slow");
    let text = "#!/bin/sh\necho '3 of 96 conversations, 650 tokens/s, 1 min left' >&2\n\
                echo '9 of 96 conversations, 700 tokens/s, 1 min left' >&2\nexec sleep 60\n";
    super::write_program(&program, text);
    let code = "import json, pathlib, sys, trained\n\
                print(json.dumps(trained.distill(sys.argv[1], pathlib.Path(sys.argv[2]), 0.5)))";
    let paths = [&program, folder.path()].map(|path: &Path| path.to_str().expect("UTF-8"));
    let printed: Value = serde_json::from_str(&python(code, &paths)).expect("JSON");
    assert!(printed["failed"].as_str().is_some_and(|failed| failed.starts_with("not done after")), "{printed}");
    let line = &printed["lines"][0];
    assert_eq!((line["tokens_per_second"].as_f64(), &line["partial"]), (Some(700.0), &Value::Bool(true)), "{printed}");
}
