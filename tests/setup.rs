//! Promise: `scripts/setup` says what is missing before a build would fail for it.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

/// rustup without a default toolchain installs programs of these names that only say so.
#[test]
fn a_rustup_without_a_toolchain_is_no_rust() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let bin = home.path().join(".cargo/bin");
    fs::create_dir_all(&bin).expect("a folder");
    let says = "rustup could not choose a version of rustc to run, because one wasn't specified explicitly";
    for name in ["rustc", "cargo"] {
        let program = bin.join(name);
        let script = format!("#!/bin/sh\necho \"error: {says}\" >&2\necho more >&2\nexit 1\n");
        medusa::files::write_atomic(&program, |out| std::io::Write::write_all(out, script.as_bytes())).expect("a file");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("its owner's file");
    }
    let setup = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup");
    let output = Command::new(setup).env("HOME", home.path()).env("LIBTORCH", home.path()).output().expect("it starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("missing: a Rust toolchain that runs: error: {says}\n")), "{stderr}");
    assert!(stderr.contains("rustup default stable\n"), "{stderr}");
}
