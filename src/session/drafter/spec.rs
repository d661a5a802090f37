//! Parses the value of `--drafter`: `NAME`, `NAME:PATH`, or several joined by `+`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::tree::merged::MAX_DRAFTERS;

/// A kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrafterName {
    /// No drafter; only in `bench --drafters`.
    Plain,
    /// Medusa heads.
    Medusa,
    /// Sequential heads.
    Hydra,
    /// Sequential heads behind a prefix layer.
    HydraPlusPlus,
    /// One decoder layer on hidden states of several layers.
    Eagle3,
    /// Prompt lookup.
    Ngram,
    /// Jacobi window with an n-gram pool.
    Lookahead,
    /// Adjacency of top-k successors.
    Recycling,
    /// A smaller backbone with the same vocabulary.
    Model,
}

/// The weights that a drafter needs besides the backbone's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrafterWeights {
    None,
    /// Trained heads: those of `--heads`, or the drafter's own path.
    Heads,
    /// A backbone, always with a path.
    Backbone,
}

const NAMES: [(DrafterName, &str); 9] = [
    (DrafterName::Plain, "plain"),
    (DrafterName::Medusa, "medusa"),
    (DrafterName::Hydra, "hydra"),
    (DrafterName::HydraPlusPlus, "hydra++"),
    (DrafterName::Eagle3, "eagle3"),
    (DrafterName::Ngram, "ngram"),
    (DrafterName::Lookahead, "lookahead"),
    (DrafterName::Recycling, "recycling"),
    (DrafterName::Model, "model"),
];

impl DrafterName {
    /// As it is typed.
    pub fn text(self) -> &'static str {
        NAMES.iter().find(|(name, _)| *name == self).map(|(_, text)| *text).expect("every name is in the table")
    }

    /// The drafter whose heads have this `architecture`.
    pub fn from_architecture(architecture: &str) -> Option<Self> {
        let (name, _) = NAMES.into_iter().find(|(_, text)| *text == architecture)?;
        (name.weights() == DrafterWeights::Heads).then_some(name)
    }

    /// The weights that it needs.
    pub fn weights(self) -> DrafterWeights {
        match self {
            Self::Medusa | Self::Hydra | Self::HydraPlusPlus | Self::Eagle3 => DrafterWeights::Heads,
            Self::Model => DrafterWeights::Backbone,
            Self::Plain | Self::Ngram | Self::Lookahead | Self::Recycling => DrafterWeights::None,
        }
    }
}

/// One drafter of a [`DrafterSpec`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterPart {
    pub name: DrafterName,
    /// A folder or a Hub id; `None`: no weights, or those of `--heads`.
    pub path: Option<PathBuf>,
}

/// A value of `--drafter`: one drafter, or several whose guesses share a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterSpec {
    parts: Vec<DrafterPart>,
}

impl DrafterSpec {
    /// A single drafter without a path.
    pub fn of(name: DrafterName) -> Self {
        Self { parts: vec![DrafterPart { name, path: None }] }
    }

    /// The drafters, in the order in which they were typed.
    pub fn parts(&self) -> &[DrafterPart] {
        &self.parts
    }

    /// As [`DrafterSpec::parts`]: downloads replace Hub ids by paths.
    pub fn parts_mut(&mut self) -> &mut [DrafterPart] {
        &mut self.parts
    }

    /// Whether this is `name` alone.
    pub fn is(&self, name: DrafterName) -> bool {
        matches!(&self.parts[..], [part] if part.name == name)
    }

    /// The names without paths, such as `hydra+ngram`.
    pub fn name(&self) -> String {
        self.parts.iter().map(|part| part.name.text()).collect::<Vec<_>>().join("+")
    }

    /// Whether the tree of guesses can be the same at every step.
    pub fn may_have_fixed_tree(&self) -> bool {
        let varies =
            |part: &DrafterPart| part.name.weights() == DrafterWeights::None && part.name != DrafterName::Plain;
        !matches!(&self.parts[..], [_, _, ..]) && !self.parts.iter().any(varies)
    }

    /// Whether no part needs weights besides the backbone's.
    pub fn is_without_weights(&self) -> bool {
        self.parts.iter().all(|part| part.name.weights() == DrafterWeights::None && part.name != DrafterName::Plain)
    }

    /// Whether some part has no weights: then the step times of the machine choose how many guesses are verified.
    pub fn is_sized_by_times(&self) -> bool {
        self.parts.iter().any(|part| part.name.weights() == DrafterWeights::None && part.name != DrafterName::Plain)
    }

    /// Whether a draft model drafts.
    pub fn has_model(&self) -> bool {
        self.parts.iter().any(|part| part.name == DrafterName::Model)
    }

    /// The part that drafts with heads.
    pub fn heads(&self) -> Option<&DrafterPart> {
        self.parts.iter().find(|part| part.name.weights() == DrafterWeights::Heads)
    }

    pub fn heads_path(&self) -> Option<&Path> {
        self.heads()?.path.as_deref()
    }

    /// Gives a path behind the last name to the part that needs one: `hydra+ngram:PATH` is `hydra:PATH+ngram`.
    fn with_paths_in_place(mut self) -> Result<Self, String> {
        for at in 0..self.parts.len() {
            if self.parts[at].name.weights() != DrafterWeights::None {
                continue;
            }
            let Some(path) = self.parts[at].path.take() else { continue };
            let needs = |part: &&mut DrafterPart| part.name.weights() != DrafterWeights::None && part.path.is_none();
            match self.parts[..at].iter_mut().find(needs) {
                Some(part) => part.path = Some(path),
                None => return Err(format!("{} has no weights; drop :{}", self.parts[at].name.text(), path.display())),
            }
        }
        Ok(self)
    }

    fn check(&self) -> Result<(), String> {
        let is_joined = self.parts.len() > 1;
        if self.parts.len() > MAX_DRAFTERS {
            return Err(format!("{} drafters; at most {MAX_DRAFTERS} can be joined", self.parts.len()));
        }
        for (at, part) in self.parts.iter().enumerate() {
            if is_joined && part.name == DrafterName::Plain {
                return Err("plain is decoding without a drafter; it cannot be joined with one".into());
            }
            if part.name == DrafterName::Model && part.path.is_none() {
                return Err("model needs a path: model:PATH".into());
            }
            let is_same =
                |other: &DrafterPart| other == part || other.name == part.name && part.name != DrafterName::Model;
            if self.parts[..at].iter().any(is_same) {
                return Err(format!("{part} is joined with itself"));
            }
        }
        let heads = self.parts.iter().filter(|part| part.name.weights() == DrafterWeights::Heads);
        match heads.map(|part| part.name.text()).collect::<Vec<_>>()[..] {
            [one, other, ..] => Err(format!("{one} and {other} cannot be joined; join heads with ngram, for example")),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for DrafterPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.text())?;
        self.path.iter().try_for_each(|path| write!(f, ":{}", path.display()))
    }
}

impl fmt::Display for DrafterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.parts.iter().map(ToString::to_string).collect();
        f.write_str(&parts.join("+"))
    }
}

impl FromStr for DrafterSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = Some(text);
        while let Some(text) = rest {
            let (name, after) = leading_name(text).ok_or_else(|| unknown(text))?;
            let (path, next) = match after.strip_prefix(':') {
                Some(after) => until_next_name(after),
                None => ("", after.strip_prefix('+')),
            };
            if path.is_empty() && after.starts_with(':') {
                return Err(format!("no path after \"{0}:\"; expected {0}:PATH", name.text()));
            }
            parts.push(DrafterPart { name, path: (!path.is_empty()).then(|| path.into()) });
            rest = next;
        }
        let spec = Self { parts }.with_paths_in_place()?;
        spec.check()?;
        Ok(spec)
    }
}

/// The name at the start of `text` and what follows it: nothing, `:…` or `+…`. The longest name that fits: `hydra++` begins with `hydra`.
fn leading_name(text: &str) -> Option<(DrafterName, &str)> {
    let fits = |(name, word): (DrafterName, &str)| {
        let after = text.strip_prefix(word)?;
        (after.is_empty() || after.starts_with([':', '+'])).then_some((name, after))
    };
    NAMES.into_iter().filter_map(fits).min_by_key(|(_, after)| after.len())
}

/// A path and what is joined to it: a path ends where `+` and a name follow, so other paths may contain `+`.
fn until_next_name(text: &str) -> (&str, Option<&str>) {
    let joins = |&(at, _): &(usize, &str)| leading_name(&text[at + 1..]).is_some();
    match text.match_indices('+').find(joins) {
        Some((at, _)) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    }
}

fn unknown(text: &str) -> String {
    let word = &text[..text.find([':', '+']).unwrap_or(text.len())];
    let names: Vec<&str> = NAMES.iter().map(|(_, name)| *name).filter(|name| *name != "plain").collect();
    format!(
        "no drafter {word:?}; expected {}, NAME:PATH for heads of their own (model always needs one), or several joined by +",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> DrafterSpec {
        text.parse().unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    fn refused(text: &str) -> String {
        text.parse::<DrafterSpec>().expect_err(text)
    }

    #[test]
    fn names_paths_and_joins_come_apart_again() {
        for text in [
            "medusa",
            "hydra++",
            "ngram",
            "model:/m/a",
            "medusa:owner/name@rev",
            "hydra:C:/heads",
            "medusa+ngram",
            "hydra+ngram",
            "hydra+++ngram",
            "hydra++:a/b+ngram",
            "hydra:a+b/c",
            "model:a+model:b",
        ] {
            assert_eq!(parsed(text).to_string(), text);
        }
        let names = |text: &str| parsed(text).parts().iter().map(|part| part.name.text()).collect::<Vec<_>>().join(" ");
        assert_eq!(names("hydra+++ngram"), "hydra++ ngram");
        assert_eq!(names("hydra:a+b/c"), "hydra");
        assert_eq!(
            (names("model:a+model:b"), parsed("model:a+model:b").name()),
            ("model model".into(), "model+model".into())
        );
    }

    #[test]
    fn a_path_at_the_end_belongs_to_the_part_with_weights() {
        assert_eq!(parsed("hydra+ngram:h").to_string(), "hydra:h+ngram");
        assert_eq!(parsed("hydra+ngram:h").heads_path(), Some(Path::new("h")));
        assert_eq!(parsed("ngram").heads_path(), None);
    }

    #[test]
    fn what_is_no_drafter_is_refused_with_the_accepted_names() {
        let unknown = refused("medusae");
        assert!(
            unknown.contains("no drafter \"medusae\"; expected medusa, hydra, hydra++, eagle3, ngram, lookahead"),
            "{unknown}"
        );
        assert!(!unknown.contains("plain"), "{unknown}");
        assert!(refused("medusa+").contains("no drafter \"\"") && refused("").contains("no drafter \"\""));
        let models = (0..=MAX_DRAFTERS).map(|at| format!("model:{at}")).collect::<Vec<_>>().join("+");
        assert!(refused(&models).contains("at most 15 can be joined"));
        assert!(refused("hydra++ngram").contains("no drafter \"\""));
        assert!(refused("medusa+lookup").contains("no drafter \"lookup\""));
        assert!(refused("ngram:x").contains("ngram has no weights; drop :x"));
        assert!(refused("hydra:a+ngram:b").contains("ngram has no weights; drop :b"));
        assert!(refused("medusa:").contains("expected medusa:PATH"));
        assert!(refused("model").contains("model:PATH"));
        assert!(refused("plain+ngram").contains("cannot be joined"));
        assert!(refused("ngram+ngram").contains("ngram is joined with itself"));
        assert!(refused("model:a+ngram+model:a").contains("model:a is joined with itself"));
        assert!(refused("medusa:a+hydra:b").contains("medusa and hydra cannot be joined"));
    }
}
