//! What proposes the guesses, and the acceptance rule.

use std::num::NonZeroUsize;
use std::sync::Arc;

use self::loaded::LoadedDrafter;
use self::spec::DrafterName;
use crate::draft::Drafter;
use crate::draft::by_load::LoadDrafter;
use crate::draft::heads_drafter::HeadsDrafter;
use crate::draft::joined::JoinedDrafter;
use crate::draft::levels::LevelDrafter;
use crate::draft::lookahead::{LookaheadDrafter, LookaheadSize};
use crate::draft::medusa::drafter::DraftError;
use crate::draft::model::Guessing;
use crate::draft::ngram::NgramDrafter;
use crate::draft::recycling::RecyclingDrafter;
use crate::engine::cuda::draft::DeviceDraft;
use crate::engine::cuda::error::CudaError;
use crate::model::llama::Llama;
use crate::tree::accept::Acceptance;
use crate::tree::guess_tree::GuessTree;
use crate::tree::row_times::RowTimes;
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

/// A drafter before its first prompt. Drafters without weights carry their largest number of guesses.
#[derive(Debug)]
pub enum ReadyDrafter<'a> {
    /// Heads, and the tree that they fill.
    Heads(HeadsDrafter<'a>, &'a GuessTree),
    /// Prompt lookup.
    Ngram(NgramDrafter<'a>, usize),
    /// A draft model, and the tree that it fills.
    Model(LevelDrafter<'a>, &'a GuessTree),
    /// Successors of tokens.
    Recycling(RecyclingDrafter<'a>, usize),
    /// A Jacobi window.
    Lookahead(LookaheadDrafter<'a>, usize),
    /// Several drafters in one tree, or one whose guesses are chosen by their worth.
    Joined {
        parts: Vec<ReadyDrafter<'a>>,
        backbone: &'a Llama,
        /// Most guesses.
        nodes: usize,
        /// Step times by which the number of guesses is selected at each step; `None` to use all guesses.
        times: Option<Arc<RowTimes>>,
    },
}

impl<'a> ReadyDrafter<'a> {
    /// Prepares a loaded drafter for an acceptance rule; `tree` replaces the tree of its heads.
    ///
    /// # Errors
    /// If heads, tree and backbone do not fit each other.
    pub fn new(
        backbone: &'a Llama,
        loaded: &'a LoadedDrafter,
        tree: Option<&'a GuessTree>,
        acceptance: Acceptance,
    ) -> Result<Self, DraftError> {
        // Only rejection takes into account that guesses were drawn, and only from a single model.
        let draws = acceptance == Acceptance::Rejection && loaded.spec.parts().len() == 1;
        let guessing = if draws { Guessing::Drawn } else { Guessing::Best };
        let part = |at: usize| Self::of_part(at, backbone, loaded, tree, guessing);
        if loaded.spec.parts().len() == 1 && loaded.row_times.is_none() && loaded.nodes.is_none() {
            return part(0);
        }
        let parts: Vec<Self> = (0..loaded.spec.parts().len()).map(part).collect::<Result<_, _>>()?;
        let nodes = loaded.nodes.map(NonZeroUsize::get);
        let nodes = nodes.unwrap_or_else(|| parts.iter().map(Self::max_nodes).max().unwrap_or(0));
        Ok(Self::Joined { parts, backbone, nodes, times: loaded.row_times.clone() })
    }

    /// Part `at` of a loaded drafter.
    fn of_part(
        at: usize,
        backbone: &'a Llama,
        loaded: &'a LoadedDrafter,
        tree: Option<&'a GuessTree>,
        guessing: Guessing,
    ) -> Result<Self, DraftError> {
        let (parts, times) = (loaded.spec.parts(), loaded.row_times.as_deref());
        let most = times.map(|times| sizes::most_guesses(parts[at].name, times));
        Ok(match parts[at].name {
            DrafterName::Ngram => Self::Ngram(NgramDrafter::new(backbone), most.unwrap_or(NgramDrafter::max_nodes())),
            DrafterName::Recycling => {
                let most = most.unwrap_or(RecyclingDrafter::max_nodes());
                Self::Recycling(RecyclingDrafter::new(backbone).with_nodes(CHOICES * most), most)
            }
            DrafterName::Lookahead => {
                let size = times.map_or(LookaheadSize::PUBLISHED, sizes::lookahead_size);
                Self::Lookahead(LookaheadDrafter::new(backbone, size), most.unwrap_or(size.max_nodes()))
            }
            DrafterName::Model => {
                let before = parts[..at].iter().filter(|part| part.name == DrafterName::Model).count();
                let model = &loaded.models[before];
                Self::Model(model.drafter(backbone, guessing), model.tree())
            }
            _ => {
                let (heads, own) = loaded.heads.as_ref().expect("the plan of a drafter with heads has heads");
                let tree = tree.unwrap_or(own);
                Self::Heads(HeadsDrafter::new(backbone, heads, tree)?, tree)
            }
        })
    }

    /// The drafter for engines that draft on the host.
    pub fn on_host(self) -> Box<dyn Drafter + 'a> {
        match self {
            Self::Heads(drafter, _) => drafter.on_host(),
            Self::Ngram(drafter, _) => Box::new(drafter),
            Self::Model(drafter, _) => Box::new(drafter),
            Self::Recycling(drafter, _) => Box::new(drafter),
            Self::Lookahead(drafter, _) => Box::new(drafter),
            Self::Joined { parts, backbone, nodes, times } => {
                let parts = parts.into_iter().map(Self::on_host).collect();
                let joined = JoinedDrafter::new(backbone, parts, nodes);
                Box::new(match times {
                    Some(times) => joined.with_row_times(times),
                    None => joined,
                })
            }
        }
    }

    /// Heads with their tree, for an engine that drafts on the device.
    ///
    /// # Errors
    /// [`CudaError::Drafter`] for other drafters, and for trees that are chosen at each step.
    pub fn on_device(&self) -> Result<DeviceDraft<'a>, CudaError> {
        match self {
            Self::Heads(drafter, _) => {
                drafter.on_device().ok_or(CudaError::Drafter("trees that are chosen at each step"))
            }
            other => Err(CudaError::Drafter(other.described())),
        }
    }

    /// The tree, if it is the same at every step.
    pub fn tree(&self) -> Option<&'a SparseTree> {
        match self {
            Self::Heads(_, tree) | Self::Model(_, tree) => tree.as_static(),
            Self::Ngram(..) | Self::Recycling(..) | Self::Lookahead(..) | Self::Joined { .. } => None,
        }
    }

    /// Most guesses that one step verifies.
    pub fn max_nodes(&self) -> usize {
        match self {
            Self::Heads(_, tree) | Self::Model(_, tree) => tree.nodes(),
            Self::Ngram(_, nodes)
            | Self::Recycling(_, nodes)
            | Self::Lookahead(_, nodes)
            | Self::Joined { nodes, .. } => *nodes,
        }
    }

    /// What drafts, for people.
    pub fn described(&self) -> &'static str {
        match self {
            Self::Heads(..) => "heads",
            Self::Ngram(..) => "prompt lookup",
            Self::Model(..) => "a draft model",
            Self::Recycling(..) => "token recycling",
            Self::Lookahead(..) => "lookahead",
            Self::Joined { parts, .. } if parts.len() == 1 => parts[0].described(),
            Self::Joined { .. } => "joined drafters",
        }
    }
}

impl<'a> Drafts<'a> {
    /// A loaded drafter with an acceptance rule.
    ///
    /// # Errors
    /// As [`ReadyDrafter::new`].
    pub fn new(backbone: &'a Llama, loaded: &'a LoadedDrafter, acceptance: Acceptance) -> Result<Self, DraftError> {
        Ok(Self { drafter: ReadyDrafter::new(backbone, loaded, None, acceptance)?, acceptance })
    }

    /// A loaded drafter for many texts at a time, whose tree depends on their number if its file has several, and the most guesses of a text in one
    /// step.
    ///
    /// # Errors
    /// As [`ReadyDrafter::new`].
    pub fn for_batches(
        backbone: &'a Llama,
        loaded: &'a LoadedDrafter,
        acceptance: Acceptance,
    ) -> Result<(Box<dyn Drafter + 'a>, usize), DraftError> {
        let several =
            loaded.by_load.as_ref().filter(|trees| loaded.spec.parts().len() == 1 && trees.choices().len() > 1);
        let (Some((heads, _)), Some(trees)) = (&loaded.heads, several) else {
            let drafter = ReadyDrafter::new(backbone, loaded, None, acceptance)?;
            let guesses = drafter.max_nodes();
            return Ok((drafter.on_host(), guesses));
        };
        let parts = trees.try_map(|tree| Ok::<_, DraftError>(HeadsDrafter::new(backbone, heads, tree)?.on_host()))?;
        let guesses = trees.choices().iter().filter_map(|choice| choice.tree.as_ref()).map(GuessTree::nodes).max();
        Ok((Box::new(LoadDrafter::new(backbone, parts)), guesses.unwrap_or(0)))
    }

    /// The drafter for engines that draft on the host.
    pub fn on_host(self) -> (Box<dyn Drafter + 'a>, Acceptance) {
        (self.drafter.on_host(), self.acceptance)
    }
}
