//! `--drafter` and `--draft-tokens`.

use std::num::NonZeroUsize;
use std::path::Path;

use clap::Args;

use super::UsageError;
use super::numbers::above_zero;
use crate::session::drafter::plan::DrafterPlan;
use crate::session::drafter::spec::DrafterSpec;
use crate::session::error::SessionError;

/// Flags of verbs that decode with a drafter.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Decoding")]
pub struct DrafterFlags {
    /// What drafts the guesses: medusa, hydra or hydra++ (heads), eagle3 (a layer), or model:PATH (a smaller model with the same vocabulary). Without
    /// training: ngram (prompt lookup: proposes what followed earlier occurrences of the last tokens; pays off where answers repeat the
    /// prompt, as in summaries and edits), recycling (the tokens that were probable after the same token before) or lookahead (n-grams
    /// from a window of guesses beside the text). A+B joins the guesses of drafters in one tree. Heads are those of --heads, or of their
    /// own path, as in medusa:PATH; a PATH is a folder or Hub id [default: the drafter that --heads were trained for, else none].
    #[arg(long, value_name = "DRAFTER")]
    pub drafter: Option<DrafterSpec>,
    /// How many tokens a draft model guesses at each step, unless --tree gives it a tree [default: 4].
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub draft_tokens: Option<NonZeroUsize>,
}

impl DrafterFlags {
    /// The drafter to load, `None` for plain decoding.
    ///
    /// # Errors
    /// As [`DrafterPlan::new`].
    pub fn plan(&self, heads: Option<&Path>, tree: Option<&Path>) -> Result<Option<DrafterPlan>, SessionError> {
        let plan = DrafterPlan::new(self.drafter.as_ref(), heads, tree)?;
        if plan.is_none() && self.draft_tokens.is_some() {
            return Err(UsageError("--draft-tokens needs --drafter model:PATH".into()).into());
        }
        Ok(plan.map(|plan| plan.with_draft_tokens(self.draft_tokens)).transpose()?)
    }
}
