//! What is written is there: docs/architecture.md names each room of src/ and nothing else, README's recipe and every recipe load.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use medusa::recipe::Recipe;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Folders and files at the top of src/, as docs/architecture.md writes them; a file beside its folder is the folder.
fn rooms() -> BTreeSet<String> {
    let entries = fs::read_dir(Path::new(ROOT).join("src")).expect("src/").flatten();
    let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|entry| entry.path().is_dir());
    let folders: BTreeSet<String> = folders.iter().map(|folder| name(folder) + "/").collect();
    let of_a_folder = |file: &String| folders.contains(&file.replace(".rs", "/"));
    files.iter().map(name).filter(|file| !of_a_folder(file)).chain(folders.clone()).collect()
}

#[test]
fn the_rooms_in_architecture_md_are_the_rooms_of_src() {
    let text = fs::read_to_string(Path::new(ROOT).join("docs/architecture.md")).expect("docs/architecture.md");
    let table = text.split("\n## Rooms\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("## Rooms");
    let row = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
    let written: Vec<String> = table.lines().filter_map(row).collect();
    assert_eq!(written.iter().cloned().collect::<BTreeSet<_>>(), rooms());
    assert_eq!(written.len(), rooms().len(), "a room stands there once");
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
