//! Checkpoints of a run.

use std::fs;
use std::path::{Path, PathBuf};

use medusa::files::checksums::seal;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::recipe::Recipe;
use medusa::train::checkpoint::{Checkpoints, holds_a_run, newest_best, newest_step, set_damaged_aside, verify_newest};
use medusa::train::plan::TrainPlan;
use medusa::train::ranks::Ranks;
use medusa::train::state::TrainState;
use tch::{Device, Kind};

use super::scratch::{checked, choice, folder, write};
use super::weights::{backbone_config, safetensors_file};

/// A run of two small heads, and what its only checkpoint holds.
struct SavedRun {
    plan: TrainPlan,
    backbone: Llama,
    state: TrainState,
    checkpoint: PathBuf,
    files: Vec<(String, Vec<u8>)>,
}

thread_local! {
    static RUN: std::cell::RefCell<SavedRun> = std::cell::RefCell::new(SavedRun::new());
}

impl SavedRun {
    fn new() -> Self {
        let config: LlamaConfig = backbone_config();
        let run = folder("checkpoint");
        let backbone = Llama::random(config, Kind::Float, Device::Cpu, 1);
        let text =
            include_str!("../../../recipes/tiny_stage1.toml").replace("medusa_num_heads = 5", "medusa_num_heads = 2");
        let recipe = Recipe::parse(Path::new("tiny_stage1.toml"), &text).expect("a recipe of ours");
        let mut plan = recipe.plan(Device::Cpu);
        plan.train.output_dir = run.clone();
        let drafter = plan.drafter.for_backbone(&backbone.config).build(&backbone, None, 2).expect("untrained heads");
        let mut state = TrainState::new(drafter, &backbone, &plan);
        state.step = 1;
        let checkpoints = Checkpoints { plan: &plan, backbone: &backbone, template: None, fingerprint: None };
        let checkpoint = checkpoints.save_step(&state, Ranks::alone()).expect("a folder that can be written");
        let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
        let entries = fs::read_dir(&checkpoint).expect("the folder that was written").flatten();
        let paths = entries.map(|entry| entry.path()).filter(|path| path.is_file());
        let files = paths.map(|path| (name(&path), fs::read(&path).expect("a file that was written"))).collect();
        Self { plan, backbone, state, checkpoint, files }
    }

    /// Writes the checkpoint anew, with `bytes` in place of one of its files.
    fn write_with(&self, replaced: &str, bytes: &[u8], is_sealed: bool) {
        for (name, own) in &self.files {
            write(&self.checkpoint.join(name), if name == replaced { bytes } else { own });
        }
        if is_sealed {
            seal(&self.checkpoint, &[]).expect("a folder that can be written");
        }
    }
}

/// The files of the checkpoint.
pub(super) fn files() -> Vec<(String, Vec<u8>)> {
    RUN.with_borrow(|run| run.files.clone())
}

/// A checkpoint with another file: the first byte says which one, and whether its checksum is right. Of files of tensors the bytes are the
/// header, and behind a NUL the data.
pub(super) fn checkpoint(input: &[u8]) {
    let (which, rest) = choice(input);
    RUN.with_borrow_mut(|run| {
        let folder = run.plan.train.output_dir.clone();
        let tensors = || safetensors_file(rest);
        match which {
            b'h' => run.write_with("heads.safetensors", &tensors(), true),
            b'o' => run.write_with("optimizer.safetensors", &tensors(), true),
            b'c' => run.write_with("medusa.sha256", rest, false),
            b's' => run.write_with("state.json", rest, false),
            _ => run.write_with("state.json", input, true),
        }
        let SavedRun { plan, backbone, state, .. } = run;
        let checkpoints = Checkpoints { plan, backbone, template: None, fingerprint: None };
        let _ = (checked(&folder, verify_newest(&folder)), checked(&folder, newest_best(&folder)));
        let _ = checked(&folder, checkpoints.restore_newest(state, Ranks::alone()));
        let _ = checked(&folder, set_damaged_aside(&folder));
        let _ = (checked(&folder, holds_a_run(&folder)), checked(&folder, newest_step(&folder)));
    });
}
