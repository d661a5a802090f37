//! Promise: whatever bytes a file, an answer or a request holds, its reader gives a value, or an error that names the file.
//!
//! The readers are those of `fuzz/`, which libFuzzer runs for longer (docs/fuzzing.md). Here the committed corpus is read, and each reader is
//! given changed inputs of it: a fixed number from a fixed seed, so that a test that passes passes again. `MEDUSA_FUZZ_EXECUTIONS` and
//! `MEDUSA_FUZZ_SEED` set others, and `MEDUSA_FUZZ_READER` is the only reader to run.
#![expect(clippy::print_stderr, reason = "the input of a panic")]

mod crashes;
mod mutation;
#[expect(unreachable_pub, reason = "the items of the fuzz package's library, which are public there")]
#[path = "../fuzz/src/readers/mod.rs"]
mod readers;
mod seeds;

use std::collections::BTreeSet;
use std::fs;
use std::panic;
use std::path::{Path, PathBuf};

use mutation::Mutator;
use readers::{READERS, Reader};

/// Of each reader.
const EXECUTIONS: usize = 150;
const SEED: u64 = 26;

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)
}

/// The inputs of a reader, in the order of their names; `MEDUSA_FUZZ_CORPUS` is another folder with one of each reader.
fn inputs(reader: &Reader) -> Vec<(String, Vec<u8>)> {
    let other = std::env::var_os("MEDUSA_FUZZ_CORPUS").map(|folder| Path::new(&folder).join(reader.name));
    let folder = other.unwrap_or_else(|| corpus(reader.name));
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let named = |path: PathBuf| (path.display().to_string(), fs::read(&path).expect("a file of the corpus"));
    paths.into_iter().map(named).collect()
}

/// Reads an input; says which one it was if that panics.
fn read(reader: &Reader, name: &str, input: &[u8]) {
    if let Err(payload) = panic::catch_unwind(|| (reader.read)(input)) {
        eprintln!("reader {:?} panicked on {name}: {:?}", reader.name, String::from_utf8_lossy(input));
        panic::resume_unwind(payload);
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}: no number: {value:?}")))
}

#[test]
fn every_reader_has_a_corpus_and_a_target() {
    let names: BTreeSet<String> = READERS.iter().map(|reader| reader.name.to_owned()).collect();
    let listed = |folder: &str| -> BTreeSet<String> {
        let entries =
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(folder)).expect("a folder of fuzz/");
        let stem = |path: PathBuf| path.file_stem().expect("a name").to_string_lossy().into_owned();
        entries.map(|entry| stem(entry.expect("an entry").path())).collect()
    };
    assert_eq!(listed("fuzz_targets"), names);
    assert_eq!(listed("corpus"), names);
    let package = include_str!("../fuzz/Cargo.toml");
    for name in &names {
        let target = fs::read_to_string(corpus("../fuzz_targets").join(format!("{name}.rs"))).expect("a target");
        assert!(target.contains(&format!("target!(\"{name}\")")), "{name}: {target}");
        assert!(package.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name} is not in fuzz/Cargo.toml");
    }
}

#[test]
fn the_corpus_is_small() {
    let bytes: usize = READERS.iter().flat_map(inputs).map(|(_, input)| input.len()).sum();
    assert!(bytes < 2_000_000, "{bytes} bytes; minimise it: scripts/fuzz --minimise");
}

#[test]
fn the_corpus_is_read_without_a_panic() {
    for reader in READERS {
        for (name, input) in inputs(reader) {
            read(reader, &name, &input);
        }
    }
}

#[test]
fn changed_inputs_are_read_without_a_panic() {
    let executions = setting("MEDUSA_FUZZ_EXECUTIONS", EXECUTIONS as u64);
    let seed = setting("MEDUSA_FUZZ_SEED", SEED);
    let only = std::env::var("MEDUSA_FUZZ_READER").ok();
    for reader in READERS.iter().filter(|reader| only.as_ref().is_none_or(|only| only == reader.name)) {
        let corpus: Vec<Vec<u8>> = inputs(reader).into_iter().map(|(_, input)| input).collect();
        let mut mutator = Mutator::new(seed, corpus);
        for number in 0..executions {
            read(reader, &format!("changed input {number} of seed {seed}"), &mutator.next());
        }
    }
}
