//! Trains the heads of a recipe, and prints the loss of each step and where the heads are:
//!
//! ```text
//! cargo run --release --example train -- recipes/tiny_stage1.toml
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use medusa::recipe::WrittenRecipe;
use medusa::torch::DeviceChoice;
use medusa::torch::collective::OneProcess;
use medusa::torch::shared_gpus::SharedGpus;
use medusa::train::checked::CheckedRun;
use medusa::train::ranks::Ranks;
use medusa::train::run::TrainRun;
use medusa::train::training_loop::RunEvent;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("usage: train RECIPE.toml")?;
    let device = DeviceChoice::Auto.resolve()?;
    let recipe = WrittenRecipe::read(Path::new(&path))?.fetch(device, SharedGpus::alone(device), &|_| {})?;
    let checked = CheckedRun::load(recipe.with_weights(&|_| {})?.plan(device), None)?; // every mistake is an error here
    let steps = checked.total_steps;
    let run = TrainRun::load(checked)?;
    let mut print_loss = |event: RunEvent| {
        if let RunEvent::Stepped(line) = event {
            println!("step {} of {steps}: loss {:.4}", line.step, line.loss);
        }
    };
    let outcome = run.train(Ranks::new(&OneProcess, device), false, &AtomicBool::new(false), &mut print_loss)?;
    println!("{outcome:?}");
    Ok(())
}
