//! `--drafter`: what proposes the guesses, and the acceptance rule.

use clap::{Args, ValueEnum};

use super::UsageError;
use super::decoder::Decoder;
use crate::draft::Drafter;
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::ngram::NgramDrafter;
use crate::tree::accept::Acceptance;
use crate::tree::sparse_tree::SparseTree;

/// Flags of verbs that decode with a drafter.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Decoding")]
pub struct DrafterFlags {
    /// What drafts the guesses [default: medusa with --heads, else none].
    #[arg(long, value_enum, value_name = "DRAFTER")]
    pub drafter: Option<DrafterName>,
}

/// `--drafter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrafterName {
    /// Medusa heads (needs --heads).
    Medusa,
    /// Prompt lookup: proposes what followed earlier occurrences of the last tokens. Needs no heads; pays off where answers repeat
    /// the prompt, as in summaries and edits.
    Ngram,
}

impl DrafterFlags {
    /// Rejects conflicting flags before anything is loaded.
    ///
    /// # Errors
    /// [`UsageError`].
    pub fn check(self, has_heads: bool, has_tree: bool) -> Result<(), UsageError> {
        match self.drafter {
            Some(DrafterName::Medusa) if !has_heads => Err(UsageError("--drafter medusa needs --heads".into())),
            Some(DrafterName::Ngram) if has_tree => {
                Err(UsageError("--drafter ngram builds its own tree at every step; drop --tree".into()))
            }
            _ => Ok(()),
        }
    }

    /// The drafter, `None` for plain decoding. `tree` overrides the decoder's.
    ///
    /// # Errors
    /// If heads, tree and backbone do not fit each other.
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

/// A drafter with its acceptance rule.
#[derive(Debug, Clone)]
pub struct Drafts<'a> {
    pub drafter: ReadyDrafter<'a>,
    pub acceptance: Acceptance,
}

/// A drafter before its first prompt.
#[derive(Debug, Clone)]
pub enum ReadyDrafter<'a> {
    /// Heads and their tree.
    Medusa(MedusaDrafter<'a>),
    /// Prompt lookup.
    Ngram,
}

impl<'a> Drafts<'a> {
    /// The decoder's heads, if any. `tree` overrides the decoder's.
    ///
    /// # Errors
    /// If heads, tree and backbone do not fit each other.
    pub fn of_heads(
        decoder: &'a Decoder,
        tree: Option<&'a SparseTree>,
        acceptance: Acceptance,
    ) -> anyhow::Result<Option<Self>> {
        let Some((heads, own)) = &decoder.medusa else { return Ok(None) };
        let drafter = MedusaDrafter::new(&decoder.backbone, heads, tree.unwrap_or(own))?;
        Ok(Some(Self { drafter: ReadyDrafter::Medusa(drafter), acceptance }))
    }

    /// The drafter for engines that draft on the host.
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

    /// Most guesses that one step verifies.
    pub fn max_nodes(&self) -> usize {
        match &self.drafter {
            ReadyDrafter::Medusa(drafter) => drafter.tree().choices().len(),
            ReadyDrafter::Ngram => NgramDrafter::max_nodes(),
        }
    }
}
