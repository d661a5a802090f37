//! The weights of a drafter, loaded for a backbone.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use super::model::{DRAFT_LEVELS, DRAFT_TOKENS, DraftModel, Target};
use super::plan::{DrafterPlan, PlannedTree};
use super::spec::DrafterSpec;
use crate::draft::trained::TrainedDrafter;
use crate::formats::tree::{DYNAMIC_TOP_K, DynamicTree};
use crate::plural::counted;
use crate::session::error::SessionError;
use crate::session::reporter::{LoadContext, Reporter};
use crate::tree::by_load::ByLoad;
use crate::tree::guess_tree::GuessTree;
use crate::tree::row_times::RowTimes;
use crate::tree::sparse_tree::SparseTree;

/// A drafter with everything that it was trained or given besides the backbone.
#[derive(Debug)]
pub struct LoadedDrafter {
    pub spec: DrafterSpec,
    /// A trained drafter and its tree.
    pub heads: Option<(Box<dyn TrainedDrafter>, GuessTree)>,
    /// The heads' trees for several texts at a time.
    pub by_load: Option<ByLoad<GuessTree>>,
    pub models: Vec<DraftModel>,
    /// The most guesses in a step that `--tree dynamic:N` gives to a drafter with a part without weights.
    pub nodes: Option<NonZeroUsize>,
    /// The step times by which guesses are chosen, if a part has no weights; `None` where there are [`LoadedDrafter::nodes`].
    pub row_times: Option<Arc<RowTimes>>,
}

impl LoadedDrafter {
    /// Parameters besides the backbone's.
    pub fn parameters(&self) -> u64 {
        let in_models: usize = self.models.iter().map(DraftModel::parameters).sum();
        self.heads.as_ref().map_or(0, |(heads, _)| heads.num_parameters()) + in_models as u64
    }
}

impl DrafterPlan {
    /// Loads the weights.
    ///
    /// # Errors
    /// An invalid file, or weights that do not fit the backbone.
    pub fn load(self, target: Target, context: LoadContext) -> Result<LoadedDrafter, SessionError> {
        let Self { spec, heads, models, tree, draft_tokens } = self;
        let draft_tree = match &tree {
            Some(PlannedTree::Of { tree, .. }) if heads.is_none() => tree.clone(),
            Some(PlannedTree::Dynamic { nodes }) if heads.is_none() => {
                GuessTree::Dynamic(DynamicTree { nodes: nodes.get(), depth: DRAFT_LEVELS, top_k: DYNAMIC_TOP_K })
            }
            _ => GuessTree::Static(SparseTree::chain(draft_tokens.unwrap_or(DRAFT_TOKENS).get())?),
        };
        let load = |folder: &PathBuf| DraftModel::load(folder, draft_tree.clone(), target, context);
        let models = models.iter().map(load).collect::<Result<_, _>>()?;
        let nodes = match &tree {
            Some(PlannedTree::Dynamic { nodes }) if spec.is_sized_by_times() => Some(*nodes),
            _ => None,
        };
        let by_load = match &tree {
            Some(PlannedTree::Of { by_load, .. }) if heads.is_some() => Some(by_load.clone()),
            _ => None,
        };
        let heads = heads.map(|opened| -> Result<_, SessionError> {
            let heads = opened.load(target.backbone, context)?;
            tree.iter().try_for_each(|tree| tree.check_fits(heads.reads().levels, heads.guessable()))?;
            let tree = match tree {
                Some(PlannedTree::Of { tree, .. }) => tree,
                Some(PlannedTree::Dynamic { nodes }) => GuessTree::Dynamic(limits(nodes, &*heads)),
                None => GuessTree::Static(chain_of(&*heads, context.reporter)?),
            };
            Ok((heads, tree))
        });
        Ok(LoadedDrafter { spec, heads: heads.transpose()?, by_load, models, nodes, row_times: None })
    }
}

/// Trees of `nodes` nodes that are chosen at each step from the guesses of all levels.
fn limits(nodes: NonZeroUsize, trained: &dyn TrainedDrafter) -> DynamicTree {
    let (depth, top_k) = (trained.reads().levels, DYNAMIC_TOP_K.min(trained.guessable()));
    DynamicTree { nodes: nodes.get(), depth, top_k }
}

/// The tree without `--tree`: a chain of each level's best guess.
fn chain_of(trained: &dyn TrainedDrafter, reporter: &dyn Reporter) -> Result<SparseTree, SessionError> {
    reporter.notice(&format_args!(
        "no --tree: using a chain of the best guesses of {}; `medusa tree` builds a better one",
        counted(trained.reads().levels, "head")
    ));
    Ok(SparseTree::chain(trained.reads().levels)?)
}
