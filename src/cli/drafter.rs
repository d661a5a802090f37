//! `--drafter`: who guesses, and which guesses are accepted.

use clap::{Args, ValueEnum};

use super::UsageError;
use super::decoder::Decoder;
use crate::draft::Drafter;
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::ngram::NgramDrafter;
use crate::tree::accept::Acceptance;
use crate::tree::sparse_tree::SparseTree;

/// Who guesses.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Decoding")]
pub struct DrafterFlags {
    /// Who guesses tokens [default: medusa with --heads, else nobody].
    #[arg(long, value_enum, value_name = "DRAFTER")]
    pub drafter: Option<DrafterName>,
}

/// `--drafter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrafterName {
    /// Medusa heads (needs --heads).
    Medusa,
    /// Prompt lookup: what followed the last tokens where they stand earlier in the text. No heads, no training; pays where answers
    /// repeat the prompt, as summaries and edits do.
    Ngram,
}

impl DrafterFlags {
    /// Refuses flags that do not go together, before anything is loaded.
    ///
    /// # Errors
    /// [`UsageError`] says which.
    pub fn check(self, has_heads: bool, has_tree: bool) -> Result<(), UsageError> {
        match self.drafter {
            Some(DrafterName::Medusa) if !has_heads => {
                Err(UsageError("--drafter medusa guesses with heads: give it --heads".into()))
            }
            Some(DrafterName::Ngram) if has_tree => {
                Err(UsageError("--drafter ngram makes a tree of its own at every step; drop --tree".into()))
            }
            _ => Ok(()),
        }
    }

    /// The drafter; `None` is plain decoding. `tree` takes the place of the decoder's.
    ///
    /// # Errors
    /// When heads, tree and backbone do not fit each other.
    pub fn drafts<'a>(
        self,
        decoder: &'a Decoder,
        tree: Option<&'a SparseTree>,
        acceptance: Acceptance,
    ) -> anyhow::Result<Option<Drafts<'a>>> {
        match self.drafter {
            Some(DrafterName::Ngram) => Ok(Some(Drafts { drafter: ReadyDrafter::Ngram, acceptance })),
            Some(DrafterName::Medusa) | None => Drafts::of_heads(decoder, tree, acceptance),
        }
    }
}

/// A drafter, and which of its guesses are accepted.
#[derive(Debug, Clone)]
pub struct Drafts<'a> {
    /// Who guesses.
    pub drafter: ReadyDrafter<'a>,
    /// Which guesses are accepted.
    pub acceptance: Acceptance,
}

/// A drafter before it has seen a text.
#[derive(Debug, Clone)]
pub enum ReadyDrafter<'a> {
    /// Heads and tree, laid out.
    Medusa(MedusaDrafter<'a>),
    /// Prompt lookup.
    Ngram,
}

impl<'a> Drafts<'a> {
    /// The decoder's heads; `None` where it has none. `tree` takes the place of the decoder's.
    ///
    /// # Errors
    /// When heads, tree and backbone do not fit each other.
    pub fn of_heads(
        decoder: &'a Decoder,
        tree: Option<&'a SparseTree>,
        acceptance: Acceptance,
    ) -> anyhow::Result<Option<Self>> {
        let Some((heads, own)) = &decoder.medusa else { return Ok(None) };
        let drafter = MedusaDrafter::new(&decoder.backbone, heads, tree.unwrap_or(own))?;
        Ok(Some(Self { drafter: ReadyDrafter::Medusa(drafter), acceptance }))
    }

    /// For an engine that asks the host for guesses.
    pub fn on_host(self, decoder: &'a Decoder) -> (Box<dyn Drafter + 'a>, Acceptance) {
        let drafter: Box<dyn Drafter + 'a> = match self.drafter {
            ReadyDrafter::Medusa(drafter) => Box::new(drafter),
            ReadyDrafter::Ngram => Box::new(NgramDrafter::new(&decoder.backbone)),
        };
        (drafter, self.acceptance)
    }

    /// As `--drafter` spells it.
    pub fn name(&self) -> &'static str {
        match self.drafter {
            ReadyDrafter::Medusa(_) => "medusa",
            ReadyDrafter::Ngram => "ngram",
        }
    }

    /// Guesses of a tree at most.
    pub fn max_nodes(&self) -> usize {
        match &self.drafter {
            ReadyDrafter::Medusa(drafter) => drafter.tree().choices().len(),
            ReadyDrafter::Ngram => NgramDrafter::max_nodes(),
        }
    }
}
