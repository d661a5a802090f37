//! Relative links and images point to existing files, and `#anchors` to existing headings.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::{Page, ROOT, assert_none, pages};

/// Targets of the links and images in a line of Markdown, except in code spans.
fn targets(line: &str) -> Vec<String> {
    let without_code: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
    let mut targets = Vec::new();
    let mut rest = without_code.as_str();
    while let Some((_, after)) = rest.split_once("](") {
        let (target, behind) = after.split_once(')').unwrap_or((after, ""));
        targets.push(target.to_owned());
        rest = behind;
    }
    targets
}

/// The anchor that GitHub creates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn anchors(page: &Page) -> Vec<String> {
    let headings = page.prose().into_iter().filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Normalizes `docs/../benches/x.md` to `benches/x.md`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

fn fault(page: &Page, target: &str) -> Option<String> {
    if target.contains("://") {
        return None;
    }
    let (file, heading) = target.split_once('#').map_or((target, None), |(file, heading)| (file, Some(heading)));
    let folder = page.path.parent().unwrap_or(Path::new(""));
    let path = if file.is_empty() { page.path.clone() } else { plain(&folder.join(file)) };
    if !file.is_empty() && fs::metadata(Path::new(ROOT).join(&path)).is_err() {
        return Some(format!("{target}: there is no {}", path.display()));
    }
    let heading = heading?;
    let known = if file.is_empty() { anchors(page) } else { anchors(&Page::read(&path)) };
    (!known.iter().any(|anchor| anchor == heading)).then(|| format!("{target}: {} has no such heading", path.display()))
}

fn faults(page: &Page) -> Vec<String> {
    let links = page.prose().into_iter().flat_map(|(line, text)| targets(text).into_iter().map(move |to| (line, to)));
    let found = links.filter_map(|(line, to)| Some(format!("{}:{line}: {}", page.path.display(), fault(page, &to)?)));
    found.collect()
}

#[test]
fn every_link_leads_somewhere() {
    assert_none(&pages().iter().flat_map(faults).collect::<Vec<_>>());
}

#[test]
fn every_guide_is_linked_from_readme() {
    let readme = Page::read("README.md");
    let guides = pages().into_iter().filter(|page| page.path.starts_with("docs"));
    let missing = guides.filter(|page| !readme.text.contains(&format!("({})", page.path.display())));
    assert_none(
        &missing.map(|page| format!("{} is not linked from README.md", page.path.display())).collect::<Vec<_>>(),
    );
}

#[test]
fn a_broken_link_is_found() {
    let page = |text: &str| faults(&Page::of("docs/p.md", text));
    assert!(page("# A `b`: c\n[x](../README.md) [y](#a-b-c) [z](https://x.y/#q) `[no](link)`").is_empty());
    assert_eq!(page("\n[x](no.md)"), ["docs/p.md:2: no.md: there is no docs/no.md"]);
    assert_eq!(page("[x](../README.md#nowhere)"), ["docs/p.md:1: ../README.md#nowhere: README.md has no such heading"]);
    assert_eq!(page("![x](images/no.png)"), ["docs/p.md:1: images/no.png: there is no docs/images/no.png"]);
    assert_eq!(anchor("`medusa distill`"), "medusa-distill");
    assert_eq!(
        anchor("The plan of `--check` against the process's peak"),
        "the-plan-of---check-against-the-processs-peak"
    );
}
