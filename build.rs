//! Sets the search paths for libtorch in our own binaries and tests, since link arguments do not propagate from
//! torch-sys.
//!
//! Also sets cfgs for tests with requirements: `cfg(python)` if `MEDUSA_PYTHON` is set, `cfg(kernels)` if this CPU
//! supports the CPU engine's kernels, `cfg(tiles)` if it has AMX, and `cfg(nvrtc)` if CUDA kernels can be compiled.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    python_of_tests();
    cpu_with_kernels();
    cpu_with_tiles();
    compiler_of_cuda();
    git_revision();
    source_hash();
    libtorch_search_paths();
    launchers_without_libtorch();
    process_group();
}

/// Whether tests may start Python. libtest cannot ignore a test at run time, so the requirement is checked here:
/// `#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with torch and peft")]`.
fn python_of_tests() {
    println!("cargo::rustc-check-cfg=cfg(python)");
    println!("cargo:rerun-if-env-changed=MEDUSA_PYTHON");
    if std::env::var_os("MEDUSA_PYTHON").is_some() {
        println!("cargo::rustc-cfg=python");
    }
}

/// Whether `medusa::cpu::available()` is true on the machine that builds, where tests also run:
/// `#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]`.
fn cpu_with_kernels() {
    println!("cargo::rustc-check-cfg=cfg(kernels)");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        println!("cargo::rustc-cfg=kernels");
    }
}

/// Whether `medusa::cpu::tiles::available()` is true on this machine: `#[cfg_attr(not(tiles), ignore = "needs AMX with bfloat16")]`.
fn cpu_with_tiles() {
    println!("cargo::rustc-check-cfg=cfg(tiles)");
    if fs::read_to_string("/proc/cpuinfo").is_ok_and(|cpu| cpu.split_whitespace().any(|flag| flag == "amx_bf16")) {
        println!("cargo::rustc-cfg=tiles");
    }
}

/// Whether NVRTC is where scripts/setup puts it, in the folder of libtorch: `#[cfg_attr(not(nvrtc), ignore = "needs
/// NVRTC beside libtorch")]`.
fn compiler_of_cuda() {
    println!("cargo::rustc-check-cfg=cfg(nvrtc)");
    let Some(libtorch) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let library = Path::new(&libtorch).join("../../nvidia/cu13/lib/libnvrtc.so.13");
    if library.exists() {
        println!("cargo::rustc-cfg=nvrtc");
        println!("cargo:rerun-if-changed={}", library.display());
    }
}

/// The git revision for provenance.json.
fn git_revision() {
    let revision = std::process::Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=40"]).output();
    let text = revision
        .ok()
        .filter(|out| out.status.success())
        .map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    println!("cargo:rustc-env=MEDUSA_GIT_REVISION={}", text.as_deref().unwrap_or("unknown"));
    if Path::new(".git/logs/HEAD").exists() {
        println!("cargo:rerun-if-changed=.git/logs/HEAD");
    }
}

/// A hash of the files that the programs are made of: the launchers and `medusa-libtorch` refuse each other if it differs
/// (src/cli/same_build.rs).
fn source_hash() {
    let mut hasher = DefaultHasher::new();
    let mut files = Vec::new();
    add_files(Path::new("src"), &mut files);
    files.sort();
    for file in &files {
        file.hash(&mut hasher);
        fs::read(file).expect("the source is readable").hash(&mut hasher);
    }
    println!("cargo:rustc-env=MEDUSA_SOURCE_HASH={:016x}", hasher.finish());
    println!("cargo:rerun-if-changed=src");
}

fn add_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the source is readable").flatten() {
        let path = entry.path();
        if path.is_dir() { add_files(&path, files) } else { files.push(path) }
    }
}

fn libtorch_search_paths() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let os = std::env::var("CARGO_CFG_TARGET_OS").expect("cargo sets CARGO_CFG_TARGET_OS");
    let origin = if os == "macos" { "@loader_path" } else { "$ORIGIN" };
    let beside = [
        format!("{origin}/../lib"), // an unpacked release: <prefix>/bin and <prefix>/lib
        format!("{origin}/../../.libtorch/torch/lib"), // target/release/medusa
        format!("{origin}/../../../.libtorch/torch/lib"), // target/debug/deps/promises-…
    ];
    // Absolute, for doc tests and a CARGO_TARGET_DIR elsewhere.
    let absolute = std::env::var("DEP_TCH_LIBTORCH_LIB").ok();
    let folders: Vec<String> = beside.into_iter().chain(absolute).collect();
    for folder in &folders {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
    println!("cargo:rustc-env=MEDUSA_LIBTORCH_FOLDERS={}", folders.join(":")); // the launcher looks there, too
}

/// Keeps libtorch out of the launchers (src/cli/launcher.rs), which reach none of its functions. Inline functions of its
/// headers are also defined in libtorch, so that a linker would export them, and count what they call as reached.
fn launchers_without_libtorch() {
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        for launcher in ["medusa", "medusa-train"] {
            println!("cargo:rustc-link-arg-bin={launcher}=-Wl,--exclude-libs,ALL");
        }
    }
}

/// Compiles the C functions over libtorch's c10d, unless they were compiled from the same files before: this script runs after each change of src/.
/// They run once an optimizer step, so their own speed does not matter.
#[expect(clippy::disallowed_methods, reason = "after half a stamp they are compiled again")]
fn process_group() {
    let folder = Path::new("src/torch/process_group");
    let Some(libtorch) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=medusa_c10d");
    let (stamp, sources) = (out.join("c10d.stamp"), hash_of(folder, &libtorch));
    if fs::read_to_string(&stamp).is_ok_and(|compiled| compiled == sources) {
        return;
    }
    let include = Path::new(&libtorch).with_file_name("include");
    let mut compiler = cc::Build::new();
    compiler.cpp(true).std("c++17").opt_level(0).debug(false).warnings(false).cargo_metadata(false).include(folder);
    for include in [include.clone(), include.join("torch/csrc/api/include")] {
        compiler.flag("-isystem").flag(include);
    }
    compiler.define("USE_DISTRIBUTED", None).define("USE_C10D_GLOO", None).define("_GLIBCXX_USE_CXX11_ABI", "1");
    compiler.file(folder.join("c10d.cpp")).compile("medusa_c10d");
    fs::write(stamp, sources).expect("OUT_DIR can be written");
}

fn hash_of(folder: &Path, libtorch: &std::ffi::OsStr) -> String {
    let mut hasher = DefaultHasher::new();
    libtorch.hash(&mut hasher);
    let mut files = Vec::new();
    add_files(folder, &mut files);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp" || extension == "h"));
    files.sort();
    files.push(PathBuf::from("build.rs")); // has the compiler's flags
    for file in files {
        fs::read(file).expect("the source is readable").hash(&mut hasher);
    }
    // Another libtorch in the same folder has other headers.
    let version = Path::new(libtorch).with_file_name("include").join("torch/headeronly/version.h");
    fs::read(version).ok().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}
