//! What users start as `medusa` and `medusa-train`: parses the command line, runs the commands that need no libtorch, and
//! replaces itself by `medusa-libtorch`, with the same arguments, for the others.
//!
//! Loading libtorch takes several times as long as `medusa inspect`. These two programs therefore call no function that
//! reaches tch, and the linker then leaves libtorch out of them (`tests/launcher.rs`). A linker that does not makes them
//! slower, not wrong.

use std::convert::Infallible;
use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use glob::Pattern;

use super::doctor::version_of;
use super::exit::{report, status};
use super::{
    CommonFlags, MedusaTrainCommand, UsageError, finish_without_libtorch, medusa_arguments, parse, same_build, threads,
};
use crate::files;
use crate::torch::LIBTORCH_VERSION;

/// The program that is linked to libtorch, in the launcher's folder.
const PROGRAM: &str = "medusa-libtorch";

/// From which level on libtorch's C++ code logs: c10d logs stacks of frames when another process is gone.
const C10D_LOG: &str = "TORCH_CPP_LOG_LEVEL";

#[cfg(not(target_os = "macos"))]
const LIBTORCH: &str = "libtorch_cpu.so";
#[cfg(target_os = "macos")]
const LIBTORCH: &str = "libtorch_cpu.dylib";

/// Folders that the loader searches first.
#[cfg(not(target_os = "macos"))]
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
#[cfg(target_os = "macos")]
const LIBRARY_PATH: &str = "DYLD_LIBRARY_PATH";

/// The program `medusa`. Returns the exit status, unless it becomes `medusa-libtorch`.
pub fn medusa() -> u8 {
    let (common, mut verb) = medusa_arguments();
    if verb.without_libtorch().is_none() {
        return start_libtorch("medusa", &common);
    }
    finish_without_libtorch(&common, || {
        let _claims = verb.prepare(&common)?;
        let run = verb.without_libtorch().expect("`prepare` leaves the verb what it is");
        run(&common)
    })
}

/// The program `medusa-train`: `medusa train`.
pub fn medusa_train() -> u8 {
    let (command, _) = parse::<MedusaTrainCommand>(); // reports mistakes at once
    start_libtorch("medusa-train", &command.common)
}

/// Returns only if that fails.
fn start_libtorch(name: &str, common: &CommonFlags) -> u8 {
    let Err(error) = exec(name, common);
    report(&error);
    status(&error)
}

fn exec(name: &str, common: &CommonFlags) -> anyhow::Result<Infallible> {
    threads::check_environment().map_err(UsageError)?;
    let program = program(name)?;
    anyhow::ensure!(
        !same_build::is_started_by_launcher(),
        "{} is not the program that is linked to libtorch but {name} itself: build or install the programs again \
         (`cargo build --bins`)",
        program.display()
    );
    let mut command = Command::new(&program);
    command.arg0(name).args(env::args_os().skip(1));
    // libtorch and libgomp read them when they are loaded.
    command.envs(library_path(&program)?.map(|path| (LIBRARY_PATH, path)));
    command.envs(threads::environment(common.threads)).envs([same_build::variable()]);
    if env::var_os(C10D_LOG).is_none() {
        command.env(C10D_LOG, "FATAL"); // our errors say it in one line
    }
    Err(command.exec()).with_context(|| format!("cannot start {}", program.display()))
}

fn program(name: &str) -> anyhow::Result<PathBuf> {
    let launcher =
        env::current_exe().and_then(|path| path.canonicalize()).context("cannot find this program's folder")?;
    let folder = files::parent(&launcher);
    let program = folder.join(PROGRAM);
    anyhow::ensure!(
        program.is_file(),
        "{} has no {PROGRAM}, which {name} starts for this command: keep the programs in one folder (`cargo build --bins` \
         builds all three)",
        folder.display()
    );
    Ok(program)
}

/// `LD_LIBRARY_PATH` with the torch of the program's Python environment in front; `None` if the loader finds libtorch by
/// itself.
///
/// # Errors
/// If libtorch is nowhere.
fn library_path(program: &Path) -> anyhow::Result<Option<OsString>> {
    let (packages, linked) = (torch_packages(program), env!("MEDUSA_LIBTORCH_FOLDERS"));
    let Some(torch) = torch_of_environment(&packages, || loader_finds_libtorch(program, linked))? else {
        return Ok(None);
    };
    let libraries = torch.join("lib");
    let folders = [libraries.clone()].into_iter().chain(folders_of_user());
    let joined = env::join_paths(folders);
    let why = || format!("{} cannot be put into {LIBRARY_PATH}; use a folder without a colon", libraries.display());
    joined.map(Some).with_context(why)
}

/// The package of the right version; `None` if there is none and the loader finds libtorch by itself.
///
/// # Errors
/// If libtorch is nowhere.
fn torch_of_environment(packages: &[PathBuf], loader_finds: impl FnOnce() -> bool) -> anyhow::Result<Option<&PathBuf>> {
    let is_ours = |torch: &&PathBuf| version_of(torch).is_some_and(|version| version.starts_with(LIBTORCH_VERSION));
    let torch = packages.iter().find(is_ours);
    if torch.is_some() || loader_finds() {
        return Ok(torch);
    }
    let found = packages.first().map_or_else(String::new, |torch| {
        let version = version_of(torch).unwrap_or_else(|| "of unknown version".into());
        format!(" (torch in {} is {version})", torch.display())
    });
    anyhow::bail!(
        "libtorch {LIBTORCH_VERSION} was not found{found}; in a clone of medusa-train, run scripts/setup; if it was installed \
         with pip, run pip install torch=={LIBTORCH_VERSION} in the same environment; or set {LIBRARY_PATH} to the folder of \
         {LIBTORCH}"
    )
}

/// The packages of torch in the Python environment that the program is installed in: `<prefix>/bin/medusa-libtorch` and
/// `<prefix>/lib/python3.13/site-packages/torch`.
fn torch_packages(program: &Path) -> Vec<PathBuf> {
    let prefix = files::parent(files::parent(program));
    let pattern =
        format!("{}/lib*/python3*/*-packages/torch/lib/{LIBTORCH}", Pattern::escape(&prefix.to_string_lossy()));
    let libraries = glob::glob(&pattern).into_iter().flatten().flatten();
    libraries.filter_map(|library| Some(library.parent()?.parent()?.to_owned())).collect()
}

fn folders_of_user() -> Vec<PathBuf> {
    let folders = env::var_os(LIBRARY_PATH).unwrap_or_default();
    env::split_paths(&folders).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

/// Whether the loader will find libtorch: in `LD_LIBRARY_PATH`, in the folders that build.rs gave to the linker
/// (`linked`, separated by colons), or in those of the system.
fn loader_finds_libtorch(program: &Path, linked: &str) -> bool {
    folders_of_user().into_iter().chain(linked_folders(program, linked)).any(|folder| folder.join(LIBTORCH).is_file())
        || loader_resolves_libtorch(program)
}

fn linked_folders(program: &Path, linked: &str) -> impl Iterator<Item = PathBuf> {
    let folder = files::parent(program).to_string_lossy();
    linked.split(':').map(move |path| path.replace("$ORIGIN", &folder).replace("@loader_path", &folder).into())
}

/// Asks the loader itself, as ldd does. A program that cannot be asked is started, and the loader's own message is shown.
fn loader_resolves_libtorch(program: &Path) -> bool {
    if cfg!(not(all(target_os = "linux", target_env = "gnu"))) {
        return true;
    }
    let libraries = Command::new(program).env("LD_TRACE_LOADED_OBJECTS", "1").output();
    let missing = format!("{LIBTORCH} => not found");
    libraries.map_or(true, |libraries| !String::from_utf8_lossy(&libraries.stdout).contains(&missing))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn package(folder: &Path, version: &str) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let text = format!("__version__ = '{version}'\n");
        files::write_atomic(&folder.join("version.py"), |out| out.write_all(text.as_bytes())).unwrap();
        folder.to_owned()
    }

    #[test]
    fn a_libtorch_that_is_nowhere_is_an_error_that_names_the_torch_of_another_version() {
        let dir = tempfile::tempdir().unwrap();
        let old = package(&dir.path().join("old"), "2.10.0");
        let ours = package(&dir.path().join("new"), &format!("{LIBTORCH_VERSION}+cpu"));
        let both = [old.clone(), ours.clone()];
        assert_eq!(torch_of_environment(&both, || false).unwrap(), Some(&ours));
        assert_eq!(torch_of_environment(&both[..1], || true).unwrap(), None, "the loader's own");
        let error = |packages| torch_of_environment(packages, || false).unwrap_err().to_string();
        assert!(
            error(&[]).starts_with(&format!("libtorch {LIBTORCH_VERSION} was not found; in a clone")),
            "{}",
            error(&[])
        );
        let found = format!("was not found (torch in {} is 2.10.0); ", old.display());
        assert!(error(&both[..1]).contains(&found), "{}", error(&both[..1]));
    }

    #[test]
    fn libtorch_is_found_beside_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let (program, lib) = (dir.path().join("bin/medusa-libtorch"), dir.path().join("lib"));
        let has_library = |linked: &str| linked_folders(&program, linked).any(|folder| folder.join(LIBTORCH).is_file());
        assert!(!has_library("$ORIGIN/../lib"));
        for folder in [files::parent(&program), &lib] {
            std::fs::create_dir_all(folder).unwrap();
        }
        files::write_atomic(&lib.join(LIBTORCH), |out| out.write_all(b"")).unwrap();
        assert!(has_library("/nowhere:$ORIGIN/../lib"));
        assert!(!has_library("/nowhere:$ORIGIN/../lib64"));
    }
}
