//! docs/architecture.md lists exactly the rooms of src/ and their files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{Page, ROOT};

/// Files and folders in a folder; a file hides the folder of the same name.
fn entries(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).expect("a folder of src/").flatten();
    let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|entry| entry.path().is_dir());
    let files: BTreeSet<String> = files.iter().map(name).collect();
    let folders = folders.iter().map(name).filter(|folder| !files.contains(&format!("{folder}.rs")));
    folders.map(|folder| folder + "/").chain(files.iter().cloned()).collect()
}

/// Rooms of src/; at the top level, a folder hides the file of the same name.
fn rooms() -> BTreeSet<String> {
    let src = Path::new(ROOT).join("src");
    let room = |name: String| if src.join(name.replace(".rs", "")).is_dir() { name.replace(".rs", "/") } else { name };
    entries(&src).into_iter().map(room).collect()
}

/// `room/file` of every file that must be listed: not lib.rs, the programs, and each room's mod.rs and error.rs.
fn files() -> BTreeSet<String> {
    let of_room = |room: &String| {
        let listed = |name: &String| !["mod.rs", "error.rs"].contains(&name.as_str());
        let names = entries(&Path::new(ROOT).join("src").join(room));
        names.into_iter().filter(listed).map(|name| format!("{room}{name}")).collect::<Vec<_>>()
    };
    rooms().iter().filter(|room| room.ends_with('/') && *room != "bin/").flat_map(of_room).collect()
}

fn section<'p>(page: &'p Page, title: &str) -> &'p str {
    let after = page.text.split_once(&format!("\n## {title}\n")).unwrap_or_else(|| panic!("## {title}")).1;
    after.split("\n## ").next().unwrap_or(after)
}

/// `room/file` of every line in the list of files.
fn listed(page: &Page) -> Vec<String> {
    let list = section(page, "Files").split("```").nth(1).expect("a list of files");
    let mut room = "";
    let mut files = Vec::new();
    for line in list.lines().skip(1) {
        match line.strip_prefix("  ") {
            None => room = line,
            Some(file) => {
                let (name, words) = file.split_once(' ').unwrap_or((file, ""));
                assert!(!words.trim().is_empty(), "{room}{name}: say what it does");
                files.push(format!("{room}{name}"));
            }
        }
    }
    files
}

/// Panics if lines are missing, superfluous or duplicated.
fn assert_same(what: &str, written: &[String], there: &BTreeSet<String>) {
    let of_page: BTreeSet<String> = written.iter().cloned().collect();
    let missing: Vec<_> = there.difference(&of_page).collect();
    let superfluous: Vec<_> = of_page.difference(there).collect();
    assert!(
        missing.is_empty() && superfluous.is_empty() && of_page.len() == written.len(),
        "docs/architecture.md, {what}: without a line {missing:?}; a line but not in src/ {superfluous:?}; {} lines for {}",
        written.len(),
        of_page.len()
    );
}

#[test]
fn architecture_md_lists_the_rooms_of_src() {
    let page = Page::read("docs/architecture.md");
    let row = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
    let written: Vec<String> = section(&page, "Rooms").lines().filter_map(row).collect();
    assert_same("Rooms", &written, &rooms());
}

#[test]
fn architecture_md_lists_the_files_of_src() {
    let written = listed(&Page::read("docs/architecture.md"));
    assert!(written.is_sorted(), "docs/architecture.md, Files: keep the lines sorted");
    assert_same("Files", &written, &files());
}

#[test]
fn the_changelog_has_a_section_for_every_release() {
    let page = Page::read("CHANGELOG.md");
    let headings: Vec<&str> = page.text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let versions: Vec<&str> = headings.iter().filter_map(|heading| heading.split_whitespace().next()).collect();
    assert_eq!(versions.first(), Some(&"Unreleased"));
    assert!(versions.contains(&env!("CARGO_PKG_VERSION")), "Cargo.toml's version is not in {versions:?}");
    assert_eq!(versions.last(), Some(&"0.1.0"), "the first release");
    for (version, heading) in versions.iter().zip(&headings) {
        assert!(section(&page, heading).contains("\n- "), "{version} lists nothing");
    }
}

#[test]
#[should_panic(expected = "without a line [\"b.rs\"]; a line but not in src/ [\"c.rs\"]")]
fn a_missing_line_is_found() {
    assert_same("x", &["a.rs".into(), "c.rs".into()], &["a.rs".to_owned(), "b.rs".to_owned()].into());
}
