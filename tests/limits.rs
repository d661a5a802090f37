//! Promise: docs/limits.md lists every bound of src/bounds.rs, with its value.

use std::fs;
use std::path::Path;

use medusa::bounds;

/// Bounds and values of the page's table.
fn listed() -> Vec<(String, u64)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/limits.md");
    let page = fs::read_to_string(path).expect("docs/limits.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    rows.map(|(name, rest)| (name.to_owned(), number(rest.split(" |").next().unwrap_or_default()))).collect()
}

/// "16 KiB", "10,000,000".
fn number(text: &str) -> u64 {
    let (digits, unit) = text.split_once(' ').unwrap_or((text, ""));
    let of_unit = match unit {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => panic!("docs/limits.md: unknown unit {other:?}"),
    };
    digits.replace(',', "").parse::<u64>().unwrap_or_else(|error| panic!("docs/limits.md: {text}: {error}")) * of_unit
}

#[test]
fn the_page_lists_every_bound_with_its_value() {
    let constants: Vec<(String, u64)> = bounds::ALL.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    assert_eq!(listed(), constants, "docs/limits.md against src/bounds.rs, in the same order");
}

#[test]
fn numbers_of_the_page_are_read_with_their_units() {
    assert_eq!(["16 KiB", "1,000", "2 GiB"].map(number), [16 << 10, 1000, 2 << 30]);
}
