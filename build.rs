//! Search paths for libtorch in our own binaries and tests: link arguments do not propagate from torch-sys.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
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
