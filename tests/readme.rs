//! Promise: the documentation is true: every command parses, every recipe loads, every link resolves, and
//! docs/architecture.md matches src/.

mod commands;
mod files;
mod links;
mod recipes;

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

struct Page {
    /// Relative to the root of the repository.
    path: PathBuf,
    text: String,
}

/// Text between two fences.
struct CodeBlock<'p> {
    /// The word after the opening fence.
    language: &'p str,
    /// Line of the opening fence, counted from 1.
    line: usize,
    text: String,
}

impl Page {
    fn read(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let text =
            fs::read_to_string(Path::new(ROOT).join(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { path, text }
    }

    fn of(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    fn code_blocks(&self) -> Vec<CodeBlock<'_>> {
        let mut blocks = Vec::new();
        let mut open: Option<CodeBlock> = None;
        for (line, number) in self.text.lines().zip(1..) {
            match (line.strip_prefix("```"), open.take()) {
                (Some(_), Some(block)) => blocks.push(block),
                (Some(language), None) => open = Some(CodeBlock { language, line: number, text: String::new() }),
                (None, Some(block)) => open = Some(CodeBlock { text: block.text + line + "\n", ..block }),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a code block is not closed", self.path.display());
        blocks
    }

    /// Lines outside code blocks, with their numbers.
    fn prose(&self) -> Vec<(usize, &str)> {
        let mut in_code = false;
        let outside = |(_, line): &(usize, &str)| {
            let is_fence = line.starts_with("```");
            in_code ^= is_fence;
            !in_code && !is_fence
        };
        (1..).zip(self.text.lines()).filter(outside).collect()
    }
}

/// The Markdown pages for users: README.md, those next to it, those of checkpoints/ and of the heads in data/, and those in docs/.
fn pages() -> Vec<Page> {
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("docs/").flatten().map(|entry| entry.file_name());
    let docs = docs.filter_map(|name| name.into_string().ok()).filter(|name| name.ends_with(".md"));
    let beside = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(str::to_owned);
    let below = ["checkpoints/README.md", "data/smollm2/README.md"].map(str::to_owned);
    beside.into_iter().chain(below).chain(docs.map(|name| format!("docs/{name}"))).map(Page::read).collect()
}

/// The recipes in recipes/.
fn recipes() -> Vec<Page> {
    let entries = fs::read_dir(Path::new(ROOT).join("recipes")).expect("recipes/").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.ends_with(".toml"));
    let recipes: Vec<Page> = names.map(|name| Page::read(format!("recipes/{name}"))).collect();
    assert!(!recipes.is_empty(), "recipes/ has recipes");
    recipes
}

/// Panics with one line per fault.
fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn code_blocks_and_prose_are_distinguished() {
    let page = Page::of("p.md", "a\n```bash\nb\n\nc\n```\nd\n```\ne\n```\n");
    let blocks: Vec<_> = page.code_blocks().into_iter().map(|b| (b.language, b.line, b.text)).collect();
    assert_eq!(blocks, [("bash", 2, "b\n\nc\n".to_owned()), ("", 8, "e\n".to_owned())]);
    assert_eq!(page.prose(), [(1, "a"), (7, "d")]);
}

#[test]
fn no_page_has_marks_of_a_merge_conflict() {
    let marks = ["<<<<<<< ", ">>>>>>> "];
    let of_page = |page: Page| {
        let marked = |(_, line): &(usize, &str)| marks.iter().any(|mark| line.starts_with(mark));
        let lines: Vec<(usize, &str)> = (1..).zip(page.text.lines()).filter(marked).collect();
        lines.into_iter().map(|(line, text)| format!("{}:{line}: {text}", page.path.display())).collect::<Vec<_>>()
    };
    assert_none(&pages().into_iter().flat_map(of_page).collect::<Vec<_>>());
}
