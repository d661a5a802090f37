//! README tells the truth: its tree names each file of src/ and nothing else, and every recipe loads.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use medusa::recipe::Recipe;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Every Rust file under a folder, sorted.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
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

/// Paths of the tree in README's first fenced block that starts with `src/`. A line is indentation, one or more names, and two
/// or more blanks before its words; a name that ends in `/` opens a folder.
fn tree() -> BTreeSet<PathBuf> {
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).expect("README.md");
    let block = readme.split("```").find(|block| block.trim_start_matches("text").trim_start().starts_with("src/"));
    let block = block.expect("README.md has a fenced tree that starts with src/");
    let (mut folders, mut paths): (Vec<(usize, PathBuf)>, _) = (Vec::new(), BTreeSet::new());
    for line in block.lines().filter(|line| line.contains('.') || line.contains('/')) {
        let indent = line.len() - line.trim_start().len();
        folders.retain(|(of_folder, _)| *of_folder < indent);
        let parent = folders.last().map_or_else(PathBuf::new, |(_, folder)| folder.clone());
        let names = line.trim_start().split("  ").next().unwrap_or_default().split_whitespace();
        for name in names {
            let path = parent.join(name.trim_end_matches('/'));
            if name.ends_with('/') {
                folders.push((indent, path));
            } else {
                paths.insert(path);
            }
        }
    }
    paths.into_iter().filter(|path| path.starts_with("src")).collect()
}

#[test]
fn the_tree_in_readme_is_the_tree_of_src() {
    let files = rust_files(&Path::new(ROOT).join("src"));
    let real: BTreeSet<PathBuf> =
        files.iter().map(|file| file.strip_prefix(ROOT).expect("under the root").to_owned()).collect();
    let written = tree();
    let missing: Vec<_> = real.difference(&written).collect();
    let gone: Vec<_> = written.difference(&real).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "README.md lacks {missing:?} and names {gone:?}, which are not there"
    );
}

#[test]
fn the_recipe_in_readme_is_read_without_an_error() {
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).expect("README.md");
    let recipe = readme.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a TOML block");
    Recipe::parse(Path::new("README.md"), recipe).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn every_recipe_is_read_without_an_error() {
    let recipes = fs::read_dir(Path::new(ROOT).join("recipes")).expect("recipes/").flatten().map(|entry| entry.path());
    let tomls: Vec<PathBuf> =
        recipes.filter(|path| path.extension().is_some_and(|extension| extension == "toml")).collect();
    assert!(!tomls.is_empty(), "recipes/ has recipes");
    for path in tomls {
        let text = fs::read_to_string(&path).expect("a recipe");
        let recipe = Recipe::parse(&path, &text).unwrap_or_else(|error| panic!("{error}"));
        let in_repository = |file: &String| file.starts_with("data/");
        let made_before = recipe.heads.init_from.is_some() || !recipe.data.train.iter().all(in_repository);
        if in_repository(&recipe.backbone.path) && !made_before {
            Recipe::load(&path).unwrap_or_else(|error| panic!("{error}")); // tests run in the root of the repository
        }
        let command = format!("# medusa-train recipes/{}", path.file_name().expect("a name").to_string_lossy());
        assert!(
            text.lines().any(|line| line.trim_end().ends_with(command.trim_start_matches("# "))),
            "{}: no line `{command}`",
            path.display()
        );
    }
}
