//! What proposes the guesses, and the acceptance rule.

use std::num::NonZeroUsize;

use self::loaded::LoadedDrafter;
use self::spec::DrafterName;
use crate::draft::Drafter;
use crate::draft::by_load::LoadDrafter;
use crate::draft::error::DraftError;
use crate::draft::joined::JoinedDrafter;
use crate::draft::lookahead::{LookaheadDrafter, LookaheadSize};
use crate::draft::model::Guessing;
use crate::draft::ngram::NgramDrafter;
use crate::draft::recycling::RecyclingDrafter;
use crate::draft::trained::TrainedDrafter;
use crate::engine::cuda::draft::DeviceDraft;
use crate::engine::cuda::error::CudaError;
use crate::model::llama::Llama;
use crate::tree::accept::Acceptance;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;

pub mod loaded;
pub mod model;
pub mod plan;
pub mod row_times;
pub mod sizes;
pub mod spec;

/// A drafter with its acceptance rule.
#[derive(Debug)]
pub struct Drafts<'a> {
    pub drafter: ReadyDrafter<'a>,
    pub acceptance: Acceptance,
}

/// A drafter whose guesses are selected by their worth proposes this many times the largest selection.
const CHOICES: usize = 2;

/// A drafter before its first prompt.
#[derive(Debug)]
pub struct ReadyDrafter<'a> {
    drafter: Box<dyn Drafter + 'a>,
    described: &'static str,
    max_nodes: usize,
    /// Of a drafter with weights.
    tree: Option<&'a GuessTree>,
    trained: Option<&'a dyn TrainedDrafter>,
}

impl<'a> ReadyDrafter<'a> {
    /// A drafter with its name for people, and its most guesses in a step.
    pub fn new(drafter: impl Drafter + 'a, described: &'static str, max_nodes: usize) -> Self {
        Self { drafter: Box::new(drafter), described, max_nodes, tree: None, trained: None }
    }

    /// A trained drafter, and the tree that it fills.
    ///
    /// # Errors
    /// If drafter, tree and backbone do not fit each other.
    pub fn trained(
        backbone: &'a Llama,
        trained: &'a dyn TrainedDrafter,
        tree: &'a GuessTree,
    ) -> Result<Self, DraftError> {
        let drafter = trained.drafter(backbone, tree)?;
        let (described, max_nodes) = ("heads", tree.nodes());
        Ok(Self { drafter, described, max_nodes, tree: Some(tree), trained: Some(trained) })
    }

    /// Prepares a loaded drafter for an acceptance rule; `tree` replaces the tree of its heads.
    ///
    /// # Errors
    /// If drafter, tree and backbone do not fit each other.
    pub fn from_loaded(
        backbone: &'a Llama,
        loaded: &'a LoadedDrafter,
        tree: Option<&'a GuessTree>,
        acceptance: Acceptance,
    ) -> Result<Self, DraftError> {
        // Only rejection takes into account that guesses were drawn, and only from a single model.
        let draws = acceptance == Acceptance::Rejection && loaded.spec.parts().len() == 1;
        let guessing = if draws { Guessing::Drawn } else { Guessing::Best };
        let part = |at: usize| Self::from_part(at, backbone, (loaded, tree), guessing);
        if loaded.spec.parts().len() == 1 && loaded.row_times.is_none() && loaded.nodes.is_none() {
            return part(0);
        }
        let parts: Vec<Self> = (0..loaded.spec.parts().len()).map(part).collect::<Result<_, _>>()?;
        Ok(Self::joined(backbone, parts, loaded))
    }

    /// Several drafters in one tree, or one whose guesses are chosen by their worth.
    fn joined(backbone: &'a Llama, parts: Vec<Self>, loaded: &LoadedDrafter) -> Self {
        let each = parts.iter().map(|part| part.max_nodes);
        // The trees of heads are as large as pays; what others guess beside them may be worth its time, too.
        let is_paced = loaded.row_times.is_some() && !loaded.spec.is_without_weights();
        let most = if is_paced { each.sum() } else { each.max().unwrap_or(0) };
        let nodes = loaded.nodes.map_or(most, NonZeroUsize::get);
        let described = if let [one] = &parts[..] { one.described } else { "joined drafters" };
        let drafters = parts.into_iter().map(|part| part.drafter).collect();
        let joined = JoinedDrafter::new(backbone, drafters, nodes);
        let joined = match &loaded.row_times {
            Some(times) => joined.with_row_times(times.clone()),
            None => joined,
        };
        Self::new(joined, described, nodes)
    }

    /// Part `at` of a loaded drafter.
    fn from_part(
        at: usize,
        backbone: &'a Llama,
        (loaded, tree): (&'a LoadedDrafter, Option<&'a GuessTree>),
        guessing: Guessing,
    ) -> Result<Self, DraftError> {
        let (parts, times) = (loaded.spec.parts(), loaded.row_times.as_deref());
        let most = |otherwise: usize| times.map_or(otherwise, |times| sizes::most_guesses(parts[at].name, times));
        Ok(match parts[at].name {
            DrafterName::Ngram => {
                Self::new(NgramDrafter::new(backbone), "prompt lookup", most(NgramDrafter::max_nodes()))
            }
            DrafterName::Recycling => {
                let most = most(RecyclingDrafter::max_nodes());
                Self::new(RecyclingDrafter::new(backbone).with_nodes(CHOICES * most), "token recycling", most)
            }
            DrafterName::Lookahead => {
                let size = times.map_or(LookaheadSize::PUBLISHED, sizes::lookahead_size);
                Self::new(LookaheadDrafter::new(backbone, size), "lookahead", most(size.max_nodes()))
            }
            DrafterName::Model => {
                let before = parts[..at].iter().filter(|part| part.name == DrafterName::Model).count();
                let model = &loaded.models[before];
                let drafter = Self::new(model.drafter(backbone, guessing), "a draft model", model.tree().nodes());
                Self { tree: Some(model.tree()), ..drafter }
            }
            _ => {
                let (trained, own) = loaded.heads.as_ref().expect("the plan of a drafter with heads has heads");
                Self::trained(backbone, &**trained, tree.unwrap_or(own))?
            }
        })
    }

    /// The drafter for engines that draft on the host.
    pub fn on_host(self) -> Box<dyn Drafter + 'a> {
        self.drafter
    }

    /// The drafter with its tree, for an engine that drafts on the device.
    ///
    /// # Errors
    /// [`CudaError::Drafter`] for drafters that need the host, and for trees that are chosen at each step.
    pub fn on_device(&self) -> Result<DeviceDraft<'a>, CudaError> {
        let Some(trained) = self.trained else { return Err(CudaError::Drafter(self.described)) };
        let tree = self.tree().ok_or(CudaError::Drafter("trees that are chosen at each step"))?;
        trained.on_device(tree).ok_or(CudaError::Drafter(self.described))
    }

    /// The tree, if it is the same at every step.
    pub fn tree(&self) -> Option<&'a SparseTree> {
        self.tree?.as_static()
    }

    /// Most guesses that one step verifies.
    pub fn max_nodes(&self) -> usize {
        self.max_nodes
    }

    /// What drafts, for people.
    pub fn described(&self) -> &'static str {
        self.described
    }
}

impl<'a> Drafts<'a> {
    /// A loaded drafter with an acceptance rule.
    ///
    /// # Errors
    /// As [`ReadyDrafter::from_loaded`].
    pub fn new(backbone: &'a Llama, loaded: &'a LoadedDrafter, acceptance: Acceptance) -> Result<Self, DraftError> {
        Ok(Self { drafter: ReadyDrafter::from_loaded(backbone, loaded, None, acceptance)?, acceptance })
    }

    /// A loaded drafter for many texts at a time, whose tree depends on their number if its file has several, and the most guesses of a text in one
    /// step.
    ///
    /// # Errors
    /// As [`ReadyDrafter::from_loaded`].
    pub fn for_batches(
        backbone: &'a Llama,
        loaded: &'a LoadedDrafter,
        acceptance: Acceptance,
    ) -> Result<(Box<dyn Drafter + 'a>, usize), DraftError> {
        let several =
            loaded.by_load.as_ref().filter(|trees| loaded.spec.parts().len() == 1 && trees.choices().len() > 1);
        let (Some((heads, _)), Some(trees)) = (&loaded.heads, several) else {
            let drafter = ReadyDrafter::from_loaded(backbone, loaded, None, acceptance)?;
            let guesses = drafter.max_nodes();
            return Ok((drafter.on_host(), guesses));
        };
        let parts = trees.try_map(|tree| heads.drafter(backbone, tree))?;
        let guesses = trees.choices().iter().filter_map(|choice| choice.tree.as_ref()).map(GuessTree::nodes).max();
        Ok((Box::new(LoadDrafter::new(backbone, parts)), guesses.unwrap_or(0)))
    }

    /// The drafter for engines that draft on the host.
    pub fn on_host(self) -> (Box<dyn Drafter + 'a>, Acceptance) {
        (self.drafter.on_host(), self.acceptance)
    }
}
