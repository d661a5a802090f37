//! The commands in a process that has loaded libtorch: `medusa-libtorch`, which [`launcher`](super::launcher) starts, and
//! `examples/gpu_check`.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;

use super::exit::{report, status};
use super::{
    CommonFlags, MedusaTrainCommand, finish_without_libtorch, medusa_arguments, parse, threads, train, with_typed_flags,
};
use crate::torch;

/// `medusa` with all verbs. Returns the exit status.
pub fn medusa() -> u8 {
    let (common, mut verb) = medusa_arguments();
    finish(&common, || {
        let _claims = verb.prepare(&common)?;
        verb.run(&common)
    })
}

/// `medusa-train`: the verb `train` alone. Returns the exit status.
pub fn medusa_train() -> u8 {
    let (command, matches) = parse::<MedusaTrainCommand>();
    let common = with_typed_flags(command.common, &matches);
    finish(&common, || train::run(&command.args, &common))
}

/// Opens the accelerator, installs signal handlers, runs the verb and reports its error. Returns the exit status.
pub fn finish(common: &CommonFlags, verb: impl FnOnce() -> anyhow::Result<()>) -> u8 {
    if let Err(error) = restart_for_libgomp(common) {
        report(&error);
        return status(&error);
    }
    threads::limit_libtorch(common.threads);
    torch::accelerator::open(); // before any other CUDA query: libtorch caches its first answer
    finish_without_libtorch(common, || torch::guard("the command", verb)?)
}

/// Starts the program again if neither the launcher nor the user has set how long threads wait for each other: libgomp reads that
/// when it is loaded. Returns only if nothing is to be done, or with an error.
fn restart_for_libgomp(common: &CommonFlags) -> anyhow::Result<()> {
    if threads::is_waiting_set() {
        return Ok(());
    }
    let program = env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(&program);
    let mut arguments = env::args_os();
    command.arg0(arguments.next().unwrap_or_else(|| program.clone().into())).args(arguments);
    let error = command.envs(threads::environment(common.threads)).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
