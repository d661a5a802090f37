//! Promise: docs/data.md lists the columns and keys of known programs as the program treats them.

use std::fs;
use std::path::Path;

use medusa::data::row_keys::{COLUMNS, ColumnUse, MESSAGE_KEYS, RowKey};

fn table(keys: &[RowKey], kind: &str) -> String {
    let mut table = format!("| {kind} | written by | what it is | |\n| --- | --- | --- | --- |\n");
    for RowKey { name, usage, writers, meaning } in keys.iter().filter(|key| key.usage != ColumnUse::Harmless) {
        let becomes = match usage {
            ColumnUse::Read => "read",
            ColumnUse::NotRead => "reported",
            _ => "for the template",
        };
        table += &format!("| `{name}` | {writers} | {meaning} | {becomes} |\n");
    }
    let harmless = keys.iter().filter(|key| key.usage == ColumnUse::Harmless).map(|key| format!("`{}`", key.name));
    table + "\nNot read, and not reported: " + &harmless.collect::<Vec<_>>().join(", ") + ".\n"
}

#[test]
fn the_page_lists_every_column_and_key() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/data.md");
    let page = fs::read_to_string(page).expect("docs/data.md");
    for table in [table(&COLUMNS, "column"), table(&MESSAGE_KEYS, "key")] {
        assert!(page.contains(&table), "docs/data.md has another than\n{table}");
    }
}
