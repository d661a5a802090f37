//! Starts the programs for tests, without a GPU so that the output is the same on every machine.

use std::process::Command;

pub(crate) fn medusa(arguments: &[&str]) -> assert_cmd::Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    on_the_cpu(&mut command).args(arguments);
    command.into()
}

/// Hides CUDA from the command.
pub(crate) fn on_the_cpu(command: &mut Command) -> &mut Command {
    command.env("MEDUSA_CUDA", "off")
}
