//! Resolves paths to the files that declare them, and finds cycles of files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use super::source::{Import, Mention, Names, Source};

/// A crate's files, and the file of each module.
#[derive(Default)]
pub(super) struct CrateMap {
    pub(super) files: Vec<Source>,
    modules: HashMap<Names, usize>,
}

/// Files that all depend on each other, and the lines that cause it: `from:line -> to`.
pub(super) struct Circle {
    pub(super) files: Vec<String>,
    pub(super) edges: Vec<String>,
}

impl CrateMap {
    /// All files that `mod` reaches from lib.rs and the programs, without test-only files.
    pub(super) fn read(root: &Path) -> Self {
        let mut map = CrateMap::default();
        let mut open: Vec<(Names, bool)> = vec![(Names::new(), false)];
        open.extend(["medusa", "medusa-train"].map(|program| (vec!["bin".to_owned(), program.to_owned()], false)));
        while let Some((module, stand_in)) = open.pop() {
            let name = module.join("/");
            let paths = ["lib.rs".to_owned(), format!("{name}.rs"), format!("{name}/mod.rs")];
            let path = paths[usize::from(!module.is_empty())..].iter().find(|path| root.join(path).is_file());
            let path = path.unwrap_or_else(|| panic!("no file for the module {name}"));
            let text = fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
            let source = Source { stand_in, ..Source::of(path, &module, &text) };
            open.extend(source.children.iter().map(|child| (child.module.clone(), stand_in || child.stand_in)));
            map.add(module, source);
        }
        map
    }

    /// From pairs of a path in src/ and its contents.
    pub(super) fn of(texts: &[(&str, &str)]) -> Self {
        let mut map = CrateMap::default();
        for (path, text) in texts {
            let parts = path.trim_end_matches(".rs").split('/').map(str::to_owned);
            let module: Names = parts.filter(|part| part != "mod" && part != "lib").collect();
            map.add(module.clone(), Source::of(path, &module, text));
        }
        map
    }

    fn add(&mut self, module: Names, source: Source) {
        let file = self.files.len();
        self.modules.extend(source.inline.iter().map(|inline| (inline.clone(), file)));
        self.modules.insert(module, file);
        self.files.push(source);
    }

    /// The file that declares a path's item, followed through re-exports; `None` for other crates and for local names
    /// of a function.
    fn declared_in(&self, mention: &Mention) -> Option<usize> {
        match mention.path.as_slice() {
            [name] => self.follow(self.import(&mention.module, name)?, &[], 0),
            path => self.resolve(&mention.module, path, 0),
        }
    }

    fn resolve(&self, module: &Names, path: &[String], depth: usize) -> Option<usize> {
        let above = path.iter().take_while(|name| *name == "super").count();
        match path[0].as_str() {
            "crate" => self.walk(Names::new(), &path[1..], depth),
            "self" => self.walk(module.clone(), &path[1..], depth),
            "super" => self.walk(module[..module.len() - above].to_vec(), &path[above..], depth),
            name if self.modules.contains_key(&below(module, name)) || self.import(module, name).is_some() => {
                self.walk(module.clone(), path, depth)
            }
            _ => None,
        }
    }

    /// Follows a path down from a module, through submodules and imports, to the file that declares the rest.
    fn walk(&self, module: Names, path: &[String], depth: usize) -> Option<usize> {
        let here = self.modules.get(&module).copied();
        let Some((name, rest)) = path.split_first() else { return here };
        let child = below(&module, name);
        match self.import(&module, name) {
            _ if self.modules.contains_key(&child) => self.walk(child, rest, depth),
            Some(import) if depth < 8 => self.follow(import, rest, depth + 1),
            _ => here,
        }
    }

    fn follow(&self, import: &Import, rest: &[String], depth: usize) -> Option<usize> {
        self.resolve(&import.mention.module, &[&import.mention.path, rest].concat(), depth)
    }

    fn import(&self, module: &Names, name: &str) -> Option<&Import> {
        let file = &self.files[*self.modules.get(module)?];
        file.imports.iter().find(|import| import.name == name && import.mention.module == *module)
    }

    /// The files that a file's code depends on, each with the first line that needs it. A `pub use` alone is no
    /// dependency.
    fn needs(&self, file: usize) -> BTreeMap<usize, usize> {
        let source = &self.files[file];
        let imports = source.imports.iter().filter(|import| !import.exported).map(|import| &import.mention);
        let mut needs = BTreeMap::new();
        for mention in imports.chain(&source.mentions) {
            if let Some(to) = self.declared_in(mention).filter(|to| *to != file) {
                let line = needs.entry(to).or_insert(mention.line);
                *line = mention.line.min(*line);
            }
        }
        needs
    }

    /// Every cycle of files, with the lines that form it.
    pub(super) fn circles(&self) -> Vec<Circle> {
        let needs: Vec<BTreeMap<usize, usize>> = (0..self.files.len()).map(|file| self.needs(file)).collect();
        let reach: Vec<Vec<bool>> = (0..needs.len()).map(|from| reachable(&needs, from)).collect();
        let circle = |first: usize| -> Vec<usize> {
            (0..needs.len()).filter(|&to| reach[first][to] && reach[to][first]).collect()
        };
        let circles = (0..needs.len()).map(|first| (first, circle(first)));
        let each_once = circles.filter(|(first, circle)| circle.first() == Some(first));
        each_once.map(|(_, circle)| self.circle(&needs, &circle)).collect()
    }

    fn circle(&self, needs: &[BTreeMap<usize, usize>], circle: &[usize]) -> Circle {
        let path = |file: usize| &self.files[file].path;
        let edges = circle.iter().flat_map(|from| {
            let inside = needs[*from].iter().filter(|(to, _)| circle.contains(to));
            inside.map(|(to, line)| format!("src/{}:{line} -> src/{}", path(*from), path(*to)))
        });
        let mut files: Vec<String> = circle.iter().map(|file| path(*file).clone()).collect();
        files.sort();
        Circle { files, edges: edges.collect() }
    }
}

fn below(module: &Names, name: &str) -> Names {
    [module.as_slice(), &[name.to_owned()]].concat()
}

/// A file's direct and transitive dependencies; includes the file itself only if it is part of a cycle.
fn reachable(needs: &[BTreeMap<usize, usize>], from: usize) -> Vec<bool> {
    let (mut reached, mut open) = (vec![false; needs.len()], vec![from]);
    while let Some(file) = open.pop() {
        for &to in needs[file].keys() {
            if !std::mem::replace(&mut reached[to], true) {
                open.push(to);
            }
        }
    }
    reached
}
