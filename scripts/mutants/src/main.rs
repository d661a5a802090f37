//! Draws mutants of the source at random and writes them into a copy of it, each behind a switch, so that one build serves all of them:
//! the program then behaves as mutant 17 where the environment variable `MUTANT` is 17.
//!
//! ```text
//! mutants COPY SEED ROOM=COUNT:FILE,FILE… … [--without ID,ID…]
//! ```
//!
//! COPY holds a copy of the repository, whose files are rewritten. Each room's files get COUNT mutants. The list of all goes to standard output,
//! one JSON object per line. `--without` leaves out mutants that do not compile.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs};

use quote::ToTokens;
use serde_json::json;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{BinOp, Expr, Lit, Stmt, parse_quote};

/// Methods with the same signature. Swapping two of them changes what is computed.
const SWAPS: &[(&str, &str)] = &[
    ("min", "max"),
    ("any", "all"),
    ("first", "last"),
    ("take", "skip"),
    ("is_some", "is_none"),
    ("is_ok", "is_err"),
    ("floor", "ceil"),
    ("max_by", "min_by"),
    ("ge", "gt"),
    ("le", "lt"),
    ("clamp_min", "clamp_max"),
    ("softmax", "log_softmax"),
];
/// Methods that can be left out: their result has the type of the value that they are called on.
const LEFT_OUT: &[&str] =
    &["masked_fill", "rev", "tr", "abs", "square", "exp", "sqrt", "index_fill", "contiguous", "neg"];

/// The module that the mutants ask.
const SWITCH: &str = r#"
pub mod mutants {
    use std::sync::OnceLock;

    pub fn is(id: u32) -> bool {
        static MUTANT: OnceLock<u32> = OnceLock::new();
        *MUTANT.get_or_init(|| std::env::var("MUTANT").ok().and_then(|id| id.parse().ok()).unwrap_or(0)) == id
    }
}
"#;

/// What is done with the places that can be mutated.
enum Pass<'p> {
    /// They are counted.
    Count,
    /// Those in the set are mutated.
    Mutate(&'p BTreeSet<usize>),
}

/// Line and text of what may be mutated.
type Place = (usize, String);

fn place_of(tokens: &(impl Spanned + ToTokens)) -> Place {
    (tokens.span().start().line, tokens.to_token_stream().to_string())
}

struct Mutator<'p> {
    pass: Pass<'p>,
    /// Places passed.
    at: usize,
    file: &'p str,
    listed: Vec<serde_json::Value>,
}

impl Mutator<'_> {
    /// Which mutant of the file this place is.
    fn place(&mut self, (line, was): &Place, kind: &str) -> Option<u32> {
        let at = self.at;
        self.at += 1;
        let Pass::Mutate(places) = &self.pass else { return None };
        let nth = places.iter().position(|&place| place == at)?;
        self.listed.push(json!({"nth": nth, "file": self.file, "line": line, "kind": kind, "was": was}));
        u32::try_from(nth).ok()
    }

    fn binary(&mut self, expr: &mut Expr, place: &Place) {
        let Expr::Binary(binary) = expr else { return };
        let Some(other) = other_operator(&binary.op) else { return };
        let Some(id) = self.place(place, &format!("{} for it", other.to_token_stream())) else {
            return;
        };
        let mut mutant = binary.clone();
        mutant.op = other;
        let was = binary.clone();
        *expr = parse_quote!((if crate::mutants::is(#id) { (#mutant) } else { (#was) }));
    }

    fn literal(&mut self, expr: &mut Expr, place: &Place) {
        let Expr::Lit(literal) = expr else { return };
        let mutant: Expr = match &literal.lit {
            Lit::Int(number) => {
                let Ok(value) = number.base10_parse::<u64>() else { return };
                let text = format!("{}{}", value + 1, number.suffix());
                let Ok(more) = syn::parse_str(&text) else { return };
                more
            }
            Lit::Bool(flag) => {
                let other = !flag.value;
                parse_quote!(#other)
            }
            _ => return,
        };
        let Some(id) = self.place(place, &format!("{} for it", mutant.to_token_stream())) else {
            return;
        };
        let was = literal.clone();
        *expr = parse_quote!((if crate::mutants::is(#id) { (#mutant) } else { (#was) }));
    }

    fn method(&mut self, expr: &mut Expr, place: &Place) {
        let Expr::MethodCall(call) = expr else { return };
        let name = call.method.to_string();
        let swapped = SWAPS.iter().find_map(|&(one, other)| match &*name {
            name if name == one => Some(other),
            name if name == other => Some(one),
            _ => None,
        });
        let (mutant, kind) = match swapped {
            Some(other) => {
                let mut mutant = call.clone();
                mutant.method = syn::Ident::new(other, call.method.span());
                (Expr::MethodCall(mutant), format!("{other} for {name}"))
            }
            None if LEFT_OUT.contains(&&*name) => ((*call.receiver).clone(), format!("without {name}")),
            None => return,
        };
        let Some(id) = self.place(place, &kind) else { return };
        let was = call.clone();
        *expr = parse_quote!((if crate::mutants::is(#id) { (#mutant) } else { (#was) }));
    }

    fn condition(&mut self, condition: &mut Expr, place: &Place) {
        if has_let(condition) {
            return;
        }
        let Some(id) = self.place(place, "the opposite condition") else { return };
        let was = condition.clone();
        *condition = parse_quote!(crate::mutants::is(#id) != (#was));
    }
}

impl VisitMut for Mutator<'_> {
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        if let Expr::Repeat(repeat) = expr {
            return self.visit_expr_mut(&mut repeat.expr); // the length is a constant
        }
        if matches!(expr, Expr::Const(_) | Expr::Macro(_)) {
            return;
        }
        let place = place_of(expr); // before there are mutants within
        let of_condition = if let Expr::If(branch) = expr { place_of(&branch.cond) } else { place.clone() };
        visit_mut::visit_expr_mut(self, expr);
        if let Expr::If(branch) = expr {
            self.condition(&mut branch.cond, &of_condition);
        }
        self.binary(expr, &place);
        self.literal(expr, &place);
        self.method(expr, &place);
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        let places: Vec<Place> = block.stmts.iter().map(place_of).collect();
        visit_mut::visit_block_mut(self, block);
        for (stmt, place) in block.stmts.iter_mut().zip(&places) {
            let Stmt::Expr(expr, Some(_)) = stmt else { continue };
            if !matches!(
                expr,
                Expr::Call(_)
                    | Expr::MethodCall(_)
                    | Expr::Assign(_)
                    | Expr::Try(_)
                    | Expr::Continue(_)
                    | Expr::Binary(_)
            ) {
                continue;
            }
            let Some(id) = self.place(place, "left out") else { continue };
            let was = expr.clone();
            *stmt = parse_quote!(if !crate::mutants::is(#id) { #was; });
        }
    }

    fn visit_arm_mut(&mut self, arm: &mut syn::Arm) {
        self.visit_expr_mut(&mut arm.body); // patterns are constants
    }

    fn visit_item_fn_mut(&mut self, item: &mut syn::ItemFn) {
        if item.sig.constness.is_none() && !is_test(&item.attrs) {
            visit_mut::visit_item_fn_mut(self, item);
        }
    }

    fn visit_impl_item_fn_mut(&mut self, item: &mut syn::ImplItemFn) {
        if item.sig.constness.is_none() {
            visit_mut::visit_impl_item_fn_mut(self, item);
        }
    }

    fn visit_item_mod_mut(&mut self, item: &mut syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit_mut::visit_item_mod_mut(self, item);
        }
    }

    fn visit_item_const_mut(&mut self, _: &mut syn::ItemConst) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut syn::ItemStatic) {}
    fn visit_item_macro_mut(&mut self, _: &mut syn::ItemMacro) {}
    fn visit_item_enum_mut(&mut self, _: &mut syn::ItemEnum) {}
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_pat_mut(&mut self, _: &mut syn::Pat) {}
    fn visit_attribute_mut(&mut self, _: &mut syn::Attribute) {}
    fn visit_generic_argument_mut(&mut self, _: &mut syn::GenericArgument) {}
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        Expr::Paren(paren) => has_let(&paren.expr),
        _ => false,
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| attribute.to_token_stream().to_string().contains("test"))
}

fn other_operator(operator: &BinOp) -> Option<BinOp> {
    Some(match operator {
        BinOp::Add(_) => parse_quote!(-),
        BinOp::Sub(_) => parse_quote!(+),
        BinOp::Mul(_) => parse_quote!(/),
        BinOp::Div(_) => parse_quote!(*),
        BinOp::Rem(_) => parse_quote!(/),
        BinOp::Lt(_) => parse_quote!(<=),
        BinOp::Le(_) => parse_quote!(<),
        BinOp::Gt(_) => parse_quote!(>=),
        BinOp::Ge(_) => parse_quote!(>),
        BinOp::Eq(_) => parse_quote!(!=),
        BinOp::Ne(_) => parse_quote!(==),
        BinOp::And(_) => parse_quote!(||),
        BinOp::Or(_) => parse_quote!(&&),
        BinOp::AddAssign(_) => parse_quote!(-=),
        BinOp::SubAssign(_) => parse_quote!(+=),
        BinOp::MulAssign(_) => parse_quote!(/=),
        BinOp::DivAssign(_) => parse_quote!(*=),
        _ => return None,
    })
}

/// A room: how many mutants of which files.
struct Room {
    name: String,
    count: usize,
    files: Vec<String>,
}

impl Room {
    fn parse(text: &str) -> Self {
        let (name, rest) = text.split_once('=').expect("ROOM=COUNT:FILES");
        let (count, files) = rest.split_once(':').expect("COUNT:FILES");
        let files = files.split(',').map(str::to_owned).collect();
        Self { name: name.to_owned(), count: count.parse().expect("a count"), files }
    }
}

/// SplitMix64: the same draws for the same seed, everywhere.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The room's places of each file that are mutated, drawn without repetition.
fn drawn(room: &Room, places: &[usize], state: &mut u64) -> Vec<BTreeSet<usize>> {
    let all: usize = places.iter().sum();
    let mut chosen = vec![BTreeSet::new(); places.len()];
    let mut left = room.count.min(all);
    while left > 0 {
        let mut place = usize::try_from(next(state) % all as u64).expect("a place");
        let file = places.iter().position(|&count| {
            let is_here = place < count;
            place -= if is_here { 0 } else { count };
            is_here
        });
        left -= usize::from(chosen[file.expect("a file")].insert(place));
    }
    chosen
}

fn mutator<'p>(pass: Pass<'p>, file: &'p str) -> Mutator<'p> {
    Mutator { pass, at: 0, file, listed: vec![] }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [copy, seed, rest @ ..] = &arguments[..] else {
        panic!("mutants COPY SEED ROOM=COUNT:FILES… [--without IDS]")
    };
    let without = rest.iter().position(|argument| argument == "--without");
    let excluded: BTreeSet<usize> =
        without.map_or_else(BTreeSet::new, |at| rest[at + 1].split(',').filter_map(|id| id.parse().ok()).collect());
    let mut state: u64 = seed.parse().expect("a seed");
    let mut first_id = 1;
    for room in rest[..without.unwrap_or(rest.len())].iter().map(|text| Room::parse(text)) {
        let parsed: Vec<syn::File> = room
            .files
            .iter()
            .map(|file| {
                let text =
                    fs::read_to_string(Path::new(copy).join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
                syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
            })
            .collect();
        let count = |file: &syn::File| {
            let mut counting = mutator(Pass::Count, "");
            counting.visit_file_mut(&mut file.clone());
            counting.at
        };
        let places: Vec<usize> = parsed.iter().map(count).collect();
        let chosen = drawn(&room, &places, &mut state);
        for ((file, mut syntax), places) in room.files.iter().zip(parsed).zip(&chosen) {
            write_mutants(copy, (&room.name, file), &mut syntax, places, (first_id, &excluded));
            first_id += places.len();
        }
    }
    let lib = Path::new(copy).join("src/lib.rs");
    let text = fs::read_to_string(&lib).expect("src/lib.rs");
    fs::write(&lib, text + SWITCH).expect("written");
}

/// Rewrites one file. Excluded mutants keep their number and are not written.
fn write_mutants(
    copy: &str,
    (room, file): (&str, &str),
    syntax: &mut syn::File,
    places: &BTreeSet<usize>,
    (first_id, excluded): (usize, &BTreeSet<usize>),
) {
    let with_ids = places.iter().zip(first_id..).filter(|(_, id)| !excluded.contains(id));
    let (kept, ids): (BTreeSet<usize>, Vec<usize>) = with_ids.map(|(&place, id)| (place, id)).unzip();
    if kept.is_empty() {
        return;
    }
    let mut mutating = mutator(Pass::Mutate(&kept), file);
    mutating.visit_file_mut(syntax);
    let mut text = prettyplease::unparse(syntax).replace("= =", "=="); // as it prints `==` in an attribute
    // The switches are numbered within the file. Each becomes a name first, so that no number is replaced twice.
    for nth in 0..ids.len() {
        text = text.replace(&format!("crate::mutants::is({nth}u32)"), &format!("crate::mutants::is(#{nth}#)"));
    }
    for (nth, id) in ids.iter().enumerate() {
        text = text.replace(&format!("is(#{nth}#)"), &format!("is({id}u32)"));
    }
    fs::write(Path::new(copy).join(file), text).expect("written");
    for mut mutant in mutating.listed {
        let nth = usize::try_from(mutant["nth"].as_u64().expect("a number")).expect("a number");
        mutant["id"] = json!(ids[nth]);
        mutant["room"] = json!(room);
        println!("{mutant}");
    }
}
