//! How a verb ends: its error as text, and the exit status.

use std::error::Error;

use console::Term;

use super::CommonFlags;
use super::print::{shortened, visible};
use crate::data::chat_template::TemplateError;
use crate::recipe::RecipeError;
use crate::session::{SessionError, UsageError};
use crate::train::error::TrainError;

pub(super) const SUCCESS: u8 = 0;
pub(super) const FAILED: u8 = 1;
pub(super) const WRONG_USAGE: u8 = 2;
pub(super) const INTERRUPTED: u8 = 130; // 128 + SIGINT, as shells report it
pub(super) const STDOUT_CLOSED: u8 = 141; // 128 + SIGPIPE: what `| head` makes of `cat`

/// The user interrupted the work; the text says what was saved and how to continue. Exit status 130.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Interrupted(pub String);

/// Prints `error: …`, then a `caused by: …` line for each cause that the text does not contain yet: many errors quote
/// their cause.
pub(super) fn report(error: &anyhow::Error) {
    let mut message = format!("error: {error}");
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}\ncaused by: {cause}");
        }
    }
    CommonFlags::print(visible(&shortened(message)));
}

/// Ends the program with clap's text and status, on a terminal with its lines broken between words; clap breaks only those of help.
pub(super) fn refuse(error: &clap::Error) -> ! {
    if !error.use_stderr() || !Term::stderr().is_term() {
        error.exit()
    }
    let text = error.render();
    CommonFlags::print(
        if console::colors_enabled_stderr() { text.ansi().to_string() } else { text.to_string() }.trim_end(),
    );
    end(WRONG_USAGE)
}

pub(super) fn status(error: &anyhow::Error) -> u8 {
    let is_mistake = |error: &RecipeError| !matches!(error, RecipeError::Hub { .. }); // an unreachable Hub is no mistake in the recipe
    let is_usage = |cause: &(dyn Error + 'static)| {
        cause.is::<UsageError>()
            || cause.downcast_ref::<SessionError>().is_some_and(SessionError::is_usage)
            || cause.downcast_ref::<RecipeError>().is_some_and(is_mistake)
            || cause.downcast_ref::<TrainError>().is_some_and(TrainError::is_of_the_recipe)
            || cause.downcast_ref::<TemplateError>().is_some_and(TemplateError::is_no_template)
    };
    if error.chain().any(is_usage) { WRONG_USAGE } else { FAILED }
}

/// Ends the process and skips the libraries' destructors: libtorch's take half as long as loading it, and the kernel frees
/// the same memory. All that the verb itself held has been dropped before, and lines are flushed when they are printed.
pub fn end(status: u8) -> ! {
    signal_hook::low_level::exit(status.into())
}
