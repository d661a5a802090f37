//! docs/unsafe.md lists the unsafe code of src/ as it is, and every unsafe function says what its callers must guarantee. Clippy
//! (`undocumented_unsafe_blocks`) looks for the SAFETY comment of each block and `impl`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::source::{Source, UnsafeCode};
use super::{CrateMap, ROOT, THIS_CRATE};

/// Blocks, functions and impls, and declared libraries of a file.
type Counts = [usize; 3];

/// What a file has; `None` if it has no unsafe code.
fn counts(source: &Source) -> Option<Counts> {
    let count = |wanted: &[UnsafeCode]| source.unsafe_code.iter().filter(|(code, _)| wanted.contains(code)).count();
    let counts =
        [&[UnsafeCode::Block][..], &[UnsafeCode::Function, UnsafeCode::Impl], &[UnsafeCode::Foreign]].map(count);
    (counts != [0; 3]).then_some(counts)
}

/// The rows of the page's table, `` | `cpu/team.rs` | 1 | 0 | 0 | …``, and faults of rows.
fn listed(page: &str) -> (BTreeMap<&str, Counts>, Vec<String>) {
    let (mut listed, mut faults) = (BTreeMap::new(), vec![]);
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let numbers: Vec<usize> = cells.iter().skip(1).take(3).filter_map(|cell| cell.parse().ok()).collect();
        match (cells.as_slice(), numbers.as_slice()) {
            (&[file, _, _, _, proof, tools], &[blocks, functions, foreign])
                if !proof.is_empty() && !tools.is_empty() =>
            {
                if listed.insert(file.trim_matches('`'), [blocks, functions, foreign]).is_some() {
                    faults.push(format!("{file} is listed twice"));
                }
            }
            _ => faults.push(format!("expected file, three numbers, proof and tools: {row}")),
        }
    }
    (listed, faults)
}

/// Where the page and the source differ.
fn differences(map: &CrateMap, page: &str) -> Vec<String> {
    let (mut listed, mut faults) = listed(page);
    let mut found: Vec<(&str, Counts)> =
        map.files.iter().filter_map(|source| Some((source.path.as_str(), counts(source)?))).collect();
    found.sort_unstable();
    for (file, [blocks, functions, foreign]) in found {
        if listed.remove(file) != Some([blocks, functions, foreign]) {
            faults.push(format!("| `{file}` | {blocks} | {functions} | {foreign} | is not on the page"));
        }
    }
    faults.extend(listed.keys().map(|file| format!("{file} has no unsafe code")));
    faults
}

/// Lines of unsafe functions whose doc has no `# Safety`.
fn without_contract(source: &Source, text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let is_above = |line: &&&str| line.starts_with("///") || line.starts_with("#[");
    let has_contract =
        |line: usize| lines[..line - 1].iter().rev().take_while(is_above).any(|line| line.contains("# Safety"));
    let functions = source.unsafe_code.iter().filter(|(code, _)| *code == UnsafeCode::Function);
    functions.map(|(_, line)| *line).filter(|&line| !has_contract(line)).collect()
}

#[test]
fn an_unsafe_function_says_what_its_callers_guarantee() {
    for source in &THIS_CRATE.files {
        let text = fs::read_to_string(Path::new(ROOT).join("src").join(&source.path)).expect("a file of src/");
        let lines = without_contract(source, &text);
        assert!(lines.is_empty(), "src/{}: no # Safety above the unsafe functions in lines {lines:?}", source.path);
    }
    let text =
        "/// A.\n/// # Safety\n/// B.\n#[inline]\nunsafe fn f() {}\n\n/// C.\nunsafe fn g() {}\nunsafe fn h() {}\n";
    let map = CrateMap::of(&[("cpu/a.rs", text)]);
    assert_eq!(without_contract(&map.files[0], text), [8, 9]);
}

#[test]
fn the_page_lists_the_unsafe_code_of_each_file() {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/unsafe.md")).expect("docs/unsafe.md");
    let faults = differences(&THIS_CRATE, &page);
    assert!(faults.is_empty(), "docs/unsafe.md:\n{}\n", faults.join("\n"));
}

#[test]
fn unsafe_code_that_the_page_misses_is_found() {
    let text = "type F = unsafe extern \"C\" fn(u8);\nunsafe extern \"C\" { fn g(); }\nunsafe impl Send for A {}\n\
        unsafe fn f(h: unsafe fn()) { unsafe { g() } }\n#[cfg(test)]\nmod tests { fn t() { unsafe {} } }\n";
    let map = CrateMap::of(&[("cpu/a.rs", text), ("cpu/b.rs", "fn f() {} // unsafe {}")]);
    let difference = |page: &str| differences(&map, page);
    assert!(difference("| `cpu/a.rs` | 1 | 2 | 1 | asserted | none |").is_empty());
    assert_eq!(difference(""), ["| `cpu/a.rs` | 1 | 2 | 1 | is not on the page"]);
    assert_eq!(difference("| `cpu/a.rs` | 2 | 2 | 1 | asserted | none |").len(), 1);
    assert_eq!(
        difference("| `cpu/a.rs` | 1 | 2 | 1 | asserted | none |\n| `cpu/b.rs` | 1 | 0 | 0 | asserted | none |"),
        ["cpu/b.rs has no unsafe code"]
    );
    assert_eq!(difference("| `cpu/a.rs` | 1 | 2 | 1 |  | none |").len(), 2, "no proof");
}
