//! Promise: `scripts/campaign` runs, finds nothing lost, and tells when something is.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

use crate::program::on_the_cpu;

const CAMPAIGN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/campaign");

/// Exit status and output of the script against the built programs.
fn campaign(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let programs = Path::new(env!("CARGO_BIN_EXE_medusa")).parent().expect("a folder");
    let mut command = Command::new("python3");
    command.arg(CAMPAIGN).arg("--programs").arg(programs).arg("--folder").arg(folder).args(arguments);
    let output = on_the_cpu(&mut command).env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3");
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    (output.status.code(), said)
}

#[test]
fn a_few_cases_of_the_campaign_lose_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let targets = ["kill:medusa1", "power:medusa1", "fault:medusa1", "kill:data", "power:data", "hub:download"];
    let only: Vec<&str> = targets.iter().flat_map(|target| ["--only", target]).collect();
    let (status, said) = campaign(dir.path(), &[&["--cases", "2", "--first", "300"], &only[..]].concat());
    assert_eq!(status, Some(0), "{said}");
    for target in targets {
        assert!(said.contains(&format!("\n{target} ")), "{said}");
    }
    assert!(said.contains(" 0 lost"), "{said}");
}

#[test]
fn what_is_not_synced_or_fails_unseen_is_found() {
    let selftest = Path::new(CAMPAIGN).with_file_name("faults/selftest.py");
    let output = Command::new("python3").arg(selftest).env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
}
