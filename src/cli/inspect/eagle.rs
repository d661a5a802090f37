//! EAGLE-3 drafters.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::draft::eagle::file::EagleFile;
use crate::draft::eagle::weights::EAGLE3;
use crate::draft::error::DrafterError;
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::PublishedHeadsConfig;

#[derive(Debug, Serialize)]
pub(super) struct EagleFound {
    architecture: &'static str,
    ttt_steps: usize,
    /// Absent: those that servers take by default.
    tap_layers: Option<Vec<usize>>,
    /// Absent: all tokens can be guessed.
    draft_vocab_size: Option<usize>,
    parameters: u64,
    best: Option<BestEvaluation>,
}

impl EagleFound {
    /// `None` if the path holds something else.
    ///
    /// # Errors
    /// A damaged file.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, DrafterError> {
        if !EagleFile::is_in(path) {
            return Ok(None);
        }
        let file = EagleFile::open(path)?;
        let config = file.written_config();
        Ok(Some(Self {
            architecture: EAGLE3,
            ttt_steps: file.steps(),
            tap_layers: config.and_then(PublishedHeadsConfig::tap_layers),
            draft_vocab_size: file.tokens().map(<[i64]>::len),
            parameters: file.num_parameters(),
            best: config.and_then(PublishedHeadsConfig::best),
        }))
    }

    pub(super) fn line(&self) -> String {
        let taps =
            self.tap_layers.as_ref().map_or_else(|| "the default layers".to_owned(), |taps| format!("layers {taps:?}"));
        let vocabulary =
            self.draft_vocab_size.map_or_else(|| "the whole vocabulary".to_owned(), |size| format!("{size} tokens"));
        let Self { architecture, ttt_steps, parameters, .. } = self;
        format!(
            "{architecture}, trained for chains of {ttt_steps} guesses on {taps}, {vocabulary}: {parameters} parameters"
        )
    }

    pub(super) fn text(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "drafter      {}", self.line())?;
        self.best.iter().try_for_each(|best| writeln!(out, "best         {best}"))
    }
}
