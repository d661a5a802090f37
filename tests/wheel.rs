//! Promise: the Python wheel of scripts/wheel requires the torch that the programs are linked to, and programs in a Python
//! environment load that environment's torch. No wheel is built here.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

use medusa::torch::LIBTORCH_VERSION;

fn toml_of(path: &str) -> toml::Table {
    std::fs::read_to_string(path).expect("it is in the repository").parse().expect("TOML")
}

/// `pip install` of the wheel has to bring the torch that the programs are linked to.
#[test]
fn the_wheel_has_cargos_version_and_requires_the_torch_that_was_linked() {
    let (cargo, python) = (toml_of("Cargo.toml"), toml_of("pyproject.toml"));
    let (package, project) = (&cargo["package"], &python["project"]);
    assert_eq!(project["name"], package["name"]);
    assert!(project.get("version").is_none(), "maturin takes it from Cargo.toml");
    let dynamic = project["dynamic"].as_array().expect("a list");
    assert!(dynamic.contains(&"version".into()), "{dynamic:?}");
    assert_eq!(project["dependencies"], toml::Value::from(vec![format!("torch=={LIBTORCH_VERSION}")]));
    let maturin = &python["tool"]["maturin"];
    assert_eq!((maturin["bindings"].as_str(), maturin["auditwheel"].as_str()), (Some("bin"), Some("skip")));
    assert_eq!(maturin["sbom"]["rust"].as_bool(), Some(true), "the wheel lists the crates of the programs");
}

/// The libraries of libtorch that the loader has started.
fn libraries(printed: &str) -> Vec<&str> {
    printed.lines().filter(|line| line.contains("calling init: ") && line.contains("torch")).collect()
}

/// `<prefix>/bin` and `<prefix>/lib/python3.12/site-packages`, as pip fills them.
#[test]
fn the_programs_run_in_a_python_environment() {
    let prefix = tempfile::tempdir().expect("a folder");
    let (bin, torch) = (prefix.path().join("bin"), prefix.path().join("lib/python3.12/site-packages/torch"));
    for folder in [&bin, &torch] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    for program in
        [env!("CARGO_BIN_EXE_medusa"), env!("CARGO_BIN_EXE_medusa-train"), env!("CARGO_BIN_EXE_medusa-libtorch")]
    {
        let installed = bin.join(Path::new(program).file_name().expect("a name"));
        if std::fs::hard_link(program, &installed).is_err() {
            std::fs::copy(program, &installed).expect("a copy"); // the temporary folder is on another disk
        }
    }
    let version = format!("__version__ = '{LIBTORCH_VERSION}'\n");
    medusa::files::write_atomic(&torch.join("version.py"), |out| std::io::Write::write_all(out, version.as_bytes()))
        .expect("a file");
    let loaded = medusa::torch::accelerator::libtorch_folder().expect("this test has loaded libtorch");
    std::os::unix::fs::symlink(loaded, torch.join("lib")).expect("a link");
    // The loader itself tells which file it takes: the programs of this build would also find the libtorch of the build.
    let mut doctor = Command::new(bin.join("medusa"));
    let output = doctor.arg("doctor").env("LD_DEBUG", "libs").output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let torch = torch.canonicalize().expect("it is there");
    let loaded = format!("calling init: {}", torch.join("lib/libtorch_cpu.so").display());
    assert!(printed.contains(&loaded), "the loader took another libtorch_cpu.so: {}", libraries(&printed).join("\n"));
    let output = Command::new(bin.join("medusa-train")).arg("--version").output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), concat!("medusa-train ", env!("CARGO_PKG_VERSION")));
}
