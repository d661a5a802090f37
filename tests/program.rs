//! The programs as the tests start them: without a GPU, so that they print the same on every machine.

use std::process::Command;

/// `medusa` with these arguments.
pub(crate) fn medusa(arguments: &[&str]) -> assert_cmd::Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    on_the_cpu(&mut command).args(arguments);
    command.into()
}

/// CUDA stays closed in what the command starts.
pub(crate) fn on_the_cpu(command: &mut Command) -> &mut Command {
    command.env("MEDUSA_CUDA", "off")
}
