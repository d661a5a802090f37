//! A drafter with its files, checked before the backbone is loaded.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::spec::{DrafterName, DrafterSpec};
use crate::bounds::TREE_NODES;
use crate::draft::error::DrafterError;
use crate::formats::run_folder::TREE;
use crate::session::error::{SessionError, UsageError};
use crate::session::opened::OpenedHeads;
use crate::tree::by_load::ByLoad;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::TreeFileError;

/// Prefix of a `--tree` value that is not a file.
const DYNAMIC: &str = "dynamic:";

/// A drafter and the files to load for it.
#[derive(Debug, Clone)]
pub struct DrafterPlan {
    pub spec: DrafterSpec,
    pub heads: Option<Rc<OpenedHeads>>,
    /// Folders of draft models.
    pub models: Vec<PathBuf>,
    /// Of the command line, else `tree.json` beside heads with a path of their own. `None`: a chain of each head's best guess, or of a
    /// draft model's.
    pub tree: Option<PlannedTree>,
    /// `--draft-tokens`.
    pub draft_tokens: Option<NonZeroUsize>,
}

/// `--tree`.
#[derive(Debug, Clone)]
pub enum PlannedTree {
    /// Of a file, and those for several texts at a time.
    Of { path: PathBuf, tree: GuessTree, by_load: ByLoad<GuessTree> },
    /// `dynamic:N`: chosen at each step from the guesses of all heads.
    Dynamic { nodes: NonZeroUsize },
}

impl PlannedTree {
    /// Whether `--tree` names no file.
    pub fn is_inline(flag: &Path) -> bool {
        flag.to_str().is_some_and(|flag| flag.starts_with(DYNAMIC))
    }

    /// Reads a file, or `dynamic:N`.
    ///
    /// # Errors
    /// [`UsageError`] for a bad N; a file that cannot be read.
    pub fn read(flag: &Path) -> Result<Self, SessionError> {
        let Some(nodes) = flag.to_str().and_then(|flag| flag.strip_prefix(DYNAMIC)) else {
            let (tree, file) = GuessTree::load(flag)?;
            let by_load = GuessTree::by_load(tree.clone(), &file)
                .map_err(|source| TreeFileError::Tree { path: flag.to_owned(), source })?;
            return Ok(Self::Of { path: flag.to_owned(), tree, by_load });
        };
        let bad = || format!("--tree {DYNAMIC}{nodes}: expected a number of nodes, from 1 to {TREE_NODES}");
        match nodes.parse::<NonZeroUsize>() {
            Ok(nodes) if nodes.get() <= TREE_NODES => Ok(Self::Dynamic { nodes }),
            _ => Err(UsageError(bad()).into()),
        }
    }

    /// Checks that `num_heads` heads with `top_k` guesses each can fill a file's trees.
    ///
    /// # Errors
    /// [`TreeFileError`] names the file.
    pub fn check_fits(&self, num_heads: usize, top_k: usize) -> Result<(), TreeFileError> {
        let Self::Of { path, tree, by_load } = self else { return Ok(()) };
        let by_texts = by_load.choices().iter().filter_map(|choice| choice.tree.as_ref());
        let fits = [tree].into_iter().chain(by_texts).try_for_each(|tree| tree.check_fits(num_heads, top_k));
        fits.map_err(|source| TreeFileError::Tree { path: path.clone(), source })
    }
}

impl DrafterPlan {
    /// The plan of `--drafter`, or without it of `--heads`; `None` for plain decoding.
    ///
    /// # Errors
    /// [`UsageError`] for conflicting flags; heads or a tree that cannot be read.
    pub fn new(
        spec: Option<&DrafterSpec>,
        heads: Option<&Path>,
        tree: Option<&Path>,
    ) -> Result<Option<Self>, SessionError> {
        let plan = match (spec, heads) {
            (Some(spec), _) => Self::from_spec(spec, heads)?,
            (None, Some(heads)) => Self::for_heads(OpenedHeads::open(heads)?)?,
            (None, None) if tree.is_some() => {
                return Err(UsageError("--tree needs --heads, or --drafter model:PATH".into()).into());
            }
            (None, None) => return Ok(None),
        };
        check_known(&plan.spec)?;
        if tree.is_some_and(|tree| !PlannedTree::is_inline(tree)) && plan.spec.is_without_weights() {
            let why = format!(
                "--drafter {} builds its own tree at every step; drop --tree, or give --tree dynamic:N, its most guesses in a step",
                plan.spec
            );
            return Err(UsageError(why).into());
        }
        let has_path = plan.spec.heads_path().is_some();
        let own = plan.heads.as_deref().filter(|_| has_path).and_then(|heads| heads.beside(TREE));
        let tree = tree.or(own.as_deref()).map(PlannedTree::read).transpose()?;
        Ok(Some(Self { tree, ..plan }))
    }

    /// With `--draft-tokens`.
    ///
    /// # Errors
    /// [`UsageError`] without a draft model, with a tree for it, which already determines how many tokens are drafted, or with more than a
    /// tree may have.
    pub fn with_draft_tokens(self, tokens: Option<NonZeroUsize>) -> Result<Self, UsageError> {
        match tokens {
            Some(_) if self.models.is_empty() => Err(UsageError(
                "--draft-tokens is the length of a draft model's chain; it needs --drafter model:PATH".into(),
            )),
            Some(_) if self.tree.is_some() && self.heads.is_none() => Err(UsageError(
                "--draft-tokens is the length of a chain, and --tree is a tree; drop one of them".into(),
            )),
            Some(tokens) if tokens.get() > TREE_NODES => {
                Err(UsageError(format!("--draft-tokens {tokens}: expected at most {TREE_NODES}")))
            }
            tokens => Ok(Self { draft_tokens: tokens, ..self }),
        }
    }

    /// The drafter that heads were trained for, without a tree.
    ///
    /// # Errors
    /// As [`OpenedHeads::drafter`].
    pub fn for_heads(heads: Rc<OpenedHeads>) -> Result<Self, UsageError> {
        Ok(Self { spec: heads.drafter()?, heads: Some(heads), models: vec![], tree: None, draft_tokens: None })
    }

    fn from_spec(spec: &DrafterSpec, heads: Option<&Path>) -> Result<Self, SessionError> {
        let models = spec.parts().iter().filter(|part| part.name == DrafterName::Model);
        let models: Vec<PathBuf> = models.filter_map(|part| part.path.clone()).collect();
        check_different(&models)?;
        let Some(part) = spec.heads() else {
            return Ok(Self { spec: spec.clone(), heads: None, models, tree: None, draft_tokens: None });
        };
        let path = match (spec.heads_path(), heads) {
            (Some(own), None) => own,
            (None, Some(heads)) => heads,
            (Some(_), Some(heads)) => {
                let why = format!("--drafter {spec} has heads of its own; drop --heads {}", heads.display());
                return Err(UsageError(why).into());
            }
            (None, None) => return Err(UsageError(format!("--drafter {spec} needs --heads")).into()),
        };
        let heads = OpenedHeads::open(path)?;
        let trained = heads.drafter()?;
        if !trained.is(part.name) {
            let why = format!("--drafter {spec}: the heads in {} are {} heads", path.display(), trained.name());
            return Err(UsageError(why).into());
        }
        Ok(Self { spec: spec.clone(), heads: Some(heads), models, tree: None, draft_tokens: None })
    }
}

/// The heads whose training decides how the backbone is loaded: the drafter's, else those that the caller names.
///
/// # Errors
/// As [`OpenedHeads::open`].
pub fn deciding_heads(
    plan: Option<&DrafterPlan>,
    heads: Option<&Path>,
) -> Result<Option<Rc<OpenedHeads>>, DrafterError> {
    match plan.and_then(|plan| plan.heads.clone()) {
        Some(heads) => Ok(Some(heads)),
        None => heads.map(OpenedHeads::open).transpose(),
    }
}

/// Refuses a draft model that is joined with itself by another path.
fn check_different(models: &[PathBuf]) -> Result<(), UsageError> {
    let folder = |model: &PathBuf| model.canonicalize().unwrap_or_else(|_| model.clone());
    for (at, model) in models.iter().enumerate() {
        if let Some(same) = models[..at].iter().find(|other| folder(other) == folder(model)) {
            let [same, model] = [same, model].map(|path| path.display());
            return Err(UsageError(format!("model:{same} and model:{model} are the same folder; drop one of them")));
        }
    }
    Ok(())
}

/// Refuses the drafters that this version cannot run.
fn check_known(spec: &DrafterSpec) -> Result<(), UsageError> {
    match spec.is(DrafterName::Plain) {
        true => {
            Err(UsageError("--drafter plain: plain decoding is the default without --heads; drop --drafter".into()))
        }
        false => Ok(()),
    }
}
