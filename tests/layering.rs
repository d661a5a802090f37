//! Imports point down only, and siblings do not import each other. The layers are those in the doc of src/lib.rs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

/// Every Rust file under a folder, sorted.
pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the repository").flatten() {
        let path = entry.path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Room to layer, from the lines `//! L3 train   decode    the two loops`. Rooms are the words that name a file or folder of src/.
fn layers() -> HashMap<String, u32> {
    let lib = fs::read_to_string(Path::new(SOURCES).join("lib.rs")).expect("src/lib.rs");
    let mut layers = HashMap::new();
    for line in lib.lines().filter_map(|line| line.strip_prefix("//! L")) {
        let (layer, rooms) = line.split_once(' ').expect("a layer line has rooms");
        let layer: u32 = layer.parse().expect("a layer line starts with its number");
        let words = rooms.split(|c: char| !c.is_alphanumeric() && c != '_');
        layers.extend(words.filter(|word| is_room(word)).map(|room| (room.to_owned(), layer)));
    }
    layers
}

fn is_room(word: &str) -> bool {
    let path = Path::new(SOURCES).join(word);
    !word.is_empty() && (path.is_dir() || path.with_extension("rs").is_file())
}

/// The room of a file: the first part of its path under src/.
fn room(file: &Path) -> String {
    let inside = file.strip_prefix(SOURCES).expect("a file under src/");
    let first = inside.components().next().expect("a file has a name").as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// The rooms that a line names after `crate::`, also in `use crate::{a::b, c}`.
fn imports(line: &str) -> Vec<String> {
    let code = line.split("//").next().unwrap_or_default();
    let first_word =
        |text: &str| -> String { text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    code.split("crate::")
        .skip(1)
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(list) => outermost(list).iter().map(|item| first_word(item)).collect(),
            None => vec![first_word(rest)],
        })
        .collect()
}

/// The items of `a::{b, c}, d}` that are separated outside inner braces.
fn outermost(list: &str) -> Vec<String> {
    let (mut depth, mut items) = (0, vec![String::new()]);
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => items.push(String::new()),
            other => items.last_mut().expect("never empty").push(other),
        }
    }
    items
}

/// What is wrong with the import of `to` in `from`, if anything.
fn fault(layers: &HashMap<String, u32>, from: &str, to: &str) -> Option<String> {
    let (Some(&above), Some(&below)) = (layers.get(from), layers.get(to)) else {
        return Some(format!("{from} imports {to}: one of them stands on no layer in src/lib.rs"));
    };
    let at_the_bottom = above == 0 && (to == "files" || to == "numbers");
    if from == to || above > below || at_the_bottom {
        return None;
    }
    let direction = if above == below { "sideways" } else { "upwards" };
    Some(format!("{from} (L{above}) imports {to} (L{below}): {direction}"))
}

#[test]
fn imports_point_down_only() {
    let layers = layers();
    let mut faults = Vec::new();
    for file in rust_files(Path::new(SOURCES)).iter().filter(|file| !file.ends_with("src/lib.rs")) {
        let text = fs::read_to_string(file).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let at = format!("{}:{}", file.display(), number + 1);
            if line.trim_end().ends_with("crate::{") {
                faults.push(format!("{at}: one `use crate::room::…` a room, so that this test can read it"));
            }
            let found =
                imports(line).into_iter().filter(|to| is_room(to)).filter_map(|to| fault(&layers, &room(file), &to));
            faults.extend(found.map(|fault| format!("{at}: {fault}")));
        }
    }
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn every_room_stands_on_a_layer() {
    let layers = layers();
    for file in rust_files(Path::new(SOURCES)) {
        let room = room(&file);
        assert!(room == "lib" || layers.contains_key(&room), "{room} is on no layer in the doc of src/lib.rs");
    }
}

#[test]
fn an_import_upwards_or_sideways_is_found() {
    let layers = HashMap::from([
        ("files".into(), 0),
        ("torch".into(), 0),
        ("data".into(), 2),
        ("medusa".into(), 2),
        ("cli".into(), 6),
    ]);
    assert_eq!(imports("use crate::{files, data::{rows, pack}, torch};"), ["files", "data", "torch"]);
    assert_eq!(imports("    let x = crate::torch::seed(1); // crate::cli is above"), ["torch"]);
    assert!(fault(&layers, "data", "cli").is_some_and(|fault| fault.ends_with("upwards")));
    assert!(fault(&layers, "data", "medusa").is_some_and(|fault| fault.ends_with("sideways")));
    assert!(fault(&layers, "files", "torch").is_some());
    assert_eq!(
        fault(&layers, "cli", "data").or(fault(&layers, "torch", "files")).or(fault(&layers, "data", "data")),
        None
    );
}

/// Lines of code with `unsafe` that are not in its rooms.
fn strays(path: &str, code: &str) -> Vec<String> {
    let at_home =
        ["torch/", "cpu/", "nvidia/", "engine/cuda/", "model/weights.rs"].iter().any(|room| path.starts_with(room));
    let is_unsafe = |line: &str| {
        let words = line.split("//").next().unwrap_or_default();
        words.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
    };
    let lines = code.lines().zip(1..).filter(|(line, _)| !at_home && is_unsafe(line));
    lines.map(|(line, number)| format!("{path}:{number}: {}", line.trim())).collect()
}

#[test]
fn unsafe_stands_in_its_rooms_only() {
    let stray = |file: &PathBuf| {
        let path = file.strip_prefix(SOURCES).expect("a file under src/").to_string_lossy().into_owned();
        strays(&path, &fs::read_to_string(file).expect("a source file"))
    };
    let found: Vec<String> = rust_files(Path::new(SOURCES)).iter().flat_map(stray).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    assert_eq!(strays("train/run.rs", "let x = unsafe { y() };\n// unsafe\n#![expect(unsafe_code)]").len(), 1);
    assert!(strays("cpu/team.rs", "unsafe { y() }").is_empty());
}
