//! Structure of the source code: imports point down only, no files import each other in a cycle, type names are unique,
//! each file format has one home, and the code stays below a size limit. A room is a top-level module of src/. `cargo
//! test --test promises layering -- --nocapture` prints the numbers.
#![expect(clippy::print_stderr, reason = "what is left is read with --nocapture")]

mod crate_map;
mod source;
mod unsafe_page;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use crate_map::{Circle, CrateMap};
use source::{Mention, Source};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Limits for the lines of code in each room of src/, without comments, blank lines and tests. A commit that raises one says what the lines
/// buy, and nothing else raises it.
const CODE_LINES: [(&str, usize); 36] = [
    ("bench", 516),
    ("bin", 6),
    ("bounds", 47),
    ("calibrate", 277),
    ("cli", 9498),
    ("cpu", 3420),
    ("data", 9592),
    ("decode", 2262),
    ("distill", 2397),
    ("draft", 5478),
    ("dtype", 68),
    ("engine", 3189),
    ("export", 2029),
    ("files", 620),
    ("formats", 1987),
    ("fused", 534),
    ("gguf", 1792),
    ("http", 551),
    ("hub", 1987),
    ("json", 67),
    ("key_use", 35),
    ("latency", 782),
    ("lib", 36),
    ("memory", 411),
    ("model", 7251),
    ("numbers", 49),
    ("nvidia", 1484),
    ("panics", 46),
    ("plural", 18),
    ("recipe", 2025),
    ("report", 1413),
    ("serve", 2263),
    ("session", 1683),
    ("torch", 2683),
    ("train", 5858),
    ("tree", 1602),
];

/// Limit for the lines of README.md.
const README_LINES: usize = 150;

/// Files that pass between commands: only formats/ reads and writes them.
const FORMATS: &[&str] = &[
    "metrics.jsonl",
    "calibration.json",
    "tree.json",
    "latency.json",
    "bench.json",
    "load.json",
    "provenance.json",
    "prompts.hashes",
    "distill.json",
    "validation_answers.json",
];

/// src/ without its tests.
static THIS_CRATE: LazyLock<CrateMap> = LazyLock::new(|| CrateMap::read(&Path::new(ROOT).join("src")));

/// Layer of each room, from lines such as `//! L3 train   decode    the two loops`; only words that name a file or
/// folder of src/ count.
fn layers() -> HashMap<String, u32> {
    let lib = fs::read_to_string(Path::new(ROOT).join("src/lib.rs")).expect("src/lib.rs");
    let mut layers = HashMap::new();
    for line in lib.lines().filter_map(|line| line.strip_prefix("//! L")) {
        let (layer, rooms) = line.split_once(' ').expect("a layer line has rooms");
        let layer: u32 = layer.parse().expect("a layer line starts with its number");
        let words = rooms.split(|c: char| !c.is_alphanumeric() && c != '_');
        layers.extend(words.filter(|word| is_room(word)).map(|room| (room.to_owned(), layer)));
    }
    layers
}

pub(crate) fn is_room(word: &str) -> bool {
    let path = Path::new(ROOT).join("src").join(word);
    !word.is_empty() && (path.is_dir() || path.with_extension("rs").is_file())
}

/// The first component of a path in src/.
fn room(path: &str) -> &str {
    path.split('/').next().unwrap_or_default().trim_end_matches(".rs")
}

/// Why `from` may not import `to`, if so.
fn fault(layers: &HashMap<String, u32>, from: &str, to: &str) -> Option<String> {
    let (Some(&above), Some(&below)) = (layers.get(from), layers.get(to)) else {
        return Some(format!("{from} imports {to}: one of them stands on no layer in src/lib.rs"));
    };
    let at_the_bottom = above == 0 && ["bounds", "files", "numbers"].contains(&to);
    if from == to || above > below || at_the_bottom {
        return None;
    }
    let direction = if above == below { "sideways" } else { "upwards" };
    Some(format!("{from} (L{above}) imports {to} (L{below}): {direction}"))
}

/// Forbidden imports of one file, with their lines.
fn faults(layers: &HashMap<String, u32>, source: &Source) -> Vec<String> {
    let imports = source.imports.iter().map(|import| &import.mention).chain(&source.mentions);
    let rooms = imports.filter_map(|mention| Some((mention.line, mention.room()?)));
    let found = rooms
        .filter(|(_, to)| is_room(to))
        .filter_map(|(line, to)| Some((line, fault(layers, room(&source.path), to)?)));
    found.map(|(line, fault)| format!("src/{}:{line}: {fault}", source.path)).collect()
}

#[test]
fn imports_point_down_only() {
    let layers = layers();
    let faults: Vec<String> = THIS_CRATE.files.iter().flat_map(|source| faults(&layers, source)).collect();
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn every_room_stands_on_a_layer() {
    let layers = layers();
    for source in &THIS_CRATE.files {
        let room = room(&source.path);
        assert!(room == "lib" || layers.contains_key(room), "{room} is on no layer in the doc of src/lib.rs");
    }
}

#[test]
fn an_import_upwards_or_sideways_is_found() {
    let layers = HashMap::from(
        [("files", 0), ("torch", 0), ("data", 2), ("model", 2), ("cli", 6)].map(|(room, layer)| (room.into(), layer)),
    );
    let text = "use crate::{files, model::{rows, pack}, torch};\nfn f() { println!(\"{}\", crate::cli::x()); } // crate::bin\n";
    let of_data = CrateMap::of(&[("data/mod.rs", text)]);
    assert_eq!(
        faults(&layers, &of_data.files[0]),
        [
            "src/data/mod.rs:1: data (L2) imports model (L2): sideways",
            "src/data/mod.rs:1: data (L2) imports model (L2): sideways",
            "src/data/mod.rs:2: data (L2) imports cli (L6): upwards"
        ]
    );
    assert!(fault(&layers, "files", "torch").is_some());
    assert_eq!(fault(&layers, "torch", "files").or(fault(&layers, "data", "data")), None);
}

#[test]
fn no_files_need_each_other_in_a_circle() {
    let lines = |circle: &Circle| format!("\n{}\n    {}", circle.files.join(" "), circle.edges.join("\n    "));
    let circles: Vec<String> = THIS_CRATE.circles().iter().map(lines).collect();
    assert!(circles.is_empty(), "{}", circles.concat());
}

#[test]
fn a_circle_is_found_through_modules_and_re_exports() {
    let parent = "pub mod rows;\nmod chat;\npub use rows::Row;\npub struct Chat;\n";
    let circles = |rows: &str, chat: &str| {
        let texts = [("data/mod.rs", parent), ("data/rows.rs", rows), ("data/chat.rs", chat)];
        CrateMap::of(&texts).circles().into_iter().map(|circle| circle.edges).collect::<Vec<_>>()
    };
    let found = [["src/data/rows.rs:2 -> src/data/chat.rs", "src/data/chat.rs:1 -> src/data/rows.rs"]];
    assert_eq!(circles("struct Row;\nfn f() { super::chat::g() }\n", "use super::Row;\n"), found);
    assert_eq!(
        circles("struct Row;\nfn f() { dbg!(crate::data::chat::g()) }\n", "use crate::data::{Chat, Row as R};\n"),
        found
    );
    let none: [[&str; 0]; 0] = [];
    assert_eq!(circles("use super::Chat;\nstruct Row; // super::chat\n", "use super::{Row, Chat};"), none);
    assert_eq!(
        circles("#[cfg(test)]\nuse super::chat::g;\npub(in crate::data::chat) struct Row;", "use super::Row;"),
        none
    );
}

/// Where each type of the crate is declared. Stand-ins are left out: they repeat the types of the files that they
/// replace.
fn types(map: &CrateMap) -> BTreeMap<String, BTreeSet<String>> {
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in map.files.iter().filter(|source| !source.stand_in) {
        for (name, line) in &source.types {
            types.entry(name.clone()).or_default().insert(format!("src/{}:{line}", source.path));
        }
    }
    types
}

/// `(name, places)` of each name that several types share.
fn shared_names(map: &CrateMap) -> Vec<(String, String)> {
    let shared = types(map).into_iter().filter(|(_, places)| places.len() > 1);
    shared.map(|(name, places)| (name, places.into_iter().collect::<Vec<_>>().join(" "))).collect()
}

#[test]
fn a_types_name_is_unique() {
    let shared = shared_names(&THIS_CRATE);
    let lines: Vec<String> = shared.iter().map(|(name, places)| format!("\n{name}: {places}")).collect();
    assert!(lines.is_empty(), "{}", lines.concat());
}

#[test]
fn a_name_of_two_types_is_found() {
    let map = CrateMap::of(&[
        (
            "a.rs",
            "struct Place { x: u8 }\nimpl Iterator for Place { type Item = u8; }\n#[cfg(test)] mod tests { enum Row {} }",
        ),
        ("b.rs", "mod inside {\n    pub enum Place {}\n}\n#[cfg(not(unix))]\nmod elsewhere;\ntype Row = u8;\n"),
    ]);
    assert_eq!(shared_names(&map), [("Place".to_owned(), "src/a.rs:1 src/b.rs:2".to_owned())]);
    assert!(map.files[1].children[0].stand_in);
}

/// Where files outside formats/ name a file that passes between commands.
fn homeless_formats(map: &CrateMap) -> Vec<(String, String)> {
    let outside = map.files.iter().filter(|source| room(&source.path) != "formats");
    let named = outside.flat_map(|source| {
        let literals = source.literals.iter().filter(|(text, _)| FORMATS.contains(&text.as_str()));
        literals.map(|(text, line)| (source.path.clone(), format!("src/{}:{line}: {text}", source.path)))
    });
    named.collect()
}

#[test]
fn a_format_has_one_home() {
    let homeless = homeless_formats(&THIS_CRATE);
    assert!(homeless.is_empty(), "\n{homeless:#?}\n");
}

/// Lines with `unsafe`, for files outside the rooms that may have it.
fn strays(source: &Source) -> Vec<String> {
    let rooms = ["torch/", "cpu/", "nvidia/", "model/weights.rs", "model/weights/", "model/kv_cache.rs"];
    let lines = source.unsafe_code.iter().filter(|_| !rooms.iter().any(|room| source.path.starts_with(room)));
    lines.map(|(_, line)| format!("src/{}:{line}", source.path)).collect()
}

#[test]
fn unsafe_stands_in_its_rooms_only() {
    let found: Vec<String> = THIS_CRATE.files.iter().flat_map(strays).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    let of = |path: &str| {
        strays(&CrateMap::of(&[(path, "#![expect(unsafe_code)]\nfn f() { unsafe { y() } } // unsafe\n")]).files[0])
    };
    assert_eq!(of("train/run.rs"), ["src/train/run.rs:2"]);
    assert!(of("cpu/team.rs").is_empty());
}

/// Lines where vectors pass through a function of `core`. It is compiled without a CPU's instructions, so each intrinsic in its closure is a call:
/// weights of 4 bits were multiplied ten times as slowly.
fn passes_through_core(text: &str) -> Vec<usize> {
    let passes = |line: &str| line.contains("from_fn(") || line.contains(".map(");
    (1..).zip(text.lines()).filter(|(_, line)| passes(line)).map(|(number, _)| number).collect()
}

#[test]
fn no_vectors_pass_through_functions_without_their_instructions() {
    for file in ["avx2.rs", "avx512.rs"] {
        let text = fs::read_to_string(Path::new(ROOT).join("src/cpu/lanes").join(file)).expect("a source");
        assert_eq!(passes_through_core(&text), [0; 0], "lines of src/cpu/lanes/{file}: use loops or both halves");
    }
    assert_eq!(
        passes_through_core("let a = v.map(|v| add(v));\nlet b = add(v);\narray::from_fn(|h| add(v[h]))\n"),
        [1, 3]
    );
}

/// Rooms that know a trained drafter by its levels alone, through `draft::trained` and `draft::planned`.
const BY_LEVELS: [&str; 6] = ["train", "calibrate", "latency", "decode", "serve", "distill"];

/// Where a file outside of draft/ names a kind of trained drafter that its room does not know: none knows how one guesses, and the rooms of
/// [`BY_LEVELS`] not even its weights.
fn kinds_named(source: &Source) -> Vec<String> {
    let kinds: &[&str] = match room(&source.path) {
        "draft" => &[],
        room if BY_LEVELS.contains(&room) => &["heads", "hydra", "medusa"],
        _ => &["hydra", "medusa"],
    };
    let mentions = source.imports.iter().map(|import| &import.mention).chain(&source.mentions);
    let of_kind = |mention: &&Mention| match &mention.path[..] {
        [root, draft, kind, ..] => root == "crate" && draft == "draft" && kinds.contains(&kind.as_str()),
        _ => false,
    };
    let found = mentions.filter(of_kind);
    found.map(|mention| format!("src/{}:{}: {}", source.path, mention.line, mention.path.join("::"))).collect()
}

#[test]
fn trained_drafters_are_known_by_their_levels() {
    let found: Vec<String> = THIS_CRATE.files.iter().flat_map(kinds_named).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    let named = |path, text| kinds_named(&CrateMap::of(&[(path, text)]).files[0]).len();
    let import = "use crate::draft::heads::Heads;\nuse crate::draft::{medusa::levels::X, trained::Y};\n";
    assert_eq!(["train/run.rs", "cli/run.rs", "draft/run.rs"].map(|path| named(path, import)), [2, 1, 0]);
}

/// Public items and files without a doc comment. Fields, variants, constants and getters may lack one, which rustc's
/// `missing_docs` cannot allow.
fn without_docs(source: &Source) -> Vec<String> {
    let items = source.undocumented.iter().map(|(name, line)| format!("src/{}:{line}: {name}", source.path));
    let file = (!source.has_module_doc).then(|| format!("src/{}: no //! at the top", source.path));
    file.into_iter().chain(items).collect()
}

#[test]
fn public_items_and_files_have_docs() {
    let found: Vec<String> = THIS_CRATE.files.iter().flat_map(without_docs).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    let text = "//! A.\n/// B.\n#[derive(Debug)]\npub struct B {\n    pub x: u8,\n}\n#[must_use]\npub const fn f() {}\npub(crate) fn g() {}\nimpl B {\n    pub fn x(&self) -> u8 {}\n    pub fn y(&self, z: u8) {}\n}\n";
    assert_eq!(without_docs(&CrateMap::of(&[("a.rs", text)]).files[0]), ["src/a.rs:8: f", "src/a.rs:12: y"]);
    assert_eq!(without_docs(&CrateMap::of(&[("b.rs", "pub use a::B;")]).files[0]), ["src/b.rs: no //! at the top"]);
}

/// Words for which the field has others (reported, emitted, streamed, distinguished, …): no name and no comment of src/ has them.
const AVOIDED: [&str; 6] = ["tell", "tells", "told", "telling", "untold", "wording"];

/// A key of `--check --json`, the only name that may begin with `of_`: others are nouns, or begin with `from_` or `for_`.
const OF_KEY: &str = "of_no_row";

/// `words` with an avoided one, or with a name that begins with `of_`, as often as they occur.
fn avoided(text: &str) -> BTreeMap<&str, usize> {
    let mut found = BTreeMap::new();
    for name in text.split(|c: char| !c.is_alphanumeric() && c != '_') {
        let has_word = name.split('_').any(|word| AVOIDED.contains(&word.to_lowercase().as_str()));
        if has_word || name.starts_with("of_") && name != OF_KEY {
            *found.entry(name).or_default() += 1;
        }
    }
    found
}

/// Names and comments with words that are avoided, and how often; string literals may have them.
fn avoided_names(source: &Source, text: &str) -> Vec<String> {
    let mut found = avoided(text);
    for (name, count) in source.literals.iter().flat_map(|(literal, _)| avoided(literal)) {
        found.entry(name).and_modify(|all| *all -= count);
    }
    found.into_iter().filter(|(_, count)| *count > 0).map(|(name, _)| format!("src/{}: {name}", source.path)).collect()
}

#[test]
fn names_and_comments_use_the_words_of_the_field() {
    let read = |source: &Source| fs::read_to_string(Path::new(ROOT).join("src").join(&source.path)).expect("a source");
    let found: Vec<String> = THIS_CRATE.files.iter().flat_map(|source| avoided_names(source, &read(source))).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    let names = |text: &str| avoided_names(&CrateMap::of(&[("a.rs", text)]).files[0], text);
    assert_eq!(
        names("//! Tells all.\nfn is_told() { \"tell it\" }\nfn of_x() {}\n"),
        ["src/a.rs: Tells", "src/a.rs: is_told", "src/a.rs: of_x"]
    );
    assert_eq!(names("//! As retold.\nfn f() { \"a server tells\"; of(\"tells\") }\n"), [""; 0]);
}

fn code_lines(map: &CrateMap) -> BTreeMap<&str, usize> {
    let mut lines = BTreeMap::new();
    for source in &map.files {
        let room = source.path.split('/').next().expect("a path").trim_end_matches(".rs");
        *lines.entry(room).or_default() += source.code.len();
    }
    lines
}

/// The value below which `share` of the sorted values lie.
fn quantile(sorted: &[usize], share: f64) -> usize {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

#[test]
fn the_numbers_do_not_get_worse() {
    let map = &*THIS_CRATE;
    let mut lengths: Vec<usize> = map.files.iter().flat_map(|source| source.functions.iter().copied()).collect();
    lengths.sort_unstable();
    let code = code_lines(map);
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).expect("README.md").lines().count();
    eprintln!(
        "circles {} · names of several types {} · files that name a format outside formats/ {} · README {readme} lines · {} functions, \
         lines: median {}, p90 {}, max {} · code in src {} lines in {} files",
        map.circles().len(),
        shared_names(map).len(),
        homeless_formats(map).iter().map(|(path, _)| path).collect::<BTreeSet<_>>().len(),
        lengths.len(),
        quantile(&lengths, 0.5),
        quantile(&lengths, 0.9),
        quantile(&lengths, 1.0),
        code.values().sum::<usize>(),
        map.files.len(),
    );
    eprintln!("code by room: {code:?}");
    assert!(readme <= README_LINES, "README.md has {readme} lines, above {README_LINES}");
    let limits: BTreeMap<&str, usize> = CODE_LINES.into();
    assert!(code.keys().eq(limits.keys()), "CODE_LINES lists {:?}", limits.keys());
    for (room, lines) in &code {
        assert!(*lines <= limits[room], "{room} has {lines} lines of code, above {}", limits[room]);
    }
}

#[test]
fn comments_blanks_and_tests_are_no_lines_of_code() {
    let text = "//! Words.\n\n/// More.\n#[derive(Debug)]\npub struct A; // x\n#[cfg(test)]\nmod tests {\n    fn f() {}\n}\nfn g() {\n    \"a\n  b\"\n}\n";
    let source = &CrateMap::of(&[("a.rs", text)]).files[0];
    assert_eq!((source.code.len(), source.functions.as_slice()), (6, &[4][..]));
}
