//! Recipes: those of recipes/, those shown in the documentation, and the table of all keys.

use std::path::{Path, PathBuf};

use medusa::recipe::Recipe;
use tch::Device;
use toml::Table;

use super::{Page, assert_none, pages, recipes};

/// The recipe by hand, which completes recipe fragments on other pages.
fn recipe_by_hand() -> Table {
    let page = Page::read("docs/training.md");
    let blocks = page.code_blocks();
    let is_it = |text: &str| text.contains("models/zephyr-7b-beta");
    let recipe = blocks.iter().find(|block| block.language == "toml" && is_it(&block.text)).expect("a recipe by hand");
    recipe.text.parse().expect("TOML")
}

/// Errors in the TOML blocks of a page: complete recipes, or tables that replace those of the recipe by hand.
fn faults(page: &Page) -> Vec<String> {
    let mut faults = Vec::new();
    for block in page.code_blocks().iter().filter(|block| block.language == "toml") {
        let place = PathBuf::from(format!("{}, code block at line {}", page.path.display(), block.line));
        let whole = match block.text.parse::<Table>() {
            Ok(tables) if tables.contains_key("backbone") => block.text.clone(),
            Ok(tables) => {
                let mut recipe = recipe_by_hand();
                recipe.extend(tables);
                recipe.to_string()
            }
            Err(_) => block.text.clone(), // `Recipe::parse` reports the error
        };
        faults.extend(Recipe::parse(&place, &whole).err().map(|error| error.to_string()));
    }
    faults
}

#[test]
fn recipes_in_the_documentation_are_read_without_an_error() {
    assert!(!recipe_by_hand().is_empty());
    assert_none(&pages().iter().flat_map(faults).collect::<Vec<_>>());
}

#[test]
fn a_wrong_recipe_is_found() {
    let fragment = |text: &str| faults(&Page::of("p.md", &format!("```toml\n{text}\n```\n")));
    assert!(fragment("[loss]\nmedusa_decay_coefficient = 0.7").is_empty());
    assert!(fragment("[loss]\nmedusa_decay = 0.7")[0].contains("unknown key `medusa_decay`"));
    assert!(fragment("[stage.medusa3]")[0].contains("medusa3"));
    assert!(fragment("[backbone]\npath = \"b\"")[0].contains("[stage.medusa1]"));
    assert!(fragment("[loss")[0].starts_with("p.md, code block at line 1"));
}

#[test]
fn every_recipe_is_read_without_an_error() {
    for Page { path, text } in recipes() {
        let recipe = Recipe::parse(&path, &text).unwrap_or_else(|error| panic!("{error}"));
        let in_repository = |file: &String| file.starts_with("data/");
        let made_before = recipe.heads.init_from.is_some() || !recipe.data.train.iter().all(in_repository);
        if in_repository(&recipe.backbone.path) && !made_before {
            Recipe::load(&path, Device::Cpu).unwrap_or_else(|error| panic!("{error}")); // tests run in the root of the repository
        }
        let command = format!("medusa-train {}", path.display());
        let shown = text.lines().any(|line| line.starts_with('#') && line.trim_end().ends_with(&command));
        assert!(shown, "{}: no line `# {command}`", path.display());
    }
}

/// Valid keys of a recipe's table (`train`, `stage.medusa2`; "" for the top level), from the error message for an
/// unknown key.
fn keys(table: &str) -> Vec<String> {
    let mut recipe = recipe_by_hand();
    if table.starts_with("stage") {
        recipe["stage"] = "medusa2 = { lora = { rank = 1, alpha = 1.0 } }".parse::<Table>().expect("TOML").into();
    }
    recipe.entry("loss").or_insert_with(|| Table::new().into());
    let place =
        table.split('.').filter(|name| !name.is_empty()).try_fold(&mut recipe, |at, name| at[name].as_table_mut());
    place.expect("a table").insert("no_such_key".into(), true.into());
    let error =
        Recipe::parse(Path::new("r.toml"), &recipe.to_string()).expect_err("a key that nobody reads").to_string();
    let (_, known) = error.split_once("unknown key `no_such_key`, expected ").unwrap_or_else(|| panic!("{error}"));
    let known = known.lines().next().unwrap_or_default();
    known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The table of all keys: the recipe's tables (in bold), each with its keys.
fn documented(page: &Page) -> Vec<(String, Vec<String>)> {
    let rows = page.text.split_once("\n## All keys of a recipe\n").expect("## All keys of a recipe").1;
    let rows = rows.split("\n## ").next().unwrap_or(rows);
    let mut tables: Vec<(String, Vec<String>)> = Vec::new();
    for row in rows.lines() {
        if let Some(table) = row.strip_prefix("| **`[").and_then(|rest| rest.split(']').next()) {
            tables.push((table.into(), Vec::new()));
        } else if let Some(key) = row.strip_prefix("| `").and_then(|rest| rest.split('`').next()) {
            tables.last_mut().expect("a table before its keys").1.push(key.into());
        }
    }
    tables
}

#[test]
fn training_md_lists_every_key() {
    let tables = documented(&Page::read("docs/training.md"));
    let mut at_the_top: Vec<String> = keys("");
    at_the_top.retain(|key| !tables.iter().any(|(table, _)| table == key));
    assert!(at_the_top.is_empty(), "docs/training.md has no table for {at_the_top:?}");
    for (table, documented) in &tables {
        if table == "stage" {
            assert_eq!(documented, &["medusa1", "medusa2"]);
            continue;
        }
        let mut known = keys(table);
        let mut documented = documented.clone();
        known.sort();
        documented.sort();
        assert_eq!(documented, known, "docs/training.md, [{table}]");
    }
    assert!(tables.iter().any(|(table, _)| table == "stage.medusa2.lora"));
}
