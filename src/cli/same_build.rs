//! Refuses a `medusa-libtorch` of another build than the launcher: it would run other code than the user asked for.

use std::{env, process};

use super::exit::{report, status};

/// Set by the launcher for the program that it becomes: its process id, which `exec` keeps, and its build. A variable inherited from
/// another process has another id and means nothing.
const LAUNCHER: &str = "MEDUSA_LAUNCHER";

/// Equal only for programs made of the same source files.
const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "-", env!("MEDUSA_SOURCE_HASH"));

/// What the launcher adds to the environment.
pub(super) fn variable() -> (&'static str, String) {
    (LAUNCHER, format!("{} {BUILD}", process::id()))
}

/// Whether a launcher started itself, because a copy of it or a link to it is named `medusa-libtorch`.
pub(super) fn is_started_by_launcher() -> bool {
    launchers_build().is_some()
}

/// The build of the launcher that became this process.
fn launchers_build() -> Option<String> {
    let value = env::var(LAUNCHER).ok()?;
    let (process, build) = value.split_once(' ')?;
    (process == process::id().to_string()).then(|| build.to_owned())
}

/// Runs the program unless a launcher of another build started it. Returns the exit status.
pub fn run_if_same_build(program: impl FnOnce() -> u8) -> u8 {
    match launchers_build().filter(|build| build != BUILD) {
        None => program(),
        Some(other) => {
            let error = anyhow::anyhow!(
                "medusa-libtorch is of the build {BUILD}, the program that started it of {other}: build them together \
                 (`cargo build --bins`), or install all of them again"
            );
            report(&error);
            status(&error)
        }
    }
}
