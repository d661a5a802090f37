//! Search paths for libtorch in our own binaries and tests: link arguments do not propagate from torch-sys.
//! And what tests need of the machine: `cfg(shared)`, whether the material that some compare with lies beside the checkout, and
//! `cfg(tmpfs)`, whether a small disk can be mounted, `cfg(peft)`, whether `MEDUSA_PYTHON` names a Python with PEFT,
//! `cfg(hub_python)`, whether that Python has huggingface_hub, `cfg(kernels)`, whether this CPU runs decoding's own kernels,
//! and `cfg(nvrtc)`, whether CUDA kernels can be compiled.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    shared_material();
    small_disks();
    python_with_peft();
    python_with_hub();
    cpu_with_kernels();
    compiler_of_cuda();
    git_revision();
    libtorch_search_paths();
}

/// libtest cannot ignore a test at run time, so that a test without its material is known here:
/// `#[cfg_attr(not(shared), ignore = "needs ../shared")]`.
fn shared_material() {
    let readme = "../shared/README.md";
    println!("cargo::rustc-check-cfg=cfg(shared)");
    if Path::new(readme).exists() {
        println!("cargo::rustc-cfg=shared");
        // Only where it is: a watched file that is absent would rebuild the package every time.
        println!("cargo:rerun-if-changed={readme}");
    }
}

/// Whether a test may mount a small file system in a namespace of its own:
/// `#[cfg_attr(not(tmpfs), ignore = "needs to mount a tmpfs")]`.
fn small_disks() {
    println!("cargo::rustc-check-cfg=cfg(tmpfs)");
    let folder = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let mount = ["--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", &folder];
    if std::process::Command::new("unshare").args(mount).output().is_ok_and(|out| out.status.success()) {
        println!("cargo::rustc-cfg=tmpfs");
    }
}

/// Whether a test may ask PEFT itself: `#[cfg_attr(not(peft), ignore = "needs MEDUSA_PYTHON: a Python with torch, transformers and peft")]`.
fn python_with_peft() {
    println!("cargo::rustc-check-cfg=cfg(peft)");
    println!("cargo:rerun-if-env-changed=MEDUSA_PYTHON");
    if std::env::var_os("MEDUSA_PYTHON").is_some() {
        println!("cargo::rustc-cfg=peft");
    }
}

/// Whether a test may ask Python's own client of the Hub:
/// `#[cfg_attr(not(hub_python), ignore = "needs MEDUSA_PYTHON: a Python with huggingface_hub")]`.
fn python_with_hub() {
    println!("cargo::rustc-check-cfg=cfg(hub_python)");
    let Some(python) = std::env::var_os("MEDUSA_PYTHON") else { return };
    let found = std::process::Command::new(python).args(["-c", "import huggingface_hub"]).output();
    if found.is_ok_and(|out| out.status.success()) {
        println!("cargo::rustc-cfg=hub_python");
    }
}

/// Whether `medusa::cpu::available()` is true here: `#[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]`. Of the machine
/// that builds; tests run where they are built.
fn cpu_with_kernels() {
    println!("cargo::rustc-check-cfg=cfg(kernels)");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
    {
        println!("cargo::rustc-cfg=kernels");
    }
}

/// Whether NVRTC lies where scripts/setup puts it, beside libtorch: `#[cfg_attr(not(nvrtc), ignore = "needs NVRTC beside libtorch")]`.
fn compiler_of_cuda() {
    println!("cargo::rustc-check-cfg=cfg(nvrtc)");
    let Some(libtorch) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let library = Path::new(&libtorch).join("../../nvidia/cu13/lib/libnvrtc.so.13");
    if library.exists() {
        println!("cargo::rustc-cfg=nvrtc");
        println!("cargo:rerun-if-changed={}", library.display());
    }
}

/// For provenance.json.
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

fn libtorch_search_paths() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let os = std::env::var("CARGO_CFG_TARGET_OS").expect("cargo sets CARGO_CFG_TARGET_OS");
    if os == "windows" {
        return;
    }
    let origin = if os == "macos" { "@loader_path" } else { "$ORIGIN" };
    let beside = [
        format!("{origin}/../lib"), // an unpacked release: <prefix>/bin and <prefix>/lib
        format!("{origin}/../../.libtorch/torch/lib"), // target/release/medusa
        format!("{origin}/../../../.libtorch/torch/lib"), // target/debug/deps/promises-…
    ];
    // Absolute, for doc tests and a CARGO_TARGET_DIR elsewhere.
    let absolute = std::env::var("DEP_TCH_LIBTORCH_LIB").ok();
    for path in beside.into_iter().chain(absolute) {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{path}");
    }
}
