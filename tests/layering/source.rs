//! Parses a source file for the layering tests. Uses proc-macro2 as lexer, so that comments, strings and macros are
//! handled correctly; items under `#[cfg(test)]` are left out.

use std::collections::{BTreeSet, HashSet};

use proc_macro2::{Delimiter, Spacing, Span, TokenStream, TokenTree};

/// Segments of `a::b::c`.
pub(super) type Names = Vec<String>;

/// A path in code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mention {
    pub(super) line: usize,
    /// The module that contains it.
    pub(super) module: Names,
    pub(super) path: Names,
}

/// A name that a `use` imports into its module.
pub(super) struct Import {
    pub(super) name: String,
    pub(super) mention: Mention,
    /// `pub use`.
    pub(super) exported: bool,
}

/// A module in its own file.
pub(super) struct Child {
    pub(super) module: Names,
    /// Has `#[cfg(not(…))]`.
    pub(super) stand_in: bool,
}

/// One file of src/.
#[derive(Default)]
pub(super) struct Source {
    /// Relative to src/.
    pub(super) path: String,
    pub(super) imports: Vec<Import>,
    /// Paths outside `use`; a path of one segment is listed once per module.
    pub(super) mentions: Vec<Mention>,
    /// Types declared at module level, with their lines.
    pub(super) types: Vec<(String, usize)>,
    pub(super) children: Vec<Child>,
    /// Modules with a body.
    pub(super) inline: Vec<Names>,
    /// String literals as written, with their lines.
    pub(super) literals: Vec<(String, usize)>,
    /// Number of lines of each function, from `fn` to its closing brace.
    pub(super) functions: Vec<usize>,
    /// Public functions, types and traits without a doc comment, with their lines; getters are left out.
    pub(super) undocumented: Vec<(String, usize)>,
    /// Whether the file starts with `//!`.
    pub(super) has_module_doc: bool,
    /// Where the word `unsafe` stands, with its lines.
    pub(super) unsafe_code: Vec<(UnsafeCode, usize)>,
    /// Lines of code, without comments.
    pub(super) code: BTreeSet<usize>,
    /// Compiled for other targets instead of files of this crate, with types of the same names.
    pub(super) stand_in: bool,
}

/// What is unsafe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum UnsafeCode {
    Block,
    Function,
    Impl,
    /// Functions of C and C++ that are declared.
    Foreign,
    /// The type of a pointer to a function.
    Type,
}

impl UnsafeCode {
    /// From the tokens after `unsafe`.
    fn of(next: &[&Token]) -> Self {
        let text = |ahead: usize| next.get(ahead).map_or("", |token| token.text.as_str());
        let is_pointer = |at: usize| text(at) == "fn" && text(at + 1) == "(";
        match text(0) {
            "{" => Self::Block,
            "impl" => Self::Impl,
            "extern" if text(2) == "{" => Self::Foreign,
            "extern" if is_pointer(2) => Self::Type,
            _ if is_pointer(0) => Self::Type,
            _ => Self::Function,
        }
    }
}

/// A token (`::` is one token), with its first and last line.
struct Token {
    text: String,
    line: usize,
    last: usize,
}

impl Source {
    /// Reads the file of `module`.
    pub(super) fn of(path: &str, module: &Names, text: &str) -> Self {
        let stream: TokenStream = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut tokens = Vec::new();
        flatten(stream, &mut tokens);
        let tokens = without_tests(&tokens);
        let mut source = Source { path: path.to_owned(), undocumented: undocumented(&tokens), ..Source::default() };
        source.has_module_doc = text.starts_with("//!");
        let tokens = without_docs(&tokens);
        for (at, token) in tokens.iter().enumerate() {
            source.code.extend(token.line..=token.last);
            match token.text.as_str() {
                "unsafe" => source.unsafe_code.push((UnsafeCode::of(&tokens[at + 1..]), token.line)),
                text if text.starts_with('"') => source.literals.push((text.trim_matches('"').to_owned(), token.line)),
                _ => {}
            }
        }
        source.read_module(module, &tokens, &mut HashSet::new());
        source
    }

    /// Reads the body of a module, including functions. One-segment paths in `seen` were already listed.
    fn read_module(&mut self, module: &Names, tokens: &[&Token], seen: &mut HashSet<String>) {
        let (mut at, mut depth) = (0, 0);
        while at < tokens.len() {
            let (before, rest) = tokens.split_at(at);
            let text = |ahead: usize| rest.get(ahead).map_or("", |token| token.text.as_str());
            let named = rest.get(1).is_some_and(|token| token.is_word());
            let here = |name: &str| [module.clone(), vec![name.to_owned()]].concat();
            at += match text(0) {
                "{" => (depth += 1, 1).1,
                "}" => (depth -= 1, 1).1,
                "mod" if text(2) == "{" => {
                    let end = closing(rest, 2);
                    self.read_module(&here(text(1)), &rest[3..end], &mut HashSet::new());
                    self.inline.push(here(text(1)));
                    end + 1
                }
                "mod" if text(2) == ";" => {
                    let attribute = before.iter().rev().take_while(|token| ![";", "}"].contains(&token.text.as_str()));
                    let stand_in = attribute.filter(|token| token.text == "not").count() > 0;
                    self.children.push(Child { module: here(text(1)), stand_in });
                    3
                }
                "use" if named || text(1) == "{" => {
                    let length = rest.iter().take_while(|token| token.text != ";").count();
                    let exported =
                        before.iter().rev().take(4).take_while(|token| ![";", "]"].contains(&token.text.as_str()));
                    let exported = exported.filter(|token| token.text == "pub").count() > 0;
                    for path in use_tree(&[], &rest[1..length]) {
                        self.imports.push(Import::of(path, rest[0].line, module, exported));
                    }
                    length
                }
                "fn" if named => {
                    let end = body(rest).map(|open| closing(rest, open));
                    self.functions.extend(end.map(|end| rest[end].line + 1 - rest[0].line));
                    2
                }
                "struct" | "enum" | "trait" | "type" | "union" if named && depth == 0 => {
                    self.types.push((text(1).to_owned(), rest[1].line));
                    2
                }
                // `pub(in crate::a)` is no dependency on `crate::a`.
                "in" if named && before.last().is_some_and(|token| token.text == "(") => 2 * path(&rest[1..]).len(),
                _ if rest[0].is_word() && before.last().is_none_or(|token| token.text != ".") => {
                    let path = path(rest);
                    let length = 2 * path.len() - 1;
                    if path.len() > 1 || seen.insert(path[0].clone()) {
                        self.mentions.push(Mention { line: rest[0].line, module: module.clone(), path });
                    }
                    length
                }
                _ => 1,
            };
        }
    }
}

impl Mention {
    /// The room of `crate::room::…`, also if reached through `super`; `None` for other paths.
    pub(super) fn room(&self) -> Option<&str> {
        let above = self.path.iter().take_while(|name| *name == "super").count();
        match self.path.first()?.as_str() {
            "crate" => self.path.get(1).map(String::as_str),
            "super" if above == self.module.len() => self.path.get(above).map(String::as_str),
            _ => None,
        }
    }
}

impl Import {
    /// From a path of `use`, which may end in `self`, `*` or `as name`.
    fn of(mut path: Names, line: usize, module: &Names, exported: bool) -> Self {
        let mut name = path.last().cloned().unwrap_or_default();
        if path.len() > 2 && path[path.len() - 2] == "as" {
            path.truncate(path.len() - 2);
        }
        if path.last().is_some_and(|last| last == "self" || last == "*") && path.len() > 1 {
            path.pop();
            name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name };
        }
        Import { name, mention: Mention { line, module: module.clone(), path }, exported }
    }
}

impl Token {
    fn new(text: String, span: Span) -> Self {
        Token { text, line: span.start().line, last: span.end().line }
    }

    fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Replaces each group by its brackets and contents.
fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let mut after_colon = false;
    for tree in stream {
        let colon =
            matches!(&tree, TokenTree::Punct(punct) if punct.as_char() == ':' && punct.spacing() == Spacing::Joint);
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Parenthesis | Delimiter::None => ("(", ")"),
                };
                tokens.push(Token::new(open.to_owned(), group.span_open()));
                flatten(group.stream(), tokens);
                tokens.push(Token::new(close.to_owned(), group.span_close()));
            }
            TokenTree::Punct(punct) if after_colon && punct.as_char() == ':' => {
                tokens.last_mut().expect("a colon before").text.push(':');
            }
            other => tokens.push(Token::new(other.to_string(), other.span())),
        }
        after_colon = colon && !after_colon;
    }
}

/// Drops items under `#[cfg(test)]`.
fn without_tests(tokens: &[Token]) -> Vec<&Token> {
    let all: Vec<&Token> = tokens.iter().collect();
    without(&all, |rest, attribute| (attribute == "cfg(test)]").then(|| end_of_item(rest)))
}

/// Drops doc comments.
fn without_docs<'t>(tokens: &[&'t Token]) -> Vec<&'t Token> {
    without(tokens, |rest, attribute| attribute.starts_with("doc=").then(|| end_of_attribute(rest)))
}

/// At every attribute, drops as many tokens as `skipped` returns, which gets the tokens from the attribute on and the
/// attribute's first five as text.
fn without<'t>(tokens: &[&'t Token], skipped: impl Fn(&[&Token], &str) -> Option<usize>) -> Vec<&'t Token> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let rest = &tokens[at..];
        let inner = usize::from(rest.get(1).is_some_and(|token| token.text == "!"));
        let attribute: String = rest.iter().skip(inner + 2).take(5).map(|token| token.text.as_str()).collect();
        at += skipped(rest, &attribute).filter(|_| rest[0].text == "#").unwrap_or_else(|| {
            kept.push(rest[0]);
            1
        });
    }
    kept
}

/// Public functions, types and traits without a doc comment. Constants, fields, variants and getters (methods of `&self` alone) may lack
/// one: it would often repeat the name.
fn undocumented(tokens: &[&Token]) -> Vec<(String, usize)> {
    let (mut found, mut documented, mut at) = (Vec::new(), false, 0);
    while at < tokens.len() {
        let text = |ahead: usize| tokens.get(at + ahead).map_or("", |token| token.text.as_str());
        if text(0) == "#" && text(1) == "[" {
            documented |= text(2) == "doc";
            at += end_of_attribute(&tokens[at..]);
            continue;
        }
        let modifiers =
            (1..).take_while(|&ahead| ["const", "async", "unsafe", "extern"].contains(&text(ahead))).count();
        let is_item = ["fn", "struct", "enum", "union", "trait"].contains(&text(1 + modifiers));
        let is_getter =
            text(1 + modifiers) == "fn" && ["(", "&", "self", ")"] == [3, 4, 5, 6].map(|ahead| text(ahead + modifiers));
        if text(0) == "pub" && is_item && !is_getter && !documented {
            found.push((text(2 + modifiers).to_owned(), tokens[at].line));
        }
        (documented, at) = (false, at + 1);
    }
    found
}

/// Length of the attribute at the start of `tokens`.
fn end_of_attribute(tokens: &[&Token]) -> usize {
    let open = tokens.iter().position(|token| token.text == "[").expect("an attribute has brackets");
    closing(tokens, open) + 1
}

/// Length of the item at the start of `tokens`: to its `;` or `,`, or to its closing brace.
fn end_of_item(tokens: &[&Token]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            ";" | "," => return at + 1,
            "{" => {
                let end = closing(tokens, at) + 1;
                return end + usize::from(tokens.get(end).is_some_and(|token| token.text == ";"));
            }
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
    at
}

/// Index of the bracket that closes the one at `open`.
fn closing(tokens: &[&Token], open: usize) -> usize {
    let mut depth = 0;
    let closes = |token: &&Token| {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        depth == 0
    };
    open + tokens[open..].iter().position(closes).expect("brackets are balanced")
}

/// Index of the opening brace of a function's body; `None` if it has no body.
fn body(tokens: &[&Token]) -> Option<usize> {
    let mut at = 0;
    loop {
        match tokens.get(at)?.text.as_str() {
            "{" => return Some(at),
            ";" => return None,
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
}

/// The path `a::b::c` at the start of `tokens`.
fn path(tokens: &[&Token]) -> Names {
    let mut path = vec![tokens[0].text.clone()];
    while let [_, colons, next, ..] = &tokens[2 * path.len() - 2..] {
        if colons.text != "::" || !next.is_word() {
            break;
        }
        path.push(next.text.clone());
    }
    path
}

/// The paths of `a::{b, c::{self, d as e}}`.
fn use_tree(prefix: &[String], tokens: &[&Token]) -> Vec<Names> {
    let Some(open) = tokens.iter().position(|token| token.text == "{") else {
        let words = tokens.iter().filter(|token| token.text != "::").map(|token| token.text.clone());
        return vec![prefix.iter().cloned().chain(words).collect()];
    };
    let words = tokens[..open].iter().filter(|token| token.text != "::").map(|token| token.text.clone());
    let prefix: Names = prefix.iter().cloned().chain(words).collect();
    let (mut paths, mut start) = (Vec::new(), open + 1);
    let end = closing(tokens, open);
    while start < end {
        let mut depth = 0;
        let comma = |token: &&Token| {
            depth += i32::from(token.text == "{") - i32::from(token.text == "}");
            depth == 0 && token.text == ","
        };
        let item = start..tokens[start..end].iter().position(comma).map_or(end, |length| start + length);
        start = item.end + 1;
        if !item.is_empty() {
            paths.extend(use_tree(&prefix, &tokens[item]));
        }
    }
    paths
}
