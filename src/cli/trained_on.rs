//! Says how many prompts of a measurement its heads were trained on: on those they guess better than on others.

use std::path::Path;

use rayon::prelude::*;

use super::CommonFlags;
use crate::data::chat_template::ChatTemplate;
use crate::data::prompts::{self, Prompt};
use crate::data::store::RowStore;
use crate::data::tokenize::TextTokenizer;
use crate::draft::heads::import::folder_of;
use crate::formats::FormatError;
use crate::formats::trained_prompts::{MeasuredPrompts, TrainedPrompts};

/// What heads were trained on, if they say it.
///
/// # Errors
/// A file that cannot be read, or is damaged.
pub(super) fn for_heads(heads: &Path) -> Result<Option<TrainedPrompts>, FormatError> {
    TrainedPrompts::for_heads(folder_of(heads))
}

/// Counts the prompts whose first turn was trained on. Those that cannot be rendered are none: they are refused with their place where they are decoded.
///
/// # Errors
/// A tokenizer that cannot be read.
pub(super) fn count_prompts(
    trained: &TrainedPrompts,
    all: &[Prompt],
    backbone: &Path,
    template: Option<&ChatTemplate>,
) -> anyhow::Result<MeasuredPrompts> {
    let tokenizer = TextTokenizer::load(backbone)?;
    let is_met =
        |prompt: &&Prompt| prompts::to_ids(&prompt.input, &tokenizer, template).is_ok_and(|ids| trained.have(&ids));
    Ok(MeasuredPrompts { count: all.len(), trained_on: all.par_iter().filter(is_met).count() })
}

/// Counts the rows whose prompt was trained on.
///
/// # Errors
/// A damaged token cache; a tokenizer that cannot be read.
pub(super) fn count_rows(
    trained: &TrainedPrompts,
    rows: &RowStore,
    backbone: &Path,
    template: Option<&ChatTemplate>,
) -> anyhow::Result<MeasuredPrompts> {
    let header = prompts::answer_header(TextTokenizer::load_if_there(backbone)?.as_ref(), template);
    let mut measured = MeasuredPrompts { count: rows.len(), trained_on: 0 };
    for row in rows.iter() {
        measured.trained_on += usize::from(trained.have(row?.prompt(&header)));
    }
    Ok(measured)
}

/// Says that prompts were trained on, if any were.
///
/// # Errors
/// That, with `--strict`.
pub(super) fn report(
    measured: Option<MeasuredPrompts>,
    heads: &str,
    is_strict: bool,
    common: &CommonFlags,
) -> anyhow::Result<()> {
    let Some(measured) = measured.filter(|measured| measured.trained_on > 0) else { return Ok(()) };
    let why = format!("{measured} were trained on by {heads}");
    anyhow::ensure!(
        !is_strict,
        "{why}; give prompts that were not, or leave out --strict for figures that are too good"
    );
    common.say(format_args!(
        "{why}: the figures below are too good; give prompts that were not (--strict makes this an error)"
    ));
    Ok(())
}
