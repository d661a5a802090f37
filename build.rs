//! Search paths for libtorch in our own binaries and tests: link arguments do not propagate from torch-sys.
//! And `cfg(shared)`: whether the material that some tests compare with lies beside the checkout.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    shared_material();
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
